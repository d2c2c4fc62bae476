"""Figures as tidy numbers, and what is common to all: a method's colour and the rows that are drawn before one chooses.

The page draws them with Observable Plot (vendor/), so a number is in it once and a reader can choose other rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from protofed.evaluation.significance import mean_and_std
from protofed.methods.catalogue import METHODS
from protofed.methods.names import FLAGSHIP, OURS
from protofed.report.layout import Drawing
from protofed.report.sections import Row
from protofed.report.tables import Results
from protofed.report.variants import side_rows

MOST_DRAWN = 8  # rows in a figure
DASHED, DOTTED = "6 3", "2 2"
STEP = 0.387  # of a circle: neighbours in the catalogue, and the methods that often lead, get hues far apart
FIRST_HUE, HUES = 55.0, 290.0  # the others keep clear of ours
OUR_COLOURS = {OURS: "var(--ours)", FLAGSHIP: "hsl(0 75% var(--tone))"}


@dataclass(frozen=True, slots=True)
class Curve:
    """One row's line: a value for each seed and slice."""

    label: str
    values: Float[np.ndarray, "seeds T"]


def colour_of(method: str) -> str:
    """The colour of a method in every figure: ours orange or red, trivial ones grey, a hue of its own for any other."""
    if method in OUR_COLOURS:
        return OUR_COLOURS[method]
    names = [name for name, entry in METHODS.items() if name != OURS]
    place = names.index(method) if method in names else len(names)
    if method in names and METHODS[method].trivial:
        return f"hsl(220 7% calc(var(--tone) + {8 * (place % 4)}%))"
    return f"hsl({FIRST_HUE + HUES * (STEP * place % 1):.0f} 65% calc(var(--tone) + {(0, 9, -7)[place % 3]}%))"


def look_of(row: Row) -> tuple[str, str]:
    """A row's colour, its method's, and its dashes: with noise, or where small modules learn and all else is frozen."""
    small = row.settings.get("variant") == "peft"
    return colour_of(row.method), DASHED if row.is_noised else DOTTED if small else ""


def leading_rows(found: Results) -> tuple[str, ...]:
    """What a figure shows first: our rows, the best trivial and the best private rival, then the best of all others."""
    aside = side_rows(found.section)
    rows = found.ranked([row for row in found.section.rows if row.label not in aside])
    ours = [row for row in rows if row.is_ours][:3]
    trivial = [row for row in rows if row.is_trivial and row.label not in found.prices][:2]
    private = [row for row in rows if row.label in found.prices and not row.is_ours][:1]
    first = [*ours, *trivial, *private]
    chosen = [*first, *(row for row in rows if row not in first)][:MOST_DRAWN]
    return tuple(row.label for row in rows if row in chosen)


def line_drawing(name: str, caption: str, title: str, curves: Iterable[Curve], *, from_zero: bool = False) -> Drawing:
    """Every row over slices 1..T: means over seeds with one standard deviation to either side."""
    rows = [
        (curve.label, t + 1, *mean_and_std(of_slice))
        for curve in curves
        for t, of_slice in enumerate(curve.values.T)
        if np.isfinite(of_slice).all()
    ]
    header = ("method", "slice", title, "std")
    return Drawing(name, caption, "lines", header, tuple(rows), "slice", title, from_zero)


def heat_maps(name: str, caption: str, matrices: Mapping[str, Float[np.ndarray, "S S"]]) -> Drawing:
    """A[s, t] of every row, one of which the page shows at a time: a line for each slice tested."""
    size = max(len(matrix) for matrix in matrices.values())
    rows = [(label, s, *of_slice.round(4).tolist()) for label, a in matrices.items() for s, of_slice in enumerate(a)]
    header = ("method", "slice_tested", *(f"after {t}" for t in range(size)))
    return Drawing(name, caption, "map", header, tuple(rows), "trained up to slice", "tested on slice")
