"""Filters: log in, smaller log out; users and items are numbered anew."""

from collections.abc import Callable, Collection, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from protofed.data.interactions import InteractionLog, select
from protofed.errors import DataError
from protofed.seeds import seed_of

POSITIVE_RATING = 4.0
PAGE_VIEW = "pv"


def five_core(log: InteractionLog, k: int = 5) -> InteractionLog:
    """The largest part of the log in which every user and every item has at least `k` rows."""
    mask = np.zeros(len(log), dtype=bool)
    mask[core_rows(log.users.numpy(), log.items.numpy(), k)] = True
    return _kept(log, mask, f"the {k}-core (every user and item with at least {k} rows)", "take a larger log")


def core_rows(users: np.ndarray, items: np.ndarray, k: int) -> np.ndarray:
    """The positions of the rows that remain when users and items with fewer than `k` rows are dropped until none is."""
    rows = np.arange(len(users))
    of_user, of_item = np.bincount(users), np.bincount(items)
    while True:
        keep = (of_user >= k)[users] & (of_item >= k)[items]
        if keep.all():
            return rows
        of_user -= np.bincount(users[~keep], minlength=len(of_user))
        of_item -= np.bincount(items[~keep], minlength=len(of_item))
        rows, users, items = rows[keep], users[keep], items[keep]


def at_least_rating(log: InteractionLog, threshold: float = POSITIVE_RATING) -> InteractionLog:
    """The rows rated `threshold` or more."""
    if log.ratings is None:
        raise DataError(f"{log.name}: the rule rating >= {threshold:g} needs ratings, found none; prepare it anew")
    return _kept(log, (log.ratings >= threshold).numpy(), f"rating >= {threshold:g}", "lower the threshold")


def keep_events(log: InteractionLog, names: Collection[str]) -> InteractionLog:
    """The rows whose event is one of `names`."""
    wanted = ", ".join(sorted(names))
    if log.events is None:
        raise DataError(f"{log.name}: the rule event in {{{wanted}}} needs events, found none; prepare it anew")
    mask = pc.is_in(log.events, value_set=pa.array(sorted(names))).to_numpy(zero_copy_only=False)
    return _kept(log, mask, f"event in {{{wanted}}}", f"found only {', '.join(event_names(log))}")


def event_names(log: InteractionLog) -> tuple[str, ...]:
    """The events that occur, sorted; none where the log has no event column."""
    return () if log.events is None else tuple(sorted(log.events.unique().to_pylist()))


def deduplicate(log: InteractionLog) -> InteractionLog:
    """The first of every group of rows with the same user, item and timestamp."""
    return select(log, torch.from_numpy(~duplicates(log)))


def duplicates(log: InteractionLog) -> np.ndarray:
    """True for every row whose user, item and timestamp an earlier row has."""
    times = log.times.numpy()
    again = np.zeros(len(log), dtype=bool)
    again[1:] = times[1:] == times[:-1]
    again[:-1] |= again[1:]
    rows = np.flatnonzero(again)  # those with a time that another row has too
    times, pairs = times[rows], log.users.numpy()[rows].astype(np.int64) * log.n_items + log.items.numpy()[rows]
    order = np.lexsort((pairs, times))  # stable, so the earliest row of a group comes first
    again[:] = False
    again[rows[order[1:]]] = (np.diff(pairs[order]) == 0) & (np.diff(times[order]) == 0)
    return again


def count_duplicates(log: InteractionLog) -> int:
    """How many rows have the user, item and timestamp of an earlier one."""
    times, pairs = log.times.numpy(), log.n_users * log.n_items
    moments = np.zeros(len(log), dtype=np.int64)
    np.cumsum(times[1:] != times[:-1], out=moments[1:])
    if pairs * (int(moments[-1]) + 1) >= 2**63:  # no integer holds all three; few rows share a moment then
        return int(duplicates(log).sum())
    moments *= pairs
    moments += pair_codes(log)
    moments.sort()
    return int((moments[1:] == moments[:-1]).sum())


def pair_codes(log: InteractionLog) -> np.ndarray:
    """One integer for the user and item of each row."""
    pairs: np.ndarray = log.users.numpy().astype(np.int64) * log.n_items + log.items.numpy()
    return pairs


def subsample_users(log: InteractionLog, n: int, seed: int) -> InteractionLog:
    """The log of `n` users, chosen by a hash of their original identifiers: a larger n only adds users."""
    if not 1 <= n <= log.n_users:
        raise DataError(f"{log.name}: a subsample takes 1 to {log.n_users} users, asked for {n}; ask for fewer")
    draws = np.array([seed_of(seed, "subsample-users", str(user)) for user in log.user_ids.to_pylist()])
    chosen = np.zeros(log.n_users, dtype=bool)
    chosen[np.argsort(draws, kind="stable")[:n]] = True
    return select(log, torch.from_numpy(chosen[log.users.numpy()]))


def page_views_if_any(log: InteractionLog) -> InteractionLog:
    """The page views where the log has some, else all events."""
    return keep_events(log, {PAGE_VIEW}) if PAGE_VIEW in event_names(log) else log


CANONICAL: Mapping[str, tuple[str, Callable[[InteractionLog], InteractionLog]]] = {
    "movielens": (f"rating >= {POSITIVE_RATING:g}", at_least_rating),
    "taobao": (f"event {PAGE_VIEW} where there is one", page_views_if_any),
}


def family_of(name: str) -> str:
    """The family with a rule of its own that a name begins with; empty for all others."""
    return next((family for family in CANONICAL if name.lower().startswith(family)), "")


def canonical_rule(family: str) -> str:
    """What `canonical` does, in words."""
    return f"{CANONICAL[family][0]}, then 5-core" if family in CANONICAL else "5-core"


def canonical(log: InteractionLog, family: str = "") -> InteractionLog:
    """The rows all experiments use: the rule of the data set's family (told by its name unless given), then 5-core."""
    return five_core(before_core(log, family))


def before_core(log: InteractionLog, family: str = "") -> InteractionLog:
    """The rows that the data set's own rule keeps, of rare users and items too."""
    family = family or family_of(log.name)
    return CANONICAL[family][1](log) if family in CANONICAL else log


def _kept(log: InteractionLog, mask: np.ndarray, rule: str, way_out: str) -> InteractionLog:
    if not mask.any():
        raise DataError(f"{log.name}: no event is left after {rule}, of {len(log):,} before; {way_out}")
    return select(log, torch.from_numpy(mask))
