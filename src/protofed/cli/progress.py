"""Progress bars on a terminal, one plain line a slice elsewhere."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from protofed.progress import Progress


@contextlib.contextmanager
def shown(console: Console) -> Iterator[Progress]:
    """A progress function that draws on this console until the block ends."""
    if not console.is_terminal:
        yield _plain(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bars(*columns, TextColumn("{task.fields[note]}"), console=console, transient=True) as bars:
        known: dict[str, TaskID] = {}

        def report(task: str, done: int | float, total: int | float | None, note: str = "") -> None:
            if task not in known:
                known[task] = bars.add_task(task, total=total, note=note)
            bars.update(known[task], completed=done, total=total, note=note)
            if total is not None and done >= total and task != "run":
                bars.remove_task(known.pop(task))

        yield report


def _plain(console: Console) -> Progress:
    def report(task: str, done: int | float, total: int | float | None, note: str = "") -> None:
        if task == "run":
            console.print(f"{note} ({done:.0f} of {total:.0f})" if total else note, highlight=False)

    return report
