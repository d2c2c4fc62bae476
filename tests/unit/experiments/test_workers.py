"""Tasks on long-lived processes: the results of a loop, one lesson a worker, and nobody left behind."""

import multiprocessing
import os
import time
from functools import partial

import pytest

from protofed.errors import ConfigError, MachineError, MissingExtra, ProtoFedError
from protofed.experiments.workers import side_by_side

pytestmark = pytest.mark.slow  # starts processes


def squarer(folder):
    """A skill that notes who was taught it."""
    (folder / f"taught-{os.getpid()}").touch()
    return lambda n: (n * n, os.getpid())


def failing_at(n, problem):
    def skill(task):
        if task == n:
            raise problem
        return task

    return skill


def refusing():
    return failing_at(2, ConfigError("the rate must be positive, got -1"))


def lacking():
    return failing_at(0, MissingExtra("ray", "ray"))


def breaking():
    return failing_at(1, ZeroDivisionError("by zero"))


def dying():
    return lambda task: os._exit(7) if task == 1 else task


def marking(folder):
    """The first task leaves something for all after a while; others say whether it was there."""

    def skill(task):
        if task == 0:
            time.sleep(0.3)
            (folder / "warm").touch()
        return (folder / "warm").exists()

    return skill


def sleeping(folder):
    (folder / str(os.getpid())).touch()
    return lambda task: time.sleep(60)


def nobody_left() -> bool:
    return not multiprocessing.active_children()


def test_results_are_those_of_a_loop_and_every_worker_is_taught_once(tmp_path):
    found = dict(side_by_side(range(7), partial(squarer, tmp_path), 2, one_first=False))
    assert {task: square for task, (square, _) in found.items()} == {n: n * n for n in range(7)}
    workers = {pid for _, pid in found.values()}
    assert os.getpid() not in workers
    assert {int(path.name.removeprefix("taught-")) for path in tmp_path.iterdir()} >= workers
    assert len(list(tmp_path.iterdir())) <= 2
    assert nobody_left()


def test_what_the_first_task_leaves_for_all_is_there_before_the_others_begin(tmp_path):
    assert all(there for _, there in side_by_side(range(5), partial(marking, tmp_path), 3, one_first=True))


@pytest.mark.parametrize(
    ("teach", "kind", "text"),
    [
        (refusing, ProtoFedError, "the rate must be positive, got -1"),
        (lacking, ProtoFedError, "pip install ray"),
        (breaking, RuntimeError, "ZeroDivisionError: by zero"),
        (dying, MachineError, "ended with code 7 in the middle of 1"),
    ],
)
def test_the_first_problem_is_raised_and_ends_every_worker(teach, kind, text):
    with pytest.raises(kind) as told:
        list(side_by_side(range(4), teach, 2, one_first=False))
    assert text in str(told.value)
    assert nobody_left()


def test_who_stops_listening_leaves_no_worker(tmp_path):
    results = side_by_side(range(9), partial(squarer, tmp_path), 2, one_first=True)
    next(results)
    results.close()
    assert nobody_left()


def test_workers_of_a_process_that_was_killed_end_too(tmp_path):
    def listen():
        list(side_by_side(range(4), partial(sleeping, tmp_path), 2, one_first=False))

    parent = multiprocessing.get_context("fork").Process(target=listen)
    parent.start()
    until = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    workers = [int(path.name) for path in tmp_path.iterdir()]
    assert len(workers) == 2
    parent.kill()
    parent.join()
    while any(os.path.exists(f"/proc/{pid}") for pid in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)


def test_nothing_to_do_starts_nobody(tmp_path):
    assert list(side_by_side([], partial(squarer, tmp_path), 3, one_first=True)) == []
    assert not list(tmp_path.iterdir())
