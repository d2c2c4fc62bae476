"""Which runs there are: the cells of a grid by config, wherever their folders are, and where the runs come from."""

import contextlib
import json
import re
import shlex
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
from protofed.privacy.ledger import SHARE, claim
from protofed.report.layout import Cell as Shown
from protofed.report.layout import Column, Line, Table, cells_of
from protofed.report.runs import Run
from protofed.report.sections import DEFAULTS, Section, grouped

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
    cells = {key: Shown(f"{done} of {wanted}", value=done / wanted) for key, (done, wanted) in shares.items()}
    lines = [Line(method, tuple(cells.get((dataset, method), Shown()) for dataset in datasets)) for method in methods]
    return Table("grid-coverage", "{} of {} cells are finished".format(*found.share), columns, tuple(lines))


def together(grids: Iterable[Sequence[Cell]]) -> tuple[Cell, ...]:
    """The cells of several grids, a run that several want once."""
    found = grouped(chain.from_iterable(grids), lambda cell: to_toml(cell.config))
    return tuple(cells[0] for cells in found.values())


def _standing(grid: Sequence[Cell], done: Iterable[str], started: Iterable[str]) -> Coverage:
    finished, begun = set(map(as_today, done)), set(map(as_today, started))

    def state_of(cell: Cell) -> State:
        text = to_toml(cell.config)
        if not cell.tuned:
            return "untuned"
        return "done" if text in finished else "unfinished" if text in begun else "missing"

    return Coverage(tuple((cell, state_of(cell)) for cell in grid))


def claim_of(runs: Iterable[Run]) -> str:
    """The claim of all runs that released something, with their δ and, where they all know it, their logs' shares."""
    private = [run for run in runs if run.releases]
    default = float(DEFAULTS["privacy.delta"])
    deltas = {float(run.settings.get("privacy.delta", default)) for run in private}
    shares = [run.environment.get(SHARE) for run in private]
    return claim(deltas or {default}, [share for share in shares if share is not None] if None not in shares else ())


def environments(runs: Sequence[Run]) -> tuple[tuple[str, str], ...]:
    """Each fact of the environments and its values; where runs differ, how many have each."""
    told: dict[str, Counter[str]] = {}
    for run in runs:
        for key, value in flatten(run.environment).items():
            if key != "command" and value != {}:
                told.setdefault(key, Counter())[_text(value)] += 1
    found = []
    for key, counts in sorted(told.items()):
        shares = [f"{value} ({n} {'run' if n == 1 else 'runs'})" for value, n in sorted(counts.items())]
        found.append((key, next(iter(counts)) if [*counts.values()] == [len(runs)] else "; ".join(shares)))
    return tuple(found)


def commands(runs: Sequence[Run]) -> tuple[str, ...]:
    """The commands that runs kept, one for all that differ in their seed and their folder alone."""
    found = [command for run in runs if (command := run.environment.get("command"))]
    lines = [shlex.join(map(str, command)) if isinstance(command, list) else str(command) for command in found]
    return tuple(dict.fromkeys(re.sub(r" --(seed|out)[ =]\S+", "", line) for line in lines))


def usual_settings(sections: Sequence[Section]) -> dict[str, str]:
    """The value of each setting that most rows of the page have, by dotted names."""
    own = [row.settings for section in sections for row in section.rows]
    keys = dict.fromkeys(key for settings in own for key in settings)
    counts = {key: Counter(_text(settings.get(key)) for settings in own).most_common(1)[0][0] for key in keys}
    return {key: value for key, value in counts.items() if value != "null"}


def settings_table(sections: Sequence[Section]) -> Table:
    """What each row has otherwise than most, and its seeds."""
    usual = usual_settings(sections)
    columns = (Column("seeds", ranked=False, text=True), Column("settings", ranked=False, text=True))
    lines = []
    for title, row in [(section.title, row) for section in sections for row in section.rows]:
        own = {key: _text(row.settings.get(key)) for key in {**usual, **row.settings}}
        differing = ", ".join(f"{key} = {text}" for key, text in own.items() if text != usual.get(key, "null"))
        cells = cells_of(columns, [" ".join(map(str, row.seeds)), differing])
        lines.append(Line(f"{title}: {row.label}", cells))
    return Table("settings", "What a row has otherwise", columns, tuple(lines))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
