"""The page: everything computed, drawn and inlined into one HTML file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from protofed.errors import MissingExtra, ProtoFedError
from protofed.evaluation.forgetting import af_over_time
from protofed.experiments.grid import Cell as GridCell
from protofed.files import make_folder, write_text
from protofed.report import opening, provenance
from protofed.report.ablations import ablation_part
from protofed.report.beneficiaries import benefits
from protofed.report.cautions import cautions
from protofed.report.costs import device_memory, efficiency, equal_bytes
from protofed.report.coverage import Coverage, coverage, coverage_table
from protofed.report.disparity import fairness
from protofed.report.figures import Curve, heat_map, line_plot
from protofed.report.held import Held, held_table, list_cells
from protofed.report.layout import Drawing, Missing, Part, Table, data_uri, number, sort_value, to_csv
from protofed.report.overall import equal_epsilon, headline_with_costs
from protofed.report.plasticity import adaptation, frontier_part
from protofed.report.prices import UNPRICED, privacy_table
from protofed.report.runs import Unfinished, find_runs
from protofed.report.sections import Row, Section, group
from protofed.report.sensitivity import sensitivity
from protofed.report.svg import Stroke, stroke, swatch
from protofed.report.tables import (
    MAIN,
    Results,
    compute,
    distances,
    key_of,
    main_matrix,
    mean_matrix,
    strata,
    wall_clock,
)
from protofed.report.tradeoff import tradeoff
from protofed.report.variants import without_sweeps
from protofed.report.verdicts import verdicts


@dataclass(frozen=True, slots=True)
class Filled:
    """Which cells have runs, and where the cells of a grid stand if one was given."""

    held: tuple[Held, ...]
    of_grid: Coverage | None = None


@dataclass(frozen=True, slots=True)
class Chapter:
    """All the page shows about one section."""

    results: Results
    findings: tuple[str, ...]
    headline: Table
    parts: tuple[Part, ...]  # what the runs answer, one question each
    missing: tuple[Missing, ...]  # what they cannot
    distances: Table | None
    strata: tuple[Table, ...]
    time: Table | None
    legend: tuple[tuple[str, str], ...]  # swatch, label
    lines: tuple[Drawing, ...]
    heat_maps: tuple[Drawing, ...]
    limits: tuple[float, float]  # of the heat maps' colours


def build(runs_folder: Path, wanted: Sequence[GridCell] = ()) -> tuple[str, dict[str, Any]]:
    """The page of all runs below a folder, and its numbers for machines; with `wanted`, what is missing of a grid."""
    runs, unfinished = find_runs(runs_folder)
    results = [compute(section) for section in group(runs)]
    warned = cautions(results, unfinished)
    chapters = [_chapter(found) for found in results]
    filled = Filled(list_cells(runs, unfinished), coverage(wanted, runs, unfinished) if wanted else None)
    return render(chapters, warned, unfinished, filled), summary(results, warned, unfinished)


def write(page: str, out: Path) -> None:
    """The page at `out`, all of it or nothing."""
    check_target(out)
    write_text(out, page)


def check_target(out: Path) -> None:
    """Refuse a place where a page cannot or should not go."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise ProtoFedError(f"the report is an HTML file: --out must end in .html, got {out}")
    if out.is_dir():
        raise ProtoFedError(f"--out {out} is a folder; give a file, e.g. {out / 'report.html'}")
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


def render(chapters: Sequence[Chapter], warned: Sequence[str], unfinished: Sequence[Unfinished], filled: Filled) -> str:
    """The HTML text."""
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as problem:
        raise MissingExtra("jinja2", "report") from problem
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters.update(data_uri=data_uri, inline=Markup, number=number, sort_value=sort_value)
    results = [chapter.results for chapter in chapters]
    sections = [found.section for found in results]
    prices = [(found.section.title, label, price) for found in results for label, price in found.prices.items()]
    return environment.from_string(_file("page.html")).render(
        chapters=chapters,
        sentences=opening.sentences(results[0]) if len(results) == 1 else (),
        verdicts=verdicts(results) if len(results) > 1 else None,
        overview=opening.overview(results),
        forests=[opening.forest(found) for found in results],
        left_out=opening.count_left_out(results),
        prices=privacy_table(prices),
        unpriced=UNPRICED if not all(price.known for _, _, price in prices) else "",
        warnings=warned,
        unfinished=unfinished,
        n_runs=sum(len(row.runs) for section in sections for row in section.rows),
        methods=sorted({row.method for section in sections for row in section.rows}),
        rows=sorted({row.label for section in sections for row in section.rows}),
        seeds=sorted({seed for section in sections for row in section.rows for seed in row.seeds}),
        widths=provenance.widths(sections),
        coverage=held_table(filled.held),
        of_grid=coverage_table(filled.of_grid) if filled.of_grid else None,
        lacking=[(cell.folder, state) for cell, state in filled.of_grid.lacking] if filled.of_grid else [],
        releases=provenance.releases(sections),
        claim=provenance.claim_of(run for section in sections for row in section.rows for run in row.runs),
        environments=provenance.environments(sections),
        commands=provenance.commands(sections),
        settings=provenance.settings(sections),
        style=_file("style.css"),
        script=_file("sort.js"),
    )


def _file(name: str) -> str:
    return files("protofed.report").joinpath(name).read_text(encoding="utf-8")


def _chapter(results: Results) -> Chapter:
    section, drawn = results.section, without_sweeps(results.section)
    limits = _limits([mean_matrix(row) for row in drawn.rows])
    looks = {row.label: stroke(place) for place, row in enumerate(section.rows)}
    shown = {row.label: looks[row.label] for row in drawn.rows}
    found = answers(results, looks)
    return Chapter(
        results=results,
        findings=_findings(results),
        headline=headline_with_costs(results),
        parts=tuple(part for part in found if isinstance(part, Part)),
        missing=tuple(part for part in found if isinstance(part, Missing)),
        distances=distances(results),
        strata=(strata(section, "sampled"), strata(section, "full")),
        time=wall_clock(section),
        legend=tuple((swatch(look), label) for label, look in shown.items()),
        lines=(_accuracy_drawing(drawn, looks), _forgetting_drawing(drawn, looks)),
        heat_maps=tuple(_heat_drawing(section.slug, place, row, limits) for place, row in enumerate(drawn.rows)),
        limits=limits,
    )


def answers(results: Results, looks: Mapping[str, Stroke]) -> tuple[Part | Missing, ...]:
    """Every question of the paper, in its order, answered or not."""
    section = results.section
    return (
        equal_epsilon(results),
        equal_bytes(results),
        ablation_part(section),
        sensitivity(section),
        adaptation(section, looks),
        frontier_part(results, looks),
        tradeoff(results),
        *benefits(results),
        *fairness(without_sweeps(section), looks),
        efficiency(section),
        device_memory(section),
    )


def _findings(results: Results) -> tuple[str, ...]:
    """One sentence for the paper's protocol and one for the hardest reading."""
    sentences = []
    for key, words in (
        (key_of(MAIN), "All events, sampled candidates"),
        ("ndcg@10/full/novel", "Novel events, full ranking"),
    ):
        best, value = results.best(key)
        trivial, bar = results.best(key, trivial=True)
        if best:
            rest = f"; the best trivial row, {trivial}, has {number(bar)}" if trivial and trivial != best else ""
            note = ", a trivial row" if best == trivial else ""
            sentences.append(f"{words}: {best}{note} leads with NDCG@10 {number(value)}{rest}.")
    return tuple(sentences)


def _accuracy_drawing(section: Section, looks: Mapping[str, Stroke]) -> Drawing:
    curves = _curves(section, looks, lambda run: np.diagonal(main_matrix(run))[1:])
    return _line_drawing(f"{section.slug}-accuracy", "NDCG@10 right after each slice, A[t, t]", "A[t, t]", curves)


def _forgetting_drawing(section: Section, looks: Mapping[str, Stroke]) -> Drawing:
    curves = _curves(section, looks, lambda run: af_over_time(main_matrix(run))[1:])
    return _line_drawing(f"{section.slug}-forgetting", "Average forgetting so far, AF(t)", "AF(t)", curves)


def _curves(section: Section, looks: Mapping[str, Stroke], values: Any) -> list[Curve]:
    return [Curve(row.label, looks[row.label], np.array([values(run) for run in row.runs])) for row in section.rows]


def _line_drawing(name: str, caption: str, axis: str, curves: Sequence[Curve]) -> Drawing:
    svg = line_plot(curves, first_slice=1, title=axis, name=name)
    tidy = [
        (curve.label, seed, t + 1, float(value))
        for curve in curves
        for (seed, t), value in np.ndenumerate(curve.values)
    ]
    return Drawing(name, caption, svg, to_csv(["method", "run", "slice", axis], tidy))


def _heat_drawing(slug: str, place: int, row: Row, limits: tuple[float, float]) -> Drawing:
    matrix = mean_matrix(row)
    svg = heat_map(matrix, limits=limits, label=row.label)
    tidy = [(s, t, float(value)) for (s, t), value in np.ndenumerate(matrix)]
    return Drawing(f"{slug}-heat-{place}", row.label, svg, to_csv(["slice_tested", "slice_trained", "ndcg@10"], tidy))


def _limits(matrices: Sequence[np.ndarray]) -> tuple[float, float]:
    known = np.concatenate([matrix[np.isfinite(matrix)] for matrix in matrices])
    return (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)


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
