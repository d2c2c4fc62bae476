"""Rows of one method that differ in a single setting: ablations, sweeps of a number, sweeps of the noise."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from protofed.config import RunConfig
from protofed.methods.catalogue import METHODS
from protofed.methods.names import FLAGSHIP
from protofed.report.runs import Run
from protofed.report.sections import Row, Section, flat, flat_settings

NOISE = ("privacy.target_epsilon", "privacy.noise_multiplier", "privacy.newcomer_noise")
FACTORS = {  # what Table 2 switches one at a time, and the value of the full method
    "protofed.ablate": "",
    "protofed.aggregator": "fedkmeans",
    "protofed.alignment": "euclidean",
    "protofed.group_sparsity": False,
}
CHOSEN_AT_0 = ("protofed.prototypes", "protofed.base_history")  # 0 lets the program choose: no place on an axis


@dataclass(frozen=True, slots=True)
class Ablation:
    """A row and the full one that it differs from in one factor, with the seeds both have."""

    full: Row
    row: Row
    setting: str
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Rows that differ in one number alone, by that number."""

    setting: str
    points: tuple[tuple[float, Row], ...]
    chosen: tuple[Row, ...] = ()  # all else equal, the number left to the program

    def labels(self) -> set[str]:
        return {row.label for row in (*self.chosen, *(row for _, row in self.points))}


def flagship(section: Section) -> Row | None:
    """Our row the page is about: nothing left out, ProtoFed before ProtoFed-SP, the private mode before others."""
    ours = [row for row in section.rows if row.is_ours and not row_settings(row).get("protofed.ablate")]
    swept = side_rows(section)

    def order(row: Row) -> tuple[bool, bool, bool, int, str]:
        return (row.label in swept, row.method != FLAGSHIP, row.share != "private", -len(row.runs), row.label)

    return min(ours, key=order, default=None)


def row_settings(row: Row) -> dict[str, Any]:
    """What decides a row's numbers; a hyper-parameter that it leaves alone has its method's value."""
    return hyper_defaults(row.method) | flat_settings(row.runs[0])


@cache
def hyper_defaults(method: str) -> dict[str, Any]:
    """A method's own hyper-parameters by dotted names; none of a method that this version does not know."""
    own: Any = METHODS[method].method if method in METHODS else None
    return flat(asdict(own), "hyper.") if own is not None else {}


def ablations(section: Section) -> tuple[Ablation, ...]:
    """Every ProtoFed-SP row that switches one factor off, with its full row; rows that share no seed are left out."""
    ours = [row for row in section.rows if row.is_ours]
    found = []
    for setting, default in FACTORS.items():
        for members in _alike(ours, (setting,)):
            full = [row for row in members if row_settings(row).get(setting, default) == default]
            for row in members if full else ():
                seeds = tuple(seed for seed in row.seeds if seed in full[0].seeds)
                if row is not full[0] and seeds:
                    found.append(Ablation(full[0], row, setting, seeds))
    return tuple(found)


def sweeps(section: Section) -> tuple[Sweep, ...]:
    """Every number that at least two rows of one method differ in while all else is equal; noise is another matter."""
    found = []
    for setting in sorted(_differing(section.rows) - set(NOISE)):
        for members in _alike(section.rows, (setting,)):
            points = sorted(_points(members, setting), key=lambda point: point[0])
            if len({value for value, _ in points}) > 1:
                on_axis = {row.label for _, row in points}
                found.append(Sweep(setting, tuple(points), tuple(row for row in members if row.label not in on_axis)))
    return tuple(found)


def noise_sweeps(section: Section) -> tuple[tuple[Row, ...], ...]:
    """Rows of one method that differ in their noise alone; at least two that released something."""
    groups = _alike(section.rows, NOISE)
    return tuple(tuple(members) for members in groups if sum(bool(row.runs[0].releases) for row in members) > 1)


def side_rows(section: Section, *, noise: bool = True) -> frozenset[str]:
    """Rows that belong to an ablation or a sweep (of the noise too, unless told) and not into an overall comparison."""
    return swept_rows(section, noise=noise) | {found.row.label for found in ablations(section)}


def swept_rows(section: Section, *, noise: bool = True) -> frozenset[str]:
    """Points of sweeps but for the row that they go out from."""
    swept = [sweep.labels() for sweep in sweeps(section)]
    swept += [{row.label for row in rows} for rows in noise_sweeps(section)] if noise else []
    by_label = {row.label: row for row in section.rows}
    aside: set[str] = set()
    for labels in swept:
        often = {label: sum(label in other for other in swept) for label in labels}
        hub = min(labels, key=lambda label: (-often[label], _distance(by_label[label]), label))
        aside |= labels - {hub}
    return frozenset(aside)


def without_sweeps(section: Section) -> Section:
    """What is drawn over the slices: a point of a sweep has its place in the sweep's own figure."""
    aside = swept_rows(section)
    return replace(section, rows=tuple(row for row in section.rows if row.label not in aside))


def without(run: Run, keys: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """A run's settings but for some, as a value to compare."""
    gone = set(keys)
    return tuple(sorted((key, repr(value)) for key, value in flat_settings(run).items() if key not in gone))


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _points(rows: Sequence[Row], setting: str) -> list[tuple[float, Row]]:
    values = [(row_settings(row).get(setting), row) for row in rows]
    kept = [(value, row) for value, row in values if is_number(value) and (value or setting not in CHOSEN_AT_0)]
    return [(float(value), row) for value, row in kept]  # type: ignore[arg-type]


def _differing(rows: Sequence[Row]) -> set[str]:
    """The settings with more than one number."""
    numbers: dict[str, set[float]] = {}
    for row in rows:
        for key, value in row_settings(row).items():
            if is_number(value):
                numbers.setdefault(key, set()).add(value)
    return {key for key, values in numbers.items() if len(values) > 1}


def _alike(rows: Sequence[Row], keys: Sequence[str]) -> list[list[Row]]:
    """Rows with the same settings but for some, where there are at least two."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault(without(row.runs[0], keys), []).append(row)
    return [members for members in groups.values() if len(members) > 1]


def _distance(row: Row) -> int:
    """How many of a row's settings are not the project's defaults."""
    return sum(_default(key) not in (None, value) for key, value in row_settings(row).items())


def _default(key: str) -> Any:
    value: Any = RunConfig()
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def common_runs(rows: Mapping[str, Row], seeds: Sequence[int]) -> dict[str, tuple[Run, ...]]:
    """The rows' runs of some seeds."""
    return {label: tuple(run for run in row.runs if run.seed in seeds) for label, row in rows.items()}
