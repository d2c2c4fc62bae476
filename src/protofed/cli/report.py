"""`protofed report`: one self-contained HTML page from run folders."""

import json
from pathlib import Path
from typing import Annotated

import typer

from protofed.report.page import build, check_target, write


def report(
    runs: Annotated[Path, typer.Argument(help="A run folder, or a folder that holds run folders at any depth.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")] = Path("report.html"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON too.")] = False,
) -> None:
    """Write tables and figures of finished runs into one HTML file that needs no network."""
    check_target(out)
    page, numbers = build(runs)
    write(page, out)
    if as_json:
        typer.echo(json.dumps(numbers | {"report": str(out)}, indent=2, ensure_ascii=False))
    else:
        n_runs = sum(len(row["seeds"]) for section in numbers["sections"] for row in section["rows"])
        counted = [_count(n_runs, "run")]
        if numbers["warnings"]:
            counted.append(_count(len(numbers["warnings"]), "warning"))
        typer.echo(f"{out}: {', '.join(counted)}")


def _count(n: int, thing: str) -> str:
    return f"{n} {thing if n == 1 else thing + 's'}"
