"""`protofed pack`: finished runs as a few files that are small enough to be kept with the code."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def pack(
    runs: Annotated[Path, typer.Argument(help="A run folder, or a folder that holds run folders at any depth.")],
    out: Annotated[Path, typer.Argument(help="The pack: a folder; runs that it holds already stay in it.")],
) -> None:
    """Add finished runs to a pack; `protofed report OUT` reads it as it reads the run folders."""
    from protofed.cli.progress import shown
    from protofed.experiments import pack as packs

    with shown(Console(stderr=True)) as progress:
        done = packs.pack(runs, out, progress)
    typer.echo(f"{out}: {done.runs} packed, {done.held} held, {done.n_bytes / 1000:,.0f} kB")
    for count, what in (
        (done.without_ranks, "kept no ranks.parquet: packed without single queries, so without intervals over users"),
        (done.repeated, "left out: an earlier folder holds the same config"),
        (done.unfinished, "left out: not finished"),
    ):
        if count:
            typer.echo(f"{count} {what}")
