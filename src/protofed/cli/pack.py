"""`protofed pack`: finished runs as a few files that are small enough to be kept with the code."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def pack(
    runs: Annotated[Path, typer.Argument(help="A run's folder, or a folder with runs at any depth.")],
    out: Annotated[Path, typer.Argument(help="The pack's folder; runs that are in it stay.")],
) -> None:
    """Add finished runs to a pack, a small folder that `protofed report` reads like the runs."""
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
