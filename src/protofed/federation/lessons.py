"""What the clients of a slice learn from, cut into chunks of whole clients."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.privacy.draws import uniform
from protofed.slices.histories import Histories
from protofed.slices.windows import Windows, moved, take, training_windows, trimmed

GPU_WIDTH = 64  # up to this width a GPU has memory for all of them; a stack's activations grow with the width
GPU_STACK = 8  # a GPU launches the same kernels for so many times the clients that suit a core, and takes hardly longer


@dataclass(frozen=True, slots=True)
class ClientData:
    """The windows of the users who are active in a slice, user by user."""

    users: Int[Tensor, " A"]  # ascending
    windows: Windows
    starts: Int[Tensor, " A1"]  # user i owns windows starts[i] .. starts[i + 1] - 1

    def __len__(self) -> int:
        return len(self.users)


def client_data(
    past: Histories,
    positions: np.ndarray,
    *,
    length: int,
    stride: int,
    rng: np.random.Generator,
    newest: int | None = None,
) -> ClientData:
    """Windows over the events at these log positions; `newest` keeps only so many of each user's latest windows."""
    windows = training_windows(past, positions, length=length, stride=stride, rng=rng)
    order = torch.from_numpy(np.lexsort((windows.newest.numpy(), windows.users.numpy())))
    users = windows.users[order]
    if newest is not None and len(users):
        active, counts = torch.unique_consecutive(users, return_counts=True)
        from_the_end = torch.repeat_interleave(counts.cumsum(0), counts) - torch.arange(len(users))  # 1: the latest
        order = order[from_the_end <= newest]
    windows = take(windows, order)
    active, counts = torch.unique_consecutive(windows.users, return_counts=True)
    return ClientData(active, windows, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))


def brief_data(
    data: ClientData,
    past: Histories,
    positions: np.ndarray,
    *,
    length: int,
    rng: np.random.Generator,
    newest: int | None = None,
) -> ClientData | None:
    """The same clients' events, each beside at most `length` tokens; None for length 0."""
    if not length:
        return None
    brief = client_data(past, positions, length=length, stride=max(1, length - 1), rng=rng, newest=newest)
    assert torch.equal(brief.users, data.users)
    return brief


def stack_size(chunk: int, items: Float[Tensor, "I d"]) -> int:
    """How many clients to compute at once with these item rows: `chunk` on a CPU, more on a GPU, fewer of wide ones.

    It changes speed and memory alone.
    """
    return max(1, chunk * GPU_STACK * GPU_WIDTH // max(GPU_WIDTH, items.shape[-1])) if items.is_cuda else chunk


def chunks(data: ClientData, size: int, device: torch.device) -> Iterator[tuple[slice, Windows]]:
    """Up to `size` clients at a time: which ones (places in `data.users`), and their windows, users numbered from 0."""
    for first in range(0, len(data), size):
        last = min(first + size, len(data))
        begin, end = int(data.starts[first]), int(data.starts[last])
        part = trimmed(take(data.windows, torch.arange(begin, end)))
        counts = data.starts[first : last + 1].diff()
        numbered = torch.repeat_interleave(torch.arange(last - first), counts)
        yield slice(first, last), moved(replace(part, users=numbered), device)


def negatives_of(windows: Windows, n: int, n_items: int, *, seed: int, step: int) -> Int[Tensor, "W n"]:
    """Uniform items for each window, drawn by a counter keyed by its newest target: the chunk does not matter."""
    if n >= n_items:
        return torch.arange(n_items, device=windows.newest.device).expand(len(windows), -1)
    drawn = uniform(seed, "client negatives", windows.newest, step, (n,))
    return (drawn * n_items).long().clamp(max=n_items - 1)


def session_starts(past: Histories, positions: np.ndarray, gap_seconds: float) -> Int[Tensor, " N"]:
    """How many sessions each user began at these events: the first event ever, or one after a longer pause."""
    place, users = past.place[positions], past.users[positions]
    before = np.maximum(place - 1, 0)
    first = place == past.start[users]
    pause = past.times[place] - past.times[before]
    begins = first | (pause > gap_seconds)
    return torch.from_numpy(np.bincount(users[begins], minlength=past.n_users))
