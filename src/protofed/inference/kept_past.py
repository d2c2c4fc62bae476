"""What a device keeps of its own past for the head: 32 KB whatever the past, each event folded in at one price.

The newest 512 items with their counts, sums and last event; the newest 64 pairs of an item and what followed it; the
newest 1,200 instants. What was met longest ago goes first. Until something had to go, its numbers are those of
`own_past` on the whole past. Plain arrays of a fixed size: what an event costs does not depend on how many there were.
"""

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from protofed.inference.head import Cells
from protofed.inference.own_past import DAY, FOLLOW_HALF_LIFE, HALF_LIVES, HOUR_WIDTH, NUMBERS, WEEK_WIDTH, near

ITEMS, TRANSITIONS, INSTANTS = 512, 64, 1_200
EMPTY = -1
_LIVES = np.array(HALF_LIVES)


@dataclass(frozen=True, slots=True)
class KeptPast:
    """Columns of items, of transitions and of instants; EMPTY marks a place that holds nothing."""

    items: np.ndarray  # (ITEMS,) int32
    counts: np.ndarray  # int32
    newest: np.ndarray  # int32, number of the item's last event
    last: np.ndarray  # int64, its time
    sums: np.ndarray  # (ITEMS, 4) float32, sum of 0.5^(age / half-life) at `last`
    sources: np.ndarray  # (TRANSITIONS,) int32
    targets: np.ndarray  # int32
    followed: np.ndarray  # int32, how often
    followed_sum: np.ndarray  # float32, decayed, at `followed_last`
    followed_last: np.ndarray  # int64
    owners: np.ndarray  # (INSTANTS,) int16, place of the event's item
    instants: np.ndarray  # int64
    n_events: int = 0
    n_distinct: int = 0  # items met, those that had to go included
    ends_with: int = EMPTY  # the newest event's item


def no_past() -> KeptPast:
    """Nothing met yet."""
    n = (ITEMS, TRANSITIONS, INSTANTS)
    empty = [np.full(size, EMPTY, dtype=np.int32) for size in (n[0], n[1], n[1])]
    return KeptPast(
        items=empty[0],
        counts=np.zeros(n[0], dtype=np.int32),
        newest=np.full(n[0], EMPTY, dtype=np.int32),
        last=np.zeros(n[0], dtype=np.int64),
        sums=np.zeros((n[0], len(HALF_LIVES)), dtype=np.float32),
        sources=empty[1],
        targets=empty[2],
        followed=np.zeros(n[1], dtype=np.int32),
        followed_sum=np.zeros(n[1], dtype=np.float32),
        followed_last=np.full(n[1], np.iinfo(np.int64).min, dtype=np.int64),
        owners=np.full(n[2], EMPTY, dtype=np.int16),
        instants=np.zeros(n[2], dtype=np.int64),
    )


def size(past: KeptPast) -> int:
    """Bytes, on the device and when it is written out."""
    arrays = [getattr(past, each.name) for each in fields(past)]
    return sum(each.nbytes if isinstance(each, np.ndarray) else 4 for each in arrays)


def after_event(past: KeptPast, item: int, time: int) -> KeptPast:
    """The past with one more event."""
    return _fold(copy.deepcopy(past), item, time)


def keep_past(items: Iterable[int], times: Iterable[int]) -> KeptPast:
    """A whole past folded in, oldest event first."""
    past = no_past()
    for item, time in zip(items, times, strict=True):
        past = _fold(past, int(item), int(time))
    return past


def _fold(past: KeptPast, item: int, time: int) -> KeptPast:
    """One more event, written into the arrays it is given."""
    known = np.flatnonzero(past.items == item)
    at = int(known[0]) if len(known) else int(past.newest.argmin())
    if not len(known):
        past.owners[past.owners == at] = EMPTY  # what was there has to go
        past.items[at], past.counts[at], past.sums[at] = item, 0, 0.0
    if past.ends_with != EMPTY:
        _follow(past, past.ends_with, item, time)
    age = (time - int(past.last[at])) / DAY if past.counts[at] else 0.0
    past.sums[at] = past.sums[at] * 0.5 ** (age / _LIVES) + 1
    past.counts[at] += 1
    past.newest[at], past.last[at] = past.n_events, time
    past.owners[past.n_events % INSTANTS], past.instants[past.n_events % INSTANTS] = at, time
    new = not len(known)
    return replace(past, n_events=past.n_events + 1, n_distinct=past.n_distinct + new, ends_with=item)


def _follow(past: KeptPast, source: int, target: int, time: int) -> None:
    """One more time that `target` followed `source`, in place."""
    known = np.flatnonzero((past.sources == source) & (past.targets == target))
    at = int(known[0]) if len(known) else int(past.followed_last.argmin())
    if not len(known):
        past.sources[at], past.targets[at], past.followed[at], past.followed_sum[at] = source, target, 0, 0.0
    age = (time - int(past.followed_last[at])) / DAY if past.followed[at] else 0.0
    past.followed_sum[at] = past.followed_sum[at] * 0.5 ** (age / FOLLOW_HALF_LIFE) + 1
    past.followed[at] += 1
    past.followed_last[at] = time


@dataclass(frozen=True, slots=True)
class KeptView:
    """A kept past laid out for questions at any time: what no question changes, and the rest with its times."""

    items: torch.Tensor  # (P,) int64, ascending
    x: np.ndarray  # (P, 18) float32: the numbers that do not depend on the time of the question, else 0
    last: np.ndarray  # (P,) int64
    sums: np.ndarray  # (P, 4) float32, at `last`
    followed: np.ndarray  # rows of the items that followed the newest one
    followed_sum: np.ndarray
    followed_last: np.ndarray
    rows: np.ndarray  # the row of each kept instant
    instants: np.ndarray


def view_of(past: KeptPast, n_items: int) -> KeptView:
    """The kept items below `n_items` with their numbers, as far as these are known before a question is asked."""
    places = np.flatnonzero((past.items != EMPTY) & (past.items < n_items))
    places = places[past.items[places].argsort()]
    items, count, n = past.items[places], past.counts[places], max(float(past.n_events), 1.0)
    since = past.n_events - 1 - past.newest[places]
    row = np.full(ITEMS, EMPTY, dtype=np.int64)
    row[places] = np.arange(len(places))
    real = past.owners != EMPTY
    rows, instants = row[past.owners[real]], past.instants[real]
    after = np.flatnonzero((past.sources == past.ends_with) & np.isin(past.targets, items))
    followed = items.searchsorted(past.targets[after])
    x = np.zeros((len(places), len(NUMBERS)), dtype=np.float32)
    x[:, 0], x[:, 5], x[:, 6] = np.log1p(count, dtype=np.float64), np.log1p(since, dtype=np.float64), since == 0
    x[followed, 7] = np.log1p(past.followed[after], dtype=np.float64)
    x[:, 11], x[:, 12], x[:, 13] = count / n, math.log1p(past.n_events), 1 - past.n_distinct / n
    x[:, 16], x[:, 17] = count == 1, 1.0
    return KeptView(
        items=torch.from_numpy(items.astype(np.int64)),
        x=x,
        last=past.last[places],
        sums=past.sums[places],
        followed=followed,
        followed_sum=past.followed_sum[after],
        followed_last=past.followed_last[after],
        rows=rows[rows != EMPTY],
        instants=instants[rows != EMPTY],
    )


def numbers_at(view: KeptView, now: int) -> torch.Tensor:
    """The numbers of NUMBERS about each kept item, as of `now`."""
    x = view.x.copy()
    age = np.maximum(now - view.last, 0) / DAY
    x[:, 1:5] = np.log1p(10 * view.sums * 0.5 ** (age[:, None] / _LIVES))
    old = np.maximum(now - view.followed_last, 0) / DAY
    x[view.followed, 8] = np.log1p(view.followed_sum * 0.5 ** (old / FOLLOW_HALF_LIFE))
    hours = torch.from_numpy(24 * np.maximum(now - view.instants, 0) / DAY)
    for column, period, width in ((9, 24.0, HOUR_WIDTH), (10, 168.0, WEEK_WIDTH)):
        x[:, column] = np.log1p(np.bincount(view.rows, near(hours, period, width).numpy(), minlength=len(x)))
    x[:, 14] = log_age = np.log1p(age)
    x[:, 15] = log_age**2 / 10
    return torch.from_numpy(x)


def kept_cells(past: KeptPast, now: int, n_items: int) -> Cells:
    """The numbers of NUMBERS about each kept item, as of `now`, for a single question."""
    view = view_of(past, n_items)
    return Cells(torch.zeros_like(view.items), view.items, numbers_at(view, now))
