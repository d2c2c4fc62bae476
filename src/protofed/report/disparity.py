"""Fairness over time: how far busy users are better served than quiet ones, and which items fill the Top-10."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from protofed.evaluation.exposure import EVENTS, GROUPS, PLACES
from protofed.evaluation.fairness import item_disparity, user_disparity
from protofed.evaluation.significance import PerUser
from protofed.report.charts import Curve, line_drawing
from protofed.report.intervals import per_user
from protofed.report.layout import Column, Drawing, Line, Missing, Part, Table, cells_of, mean_of, number
from protofed.report.runs import SHARES, Run
from protofed.report.sections import Row, Section

OF_EVENTS = "test events"
Shares = Callable[[Sequence[Run], Mapping[str, str]], np.ndarray]


def fairness(section: Section) -> tuple[Part | Missing, ...]:
    """The gap between the busiest and the quietest third of users over the slices; then the exposure of items."""
    return user_gap(section), exposure(section)


def user_gap(section: Section) -> Part | Missing:
    """How far the busiest and the quietest third of users are apart."""
    title = "Fairness over time"
    curves = [Curve(row.label, np.array(found)) for row in section.rows if (found := disparities(row))]
    if not any(np.isfinite(curve.values).any() for curve in curves):
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
    return Part(name, title, note, (_share_table(name, told),), _drawings(section.slug, told))


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


def _drawings(slug: str, rows: Sequence[Row]) -> tuple[Drawing, ...]:
    """The shares of head and of tail items over the slices, and how far apart they are."""
    drawings = []
    for group in ("head", "tail"):
        caption = f"Top-10 places that go to {group} items, beside their share of the {OF_EVENTS}"
        shares = partial(_over_slices, group=group)
        drawings.append(_drawing(f"{slug}-exposure-{group}", caption, f"share of {group} items", rows, shares))
    caption = f"Disp_item: distance between the shares of head and tail items, beside that of the {OF_EVENTS}"
    return *drawings, _drawing(f"{slug}-item-disparity", caption, "|head - tail|", rows, item_disparities)


def _drawing(name: str, caption: str, title: str, rows: Sequence[Row], shares: Shares) -> Drawing:
    """Every row over the slices, and the test events themselves."""
    curves = [Curve(row.label, shares(row.runs, PLACES)) for row in rows]
    curves.append(Curve(OF_EVENTS, shares(rows[0].runs[:1], EVENTS)))
    return line_drawing(name, caption, title, curves, from_zero=True)


def _means(row: Row, names: Mapping[str, str]) -> list[float]:
    """The share of each group and Disp_item, means over slices with queries and over seeds."""
    shares = [_over_slices(row.runs, names, group) for group in GROUPS]
    return [mean_of(found.ravel()) for found in (*shares, item_disparities(row.runs, names))]


def item_disparities(runs: Sequence[Run], names: Mapping[str, str]) -> np.ndarray:
    """Disp_item of every run in slices 1..T; `names` says what the shares of head and tail are called."""
    return item_disparity(_over_slices(runs, names, "head"), _over_slices(runs, names, "tail"))


def _over_slices(runs: Sequence[Run], names: Mapping[str, str], group: str) -> np.ndarray:
    return np.array([run.matrices["full", "all", names[group]].diagonal for run in runs])


def disparities(row: Row) -> list[list[float]]:
    """For each seed, |busy - quiet| of slices 1..T; empty where the users are unknown."""
    tables = [per_user({"run": (run,)}, "sampled", "all", first_slice=0)[0].get(("run", "ndcg@10")) for run in row.runs]
    return [over_slices(table) for table in tables if table is not None and len(table.counts)] if all(tables) else []


def over_slices(table: PerUser) -> list[float]:
    """The disparity of slices 1..T from a table of slices 0..T."""
    activity = table.counts.cumsum(1)
    slices = range(1, table.counts.shape[1])
    return [user_disparity(table.sums[:, t], table.counts[:, t], activity[:, t]).disparity for t in slices]
