"""How long work tells what it is doing without knowing whether anybody looks, and how long the rest of it will take."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Protocol, runtime_checkable

Number = int | float
RUN = "run"  # the task whose steps are a run's slices


@runtime_checkable
class Progress(Protocol):
    """Called with a task's name, how much is done, the total (None if unknown) and a short note."""

    def __call__(self, task: str, done: Number, total: Number | None, note: str = "") -> None: ...


def silent(task: str, done: Number, total: Number | None, note: str = "") -> None:
    """The progress of notebooks and tests: none."""


def within(progress: Progress, stage: str) -> Progress:
    """A progress for the pieces of one stage: each is told as the stage's, with its own name where it has no note."""

    def report(task: str, done: Number, total: Number | None, note: str = "") -> None:
        progress(stage, done, total, note or task)

    return report


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a run as people call it, and its kind: stages of one kind take about equally long."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class Piece:
    """What is under way: how much was done when it began, and how much when it was last told of.

    `grew`: its total did, as that of a training that stops early does; so what is left is at least what it seems.
    """

    name: str
    began: Number
    first: Number
    told: Number
    done: Number
    total: Number | None
    grew: bool = False

    def after(self, done: Number, total: Number | None, now: Number) -> "Piece":
        """The same once more of it is done."""
        grew = self.grew or (total is not None and self.total is not None and total > self.total)
        return replace(self, told=now, done=done, total=total, grew=grew)

    def goes_on(self, done: Number, total: Number | None) -> bool:
        """Whether it is this piece still, and not the next one of the same stage."""
        return done >= self.done and (self.total is None) == (total is None)

    def share(self) -> Number:
        """How much of it is done, between 0 and 1; 0 where nobody knows."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    def left(self, now: Number) -> Number | None:
        """Seconds until its end at the pace so far; None before there is a pace."""
        if not self.total or self.done <= self.first:
            return None
        pace = (self.told - self.began) / (self.done - self.first)
        return max(0.0, pace * (self.total - self.done) - (now - self.told))


@dataclass(frozen=True, slots=True)
class Pace:
    """Where a run stands among its stages, what earlier ones took, and so what is left. Times are the caller's."""

    stages: tuple[Stage, ...] = ()
    before: int = 0  # how many of them were over at the start
    at: int = -1  # the stage under way
    since: Number = 0.0  # when it began
    piece: Piece | None = None
    took: Mapping[str, tuple[Number, ...]] = field(default_factory=dict)  # seconds of the stages that are over, by kind

    def after(self, task: str, done: Number, total: Number | None, now: Number) -> "Pace":
        """The pace once this is known of a task; one that is ahead among the stages ends the one under way."""
        if self.piece is not None and self.piece.name == task and self.piece.goes_on(done, total):
            return replace(self, piece=self.piece.after(done, total, now))
        piece = Piece(task, now, done, now, done, total)
        ahead = range(max(self.before, self.at), len(self.stages))
        at = next((n for n in ahead if self.stages[n].name == task), self.at)
        if at == self.at:
            return replace(self, piece=piece)
        return replace(self, piece=piece, at=at, since=now, took=self._took(now))

    def _took(self, now: Number) -> Mapping[str, tuple[Number, ...]]:
        """With the stage under way, which is over now."""
        if self.at < 0:
            return self.took
        kind = self.stages[self.at].kind
        return {**self.took, kind: (*self.took.get(kind, ()), now - self.since)}

    def usual(self, kind: str) -> Number | None:
        """What a stage of this kind took on average; None before one was over."""
        return fmean(self.took[kind]) if kind in self.took else None

    @property
    def in_stage(self) -> Piece | None:
        """What is under way where it belongs to the stage."""
        belongs = self.piece is not None and self.at >= 0 and self.stages[self.at].name == self.piece.name
        return self.piece if belongs else None

    @property
    def begun(self) -> Number:
        """When what is under way began: the stage, or the piece where it is of no stage."""
        return self.piece.began if self.piece is not None and self.in_stage is None else self.since

    def share(self) -> Number:
        """How much of the run is done, counted in stages."""
        if self.at < 0:
            return self.before / max(1, len(self.stages))
        return (self.at + (self.in_stage.share() if self.in_stage else 0.0)) / len(self.stages)

    def left(self, now: Number) -> Number | None:
        """Seconds until the end of the run; None while a stage is ahead whose like was never measured."""
        if self.at < 0:
            return None
        ahead = [self._here(now), *(self.usual(stage.kind) for stage in self.stages[self.at + 1 :])]
        known = [seconds for seconds in ahead if seconds is not None]
        return sum(known) if len(known) == len(ahead) else None

    def _here(self, now: Number) -> Number | None:
        """Seconds until the end of the stage under way, as earlier ones took, or else at its own pace."""
        usual = self.usual(self.stages[self.at].kind)
        if usual is not None:
            return max(0.0, usual - (now - self.since))
        return self.in_stage.left(now) if self.in_stage else None
