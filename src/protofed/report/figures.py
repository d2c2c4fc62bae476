"""The figures of a section: accuracy and forgetting over slices, and a heat map of A[s, t] per row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from protofed.report.svg import Stroke, colour_map, figure, plot_attributes, to_inline_svg

LINE_PLOT = (400.0, 240.0)  # points
HEAT_MAP = (250.0, 240.0)
LEFT, TOP, GRID = 27.0, 3.0, 209.0  # where its cells begin, and how wide they are together
DARK, LIGHT = "#16181d", "#f4f4f0"  # letters on cells
MOST_ANNOTATED = 13  # slices; with more, numbers inside the cells would overlap


@dataclass(frozen=True, slots=True)
class Curve:
    """One row's line: a value for each seed and slice."""

    label: str
    look: Stroke
    values: Float[np.ndarray, "seeds T"]


def line_plot(curves: Sequence[Curve], *, first_slice: int, title: str, name: str, from_zero: bool = False) -> str:
    """All rows over the slices; the line is the mean over seeds, the band one standard deviation to either side."""
    with figure(*LINE_PLOT) as (drawn, axes):
        for curve in curves:
            slices = np.arange(first_slice, first_slice + curve.values.shape[1])
            mean = curve.values.mean(axis=0)
            axes.plot(
                slices,
                mean,
                color=curve.look.colour,
                linestyle=(0, curve.look.dash) if curve.look.dash else "-",
                marker=curve.look.marker,
                markeredgewidth=0,
            )
            if len(curve.values) > 1:
                spread = curve.values.std(axis=0, ddof=1)
                axes.fill_between(
                    slices, mean - spread, mean + spread, color=curve.look.colour, alpha=0.15, linewidth=0
                )
        axes.set_xlabel("slice t")
        axes.set_ylabel(title)
        axes.set_xticks(slices)
        if from_zero:
            axes.set_ylim(bottom=0.0)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        return to_inline_svg(drawn, name, f"{title} over slices, one line per method")


def heat_map(matrix: Float[np.ndarray, "S S"], *, limits: tuple[float, float], label: str) -> str:
    """A[s, t] as coloured cells: rows are slices tested, columns the last slice trained; the diagonal is framed.

    Written as SVG by hand: a page has one for each row, and this is a quarter of what a plotting library writes.
    """
    size, (low, high), (width, height) = len(matrix), limits, HEAT_MAP
    side, places = GRID / size, range(size)  # inside the grid a cell is 1 wide and 1 high
    shades = (matrix - low) / (high - low) if high > low else np.zeros_like(matrix)
    frames = "".join(_square(s, s) for s in places)
    numbers = _numbers(matrix, shades) if size <= MOST_ANNOTATED else []
    across = [_word(LEFT + (t + 0.5) * side, TOP + GRID + 11, str(t)) for t in places]
    down = [_word(LEFT - 7, TOP + (s + 0.5) * side + 3, str(s)) for s in places]
    return "".join(
        [
            f'<svg {plot_attributes(width, f"A[s, t] of {label}")} viewBox="0 0 {width:g} {height:g}">',
            f'<g transform="translate({LEFT:g} {TOP:g})scale({side:.6g})">',
            *('<g shape-rendering="crispEdges">', *_cells(matrix, shades), "</g>"),
            *(f'<g font-size="{7 / side:.3g}" text-anchor="middle">', *numbers, "</g>"),
            f'<path d="{frames}" fill="none" stroke="currentColor" stroke-width="{1.2 / side:.2g}"/></g>',
            *('<g font-size="9" text-anchor="middle" fill="currentColor">', *across, *down),
            _word(LEFT + GRID / 2, height - 3, "trained up to slice t"),
            f'<text transform="translate(9 {TOP + GRID / 2:g})rotate(-90)">tested on slice s</text></g></svg>',
        ]
    )


def _cells(matrix: Float[np.ndarray, "S S"], shades: Float[np.ndarray, "S S"]) -> Iterator[str]:
    """A square in its colour for every cell that has a value."""
    known = np.isfinite(matrix)
    colours = (255 * colour_map("cividis")(np.where(known, shades, 0.0))[..., :3]).round().astype(int)
    for s, t in np.argwhere(known).tolist():
        colour = "".join(f"{part:02x}" for part in colours[s, t])
        yield f'<path fill="#{colour}" d="{_square(s, t)}"/>'


def _square(s: int, t: int) -> str:
    return f"M{t} {s}h1v1h-1z"


def _word(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.4g}" y="{y:.4g}">{text}</text>'


def _numbers(matrix: Float[np.ndarray, "S S"], shades: Float[np.ndarray, "S S"]) -> Iterator[str]:
    """What each cell holds, dark on light and light on dark; a dash where nothing is known."""
    known = np.isfinite(matrix)
    for colour, chosen in ((DARK, known & (shades > 0.5)), (LIGHT, known & (shades <= 0.5)), ("var(--faint)", ~known)):
        if chosen.any():
            words = (_word(t + 0.5, s + 0.6, _in_cell(matrix[s, t])) for s, t in np.argwhere(chosen).tolist())
            yield f'<g fill="{colour}">{"".join(words)}</g>'


def _in_cell(value: float) -> str:
    """Two decimals without the leading zero, as fits in a cell: .63."""
    return f"{value:.2f}".replace("0.", ".", 1) if np.isfinite(value) else "–"
