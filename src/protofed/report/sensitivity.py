"""Accuracy along a number: every setting that rows of one method differ in alone, and the noise, which costs ε."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from protofed.report.layout import Drawing, Missing, Part
from protofed.report.prices import UNPRICED, Price
from protofed.report.runs import Run
from protofed.report.sections import Row, Section, slug
from protofed.report.tables import Results, continual, mean_over_slices
from protofed.report.variants import NOISES, Sweep, noise_sweeps, sweeps, without

MODE = ("protofed.mode", "privacy.wrap", *NOISES)
Points = list[tuple[object, ...]]
Value = Callable[[Run], float]


def sensitivity(section: Section) -> Part | Missing:
    """One small figure for each setting; rows of other methods or other settings are lines of their own."""
    title, found = "Sensitivity", sweeps(section)
    if not found:
        return Missing(title, "no rows of one method differ in exactly one numeric setting")
    settings = dict.fromkeys(sweep.setting for sweep in found)
    drawings = tuple(_drawing(section, setting, [s for s in found if s.setting == setting]) for setting in settings)
    note = (
        "NDCG@10, all events, sampled candidates; means over seeds, bands one standard deviation to either side. All "
        "else is equal along a line."
    )
    return Part(f"{section.slug}-sensitivity", title, note, drawings=drawings)


def tradeoff(results: Results) -> Part | Missing:
    """Whether privacy hurts: NDCG@10 and AF against ε, a line per method; rows without noise lie across."""
    title, section, prices = "Privacy against utility", results.section, results.prices
    groups = noise_sweeps(section)
    if not groups:
        return Missing(title, "no two private rows of one method differ in their noise alone")
    spent = [prices[row.label] for rows in groups for row in rows if row.label in prices]
    priced = all(price.known for price in spent)
    x = "ε (PLD)" if priced else "noise multiplier"
    free = [row for rows in groups if (row := _without_noise(section, rows[0]))]
    measures: tuple[tuple[str, str, Value], ...] = (
        ("NDCG@10", "NDCG@10, all events, sampled candidates", mean_over_slices),
        ("AF", "AF, lower is better", partial(continual, name="AF")),
    )
    drawings = []
    for measure, caption, value in measures:
        points: Points = []
        for rows in groups:
            levels = [(_level(prices.get(row.label), priced=priced), row) for row in rows]
            placed = sorted((pair for pair in levels if math.isfinite(pair[0])), key=lambda p: (p[0], p[1].label))
            points += _points(rows[0].name, placed, value)
        points += [(row.label, math.inf if priced else 0.0, row.over_seeds(value).mean, math.nan) for row in free]
        name = f"{section.slug}-privacy-{measure[:2].lower()}"
        drawings.append(Drawing(name, caption, "lines", ("method", x, "mean", "std"), tuple(points), x, measure))
    return Part(f"{section.slug}-privacy", title, _note(spent, free, priced=priced), drawings=tuple(drawings))


def _drawing(section: Section, setting: str, found: Sequence[Sweep]) -> Drawing:
    names = _apart([sweep.points[0][1].name for sweep in found])
    rows: Points = []
    for name, sweep in zip(names, found, strict=True):
        rows += _points(name, sweep.points, mean_over_slices)
    header = ("method", "value", "mean", "std")
    name = f"{section.slug}-sensitivity-{slug(setting)}"
    return Drawing(name, setting, "lines", header, tuple(rows), setting, "NDCG@10")


def _points(name: str, rows: Sequence[tuple[float, Row]], value: Value) -> Points:
    """Name, place on the axis, mean and standard deviation of every row."""
    found = [(at, row.over_seeds(value)) for at, row in rows]
    return [(name, at, estimate.mean, estimate.std) for at, estimate in found]


def _apart(names: Sequence[str]) -> list[str]:
    """Names that are told apart: `a`, `b`, `a (2)`."""
    seen = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name} ({before + 1})" if before else name for name, before in zip(names, seen, strict=True)]


def _level(price: Price | None, *, priced: bool) -> float:
    """Where a row stands on the axis; NaN where it released nothing, or without noise."""
    multiplier = price.ledger[0].noise_multiplier if price else 0.0
    if price is None or not multiplier:
        return math.nan
    return price.released if priced else multiplier


def _without_noise(section: Section, private: Row) -> Row | None:
    """The same method and settings with nothing noised."""
    same = without(private, MODE)
    free = [row for row in section.rows if not row.runs[0].releases and without(row, MODE) == same]
    return free[0] if free else None


def _note(spent: Sequence[Price], free: Sequence[Row], *, priced: bool) -> str:
    terms = "; ".join(sorted({f"δ = {price.delta:g}, {price.trust} trust" for price in spent}))
    first = f"ε of each row's whole ledger against who sees what is released ({terms})."
    if not priced:
        first = f"{UNPRICED}: the axis is the noise multiplier of the first stream."
    second = f" Across, without noise: {', '.join(row.label for row in free)}." if free else ""
    return f"{first} Means over seeds, bands one standard deviation to either side.{second}"
