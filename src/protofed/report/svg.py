"""Matplotlib figures as SVG that belongs in a page: its fonts, its colours in light and dark, and ids of its own."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from protofed.errors import MissingExtra

# Stand-ins for colours that the page decides; `to_inline_svg` turns them into CSS.
INK, FAINT = "#000001", "#000002"
N_COLOURS = 7
SERIES = tuple(f"#0000{16 + index:02x}" for index in range(N_COLOURS))
CSS_COLOURS = {INK: "currentColor", FAINT: "var(--faint)"} | {
    colour: f"var(--series-{index + 1})" for index, colour in enumerate(SERIES)
}
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


@dataclass(frozen=True, slots=True)
class Stroke:
    """How one row is drawn wherever it appears; colour, dash and marker each help to tell it apart."""

    colour: str
    dash: tuple[float, ...]
    marker: str


DASHES: tuple[tuple[float, ...], ...] = ((), (5.0, 2.0), (1.5, 1.5), (6.0, 2.0, 1.5, 2.0))
MARKERS = {
    "o": "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "s": "M-2.7-2.7h5.4v5.4h-5.4z",
    "^": "M0-3.5L3.4 2.8h-6.8z",
    "D": "M0-3.8L3.8 0L0 3.8L-3.8 0z",
    "v": "M0 3.5L3.4-2.8h-6.8z",
    "P": "M-1.2-3.5h2.4v2.3h2.3v2.4h-2.3v2.3h-2.4v-2.3h-2.3v-2.4h2.3z",
    "h": "M0-3.6L3.1-1.8V1.8L0 3.6L-3.1 1.8V-1.8z",
}


def stroke(index: int) -> Stroke:
    """The look of row `index`: seven colours and markers, then the same with another dash."""
    return Stroke(
        SERIES[index % N_COLOURS], DASHES[index // N_COLOURS % len(DASHES)], tuple(MARKERS)[index % N_COLOURS]
    )


def swatch(look: Stroke) -> str:
    """A legend key: a short line with its marker."""
    colour = CSS_COLOURS[look.colour]
    dash = f' stroke-dasharray="{" ".join(f"{1.6 * part:g}" for part in look.dash)}"' if look.dash else ""
    return (
        '<svg class="swatch" viewBox="0 0 28 10" aria-hidden="true">'
        f'<path d="M1 5h26" stroke="{colour}" stroke-width="1.6"{dash}/>'
        f'<path d="{MARKERS[look.marker]}" transform="translate(14 5)" fill="{colour}"/></svg>'
    )


def _matplotlib() -> Any:
    try:
        import matplotlib.figure
    except ImportError as problem:
        raise MissingExtra("matplotlib", "report") from problem
    return matplotlib


def colour_map(name: str) -> Any:
    """Numbers from 0 to 1 as colours."""
    return _matplotlib().colormaps[name]


@contextmanager
def figure(width: float, height: float) -> Iterator[tuple[Any, Any]]:
    """An empty Matplotlib figure of so many points, and its axes, in the page's look."""
    matplotlib = _matplotlib()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a reader's own matplotlibrc must not change the page
        matplotlib.rcParams.update(_look())
        drawn = matplotlib.figure.Figure(figsize=(width / 72, height / 72), layout="constrained")
        yield drawn, drawn.subplots()


def _look() -> Any:
    inked = ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.labelcolor", "ytick.labelcolor")
    faint = ("grid.color", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(inked, INK),
        **dict.fromkeys(faint, FAINT),
        "svg.fonttype": "none",
        "text.parse_math": False,  # a dollar in a name is a dollar
        "svg.hashsalt": "protofed",
        "font.family": ["DejaVu Sans"],  # measured with the font Matplotlib ships, drawn with the page's
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": FAINT,
        "axes.linewidth": 0.8,
        "grid.linewidth": 0.5,
        "font.size": 9.0,
        "lines.linewidth": 1.6,
        "lines.markersize": 4.5,
    }


def to_inline_svg(drawn: Any, name: str, description: str) -> str:
    """The figure as an <svg> element; `name` makes its ids unique in the page."""
    buffer = io.StringIO()
    drawn.savefig(buffer, format="svg", transparent=True, metadata=NO_METADATA)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].rstrip()
    for change in (_without_own_style, _in_page_font, _in_page_colours, _slim):
        text = change(text)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    attributes = plot_attributes(72 * drawn.get_figwidth(), description).replace("\\", "\\\\")
    return re.sub(r'^<svg([^>]*?) width="[^"]*" height="[^"]*"', rf"<svg {attributes}\1", text, count=1)


def plot_attributes(width: float, description: str) -> str:
    """Of an <svg> of so many points: its class, what it is to those who cannot see it, and the most it may grow."""
    widest = round(1.45 * width)  # beyond, its letters would outgrow the page's
    return f'class="plot" role="img" aria-label="{_escaped(description)}" style="max-width: {widest}px"'


def _without_own_style(text: str) -> str:
    return re.sub(r"\s*<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)


def _in_page_font(text: str) -> str:
    text = re.sub(r"font: ([0-9.]+px)[^;\"]*", r"font-size: \1", text)
    return re.sub(r" ?font-family: [^;\"]*;?", "", text)


def _in_page_colours(text: str) -> str:
    return re.sub("#0000(?:0[12]|1[0-6])", lambda found: CSS_COLOURS[found.group()], text)


def _slim(text: str) -> str:
    """The same picture in half the bytes: hundredths of a point, no ids that nothing refers to, no empty groups.

    Matplotlib's ids are hashes of floating-point numbers; here they are numbered, so that a last digit changes nothing.
    """
    places = {name: f"i{n}" for n, name in enumerate(dict.fromkeys(re.findall(r'(?:url\(|href=")#([^")]+)', text)))}
    text = re.sub(r'((?:url\(|href=")#)([^")]+)', lambda found: found.group(1) + places[found.group(2)], text)
    text = re.sub(r' id="([^"]*)"', lambda found: f' id="{places[found[1]]}"' if found[1] in places else "", text)
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), text)  # not what is written in it
    text = re.sub(r' transform="rotate\(-?0 [^"]*\)"', "", text)
    text = re.sub(r"\s+", " ", text).replace("> <", "><")
    while (less := re.sub(r"<g[^>]*(?:/>|></g>)", "", text)) != text:
        text = less
    return text


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
