"""A grid against what is there: found by config, wherever the folder; `--check` tells a person and a script."""

import json
import tomllib
from pathlib import Path

import pytest
import typer

from protofed.cli.report import report
from protofed.cli.run import settle
from protofed.config import parsed, to_toml
from protofed.errors import ConfigError, ProtoFedError
from protofed.experiments.grid import Cell, Grid, Variant, cells, grid_of, tuned_in
from protofed.experiments.records import Unfinished
from protofed.report.coverage import coverage, coverage_table, covered, together
from protofed.report.runs import Run

FILE = '[grid]\ndatasets = ["toy", "toy2"]\nmethods = ["frozen", "ewc"]\nseeds = [0, 1]\n'
GRID = cells(Grid(("toy", "toy2"), ("frozen", "ewc"), (0, 1)), settle)


def write_cell(root: Path, cell: Cell, *, finished: bool = True, name: str = "") -> Path:
    """A folder with the cell's config, and with the file that says a run is finished."""
    folder = root / (name or cell.folder)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(cell.config), encoding="utf-8")
    if finished:
        (folder / "metrics.parquet").touch()
    return folder


def states(root: Path) -> list[str]:
    return [state for _, state in covered(GRID, root).states]


def test_a_cell_is_done_unfinished_or_missing(tmp_path):
    write_cell(tmp_path, GRID[0])
    write_cell(tmp_path, GRID[2], finished=False)
    assert states(tmp_path) == ["done", "missing", "unfinished", *["missing"] * 5]
    found = covered(GRID, tmp_path)
    assert found.share == (1, 8)
    assert [(cell.folder, state) for cell, state in found.lacking][:2] == [
        ("toy/frozen/default/seed-1", "missing"),
        ("toy/ewc/default/seed-0", "unfinished"),
    ]
    assert found.by_method == {
        ("toy", "frozen"): (1, 2),
        ("toy", "ewc"): (0, 2),
        ("toy2", "frozen"): (0, 2),
        ("toy2", "ewc"): (0, 2),
    }


def test_a_cell_whose_method_is_not_tuned_yet_is_not_done_by_a_run_at_the_defaults(tmp_path):
    (tmp_path / "tuned").mkdir()
    grid = cells(Grid(("toy",), ("frozen", "ewc")), settle, tuned_in(tmp_path / "tuned", required=False))
    for cell in grid:
        write_cell(tmp_path / "runs", cell)
    assert [state for _, state in covered(grid, tmp_path / "runs").states] == ["done", "untuned"]  # frozen needs none


def test_the_folders_name_does_not_matter_but_every_setting_does(tmp_path):
    write_cell(tmp_path, GRID[1], name="by hand/frozen-1")
    (other,) = cells(Grid(("toy",), ("frozen",), settings=(("training.negatives", 7),)), settle)
    write_cell(tmp_path, other)  # lies where the grid's first cell would
    assert states(tmp_path) == ["missing", "done", *["missing"] * 6]


def test_a_finished_run_counts_even_where_a_killed_copy_lies_beside_it(tmp_path):
    write_cell(tmp_path, GRID[0], finished=False)
    write_cell(tmp_path, GRID[0], name="again")
    assert states(tmp_path)[0] == "done"


def test_a_config_without_the_settings_that_came_later_is_the_same_run(tmp_path):
    folder = write_cell(tmp_path, GRID[0])
    text = (folder / "config.toml").read_text(encoding="utf-8")
    (folder / "config.toml").write_text(text.replace("newcomer_share = 0.85\n", ""), encoding="utf-8")
    assert "newcomer_share = 0.85\n" in text
    assert states(tmp_path)[0] == "done"


@pytest.mark.parametrize("text", ["not toml [", 'dataset = "toy"\nunknown = 3\n', "seed = -1\n"])
def test_a_folder_with_another_config_is_passed_over(tmp_path, text):
    folder = write_cell(tmp_path, GRID[0])
    (folder / "config.toml").write_text(text, encoding="utf-8")
    assert states(tmp_path) == ["missing"] * 8


def test_runs_that_a_report_has_read_give_the_same_coverage():
    def nested(cell: Cell) -> dict[str, object]:
        return tomllib.loads(to_toml(cell.config))

    run = Run("x", to_toml(GRID[3].config), nested(GRID[3]), {}, {}, {}, ())
    found = coverage(GRID, [run], [Unfinished("y", nested(GRID[4])), Unfinished("z", {}), Unfinished("w", {"a": 1})])
    assert [state for _, state in found.states] == [*["missing"] * 3, "done", "unfinished", *["missing"] * 3]


def test_the_table_has_a_line_for_each_method_and_a_column_for_each_data_set(tmp_path):
    write_cell(tmp_path, GRID[0])
    (extra,) = cells(Grid(("toy",), ("popularity",)), settle)
    table = coverage_table(covered([*GRID, extra], tmp_path))
    assert [column.label for column in table.columns] == ["toy", "toy2"]
    assert [(line.label, *(cell.text for cell in line.cells)) for line in table.lines] == [
        ("frozen", "1 of 2", "0 of 2"),
        ("ewc", "0 of 2", "0 of 2"),
        ("popularity", "0 of 1", "–"),
    ]
    assert table.caption == "1 of 9 cells are finished"
    assert table.lines[0].cells[0].value == 0.5


def test_a_run_that_two_grids_want_is_counted_once():
    variant = Variant("nodp", ("protofed-sp",), (("protofed.mode", "nodp"),))
    first = cells(Grid(("toy",), ("frozen", "protofed-sp")), settle)
    second = cells(Grid(("toy",), ("protofed-sp",), variants=(variant,)), settle)
    assert [cell.folder for cell in together([first, second])] == [
        "toy/frozen/default/seed-0",
        "toy/protofed-sp/default/seed-0",
        "toy/protofed-sp/nodp/seed-0",
    ]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_check_lists_what_is_lacking_and_exits_with_1(tmp_path, file, capsys):
    runs = tmp_path / "runs"
    for cell in GRID[:6]:
        write_cell(runs, cell)
    write_cell(runs, GRID[7], finished=False)
    with pytest.raises(typer.Exit) as stopped:
        report(runs, check=[file])
    assert stopped.value.exit_code == 1
    assert capsys.readouterr().out.splitlines() == [
        "missing    toy2/ewc/default/seed-0",
        "unfinished toy2/ewc/default/seed-1",
        "toy: 4 of 4 done",
        "toy2: 2 of 4 done",
        f"6 of 8 cells of {file} are finished in {runs}; `protofed bench` makes the others",
    ]


def test_check_is_one_line_where_everything_is_there_and_writes_nothing(tmp_path, file, capsys, monkeypatch):
    runs = tmp_path / "runs"
    for cell in GRID:
        write_cell(runs, cell)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    report(runs, check=[file, file])
    assert capsys.readouterr().out == f"all 8 cells of {file}, {file} are finished in {runs}\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_check_works_on_a_folder_without_any_run_and_as_json(tmp_path, file, capsys):
    with pytest.raises(typer.Exit):
        report(tmp_path, check=[file], as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["done"], told["wanted"]) == (0, 8)
    assert told["coverage"][0] == {"dataset": "toy", "method": "frozen", "done": 0, "wanted": 2}
    assert told["lacking"][7] == {"cell": "toy2/ewc/default/seed-1", "state": "missing"}


def test_a_tuned_bench_is_checked_with_what_it_was_tuned_to(tmp_path, file, capsys):
    best = tmp_path / "tune" / "ewc" / "best.toml"
    best.parent.mkdir(parents=True)
    best.write_text('method = "ewc"\n[hyper]\nstrength = 0.25\n', encoding="utf-8")
    for seed in (0, 1):
        for dataset in ("toy", "toy2"):
            for method, sets in (("frozen", []), ("ewc", ["hyper.strength=0.25"])):
                config = settle({"dataset": dataset, "method": method, "seed": seed}, None, sets)
                write_cell(tmp_path / "runs", Cell("default", config, ()))
    report(tmp_path / "runs", check=[file], tuned=[tmp_path / "tune"])
    with pytest.raises(typer.Exit):
        report(tmp_path / "runs", check=[file])
    assert "missing    toy/ewc/default/seed-0" in capsys.readouterr().out


def test_what_makes_no_sense_with_check_is_refused(tmp_path, file):
    with pytest.raises(ConfigError, match="--check writes no file"):
        report(tmp_path, tmp_path / "report.html", check=[file])
    with pytest.raises(ConfigError, match="--tuned goes with --check"):
        report(tmp_path, tuned=[tmp_path])
    with pytest.raises(ProtoFedError, match="no folder at"):
        report(tmp_path / "absent", check=[file])
    with pytest.raises(ConfigError, match="no experiment file at"):
        report(tmp_path, check=[tmp_path / "absent.toml"])


def test_the_grid_of_the_file_is_the_grid_of_these_tests():
    assert cells(grid_of(parsed(FILE)), settle) == GRID
