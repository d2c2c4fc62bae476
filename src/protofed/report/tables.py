"""The numbers of a section: headline, distance to the best row and strata."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from jaxtyping import Float

from protofed.evaluation.forgetting import af, bwt, final_accuracy, fwt
from protofed.evaluation.ranking import uniform_reference
from protofed.experiments.matrices import Measure
from protofed.report.intervals import Intervals, bootstrap
from protofed.report.layout import Cell, Column, Estimate, Line, Table, estimate_cell, estimate_cells, known, mean_of
from protofed.report.prices import Price, ledgers_of
from protofed.report.runs import MAIN, Run
from protofed.report.sections import Row, Section

MEASURES: tuple[Measure, ...] = (  # of an overall comparison
    MAIN,
    ("sampled", "all", "hr@10"),
    ("sampled", "novel", "ndcg@10"),
    ("full", "novel", "ndcg@10"),
)
NAMES = {"ndcg@10": "NDCG@10", "hr@10": "HR@10"}
HEADLINE: tuple[Measure, ...] = tuple(
    (candidates, subset, metric)
    for metric in ("ndcg@10", "hr@10")
    for candidates in ("sampled", "full")
    for subset in ("all", "novel")
)
Say = Callable[[Row], Estimate]
Says = Sequence[tuple[Column, Say]]
PAIRS = tuple((candidates, subset) for candidates, subset, metric in HEADLINE if metric == "ndcg@10")
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
    ledgers: Mapping[str, Sequence[Price]]  # of the rows that released something

    @property
    def prices(self) -> dict[str, Price]:
        """The price of every row that released something: that of the dearest of its seeds."""
        return {
            label: max(own, key=lambda price: price.released if price.known else 0.0)
            for label, own in self.ledgers.items()
        }

    def of(self, key: str) -> Say:
        """What a column with an estimate says of a row; nothing where the section has no such row."""
        return lambda row: self.estimates.get(row.label, {}).get(key, Estimate(math.nan))

    def mean(self, row: Row, measure: Measure = MAIN) -> float:
        """The row's mean of a measure, the lowest there is where it has none."""
        return known(self.estimates[row.label][key_of(measure)].mean, -math.inf)

    def best(self, rows: Sequence[Row], measure: Measure) -> Row:
        """The row with the highest mean of a measure."""
        return max(rows, key=lambda row: self.mean(row, measure))

    def ranked(self, rows: Sequence[Row]) -> list[Row]:
        """Rows by their NDCG@10, the best first."""
        return sorted(rows, key=lambda row: (-self.mean(row), row.label))


def compute(section: Section) -> Results:
    """Every headline estimate of a section."""
    intervals = {pair: bootstrap(section, *pair) for pair in sorted(PAIRS)}
    estimates = {row.label: _row_estimates(row, intervals) for row in section.rows}
    return Results(section, estimates, intervals, ledgers_of(section))


def key_of(measure: Measure) -> str:
    """How a measure is called in --json: ndcg@10/sampled/all."""
    candidates, subset, metric = measure
    return f"{metric}/{candidates}/{subset}"


def mean_over_slices(run: Run, measure: Measure = MAIN) -> float:
    """Mean of A[t, t] over the slices t = 1..T that have queries; NaN without any."""
    return mean_of(run.matrices[measure].diagonal) if measure in run.matrices else math.nan


def main_matrix(run: Run) -> Float[np.ndarray, "S S"]:
    """A[s, t] of NDCG@10, all events, sampled candidates."""
    size = run.n_slices + 1
    return run.matrices[MAIN].values if MAIN in run.matrices else np.full((size, size), np.nan)


def continual(run: Run, name: str) -> float:
    """AF, BWT, FWT or the final model's average of one run; NaN where it ranked no sampled candidates."""
    if MAIN not in run.matrices:
        return math.nan
    a = main_matrix(run)
    if name == "FWT":
        return fwt(a, np.full(len(a), uniform_reference(run.n_candidates)["ndcg@10"]))
    return {"AF": af, "BWT": bwt, "final": final_accuracy}[name](a)


def measured(name: str, caption: str, columns: Says, rows: Sequence[Row], footer: tuple[Line, ...] = ()) -> Table:
    """Rows by what each column says of them, the best first by the first column, the best of each column marked."""
    found = [(row, [say(row) for _, say in columns]) for row in rows]
    found.sort(key=lambda pair: (-known(pair[1][0].mean, -math.inf), pair[0].label))
    cells = [estimate_cells(column, [own[place] for _, own in found]) for place, (column, _) in enumerate(columns)]
    of_rows = zip(found, zip(*cells, strict=True), strict=True)
    lines = tuple(Line(row.label, own, row.is_trivial) for (row, _), own in of_rows)
    return Table(name, caption, tuple(column for column, _ in columns), lines, footer)


def headline(results: Results) -> Table:
    """Every measure of every row, with the queries and users below."""
    section, columns = results.section, []
    for candidates, subset, metric in HEADLINE:
        hint = f"{NAMES[metric]}, {_ranked(candidates, section)}, {subset} events"
        column = Column(subset, f"{NAMES[metric]} {candidates}", hint)
        columns.append((column, results.of(key_of((candidates, subset, metric)))))
    columns += [(column, results.of(name)) for name, column in CONTINUAL.items()]
    caption = f"{section.title}: mean of A[t, t] over slices 1 to {section.n_slices}"
    blank = (Cell(""),) * len(CONTINUAL)
    users = [results.intervals[candidates, subset].n_users for candidates, subset, _ in HEADLINE]
    footer = (
        Line("queries", (*_counts(_n_queries(section, measure) for measure in HEADLINE), *blank)),
        Line("users", (*_counts(users), *blank)),
    )
    return measured(f"{section.slug}-headline", caption, columns, section.rows, footer)


def distances(results: Results) -> Table | None:
    """Each row's NDCG@10 minus the best row's, column by column; None where no row kept its users."""
    found = [results.intervals[pair] for pair in PAIRS]
    if not any(intervals.best for intervals in found):
        return None
    columns = [
        Column(subset, candidates, f"minus {intervals.best or 'the best row'}", ranked=False)
        for (candidates, subset), intervals in zip(PAIRS, found, strict=True)
    ]
    lines = [
        Line(row.label, tuple(_gap_cell(intervals, row.label) for intervals in found), row.is_trivial)
        for row in results.section.rows
    ]
    lines.sort(key=lambda line: (-known(line.cells[0].value, -math.inf), line.label))
    name = f"{results.section.slug}-distance"
    caption = "NDCG@10 minus that of the best row, with 95 % paired bootstrap interval over users"
    return Table(name, caption, tuple(columns), tuple(lines))


def strata(section: Section, candidates: str) -> Table:
    """NDCG@10 of every stratum of the test events."""
    kinds = {(candidates, subset, "ndcg@10"): Column(subset.replace("_", " ")) for subset in STRATA}
    other, subset, label, hint = EXTRA_STRATA[candidates]
    extra = (other, subset, "ndcg@10")
    if any(extra in run.matrices for run in section.runs):
        kinds[extra] = Column(label, "", hint)
    columns = [(column, partial(_mean, measure=measure)) for measure, column in kinds.items()]
    counts = Line("queries", _counts(_n_queries(section, measure) for measure in kinds))
    caption = f"NDCG@10 by kind of event, {_ranked(candidates, section)}"
    return measured(f"{section.slug}-strata-{candidates}", caption, columns, section.rows, (counts,))


def mean_matrix(row: Row) -> Float[np.ndarray, "S S"]:
    """A[s, t] of NDCG@10 averaged over seeds."""
    return np.asarray(np.stack([main_matrix(run) for run in row.runs]).mean(axis=0))


def _mean(row: Row, measure: Measure) -> Estimate:
    return row.over_seeds(mean_over_slices, measure)


def _row_estimates(row: Row, intervals: Mapping[tuple[str, str], Intervals]) -> dict[str, Estimate]:
    estimates = {}
    for measure in HEADLINE:
        candidates, subset, metric = measure
        span, found = intervals[candidates, subset].of.get((row.label, metric)), _mean(row, measure)
        estimates[key_of(measure)] = replace(found, low=span.low, high=span.high) if span else found
    return estimates | {name: row.over_seeds(continual, name) for name in CONTINUAL}


def _n_queries(section: Section, measure: Measure) -> int:
    """The queries of slices 1..T; the largest count where rows disagree (the page then warns)."""
    found = (run.matrices[measure].diagonal_queries for run in section.runs if measure in run.matrices)
    return max((int(queries.sum()) for queries in found), default=0)


def _gap_cell(intervals: Intervals, label: str) -> Cell:
    if label == intervals.best:
        return Cell("best", value=0.0, best=True)
    gap = intervals.behind.get(label)
    return estimate_cell(gap) if gap else Cell()


def _counts(numbers: Iterable[int]) -> tuple[Cell, ...]:
    return tuple(Cell(f"{count:,}", value=float(count)) if count else Cell(value=0.0) for count in numbers)


def _ranked(candidates: str, section: Section) -> str:
    return (
        "full ranking" if candidates == "full" else f"1 positive + {section.runs[0].n_candidates - 1} sampled negatives"
    )
