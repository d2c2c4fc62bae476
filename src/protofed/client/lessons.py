"""What the clients of a slice learn from: windows over their own events, and how chunks of whole clients are made."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.privacy.draws import Draws, event_keys, uniform
from protofed.slices.histories import Histories
from protofed.slices.windows import Windows, moved, take, training_windows, trimmed

GPU_WIDTH = 64  # up to this width a GPU has memory for all of them; a stack's activations grow with the width
STEPS_PER_SLICE = 100_000  # a local step's draws are keyed by slice * this + step
GPU_STACK = 8  # a GPU launches the same kernels for so many times the clients that suit a core, and takes hardly longer


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a stack of devices learns from in a slice: windows over its own events, and its query."""

    windows: Windows  # users are places in the stack; `newest` counts a user's own events from 0
    h: Float[Tensor, "U d_z"]  # unit vectors
    gate: Float[Tensor, " U"]  # alpha
    lambda_s: Float[Tensor, " U"]
    points: Float[Tensor, "U P d_z"] | None = None  # query embeddings that the Wasserstein form aligns along with z
    brief: Windows | None = None  # the same events with little context: what prompts learn from where it is given


class CutsByKey(np.random.Generator):
    """Where each user's run of targets is cut, keyed by the user: who else is in the stack does not matter."""

    def __init__(self, draws: Draws, purpose: str, users: Int[Tensor, " U"], round_: int) -> None:
        super().__init__(np.random.PCG64(0))
        self.drawn = draws.uniform(purpose, users.cpu(), round_).numpy()

    def integers(self, low: int, high: int, size: int) -> Any:  # type: ignore[override]
        return low + (self.drawn[:size] * (high - low)).astype(np.int64)


def own_windows(
    past: Histories, positions: np.ndarray, cuts: CutsByKey, *, length: int, stride: int, newest: int | None = None
) -> Windows:
    """Windows over a stack's own events at these places, user by user; `newest` keeps only so many latest of each."""
    data = client_data(past, positions, length=length, stride=stride, rng=cuts, newest=newest)
    whose = torch.from_numpy(past.start)[data.windows.users]
    return replace(data.windows, newest=data.windows.newest - whose)


def draw_negatives(
    draws: Draws, users: Int[Tensor, " U"], windows: Windows, n: int, n_items: int, step: int
) -> Int[Tensor, "W n"]:
    """Uniform items for each window, keyed by its user, its newest own event and the step."""
    if n >= n_items:
        return torch.arange(n_items, device=windows.newest.device).expand(len(windows), -1)
    keys = event_keys(users.to(windows.users.device)[windows.users], windows.newest)
    return (draws.uniform("client negatives", keys, step, (n,)) * n_items).long().clamp(max=n_items - 1)


def lesson_to(lesson: Lesson, device: torch.device) -> Lesson:
    """The lesson with its windows on the device that computes; the rest is there already."""
    brief = None if lesson.brief is None else moved(lesson.brief, device)
    return replace(lesson, windows=moved(lesson.windows, device), brief=brief)


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


def draw_negatives_by_event(windows: Windows, n: int, n_items: int, *, seed: int, step: int) -> Int[Tensor, "W n"]:
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
