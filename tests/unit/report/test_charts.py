"""Figures: one colour for a method everywhere, at most eight rows at first, and every number once."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from run_folders import csv_of, write_run

from protofed.methods.catalogue import METHODS
from protofed.report.layout import Cell, Column, Drawing, Line, Table, figure_values, table_values, to_json
from protofed.report.page import MOST_DRAWN, colour_of, leading_rows, look_of
from protofed.report.runs import find_runs
from protofed.report.sections import group
from protofed.report.slices import heat_maps, line_drawing
from protofed.report.tables import compute


def test_every_method_has_a_colour_of_its_own() -> None:
    colours = [colour_of(name) for name in METHODS]
    assert len(set(colours)) == len(colours)
    assert colour_of("protofed-sp") == "var(--ours)"
    assert colour_of("protofed").startswith("hsl(0 ")  # red, as no other method
    assert colour_of("a method from outside") not in colours


def test_variants_share_the_colour_of_their_method_and_differ_in_their_dashes(tmp_path: Path) -> None:
    for name, settings in (("a", ""), ("b", 'variant = "peft"\n'), ("c", "[privacy]\nwrap = true\n")):
        write_run(tmp_path / name, lambda *_: 0.5, method="ewc", settings=settings)
    (section,) = group(find_runs(tmp_path)[0])
    looks = {row.label: look_of(row) for row in section.rows}
    assert {colour for colour, _ in looks.values()} == {colour_of("ewc")}
    assert len({dash for _, dash in looks.values()}) == 3


def test_ours_and_the_best_trivial_row_are_among_the_eight_that_are_drawn_first(tmp_path: Path) -> None:
    methods = ["ewc", "si", "mas", "lwf", "er-random", "er-freq", "ditto", "fedavg", "fedprox", "frozen", "protofed-sp"]
    for place, method in enumerate(methods):
        write_run(tmp_path / method, lambda *_, place=place: 0.9 - place / 20, method=method)
    (section,) = group(find_runs(tmp_path)[0])
    first = leading_rows(compute(section))
    assert first == (*methods[:6], "frozen", "protofed-sp (reference)")
    assert len(first) == MOST_DRAWN


def test_a_line_is_the_mean_over_seeds_with_its_spread() -> None:
    values = np.array([[0.1, 0.5, np.nan], [0.3, 0.5, 0.2]])
    drawn = line_drawing("name", "caption", "y", {"a": values})
    assert drawn.header == ("method", "slice", "y", "std")
    assert [row[:2] for row in drawn.rows] == [("a", 1), ("a", 2)]  # a slice that a seed does not know has no point
    assert [row[2:] for row in drawn.rows] == [pytest.approx((0.2, math.sqrt(0.02))), pytest.approx((0.5, 0.0))]


def test_a_heat_map_has_a_line_for_each_slice_tested() -> None:
    drawn = heat_maps("name", "caption", {"a": np.array([[0.5, 0.4], [np.nan, 0.6]])})
    assert csv_of(drawn) == "method,slice_tested,after 0,after 1\na,0,0.5,0.4\na,1,,0.6\n"


def test_a_figure_keeps_words_once_and_unknown_numbers_as_null() -> None:
    rows = (("a", 1, 0.123456), ("b", 2, math.nan), ("a", math.inf, 3.0))
    told = figure_values(Drawing("name", "caption", "lines", ("method", "x", "y"), rows, "x", "y"))
    assert told["columns"] == [{"words": ["a", "b"], "at": [0, 1, 0]}, [1, 2, None], [0.12346, None, 3]]


def test_a_table_says_a_value_where_its_text_is_no_number() -> None:
    cells = (
        Cell("0.123", "±.01", "[.1, .2]", 0.1234, best=True),
        Cell("1.05 MB", value=1.05e6),
        Cell("∞", value=math.inf),
        Cell("–"),
        Cell("2,048", value=2048.0),
    )
    told = table_values(Table("name", "caption", (Column("x"),) * 5, (Line("a", cells, trivial=True),)))
    (line,) = told["lines"]
    assert line == [
        "a",
        "trivial",
        ["0.123", "±.01", "[.1, .2]", 1],
        ["1.05 MB", None, None, None, 1050000],
        ["∞", None, None, None, "inf"],
        "–",
        "2,048",
    ]


def test_no_text_ends_the_script_that_holds_it() -> None:
    text = to_json({"a": "</script><!--"})
    assert "<" not in text
    assert json.loads(text) == {"a": "</script><!--"}
