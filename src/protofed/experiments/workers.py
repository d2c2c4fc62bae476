"""Tasks side by side on processes that live as long as there are any: what a worker has loaded, it loads once."""

import contextlib
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from protofed.errors import MachineError, ProtoFedError, in_one_line

T = TypeVar("T")
R = TypeVar("R")
Skill = Callable[[T], R]  # what a worker does with a task
Teach = Callable[[], Skill[T, R]]  # run once in each worker; has to be picklable, what it returns has not
GRACE = 5.0  # seconds a worker has to end after it was asked to


@dataclass(frozen=True, slots=True)
class Failed:
    """What a task raised in its worker."""

    problem: Exception
    told: str  # the traceback there


@dataclass(slots=True)
class _Worker(Generic[T]):
    process: BaseProcess
    line: Connection
    task: T | None = None


def side_by_side(tasks: Sequence[T], teach: Teach[T, R], n_workers: int, *, one_first: bool) -> Iterator[tuple[T, R]]:
    """Each task with its result, as they are finished; the first problem ends everything and is raised.

    `one_first`: the first task runs alone, so that what it leaves for all (a warm-up) is made once. Whatever happens,
    no worker outlives the iteration, and none outlives this process.
    """
    waiting = list(tasks)
    alone = one_first and len(waiting) > 1
    workers: list[_Worker[T]] = []
    try:
        workers.extend(_started(teach) for _ in range(min(n_workers, 1 if alone else len(waiting))))
        while waiting or any(worker.task is not None for worker in workers):
            _hand_out(workers, waiting)
            for worker in _answering(workers):
                task, result = worker.task, _received(worker)
                assert task is not None
                worker.task = None
                yield task, result
                if alone:
                    alone = False
                    workers.extend(_started(teach) for _ in range(min(n_workers, len(waiting)) - 1))
    finally:
        _end(workers)


def _started(teach: Teach[T, R]) -> _Worker[T]:
    context = multiprocessing.get_context("spawn")  # a forked process could not use a GPU that its parent has used
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, teach), daemon=True)
    process.start()
    there.close()
    return _Worker(process, here)


def _work(line: Connection, teach: Teach[T, R]) -> None:
    """A worker: one task after the other, until nobody hands out any."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    skill: Skill[T, R] | None = None
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            task = line.recv()
            try:
                skill = skill or teach()
                line.send(skill(task))
            except Exception as problem:
                line.send(Failed(_sendable(problem), traceback.format_exc()))


def _end_with_the_parent() -> None:
    """A parent that was killed cannot say goodbye; files are written whole or not at all, so nothing is lost."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _sendable(problem: Exception) -> Exception:
    """Its text, as an error of the user's or not: not every class can be made from its text alone."""
    if isinstance(problem, ProtoFedError | OSError):
        return ProtoFedError(in_one_line(problem))
    return RuntimeError(f"{type(problem).__name__}: {problem}")


def _hand_out(workers: Iterable[_Worker[T]], waiting: list[T]) -> None:
    for worker in workers:
        if worker.task is None and waiting:
            worker.task = waiting.pop(0)
            worker.line.send(worker.task)


def _answering(workers: Sequence[_Worker[T]]) -> list[_Worker[T]]:
    """Those who have said something, or can no longer."""
    ready = wait([worker.line for worker in workers if worker.task is not None])
    return [worker for worker in workers if worker.line in ready]


def _received(worker: _Worker[T]) -> Any:
    try:
        answer = worker.line.recv()
    except (EOFError, ConnectionError):  # a pipe whose other end is gone is empty, or broken
        worker.process.join(GRACE)
        raise MachineError(
            f"a worker ended with code {worker.process.exitcode} in the middle of {worker.task}; what is over is kept: "
            "start again, with fewer --jobs if memory ran out"
        ) from None
    if isinstance(answer, Failed):
        raise answer.problem from RuntimeError(f"in a worker:\n{answer.told}")
    return answer


def _end(workers: Sequence[_Worker[T]]) -> None:
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        worker.process.join(GRACE)
        if worker.process.is_alive():
            worker.process.kill()
        worker.line.close()
