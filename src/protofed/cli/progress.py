"""Bars on a terminal, one plain line a stage elsewhere."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from protofed.progress import RUN, Number, Pace, Progress, Stage

WIDTH = 24  # of a bar
LOADING = "loading PyTorch"


class Shown(Progress, Protocol):
    """A progress that can be told beforehand which stages there will be."""

    def expect(self, title: str, stages: Sequence[Stage] = (), *, before: int = 0) -> None:
        """Show an overall bar of that title; `before` stages are over already."""
        ...


@contextlib.contextmanager
def shown(console: Console) -> Iterator[Shown]:
    """A progress that draws on this console until the block ends."""
    if not console.is_terminal:
        yield Lines(console)
        return
    drawn = Drawn(time.monotonic())
    picture = partial(draw, drawn)
    # what is printed meanwhile goes where it was sent: a file that stdout is, not the terminal
    with Live(get_renderable=picture, console=console, refresh_per_second=5, transient=True, redirect_stdout=False):
        yield drawn


@dataclass(slots=True)
class Lines:
    """A line for each stage that begins and each slice that is done; none before a run begins, which may be refused."""

    console: Console
    running: bool = False
    stage: str = ""

    def expect(self, title: str, stages: Sequence[Stage] = (), *, before: int = 0) -> None:
        """Nothing to say yet."""

    def __call__(self, task: str, done: Number, total: Number | None, note: str = "") -> None:
        if task == RUN:
            self.running = True
            if note:
                self._say(f"{note} ({done:.0f} of {total:.0f})" if total else note)
        elif self.running and task != self.stage:
            self.stage = task
            self._say(f"{task} ({note})" if note else task)

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


@dataclass(slots=True)
class Drawn:
    """What the bars show: how far a run is, its title where there is an overall bar, a note on the stage."""

    began: float
    pace: Pace = field(default_factory=Pace)
    title: str = ""
    note: str = ""

    def expect(self, title: str, stages: Sequence[Stage] = (), *, before: int = 0) -> None:
        self.title, self.pace = title, replace(self.pace, stages=tuple(stages), before=before, at=-1)

    def __call__(self, task: str, done: Number, total: Number | None, note: str = "") -> None:
        if task != RUN:
            self.pace, self.note = self.pace.after(task, done, total, time.monotonic()), note


def draw(drawn: Drawn) -> Group:
    """The picture of now: the overall bar, the stage's bar, and the note."""
    now, pace = time.monotonic(), drawn.pace
    table = Table.grid(padding=(0, 2, 0, 0))
    if drawn.title:
        row(table, drawn.title, pace.share() if pace.stages else None, now - drawn.began, still(pace.left(now)))
    if pace.piece is not None:
        share = pace.piece.share() if pace.piece.total else None
        row(table, pace.piece.name, share, now - pace.begun, still(pace.piece.left(now), least=pace.piece.grew))
    return Group(table, Text(drawn.note, style="dim", no_wrap=True, overflow="ellipsis"))


def still(seconds: Number | None, *, least: bool = False) -> str:
    """How long it will take, or at least; nothing where nobody knows, or where it is over now."""
    if seconds is None or seconds < 0.5:
        return ""
    return f"{'at least' if least else 'about'} {duration(seconds)} left"


def row(table: Table, name: str, share: Number | None, spent: Number, left: str) -> None:
    """One bar: how much is done, how long it has taken, and what is left."""
    bar = ProgressBar(total=None if share is None else 1.0, completed=share or 0.0, width=WIDTH)
    table.add_row(
        Text(name, no_wrap=True), bar, Text(clock(spent), style="cyan", justify="right"), Text(left, style="green")
    )


def clock(seconds: Number) -> str:
    """A time that is running: 0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def duration(seconds: Number) -> str:
    """A time a person can read: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5_400 else f"{seconds / 3_600:.1f} h"
