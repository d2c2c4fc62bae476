"""The numbers of a section: headline, distance to the best row and strata."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from protofed.evaluation.forgetting import af, bwt, final_accuracy, fwt
from protofed.evaluation.ranking import uniform_reference
from protofed.evaluation.significance import Interval, mean_and_std
from protofed.experiments.matrices import Matrix, Measure
from protofed.report.intervals import Intervals, bootstrap
from protofed.report.layout import Cell, Column, Estimate, Line, Table, interval, number, table_of_estimates
from protofed.report.prices import Price, prices_of
from protofed.report.runs import Run
from protofed.report.sections import Row, Section

MAIN: Measure = ("sampled", "all", "ndcg@10")
NAMES = {"ndcg@10": "NDCG@10", "hr@10": "HR@10", "sampled": "sampled", "full": "full"}
HEADLINE: tuple[Measure, ...] = tuple(
    (candidates, subset, metric)
    for metric in ("ndcg@10", "hr@10")
    for candidates in ("sampled", "full")
    for subset in ("all", "novel")
)
STRATA = ("all", "repeat", "novel", "new_item", "known_item", "new_user", "returning", "empty_history", "unseen_item")
EXTRA_STRATA = {
    "sampled": ("sampled_hard", "repeat", "repeat, hard", "repeats ranked against the user's own past items"),
    "full": ("full_unseen", "all", "all, unseen", "items the user has seen are left out of the ranking"),
}
CONTINUAL = {
    "AF": Column("AF", "continual", "average forgetting over s = 0..T-1; lower is better", lower_is_better=True),
    "BWT": Column("BWT", "continual", "backward transfer over s = 0..T-1; higher is better"),
    "FWT": Column("FWT", "continual", "forward transfer over s = 1..T, against a uniform ranking; higher is better"),
    "final": Column("final", "continual", "the final model's mean over slices 0..T"),
}


@dataclass(frozen=True, slots=True)
class Results:
    """All numbers of a section that more than one part of the page needs."""

    section: Section
    estimates: Mapping[str, Mapping[str, Estimate]]  # by row, then by "ndcg@10/sampled/all", "AF", ...
    intervals: Mapping[tuple[str, str], Intervals]  # by (candidates, subset)
    prices: Mapping[str, Price] = field(default_factory=dict)  # of the rows that released something

    def best(self, key: str, *, trivial: bool | None = None) -> tuple[str, float]:
        """The row with the highest mean of a column and that mean; ("", NaN) without any."""
        rows = [row.label for row in self.section.rows if trivial is None or row.is_trivial == trivial]
        known = [(label, self.estimates[label][key].mean) for label in rows]
        known = [pair for pair in known if math.isfinite(pair[1])]
        return max(known, key=lambda pair: pair[1], default=("", math.nan))


def compute(section: Section) -> Results:
    """Every headline estimate of a section."""
    pairs = sorted({(candidates, subset) for candidates, subset, _ in HEADLINE})
    intervals = {pair: bootstrap(section, *pair) for pair in pairs}
    estimates = {row.label: _row_estimates(row, section, intervals) for row in section.rows}
    return Results(section, estimates, intervals, prices_of(section))


def key_of(measure: Measure) -> str:
    """How a measure is called in --json: ndcg@10/sampled/all."""
    candidates, subset, metric = measure
    return f"{metric}/{candidates}/{subset}"


def mean_over_slices(run: Run, measure: Measure) -> float:
    """Mean of A[t, t] over the slices t = 1..T that have queries; NaN without any."""
    matrix = run.matrices.get(measure)
    known = matrix.diagonal[np.isfinite(matrix.diagonal)] if matrix else np.empty(0)
    return float(known.mean()) if len(known) else math.nan


def main_matrix(run: Run) -> Float[np.ndarray, "S S"]:
    """A[s, t] of NDCG@10, all events, sampled candidates."""
    size = run.n_slices + 1
    return run.matrices[MAIN].values if MAIN in run.matrices else np.full((size, size), np.nan)


def continual(run: Run, n_candidates: int) -> dict[str, float]:
    """AF, BWT, FWT and the final model's average of one run; NaN where it ranked no sampled candidates."""
    if MAIN not in run.matrices:
        return dict.fromkeys(CONTINUAL, math.nan)
    a = main_matrix(run)
    scratch = np.full(len(a), uniform_reference(n_candidates)["ndcg@10"])
    return {"AF": af(a), "BWT": bwt(a), "FWT": fwt(a, scratch), "final": final_accuracy(a)}


def headline(results: Results) -> Table:
    """The first table a reader sees."""
    section = results.section
    columns = [
        Column(
            subset, f"{NAMES[metric]} {candidates}", f"{NAMES[metric]}, {_ranked(candidates, section)}, {subset} events"
        )
        for candidates, subset, metric in HEADLINE
    ]
    keys = [key_of(measure) for measure in HEADLINE] + list(CONTINUAL)
    rows = [(row.label, row.is_trivial, [results.estimates[row.label][key] for key in keys]) for row in section.rows]
    caption = f"{section.title}: mean of A[t, t] over slices 1 to {section.n_slices}"
    return table_of_estimates(
        f"{section.slug}-headline", caption, [*columns, *CONTINUAL.values()], rows, _sizes(results)
    )


def distances(results: Results) -> Table | None:
    """Each row's NDCG@10 minus the best row's, column by column; None where no row kept its users."""
    pairs = [(candidates, subset) for candidates, subset, metric in HEADLINE if metric == "ndcg@10"]
    if not any(results.intervals[pair].best for pair in pairs):
        return None
    columns = [
        Column(
            subset, candidates, f"minus {results.intervals[candidates, subset].best or 'the best row'}", ranked=False
        )
        for candidates, subset in pairs
    ]
    rows = [
        (row.label, [results.intervals[pair].behind.get(row.label) for pair in pairs]) for row in results.section.rows
    ]
    rows.sort(key=lambda row: (-row[1][0].mean if row[1][0] else math.inf, row[0]))
    trivial = {row.label: row.is_trivial for row in results.section.rows}
    lines = [
        Line(
            label,
            tuple(
                _gap_cell(gap, is_best=label == results.intervals[pair].best)
                for pair, gap in zip(pairs, gaps, strict=True)
            ),
            trivial[label],
        )
        for label, gaps in rows
    ]
    return Table(
        f"{results.section.slug}-distance",
        "NDCG@10 minus that of the best row, with 95 % paired bootstrap interval over users",
        tuple(columns),
        tuple(lines),
    )


def strata(section: Section, candidates: str) -> Table:
    """NDCG@10 of every stratum of the test events."""
    measures: list[Measure] = [(candidates, subset, "ndcg@10") for subset in STRATA]
    columns = [Column(subset.replace("_", " ")) for subset in STRATA]
    other, subset, label, hint = EXTRA_STRATA[candidates]
    extra = (other, subset, "ndcg@10")
    if any(extra in run.matrices for row in section.rows for run in row.runs):
        measures.append(extra)
        columns.append(Column(label, "", hint))
    rows = [
        (row.label, row.is_trivial, [_over_seeds(row, lambda run, m=m: mean_over_slices(run, m)) for m in measures])  # type: ignore[misc]
        for row in section.rows
    ]
    counts = Line("queries", tuple(_count_cell(_n_queries(section, measure)) for measure in measures))
    caption = f"NDCG@10 by kind of event, {_ranked(candidates, section)}"
    return table_of_estimates(f"{section.slug}-strata-{candidates}", caption, columns, rows, (counts,))


def mean_matrix(row: Row) -> Float[np.ndarray, "S S"]:
    """A[s, t] of NDCG@10 averaged over seeds."""
    return np.asarray(np.stack([main_matrix(run) for run in row.runs]).mean(axis=0))


def _row_estimates(row: Row, section: Section, intervals: Mapping[tuple[str, str], Intervals]) -> dict[str, Estimate]:
    estimates = {}
    for measure in HEADLINE:
        candidates, subset, metric = measure
        found = _over_seeds(row, lambda run, measure=measure: mean_over_slices(run, measure))  # type: ignore[misc]
        span = intervals[candidates, subset].of.get((row.label, metric))
        estimates[key_of(measure)] = Estimate(found.mean, found.std, span.low, span.high) if span else found
    by_run = [continual(run, section.n_candidates) for run in row.runs]
    for name in CONTINUAL:
        estimates[name] = Estimate(*mean_and_std(np.array([values[name] for values in by_run])))
    return estimates


def _over_seeds(row: Row, value: Callable[[Run], float]) -> Estimate:
    return Estimate(*mean_and_std(np.array([value(run) for run in row.runs])))


def _sizes(results: Results) -> tuple[Line, ...]:
    queries = tuple(_count_cell(_n_queries(results.section, measure)) for measure in HEADLINE)
    users = tuple(_count_cell(results.intervals[candidates, subset].n_users) for candidates, subset, _ in HEADLINE)
    blank = (Cell(""),) * len(CONTINUAL)
    return Line("queries", queries + blank), Line("users", users + blank)


def _n_queries(section: Section, measure: Measure) -> int:
    """The queries of slices 1..T; the largest count where rows disagree (the page then warns)."""
    counts = (_matrix_queries(run.matrices.get(measure)) for row in section.rows for run in row.runs)
    return max(counts, default=0)


def _matrix_queries(matrix: Matrix | None) -> int:
    return int(matrix.diagonal_queries.sum()) if matrix else 0


def _gap_cell(gap: Interval | None, *, is_best: bool) -> Cell:
    if is_best:
        return Cell("best", value=0.0, best=True)
    return Cell(number(gap.mean), "", interval(gap.low, gap.high), gap.mean) if gap else Cell("–")


def _count_cell(count: int) -> Cell:
    return Cell(f"{count:,}" if count else "–", value=float(count))


def _ranked(candidates: str, section: Section) -> str:
    return "full ranking" if candidates == "full" else f"1 positive + {section.n_candidates - 1} sampled negatives"
