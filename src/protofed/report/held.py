"""Which cells have runs: by data set, method, privacy and variant, the seeds that are finished and the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protofed.methods.catalogue import private_by_itself
from protofed.report.layout import MISSING, Cell, Column, Line, Table
from protofed.report.runs import Run, Unfinished
from protofed.report.sections import alike, by_stream

NOISED, PLAIN = "noised", "none"


@dataclass(frozen=True, slots=True)
class Held:
    """The seeds of one row on one data set."""

    dataset: str
    method: str  # as tables name it, with the settings that tell it from others of its name
    privacy: str
    variant: str
    finished: tuple[int, ...]
    unfinished: tuple[int, ...]


def list_cells(runs: Sequence[Run], unfinished: Sequence[Unfinished]) -> tuple[Held, ...]:
    """Every cell with a run; a seed that is finished in one folder and not in another is finished."""
    cells, known = [], [run for run in unfinished if _is_run(run.config)]
    everything: list[Run | Unfinished] = [*runs, *known]
    for title, stream in by_stream(everything):
        for label, members in alike(stream):
            done = {int(run.config["seed"]) for run in members if isinstance(run, Run)}
            others = {int(run.config["seed"]) for run in members} - done
            config = members[0].config
            variant = str(config.get("variant") or "standard")
            cells.append(Held(title, label, privacy_of(config), variant, tuple(sorted(done)), tuple(sorted(others))))
    return tuple(sorted(cells, key=lambda cell: (cell.method, cell.dataset)))


def privacy_of(config: Mapping[str, Any]) -> str:
    """Whether the settings ask for noise: ProtoFed-SP's private mode does, and what is wrapped."""
    ours = private_by_itself(config["method"], config.get("protofed", {}).get("mode", "reference"))
    return NOISED if ours or config.get("privacy", {}).get("wrap", False) else PLAIN


def held_table(cells: Sequence[Held]) -> Table:
    """A line for each method, privacy and variant, a column for each data set: how many seeds, and which."""
    datasets = list(dict.fromkeys(sorted(cell.dataset for cell in cells)))
    by_line: dict[tuple[str, str, str], dict[str, Held]] = {}
    for cell in cells:
        by_line.setdefault((cell.method, cell.privacy, cell.variant), {})[cell.dataset] = cell
    lines = [
        Line(method, (*(_seeds(own.get(dataset)) for dataset in datasets), Cell(privacy), Cell(variant)))
        for (method, privacy, variant), own in by_line.items()
    ]
    words = {"ranked": False, "text": True}
    columns = (
        *(Column(dataset, "finished seeds", ranked=False) for dataset in datasets),
        Column("privacy", "", "whether the settings ask for noise", **words),
        Column("variant", "", "standard: everything may learn; peft: a frozen backbone with small modules", **words),
    )
    return Table("coverage", "", columns, tuple(lines))


def _seeds(cell: Held | None) -> Cell:
    if cell is None:
        return Cell(MISSING, value=0.0)
    left = f"{len(cell.unfinished)} unfinished: {_list(cell.unfinished)}" if cell.unfinished else ""
    which = f"({_list(cell.finished)})" if cell.finished else ""
    return Cell(str(len(cell.finished)), which, left, value=float(len(cell.finished)))


def _list(seeds: Sequence[int], between: str = ", ") -> str:
    return between.join(map(str, seeds))


def _is_run(config: Mapping[str, Any]) -> bool:
    kinds = (("dataset", str), ("method", str), ("seed", int))
    return all(isinstance(config.get(key), kind) for key, kind in kinds)
