"""Confidence intervals over users: seeds averaged first, every row of a section meeting the same drawn users."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int

from protofed.evaluation import significance
from protofed.evaluation.significance import PerUser, average_seeds
from protofed.experiments.matrices import Measure
from protofed.report.layout import Estimate
from protofed.report.runs import MAIN, SUM_COLUMN, Rows, Run
from protofed.report.sections import Section
from protofed.seeds import seed_of


@dataclass(frozen=True, slots=True)
class Intervals:
    """What the bootstrap of one (candidates, subset) says; a row whose users are unknown is absent."""

    of: Mapping[tuple[str, str], Estimate]  # by (row, metric)
    behind: Mapping[str, Estimate]  # NDCG@10 of a row minus the best row's, by row; only for the same queries
    best: str  # the row with the highest NDCG@10; empty without any
    n_users: int


@dataclass(frozen=True, slots=True)
class Pair:
    """Two rows that answered the same queries of the same users."""

    ours: PerUser
    other: PerUser
    users: pa.Array

    @property
    def counts(self) -> Int[np.ndarray, "U S"]:
        return self.ours.counts

    def of(self, members: Bool[np.ndarray, " U"]) -> "Pair":
        """Some of the users."""
        ours, other = (PerUser(table.sums[members], table.counts[members]) for table in (self.ours, self.other))
        return Pair(ours, other, self.users.filter(pa.array(members)))


def bootstrap(section: Section, candidates: str, subset: str) -> Intervals:
    """95 % percentile intervals of the mean of A[t, t], t = 1..T, and of each row's distance to the best one."""
    tables, users = per_user({row.label: row.runs for row in section.rows}, candidates, subset)
    if not tables or not len(users):
        return Intervals({}, {}, "", 0)
    rng = np.random.default_rng(seed_of(0, "report", section.slug, candidates, subset))
    draws = dict(zip(tables, significance.bootstrap_means([*tables.values()], rng, significance.DRAWS), strict=True))
    means = {key: significance.mean_over_slices(table) for key, table in tables.items()}
    labels = sorted({label for label, _ in tables}, key=lambda label: (-means[label, "ndcg@10"], label))
    keys = [(label, "ndcg@10") for label in labels]
    top, comparable = keys[0], [key for key in keys if (tables[key].counts == tables[keys[0]].counts).all()]
    return Intervals(
        {key: _estimate(means[key], drawn) for key, drawn in draws.items()},
        {key[0]: _estimate(means[key] - means[top], draws[key] - draws[top]) for key in comparable},
        labels[0],
        len(users),
    )


def per_user(
    runs: Mapping[str, Sequence[Run]],
    candidates: str,
    subset: str,
    *,
    among: pa.Array | None = None,
) -> tuple[dict[tuple[str, str], PerUser], pa.Array]:
    """Tables of A[t, t] by (row, metric), seeds averaged, and the users they are about: all with queries, or `among`.

    A row whose runs did not keep their users, or whose seeds answered different queries, is absent.
    """
    kept = {label: [rows.of(candidates, subset).later() for rows in asked(own)] for label, own in runs.items()}
    names = pa.chunked_array([rows.users() for own in kept.values() for rows in own], pa.string())
    users = pc.unique(names).sort() if among is None else among  # the order of the folders must not move a draw
    slices = range(1, 1 + max((run.n_slices for own in runs.values() for run in own), default=0))
    tables = {label: _per_user(own, users, slices) for label, own in kept.items() if own}
    return {(label, metric): table for label, own in tables.items() for metric, table in own.items()}, users


def pair(
    ours: Sequence[Run], other: Sequence[Run], measure: Measure = MAIN, among: pa.Array | None = None
) -> Pair | None:
    """A measure of two rows by user and slice; None where their queries differ or are unknown."""
    candidates, subset, metric = measure
    tables, users = per_user({"ours": ours, "other": other}, candidates, subset, among=among)
    a, b = tables.get(("ours", metric)), tables.get(("other", metric))
    if a is None or b is None or not len(users) or (a.counts != b.counts).any():
        return None
    return Pair(a, b, users)


def asked(runs: Sequence[Run]) -> list[Rows]:
    """What the users of each of a row's runs were asked; nothing unless all kept it."""
    known = [run.asked for run in runs if run.asked is not None]
    return known if len(known) == len(runs) else []


def _per_user(seeds: Sequence[Rows], users: pa.Array, slices: range) -> dict[str, PerUser]:
    """A table for each metric; none if the seeds did not answer the same queries."""
    counts = [rows.by_user("n", users, slices) for rows in seeds]
    if any((count != counts[0]).any() for count in counts):
        return {}
    return {
        metric: average_seeds(np.stack([rows.by_user(column, users, slices) for rows in seeds]), counts[0])
        for metric, column in SUM_COLUMN.items()
    }


def _estimate(mean: float, draws: np.ndarray) -> Estimate:
    return Estimate(mean, math.nan, *significance.percentile_interval(draws, significance.LEVEL))
