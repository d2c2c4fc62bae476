"""The page: everything computed and inlined into one HTML file, where a script draws it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from protofed.errors import MissingExtra, ProtoFedError
from protofed.evaluation.forgetting import af_over_time
from protofed.experiments.grid import Cell as GridCell
from protofed.experiments.records import Unfinished
from protofed.files import make_folder, write_text
from protofed.report import opening, provenance
from protofed.report.ablations import ablation_part
from protofed.report.beneficiaries import benefits
from protofed.report.cards import cards
from protofed.report.cautions import cautions
from protofed.report.charts import Curve, heat_maps, leading_rows, line_drawing, look_of
from protofed.report.costs import device_memory, efficiency
from protofed.report.coverage import Coverage, coverage, coverage_table
from protofed.report.disparity import OF_EVENTS, fairness
from protofed.report.embed import figure_values, table_values, to_json
from protofed.report.export import Write
from protofed.report.layout import Drawing, Missing, Part, Table
from protofed.report.overall import equal_bytes, equal_epsilon, headline_with_costs
from protofed.report.plasticity import adaptation, frontier_part
from protofed.report.prices import UNPRICED, privacy_table
from protofed.report.runs import Run, find_runs
from protofed.report.sections import Row, Section, group
from protofed.report.sensitivity import sensitivity, tradeoff
from protofed.report.tables import Results, compute, distances, main_matrix, mean_matrix, strata
from protofed.report.variants import without_sweeps

MAPS = (
    "Mean over seeds. Left of the framed diagonal a slice is still to come, right of it the slice is being remembered."
)
APART = "An interval that excludes zero says that the best row is ahead on these users, and nothing about other data."
SCRIPTS = ("vendor/d3.min.js", "vendor/plot.min.js", "page.js")


@dataclass(frozen=True, slots=True)
class Chapter:
    """All the page shows about one section."""

    results: Results
    sentences: tuple[str, ...]
    digest: Table
    forest: Drawing
    headline: Table
    lines: tuple[Drawing, ...]
    parts: tuple[Part, ...]  # what the runs answer, one question each
    missing: tuple[Missing, ...]  # what they cannot

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.digest, self.headline, *(table for part in self.parts for table in part.tables)

    @property
    def drawings(self) -> tuple[Drawing, ...]:
        return self.forest, *self.lines, *(drawing for part in self.parts for drawing in part.drawings)


def build(runs_folder: Path, wanted: Sequence[GridCell] = ()) -> tuple[str, dict[str, Any]]:
    """The page of all runs below a folder, and its numbers for machines; with `wanted`, what is missing of a grid."""
    runs, unfinished, results, warned = computed(runs_folder)
    chapters = [_chapter(found, cards(found.section, runs_folder)) for found in results]
    logs = {run.config["dataset"] for run in runs}
    wanted = [cell for cell in wanted if cell.config.dataset in logs]  # others have a report of their own
    of_grid = coverage(wanted, runs, unfinished) if wanted else None
    return render(chapters, warned, unfinished, of_grid), summary(results, warned, unfinished)


def tables(runs_folder: Path, to_text: Write) -> tuple[str, dict[str, Any]]:
    """The tables of all runs below a folder as text, and their numbers for machines."""
    _, unfinished, results, warned = computed(runs_folder)
    return to_text(results, warned), summary(results, warned, unfinished)


def computed(runs_folder: Path) -> tuple[Sequence[Run], Sequence[Unfinished], list[Results], tuple[str, ...]]:
    """The runs below a folder, those that are not over, the numbers of each section, and what to know of them."""
    runs, unfinished = find_runs(runs_folder)
    results = [compute(section) for section in group(runs)]
    return runs, unfinished, results, cautions(results, unfinished)


def write(page: str, out: Path) -> None:
    """The page at `out`, all of it or nothing."""
    check_target(out)
    write_text(out, page)


def check_target(out: Path, kind: str = "html") -> None:
    """Refuse a place where a page, or tables of another kind, cannot or should not go."""
    if kind == "html" and out.suffix.lower() not in (".html", ".htm"):
        raise ProtoFedError(f"the report is an HTML file: --out must end in .html, got {out}")
    if out.is_dir():
        raise ProtoFedError(f"--out {out} is a folder; give a file, e.g. {out / f'report.{kind}'}")
    if not out.parent.is_dir():
        raise ProtoFedError(f"--out {out}: there is no folder {out.parent}; create it first")
    make_folder(out.parent)


def summary(results: Sequence[Results], warned: Sequence[str], unfinished: Sequence[Unfinished]) -> dict[str, Any]:
    """What --json prints: every headline estimate, rounded to six decimals; unknown numbers are null."""
    return {
        "sections": [
            {
                "title": found.section.title,
                "dataset": found.section.dataset,
                "slices": found.section.n_slices,
                "rows": [_row_summary(found, row) for row in found.section.rows],
            }
            for found in results
        ],
        "warnings": list(warned),
        "unfinished": [run.folder for run in unfinished],
    }


def render(
    chapters: Sequence[Chapter], warned: Sequence[str], unfinished: Sequence[Unfinished], of_grid: Coverage | None
) -> str:
    """The HTML text."""
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as problem:
        raise MissingExtra("jinja2", "report") from problem
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters.update(inline=Markup)
    results = [chapter.results for chapter in chapters]
    sections = [found.section for found in results]
    rows = [row for section in sections for row in section.rows]
    runs = [run for row in rows for run in row.runs]
    prices = [(found.section.title, label, price) for found in results for label, price in found.prices.items()]
    tables = [opening.overview(results), provenance.settings_table(sections)]
    tables += [coverage_table(of_grid)] if of_grid else []
    tables += [table] if (table := privacy_table(prices)) else []
    return environment.from_string(_file("page.html")).render(
        chapters=chapters,
        across=opening.across(results) if len(results) > 1 else "",
        left_out=opening.count_left_out(results),
        private=bool(prices),
        unpriced=UNPRICED if not all(price.known for _, _, price in prices) else "",
        warnings=warned,
        unfinished=unfinished,
        n_runs=len(runs),
        methods={row.method for row in rows},
        rows={row.label for row in rows},
        seeds=sorted({run.seed for run in runs}),
        widths=sorted({width for run in runs if (width := run.settings.get("backbone.width"))}),
        lacking=[(cell.folder, state) for cell, state in of_grid.lacking] if of_grid else [],
        of_grid=of_grid,
        claim=provenance.claim_of(runs),
        environments=provenance.environments(runs),
        commands=provenance.commands(runs),
        usual=provenance.usual_settings(sections),
        style=_file("style.css"),
        data=to_json(embedded(chapters, tables)),
        scripts=[_file(name) for name in SCRIPTS],
    )


def embedded(chapters: Sequence[Chapter], tables: Sequence[Table]) -> dict[str, Any]:
    """The numbers of every table and figure, once, with what all figures share."""
    rows = [row for chapter in chapters for row in chapter.results.section.rows]
    looks = {label: look_of(row) for row in rows for label in (row.name, row.label)}
    return {
        "tables": {table.name: table_values(table) for table in [*tables, *(t for c in chapters for t in c.tables)]},
        "figures": {drawing.name: figure_values(drawing) for chapter in chapters for drawing in chapter.drawings},
        "looks": {label: [*look] for label, look in looks.items()},
        "first": {chapter.results.section.slug: leading_rows(chapter.results) for chapter in chapters},
        "always": [OF_EVENTS],
    }


def _file(name: str) -> str:
    return files("protofed.report").joinpath(name).read_text(encoding="utf-8")


def _chapter(results: Results, of_models: tuple[Part | Missing, ...]) -> Chapter:
    section = results.section
    found = (*answers(results), *of_models)
    return Chapter(
        results=results,
        sentences=opening.sentences(results),
        digest=opening.digest(results),
        forest=opening.forest(results),
        headline=headline_with_costs(results),
        lines=_over_slices(without_sweeps(section)),
        parts=(*(part for part in found if isinstance(part, Part)), *_details(results)),
        missing=tuple(part for part in found if isinstance(part, Missing)),
    )


def answers(results: Results) -> tuple[Part | Missing, ...]:
    """Every question of the paper, in its order, answered or not."""
    section = results.section
    return (
        equal_epsilon(results),
        equal_bytes(results),
        ablation_part(section),
        sensitivity(section),
        adaptation(section),
        frontier_part(results),
        tradeoff(results),
        *benefits(results),
        *fairness(without_sweeps(section)),
        efficiency(section),
        device_memory(section),
    )


def _over_slices(section: Section) -> tuple[Drawing, Drawing]:
    """Accuracy right after each slice, and what was forgotten so far."""
    matrices = {row.label: [main_matrix(run) for run in row.runs] for row in section.rows}
    accuracy = [Curve(label, np.array([np.diagonal(a)[1:] for a in own])) for label, own in matrices.items()]
    forgotten = [Curve(label, np.array([af_over_time(a)[1:] for a in own])) for label, own in matrices.items()]
    return (
        line_drawing(f"{section.slug}-accuracy", "NDCG@10 right after each slice, A[t, t]", "A[t, t]", accuracy),
        line_drawing(f"{section.slug}-forgetting", "Average forgetting so far, AF(t)", "AF(t)", forgotten),
    )


def _details(results: Results) -> tuple[Part, ...]:
    """What answers no question of the paper by itself: every slice after every slice, kinds of events, distances."""
    section, apart = results.section, distances(results)
    matrices = {row.label: mean_matrix(row) for row in without_sweeps(section).rows}
    maps = heat_maps(f"{section.slug}-heat", "NDCG@10 of slice s with the model after slice t", matrices)
    kinds = (strata(section, "sampled"), strata(section, "full"))
    parts = [Part(f"{section.slug}-every-slice", "Every slice after every slice", MAPS, drawings=(maps,))]
    parts.append(Part(f"{section.slug}-kinds", "By kind of event", "", kinds))
    if apart:
        parts.append(Part(f"{section.slug}-distances", "Distance to the best row", APART, (apart,)))
    return tuple(parts)


def _row_summary(results: Results, row: Row) -> dict[str, Any]:
    estimates = results.estimates[row.label]
    return {
        "label": row.label,
        "method": row.method,
        "trivial": row.is_trivial,
        "seeds": list(row.seeds),
        **{
            key: {"mean": _null(found.mean), "std": _null(found.std), "ci95": [_null(found.low), _null(found.high)]}
            for key, found in estimates.items()
        },
    }


def _null(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
