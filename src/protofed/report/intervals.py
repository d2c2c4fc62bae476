"""Confidence intervals over users: seeds averaged first, every row of a section meeting the same drawn users."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from protofed.evaluation import significance
from protofed.evaluation.significance import Interval, PerUser, average_seeds
from protofed.report.runs import Run
from protofed.report.sections import Section
from protofed.report.users import SUM_COLUMN, Users
from protofed.seeds import seed_of


@dataclass(frozen=True, slots=True)
class Intervals:
    """What the bootstrap of one (candidates, subset) says; a row whose users are unknown is absent."""

    of: Mapping[tuple[str, str], Interval]  # by (row, metric)
    behind: Mapping[str, Interval]  # NDCG@10 of a row minus the best row's, by row; only for the same queries
    best: str  # the row with the highest NDCG@10; empty without any
    n_users: int


def bootstrap(section: Section, candidates: str, subset: str) -> Intervals:
    """95 % percentile intervals of the mean of A[t, t], t = 1..T, and of each row's distance to the best one."""
    tables, users = per_user({row.label: row.runs for row in section.rows}, candidates, subset)
    rng = np.random.default_rng(seed_of(0, "report", section.slug, candidates, subset))
    return _intervals(tables, rng, len(users))


def per_user(
    runs: Mapping[str, Sequence[Run]],
    candidates: str,
    subset: str,
    *,
    first_slice: int = 1,
    among: pa.Array | None = None,
) -> tuple[dict[tuple[str, str], PerUser], pa.Array]:
    """Tables of A[t, t] by (row, metric), seeds averaged, and the users they are about: all with queries, or `among`.

    A row whose runs did not keep their users, or whose seeds answered different queries, is absent.
    """
    kept = {label: known for label, own in runs.items() if (known := users_of(own))}
    logs = {label: [_from(file, candidates, subset, first_slice) for file in own] for label, own in kept.items()}
    names = [_names(table) for tables in logs.values() for table in tables]
    found = pc.unique(pa.chunked_array(names, pa.string())).sort()  # the order of the folders must not move a draw
    users = found if among is None else among
    ends = [run.n_slices + 1 for label in kept for run in runs[label]]
    tables: dict[tuple[str, str], PerUser] = {}
    for label, seeds in logs.items():
        by_metric = _per_user(seeds, users, range(first_slice, max(ends)))
        tables |= {(label, metric): table for metric, table in by_metric.items()}
    return tables, users


def users_of(runs: Sequence[Run]) -> tuple[Users, ...]:
    """What each of a row's runs kept about its users; nothing unless all did."""
    known = tuple(run.users for run in runs if run.users)
    return known if len(known) == len(runs) else ()


def by_user(table: pa.Table, column: str, users: pa.Array, slices: range) -> np.ndarray:
    """A column as numbers by user and slice; 0 where there is no row, and rows of other users left out."""
    kind = np.int64 if column == "n" else np.float64
    spread = np.zeros((len(users), len(slices)), dtype=kind)
    where = pc.fill_null(pc.index_in(_words(table), value_set=users), -1).to_numpy(zero_copy_only=False)
    place, at = where[_codes(table)], table["slice_tested"].to_numpy() - slices.start
    wanted = place >= 0
    spread[place[wanted], at[wanted]] = table[column].to_numpy()[wanted]
    return spread


def _from(file: Users, candidates: str, subset: str, first_slice: int) -> pa.Table:
    """The rows of A[t, t] from some slice on."""
    table = file.rows(candidates, subset)
    return table.filter(pc.greater_equal(table["slice_tested"], first_slice))


def _words(table: pa.Table) -> pa.Array:
    """The users' names, each once, in an order that `_codes` points into; names without a row may be among them."""
    chunks = table["user"].chunks
    return chunks[0].dictionary.cast(pa.string()) if chunks else pa.array([], pa.string())


def _codes(table: pa.Table) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *(chunk.indices.to_numpy() for chunk in table["user"].chunks)])


def _names(table: pa.Table) -> pa.Array:
    """The users with a row."""
    return _words(table).take(pa.array(np.unique(_codes(table)).astype(np.int64)))


def _per_user(seeds: Sequence[pa.Table], users: pa.Array, slices: range) -> dict[str, PerUser]:
    """A table for each metric; none if the seeds did not answer the same queries."""
    counts = [by_user(table, "n", users, slices) for table in seeds]
    if any((count != counts[0]).any() for count in counts):
        return {}
    return {
        metric: average_seeds(np.stack([by_user(table, column, users, slices) for table in seeds]), counts[0])
        for metric, column in SUM_COLUMN.items()
    }


def _intervals(tables: Mapping[tuple[str, str], PerUser], rng: np.random.Generator, n_users: int) -> Intervals:
    if not tables or not n_users:
        return Intervals({}, {}, "", 0)
    drawn = significance.bootstrap_means(list(tables.values()), rng, significance.DRAWS)
    means = dict(zip(tables, drawn, strict=True))
    exact = {key: significance.mean_over_slices(table) for key, table in tables.items()}
    labels = sorted({label for label, _ in tables}, key=lambda label: (-exact[label, "ndcg@10"], label))
    best = labels[0]
    return Intervals(
        {key: _interval(exact[key], draws) for key, draws in means.items()},
        {
            label: _interval(
                exact[label, "ndcg@10"] - exact[best, "ndcg@10"], means[label, "ndcg@10"] - means[best, "ndcg@10"]
            )
            for label in labels
            if (tables[label, "ndcg@10"].counts == tables[best, "ndcg@10"].counts).all()
        },
        best,
        n_users,
    )


def _interval(mean: float, draws: np.ndarray) -> Interval:
    return Interval(mean, *significance.percentile_interval(draws, significance.LEVEL))
