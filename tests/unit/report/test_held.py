"""Coverage without a grid: which seeds of which cell are finished; with one: what is missing of it."""

from pathlib import Path

import pytest
from run_folders import config_text, embedded, write_run

from protofed.cli.report import report
from protofed.cli.run import settle
from protofed.config import to_toml
from protofed.errors import ConfigError
from protofed.experiments.grid import Grid, cells
from protofed.report.held import Held, held_table, list_cells
from protofed.report.page import build
from protofed.report.runs import Unfinished, find_runs


def value(tested: int, trained: int, candidates: str, subset: str, metric: str) -> float:
    return 0.6 if metric == "hr@10" else 0.4


def start(folder: Path, method: str, seed: int, settings: str = "", dataset: str = "toy") -> None:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config_text(dataset, method, seed, settings), encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for seed in (0, 2):
        write_run(tmp_path / f"ewc-{seed}", value, method="ewc", seed=seed)
    write_run(tmp_path / "private", value, method="ewc", settings="[privacy]\nwrap = true\n")
    write_run(tmp_path / "other", value, method="ewc", dataset="toy2")
    write_run(tmp_path / "peft", value, method="ewc", settings='variant = "peft"\n')
    write_run(tmp_path / "sp", value, method="protofed-sp", settings='[protofed]\nmode = "reference"\n')
    start(tmp_path / "ewc-1", "ewc", 1)
    start(tmp_path / "ewc-2 again", "ewc", 2)
    start(tmp_path / "lwf-5", "lwf", 5)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.toml").write_text("not toml [", encoding="utf-8")
    return tmp_path


def test_every_cell_has_its_finished_and_its_unfinished_seeds(root: Path) -> None:
    assert list_cells(*find_runs(root)) == (
        Held("toy", "ewc", "none", "standard", (0, 2), (1,)),
        Held("toy2", "ewc", "none", "standard", (0,), ()),
        Held("toy", "ewc (peft)", "none", "peft", (0,), ()),
        Held("toy", "ewc (private)", "noised", "standard", (0,), ()),
        Held("toy", "lwf", "none", "standard", (), (5,)),
        Held("toy", "protofed-sp (reference)", "noised", "standard", (0,), ()),
    )


def test_the_table_counts_seeds_by_data_set(root: Path) -> None:
    shown = held_table(list_cells(*find_runs(root)))
    assert [column.label for column in shown.columns] == ["toy", "toy2", "privacy", "variant"]
    read = {line.label: [(cell.text, cell.spread, cell.interval) for cell in line.cells[:2]] for line in shown.lines}
    assert read["ewc"] == [("2", "(0, 2)", "1 unfinished: 1"), ("1", "(0)", "")]
    assert read["lwf"] == [("0", "", "1 unfinished: 5"), ("–", "", "")]


def test_settings_that_differ_make_cells_of_their_own(tmp_path: Path) -> None:
    write_run(tmp_path / "a", value, method="ewc", settings="[training]\nnegatives = 5\n")
    write_run(tmp_path / "b", value, method="ewc", seed=1, settings="[training]\nnegatives = 9\n")
    found = list_cells(find_runs(tmp_path)[0], ())
    assert [(cell.method, cell.finished) for cell in found] == [
        ("ewc, training.negatives=5", (0,)),
        ("ewc, training.negatives=9", (1,)),
    ]


def test_a_started_run_without_a_seed_is_no_cell() -> None:
    assert list_cells((), [Unfinished("x", {"dataset": "toy", "method": "ewc"}), Unfinished("y", {})]) == ()


def test_the_page_lists_what_a_grid_lacks(tmp_path: Path) -> None:
    wanted = cells(Grid(("toy",), ("frozen", "ewc"), (0, 1)), settle)
    write_run(tmp_path / "run", value)
    (tmp_path / "run" / "config.toml").write_text(to_toml(wanted[0].config), encoding="utf-8")
    start(tmp_path / "begun", "ewc", 0)
    (tmp_path / "begun" / "config.toml").write_text(to_toml(wanted[2].config), encoding="utf-8")
    text, _ = build(tmp_path, wanted)
    told = text[text.index('id="coverage-of-runs"') : text.index('id="environment"')]
    assert embedded(text)["tables"]["grid-coverage"]["caption"] == "1 of 4 cells are finished"
    assert "3 cells are missing or unfinished" in told
    assert "<li>missing: <code>toy/frozen/default/seed-1</code></li>" in told
    assert "<li>unfinished: <code>toy/ewc/default/seed-0</code></li>" in told
    assert "cells are finished" not in build(tmp_path)[0]


def test_the_command_takes_experiment_files_and_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text('[grid]\ndatasets = ["toy"]\nmethods = ["frozen"]\nseeds = [0, 1]\n', encoding="utf-8")
    write_run(tmp_path / "runs" / "a", value)
    report(tmp_path / "runs", tmp_path / "r.html", grid=[file, file])
    written = embedded((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert written["tables"]["grid-coverage"]["caption"] == "0 of 2 cells are finished"
    with pytest.raises(ConfigError, match="--grid goes with the HTML page, got --format md"):
        report(tmp_path / "runs", tmp_path / "r.md", grid=[file])
    with pytest.raises(ConfigError, match="leave --out, --format and --grid out"):
        report(tmp_path / "runs", check=[file], grid=[file])
