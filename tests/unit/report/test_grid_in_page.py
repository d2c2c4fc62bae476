"""What a grid lacks, in the page; what the command refuses about grids."""

from pathlib import Path

import pytest
from run_folders import config_text, embedded, write_run

from protofed.cli.report import report
from protofed.cli.run import settle
from protofed.config import to_toml
from protofed.errors import ConfigError
from protofed.experiments.grid import Grid, cells
from protofed.report.page import build


def value(tested: int, trained: int, candidates: str, subset: str, metric: str) -> float:
    return 0.6 if metric == "hr@10" else 0.4


def start(folder: Path, method: str, seed: int) -> None:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config_text("toy", method, seed), encoding="utf-8")


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
