"""Tasks side by side on worker processes, of this machine or of a Ray cluster; none outlives whoever started it.

A worker is told its task, a dataclass, as JSON, and says on stderr what went wrong.
"""

import contextlib
import importlib
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, Protocol, TypeVar, runtime_checkable

from protofed.errors import MissingExtra, ProtoFedError

PAUSE = 0.1  # seconds between two looks at the workers
GRACE = 20.0  # seconds a worker has to end after it was asked to
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a worker ended and what it said on stderr."""

    code: int
    said: str


@runtime_checkable
class Worker(Protocol):
    """A run under way somewhere."""

    def ended(self) -> Ended | None:
        """How it ended; None while it runs."""
        ...

    def stop(self) -> None:
        """Ask it to end and leave nothing half-written."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


Start = Callable[[Any], Worker]


def work(
    tasks: Sequence[T], start: Start, startable: Callable[[list[T], list[T]], Sequence[T]]
) -> Generator[tuple[T, Ended | None]]:
    """Each task when its worker starts (None) and when that has ended; whatever ends the loop, no worker outlives it.

    Of the tasks that wait, and those that run, `startable` says which to start now.
    """
    waiting = list(tasks)
    running: list[tuple[T, Worker]] = []
    try:
        while waiting or running:
            for task in startable(waiting, [task for task, _ in running]):
                waiting.remove(task)
                running.append((task, start(task)))
                yield task, None
            time.sleep(PAUSE)
            for task, worker in list(running):
                if (ended := worker.ended()) is not None:
                    running.remove((task, worker))
                    yield task, ended
    finally:
        stop_all([worker for _, worker in running])


def side_by_side(tasks: Sequence[T], start: Start, at_once: int) -> Generator[T]:
    """Each task once its worker has ended well; the first that has not ends everything and is raised.

    The first task runs alone, so that what it leaves for all (a warm-up) is made once.
    """
    limit = 1
    with contextlib.closing(work(tasks, start, lambda waiting, running: waiting[: limit - len(running)])) as events:
        for task, ended in events:
            if ended is not None:
                if ended.code:
                    raise ProtoFedError(f"{one_line(ended)} (in {task}); what is over is kept: start again")
                limit = at_once
                yield task


@dataclass(slots=True)
class Process:
    """A worker that is a process of this machine. It ends when its standard input does: with whoever started it."""

    process: subprocess.Popen[bytes]
    stderr: IO[bytes]
    _ended: Ended | None = None

    def ended(self) -> Ended | None:
        code = self.process.poll()
        if self._ended is None and code is not None:
            self.stderr.seek(0)
            self._ended = Ended(code, self.stderr.read().decode(errors="replace"))
            self.stderr.close()
            assert self.process.stdin is not None
            self.process.stdin.close()
        return self._ended

    def stop(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.ended()


@dataclass(frozen=True, slots=True)
class RayTask:
    """A worker that is a task of a Ray cluster."""

    ray: Any
    task: Any

    def ended(self) -> Ended | None:
        if not self.ray.wait([self.task], timeout=0)[0]:
            return None
        try:
            code, said = self.ray.get(self.task)
            return Ended(code, said)
        except Exception as problem:  # a lost node, a cancelled task: whatever Ray raises is how the worker ended
            return Ended(1, f"{type(problem).__name__}: {problem}")

    def stop(self) -> None:
        self.ray.cancel(self.task, force=False)

    def kill(self) -> None:
        self.ray.cancel(self.task, force=True)


def processes(command: Sequence[str]) -> Start:
    """Workers on this machine."""

    def start(task: Any) -> Process:
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 (the worker's, closed when it has ended)
        process = subprocess.Popen(
            [*command, json.dumps(asdict(task))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C is for the bench, which then stops its workers
        )
        return Process(process, stderr)

    return start


def ray_tasks(command: Sequence[str]) -> Start:
    """Workers on a Ray cluster whose nodes share the folders of the bench."""
    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError as missing:
        raise MissingExtra("ray", "ray") from missing
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    remote = ray.remote(num_cpus=1, max_retries=0)(on_a_node)
    return lambda task: RayTask(ray, remote.remote(tuple(command), task))


def on_a_node(command: Sequence[str], task: Any) -> tuple[int, str]:
    """Run one task to its end; a cancelled task stops its process."""
    worker = processes(command)(task)
    try:
        while (ended := worker.ended()) is None:
            time.sleep(PAUSE)
        return ended.code, ended.said
    finally:
        stop_all([worker])


def one_line(ended: Ended) -> str:
    """Why a worker failed: its error line, else the last line of its traceback, else how it ended."""
    lines = [line.strip() for line in ended.said.splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if ended.code < 0:
        return f"the worker was ended by {signal.Signals(-ended.code).name}"
    return (told or lines or [f"the worker ended with code {ended.code} before the run was finished"])[-1]


def stop_all(workers: Sequence[Worker]) -> None:
    """Ask every worker to end, wait, and end those that do not."""
    left = [worker for worker in workers if worker.ended() is None]
    for worker in left:
        worker.stop()
    until = time.monotonic() + GRACE
    while left and time.monotonic() < until:
        time.sleep(PAUSE / 2)
        left = [worker for worker in left if worker.ended() is None]
    for worker in left:
        worker.kill()
