"""Confidence intervals over users: seeds averaged first, every row of a section meeting the same drawn users."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from protofed.evaluation import significance
from protofed.evaluation.significance import Interval, PerUser, average_seeds
from protofed.report.runs import Run, read_parquet
from protofed.report.sections import Section
from protofed.seeds import seed_of

SUM_COLUMN = {"ndcg@10": "ndcg10_sum", "hr@10": "hr10_sum"}
FILE = "per_user.parquet"
COLUMNS = ["user", "slice_trained", "slice_tested", "n", *SUM_COLUMN.values()]


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
    kept = {label: own for label, own in runs.items() if all((run.path / FILE).is_file() for run in own)}
    logs = {label: [_diagonal(run, candidates, subset, first_slice) for run in own] for label, own in kept.items()}
    names = [chunk for seeds in logs.values() for table in seeds for chunk in table["user"].chunks]
    found = pc.unique(pa.chunked_array(names, pa.string())).sort()  # the order of the folders must not move a draw
    users = found if among is None else among
    ends = [run.n_slices + 1 for own in kept.values() for run in own]
    tables: dict[tuple[str, str], PerUser] = {}
    for label, seeds in logs.items():
        by_metric = _per_user(seeds, users, range(first_slice, max(ends)))
        tables |= {(label, metric): table for metric, table in by_metric.items()}
    return tables, users


def _diagonal(run: Run, candidates: str, subset: str, first_slice: int) -> pa.Table:
    """The rows of A[t, t] from some slice on."""
    table = read_parquet(run.path / FILE, COLUMNS, [("candidates", "==", candidates), ("subset", "==", subset)])
    on_diagonal = pc.equal(table["slice_trained"], table["slice_tested"])
    table = table.filter(pc.and_(on_diagonal, pc.greater_equal(table["slice_tested"], first_slice)))
    return table.set_column(0, "user", table["user"].cast(pa.string()))


def _per_user(seeds: Sequence[pa.Table], users: pa.Array, slices: range) -> dict[str, PerUser]:
    """A table for each metric; none if the seeds did not answer the same queries."""
    counts = [_spread(table, "n", users, slices) for table in seeds]
    if any((count != counts[0]).any() for count in counts):
        return {}
    return {
        metric: average_seeds(np.stack([_spread(table, column, users, slices) for table in seeds]), counts[0])
        for metric, column in SUM_COLUMN.items()
    }


def _spread(table: pa.Table, column: str, users: pa.Array, slices: range) -> np.ndarray:
    kind = np.int64 if column == "n" else np.float64
    spread = np.zeros((len(users), len(slices)), dtype=kind)
    place = pc.index_in(table["user"], value_set=users).to_numpy()
    spread[place, table["slice_tested"].to_numpy() - slices.start] = table[column].to_numpy()
    return spread


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
