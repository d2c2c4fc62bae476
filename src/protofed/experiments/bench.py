"""The cells of a grid on worker processes: finished ones are kept, killed ones continued, failed ones written down."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from protofed.config import to_toml
from protofed.errors import RunFolderError
from protofed.evaluation.forgetting import accuracy
from protofed.experiments.folder import RunFolder, refuse_other_config
from protofed.experiments.grid import Cell
from protofed.experiments.matrices import main_values
from protofed.experiments.pool import Ended, Start, Worker, one_line, work
from protofed.experiments.records import read_table, read_text
from protofed.experiments.tidy import seconds, write_tables
from protofed.files import locked, make_folder, remove_unfinished, write_text

State = Literal["done", "waiting", "running", "failed"]
PATIENCE = 30.0  # seconds to wait for the workers of a bench that was killed


@dataclass(frozen=True, slots=True)
class Job:
    """All a worker needs to know; paths are absolute."""

    folder: str
    config: str  # TOML
    root: str
    cache: str
    device: str
    command: str  # the `protofed run` that does the same


@dataclass(frozen=True, slots=True)
class Status:
    """Where a cell stands."""

    state: State
    began: float = 0.0  # monotonic clock
    seconds: float = 0.0
    score: float = math.nan  # mean of A[t, t], NDCG@10, sampled, all events
    error: str = ""


Board = dict[str, Status]  # by the cell's folder
Tell = Callable[[Cell, Status], None]


def standing(cell: Cell, out: Path) -> Status:
    """Done or waiting; a folder with another run is an error that names it."""
    folder = out / cell.folder
    written = folder / "config.toml"
    if written.is_file():
        refuse_other_config(folder, read_text(written), to_toml(cell.config))
    if not RunFolder(folder).finished:
        return Status("waiting")
    return _done(folder)


def _done(folder: Path) -> Status:
    score = accuracy(main_values(read_table(folder / "metrics.parquet")))
    return Status("done", seconds=sum(seconds(folder).values()), score=score)


@contextlib.contextmanager
def held(out: Path, name: str = "bench") -> Iterator[None]:
    """The bench folder for one bench at a time (one per shard).

    Workers of a killed bench end on their own; until they have, the run folders they work in are locked.
    """
    if out.is_file() or (out / "config.toml").is_file():
        raise RunFolderError(f"--out {out} is a file or a single run's folder; a bench needs a folder of its own")
    make_folder(out)
    busy = f"another bench is running in {out}; wait for it or choose another --out"
    with locked(out / f".{name}.lock", busy, patience=PATIENCE):
        remove_unfinished(out)
        yield


def run_cells(
    cells: Sequence[Cell], board: Board, out: Path, start: Start, job_of: Callable[[Cell], Job], jobs: int, tell: Tell
) -> Board:
    """The board once nothing waits any more; whatever ends it, no worker outlives it and the tables are written."""
    board, warm = dict(board), set[str]()
    told_before: dict[str, int] = {}  # bytes of log.jsonl that earlier attempts wrote

    def begin(cell: Cell) -> Worker:
        told_before[cell.folder] = _size(out / cell.folder / "log.jsonl")
        return start(job_of(cell))

    def note_warm_up(cell: Cell) -> None:  # the first line of a log tells of the warm-up, which is kept by then
        if _size(out / cell.folder / "log.jsonl") > told_before[cell.folder]:
            warm.add(cell.warm_up)

    def next_cells(waiting: list[Cell], running: list[Cell]) -> list[Cell]:
        for cell in running:
            note_warm_up(cell)
        return startable(waiting, running, warm, jobs)

    left = [cell for cell in cells if board[cell.folder].state == "waiting"]
    try:
        with contextlib.closing(work(left, begin, next_cells)) as events:
            for cell, ended in events:
                status = Status("running", began=time.monotonic())
                if ended is not None:
                    note_warm_up(cell)
                    status = record_end(cell, ended, out, board[cell.folder])
                if status.state == "done":
                    warm.add(cell.warm_up)
                board[cell.folder] = status
                tell(cell, status)
    finally:
        write_tables(out)
    return board


def startable(waiting: Sequence[Cell], running: Sequence[Cell], warm: set[str], jobs: int) -> list[Cell]:
    """The cells to start now: in order, but none that would repeat a warm-up that is under way."""
    chosen: list[Cell] = []
    warming = {cell.warm_up for cell in running} - warm
    for cell in waiting:
        if len(running) + len(chosen) >= jobs:
            break
        if cell.warm_up not in warming:
            chosen.append(cell)
            warming |= {cell.warm_up} - warm
    return chosen


def record_end(cell: Cell, ended: Ended, out: Path, before: Status) -> Status:
    """A cell's status once its worker has ended; what a failed one said is kept below `failed` until it succeeds."""
    folder, path = out / cell.folder, out / "failed" / f"{cell.folder}.txt"
    spent = time.monotonic() - before.began
    if ended.code or not RunFolder(folder).finished:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, ended.said or f"the worker said nothing and ended with code {ended.code}\n")
        return replace(before, state="failed", seconds=spent, error=one_line(ended))
    if path.is_file():
        path.unlink()
        with contextlib.suppress(OSError):  # others failed too
            os.removedirs(path.parent)
    return replace(_done(folder), began=before.began, seconds=spent)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def time_left(cells: Sequence[Cell], board: Board, jobs: int, now: float) -> float:
    """Seconds until the end, judged by finished cells of the same method and data set, else by all; NaN without."""
    kinds: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        if board[cell.folder].state == "done":
            kinds.setdefault((cell.config.dataset, cell.config.method), []).append(board[cell.folder].seconds)
    everything = [spent for kind in kinds.values() for spent in kind]
    if not everything:
        return math.nan
    left = 0.0
    for cell in cells:
        status = board[cell.folder]
        usual = fmean(kinds.get((cell.config.dataset, cell.config.method), everything))
        spent = {"waiting": 0.0, "running": now - status.began}.get(status.state, math.inf)
        left += max(0.0, usual - spent)
    return left / max(1, min(jobs, len(cells)))
