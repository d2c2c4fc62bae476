"""Time: a base block D_0 and T wall-clock slices, each cut into train, validation and test parts.

Every edge lies between two distinct timestamps, so no instant is ever split between two slices or two parts.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from protofed.data.interactions import InteractionLog
from protofed.errors import ConfigError, DataError

Edges = Literal["count", "duration"]
Base = Literal["block", "slice-1"]
PARTS = ("train", "val", "test")
INSTANTS_PER_SLICE = len(PARTS)


@dataclass(frozen=True, slots=True)
class SliceBounds:
    """Positions in the log: train is [start, train_end), validation [train_end, val_end), test [val_end, end)."""

    index: int
    start: int
    train_end: int
    val_end: int
    end: int

    def part(self, name: str) -> tuple[int, int]:
        edges = (self.start, self.train_end, self.val_end, self.end)
        place = PARTS.index(name)
        return edges[place], edges[place + 1]


def cut_between_instants(times: np.ndarray, targets: np.ndarray, *, min_instants: int) -> np.ndarray:
    """The cut nearest to each target position (ascending) that lies between two distinct timestamps.

    At least `min_instants` distinct timestamps lie between neighbouring cuts, before the first and after the last.
    """
    starts = np.flatnonzero(np.diff(times, prepend=times[0] - 1))  # where each distinct timestamp begins
    n_instants, n_cuts = len(starts), len(targets)
    needed = min_instants * (n_cuts + 1)
    if n_instants < needed:
        raise DataError(f"{n_cuts + 1} parts need at least {needed} distinct timestamps, found {n_instants}")
    cuts, lowest = [], min_instants
    for done, target in enumerate(targets):
        highest = n_instants - min_instants * (n_cuts - done)
        allowed = starts[lowest : highest + 1]
        best = lowest + int(np.abs(allowed - target).argmin())
        cuts.append(starts[best])
        lowest = best + min_instants
    return np.asarray(cuts, dtype=np.int64)


def partition(
    log: InteractionLog,
    *,
    n_slices: int = 8,
    base_fraction: float = 0.5,
    edges: Edges = "count",
    base: Base = "block",
    validation_fraction: float = 0.1,
    test_fraction: float = 0.1,
) -> tuple[SliceBounds, ...]:
    """Slice 0 is the base block (the first `base_fraction` of the events), slices 1..T share the rest equally.

    `edges="duration"` makes slices 1..T equally long instead of equally full. `base="slice-1"` takes the first of T
    equal slices of the whole log as the base, so slices 0..T-1 result.
    """
    _check(n_slices, base_fraction, base)
    times = log.times.numpy()
    targets = _targets(times, n_slices, base_fraction, edges, base)
    try:
        starts = cut_between_instants(times, targets, min_instants=INSTANTS_PER_SLICE)
    except DataError as problem:
        sliceable = log.n_instants // INSTANTS_PER_SLICE
        most = sliceable - (base == "block")  # the first of T counts as one of them where it is the base
        way_out = f"ask for at most --set stream.n_slices={most}" if sliceable > 1 else "it cannot be sliced"
        raise DataError(
            f"{log.name} has {log.n_instants} distinct timestamps, too few for a base block and {len(targets)} slices "
            f"of {INSTANTS_PER_SLICE} parts each ({(len(targets) + 1) * INSTANTS_PER_SLICE} needed); {way_out}"
        ) from problem
    bounds = []
    for index, (start, end) in enumerate(zip([0, *starts], [*starts, len(times)], strict=True)):
        fractions = np.array([1 - validation_fraction - test_fraction, 1 - test_fraction])
        cuts = cut_between_instants(times[start:end], fractions * (end - start), min_instants=1)
        bounds.append(SliceBounds(index, int(start), int(start + cuts[0]), int(start + cuts[1]), int(end)))
    return tuple(bounds)


def _check(n_slices: int, base_fraction: float, base: Base) -> None:
    least = 1 if base == "block" else 2
    if n_slices < least:
        why = "" if base == "block" else ' with stream.base="slice-1", which takes the first as its base'
        raise ConfigError(f"stream.n_slices must be at least {least}{why}, got {n_slices}; the default is 8")
    if base == "block" and not 0 < base_fraction < 1:
        raise ConfigError(
            f"stream.base_fraction must lie strictly between 0 and 1, got {base_fraction}; the default is 0.5"
        )


def _targets(times: np.ndarray, n_slices: int, base_fraction: float, edges: Edges, base: Base) -> np.ndarray:
    """Where slices 1, 2, ... should start if instants could be split."""
    n = len(times)
    first, shares = min(round(n * base_fraction), n - 1), np.arange(n_slices) / n_slices
    if base == "slice-1":
        first, shares = 0, shares[1:]
    if edges == "count":
        return np.asarray(first + (n - first) * shares)
    return np.asarray(np.searchsorted(times, times[first] + (times[-1] - times[first]) * shares))
