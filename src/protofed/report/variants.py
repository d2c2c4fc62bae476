"""Rows of one method that differ in a single setting: ablations, sweeps of a number, sweeps of the noise."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from protofed.methods.catalogue import METHODS
from protofed.methods.names import FLAGSHIP
from protofed.report.runs import Run, flat, is_number
from protofed.report.sections import DEFAULTS, NOISE, TARGET, Row, Section

NOISES = (TARGET, NOISE, "privacy.newcomer_noise")
FACTORS = {  # what Table 2 switches one at a time, and the value of the full method
    "protofed.ablate": "",
    "protofed.aggregator": "fedkmeans",
    "protofed.alignment": "euclidean",
    "protofed.group_sparsity": False,
}
CHOSEN_AT_0 = ("protofed.prototypes", "protofed.base_history")  # 0 lets the program choose: no place on an axis


@dataclass(frozen=True, slots=True)
class Ablation:
    """A row and the full one that it differs from in one factor; they share a seed."""

    full: Row
    row: Row
    setting: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """Rows that differ in one number alone, by that number."""

    setting: str
    points: tuple[tuple[float, Row], ...]
    labels: frozenset[str]  # of these and of the rows that leave the number to the program


def flagship(section: Section) -> Row | None:
    """Our row the page is about: nothing left out, ProtoFed before ProtoFed-SP, the private mode before others."""
    ours = [row for row in section.rows if row.is_ours and not row.settings.get("protofed.ablate")]
    swept = side_rows(section)

    def order(row: Row) -> tuple[bool, bool, bool, int, str]:
        return (row.label in swept, row.method != FLAGSHIP, row.share != "private", -len(row.runs), row.label)

    return min(ours, key=order, default=None)


def row_settings(row: Row) -> dict[str, Any]:
    """What decides a row's numbers; a hyper-parameter that it leaves alone has its method's value."""
    return hyper_defaults(row.method) | row.settings


@cache
def hyper_defaults(method: str) -> dict[str, Any]:
    """A method's own hyper-parameters by dotted names; none of a method that this version does not know."""
    own: Any = METHODS[method].method if method in METHODS else None
    return flat({"hyper": asdict(own)}) if own is not None else {}


def ablations(section: Section) -> tuple[Ablation, ...]:
    """Every ProtoFed-SP row that switches one factor off, with its full row; rows that share no seed are left out."""
    ours = [row for row in section.rows if row.is_ours]
    found = []
    for setting, default in FACTORS.items():
        for members in _alike(ours, (setting,)):
            full = [row for row in members if row.settings.get(setting, default) == default][:1]
            pairs = [(one, row) for one in full for row in members if row is not one and {*row.seeds} & {*one.seeds}]
            found += [Ablation(one, row, setting) for one, row in pairs]
    return tuple(found)


def sweeps(section: Section) -> tuple[Sweep, ...]:
    """Every number that at least two rows of one method differ in while all else is equal; noise is another matter."""
    found = []
    for setting in sorted(_differing(section.rows) - set(NOISES)):
        for members in _alike(section.rows, (setting,)):
            points = sorted(_points(members, setting), key=lambda point: point[0])
            if len({value for value, _ in points}) > 1:
                found.append(Sweep(setting, tuple(points), frozenset(row.label for row in members)))
    return tuple(found)


def noise_sweeps(section: Section) -> tuple[tuple[Row, ...], ...]:
    """Rows of one method that differ in their noise alone; at least two that released something."""
    groups = _alike(section.rows, NOISES)
    return tuple(tuple(members) for members in groups if sum(bool(row.runs[0].releases) for row in members) > 1)


def side_rows(section: Section, *, noise: bool = True) -> frozenset[str]:
    """Rows that belong to an ablation or a sweep (of the noise too, unless told) and not into an overall comparison."""
    return swept_rows(section, noise=noise) | {found.row.label for found in ablations(section)}


def swept_rows(section: Section, *, noise: bool = True) -> frozenset[str]:
    """Points of sweeps but for the row that they go out from."""
    swept = [sweep.labels for sweep in sweeps(section)]
    swept += [frozenset(row.label for row in rows) for rows in noise_sweeps(section)] if noise else []
    changed = {row.label: _distance(row) for row in section.rows}
    aside: set[str] = set()
    for labels in swept:
        often = {label: sum(label in other for other in swept) for label in labels}
        aside |= labels - {min(labels, key=lambda label: (-often[label], changed[label], label))}
    return frozenset(aside)


def without_sweeps(section: Section) -> Section:
    """What is drawn over the slices: a point of a sweep has its place in the sweep's own figure."""
    aside = swept_rows(section)
    return replace(section, rows=tuple(row for row in section.rows if row.label not in aside))


def without(row: Row, keys: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """A row's settings but for some, as a value to compare."""
    gone = set(keys)
    return tuple(sorted((key, repr(value)) for key, value in row.settings.items() if key not in gone))


def common_runs(a: Row, b: Row) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """The runs of two rows with the seeds that both have."""
    first, second = (tuple(run for run in row.runs if run.seed in a.seeds and run.seed in b.seeds) for row in (a, b))
    return first, second


def _points(rows: Sequence[Row], setting: str) -> list[tuple[float, Row]]:
    values = [(row_settings(row).get(setting), row) for row in rows]
    kept = [(value, row) for value, row in values if is_number(value) and (value or setting not in CHOSEN_AT_0)]
    return [(float(value), row) for value, row in kept]  # type: ignore[arg-type]


def _differing(rows: Sequence[Row]) -> set[str]:
    """The settings with more than one number."""
    numbers = {(key, value) for row in rows for key, value in row_settings(row).items() if is_number(value)}
    counts = Counter(key for key, _ in numbers)
    return {key for key, n in counts.items() if n > 1}


def _alike(rows: Sequence[Row], keys: Sequence[str]) -> list[list[Row]]:
    """Rows with the same settings but for some, where there are at least two."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault(without(row, keys), []).append(row)
    return [members for members in groups.values() if len(members) > 1]


def _distance(row: Row) -> int:
    """How many of a row's settings are not the project's defaults."""
    return sum(DEFAULTS.get(key) not in (None, value) for key, value in row_settings(row).items())
