"""How much a number matters: accuracy along every setting that rows of one method differ in alone."""

from collections.abc import Sequence

import numpy as np

from protofed.evaluation.significance import mean_and_std
from protofed.report.layout import Drawing, Missing, Part, to_csv
from protofed.report.plots import Band, band_plot
from protofed.report.sections import Section, method_name, slug
from protofed.report.svg import Stroke, stroke, swatch
from protofed.report.tables import MAIN, mean_over_slices
from protofed.report.variants import Sweep, sweeps

TITLE = "Sensitivity"


def sensitivity(section: Section) -> Part | Missing:
    """One small figure for each setting; rows of other methods or other settings are lines of their own."""
    found = sweeps(section)
    if not found:
        return Missing(TITLE, "no rows of one method differ in exactly one numeric setting")
    settings = list(dict.fromkeys(sweep.setting for sweep in found))
    names = list(dict.fromkeys(_family(sweep) for sweep in found))
    looks = {name: stroke(place) for place, name in enumerate(names)}
    drawings = tuple(
        _drawing(section, setting, [s for s in found if s.setting == setting], looks) for setting in settings
    )
    note = (
        "NDCG@10, all events, sampled candidates; means over seeds, bands one standard deviation to either side. All "
        "else is equal along a line."
    )
    legend = tuple((swatch(look), name) for name, look in looks.items())
    return Part(f"{section.slug}-sensitivity", TITLE, note, drawings=drawings, legend=legend, small=True)


def _drawing(section: Section, setting: str, found: Sequence[Sweep], looks: dict[str, Stroke]) -> Drawing:
    name = f"{section.slug}-sensitivity-{slug(setting)}"
    bands, tidy = [], []
    for sweep in found:
        by_row = [[mean_over_slices(run, MAIN) for run in row.runs] for _, row in sweep.points]
        spread = [mean_and_std(np.array(values)) for values in by_row]
        x = tuple(value for value, _ in sweep.points)
        means, stds = tuple(m for m, _ in spread), tuple(s for _, s in spread)
        bands.append(Band(_family(sweep), looks[_family(sweep)], x, means, stds))
        tidy += [(row.label, setting, value, *pair) for (value, row), pair in zip(sweep.points, spread, strict=True)]
    about = f"NDCG@10 along {setting}"
    svg = band_plot(bands, (), x=setting, y="NDCG@10", name=name, about=about)
    return Drawing(name, setting, svg, to_csv(["method", "setting", "value", "mean", "std"], tidy))


def _family(sweep: Sweep) -> str:
    return method_name(sweep.points[0][1].runs[0].config)
