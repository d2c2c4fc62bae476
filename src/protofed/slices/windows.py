"""Training examples: windows of a user's tokens with every target inside them learned at once."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from protofed.slices.histories import Histories, leading_padding, tokens_ending_at
from protofed.slices.lines import Lines, sharing_lines
from protofed.slices.lines import moved as moved_lines

NO_TARGET = -1


@dataclass(frozen=True, slots=True)
class Windows:
    """W windows of L tokens. Target p of a window is predicted from the hidden state at token place sources[w, p].

    A source is the newest token strictly older than its target, so events of one instant never predict each other.
    `newest` is the log position of each window's newest target: what the leak checker looks at.
    """

    users: Int[Tensor, " W"]
    tokens: Int[Tensor, "W L"]
    sources: Int[Tensor, "W P"]
    targets: Int[Tensor, "W P"]  # NO_TARGET pads
    newest: Int[Tensor, " W"]
    lines: Lines | None = field(
        default=None, kw_only=True
    )  # the same tokens, several windows on a line; picking drops it

    def __len__(self) -> int:
        return len(self.users)


def training_windows(
    past: Histories, positions: np.ndarray, *, length: int, stride: int, rng: np.random.Generator
) -> Windows:
    """Cover the targets at these log positions with windows of at most `stride` consecutive targets of one user.

    Where a user's run of targets is cut is drawn anew at each call, so that epochs differ.
    """
    parts = []
    while len(positions):
        window, column, user, last, place_in_window = _cut(past, positions, length, stride, rng)
        fits = place_in_window >= 0  # a source left of the window (a very crowded instant) waits for the next pass
        parts.append(
            _fill(past, positions[fits], window[fits], column[fits], place_in_window[fits], user, last, length)
        )
        positions = positions[~fits]
    if not parts:
        empty = torch.zeros(0, 1, dtype=torch.int64)
        return Windows(empty[:, 0], torch.zeros(0, length, dtype=torch.int64), empty, empty, empty[:, 0])
    return concatenate(parts)


def _cut(
    past: Histories, positions: np.ndarray, length: int, stride: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Per target its window, its column there and the token place of its source; per window its user and last token."""
    order = np.argsort(past.place[positions], kind="stable")
    users, sources = past.users[positions][order], past.before[positions][order]
    new_user = np.ones(len(users), dtype=bool)
    new_user[1:] = users[1:] != users[:-1]
    first = np.maximum.accumulate(np.where(new_user, np.arange(len(users)), 0))
    shift = rng.integers(0, stride, size=int(users.max()) + 1)[users]  # how many users come later must not matter
    chunk = (np.arange(len(users)) - first + shift) // stride
    new_window = new_user.copy()
    new_window[1:] |= chunk[1:] != chunk[:-1]
    window = np.cumsum(new_window) - 1
    starts = np.flatnonzero(new_window)
    column = np.arange(len(users)) - starts[window]
    ends = np.append(starts[1:], len(users)) - 1
    last = sources[ends]  # sources grow with time
    place_in_window = length - 1 - (last[window] - sources)
    unsort = np.empty_like(order)
    unsort[order] = np.arange(len(order))
    return window[unsort], column[unsort], users[starts].astype(np.int64), last, place_in_window[unsort]


def _fill(
    past: Histories,
    positions: np.ndarray,
    window: np.ndarray,
    column: np.ndarray,
    place: np.ndarray,
    user: np.ndarray,
    last: np.ndarray,
    length: int,
) -> Windows:
    shape = (len(user), int(column.max()) + 1)
    sources = np.zeros(shape, dtype=np.int64)
    targets = np.full(shape, NO_TARGET, dtype=np.int64)
    sources[window, column] = place
    targets[window, column] = past.items[past.place[positions]]
    newest = np.full(len(user), -1, dtype=np.int64)
    np.maximum.at(newest, window, positions)
    tensors = (torch.from_numpy(array) for array in (sources, targets, newest))
    return Windows(torch.from_numpy(user), tokens_ending_at(past, user, last, length), *tensors)


def concatenate(parts: list[Windows]) -> Windows:
    """All windows of all parts, targets padded to the widest."""
    width = max(part.targets.shape[1] for part in parts)

    def padded(column: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(column, (0, width - column.shape[1]), value=value)

    return Windows(
        users=torch.cat([part.users for part in parts]),
        tokens=torch.cat([part.tokens for part in parts]),
        sources=torch.cat([padded(part.sources, 0) for part in parts]),
        targets=torch.cat([padded(part.targets, NO_TARGET) for part in parts]),
        newest=torch.cat([part.newest for part in parts]),
    )


def pick_windows(windows: Windows, index: Tensor | slice) -> Windows:
    """Some of the windows, as wide as they are: nothing waits for the device."""
    columns = (windows.users, windows.tokens, windows.sources, windows.targets, windows.newest)
    return Windows(*(column[index] for column in columns))


def take(windows: Windows, index: Tensor) -> Windows:
    """Some of the windows, targets trimmed to the widest left."""
    some = pick_windows(windows, index)
    used = (
        (some.targets != NO_TARGET).any(0).nonzero()
    )  # a target that waited leaves its column empty, so never count them
    width = int(used[-1]) + 1 if len(used) else 1
    return replace(some, sources=some.sources[:, :width], targets=some.targets[:, :width])


def real_targets(windows: Windows) -> Int[Tensor, " W"]:
    """How many targets each window has: what a term of the mean loss is multiplied by to enter the summed ones."""
    return (windows.targets != NO_TARGET).sum(-1)


def batches(windows: Windows, size: int, rng: torch.Generator) -> Iterator[Windows]:
    """The windows in a drawn order, `size` at a time."""
    order = torch.randperm(len(windows), generator=rng)
    for start in range(0, len(windows), size):
        yield take(windows, order[start : start + size])


def trimmed(windows: Windows) -> Windows:
    """The same windows without token columns that only pad; short histories then cost little."""
    padding = leading_padding(windows.tokens)
    sources = (windows.sources - padding).clamp(min=0)  # a padded target's source stays a valid place
    return replace(windows, tokens=windows.tokens[:, padding:], sources=sources, lines=None)


def on_lines(windows: Windows) -> Windows:
    """The same windows with their tokens laid out on as few lines as they fit on."""
    return replace(windows, lines=sharing_lines(windows.tokens))


def moved(windows: Windows, device: torch.device | str) -> Windows:
    """The same windows on another device."""
    columns = (windows.users, windows.tokens, windows.sources, windows.targets, windows.newest)
    lines = None if windows.lines is None else moved_lines(windows.lines, device)
    return Windows(*(column.to(device, non_blocking=True) for column in columns), lines=lines)
