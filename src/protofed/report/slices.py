"""What rows do over the slices: accuracy, forgetting, how fast they learn, and whom and what they serve."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from protofed.evaluation.adaptation import Adaptation, Trace, aggregate, converged_value, steps_to_fraction
from protofed.evaluation.exposure import EVENTS, GROUPS, PLACES
from protofed.evaluation.fairness import item_disparity, user_disparity
from protofed.evaluation.forgetting import af_over_time
from protofed.evaluation.significance import mean_and_std
from protofed.report.intervals import asked
from protofed.report.layout import MISSING, Column, Drawing, Line, Missing, Part, Table, cells_of, mean_of, number
from protofed.report.runs import MAIN, SHARES, SUM_COLUMN, Run, is_number
from protofed.report.sections import Row, Section
from protofed.report.tables import Results, key_of, main_matrix

Curves = Mapping[str, Float[np.ndarray, "seeds T"]]  # a value for each seed and slice, by row
OF_EVENTS = "test events"


def over_slices(section: Section) -> tuple[Drawing, Drawing]:
    """Accuracy right after each slice, and what was forgotten so far."""
    matrices = {row.label: [main_matrix(run) for run in row.runs] for row in section.rows}
    accuracy = {label: np.array([np.diagonal(a)[1:] for a in own]) for label, own in matrices.items()}
    forgotten = {label: np.array([af_over_time(a)[1:] for a in own]) for label, own in matrices.items()}
    return (
        line_drawing(f"{section.slug}-accuracy", "NDCG@10 right after each slice, A[t, t]", "A[t, t]", accuracy),
        line_drawing(f"{section.slug}-forgetting", "Average forgetting so far, AF(t)", "AF(t)", forgotten),
    )


def line_drawing(name: str, caption: str, title: str, curves: Curves, *, from_zero: bool = False) -> Drawing:
    """Every row over slices 1..T: means over seeds with one standard deviation to either side."""
    rows = [
        (label, t + 1, *mean_and_std(of_slice))
        for label, values in curves.items()
        for t, of_slice in enumerate(values.T)
        if np.isfinite(of_slice).all()
    ]
    return Drawing(name, caption, "lines", ("method", "slice", title, "std"), tuple(rows), "slice", title, from_zero)


def heat_maps(name: str, caption: str, matrices: Mapping[str, Float[np.ndarray, "S S"]]) -> Drawing:
    """A[s, t] of every row, one of which the page shows at a time: a line for each slice tested."""
    size = max(len(matrix) for matrix in matrices.values())
    rows = [(label, s, *of_slice.round(4).tolist()) for label, a in matrices.items() for s, of_slice in enumerate(a)]
    header = ("method", "slice_tested", *(f"after {t}" for t in range(size)))
    return Drawing(name, caption, "map", header, tuple(rows), "trained up to slice", "tested on slice")


def whole(value: float) -> str:
    """A number without decimals; infinite where most never got there."""
    return "∞" if math.isinf(value) else MISSING if math.isnan(value) else f"{value:,.0f}"


GOAL, LEVEL = "to 95 % of the best", "validation NDCG@10"
ADAPTATION = (
    Column("steps", GOAL, "optimiser steps, median", lower_is_better=True, ranked=False, show=whole),
    Column("windows", GOAL, "steps times batch size: compares methods", ranked=False, show=whole),
    Column("never", GOAL, "share of traces that did not get there", ranked=False, show="{:.0%}".format),
    Column("start", LEVEL, "before the first step, median", ranked=False),
    Column("best", LEVEL, "median", ranked=False),
)


def adaptation(section: Section) -> Part | Missing:
    """When each row's validation NDCG@10 first reaches 95 % of its best, slice by slice."""
    title, name = "Steps to 95 %", f"{section.slug}-steps"
    by_row = {row.label: by_slice(row) for row in section.rows}
    found = [(row, slices) for row in section.rows if (slices := by_row[row.label])]
    if not found:
        return Missing(title, "no run's log.jsonl holds validation traces (validation_ndcg10) of its own training")
    points = [(row.label, t, aggregate(seeds)) for row, slices in found for t, seeds in slices.items()]
    means = [(row, aggregate([one for seeds in slices.values() for one in seeds])) for row, slices in found]
    quiet = [label for label, slices in by_row.items() if not slices]
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
        lines.append(Line(row.label, cells_of(ADAPTATION, values), row.is_trivial))
    table = Table(f"{name}-table", "Medians over slices and seeds", ADAPTATION, tuple(lines))
    header = ("method", "slice", "windows", "std", "steps", "start", "best", "censored", "traces")
    rows = tuple(
        (label, t, s.samples, math.nan, s.steps, s.start, s.converged, s.censored_fraction, s.n_traces)
        for label, t, s in points
    )
    caption = "Training windows until 95 % of the best, median over seeds"
    drawing = Drawing(name, caption, "lines", header, rows, "slice", "windows to 95 %", from_zero=True)
    return Part(f"{name}-part", title, note, (table,), () if at_once else (drawing,))


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


def user_gap(section: Section) -> Part | Missing:
    """How far the busiest and the quietest third of users are apart."""
    title = "Fairness over time"
    curves = {row.label: np.array(found) for row in section.rows if (found := disparities(row))}
    if not any(np.isfinite(values).any() for values in curves.values()):
        return Missing(title, "no run kept its users (per_user.parquet)")
    name = f"{section.slug}-user-disparity"
    caption = "Disp_user: NDCG@10 of the busiest third of users against the quietest, distance"
    drawing = line_drawing(name, caption, "|busy - quiet|", curves, from_zero=True)
    note = (
        "Mean NDCG@10 over users (all events, sampled candidates, every user alike) of each slice. Activity is counted "
        "in test queries up to the slice, because run folders do not hold training events; 0 is equal service."
    )
    return Part(f"{name}-part", title, note, drawings=(drawing,))


def exposure(section: Section) -> Part | Missing:
    """Whose items fill the Top-10 of the full ranking, beside whose items are really met."""
    title = "Exposure of popular and rare items"
    told = [row for row in section.rows if all(("full", "all", m) in run.matrices for run in row.runs for m in SHARES)]
    if not told:
        why = "metrics.parquet of these runs holds no exposure_head@10; runs of this version do"
        return Missing(title, f"{why}, so run again to see it")
    name = f"{section.slug}-exposure"
    silent = [row.label for row in section.rows if row not in told]
    note = (
        "Shares of all Top-10 places, full ranking, model right after each slice. Head: the fifth of the available "
        "items with most train events up to the slice; tail: the fifth with fewest; middle: the rest. A method that "
        f"shows what people meet has the shares of the {OF_EVENTS}. Disp_item is the distance between the shares of "
        "head and tail; 0 gives both as many places."
    )
    note += f" Not told by {', '.join(silent)}." if silent else ""
    curves = {row.label: _shares(row.runs, PLACES) for row in told} | {OF_EVENTS: _shares(told[0].runs[:1], EVENTS)}
    told_of = f"Top-10 places that go to {{}} items, beside their share of the {OF_EVENTS}"
    apart = f"Disp_item: distance between the shares of head and tail items, beside that of the {OF_EVENTS}"
    figures = (
        ("head", f"{name}-head", told_of.format("head"), "share of head items"),
        ("tail", f"{name}-tail", told_of.format("tail"), "share of tail items"),
        ("disparity", f"{section.slug}-item-disparity", apart, "|head - tail|"),
    )
    drawings = tuple(
        line_drawing(figure, caption, y, {label: own[kind] for label, own in curves.items()}, from_zero=True)
        for kind, figure, caption, y in figures
    )
    return Part(name, title, note, (_share_table(name, told),), drawings)


def _share_table(name: str, rows: Sequence[Row]) -> Table:
    """Means over slices and seeds, and how far the head's share lies above its share of events."""
    columns = [Column(group, "share of Top-10 places", ranked=False) for group in GROUPS]
    columns.append(Column("head above events", "", "the head's share less its share of the test events", ranked=False))
    columns.append(Column("Disp_item", "", "|head - tail| of a slice, mean over slices and seeds", ranked=False))
    lines = []
    for row in rows:
        (head, *others, apart), (met, *_) = _means(row, PLACES), _means(row, EVENTS)
        lines.append(Line(row.label, cells_of(columns, [head, *others, head - met, apart]), row.is_trivial))
    lines.sort(key=lambda line: (line.cells[-2].value, line.label))
    *met_by_group, disparity = map(number, _means(rows[0], EVENTS))
    footer = Line(OF_EVENTS, cells_of(columns, [*met_by_group, "", disparity]))
    return Table(f"{name}-table", "Mean over slices and seeds", tuple(columns), tuple(lines), (footer,))


def _means(row: Row, names: Mapping[str, str]) -> list[float]:
    """What `_shares` says, means over slices with queries and over seeds."""
    return [mean_of(found.ravel()) for found in _shares(row.runs, names).values()]


def _shares(runs: Sequence[Run], names: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The share of each group and Disp_item, of every run in slices 1..T; `names` says what they are called."""
    found = {group: np.array([run.matrices["full", "all", m].diagonal for run in runs]) for group, m in names.items()}
    return found | {"disparity": item_disparity(found["head"], found["tail"])}


def disparities(row: Row) -> list[list[float]]:
    """For each seed, |busy - quiet| of slices 1..T; empty where the users are unknown."""
    found = []
    for run, kept in zip(row.runs, asked(row.runs), strict=False):
        rows, slices = kept.of("sampled", "all"), range(1 + run.n_slices)
        sums, counts = (rows.by_user(name, rows.users(), slices) for name in (SUM_COLUMN["ndcg@10"], "n"))
        activity = counts.cumsum(1)
        found.append([user_disparity(sums[:, t], counts[:, t], activity[:, t]).disparity for t in slices[1:]])
    return found
