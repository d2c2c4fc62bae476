"""Stability against plasticity: how fast a slice is learned, and how much accuracy a row keeps for its forgetting."""

import math
from collections.abc import Mapping, Sequence

from protofed.evaluation.adaptation import Adaptation, AdaptationSummary, aggregate, converged_value, steps_to_fraction
from protofed.report.charts import finite_rows
from protofed.report.journal import traces
from protofed.report.layout import MISSING, Cell, Column, Drawing, Line, Missing, Part, Table, number
from protofed.report.runs import Run
from protofed.report.sections import Row, Section
from protofed.report.tables import MAIN, Results, key_of

STEPS = "Steps to 95 %"
FRONTIER = "Forgetting against accuracy"


def adaptation(section: Section) -> Part | Missing:
    """When each row's validation NDCG@10 first reaches 95 % of its best, slice by slice."""
    found = {row.label: by_slice(row) for row in section.rows}
    found = {label: slices for label, slices in found.items() if slices}
    if not found:
        return Missing(STEPS, "no run's log.jsonl holds validation traces (validation_ndcg10) of its own training")
    summaries = {label: {t: aggregate(seeds) for t, seeds in slices.items()} for label, slices in found.items()}
    quiet = [row.label for row in section.rows if row.label not in found]
    at_once = not any(summary.samples for slices in summaries.values() for summary in slices.values())
    note = (
        "Read off the validation traces: one point before the first epoch and one after each. The best is that of the "
        "run itself, whose training stops early, so it may lie below what a longer one would reach. A row that starts "
        "above 95 % needs 0 steps, also when it learns nothing: compare the columns start and best."
        + (" Every row starts there in every slice, so there is nothing to draw." if at_once else "")
        + (f" No trace: {', '.join(quiet)}." if quiet else "")
    )
    drawings = () if at_once else (_drawing(section, summaries),)
    return Part(f"{section.slug}-steps-part", STEPS, note, (_table(section, found),), drawings)


def _drawing(section: Section, summaries: Mapping[str, Mapping[int, AdaptationSummary]]) -> Drawing:
    header = ("method", "slice", "windows", "std", "steps", "start", "best", "censored", "traces")
    rows = tuple(
        (label, t, s.samples, math.nan, s.steps, s.start, s.converged, s.censored_fraction, s.n_traces)
        for label, slices in summaries.items()
        for t, s in slices.items()
    )
    caption = "Training windows until 95 % of the best, median over seeds"
    return Drawing(f"{section.slug}-steps", caption, "lines", header, rows, "slice", "windows to 95 %", from_zero=True)


def by_slice(row: Row) -> dict[int, list[Adaptation]]:
    """The row's adaptations by slice, one for every seed that kept a trace."""
    found: dict[int, list[Adaptation]] = {}
    for run in row.runs:
        for t, trace in traces(run.journal, _batch(run)).items():
            found.setdefault(t, []).append(steps_to_fraction(trace, converged_value(trace.values)))
    return dict(sorted(found.items()))


def frontier_part(results: Results) -> Part | Missing:
    """Every row between AF and NDCG@10: the paper's two axes as one plane."""
    estimates = {row.label: results.estimates[row.label] for row in results.section.rows}
    both = {label: (own["AF"], own[key_of(MAIN)]) for label, own in estimates.items()}
    rows = finite_rows([(label, af.mean, y.mean, af.std, y.std) for label, (af, y) in both.items()])
    if len(rows) < 2:
        return Missing(FRONTIER, "fewer than two rows have both AF and NDCG@10")
    name = f"{results.section.slug}-frontier"
    header = ("method", "AF", "ndcg@10", "AF_std", "ndcg@10_std")
    caption = "NDCG@10 against AF, whiskers one standard deviation over seeds"
    drawing = Drawing(name, caption, "points", header, rows, "AF (less is better)", "NDCG@10")
    note = "Up and to the left is better. Grey: rows that are not chosen. AF slice by slice is under Over the slices."
    return Part(f"{name}-part", FRONTIER, note, drawings=(drawing,))


def _table(section: Section, found: Mapping[str, Mapping[int, Sequence[Adaptation]]]) -> Table:
    """Medians over all slices and seeds."""
    columns = (
        Column("steps", "to 95 % of the best", "optimiser steps, median", lower_is_better=True, ranked=False),
        Column("windows", "to 95 % of the best", "steps times batch size: compares methods", ranked=False),
        Column("never", "to 95 % of the best", "share of traces that did not get there", ranked=False),
        Column("start", "validation NDCG@10", "before the first step, median", ranked=False),
        Column("best", "validation NDCG@10", "median", ranked=False),
    )
    whole = {label: aggregate([one for seeds in slices.values() for one in seeds]) for label, slices in found.items()}
    order = sorted(whole, key=lambda label: (whole[label].samples, label))
    trivial = {row.label: row.is_trivial for row in section.rows}
    lines = tuple(Line(label, _cells(whole[label]), trivial[label]) for label in order)
    caption = "Medians over slices and seeds"
    return Table(f"{section.slug}-steps-table", caption, columns, lines)


def _cells(summary: AdaptationSummary) -> tuple[Cell, ...]:
    counted = tuple(Cell(_whole(value), value=value) for value in (summary.steps, summary.samples))
    levels = tuple(Cell(number(value), value=value) for value in (summary.start, summary.converged))
    return (*counted, Cell(f"{summary.censored_fraction:.0%}", value=summary.censored_fraction), *levels)


def _whole(value: float) -> str:
    return "∞" if math.isinf(value) else MISSING if math.isnan(value) else f"{value:,.0f}"


def _batch(run: Run) -> int:
    return int(run.config.get("training", {}).get("batch_size", 64))
