"""Figures as SVG: smaller, the same picture, and no byte that depends on a last digit."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from protofed.report.figures import heat_map
from protofed.report.plots import Band, band_plot
from protofed.report.svg import _slim, figure, stroke, to_inline_svg

DRAWN = """<svg>
 <g id="figure_1"><defs><path id="m1a" d="M 1.23456 2
L 3 4.5"/></defs><g id="line_1"/><g id="axes"><g id="empty"></g></g>
  <use xlink:href="#m1a" x="7.999999"/> <clipPath id="p9f"><rect/></clipPath><path clip-path="url(#p9f)"/></g>
 <text transform="rotate(-0 1.5 2.5)">a  b</text>
</svg>"""


def test_a_slim_figure_keeps_what_is_referred_to_and_nothing_empty():
    assert _slim(DRAWN) == (
        '<svg><g><defs><path id="i0" d="M 1.23 2 L 3 4.5"/></defs><use xlink:href="#i0" x="7.99"/>'
        '<clipPath id="i1"><rect/></clipPath><path clip-path="url(#i1)"/></g><text>a b</text></svg>'
    )


def test_a_slim_figure_cannot_be_made_slimmer():
    assert _slim(_slim(DRAWN)) == _slim(DRAWN)


@pytest.mark.parametrize("last_digit", [0.0, 1e-12])
def test_a_last_digit_changes_no_byte_and_every_reference_has_its_target(last_digit):
    pytest.importorskip("matplotlib")
    pages = []
    for nudge in (0.0, last_digit):
        with figure(200.0, 120.0) as (drawn, axes):
            axes.errorbar([0.1, 0.7 + nudge], [0.3, 1 / 3 + nudge], yerr=[0.1, 0.2], marker="o")
            axes.grid(True)
            pages.append(to_inline_svg(drawn, "plot", "two points"))
    assert pages[0] == pages[1]
    targets, used = (set(re.findall(p, pages[0])) for p in (r'id="([^"]+)"', r'(?:url\(|href=")#([^")]+)'))
    assert used == targets
    assert len(used) > 1


def test_numbers_on_an_axis_keep_their_digits():
    pytest.importorskip("matplotlib")
    with figure(200.0, 120.0) as (drawn, axes):
        axes.plot([0.7696, 6.9774], [-0.0025, 0.0075])
        axes.set_xticks([0.7696, 6.9774], ["0.7696", "6.977"])
        axes.set_yticks([-0.0025, 0.0075])
        page = to_inline_svg(drawn, "plot", "small numbers")
    written = re.findall(r"<text[^>]*>([^<]*)</text>", page)
    assert written == ["0.7696", "6.977", "\N{MINUS SIGN}0.0025", "0.0075"]


def test_a_heat_map_has_a_coloured_cell_and_a_number_for_every_value_and_a_dash_for_none():
    matplotlib = pytest.importorskip("matplotlib")
    matrix = np.array([[0.30, 0.42], [np.nan, 0.50]])
    drawn = heat_map(matrix, limits=(0.3, 0.5), label='a "b" <c>')
    shown = ElementTree.fromstring(drawn)
    assert shown.get("aria-label") == 'A[s, t] of a "b" <c>'
    cells = re.findall(r'fill="(#\w+)" d="M(\d \d)h1v1h-1z"', drawn)
    hue = {shade: matplotlib.colors.to_hex(matplotlib.colormaps["cividis"](shade)) for shade in (0.0, 0.6, 1.0)}
    assert cells == [(hue[0.0], "0 0"), (hue[0.6], "1 0"), (hue[1.0], "1 1")]  # column, row
    words = [element.text for element in shown.iter("text")]
    assert sorted(words[:4]) == sorted([".30", ".42", "–", ".50"])
    assert words[4:] == ["0", "1", "0", "1", "trained up to slice t", "tested on slice s"]


def test_values_that_span_much_keep_their_distance_on_an_axis_that_has_a_zero():
    pytest.importorskip("matplotlib")
    x = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
    band = Band("a", stroke(0), x, tuple(0.5 for _ in x), tuple(0.1 for _ in x))
    drawn = band_plot([band], [], x="strength", y="NDCG@10", name="plot", about="a sweep")
    written = {text: float(place) for place, text in re.findall(r'<text[^>]* x="([\d.]+)"[^>]*>([\d.]+)</text>', drawn)}
    places = [written[f"{value:g}"] for value in x]
    assert all(right - left > 20 for left, right in pairwise(places))  # a label is some 12 wide
