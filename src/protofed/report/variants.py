"""Rows that differ in one setting, and what that does: a part left out, a number changed, or more noise."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from protofed.evaluation.significance import Difference, bootstrap_difference
from protofed.experiments.matrices import Measure
from protofed.methods.catalogue import METHODS
from protofed.methods.names import FLAGSHIP, OURS
from protofed.report.intervals import pair
from protofed.report.layout import Cell, Column, Drawing, Estimate, Line, Missing, Part, Table, estimate_cell, number
from protofed.report.prices import UNPRICED, Price
from protofed.report.runs import MAIN, Run, flat, is_number
from protofed.report.sections import DEFAULTS, NOISE, TARGET, Row, Section, grouped, slug
from protofed.report.tables import MEASURES, Results, continual, mean_over_slices
from protofed.seeds import seed_of

NOISES = (TARGET, NOISE, "privacy.newcomer_noise")
FACTORS = {  # what Table 2 switches one at a time, and the value of the full method
    "protofed.ablate": "",
    "protofed.aggregator": "fedkmeans",
    "protofed.alignment": "euclidean",
    "protofed.group_sparsity": False,
}
CHOSEN_AT_0 = ("protofed.prototypes", "protofed.base_history")  # 0 lets the program choose: no place on an axis
COMPARED: dict[str, Measure] = {
    "NDCG@10 sampled, all": MAIN,
    "HR@10 sampled, all": MEASURES[1],
    "NDCG@10 full, novel": MEASURES[-1],
}
MODE = ("protofed.mode", "privacy.wrap", *NOISES)
Points = list[tuple[object, ...]]
Value = Callable[[Run], float]


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
    numbers = {(key, value) for row in section.rows for key, value in row_settings(row).items() if is_number(value)}
    counts = Counter(key for key, _ in numbers)
    found = []
    for setting in sorted(key for key, n in counts.items() if n > 1 and key not in NOISES):
        for members in _alike(section.rows, (setting,)):
            values = [(row_settings(row).get(setting), row) for row in members]
            known = [(float(value), row) for value, row in values if is_number(value)]
            points = sorted((p for p in known if p[0] or setting not in CHOSEN_AT_0), key=lambda point: point[0])
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


def compared(section: Section) -> list[Row]:
    """The rows of an overall comparison: ablations and sweeps have tables of their own."""
    aside = side_rows(section)
    return [row for row in section.rows if row.label not in aside]


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


def _alike(rows: Sequence[Row], keys: Sequence[str]) -> list[list[Row]]:
    """Rows with the same settings but for some, where there are at least two."""
    return [members for members in grouped(rows, lambda row: without(row, keys)).values() if len(members) > 1]


def _distance(row: Row) -> int:
    """How many of a row's settings are not the project's defaults."""
    return sum(DEFAULTS.get(key) not in (None, value) for key, value in row_settings(row).items())


def ablation_part(section: Section) -> Part | Missing:
    """Table 2: each row with one factor switched, and its distance to the full row on the seeds both have."""
    title, found = "Ablations", ablations(section)
    if not found:
        return Missing(title, f"no two {OURS} rows differ in protofed.ablate (or another single factor) alone")
    columns = [Column(label, heading, ranked=False) for heading in COMPARED for label in ("mean", "minus full")]
    columns += [Column("mean", "AF", "lower is better", ranked=False), Column("minus full", "AF", ranked=False)]
    lines = []
    for full, own in grouped(found, lambda one: one.full.label).items():
        lines.append(Line(full, _beside(own[0].full, [Cell("")] * (1 + len(COMPARED))), marked=True))
        lines += [_line(one, section) for one in sorted(own, key=lambda one: one.row.label)]
    name = f"{section.slug}-ablations"
    caption = "95 % paired bootstrap intervals over users, the same seeds for both rows; bold: the interval excludes 0"
    table = Table(f"{name}-table", caption, tuple(columns), tuple(lines))
    note = (
        "A negative difference says that the part left out was worth something. AF compares runs, not users, so it has "
        "no interval."
    )
    return Part(name, title, note, (table,))


def pair_with_full(one: Ablation, measure: Measure, slug: str) -> Difference | None:
    """The row minus its full one over the same users; None where their queries are unknown or differ."""
    found = pair(*common_runs(one.row, one.full), measure)
    rng = np.random.default_rng(seed_of(0, "report", slug, "ablation", *measure))
    return bootstrap_difference(found.ours, found.other, rng) if found else None


def _line(one: Ablation, section: Section) -> Line:
    gaps = [_gap_cell(pair_with_full(one, measure, section.slug)) for measure in COMPARED.values()]
    rows = [replace(one.row, runs=runs) for runs in common_runs(one.row, one.full)]
    forgotten, before = (row.over_seeds(continual, "AF").mean for row in rows)
    change = Cell(number(forgotten - before, 4), value=forgotten - before)
    return Line(one.row.label, _beside(one.row, [*gaps, change]))


def _beside(row: Row, gaps: Sequence[Cell]) -> tuple[Cell, ...]:
    """The row's means of every measure and of AF, each with a cell beside it."""
    found = [row.over_seeds(mean_over_slices, measure) for measure in COMPARED.values()]
    cells = []
    for e, gap in zip([*found, row.over_seeds(continual, "AF")], gaps, strict=True):
        cells += [Cell(number(e.mean), f"±{number(e.std)}" if math.isfinite(e.std) else "", value=e.mean), gap]
    return tuple(cells)


def _gap_cell(gap: Difference | None) -> Cell:
    if gap is None:
        return Cell()
    apart = (gap.low > 0 or gap.high < 0) and round(gap.mean, 3) != 0
    return replace(estimate_cell(Estimate(gap.mean, low=gap.low, high=gap.high)), best=apart)


def sensitivity(section: Section) -> Part | Missing:
    """One small figure for each setting; rows of other methods or other settings are lines of their own."""
    title, found = "Sensitivity", sweeps(section)
    if not found:
        return Missing(title, "no rows of one method differ in exactly one numeric setting")
    settings = dict.fromkeys(sweep.setting for sweep in found)
    drawings = tuple(_drawing(section, setting, [s for s in found if s.setting == setting]) for setting in settings)
    note = (
        "NDCG@10, all events, sampled candidates; means over seeds, bands one standard deviation to either side. All "
        "else is equal along a line."
    )
    return Part(f"{section.slug}-sensitivity", title, note, drawings=drawings)


def tradeoff(results: Results) -> Part | Missing:
    """Whether privacy hurts: NDCG@10 and AF against ε, a line per method; rows without noise lie across."""
    title, section, prices = "Privacy against utility", results.section, results.prices
    groups = noise_sweeps(section)
    if not groups:
        return Missing(title, "no two private rows of one method differ in their noise alone")
    spent = [prices[row.label] for rows in groups for row in rows if row.label in prices]
    priced = all(price.known for price in spent)
    x = "ε (PLD)" if priced else "noise multiplier"
    free = [row for rows in groups if (row := _without_noise(section, rows[0]))]
    measures: tuple[tuple[str, str, Value], ...] = (
        ("NDCG@10", "NDCG@10, all events, sampled candidates", mean_over_slices),
        ("AF", "AF, lower is better", partial(continual, name="AF")),
    )
    drawings = []
    for measure, caption, value in measures:
        points: Points = []
        for rows in groups:
            levels = [(_level(prices.get(row.label), priced=priced), row) for row in rows]
            placed = sorted((pair for pair in levels if math.isfinite(pair[0])), key=lambda p: (p[0], p[1].label))
            points += _points(rows[0].name, placed, value)
        points += [(row.label, math.inf if priced else 0.0, row.over_seeds(value).mean, math.nan) for row in free]
        name = f"{section.slug}-privacy-{measure[:2].lower()}"
        drawings.append(Drawing(name, caption, "lines", ("method", x, "mean", "std"), tuple(points), x, measure))
    return Part(f"{section.slug}-privacy", title, _note(spent, free, priced=priced), drawings=tuple(drawings))


def _drawing(section: Section, setting: str, found: Sequence[Sweep]) -> Drawing:
    seen: Counter[str] = Counter()
    rows: Points = []
    for sweep in found:
        name = sweep.points[0][1].name
        seen[name] += 1
        rows += _points(f"{name} ({seen[name]})" if seen[name] > 1 else name, sweep.points, mean_over_slices)
    header = ("method", "value", "mean", "std")
    name = f"{section.slug}-sensitivity-{slug(setting)}"
    return Drawing(name, setting, "lines", header, tuple(rows), setting, "NDCG@10")


def _points(name: str, rows: Sequence[tuple[float, Row]], value: Value) -> Points:
    """Name, place on the axis, mean and standard deviation of every row."""
    found = [(at, row.over_seeds(value)) for at, row in rows]
    return [(name, at, estimate.mean, estimate.std) for at, estimate in found]


def _level(price: Price | None, *, priced: bool) -> float:
    """Where a row stands on the axis; NaN where it released nothing, or without noise."""
    if price is None or not price.ledger[0].noise_multiplier:
        return math.nan
    return price.released if priced else price.ledger[0].noise_multiplier


def _without_noise(section: Section, private: Row) -> Row | None:
    """The same method and settings with nothing noised."""
    same = without(private, MODE)
    free = [row for row in section.rows if not row.runs[0].releases and without(row, MODE) == same]
    return free[0] if free else None


def _note(spent: Sequence[Price], free: Sequence[Row], *, priced: bool) -> str:
    terms = "; ".join(sorted({f"δ = {price.delta:g}, {price.trust} trust" for price in spent}))
    first = f"ε of each row's whole ledger against who sees what is released ({terms})."
    if not priced:
        first = f"{UNPRICED}: the axis is the noise multiplier of the first stream."
    second = f" Across, without noise: {', '.join(row.label for row in free)}." if free else ""
    return f"{first} Means over seeds, bands one standard deviation to either side.{second}"
