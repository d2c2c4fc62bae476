"""Which cells of a grid are finished: compared by config, wherever their folders are."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from protofed.config import as_today, flatten, from_values, to_toml
from protofed.errors import ConfigError
from protofed.experiments.grid import Cell
from protofed.experiments.records import Unfinished
from protofed.experiments.store import find_configs
from protofed.report.layout import MISSING, Column, Line, Table
from protofed.report.layout import Cell as Shown
from protofed.report.runs import Run

State = Literal["done", "unfinished", "missing", "untuned"]
Share = tuple[int, int]  # done, wanted


@dataclass(frozen=True, slots=True)
class Coverage:
    """Every wanted cell and where it stands, in the grid's order."""

    states: tuple[tuple[Cell, State], ...]

    @property
    def share(self) -> Share:
        """How many cells are done, of how many."""
        return len(self.states) - len(self.lacking), len(self.states)

    @property
    def lacking(self) -> tuple[tuple[Cell, State], ...]:
        """The cells that are not done."""
        return tuple((cell, state) for cell, state in self.states if state != "done")

    @property
    def by_method(self) -> dict[tuple[str, str], Share]:
        """Done and wanted for each (data set, method)."""
        wanted = Counter((cell.config.dataset, cell.config.method) for cell, _ in self.states)
        lacking = Counter((cell.config.dataset, cell.config.method) for cell, _ in self.lacking)
        return {key: (n - lacking[key], n) for key, n in wanted.items()}


def coverage(grid: Sequence[Cell], runs: Sequence[Run], unfinished: Sequence[Unfinished] = ()) -> Coverage:
    """Where each cell of a grid stands among runs that were read for a report."""
    started = []
    for run in unfinished:
        with contextlib.suppress(ConfigError):  # a config that is no run's
            started.append(to_toml(from_values(flatten(run.config))))
    return _standing(grid, (run.config_text for run in runs), started)


def covered(grid: Sequence[Cell], root: Path) -> Coverage:
    """Where each cell of a grid stands among the runs at or below `root`; only configs are read."""
    return _standing(grid, *find_configs(root))


def coverage_table(found: Coverage) -> Table:
    """Done of wanted, a line for each method and a column for each data set."""
    shares = found.by_method
    datasets, methods = (list(dict.fromkeys(names)) for names in zip(*shares, strict=True))
    columns = tuple(Column(dataset, "finished runs of those wanted", ranked=False) for dataset in datasets)
    lines = [Line(method, tuple(_cell(shares.get((dataset, method))) for dataset in datasets)) for method in methods]
    return Table("grid-coverage", "{} of {} cells are finished".format(*found.share), columns, tuple(lines))


def together(grids: Iterable[Sequence[Cell]]) -> tuple[Cell, ...]:
    """The cells of several grids, a run that several want once."""
    distinct: dict[str, Cell] = {}
    for cell in chain.from_iterable(grids):
        distinct.setdefault(to_toml(cell.config), cell)
    return tuple(distinct.values())


def _standing(grid: Sequence[Cell], done: Iterable[str], started: Iterable[str]) -> Coverage:
    finished, begun = set(map(as_today, done)), set(map(as_today, started))

    def state_of(cell: Cell) -> State:
        text = to_toml(cell.config)
        if not cell.tuned:
            return "untuned"
        return "done" if text in finished else "unfinished" if text in begun else "missing"

    return Coverage(tuple((cell, state_of(cell)) for cell in grid))


def _cell(share: Share | None) -> Shown:
    return Shown(f"{share[0]} of {share[1]}", value=share[0] / share[1]) if share else Shown(MISSING)
