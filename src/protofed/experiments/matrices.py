"""A[s, t] from a run's metrics: how well slice s is answered after slice t was learned."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int64

Measure = tuple[str, str, str]  # candidates, subset, metric


@dataclass(frozen=True, slots=True)
class Matrix:
    """A[s, t] of one measure: row s is the slice tested, column t the last slice trained; NaN without queries."""

    values: Float[np.ndarray, "S S"]
    n_queries: Int64[np.ndarray, "S S"]

    @property
    def diagonal(self) -> Float[np.ndarray, " T"]:
        """A[t, t] for t = 1..T."""
        return np.diagonal(self.values)[1:]

    @property
    def diagonal_queries(self) -> Int64[np.ndarray, " T"]:
        """How many queries each A[t, t], t = 1..T, is the mean of."""
        return np.diagonal(self.n_queries)[1:]


def matrices(metrics: pa.Table) -> dict[Measure, Matrix]:
    """The matrix of every measure in the table, on the test parts."""
    if "split" in metrics.column_names:
        metrics = metrics.filter(pc.equal(metrics["split"], "test"))
    tested, trained, value, n = (
        metrics[column].to_numpy() for column in ("slice_tested", "slice_trained", "value", "n_queries")
    )
    size = int(max(tested.max(initial=0), trained.max(initial=0))) + 1
    measures = list(zip(*(metrics[column].to_pylist() for column in ("candidates", "subset", "metric")), strict=True))
    place = {measure: index for index, measure in enumerate(sorted(set(measures)))}
    where = np.fromiter((place[measure] for measure in measures), dtype=np.int64, count=len(measures))
    values = np.full((len(place), size, size), np.nan)
    values[where, tested, trained] = np.where(n > 0, value, np.nan)
    counts = np.zeros((len(place), size, size), dtype=np.int64)
    counts[where, tested, trained] = n
    return {measure: Matrix(values[index], counts[index]) for measure, index in place.items()}


def main_values(metrics: pa.Table) -> Float[np.ndarray, "S S"]:
    """A[s, t] of the measure that runs are judged by: NDCG@10, sampled candidates, all events."""
    return matrices(metrics)["sampled", "all", "ndcg@10"].values
