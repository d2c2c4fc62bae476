"""docs/reproduce.md: its numbers are those of the committed rows, its counts those of the experiment files."""

import re
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from protofed.cli.run import settle
from protofed.experiments.grid import cells, read_grid

pytestmark = pytest.mark.slow  # expands every experiment file
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
PAPER_SIZE = tuple((ROOT / "results" / "paper_size").glob("*.runs.parquet"))
COMMITTED = PAGE.partition("## What is committed")[2]


@cache
def rows(dataset: str) -> list[dict[str, object]]:
    return pq.read_table(ROOT / "results" / dataset / "small.parquet").to_pylist()


def matrices(dataset: str, method: str, metric: str) -> list[np.ndarray]:
    """A[s, t] over all events, sampled candidates, of each seed."""
    asked = {"method": method, "metric": metric, "candidates": "sampled", "subset": "all"}
    found: dict[object, np.ndarray] = {}
    for row in rows(dataset):
        if asked.items() <= row.items():
            a = found.setdefault(row["seed"], np.full((9, 9), np.nan))
            a[row["slice_tested"], row["slice_trained"]] = row["value"]
    return list(found.values())


def accuracy(a: np.ndarray) -> float:
    return float(np.mean([a[t, t] for t in range(1, 9)]))


def forgetting(a: np.ndarray) -> float:
    """Mean over s = 0..7 of the best value before the end (from s on) minus the value at the end."""
    return float(np.mean([max(a[s, t] for t in range(s, 8)) - a[s, 8] for s in range(8)]))


def shown(values: list[float]) -> str:
    values = [value for value in values if not np.isnan(value)]
    if not values:
        return "–"
    text = f"{np.mean(values):.3f}".replace("-0.000", "0.000").replace("-", "\N{MINUS SIGN}")
    return f"{text} ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else f"{text} (one seed)"


def table(heading: str) -> tuple[list[str], dict[str, list[str]]]:
    """The data sets and the cells of each method in the table below a heading."""
    text = COMMITTED.partition(heading)[2].partition("\n\n")[2].partition("\n\n")[0]
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
    return head[1:], {cells[0]: cells[1:] for cells in lines}


@pytest.mark.parametrize(
    ("heading", "metric", "value"),
    [("**NDCG@10**:", "ndcg@10", accuracy), ("**HR@10**:", "hr@10", accuracy), ("**AF**", "ndcg@10", forgetting)],
)
def test_every_committed_number_is_computed_from_the_committed_rows(heading, metric, value):
    datasets, lines = table(heading)
    assert datasets == ["gowalla_1k", "yelp", "taobao", "amazon_beauty"]
    assert len(lines) == 9
    for method, found in lines.items():
        right = [shown([value(a) for a in matrices(dataset, method, metric)]) for dataset in datasets]
        assert found == right, method


def test_no_committed_row_is_left_out_but_the_ablations():
    _, lines = table("**NDCG@10**:")
    committed = {
        row["method"] for dataset in ("gowalla_1k", "yelp", "taobao", "amazon_beauty") for row in rows(dataset)
    }
    assert {method for method in committed if ", without " not in method} == set(lines)


def test_every_experiment_file_has_its_command_and_its_number_of_runs():
    counts = re.findall(r"\| (\d+) \| `protofed bench --config (experiments/\S+\.toml)", PAGE)
    files = {
        str(path.relative_to(ROOT)): path for path in (ROOT / "experiments").glob("*.toml") if path.stem != "smoke"
    }
    assert {name for _, name in counts} == set(files)
    for count, name in counts:
        assert int(count) == len(cells(read_grid(files[name]), settle)), name


def test_the_cells_of_the_papers_width_are_counted():
    found = {path.name.partition(".")[0]: pq.read_metadata(path).num_rows for path in PAPER_SIZE}
    told = re.search(r"`results/paper_size` holds (\d+) of (\d+) cells \(([^)]*)\)", COMMITTED)
    assert told is not None
    grid = ROOT / "experiments" / "overall-paper-size.toml"
    assert (int(told[1]), int(told[2])) == (sum(found.values()), len(cells(read_grid(grid), settle)))
    parts = (part.split() for part in told[3].split(","))
    assert {dataset: int(count) for dataset, count in parts} == found
