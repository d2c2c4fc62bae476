"""Run folders are found at any depth, read as written, and refused in one line when damaged."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_folders import config_text, write_run

from protofed.errors import ProtoFedError, RunFolderError
from protofed.experiments.matrices import matrices
from protofed.report.runs import find_runs


def by_cell(tested: int, trained: int, candidates: str, subset: str, metric: str) -> float:
    return 0.1 * tested + 0.01 * trained + (0.005 if metric == "hr@10" else 0)


def test_runs_are_found_at_any_depth_and_in_the_order_of_their_folders(tmp_path: Path) -> None:
    for name in ("b", "a/deep/er", "a/x"):
        write_run(tmp_path / name, by_cell)
    runs, unfinished = find_runs(tmp_path)
    assert [run.folder for run in runs] == ["a/deep/er", "a/x", "b"]
    assert unfinished == ()


def test_a_run_folder_given_directly_is_the_only_run(tmp_path: Path) -> None:
    runs, _ = find_runs(write_run(tmp_path / "only", by_cell))
    assert [run.folder for run in runs] == ["only"]


def test_the_matrix_has_the_tested_slice_as_row_and_the_trained_one_as_column(tmp_path: Path) -> None:
    matrix = matrices(pq.read_table(write_run(tmp_path / "run", by_cell) / "metrics.parquet"))[
        "sampled", "all", "ndcg@10"
    ]
    assert matrix.values == pytest.approx(np.array([[0.0, 0.01, 0.02], [0.1, 0.11, 0.12], [0.2, 0.21, 0.22]]))
    assert matrix.diagonal == pytest.approx(np.array([0.11, 0.22]))
    assert matrix.diagonal_queries.tolist() == [3, 4]


def test_a_slice_without_queries_is_nan_whatever_value_was_written(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", by_cell)
    table = pq.read_table(folder / "metrics.parquet")
    none_in_slice_1 = np.where(table["slice_tested"].to_numpy() == 1, 0, table["n_queries"].to_numpy())
    table = table.drop_columns("n_queries").append_column("n_queries", pa.array(none_in_slice_1))
    pq.write_table(table, folder / "metrics.parquet")
    matrix = matrices(pq.read_table(folder / "metrics.parquet"))["sampled", "all", "ndcg@10"]
    assert math.isnan(matrix.diagonal[0])
    assert matrix.diagonal[1] == pytest.approx(0.22)


def test_a_folder_without_metrics_is_unfinished_even_when_its_config_is_cut_off(tmp_path: Path) -> None:
    write_run(tmp_path / "done", by_cell)
    for name, text in (("waiting", config_text("toy", "ewc", 3)), ("cut", 'dataset = "to')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(text)
    runs, unfinished = find_runs(tmp_path)
    assert [run.folder for run in runs] == ["done"]
    assert [(run.folder, run.config.get("method")) for run in unfinished] == [("cut", None), ("waiting", "ewc")]


def test_a_folder_without_runs_is_refused_with_its_name_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ProtoFedError, match="holds no finished run") as problem:
        find_runs(tmp_path)
    assert str(tmp_path) in str(problem.value)
    assert "protofed run --out" in str(problem.value)
    with pytest.raises(ProtoFedError, match="no folder at"):
        find_runs(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["metrics.parquet", "timing.parquet"])
def test_a_damaged_parquet_file_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "run", by_cell)
    (folder / name).write_bytes((folder / name).read_bytes()[:-9])
    with pytest.raises(RunFolderError, match=name) as problem:
        find_runs(tmp_path)
    assert "\n" not in str(problem.value)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", by_cell)
    pq.write_table(pq.read_table(folder / "metrics.parquet").drop_columns("subset"), folder / "metrics.parquet")
    with pytest.raises(RunFolderError, match="no column subset"):
        find_runs(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.toml", "dataset = [", "not valid TOML"),
        ("config.toml", 'method = "x"\nseed = 0\n', "must give dataset"),
        ("ledger.json", "[{", "not a ledger of format"),
        ("ledger.json", "[]", "not a ledger of format"),
        ("environment.json", "[]", "must hold a JSON dict"),
    ],
)
def test_a_damaged_text_file_is_named_in_one_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    folder = write_run(tmp_path / "run", by_cell)
    (folder / name).write_text(text)
    with pytest.raises(RunFolderError, match=said) as problem:
        find_runs(tmp_path)
    assert name in str(problem.value)
    assert "\n" not in str(problem.value)


def test_seconds_of_a_stage_add_up_over_slices(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", by_cell)
    rows = {"slice": [0, 1, 2], "stage": ["warm-up", "learn", "learn"], "seconds": [5.0, 1.5, 2.0]}
    pq.write_table(pa.table(rows), folder / "timing.parquet")
    ((run,), _) = find_runs(tmp_path)
    assert run.seconds == {"warm-up": 5.0, "learn": 3.5}
