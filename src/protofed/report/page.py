"""The page: everything computed and inlined into one HTML file, where a script draws it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from protofed.errors import MissingExtra, ProtoFedError
from protofed.experiments.grid import Cell as GridCell
from protofed.experiments.records import Unfinished
from protofed.files import make_folder, write_text
from protofed.methods.catalogue import METHODS
from protofed.methods.names import FLAGSHIP, OURS
from protofed.report import coverage, opening
from protofed.report.beneficiaries import benefits
from protofed.report.cards import cards
from protofed.report.cautions import cautions
from protofed.report.costs import device_memory, efficiency, equal_bytes, equal_epsilon, headline_with_costs
from protofed.report.export import Write
from protofed.report.layout import Drawing, Missing, Part, Table, figure_values, table_values, to_json
from protofed.report.prices import UNPRICED, privacy_table
from protofed.report.runs import Run, find_runs
from protofed.report.sections import Row, group
from protofed.report.slices import OF_EVENTS, adaptation, exposure, frontier_part, heat_maps, over_slices, user_gap
from protofed.report.tables import Results, compute, distances, mean_matrix, strata
from protofed.report.variants import ablation_part, compared, sensitivity, tradeoff, without_sweeps

MAPS = (
    "Mean over seeds. Left of the framed diagonal a slice is still to come, right of it the slice is being remembered."
)
APART = "An interval that excludes zero says that the best row is ahead on these users, and nothing about other data."
SCRIPTS = ("vendor/d3.min.js", "vendor/plot.min.js", "page.js")
MOST_DRAWN = 8  # rows in a figure
DASHED, DOTTED = "6 3", "2 2"
STEP = 0.387  # of a circle: neighbours in the catalogue, and the methods that often lead, get hues far apart
FIRST_HUE, HUES = 55.0, 290.0  # the others keep clear of ours
OUR_COLOURS = {OURS: "var(--ours)", FLAGSHIP: "hsl(0 75% var(--tone))"}


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
    of_grid = coverage.coverage(wanted, runs, unfinished) if wanted else None
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
    sections = []
    for found in results:
        about = {"title": found.section.title, "dataset": found.section.dataset, "slices": found.section.n_slices}
        sections.append(about | {"rows": [_row_summary(found, row) for row in found.section.rows]})
    return {"sections": sections, "warnings": list(warned), "unfinished": [run.folder for run in unfinished]}


def render(
    chapters: Sequence[Chapter],
    warned: Sequence[str],
    unfinished: Sequence[Unfinished],
    of_grid: coverage.Coverage | None,
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
    tables = [opening.overview(results), coverage.settings_table(sections)]
    tables += [coverage.coverage_table(of_grid)] if of_grid else []
    tables += [table] if (table := privacy_table(prices)) else []
    return environment.from_string(_file("page.html")).render(
        chapters=chapters,
        across=opening.across(results) if len(results) > 1 else "",
        left_out=sum(len(found.section.rows) - len(compared(found.section)) for found in results),
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
        claim=coverage.claim_of(runs),
        environments=coverage.environments(runs),
        commands=coverage.commands(runs),
        usual=coverage.usual_settings(sections),
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
        "looks": looks,
        "first": {chapter.results.section.slug: leading_rows(chapter.results) for chapter in chapters},
        "always": [OF_EVENTS],
    }


def colour_of(method: str) -> str:
    """The colour of a method in every figure: ours orange or red, trivial ones grey, a hue of its own for any other."""
    if method in OUR_COLOURS:
        return OUR_COLOURS[method]
    names = [name for name, entry in METHODS.items() if name != OURS]
    place = names.index(method) if method in names else len(names)
    if method in names and METHODS[method].trivial:
        return f"hsl(220 7% calc(var(--tone) + {8 * (place % 4)}%))"
    return f"hsl({FIRST_HUE + HUES * (STEP * place % 1):.0f} 65% calc(var(--tone) + {(0, 9, -7)[place % 3]}%))"


def look_of(row: Row) -> tuple[str, str]:
    """A row's colour, its method's, and its dashes: with noise, or where small modules learn and all else is frozen."""
    small = row.settings.get("variant") == "peft"
    return colour_of(row.method), DASHED if row.is_noised else DOTTED if small else ""


def leading_rows(found: Results) -> tuple[str, ...]:
    """What a figure shows first: our rows, the best trivial and the best private rival, then the best of all others."""
    rows = found.ranked(compared(found.section))
    ours = [row for row in rows if row.is_ours][:3]
    trivial = [row for row in rows if row.is_trivial and row.label not in found.prices][:2]
    private = [row for row in rows if row.label in found.prices and not row.is_ours][:1]
    first = [*ours, *trivial, *private]
    chosen = [*first, *(row for row in rows if row not in first)][:MOST_DRAWN]
    return tuple(row.label for row in rows if row in chosen)


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
        lines=over_slices(without_sweeps(section)),
        parts=(*(part for part in found if isinstance(part, Part)), *_details(results)),
        missing=tuple(part for part in found if isinstance(part, Missing)),
    )


def answers(results: Results) -> tuple[Part | Missing, ...]:
    """Every question of the paper, in its order, answered or not."""
    section, drawn = results.section, without_sweeps(results.section)
    return (
        equal_epsilon(results),
        equal_bytes(results),
        ablation_part(section),
        sensitivity(section),
        adaptation(section),
        frontier_part(results),
        tradeoff(results),
        *benefits(results),
        user_gap(drawn),
        exposure(drawn),
        efficiency(section),
        device_memory(section),
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
    told = {"label": row.label, "method": row.method, "trivial": row.is_trivial, "seeds": list(row.seeds)}
    for key, e in results.estimates[row.label].items():
        mean, std, *ci95 = (round(x, 6) if math.isfinite(x) else None for x in (e.mean, e.std, e.low, e.high))
        told |= {key: {"mean": mean, "std": std, "ci95": ci95}}
    return told
