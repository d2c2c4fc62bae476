"""`protofed bench` as its user meets it: real workers on a tiny log; kills, failures and refusals."""

import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest
import worlds

from protofed.cli.main import main
from protofed.data.prepared import save_log
from protofed.experiments.folder import SORTED_BY

IMPOSSIBLE = 5000  # prototypes: more than a tiny cohort can feed, seen only once the run is under way
DONE = ("popularity", "frozen", "finetune-last")


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def file_text(impossible: bool = True) -> str:
    methods = [*DONE, "protofed-sp"] if impossible else list(DONE)
    settings = worlds.TINY | {"protofed.prototypes": IMPOSSIBLE}
    lines = [f'"{key}" = {value!r}' for key, value in settings.items()]
    return f'[grid]\ndatasets = ["tiny"]\nmethods = {methods}\nseeds = [0]\n[settings]\n' + "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a prepared tiny log and two experiment files."""
    folder = tmp_path_factory.mktemp("place")
    save_log(worlds.tiny_log(), folder / "data", "tiny", source={})
    (folder / "grid.toml").write_text(file_text())
    (folder / "good.toml").write_text(file_text(impossible=False))
    return folder


def arguments(out: str, *more: object, file: str = "grid.toml") -> list[str]:
    return [*("bench", "--config", file, "--out", out, "--cache", "cache", "--device", "cpu"), *map(str, more)]


def protofed(*words: str, cwd: Path) -> Done:
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["protofed", *words]
    try:
        with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        code = 0
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    finally:
        sys.argv = argv
    return Done(code, out.getvalue(), err.getvalue())


def refused(*words: str, cwd: Path) -> str:
    done = protofed(*words, cwd=cwd)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture(scope="module")
def undisturbed(place):
    """A bench that nobody interrupts; its last cell fails."""
    return protofed(*arguments("whole", "--jobs", 2, "--json"), cwd=place), place / "whole"


def mtimes(out: Path) -> dict[Path, int]:
    return {path.relative_to(out): path.stat().st_mtime_ns for path in out.glob("*/*/*/seed-*/*.parquet")}


def test_a_failing_cell_stops_nothing_and_is_told_at_the_end(undisturbed):
    done, out = undisturbed
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert sorted(row["method"] for row in answer["rows"]) == sorted(DONE)
    (name,) = answer["failed"]
    assert name == "tiny/protofed-sp/default/seed-0"
    assert f"{IMPOSSIBLE} prototypes are more than the" in answer["failed"][name]
    assert f"failed: {name}: {answer['failed'][name]}" in done.stderr.splitlines()
    assert "Traceback" in (out / "failed" / f"{name}.txt").read_text()


def test_the_log_has_a_line_for_every_start_and_every_end(undisturbed):
    lines = undisturbed[0].stderr.splitlines()
    assert lines[0] == "4 cells, 0 done before, 2 at once"
    assert sum(line.endswith(" started") for line in lines) == 4
    assert sum(" done in " in line and "NDCG@10 0." in line for line in lines) == 3


def test_the_table_holds_what_the_runs_hold(undisturbed):
    _, out = undisturbed
    table = pq.read_table(out / "results.parquet").to_pylist()
    for method in DONE:
        run = pq.read_table(out / "tiny" / method / "default" / "seed-0" / "metrics.parquet")
        mine = [row for row in table if row["method"] == method]
        assert [row["value"] for row in mine] == pytest.approx(run["value"].to_pylist(), rel=1e-6)
    runs = pq.read_table(out / "runs.parquet").to_pylist()
    assert [row["threads"] for row in runs] == [1, 1, 1]
    assert all(row["command"].startswith("protofed run --dataset tiny --method ") for row in runs)


def test_the_command_that_a_run_keeps_makes_the_same_run(undisturbed, place):
    _, out = undisturbed
    folder = out / "tiny" / "popularity" / "default" / "seed-0"
    command = json.loads((folder / "environment.json").read_text())["command"]
    words = shlex.split(command)[1:]
    words[words.index("--out") + 1] = "again"
    assert protofed(*words, "--cache", "cache", cwd=place).returncode == 0
    for name in ("config.toml", "metrics.parquet"):
        assert (place / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_a_second_call_keeps_what_is_done_and_tries_again_what_failed(undisturbed, place):
    _, out = undisturbed
    before, table = mtimes(out), (out / "results.parquet").read_bytes()
    again = protofed(*arguments("whole"), cwd=place)
    assert again.returncode == 1
    assert again.stderr.splitlines()[0] == "4 cells, 3 done before, 1 at once"
    assert sum(line.endswith(" started") for line in again.stderr.splitlines()) == 1
    assert mtimes(out) == before
    assert (out / "results.parquet").read_bytes() == table


def test_a_dry_run_lists_done_and_left_and_writes_nothing(undisturbed, place):
    fresh = protofed(*arguments("nowhere", "--dry-run"), cwd=place)
    assert fresh.returncode == 0
    assert fresh.stdout.splitlines()[-1] == "4 cells: 0 done, 4 left"
    assert not (place / "nowhere").exists()
    told = json.loads(protofed(*arguments("whole", "--dry-run", "--json"), cwd=place).stdout)
    assert (told["done"], told["left"]) == (3, 1)
    assert told["cells"][0] == {"folder": "tiny/popularity/default/seed-0", "state": "done"}


def test_the_report_reads_the_bench_folder(undisturbed, place):
    done = protofed("report", "whole", "-o", "x.html", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    (section,) = json.loads(done.stdout)["sections"]
    assert sorted(row["label"] for row in section["rows"]) == sorted(DONE)


def test_another_config_in_a_cells_folder_is_one_line_that_names_it(undisturbed, place):
    before = mtimes(place / "whole")
    line = refused(*arguments("whole", "--set", "training.patience=9"), cwd=place)
    assert "whole/tiny/popularity/default/seed-0 holds another run (patience = 3, asked for patience = 9)" in line
    assert mtimes(place / "whole") == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--methods", "frosen"], "unknown method 'frosen'; did you mean 'frozen'?"),
        (["--datasets", "tinny"], "no prepared log 'tinny' under data (did you mean 'tiny'?)"),
        (["--seeds", "0,x"], "--seeds takes whole numbers, got '0,x'"),
        (["--set", "training.negative=3"], "did you mean 'training.negatives'?"),
        (["--set", "seed=3"], "settings must not set 'seed'; list it in grid.seeds"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--shard", "3/2"], "--shard takes i/n with 1 <= i <= n, got '3/2'"),
        (["--preset", "huge"], "preset must be one of small, paper, got 'huge'"),
        (["--ray"], "ray is not installed; run `pip install ray`, or `pip install -e '.[ray]'`"),
        (["--device", "tpu9"], "--device must be cpu, cuda or auto, got 'tpu9'"),
    ],
)
def test_a_mistake_in_the_call_is_one_line_and_writes_nothing(place, monkeypatch, more, message):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert message in refused(*arguments("never", *more), cwd=place)
    assert not (place / "never").exists()


def test_a_bench_without_a_folder_says_how_to_name_one(place):
    assert "--out is missing" in refused("bench", cwd=place)


def launch(place: Path, out: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "protofed.cli.main", *arguments(out, "--jobs", 1, file="good.toml")]
    return subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.02)


def runs_in(out: Path) -> list[int]:
    """Processes that name a folder below `out` on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(out).encode() in path.read_bytes() and b"protofed.cli.worker" in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for workers under /proc")
@pytest.mark.parametrize("moment", ["started", "first done", "second under way"])
def test_a_kill_at_any_moment_loses_at_most_the_run_in_flight(undisturbed, place, moment):
    out = place / f"killed-{moment.replace(' ', '-')}"
    first, second = (out / "tiny" / name / "default" / "seed-0" for name in DONE[:2])
    signs = {
        "started": lambda: bool(runs_in(out)),
        "first done": lambda: (first / "metrics.parquet").exists(),
        "second under way": lambda: (second / "log.jsonl").exists(),
    }
    child = launch(place, out.name)
    wait_for(signs[moment])
    os.kill(child.pid, signal.SIGKILL)
    child.communicate(timeout=60)
    wait_for(lambda: not runs_in(out), 30)  # nobody goes on alone
    before = mtimes(out)
    done = protofed(*arguments(out.name, "--jobs", 2, file="good.toml"), cwd=place)
    assert done.returncode == 0, done.stderr
    assert {path: mtimes(out)[path] for path in before} == before
    assert len(before) == len(SORTED_BY) * (moment != "started")
    assert (out / "results.parquet").read_bytes() == (undisturbed[1] / "results.parquet").read_bytes()
    assert not list(out.rglob("*.unfinished"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for workers under /proc")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_stopped_bench_leaves_whole_files_no_workers_and_says_how_to_go_on(place, name):
    out = place / f"stopped-{name}"
    child = launch(place, out.name)
    wait_for(lambda: (out / "tiny" / "frozen" / "default" / "seed-0" / "log.jsonl").exists())
    os.kill(child.pid, getattr(signal, name))
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130
    assert stderr.splitlines()[-1] == f"stopped; the same command continues what is in {out.name}"
    assert "Traceback" not in stderr
    assert runs_in(out) == []
    assert not list(out.rglob("*.unfinished"))
    assert set(pq.read_table(out / "results.parquet")["method"].to_pylist()) == {"popularity"}


@pytest.mark.slow
def test_shards_fill_one_folder_with_the_whole_grid(undisturbed, place):
    for part in ("1/2", "2/2"):
        done = protofed(*arguments("shards", "--shard", part, file="good.toml"), cwd=place)
        assert done.returncode == 0, done.stderr
    assert (place / "shards" / "results.parquet").read_bytes() == (undisturbed[1] / "results.parquet").read_bytes()


def test_a_tuned_bench_runs_with_what_tune_found_and_says_so_in_its_commands(place):
    best = place / "tune" / "ewc" / "best.toml"
    best.parent.mkdir(parents=True)
    best.write_text('method = "ewc"\nseed = 4\n[hyper]\nstrength = 0.25\n')
    words = arguments("tuned", "--methods", "frozen,ewc", "--tuned", "tune", file="good.toml")
    done = protofed(*words, cwd=place)
    assert done.returncode == 0, done.stderr
    config = (place / "tuned" / "tiny" / "ewc" / "default" / "seed-0" / "config.toml").read_text()
    assert "[hyper]\nstrength = 0.25\n" in config
    commands = pq.read_table(place / "tuned" / "runs.parquet")["command"].to_pylist()
    assert ["hyper.strength=0.25" in shlex.split(command) for command in commands] == [True, False]
    checked = protofed("report", "tuned", "--check", "good.toml", "--tuned", "tune", cwd=place)
    assert checked.returncode == 1
    assert "untuned    tiny/finetune-last/default/seed-0" in checked.stdout  # the file also asks for what was not tuned
    assert "has no finetune-last/best.toml" in refused(
        *arguments("other", "--tuned", "tune", file="good.toml"), cwd=place
    )
