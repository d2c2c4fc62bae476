"""docs/reproduce.md: its counts are those of the experiment files and of the committed runs."""

import re
from pathlib import Path

import pytest

from protofed.cli.run import settle
from protofed.experiments.grid import cells, read_grid
from protofed.experiments.store import files_of, read_file

pytestmark = pytest.mark.slow  # expands every experiment file
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
COMMITTED = PAGE.partition("## What is committed")[2]


def test_every_experiment_file_has_its_command_and_its_number_of_runs():
    counts = re.findall(r"\| (\d+) \| `protofed bench --config (experiments/\S+\.toml)", PAGE)
    files = {
        str(path.relative_to(ROOT)): path for path in (ROOT / "experiments").glob("*.toml") if path.stem != "smoke"
    }
    assert {name for _, name in counts} == set(files)
    for count, name in counts:
        assert int(count) == len(cells(read_grid(files[name]), settle)), name


def test_the_cells_of_the_papers_width_are_counted():
    files = {path.name.partition(".")[0]: read_file(path) for path in files_of(ROOT / "results")}
    folders = {dataset: file["folder"].to_pylist() for dataset, file in files.items()}
    counts = {dataset: sum(name.startswith("paper_size/") for name in own) for dataset, own in folders.items()}
    found = {dataset: count for dataset, count in counts.items() if count}
    told = re.search(r"`results/paper_size` holds (\d+) of (\d+) cells \(([^)]*)\)", COMMITTED)
    assert told is not None
    grid = ROOT / "experiments" / "paper-size.toml"
    assert (int(told[1]), int(told[2])) == (sum(found.values()), len(cells(read_grid(grid), settle)))
    parts = (part.split() for part in told[3].split(","))
    assert {dataset: int(count) for dataset, count in parts} == found
