"""Does privacy hurt: accuracy and forgetting of one method along its ε."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from protofed.evaluation.significance import mean_and_std
from protofed.report.layout import Drawing, Missing, Part, to_csv
from protofed.report.plots import Band, Level, band_plot
from protofed.report.prices import UNPRICED, Price
from protofed.report.runs import Run
from protofed.report.sections import Row, Section, method_name
from protofed.report.svg import stroke, swatch
from protofed.report.tables import MAIN, Results, continual, mean_over_slices
from protofed.report.variants import noise_sweeps, without

TITLE = "Privacy against utility"
MODE = ("protofed.mode", "privacy.wrap", "privacy.target_epsilon", "privacy.noise_multiplier", "privacy.newcomer_noise")


def tradeoff(results: Results) -> Part | Missing:
    """NDCG@10 and AF against ε, a line per method; its rows without noise are dashed across."""
    section, prices = results.section, results.prices
    groups = noise_sweeps(section)
    if not groups:
        return Missing(TITLE, "no two private rows of one method differ in their noise alone")
    spent = [prices[row.label] for rows in groups for row in rows if row.label in prices]
    priced = all(price.known for price in spent)
    level = partial(_level, prices, priced=priced)
    x = "ε (PLD)" if priced else "noise multiplier"
    free = [_without_noise(section, rows) for rows in groups]
    names = [method_name(rows[0].runs[0].config) for rows in groups]
    measures: tuple[tuple[str, str, Callable[[Run], float]], ...] = (
        ("NDCG@10", "NDCG@10, all events, sampled candidates", lambda run: mean_over_slices(run, MAIN)),
        ("AF", "AF, lower is better", lambda run: continual(run, section.n_candidates)["AF"]),
    )
    drawings = []
    for measure, caption, value in measures:
        name = f"{section.slug}-privacy-{measure[:2].lower()}"
        bands = [_band(names[i], i, rows, value, level) for i, rows in enumerate(groups)]
        levels = [
            Level(row.label, stroke(i), float(np.mean([value(run) for run in row.runs])))
            for i, row in enumerate(free)
            if row
        ]
        svg = band_plot(bands, levels, x=x, y=measure, name=name, about=f"{measure} against {x}")
        tidy = [(b.label, *point) for b in bands for point in zip(b.x, b.mean, b.std, strict=True)]
        tidy += [(level.label, math.inf if priced else 0.0, level.mean, math.nan) for level in levels]
        drawings.append(Drawing(name, caption, svg, to_csv(["method", x, "mean", "std"], tidy)))
    legend = tuple((swatch(stroke(i)), name) for i, name in enumerate(names))
    return Part(
        f"{section.slug}-privacy",
        TITLE,
        _note(spent, free, priced=priced),
        drawings=tuple(drawings),
        legend=legend,
        small=True,
    )


def _band(
    name: str, place: int, rows: Sequence[Row], value: Callable[[Run], float], level: Callable[[Row], float]
) -> Band:
    found = sorted((at, row.label, row.runs) for row in rows if math.isfinite(at := level(row)))
    spread = [mean_and_std(np.array([value(run) for run in runs])) for _, _, runs in found]
    x = tuple(at for at, _, _ in found)
    return Band(name, stroke(place), x, tuple(m for m, _ in spread), tuple(s for _, s in spread))


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
    second = f" Dashed, without noise: {', '.join(dashed)}." if dashed else ""
    return f"{first} Means over seeds, bands one standard deviation to either side.{second}"
