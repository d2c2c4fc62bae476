"""How much a number matters: accuracy along every setting that rows of one method differ in alone."""

from collections.abc import Sequence

import numpy as np

from protofed.evaluation.significance import mean_and_std
from protofed.methods.labels import label_of
from protofed.report.layout import Drawing, Missing, Part
from protofed.report.sections import Section, slug
from protofed.report.tables import MAIN, mean_over_slices
from protofed.report.variants import Sweep, sweeps

TITLE = "Sensitivity"


def sensitivity(section: Section) -> Part | Missing:
    """One small figure for each setting; rows of other methods or other settings are lines of their own."""
    found = sweeps(section)
    if not found:
        return Missing(TITLE, "no rows of one method differ in exactly one numeric setting")
    settings = list(dict.fromkeys(sweep.setting for sweep in found))
    drawings = tuple(_drawing(section, setting, [s for s in found if s.setting == setting]) for setting in settings)
    note = (
        "NDCG@10, all events, sampled candidates; means over seeds, bands one standard deviation to either side. All "
        "else is equal along a line."
    )
    return Part(f"{section.slug}-sensitivity", TITLE, note, drawings=drawings)


def _drawing(section: Section, setting: str, found: Sequence[Sweep]) -> Drawing:
    names = [label_of(sweep.points[0][1].runs[0].config) for sweep in found]
    rows = [
        (line, value, *mean_and_std(np.array([mean_over_slices(run, MAIN) for run in row.runs])))
        for line, sweep in zip(apart(names), found, strict=True)
        for value, row in sweep.points
    ]
    header, name = ("method", "value", "mean", "std"), f"{section.slug}-sensitivity-{slug(setting)}"
    return Drawing(name, setting, "lines", header, tuple(rows), setting, "NDCG@10")


def apart(names: Sequence[str]) -> list[str]:
    """Names that are told apart: `a`, `b`, `a (2)`."""
    seen = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name} ({before + 1})" if before else name for name, before in zip(names, seen, strict=True)]
