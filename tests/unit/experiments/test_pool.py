"""Tasks on worker processes: each is reported once it is over, the first alone, and nobody is left behind."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from protofed.errors import ProtoFedError
from protofed.experiments.pool import processes, side_by_side

pytestmark = pytest.mark.slow  # starts processes
BEGIN = "import json, os, pathlib, sys, time; told = json.loads(sys.argv[1]); place = pathlib.Path(told['place'])\n"


@dataclass(frozen=True)
class Task:
    place: str
    number: int


def workers(code: str):
    return processes([sys.executable, "-c", BEGIN + code])


def tasks(place: Path, count: int) -> list[Task]:
    return [Task(str(place), number) for number in range(count)]


def test_every_task_is_done_once_and_the_first_alone(tmp_path):
    code = '(place / f\'{told["number"]}-{(place / "warm").exists()}\').touch()\n'
    code += "if told['number'] == 0: time.sleep(0.3); (place / 'warm').touch()"
    done = list(side_by_side(tasks(tmp_path, 5), workers(code), 3))
    assert sorted(task.number for task in done) == list(range(5))
    assert done[0].number == 0
    assert {path.name for path in tmp_path.iterdir()} == {"warm", "0-False", *(f"{n}-True" for n in range(1, 5))}


def test_the_first_problem_ends_everything_and_is_told_in_one_line(tmp_path):
    code = "(place / str(os.getpid())).touch()\nif told['number'] == 1: sys.exit('error: the rate must be positive')\n"
    code += "if told['number'] == 2: time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(ProtoFedError, match=r"^the rate must be positive \(in .*number=1\)"):
        list(side_by_side(tasks(tmp_path, 4), workers(code), 2))
    assert time.monotonic() - began < 30
    assert not any(os.path.exists(f"/proc/{path.name}") for path in tmp_path.iterdir())


def test_a_loop_that_is_left_early_leaves_no_worker(tmp_path):
    code = "(place / str(os.getpid())).touch()\nif told['number']: time.sleep(60)"
    found = side_by_side(tasks(tmp_path, 3), workers(code), 2)
    assert next(found).number == 0
    found.close()
    assert not any(os.path.exists(f"/proc/{path.name}") for path in tmp_path.iterdir())


def test_no_task_starts_no_worker():
    assert list(side_by_side([], workers("sys.exit(1)"), 2)) == []
