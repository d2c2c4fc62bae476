"""How long work tells what it is doing without knowing whether anybody looks."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Called with a task's name, how much is done, the total (None if unknown) and a short note."""

    def __call__(self, task: str, done: int | float, total: int | float | None, note: str = "") -> None: ...


def silent(task: str, done: int | float, total: int | float | None, note: str = "") -> None:
    """The progress of notebooks and tests: none."""
