"""Table 2: what each part of ProtoFed-SP is worth, one factor at a time, paired over users."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from protofed.evaluation.significance import Difference, bootstrap_difference
from protofed.experiments.matrices import Measure
from protofed.methods.names import OURS
from protofed.report.intervals import pair
from protofed.report.layout import MISSING, Cell, Column, Estimate, Line, Missing, Part, Table, estimate_cell, number
from protofed.report.runs import MAIN
from protofed.report.sections import Row, Section
from protofed.report.tables import MEASURES, continual, mean_over_slices
from protofed.report.variants import Ablation, ablations, common_runs
from protofed.seeds import seed_of

COMPARED: dict[str, Measure] = {
    "NDCG@10 sampled, all": MAIN,
    "HR@10 sampled, all": MEASURES[1],
    "NDCG@10 full, novel": MEASURES[-1],
}


def ablation_part(section: Section) -> Part | Missing:
    """Each row with one factor switched, and its distance to the full row on the seeds both have."""
    title, found = "Ablations", ablations(section)
    if not found:
        return Missing(title, f"no two {OURS} rows differ in protofed.ablate (or another single factor) alone")
    columns = [Column(label, heading, ranked=False) for heading in COMPARED for label in ("mean", "minus full")]
    columns += [Column("mean", "AF", "lower is better", ranked=False), Column("minus full", "AF", ranked=False)]
    lines: list[Line] = []
    for full in {one.full.label: one.full for one in found}.values():
        blank = [Cell("")] * (1 + len(COMPARED))
        lines.append(Line(full.label, _beside(full, blank), marked=True))
        members = [one for one in found if one.full is full]
        lines += [_line(one, section) for one in sorted(members, key=lambda one: one.row.label)]
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
    means = [*(row.over_seeds(mean_over_slices, measure) for measure in COMPARED.values())]
    means.append(row.over_seeds(continual, "AF"))
    return tuple(cell for pair in zip(map(_mean_cell, means), gaps, strict=True) for cell in pair)


def _mean_cell(found: Estimate) -> Cell:
    spread = f"±{number(found.std)}" if math.isfinite(found.std) else ""
    return Cell(number(found.mean), spread, value=found.mean)


def _gap_cell(gap: Difference | None) -> Cell:
    if gap is None:
        return Cell(MISSING)
    apart = (gap.low > 0 or gap.high < 0) and round(gap.mean, 3) != 0
    return replace(estimate_cell(Estimate(gap.mean, low=gap.low, high=gap.high)), best=apart)
