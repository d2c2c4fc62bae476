"""Which cells of a grid are finished: compared by config, wherever their folders are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from protofed.config import as_today, flatten, from_values, to_toml
from protofed.errors import ConfigError
from protofed.experiments.grid import Cell
from protofed.experiments.records import Unfinished
from protofed.experiments.store import find_configs
from protofed.report.layout import Cell as Shown
from protofed.report.layout import Column, Line, Table
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
        return sum(state == "done" for _, state in self.states), len(self.states)

    @property
    def lacking(self) -> tuple[tuple[Cell, State], ...]:
        """The cells that are not done."""
        return tuple((cell, state) for cell, state in self.states if state != "done")

    @property
    def by_method(self) -> dict[tuple[str, str], Share]:
        """Done and wanted for each (data set, method)."""
        shares: dict[tuple[str, str], Share] = {}
        for cell, state in self.states:
            key = (cell.config.dataset, cell.config.method)
            done, wanted = shares.get(key, (0, 0))
            shares[key] = (done + (state == "done"), wanted + 1)
        return shares


def coverage(grid: Sequence[Cell], runs: Sequence[Run], unfinished: Sequence[Unfinished] = ()) -> Coverage:
    """Where each cell of a grid stands among runs that were read for a report."""
    started = [config for run in unfinished if (config := _same_words(run.config)) is not None]
    return _standing(grid, (run.config_text for run in runs), started)


def covered(grid: Sequence[Cell], root: Path) -> Coverage:
    """Where each cell of a grid stands among the runs at or below `root`; only configs are read."""
    return _standing(grid, *find_configs(root))


def coverage_table(found: Coverage) -> Table:
    """Done of wanted, a line for each method and a column for each data set."""
    shares = found.by_method
    datasets = list(dict.fromkeys(dataset for dataset, _ in shares))
    methods = list(dict.fromkeys(method for _, method in shares))
    lines = [Line(method, tuple(_shown(shares.get((dataset, method))) for dataset in datasets)) for method in methods]
    columns = tuple(Column(dataset, "finished runs of those wanted", ranked=False) for dataset in datasets)
    name, caption = "grid-coverage", "{} of {} cells are finished".format(*found.share)
    return Table(name, caption, columns, tuple(lines))


def together(grids: Iterable[Sequence[Cell]]) -> tuple[Cell, ...]:
    """The cells of several grids, a run that several want once."""
    distinct: dict[str, Cell] = {}
    for cell in (cell for grid in grids for cell in grid):
        distinct.setdefault(to_toml(cell.config), cell)
    return tuple(distinct.values())


def _standing(grid: Sequence[Cell], done: Iterable[str], started: Iterable[str]) -> Coverage:
    finished, begun = set(map(as_today, done)), set(map(as_today, started))
    states: list[tuple[Cell, State]] = []
    for cell in grid:
        text = to_toml(cell.config)
        missing: State = "unfinished" if text in begun else "missing"
        states.append((cell, "untuned" if not cell.tuned else "done" if text in finished else missing))
    return Coverage(tuple(states))


def _same_words(config: Mapping[str, Any]) -> str | None:
    """The text of a config that was already read; None where it is no run's."""
    try:
        return to_toml(from_values(flatten(config)))
    except ConfigError:
        return None


def _shown(share: Share | None) -> Shown:
    return Shown(f"{share[0]} of {share[1]}", value=share[0] / share[1]) if share else Shown("–")
