"""Does privacy hurt: accuracy and forgetting of one method along its ε."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from protofed.evaluation.significance import mean_and_std
from protofed.methods.labels import label_of
from protofed.report.layout import Drawing, Missing, Part
from protofed.report.prices import UNPRICED, Price
from protofed.report.runs import Run
from protofed.report.sections import Row, Section
from protofed.report.tables import MAIN, Results, continual, mean_over_slices
from protofed.report.variants import noise_sweeps, without

TITLE = "Privacy against utility"
MODE = ("protofed.mode", "privacy.wrap", "privacy.target_epsilon", "privacy.noise_multiplier", "privacy.newcomer_noise")


def tradeoff(results: Results) -> Part | Missing:
    """NDCG@10 and AF against ε, a line per method; rows without noise lie across."""
    section, prices = results.section, results.prices
    groups = noise_sweeps(section)
    if not groups:
        return Missing(TITLE, "no two private rows of one method differ in their noise alone")
    spent = [prices[row.label] for rows in groups for row in rows if row.label in prices]
    priced = all(price.known for price in spent)
    level = partial(_level, prices, priced=priced)
    x = "ε (PLD)" if priced else "noise multiplier"
    free = [_without_noise(section, rows) for rows in groups]
    names = [label_of(rows[0].runs[0].config) for rows in groups]
    measures: tuple[tuple[str, str, Callable[[Run], float]], ...] = (
        ("NDCG@10", "NDCG@10, all events, sampled candidates", lambda run: mean_over_slices(run, MAIN)),
        ("AF", "AF, lower is better", lambda run: continual(run, section.n_candidates)["AF"]),
    )
    drawings = []
    for measure, caption, value in measures:
        points = [
            point for name, rows in zip(names, groups, strict=True) for point in _points(name, rows, value, level)
        ]
        points += [
            (row.label, math.inf if priced else 0.0, float(np.mean([value(run) for run in row.runs])), math.nan)
            for row in free
            if row
        ]
        name = f"{section.slug}-privacy-{measure[:2].lower()}"
        drawings.append(Drawing(name, caption, "lines", ("method", x, "mean", "std"), tuple(points), x, measure))
    return Part(f"{section.slug}-privacy", TITLE, _note(spent, free, priced=priced), drawings=tuple(drawings))


def _points(
    name: str, rows: Sequence[Row], value: Callable[[Run], float], level: Callable[[Row], float]
) -> list[tuple[object, ...]]:
    """Name, place on the axis, mean and standard deviation of every row that has a place, in order."""
    found = sorted((at, row.label, row.runs) for row in rows if math.isfinite(at := level(row)))
    return [(name, at, *mean_and_std(np.array([value(run) for run in runs]))) for at, _, runs in found]


def _level(prices: Mapping[str, Price], row: Row, *, priced: bool) -> float:
    """Where the row stands on the axis; NaN where it released nothing, or without noise."""
    price = prices.get(row.label)
    multiplier = price.ledger[0].noise_multiplier if price else 0.0
    if price is None or not multiplier:
        return math.nan
    return price.released if priced else multiplier


def _without_noise(section: Section, rows: Sequence[Row]) -> Row | None:
    """The same method and settings with nothing noised."""
    same = without(rows[0].runs[0], MODE)
    free = [row for row in section.rows if not row.runs[0].releases and without(row.runs[0], MODE) == same]
    return free[0] if free else None


def _note(spent: Sequence[Price], free: Sequence[Row | None], *, priced: bool) -> str:
    terms = "; ".join(sorted({f"δ = {price.delta:g}, {price.trust} trust" for price in spent}))
    first = f"ε of each row's whole ledger against who sees what is released ({terms})."
    if not priced:
        first = f"{UNPRICED}: the axis is the noise multiplier of the first stream."
    dashed = [row.label for row in free if row]
    second = f" Across, without noise: {', '.join(dashed)}." if dashed else ""
    return f"{first} Means over seeds, bands one standard deviation to either side.{second}"
