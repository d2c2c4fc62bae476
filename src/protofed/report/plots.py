"""The figures that are not over slices: bands over a number, points with intervals, clouds of users."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from protofed.report.svg import FAINT, INK, SERIES, Stroke, figure, to_inline_svg

SMALL = (300.0, 210.0)  # points
WIDE = (400.0, 240.0)
LONGEST = 44  # letters of a label inside a figure
LOG_FROM = 20.0  # an axis whose largest value is so many times the smallest is logarithmic


@dataclass(frozen=True, slots=True)
class Band:
    """Means over seeds and their standard deviations along a number."""

    label: str
    look: Stroke
    x: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]  # NaN for a single seed


@dataclass(frozen=True, slots=True)
class Level:
    """A reference that does not depend on the number."""

    label: str
    look: Stroke
    mean: float


@dataclass(frozen=True, slots=True)
class Dot:
    """One row or stratum with its interval; NaN ends: none is known."""

    label: str
    look: Stroke
    x: float
    low: float
    high: float
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """One row between two measures, with its spread over seeds in both."""

    label: str
    look: Stroke
    x: float
    y: float
    x_std: float
    y_std: float


def band_plot(bands: Sequence[Band], levels: Sequence[Level], *, x: str, y: str, name: str, about: str) -> str:
    """A line with a band for every row; references are dashed across."""
    with figure(*SMALL) as (drawn, axes):
        for band in bands:
            mean, std = np.array(band.mean), np.nan_to_num(np.array(band.std))
            axes.plot(band.x, mean, color=band.look.colour, linestyle=_dash(band.look), **_marks(band.look))
            axes.fill_between(band.x, mean - std, mean + std, color=band.look.colour, alpha=0.15, linewidth=0)
        for level in levels:
            axes.axhline(level.mean, color=level.look.colour, linestyle=(0, (4, 2)), linewidth=1.0)
        _scale([value for band in bands for value in band.x], axes)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        _quiet(axes, "y")
        return to_inline_svg(drawn, name, about)


def dot_plot(dots: Sequence[Dot], *, x: str, name: str, about: str, zero: bool = False) -> str:
    """A dot and its interval for every label, the first on top; `zero` draws the line of no difference."""
    height = 58.0 + 17.0 * len(dots)
    with figure(WIDE[0], height) as (drawn, axes):
        if zero:
            axes.axvline(0.0, color=FAINT, linewidth=1.0)
        for place, dot in enumerate(dots):
            if math.isfinite(dot.low):
                width = 2.2 if dot.strong else 1.4
                axes.plot((dot.low, dot.high), (place, place), color=dot.look.colour, linewidth=width)
            axes.plot((dot.x,), (place,), color=dot.look.colour, **_marks(dot.look))
        axes.set_yticks(range(len(dots)), [_short(dot.label) for dot in dots])
        for text, dot in zip(axes.get_yticklabels(), dots, strict=True):
            text.set_fontweight("bold" if dot.strong else "normal")
        axes.set_ylim(len(dots) - 0.4, -0.6)
        axes.set_xlabel(x)
        axes.spines["left"].set_visible(False)
        _quiet(axes, "x")
        return to_inline_svg(drawn, name, about)


def scatter(points: Sequence[Point], *, x: str, y: str, name: str, about: str) -> str:
    """Rows between two measures, whiskers one standard deviation over seeds; rows that none beats in both are named."""
    best = frontier(np.array([p.x for p in points]), np.array([p.y for p in points]))
    with figure(*WIDE) as (drawn, axes):
        for point in points:
            for xs, ys in _whiskers(point):
                axes.plot(xs, ys, color=point.look.colour, linewidth=0.8)
            axes.plot((point.x,), (point.y,), color=point.look.colour, linestyle="none", **_marks(point.look))
        for point, shift, side in _named([p for p, named in zip(points, best, strict=True) if named], points):
            where = {"xytext": (0, shift), "textcoords": "offset points", "ha": side}
            axes.annotate(_short(point.label), (point.x, point.y), size=7, **where)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.margins(0.14)
        _quiet(axes, "both")
        return to_inline_svg(drawn, name, about)


def volcano(
    gain: Float[np.ndarray, " U"],
    height: Float[np.ndarray, " U"],
    found: Bool[np.ndarray, " U"],
    *,
    line: float,
    name: str,
    about: str,
) -> str:
    """Users by gain and -log10 p; those that stay after correction are coloured, gains and losses apart."""
    with figure(*WIDE) as (drawn, axes):
        groups = ((~found, FAINT, 0.7), (found & (gain > 0), SERIES[2], 0.9), (found & (gain <= 0), SERIES[1], 0.9))
        for members, colour, alpha in groups:
            x, y = _thinned(gain[members], height[members])
            axes.plot(x, y, "o", color=colour, markersize=2.6, markeredgewidth=0, alpha=alpha)
        axes.axhline(line, color=INK, linewidth=0.7, linestyle=(0, (4, 2)))
        axes.axvline(0.0, color=FAINT, linewidth=0.8)
        reach = float(np.abs(gain).max(initial=0.0)) * 1.08 or 1.0
        axes.set_xlim(-reach, reach)
        axes.set_ylim(bottom=0.0)
        axes.set_xlabel("gain in NDCG@10 per query")
        axes.set_ylabel("-log10 p")
        _quiet(axes, "y")
        return to_inline_svg(drawn, name, about)


def frontier(x: Float[np.ndarray, " N"], y: Float[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
    """Who is beaten by nobody, where less x and more y are better."""
    beaten = (x[None] <= x[:, None]) & (y[None] >= y[:, None]) & ((x[None] < x[:, None]) | (y[None] > y[:, None]))
    known = np.isfinite(x) & np.isfinite(y)
    return np.asarray(known & ~(beaten & known[None]).any(1))


def _named(chosen: Sequence[Point], points: Sequence[Point]) -> Iterator[tuple[Point, float, str]]:
    """Where names go, above or below their point, towards the middle; a name that would cover another is left out."""
    left, low = min(p.x for p in points), min(p.y for p in points)
    across = (max(p.x for p in points) - left) or 1.0
    up = (max(p.y for p in points) - low) or 1.0
    taken: list[tuple[float, float, float]] = []  # start, end, height, in points
    for point in sorted(chosen, key=lambda p: -p.y):
        share = (point.x - left) / across
        side = "left" if share < 0.33 else "right" if share > 0.67 else "center"
        width = 4.3 * len(_short(point.label))
        start = 260 * share - {"left": 0.0, "center": width / 2, "right": width}[side]
        for shift in (6.0, -12.0):
            height = 150 * (point.y - low) / up + shift
            if all(start > end or start + width < begin or abs(height - other) > 9 for begin, end, other in taken):
                taken.append((start, start + width, height))
                yield point, shift, side
                break


def _thinned(x: np.ndarray, y: np.ndarray, cells: float = 300.0) -> tuple[np.ndarray, np.ndarray]:
    """One of all points that fall on the same dot of the drawing: the CSV keeps them all."""
    if not len(x):
        return x, y
    grid = np.stack([np.round(v / (np.abs(v).max() or 1.0) * cells) for v in (x, y)])
    keep = np.unique(grid, axis=1, return_index=True)[1]
    return x[keep], y[keep]


def _whiskers(point: Point) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    if math.isfinite(point.x_std):
        yield (point.x - point.x_std, point.x + point.x_std), (point.y, point.y)
    if math.isfinite(point.y_std):
        yield (point.x, point.x), (point.y - point.y_std, point.y + point.y_std)


def _scale(values: Sequence[float], axes: Any) -> None:
    """The values themselves as ticks; a logarithmic axis where they span much, with a place for 0 where it is one."""
    from matplotlib.ticker import NullLocator

    unique = sorted(set(values))
    positive = [value for value in unique if value > 0]
    if positive and unique[0] >= 0 and positive[-1] / positive[0] >= LOG_FROM:
        if unique[0] > 0:
            axes.set_xscale("log")
        else:
            axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
    if len(unique) <= 8:
        axes.set_xticks(unique, [f"{value:.4g}" for value in unique])


def _short(label: str) -> str:
    """A label that leaves room for the drawing; the data beside it has it whole."""
    return label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"


def _dash(look: Stroke) -> Any:
    return (0, look.dash) if look.dash else "-"


def _marks(look: Stroke) -> dict[str, Any]:
    return {"marker": look.marker, "markeredgewidth": 0}


def _quiet(axes: Any, grid: str) -> None:
    axes.grid(axis=grid)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
