"""`protofed speed`: our simulator against a plain loop, Flower and pfl-research on one workload, and how it grows."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from protofed.cli.progress import shown

NAMES = {"stack": "ours", "loop": "plain loop", "pfl": "pfl-research", "flower": "Flower (2 actors)"}


def speed(
    width: Annotated[list[int] | None, typer.Option(help="Widths of prompts and item rows; again for more.")] = None,
    peers: Annotated[str, typer.Option(help="Compared with ours: any of loop, pfl and flower.")] = "loop,flower",
    pfl: Annotated[
        Path | None, typer.Option(help="The python of an environment with pfl (see benchmarks/speed/pfl.sh).")
    ] = None,
    clients: Annotated[int, typer.Option(help="How many clients there are.")] = 1_000,
    cohort: Annotated[int, typer.Option(help="How many of them take part in a round.")] = 50,
    repeats: Annotated[int, typer.Option(help="How often each is timed; medians are told.")] = 5,
    growth: Annotated[bool, typer.Option("--growth", help="Instead: ours alone with ever more clients.")] = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda (ours and the loop alone).")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Time our simulator against others on one workload, once all were seen to compute the same."""
    from protofed.speed.comparison import checked, compared, growing

    widths = width or [64, 256]
    chosen = checked(widths, peers, pfl, clients, cohort, repeats, device)
    with tempfile.TemporaryDirectory(prefix="federation-speed-") as scratch, shown(Console(stderr=True)) as progress:
        progress.expect("protofed speed")
        folder = Path(scratch)
        if growth:
            found = growing(folder, widths[0], repeats, device, progress)
        else:
            size = {"clients": clients, "cohort": cohort, "repeats": repeats, "device": device}
            found = compared(chosen, folder, widths, size, progress)
    print(json.dumps(found, indent=2)) if as_json else print_found(found)


def print_found(found: Mapping[str, Any]) -> None:
    """The comparison, or the growth, as tables."""
    console, on = Console(), found["machine"]
    what = on["gpu"] or f"{on['cpu']}, {on['cores']} cores"
    console.print(f"on {what}; load {' '.join(map(str, on['load']))}; PyTorch {on['torch']}", highlight=False)
    for one in found.get("widths", ()):
        console.print(comparison(one))
        told = f"the systems differed by {one['largest_difference']:.1e}; ours does {one['share_of_matmul']:.0%} of the"
        console.print(
            f"{told} {one['matmul_gflops']:.0f} GFLOP/s of a plain matrix product on one core", highlight=False
        )
    for name, title in (("by_round", "More clients in a round"), ("by_clients", "More clients in all")):
        if name in found:
            console.print(growth_table(title, found[name]))


def comparison(one: Mapping[str, Any]) -> Table:
    """One width."""
    table = Table(title=f"Width {one['width']}: medians of a round")
    for column in ("system", "seconds", "CPU s", "clients/s", "peak MB", "× ours", "by CPU", "aim"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for row in one["systems"]:
        against = one["ratios"].get(row["system"])
        beside = ("", "", "")
        if against:
            aim = f"{against['target']:g}" if against["target"] else ""
            beside = (f"{against['seconds']:.1f}", f"{against['cpu_seconds']:.1f}", aim)
        numbers = (f"{row['seconds']:.3f}", f"{row['cpu_seconds']:.3f}", f"{row['updates_per_second']:.0f}")
        table.add_row(NAMES[row["system"]], *numbers, f"{row['memory'] / 1e6:.0f}", *beside)
    return table


def growth_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """How a round's time and the peak of memory grow."""
    table = Table(title=title)
    for column in ("clients", "in a round", "s a round", "CPU s", "clients/s", "peak MB"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = (f"{row['seconds']:.3f}", f"{row['cpu_seconds']:.3f}", f"{row['updates_per_second']:.0f}")
        table.add_row(f"{row['clients']:,}", f"{row['cohort']:,}", *numbers, f"{row['memory'] / 1e6:.0f}")
    return table
