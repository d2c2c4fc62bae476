"""Fairness over time: how far busy users are better served than quiet ones, slice by slice."""

from collections.abc import Mapping

import numpy as np

from protofed.evaluation.fairness import user_disparity
from protofed.evaluation.significance import PerUser
from protofed.report.figures import Curve, line_plot
from protofed.report.intervals import per_user
from protofed.report.layout import Drawing, Missing, Part, to_csv
from protofed.report.sections import Row, Section
from protofed.report.svg import Stroke, swatch

USERS = "Fairness over time"
ITEMS = Missing(
    "Exposure of head and tail items",
    "metrics.parquet holds ranks of the true items alone; it would need each item group's exposure per slice",
)


def fairness(section: Section, looks: Mapping[str, Stroke]) -> tuple[Part | Missing, ...]:
    """The gap between the busiest and the quietest third of users over the slices; items are not in run folders."""
    curves = [
        Curve(row.label, looks[row.label], np.array(found)) for row in section.rows if (found := disparities(row))
    ]
    if not curves or not any(np.isfinite(curve.values).any() for curve in curves):
        return Missing(USERS, "no run kept its users (per_user.parquet)"), ITEMS
    name = f"{section.slug}-user-disparity"
    svg = line_plot(curves, first_slice=1, title="|busy - quiet|", name=name, from_zero=True)
    tidy = [
        (curve.label, run, t + 1, float(value)) for curve in curves for (run, t), value in np.ndenumerate(curve.values)
    ]
    caption = "NDCG@10 of the busiest third of users against the quietest, distance"
    drawing = Drawing(name, caption, svg, to_csv(["method", "run", "slice", "disparity"], tidy))
    note = (
        "Mean NDCG@10 over users (all events, sampled candidates, every user alike) of each slice. Activity is counted "
        "in test queries up to the slice, because run folders do not hold training events; 0 is equal service."
    )
    legend = tuple((swatch(curve.look), curve.label) for curve in curves)
    return Part(f"{name}-part", USERS, note, drawings=(drawing,), legend=legend), ITEMS


def disparities(row: Row) -> list[list[float]]:
    """For each seed, |busy - quiet| of slices 1..T; empty where the users are unknown."""
    tables = [per_user({"run": (run,)}, "sampled", "all", first_slice=0)[0].get(("run", "ndcg@10")) for run in row.runs]
    return [over_slices(table) for table in tables if table is not None and len(table.counts)] if all(tables) else []


def over_slices(table: PerUser) -> list[float]:
    """The disparity of slices 1..T from a table of slices 0..T."""
    activity = table.counts.cumsum(1)
    slices = range(1, table.counts.shape[1])
    return [user_disparity(table.sums[:, t], table.counts[:, t], activity[:, t]).disparity for t in slices]
