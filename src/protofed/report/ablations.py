"""Table 2: what each part of ProtoFed-SP is worth, one factor at a time, paired over users."""

import math
from collections.abc import Sequence

import numpy as np

from protofed.evaluation.significance import Difference, bootstrap_difference, mean_and_std
from protofed.experiments.matrices import Measure
from protofed.methods.names import OURS
from protofed.report.intervals import per_user
from protofed.report.layout import Cell, Column, Line, Missing, Part, Table, interval, number
from protofed.report.runs import Run
from protofed.report.sections import Row, Section
from protofed.report.tables import continual, mean_over_slices
from protofed.report.variants import Ablation, ablations, common_runs
from protofed.seeds import seed_of

TITLE = "Ablations"
MEASURES: tuple[Measure, ...] = (
    ("sampled", "all", "ndcg@10"),
    ("sampled", "all", "hr@10"),
    ("full", "novel", "ndcg@10"),
)
HEADINGS = ("NDCG@10 sampled, all", "HR@10 sampled, all", "NDCG@10 full, novel")


def ablation_part(section: Section) -> Part | Missing:
    """Each row with one factor switched, and its distance to the full row on the seeds both have."""
    found = ablations(section)
    if not found:
        return Missing(TITLE, f"no two {OURS} rows differ in protofed.ablate (or another single factor) alone")
    columns = [
        Column("mean" if place % 2 == 0 else "minus full", HEADINGS[place // 2], ranked=False) for place in range(6)
    ]
    columns += [Column("mean", "AF", "lower is better", ranked=False), Column("minus full", "AF", ranked=False)]
    lines: list[Line] = []
    for full in dict.fromkeys(one.full.label for one in found):
        members = [one for one in found if one.full.label == full]
        lines.append(_full_line(members[0].full, section))
        for one in sorted(members, key=lambda one: one.row.label):
            gaps = [pair_with_full(one, measure, section.slug) for measure in MEASURES]
            lines.append(_line(one, gaps, section))
    name = f"{section.slug}-ablations"
    caption = "95 % paired bootstrap intervals over users, the same seeds for both rows; bold: the interval excludes 0"
    table = Table(f"{name}-table", caption, tuple(columns), tuple(lines))
    note = (
        "A negative difference says that the part left out was worth something. AF compares runs, not users, so it has "
        "no interval."
    )
    return Part(name, TITLE, note, (table,))


def pair_with_full(one: Ablation, measure: Measure, slug: str) -> Difference | None:
    """The row minus its full one over the same users; None where their queries are unknown or differ."""
    candidates, subset, metric = measure
    tables, users = per_user(common_runs({"row": one.row, "full": one.full}, one.seeds), candidates, subset)
    a, b = tables.get(("row", metric)), tables.get(("full", metric))
    if a is None or b is None or not len(users) or (a.counts != b.counts).any():
        return None
    rng = np.random.default_rng(seed_of(0, "report", slug, "ablation", *measure))
    return bootstrap_difference(a, b, rng)


def _full_line(full: Row, section: Section) -> Line:
    return Line(full.label, _beside(full, section, [Cell("")] * (1 + len(MEASURES))), marked=True)


def _line(one: Ablation, gaps: Sequence[Difference | None], section: Section) -> Line:
    common = common_runs({"row": one.row, "full": one.full}, one.seeds)
    forgotten, before = (np.mean(_forgotten(common[name], section)) for name in ("row", "full"))
    change = float(forgotten - before)
    found = [*map(_gap_cell, gaps), Cell(number(change, 4), value=change)]
    return Line(one.row.label, _beside(one.row, section, found))


def _beside(row: Row, section: Section, gaps: Sequence[Cell]) -> tuple[Cell, ...]:
    """The row's means of every measure and of AF, each with a cell beside it."""
    values = [[mean_over_slices(run, measure) for run in row.runs] for measure in MEASURES]
    means = map(_mean_cell, [*values, _forgotten(row.runs, section)])
    return tuple(cell for pair in zip(means, gaps, strict=True) for cell in pair)


def _forgotten(runs: Sequence[Run], section: Section) -> list[float]:
    return [continual(run, section.n_candidates)["AF"] for run in runs]


def _mean_cell(values: Sequence[float]) -> Cell:
    mean, std = mean_and_std(np.array(values))
    return Cell(number(mean), f"±{number(std)}" if math.isfinite(std) else "", value=mean)


def _gap_cell(gap: Difference | None) -> Cell:
    if gap is None:
        return Cell("–")
    apart = (gap.low > 0 or gap.high < 0) and round(gap.mean, 3) != 0
    return Cell(number(gap.mean), "", interval(gap.low, gap.high), gap.mean, best=apart)
