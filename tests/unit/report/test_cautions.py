"""A warm-up that early stopping ended too soon is named with its steps and the way out; others are not."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from run_folders import write_run

from protofed.report.cautions import cautions
from protofed.report.runs import WarmUp, find_runs, read_warm_up
from protofed.report.sections import group
from protofed.report.tables import compute


def told(epochs: int, steps: int, trace: Sequence[float]) -> dict[str, Any]:
    return {
        "slice": 0,
        "stage": "warm-up",
        "epochs": epochs,
        "steps_per_epoch": steps,
        "validation_ndcg10": list(trace),
    }


def warned(root: Path) -> list[str]:
    found = cautions([compute(section) for section in group(find_runs(root)[0])], ())
    return [line for line in found if "warm-up" in line]


def test_a_warm_up_of_few_steps_is_named_with_its_steps_and_the_way_out(tmp_path: Path) -> None:
    for seed, best in ((0, 2), (1, 1)):
        log = [told(best, 22, [0.1, 0.3, 0.2, 0.2, 0.2])]
        write_run(tmp_path / f"frozen-{seed}", lambda *_: 0.5, seed=seed, log=log)
    (line,) = warned(tmp_path)
    assert "at its best after 22 to 44 steps" in line
    assert "with 22 steps an epoch, a patience of 3 epochs may give up too soon" in line
    assert "--set training.patience_steps=300" in line


@pytest.mark.parametrize(
    "log",
    [
        pytest.param([told(50, 22, [0.1] * 54)], id="long enough"),
        pytest.param([told(100, 4, [0.1] * 101)], id="ended by the cap"),
        pytest.param([], id="not told"),
    ],
)
def test_a_warm_up_that_was_long_or_not_stopped_is_not(tmp_path: Path, log: list[dict[str, Any]]) -> None:
    write_run(tmp_path / "frozen", lambda *_: 0.5, log=log)
    assert warned(tmp_path) == []


def test_a_config_that_this_version_cannot_read_has_no_such_warning(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "frozen", lambda *_: 0.5, log=[told(2, 22, [0.1, 0.3, 0.2, 0.2, 0.2])])
    (folder / "config.toml").write_text('dataset = "toy"\nmethod = "frozen"\nseed = 0\nfrom_the_future = 1\n')
    assert warned(tmp_path) == []


def test_the_warm_up_is_read_past_lines_that_a_kill_cut_off(tmp_path: Path) -> None:
    warm_up = json.dumps(told(2, 7, [0.1, 0.2, 0.3, 0.1]))
    log = f'{{"slice": 0, "sta\n{warm_up}\n'
    assert read_warm_up(log, 100) == WarmUp(14, 7, stopped_early=True)
    assert read_warm_up(log, 3) == WarmUp(14, 7, stopped_early=False)
    assert read_warm_up("", 100) is None
