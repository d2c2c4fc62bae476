"""Stability against plasticity: how fast a slice is learned, and how much accuracy a row keeps for its forgetting."""

import math

import numpy as np

from protofed.evaluation.adaptation import (
    Adaptation,
    Trace,
    aggregate,
    converged_value,
    steps_to_fraction,
)
from protofed.report.layout import MISSING, Column, Drawing, Line, Missing, Part, Table, cells_of
from protofed.report.runs import MAIN, Run, is_number
from protofed.report.sections import Row, Section
from protofed.report.tables import Results, key_of


def whole(value: float) -> str:
    """A number without decimals; infinite where most never got there."""
    return "∞" if math.isinf(value) else MISSING if math.isnan(value) else f"{value:,.0f}"


GOAL, LEVEL = "to 95 % of the best", "validation NDCG@10"
COLUMNS = (
    Column("steps", GOAL, "optimiser steps, median", lower_is_better=True, ranked=False, show=whole),
    Column("windows", GOAL, "steps times batch size: compares methods", ranked=False, show=whole),
    Column("never", GOAL, "share of traces that did not get there", ranked=False, show="{:.0%}".format),
    Column("start", LEVEL, "before the first step, median", ranked=False),
    Column("best", LEVEL, "median", ranked=False),
)


def adaptation(section: Section) -> Part | Missing:
    """When each row's validation NDCG@10 first reaches 95 % of its best, slice by slice."""
    title = "Steps to 95 %"
    found = [(row, slices) for row in section.rows if (slices := by_slice(row))]
    if not found:
        return Missing(title, "no run's log.jsonl holds validation traces (validation_ndcg10) of its own training")
    points = [(row.label, t, aggregate(seeds)) for row, slices in found for t, seeds in slices.items()]
    means = [(row, aggregate([one for seeds in slices.values() for one in seeds])) for row, slices in found]
    told = {row.label for row, _ in found}
    quiet = [row.label for row in section.rows if row.label not in told]
    at_once = not any(summary.samples for _, _, summary in points)
    note = (
        "Read off the validation traces: one point before the first epoch and one after each. The best is that of the "
        "run itself, whose training stops early, so it may lie below what a longer one would reach. A row that starts "
        "above 95 % needs 0 steps, also when it learns nothing: compare the columns start and best."
        + (" Every row starts there in every slice, so there is nothing to draw." if at_once else "")
        + (f" No trace: {', '.join(quiet)}." if quiet else "")
    )
    lines = []
    for row, s in sorted(means, key=lambda pair: (pair[1].samples, pair[0].label)):
        values = [s.steps, s.samples, s.censored_fraction, s.start, s.converged]
        lines.append(Line(row.label, cells_of(COLUMNS, values), row.is_trivial))
    table = Table(f"{section.slug}-steps-table", "Medians over slices and seeds", COLUMNS, tuple(lines))
    header = ("method", "slice", "windows", "std", "steps", "start", "best", "censored", "traces")
    rows = tuple(
        (label, t, s.samples, math.nan, s.steps, s.start, s.converged, s.censored_fraction, s.n_traces)
        for label, t, s in points
    )
    caption = "Training windows until 95 % of the best, median over seeds"
    drawing = Drawing(
        f"{section.slug}-steps", caption, "lines", header, rows, "slice", "windows to 95 %", from_zero=True
    )
    return Part(f"{section.slug}-steps-part", title, note, (table,), () if at_once else (drawing,))


def by_slice(row: Row) -> dict[int, list[Adaptation]]:
    """The row's adaptations by slice, one for every seed that kept a trace."""
    found: dict[int, list[Adaptation]] = {}
    for run in row.runs:
        for t, trace in traces(run).items():
            found.setdefault(t, []).append(steps_to_fraction(trace, converged_value(trace.values)))
    return dict(sorted(found.items()))


def traces(run: Run) -> dict[int, Trace]:
    """The validation trace of each slice whose training kept one: a point before the first epoch and after each.

    Where clients train too, the trace is that of new item rows alone and says nothing about the method: left out.
    """
    batch, found = int(run.settings.get("training.batch_size", 64)), {}
    for record in run.journal:
        values = record.get("validation_ndcg10")
        if values and "active_clients" not in record and is_number(record.get("steps_per_epoch")):
            steps = np.arange(len(values)) * int(record["steps_per_epoch"])
            found[int(record["slice"])] = Trace(steps, steps * batch, np.array(values, dtype=np.float64))
    return found


def frontier_part(results: Results) -> Part | Missing:
    """Every row between AF and NDCG@10: the paper's two axes as one plane."""
    title, estimates = "Forgetting against accuracy", results.estimates
    both = [(row.label, estimates[row.label]["AF"], estimates[row.label][key_of(MAIN)]) for row in results.section.rows]
    rows = tuple((label, af.mean, y.mean, af.std, y.std) for label, af, y in both if math.isfinite(af.mean + y.mean))
    if len(rows) < 2:
        return Missing(title, "fewer than two rows have both AF and NDCG@10")
    name = f"{results.section.slug}-frontier"
    header = ("method", "AF", "ndcg@10", "AF_std", "ndcg@10_std")
    caption = "NDCG@10 against AF, whiskers one standard deviation over seeds"
    drawing = Drawing(name, caption, "points", header, rows, "AF (less is better)", "NDCG@10")
    note = "Up and to the left is better. Grey: rows that are not chosen. AF slice by slice is under Over the slices."
    return Part(f"{name}-part", title, note, drawings=(drawing,))
