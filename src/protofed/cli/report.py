"""`protofed report`: finished runs as one HTML page, or as Markdown, LaTeX or CSV; or what a grid still lacks."""

import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protofed.errors import ConfigError, check_installed

if TYPE_CHECKING:
    from protofed.experiments.grid import Cell
    from protofed.report.coverage import Coverage

NAMES = {"html": "report.html", "md": "report.md", "latex": "report.tex", "csv": "report.csv"}


def report(
    runs: Annotated[Path, typer.Argument(help="A run's folder, a folder with runs at any depth, or a pack.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file to write (default: report.html).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON too.")] = False,
    kind: Annotated[
        str | None, typer.Option("--format", help="html, md, csv or latex (default: by the file's name).")
    ] = None,
    check: Annotated[
        list[Path] | None, typer.Option(help="Only list which runs of this experiment file are missing; repeatable.")
    ] = None,
    tuned: Annotated[
        list[Path] | None, typer.Option(help="With --check or --grid: the bench's --tuned; repeatable.")
    ] = None,
    grid: Annotated[
        list[Path] | None, typer.Option(help="Show in the page which runs of this experiment file are missing.")
    ] = None,
) -> None:
    """Write tables and figures of finished runs into one self-contained file."""
    logging.getLogger("protofed.evaluation.forgetting").addFilter(partial(once, said=set()))
    if check:
        if out is not None or kind is not None or grid:
            raise ConfigError("--check writes no file; leave --out, --format and --grid out")
        check_grids(runs, check, tuned or (), as_json)
        return
    if tuned and not grid:
        raise ConfigError("--tuned goes with --check or --grid: finished runs hold their own settings")
    kind = chosen_format(out, kind)
    if kind == "html":
        check_installed(extra="report")
    elif grid:
        raise ConfigError(f"--grid goes with the HTML page, got --format {kind}; --check lists what is missing")
    out = out or Path(NAMES[kind])
    numbers = write_report(runs, out, kind, grid or (), tuned or ())
    if as_json:
        typer.echo(json.dumps(numbers | {"report": str(out)}, indent=2, ensure_ascii=False))
        return
    n_runs, n_warnings = sum(len(r["seeds"]) for s in numbers["sections"] for r in s["rows"]), len(numbers["warnings"])
    warned = f", {n_warnings} warning{'s' if n_warnings > 1 else ''}" if n_warnings else ""
    typer.echo(f"{out}: {n_runs} run{'' if n_runs == 1 else 's'}{warned}")


def once(record: logging.LogRecord, said: set[str]) -> bool:
    """Whether a message is new: many figures stumble over the same slices."""
    before = len(said)
    said.add(record.getMessage())
    return len(said) > before


def chosen_format(out: Path | None, kind: str | None) -> str:
    """The format that was asked for, else the one the file's name ends in."""
    from protofed.report.export import SUFFIXES

    if kind is not None:
        if kind not in NAMES:
            raise ConfigError(f"--format must be one of {', '.join(NAMES)}, got {kind!r}")
        return kind
    if out is None:
        return "html"
    if out.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--out must end in one of {', '.join(SUFFIXES)}, got {out}; or name a --format")
    return SUFFIXES[out.suffix.lower()]


def write_report(
    runs: Path, out: Path, kind: str, files: Sequence[Path] = (), tuned: Sequence[Path] = ()
) -> dict[str, Any]:
    """The report at `out`, a page with what is missing of the grids in `files`; its numbers."""
    from protofed.files import write_text
    from protofed.report.export import FORMATS
    from protofed.report.page import build, check_target, tables

    check_target(out, kind)
    if kind == "html":
        text, numbers = build(runs, wanted_cells(files, tuned) if files else ())
    else:
        text, numbers = tables(runs, FORMATS[kind])
    write_text(out, text)
    return numbers


def wanted_cells(files: Sequence[Path], tuned: Sequence[Path]) -> "tuple[Cell, ...]":
    """The cells of experiment files, each run once."""
    from protofed.cli.run import settle
    from protofed.experiments.grid import cells, read_grid, tuned_in, untuned
    from protofed.report.coverage import together

    settings = tuned_in(*tuned, required=False) if tuned else untuned
    return together(cells(read_grid(file), settle, settings) for file in files)


def check_grids(runs: Path, files: Sequence[Path], tuned: Sequence[Path], as_json: bool) -> None:
    """One line if every cell is finished; else each that is not, how far each data set is, and exit code 1."""
    from protofed.report.coverage import covered

    wanted = wanted_cells(files, tuned)
    found = covered(wanted, runs)
    if as_json:
        typer.echo(json.dumps(coverage_summary(found), indent=2, ensure_ascii=False))
    else:
        print_coverage(found, runs, files)
    if found.lacking:
        raise typer.Exit(1)


def coverage_summary(found: "Coverage") -> dict[str, Any]:
    """What --check --json prints."""
    names = ("dataset", "method", "done", "wanted")
    shares = [dict(zip(names, (*key, *share), strict=True)) for key, share in found.by_method.items()]
    lacking = [{"cell": cell.folder, "state": state} for cell, state in found.lacking]
    return {"done": found.share[0], "wanted": found.share[1], "coverage": shares, "lacking": lacking}


def print_coverage(found: "Coverage", runs: Path, files: Sequence[Path]) -> None:
    """For a person."""
    done, wanted = found.share
    names = ", ".join(map(str, files))
    if not found.lacking:
        typer.echo(f"all {wanted} cells of {names} are finished in {runs}")
        return
    for cell, state in found.lacking:
        typer.echo(f"{state:<10} {cell.folder}")
    for dataset in dict.fromkeys(name for name, _ in found.by_method):
        shares = [share for (name, _), share in found.by_method.items() if name == dataset]
        typer.echo(f"{dataset}: {sum(part for part, _ in shares)} of {sum(whole for _, whole in shares)} done")
    typer.echo(f"{done} of {wanted} cells of {names} are finished in {runs}; `protofed bench` makes the others")
