"""`protofed tune` as its user meets it."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_command_line import FAST, protofed, refused

from protofed.cli.tune import planned
from protofed.experiments.run import Experiment

TUNE = [
    *("tune", "--out", "tune", "--cache", "cache", "--slices", "2", "--trials", "2", *FAST),
    *("--method", "finetune-last", "--method", "popularity"),
]


def test_a_tune_prints_its_trials_writes_its_files_and_its_best_config_runs(tmp_path):
    first = protofed(*TUNE, "--json", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    told = {row["method"]: row for row in json.loads(first.stdout)["methods"]}
    assert [trial["trial"] for trial in told["finetune-last"]["trials"]] == [0, 1]
    assert [trial["settings"] for trial in told["popularity"]["trials"]] == [{}]
    assert "popularity: nothing to tune; one trial, its defaults" in first.stderr
    assert len((tmp_path / "tune" / "trials.csv").read_text().splitlines()) == 1 + 3
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "tune").glob("*/trial-*/metrics.parquet")}
    assert len(written) == 3
    again = protofed(*TUNE, cwd=tmp_path)
    assert again.returncode == 0
    assert f"{told['finetune-last']['best']['objective']:.4f}" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in written} == written
    run = ("run", "--config", "tune/finetune-last/best.toml", "--out", "run", "--cache", "cache", "--json")
    ran = protofed(*run, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["method"] == "finetune-last"


def test_trials_side_by_side_come_out_as_one_after_the_other(tmp_path):
    files = {}
    for jobs in ("1", "2"):
        out = tmp_path / jobs
        out.mkdir()
        done = protofed(*TUNE, "--trials", "3", "--jobs", jobs, cwd=out)
        assert done.returncode == 0, done.stderr
        found = [out / "tune" / "trials.csv", *sorted((out / "tune").glob("*/best.toml"))]
        files[jobs] = [path.read_bytes() for path in found]
        assert "finetune-last trial 2 (3 of 3)" in done.stderr
    assert len(files["1"]) == 3
    assert files["1"] == files["2"]


def test_a_trial_that_breaks_stops_neither_the_others_nor_the_next_method(tmp_path, monkeypatch):
    whole = Experiment.run

    def breaks_once(self, out, progress):
        if out.name == "trial-01" or out.parent.name == "popularity":
            raise RuntimeError("it diverged")
        return whole(self, out, progress)

    monkeypatch.setattr(Experiment, "run", breaks_once)
    done = protofed(*TUNE, "--method", "frozen-no-new-rows", "--json", cwd=tmp_path)
    assert done.returncode == 1  # popularity has no trial left
    told = {row["method"]: row for row in json.loads(done.stdout)["methods"]}
    assert told["finetune-last"]["best"]["trial"] == 0
    assert told["finetune-last"]["trials"][1]["failed"] == "RuntimeError: it diverged"
    assert told["popularity"]["best"] is None
    assert told["frozen-no-new-rows"]["best"]["trial"] == 0


def test_a_setting_that_is_given_holds_for_every_trial(tmp_path):
    rate = "training.slice_learning_rate=0.02"
    searches = planned({"dataset": "synthetic"}, ['hyper="strength = 0.7"', rate], ["ewc"], tmp_path, 2, 50)
    assert [trial.settings for trial in searches[0].trials] == [{}, {"hyper.decay": 0.9}]
    assert searches[0].config.hyper == "strength = 0.7"


def write_small_log(root) -> None:
    (root / "small").mkdir(parents=True)
    rows = range(40)
    columns = {"user": [n % 4 for n in rows], "item": [n % 9 for n in rows], "timestamp": [n // 2 for n in rows]}
    pq.write_table(pa.table(columns), root / "small" / "interactions.parquet")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "ewk"], "unknown method 'ewk'; did you mean 'ewc'?"),
        (["--method", "ewc", "--trials", "0"], "--trials must be at least 1, got 0"),
        (["--method", "ewc", "--known", "none.csv"], "no file at --known none.csv"),
        (["--method", "ewc", "--known", "bad.csv"], "bad.csv has no column failed"),
        (["--method", "ewc", "--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--method", "ewc", "--slices", "0"], "--slices must be at least 1, got 0"),
        (["--method", "ewc", "--set", "hyper.strenght=1"], "did you mean 'hyper.strength'?"),
        (["--method", "ewc", "--dataset", "small", "--set", "stream.n_slices=2"], "too few for a pseudo base and 3"),
        (["--method", "ewc", "--variant", "huge"], "variant must be one of standard, peft, got 'huge'"),
        ([], "--method is missing, e.g. --method ewc"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(tmp_path, arguments, message):
    write_small_log(tmp_path / "data")
    (tmp_path / "bad.csv").write_text("method,trial\newc,0\n")
    assert message in refused("tune", "--out", "tune", "--cache", "cache", *arguments, cwd=tmp_path)
    assert not (tmp_path / "tune").exists()


def test_the_folder_of_another_tune_is_refused(tmp_path):
    small = ["tune", "--out", "tune", "--cache", "cache", "--slices", "2", "--method", "popularity", *FAST]
    assert protofed(*small, "--trials", "2", cwd=tmp_path).returncode == 0
    line = refused(*small, "--trials", "3", cwd=tmp_path)
    assert "--out tune holds another tune (trials 2, asked for 3); choose a new folder" in line


def test_a_run_takes_hyper_parameters_and_its_folder_tells_runs_with_others_apart(tmp_path):
    run = ["run", "--dataset", "synthetic", "--method", "ewc", "--out", "run", "--cache", "cache", "--json", *FAST]
    done = protofed(*run, "--set", "hyper.strength=0.5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "config.toml").read_text(encoding="utf-8").endswith("\n[hyper]\nstrength = 0.5\n")
    assert protofed(*run, "--set", "hyper.strength=0.5", cwd=tmp_path).stdout == done.stdout
    assert "holds another run" in refused(*run, "--set", "hyper.strength=0.6", cwd=tmp_path)
    assert "holds another run" in refused(*run, cwd=tmp_path)
