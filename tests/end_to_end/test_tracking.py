"""`protofed run --track`: the event file, read back, says what the run folder says."""

import contextlib
import io
import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import worlds

from protofed.cli.main import main
from protofed.cli.track import Scalar, diagnostics, records, tracked
from protofed.data.prepared import save_log
from protofed.progress import silent

NEEDS = "tensorboard is not installed; pip install tensorboard"
SETS = [word for key, value in worlds.TINY.items() for word in ("--set", f"{key}={value}")]


def protofed(*words: object, cwd: Path) -> tuple[int, str]:
    """The exit code and what was said on stderr."""
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["protofed", *map(str, words)]
    try:
        with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        return 0, err.getvalue()
    except SystemExit as stopped:
        return int(stopped.code or 0), err.getvalue()
    finally:
        sys.argv = argv


def run(place: Path, *more: object) -> tuple[int, str]:
    named = ("--dataset", "tiny", "--root", "data", "--method", "finetune-last", "--cache", "cache", "--device", "cpu")
    return protofed("run", *named, *SETS, *more, cwd=place)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a prepared tiny log and a run that was tracked from the start."""
    pytest.importorskip("tensorboard", reason=NEEDS)
    folder = tmp_path_factory.mktemp("place")
    save_log(worlds.tiny_log(), folder / "data", "tiny", source={})
    code, said = run(folder, "--out", "run", "--track", "events")
    assert code == 0, said
    return folder


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve of the event files, as TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def same(curve: list[tuple[int, float]], right: dict[int, float]) -> None:
    """Each step once, at its value; events hold 32-bit floats."""
    assert len(curve) == len(right)
    assert dict(curve) == pytest.approx(right, rel=1e-6)


def test_every_slices_accuracy_is_its_diagonal_on_the_test_part(place):
    rows = pq.read_table(place / "run" / "metrics.parquet").to_pylist()
    curves = read(place / "events")
    for metric in ("ndcg@10", "hr@10"):
        for candidates in ("sampled", "full"):
            for subset in ("all", "novel"):
                asked = {"split": "test", "candidates": candidates, "subset": subset, "metric": metric}
                right = {
                    row["slice_tested"]: row["value"]
                    for row in rows
                    if row["slice_tested"] == row["slice_trained"] and asked.items() <= row.items()
                }
                assert len(right) == 3
                same(curves[f"{metric}/{candidates} {subset}"], right)


def test_traces_numbers_and_seconds_are_those_of_the_folder(place):
    lines = [json.loads(line) for line in (place / "run" / "log.jsonl").read_text().splitlines()]
    curves = read(place / "events")
    for line in lines:
        name = "warm-up" if line["stage"] == "warm-up" else f"slice {line['slice']}"
        trace = line.get("validation_ndcg10", [])
        same(curves.get(f"validation ndcg@10/{name}", []), dict(enumerate(trace)))
    epochs = [(line["slice"], line["epochs"]) for line in lines if line["stage"] == "learn" and "epochs" in line]
    assert curves["learn/epochs"] == epochs
    timing = pq.read_table(place / "run" / "timing.parquet").to_pylist()
    for stage in ("learn", "evaluate", "warm-up"):
        same(curves[f"seconds/{stage}"], {row["slice"]: row["seconds"] for row in timing if row["stage"] == stage})


def test_a_finished_run_can_be_tracked_afterwards_and_twice(place):
    for _ in range(2):
        code, said = run(place, "--out", "run", "--track", "later")
        assert code == 0, said
    assert len(list((place / "later").iterdir())) == 2
    assert read(place / "later") == read(place / "events")


def test_tracking_changes_no_number(place):
    assert run(place, "--out", "untracked")[0] == 0
    tables = [(place / out / "metrics.parquet").read_bytes() for out in ("run", "untracked")]
    assert tables[0] == tables[1]
    assert (place / "run" / "config.toml").read_text() == (place / "untracked" / "config.toml").read_text()


def test_a_run_that_is_refused_writes_no_events(place):
    code, said = run(place, "--out", "run", "--track", "refused", "--seed", "3")
    assert code == 2
    assert "holds another run" in said
    assert not (place / "refused").exists()


def test_a_file_is_no_place_for_events(place):
    code, said = run(place, "--out", "run", "--track", "data/tiny/interactions.parquet")
    assert (code, said) == (2, "error: --track data/tiny/interactions.parquet is a file; give a folder\n")


def test_slices_are_written_while_the_run_goes_on(place, tmp_path):
    seen = []

    def progress(task: str, done: int | float, total: int | float | None, note: str = "") -> None:
        curves = read(tmp_path / "events")
        seen.append([step for step, _ in curves["ndcg@10/sampled all"]])

    with tracked(tmp_path / "events", place / "run", 2, progress) as report:
        for done in (1, 2):
            report("run", done, 3, "")
    assert seen == [[0], [0, 1]]
    assert [step for step, _ in read(tmp_path / "events")["ndcg@10/sampled all"]] == [0, 1, 2]


def test_without_the_library_one_line_names_the_extra_before_anything_is_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    save_log(worlds.tiny_log(), tmp_path / "data", "tiny", source={})
    code, said = run(tmp_path, "--out", "run", "--track", "events")
    way_out = "run `pip install tensorboard`, or `pip install -e '.[track]'` in the source tree"
    assert (code, said) == (2, f"error: tensorboard is not installed; {way_out}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_without_the_flag_nothing_is_asked_of_the_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with tracked(None, tmp_path, 8, silent) as progress:
        assert progress is silent


def test_the_newest_word_about_a_slice_counts_and_a_cut_off_line_is_passed_over(tmp_path):
    lines = [
        '{"slice": 1, "stage": "learn", "epochs": 1}',
        '{"slice": 1, "stage": "learn", "epochs": 2}',
        '{"slice": 1, "st',
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    assert records(tmp_path / "log.jsonl", 1) == [{"slice": 1, "stage": "learn", "epochs": 2}]


def test_a_log_line_becomes_its_finite_numbers_and_its_trace():
    line = {"slice": 2, "stage": "learn", "loss": 0.5, "bad": float("nan"), "parts": [1.0], "validation_ndcg10": [0.1]}
    assert list(diagnostics(line, 2)) == [Scalar("validation ndcg@10/slice 2", 0.1, 0), Scalar("learn/loss", 0.5, 2)]
