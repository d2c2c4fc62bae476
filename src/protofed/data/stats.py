"""What a log holds, in numbers: raw, 5-core and canonical."""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import SupportsInt

import numpy as np
import pyarrow.compute as pc

from protofed.data import filters
from protofed.data.interactions import InteractionLog
from protofed.data.prepared import family, load_log
from protofed.errors import DataError

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Counts:
    """How many events, users and items."""

    rows: int
    users: int
    items: int


@dataclass(frozen=True, slots=True)
class LogStats:
    """The size of a log before and after its filters; everything from `first` on is about the raw log."""

    name: str
    canonical_rule: str
    raw: Counts
    five_core: Counts
    canonical: Counts
    first: str  # UTC
    last: str
    days: float
    instants: int  # distinct timestamps
    repeat_share: float  # of rows whose user met the item in an earlier row
    duplicate_rows: int  # same user, item and timestamp as an earlier row
    median_rows_per_user: float
    median_rows_per_item: float
    events: dict[str, int]
    mean_rating: float | None

    def as_dict(self) -> dict[str, object]:
        """Plain values, ready for JSON."""
        return asdict(self)


def stats(name: str, root: Path | str) -> LogStats:
    """The figures of a prepared log."""
    return stats_of(load_log(name, root, canonical=False), family(name, root))


def stats_of(log: InteractionLog, family: str = "") -> LogStats:
    """The figures of a log; an empty 5-core counts zero instead of failing."""
    family = family or filters.family_of(log.name)
    times = log.times.numpy()
    return LogStats(
        name=log.name,
        canonical_rule=filters.canonical_rule(family),
        raw=counts(log),
        five_core=core_counts(log),
        canonical=_canonical_counts(log, family),
        first=day_and_time(times[0]),
        last=day_and_time(times[-1]),
        days=round(int(times[-1] - times[0]) / SECONDS_PER_DAY, 2),
        instants=log.n_instants,
        repeat_share=round(1 - len(np.unique(filters.pair_codes(log))) / len(log), 4),
        duplicate_rows=filters.count_duplicates(log),
        median_rows_per_user=float(np.median(np.bincount(log.users.numpy()))),
        median_rows_per_item=float(np.median(np.bincount(log.items.numpy()))),
        events=event_counts(log),
        mean_rating=_mean_rating(log),
    )


def day_and_time(seconds: SupportsInt) -> str:
    """Unix seconds as an ISO 8601 datetime, UTC."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _mean_rating(log: InteractionLog) -> float | None:
    """The mean of the ratings there are; None where there is none."""
    if log.ratings is None or bool(log.ratings.isnan().all()):
        return None
    return round(float(np.nanmean(log.ratings.double().numpy())), 4)


def counts(log: InteractionLog) -> Counts:
    """The size of a log."""
    return Counts(len(log), log.n_users, log.n_items)


def event_counts(log: InteractionLog) -> dict[str, int]:
    """The rows of each event, by name; empty where the log has no event column."""
    if log.events is None:
        return {}
    tallied = pc.value_counts(log.events).to_pylist()
    return {str(row["values"]): int(row["counts"]) for row in sorted(tallied, key=lambda row: str(row["values"]))}


def core_counts(log: InteractionLog) -> Counts:
    """The size of the 5-core; zero where nothing is left."""
    users, items = log.users.numpy(), log.items.numpy()
    rows = filters.core_rows(users, items, 5)
    return Counts(len(rows), len(np.unique(users[rows])), len(np.unique(items[rows])))


def _canonical_counts(log: InteractionLog, family: str) -> Counts:
    try:
        return counts(filters.canonical(log, family))
    except DataError:
        return Counts(0, 0, 0)
