"""docs/methods: a page for every method, as scripts/method_pages.py writes it from code and results."""

import csv
import importlib.util
from pathlib import Path

import pytest

from protofed.methods.catalogue import METHODS

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("method_pages", ROOT / "scripts" / "method_pages.py")
pages = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pages)
FOUND = pages.committed(ROOT / "results")


@pytest.mark.parametrize("name", METHODS)
def test_the_committed_page_is_the_one_that_would_be_written(name):
    path = ROOT / "docs" / "methods" / f"{name}.md"
    assert path.read_text(encoding="utf-8") == pages.page(name, FOUND, ROOT / "results"), "run `make report`"


def test_there_is_a_page_for_every_method_and_for_nothing_else():
    assert {path.stem for path in (ROOT / "docs" / "methods").glob("*.md")} == set(METHODS)


def test_every_row_of_the_table_is_on_exactly_one_page():
    shown = [row for name in METHODS for row in pages.rows_of(name, FOUND)]
    assert sorted(shown) == sorted(FOUND)


def test_a_page_shows_the_means_of_the_exported_table_and_the_whole_claim():
    page = pages.page("protofed-sp", FOUND, ROOT / "results")
    with (ROOT / "results" / "overall.csv").open(encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["method"] == "protofed-sp (reference)"]
    (mean,) = (
        line["mean"]
        for line in lines
        if (line["dataset"], line["table"], line["quantity"]) == ("gowalla_1k", "accuracy", "ndcg@10")
        and (line["candidates"], line["subset"]) == ("sampled", "all")
    )
    assert f"| gowalla_1k | protofed-sp (reference) | {float(mean):.3f} ± " in page
    assert "ε = 3.4, δ = 1e-05, joint user-level, add or remove one user, central trust, multiplier 1.1282" in page


def test_defaults_are_the_codes_and_a_searched_value_has_its_range():
    page = pages.page("mas", FOUND, ROOT / "results")
    assert "| `hyper.strength` | 1 | 0.0001, 0.001, 0.01, 0.1, 1, 10 | 0.001 |" in page
