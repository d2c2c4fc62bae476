"""The figures of a section: accuracy and forgetting over slices, and a heat map of A[s, t] per row."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from protofed.report.svg import FAINT, INK, Stroke, figure, to_inline_svg

LINE_PLOT = (400.0, 240.0)  # points
HEAT_MAP = (250.0, 240.0)
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


def heat_map(matrix: Float[np.ndarray, "S S"], *, limits: tuple[float, float], label: str, name: str) -> str:
    """A[s, t] as coloured cells: rows are slices tested, columns the last slice trained; the diagonal is framed."""
    with figure(*HEAT_MAP) as (drawn, axes):
        size = len(matrix)
        low, high = limits
        mesh = axes.pcolormesh(np.ma.masked_invalid(matrix), cmap="cividis", vmin=low, vmax=high, linewidth=0)
        mesh.set_edgecolor("face")
        for s in range(size):
            axes.add_patch(_frame(s))
        if size <= MOST_ANNOTATED:
            _annotate(axes, matrix, limits)
        axes.set_xticks(np.arange(size) + 0.5, [str(t) for t in range(size)])
        axes.set_yticks(np.arange(size) + 0.5, [str(s) for s in range(size)])
        axes.invert_yaxis()
        axes.set_aspect("equal")
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_xlabel("trained up to slice t")
        axes.set_ylabel("tested on slice s")
        return to_inline_svg(drawn, name, f"A[s, t] of {label}")


def _frame(s: int) -> object:
    from matplotlib.patches import Rectangle

    return Rectangle((s, s), 1, 1, fill=False, edgecolor=INK, linewidth=1.2)


def _annotate(axes: object, matrix: Float[np.ndarray, "S S"], limits: tuple[float, float]) -> None:
    low, high = limits
    for (s, t), value in np.ndenumerate(matrix):
        if np.isfinite(value):
            shade = (value - low) / (high - low) if high > low else 0.0
            colour = "#16181d" if shade > 0.5 else "#f4f4f0"
            axes.text(t + 0.5, s + 0.5, in_cell(value), ha="center", va="center", color=colour, size=7)  # type: ignore[attr-defined]
        else:
            axes.text(t + 0.5, s + 0.5, "–", ha="center", va="center", color=FAINT, size=7)  # type: ignore[attr-defined]


def in_cell(value: float) -> str:
    """Two decimals without the leading zero, as fits in a cell: .63."""
    return f"{value:.2f}".replace("0.", ".", 1)
