"""Fairness over time: how far busy users are better served than quiet ones, and which items fill the Top-10."""

from collections.abc import Mapping, Sequence

import numpy as np

from protofed.evaluation.exposure import EVENTS, GROUPS, PLACES
from protofed.evaluation.fairness import item_disparity, user_disparity
from protofed.evaluation.significance import PerUser
from protofed.report.charts import Curve, line_drawing
from protofed.report.intervals import per_user
from protofed.report.layout import Cell, Column, Drawing, Line, Missing, Part, Table, number
from protofed.report.runs import Run
from protofed.report.sections import Row, Section

USERS = "Fairness over time"
ITEMS = "Exposure of popular and rare items"
OF_EVENTS = "test events"


def fairness(section: Section) -> tuple[Part | Missing, ...]:
    """The gap between the busiest and the quietest third of users over the slices; then the exposure of items."""
    return user_gap(section), exposure(section)


def user_gap(section: Section) -> Part | Missing:
    """How far the busiest and the quietest third of users are apart."""
    curves = [Curve(row.label, np.array(found)) for row in section.rows if (found := disparities(row))]
    if not curves or not any(np.isfinite(curve.values).any() for curve in curves):
        return Missing(USERS, "no run kept its users (per_user.parquet)")
    name = f"{section.slug}-user-disparity"
    caption = "Disp_user: NDCG@10 of the busiest third of users against the quietest, distance"
    drawing = line_drawing(name, caption, "|busy - quiet|", curves, from_zero=True)
    note = (
        "Mean NDCG@10 over users (all events, sampled candidates, every user alike) of each slice. Activity is counted "
        "in test queries up to the slice, because run folders do not hold training events; 0 is equal service."
    )
    return Part(f"{name}-part", USERS, note, drawings=(drawing,))


def exposure(section: Section) -> Part | Missing:
    """Whose items fill the Top-10 of the full ranking, beside whose items are really met."""
    told = [row for row in section.rows if all(_tells(run) for run in row.runs)]
    if not told:
        why = "metrics.parquet of these runs holds no exposure_head@10; runs of this version do"
        return Missing(ITEMS, f"{why}, so run again to see it")
    name = f"{section.slug}-exposure"
    drawings = (
        *(_share_drawing(f"{name}-{group}", group, told) for group in ("head", "tail")),
        _disparity_drawing(f"{section.slug}-item-disparity", told),
    )
    silent = [row.label for row in section.rows if row not in told]
    note = (
        "Shares of all Top-10 places, full ranking, model right after each slice. Head: the fifth of the available "
        "items with most train events up to the slice; tail: the fifth with fewest; middle: the rest. A method that "
        f"shows what people meet has the shares of the {OF_EVENTS}. Disp_item is the distance between the shares of "
        "head and tail; 0 gives both as many places."
    )
    note += f" Not told by {', '.join(silent)}." if silent else ""
    return Part(name, ITEMS, note, (_share_table(name, told),), drawings)


def _share_table(name: str, rows: Sequence[Row]) -> Table:
    """Means over slices and seeds, and how far the head's share lies above its share of events."""
    columns = [Column(group, "share of Top-10 places", ranked=False) for group in GROUPS]
    columns.append(Column("head above events", "", "the head's share less its share of the test events", ranked=False))
    columns.append(Column("Disp_item", "", "|head - tail| of a slice, mean over slices and seeds", ranked=False))
    lines = []
    for row in rows:
        places = [mean_share(row, PLACES[group]) for group in GROUPS]
        above = places[0] - mean_share(row, EVENTS["head"])
        values = (*places, above, mean_over_slices(item_disparities(row.runs, PLACES)))
        lines.append(Line(row.label, tuple(Cell(number(v), value=v) for v in values), row.is_trivial))
    lines.sort(key=lambda line: (line.cells[-2].value, line.label))
    met = [mean_share(rows[0], EVENTS[group]) for group in GROUPS]
    apart = mean_over_slices(item_disparities(rows[0].runs, EVENTS))
    footer = Line(OF_EVENTS, (*(Cell(number(v)) for v in met), Cell(""), Cell(number(apart))))
    return Table(f"{name}-table", "Mean over slices and seeds", tuple(columns), tuple(lines), (footer,))


def _share_drawing(name: str, group: str, rows: Sequence[Row]) -> Drawing:
    curves = [Curve(row.label, _over_slices(row.runs, PLACES[group])) for row in rows]
    curves.append(Curve(OF_EVENTS, _over_slices(rows[0].runs[:1], EVENTS[group])))
    caption = f"Top-10 places that go to {group} items, beside their share of the {OF_EVENTS}"
    return line_drawing(name, caption, f"share of {group} items", curves, from_zero=True)


def _disparity_drawing(name: str, rows: Sequence[Row]) -> Drawing:
    """Disp_item over the slices, as `user_gap` shows Disp_user."""
    curves = [Curve(row.label, item_disparities(row.runs, PLACES)) for row in rows]
    curves.append(Curve(OF_EVENTS, item_disparities(rows[0].runs[:1], EVENTS)))
    caption = f"Disp_item: distance between the shares of head and tail items, beside that of the {OF_EVENTS}"
    return line_drawing(name, caption, "|head - tail|", curves, from_zero=True)


def item_disparities(runs: Sequence[Run], metrics: Mapping[str, str]) -> np.ndarray:
    """Disp_item of every run in slices 1..T; `metrics` says what the shares of head and tail are called."""
    return item_disparity(_over_slices(runs, metrics["head"]), _over_slices(runs, metrics["tail"]))


def mean_share(row: Row, metric: str) -> float:
    """The mean over slices with queries and over seeds."""
    return mean_over_slices(_over_slices(row.runs, metric))


def mean_over_slices(found: np.ndarray) -> float:
    """The mean of what is known; NaN where nothing is."""
    known = found[np.isfinite(found)]
    return float(known.mean()) if len(known) else float("nan")


def _over_slices(runs: Sequence[Run], metric: str) -> np.ndarray:
    return np.array([run.matrices["full", "all", metric].diagonal for run in runs])


def _tells(run: Run) -> bool:
    return all(("full", "all", metric) in run.matrices for metric in (*PLACES.values(), *EVENTS.values()))


def disparities(row: Row) -> list[list[float]]:
    """For each seed, |busy - quiet| of slices 1..T; empty where the users are unknown."""
    tables = [per_user({"run": (run,)}, "sampled", "all", first_slice=0)[0].get(("run", "ndcg@10")) for run in row.runs]
    return [over_slices(table) for table in tables if table is not None and len(table.counts)] if all(tables) else []


def over_slices(table: PerUser) -> list[float]:
    """The disparity of slices 1..T from a table of slices 0..T."""
    activity = table.counts.cumsum(1)
    slices = range(1, table.counts.shape[1])
    return [user_disparity(table.sums[:, t], table.counts[:, t], activity[:, t]).disparity for t in slices]
