"""How sure a number is: bootstrap intervals over users, paired differences, and the spread over seeds."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Num

DRAWS = 2_000
LEVEL = 0.95
CHUNK = 1 << 21  # user draws held at once


@dataclass(frozen=True, slots=True)
class PerUser:
    """A metric's sum over each user's queries and how many those are, a column per slice (one column: no slices).

    Its mean is the mean over columns of (sum over users / queries of all users), so that with columns 1..T of a model
    tested right after each slice it is the headline accuracy. Columns without a query are left out.
    """

    sums: Float[np.ndarray, "U S"]
    counts: Int[np.ndarray, "U S"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean difference, its confidence interval, and the two-sided p-value of "there is none"."""

    mean: float
    low: float
    high: float
    p_value: float


def average_seeds(sums: Float[np.ndarray, "R U S"], counts: Int[np.ndarray, "U S"]) -> PerUser:
    """One table from R seeds: the queries are the same under every seed, so only the sums are averaged."""
    return PerUser(sums.mean(0), counts)


def bootstrap_interval(
    table: PerUser, rng: np.random.Generator, *, draws: int = DRAWS, level: float = LEVEL
) -> Interval:
    """The mean and its percentile interval when users, with all their queries, are drawn again with replacement."""
    (means,) = bootstrap_means([table], rng, draws)
    return Interval(mean_over_slices(table), *percentile_interval(means, level))


def bootstrap_difference(
    a: PerUser, b: PerUser, rng: np.random.Generator, *, draws: int = DRAWS, level: float = LEVEL
) -> Difference:
    """The mean of a minus the mean of b, every draw taking the same users for both."""
    if a.counts.shape != b.counts.shape or (a.counts != b.counts).any():
        raise ValueError(
            "a paired comparison needs the same queries for both methods, user by user; "
            f"found tables of shapes {a.counts.shape} and {b.counts.shape} with {a.counts.sum()} and {b.counts.sum()} "
            "queries; join them on (user, slice) first"
        )
    means_a, means_b = bootstrap_means([a, b], rng, draws)
    gaps = means_a - means_b
    one_sided = min((gaps <= 0).sum(), (gaps >= 0).sum())
    p_value = min(1.0, 2 * (1 + float(one_sided)) / (1 + len(gaps)))
    return Difference(mean_over_slices(a) - mean_over_slices(b), *percentile_interval(gaps, level), p_value)


def mean_and_std(values: Float[np.ndarray, " R"]) -> tuple[float, float]:
    """Mean and sample standard deviation (divisor R - 1) over seeds; a single seed has no spread: NaN."""
    return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else float("nan")


def mean_over_slices(table: PerUser) -> float:
    return float(_column_mean(table.sums.sum(0)[None], table.counts.sum(0)[None])[0])


def _column_mean(sums: Float[np.ndarray, "D S"], counts: Num[np.ndarray, "D S"]) -> Float[np.ndarray, " D"]:
    """The mean over columns with queries of sum / count, for every draw; NaN where no column has any."""
    seen = counts > 0
    ratios = np.where(seen, sums / np.where(seen, counts, 1), 0.0)
    n_seen = seen.sum(1)
    return np.where(n_seen > 0, ratios.sum(1) / np.maximum(n_seen, 1), np.nan)


def bootstrap_means(tables: list[PerUser], rng: np.random.Generator, draws: int) -> tuple[Float[np.ndarray, " D"], ...]:
    """The mean of each table in every draw, all tables seeing the same users; users without a query are absent."""
    present = tables[0].counts.any(1)
    n_users = int(present.sum())
    if not n_users:
        return tuple(np.empty(0) for _ in tables)
    # One wide product instead of a narrow one for each table; most tables have the same queries, drawn once for all.
    sums = np.concatenate([table.sums[present] for table in tables], axis=1)
    edges = np.cumsum([table.sums.shape[1] for table in tables])[:-1]
    queries = [table.counts.tobytes() for table in tables]
    counts = {key: table.counts[present].astype(np.float64) for key, table in zip(queries, tables, strict=True)}
    rows = max(1, CHUNK // n_users)
    chunks = []
    for start in range(0, draws, rows):
        times = _times_drawn(n_users, min(rows, draws - start), rng)
        asked = {key: times @ of for key, of in counts.items()}
        parts = np.split(times @ sums, edges, axis=1)
        chunks.append([_column_mean(part, asked[key]) for part, key in zip(parts, queries, strict=True)])
    return tuple(np.concatenate(chunks, axis=1))


def _times_drawn(n_users: int, rows: int, rng: np.random.Generator) -> Float[np.ndarray, "D U"]:
    """How often each user is drawn when n_users are drawn with replacement, once per row."""
    drawn = rng.integers(0, n_users, size=(rows, n_users)) + n_users * np.arange(rows)[:, None]
    return np.bincount(drawn.ravel(), minlength=rows * n_users).reshape(rows, n_users).astype(np.float64)


def percentile_interval(means: Float[np.ndarray, " D"], level: float) -> tuple[float, float]:
    if not len(means):
        return float("nan"), float("nan")
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
