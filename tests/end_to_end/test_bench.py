"""The scheduler of a bench with workers that are played: order, warm-ups, failures, interruptions."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import worlds
from hypothesis import given
from hypothesis import strategies as st

from protofed.config import from_toml, to_toml
from protofed.errors import MissingExtra, RunFolderError
from protofed.experiments import bench, pool
from protofed.experiments.bench import Job, Status
from protofed.experiments.grid import Cell
from protofed.experiments.pool import Ended
from protofed.experiments.run import Experiment


def cell(method="popularity", seed=0, **settings):
    return Cell("default", worlds.tiny_config(seed, method=method, **settings), ())


def job_of(out):
    return lambda it: Job(str(out / it.folder), to_toml(it.config), "", "", "cpu", "")


@dataclass
class Played:
    """A worker that warms up at its second look, ends at its fifth, and finishes its run unless it is to fail."""

    job: Job
    finish: object
    ended_with: Ended
    looks: int = 0
    stopped: bool = False

    def ended(self):
        self.looks += 1
        folder = Path(self.job.folder)
        if self.stopped:
            return Ended(143, "")
        if self.looks == 2:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "log.jsonl").write_text('{"slice": 0, "stage": "warm-up"}\n')
        if self.looks < 5:
            return None
        if self.ended_with.code == 0:
            self.finish(self.job)
        return self.ended_with

    def stop(self):
        self.stopped = True

    def kill(self):
        raise AssertionError("a worker that stops when asked need not be killed")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(pool, "PAUSE", 0.001)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def finisher(cache):
    def finish(job):
        Experiment(from_toml(job.config), worlds.tiny_log(), cache, worlds.CPU, "test").run(Path(job.folder + "-real"))
        Path(job.folder, "log.jsonl").unlink()
        Path(job.folder).rmdir()
        Path(job.folder + "-real").rename(job.folder)

    return finish


def played(out, cells, cache, failing=(), tell=None, jobs=2):
    started = []

    def start(job):
        ended = (
            Ended(2, "Traceback\nerror: it is impossible\n") if job.folder.endswith(tuple(failing)) else Ended(0, "")
        )
        started.append(Played(job, finisher(cache), ended))
        return started[-1]

    board = {it.folder: bench.standing(it, out) for it in cells}
    with bench.held(out):
        return bench.run_cells(cells, board, out, start, job_of(out), jobs, tell or (lambda *_: None)), started


def test_a_cell_that_fails_is_written_down_and_the_others_go_on(tmp_path, cache):
    cells = [cell(seed=seed) for seed in range(3)]
    board, _ = played(tmp_path, cells, cache, failing=["seed-1"])
    assert [board[it.folder].state for it in cells] == ["done", "failed", "done"]
    assert board[cells[1].folder].error == "it is impossible"
    (told,) = (path for path in (tmp_path / "failed").rglob("*") if path.is_file())
    assert told == tmp_path / "failed" / f"{cells[1].folder}.txt"
    assert told.read_text().startswith("Traceback")
    again, started = played(tmp_path, cells, cache)
    assert [worker.job.folder for worker in started] == [str(tmp_path / cells[1].folder)]
    assert {status.state for status in again.values()} == {"done"}
    assert not (tmp_path / "failed").exists()


def test_an_interruption_stops_every_worker_and_passes_on(tmp_path, cache):
    alive = []

    def interrupt(it, status):
        alive.append(it)
        if len(alive) == 2:
            raise KeyboardInterrupt

    cells = [cell(seed=seed) for seed in range(3)]
    workers = []

    def start(job):
        workers.append(Played(job, None, Ended(0, "")))
        return workers[-1]

    board = {it.folder: Status("waiting") for it in cells}
    with pytest.raises(KeyboardInterrupt):
        bench.run_cells(cells, board, tmp_path, start, job_of(tmp_path), 3, interrupt)
    assert len(workers) == 2
    assert all(worker.stopped for worker in workers)


def test_a_warm_up_is_never_computed_by_two_workers_at_once(tmp_path, cache):
    cells = [cell(method, seed) for method in ("popularity", "frozen", "frozen-no-new-rows") for seed in (0, 1)]
    running, warm, most = {}, set(), 0

    def tell(it, status):
        nonlocal most
        if status.state == "running" and it.folder not in running:
            cold = [other for other in running.values() if other.warm_up == it.warm_up and it.warm_up not in warm]
            assert cold == [] or reached_warm_up(tmp_path, cold)
            running[it.folder] = it
            most = max(most, len(running))
        elif status.state == "done":
            warm.add(it.warm_up)
            running.pop(it.folder)

    played(tmp_path, cells, cache, tell=tell, jobs=4)
    assert most > 2  # once it is warm, cells of one warm-up do run side by side


def reached_warm_up(out, cells):
    return all((out / it.folder / "log.jsonl").is_file() for it in cells)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=8), st.sets(st.integers(0, 2)), st.integers(1, 5))
def test_what_may_start_fills_the_places_in_order_without_repeating_a_warm_up(listed, warm_seeds, jobs):
    cells = [Cell(f"v{n}", worlds.tiny_config(seed), ()) for n, (seed, _) in enumerate(listed)]
    running = [it for it, (_, runs) in zip(cells, listed, strict=True) if runs][:jobs]
    waiting = [it for it, (_, runs) in zip(cells, listed, strict=True) if not runs]
    warm = {cell(seed=seed).warm_up for seed in warm_seeds}
    chosen = bench.startable(waiting, running, warm, jobs)
    assert chosen == [it for it in waiting if it in chosen]
    assert len(running) + len(chosen) <= jobs
    cold = [it.warm_up for it in chosen if it.warm_up not in warm]
    assert len(cold) == len(set(cold))
    assert not set(cold) & {it.warm_up for it in running}
    blocked = {it.warm_up for it in (*running, *chosen)} - warm
    full = len(running) + len(chosen) == jobs
    assert full or all(it.warm_up in blocked for it in waiting if it not in chosen)


def test_a_folder_with_another_run_is_named(tmp_path, cache):
    it = cell()
    Experiment(cell(seed=1).config, worlds.tiny_log(), cache, worlds.CPU, "test").run(tmp_path / it.folder)
    with pytest.raises(
        RunFolderError, match=rf"{it.folder} holds another run \(seed = 1, asked for seed = 0\); choose"
    ):
        bench.standing(it, tmp_path)


def test_a_finished_cell_with_a_damaged_table_is_named(tmp_path, cache):
    it = cell()
    Experiment(it.config, worlds.tiny_log(), cache, worlds.CPU, "test").run(tmp_path / it.folder)
    (tmp_path / it.folder / "metrics.parquet").write_bytes(b"half")
    with pytest.raises(RunFolderError, match=r"seed-0/metrics\.parquet is not a readable parquet file \(.*\); "):
        bench.standing(it, tmp_path)


@pytest.mark.parametrize(
    ("ended", "line"),
    [
        (Ended(2, "Traceback ...\nerror: a rule, a value\n"), "a rule, a value"),
        (Ended(1, "Traceback ...\n  File x\nRuntimeError: out of memory\n"), "RuntimeError: out of memory"),
        (Ended(-9, ""), "the worker was ended by SIGKILL"),
        (Ended(0, ""), "the worker ended with code 0 before the run was finished"),
    ],
)
def test_a_failure_is_told_in_one_line(ended, line):
    assert pool.one_line(ended) == line


def test_the_time_left_is_judged_by_cells_of_the_same_kind():
    cells = [cell("popularity", 0), cell("popularity", 1), cell("frozen", 0), cell("frozen", 1), cell("ewc", 0)]
    states = [
        Status("done", seconds=10.0),
        Status("waiting"),
        Status("done", seconds=40.0),
        Status("running", began=100.0),
        Status("waiting"),
    ]
    board = {it.folder: status for it, status in zip(cells, states, strict=True)}
    # popularity 10, the rest of frozen 40 - 15, ewc the mean of both: 25; on two workers
    assert bench.time_left(cells, board, 2, 115.0) == pytest.approx((10 + 25 + 25) / 2)
    waiting = {it.folder: Status("waiting") for it in cells}
    assert not bench.time_left(cells, waiting, 2, 115.0) >= 0  # unknown


def test_one_folder_has_one_bench_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "PATIENCE", 0.05)
    with bench.held(tmp_path):
        with pytest.raises(RunFolderError, match="another bench is running in"), bench.held(tmp_path):
            pass
        with bench.held(tmp_path, "bench-1-of-2"):  # shards share a folder
            pass
    with bench.held(tmp_path):
        pass


def test_a_single_runs_folder_is_no_bench_folder(tmp_path):
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(RunFolderError, match="a bench needs a folder of its own"), bench.held(tmp_path):
        pass


def test_a_worker_that_does_not_stop_is_killed(monkeypatch):
    monkeypatch.setattr(pool, "GRACE", 0.3)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x', flush=True); time.sleep(60)"
    worker = pool.processes([sys.executable, "-c", deaf])(Job("", "", "", "", "", ""))
    time.sleep(0.5)
    began = time.monotonic()
    pool.stop_all([worker])
    assert time.monotonic() - began < 10
    assert worker.ended().code == -9


def test_a_worker_is_told_its_job_and_what_it_says_is_kept():
    echo = "import sys; sys.stderr.write(sys.argv[1]); sys.exit(3)"
    job = Job("folder", "config", "root", "cache", "cpu", "command")
    worker = pool.processes([sys.executable, "-c", echo])(job)
    while (ended := worker.ended()) is None:
        time.sleep(0.01)
    assert ended.code == 3
    assert Job(**json.loads(ended.said)) == job
    assert worker.ended() == ended


def test_ray_is_asked_for_by_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        MissingExtra, match=r"ray is not installed; run `pip install ray`, or `pip install -e '.\[ray\]'`"
    ):
        pool.ray_tasks(["worker"])


def test_a_ray_task_runs_the_same_worker_and_a_lost_one_is_a_failure(monkeypatch):
    """Ray itself is played: tasks run when they are asked for."""

    def remote(**options):
        assert options == {"num_cpus": 1, "max_retries": 0}
        return lambda function: SimpleNamespace(remote=lambda *arguments: (function, arguments))

    def get(task):
        function, arguments = task
        return function(*arguments)

    stub = SimpleNamespace(
        init=lambda **_: None, remote=remote, get=get, wait=lambda tasks, timeout: (tasks, []), cancel=None
    )
    monkeypatch.setitem(sys.modules, "ray", stub)
    start = pool.ray_tasks([sys.executable, "-c", "import sys; sys.stderr.write('said'); sys.exit(5)"])
    assert start(Job("", "", "", "", "", "")).ended() == Ended(5, "said")

    def lost(task):
        raise ConnectionError("the node is gone")

    monkeypatch.setattr(stub, "get", lost)
    assert start(Job("", "", "", "", "", "")).ended() == Ended(1, "ConnectionError: the node is gone")
