"""`protofed speed`: our simulator against a plain loop, Flower and pfl-research on one workload, and how it grows."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from protofed.cli.progress import shown
from protofed.errors import ConfigError, check_installed

if TYPE_CHECKING:
    from protofed.speed.measure import Figures

OURS = "stack"
NAMES = {"stack": "ours", "loop": "plain loop", "pfl": "pfl-research", "flower": "Flower (2 actors)"}
TARGETS = {(64, "pfl"): 4.0, (64, "flower"): 12.0, (256, "pfl"): 2.0, (256, "flower"): 4.0}
COHORTS, USERS = (50, 500, 5_000, 50_000), (1_000, 10_000, 100_000, 1_000_000)
AMONG, ROUND = 1_000, 500  # clients in all where the round grows, and clients of a round where all of them grow


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


def checked(
    widths: Sequence[int], peers: str, pfl: Path | None, clients: int, cohort: int, repeats: int, device: str
) -> dict[str, Path]:
    """The python that plays each system; what cannot be played is refused."""
    import sys

    from protofed.speed.workload import HEADS

    names = [name for name in peers.split(",") if name]
    unknown = [name for name in names if name not in ("loop", "pfl", "flower")]
    if unknown:
        raise ConfigError(f"--peers must be of loop, pfl and flower, got {unknown[0]!r}")
    if "pfl" in names and pfl is None:
        raise ConfigError("--peers pfl needs --pfl PYTHON; benchmarks/speed/pfl.sh makes its environment")
    if pfl is not None and not pfl.is_file():
        raise ConfigError(f"--pfl: no python at {pfl}; benchmarks/speed/pfl.sh makes its environment")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {device!r}")
    if device == "cuda" and set(names) - {"loop"}:
        raise ConfigError(f"--device cuda compares with the loop alone, got --peers {peers}; give --peers loop")
    if not (1 <= cohort <= clients and repeats >= 1):
        raise ConfigError(
            f"--repeats and --cohort must be at least 1, and no more than --clients in a round, got {repeats}, "
            f"{cohort} of {clients}"
        )
    if wrong := [one for one in widths if one < HEADS or one % HEADS]:
        raise ConfigError(f"--width must be a multiple of {HEADS}, got {wrong[0]}")
    if "flower" in names:
        check_installed(extra="federated")
    if pfl is not None and "pfl" not in names:
        names.append("pfl")
    here = Path(sys.executable)
    return {OURS: here, **{name: pfl if name == "pfl" and pfl else here for name in names}}


def compared(
    pythons: Mapping[str, Path], folder: Path, widths: Sequence[int], size: Mapping[str, Any], progress: Any
) -> dict[str, Any]:
    """The comparison at each width."""
    from protofed.speed.measure import as_rows, compare, flops_of_round, machine

    found: dict[str, Any] = {"machine": machine(), "workload": dict(size), "widths": []}
    for width in widths:
        figures, apart, rates = compare(pythons, folder, width=width, progress=progress, **size)
        ours = next(one for one in figures if one.system == OURS)
        flops, rate = flops_of_round(width, size["cohort"]), sorted(rates)[len(rates) // 2]
        found["widths"].append(
            {
                "width": width,
                "largest_difference": apart,
                "systems": as_rows(figures),
                "ratios": ratios(ours, figures),
                "gflop_per_round": flops / 1e9,
                "matmul_gflops": rate / 1e9,
                "share_of_matmul": flops / ours.seconds / rate,
                "share_of_matmul_by_cpu": flops / ours.cpu_seconds / rate if ours.cpu_seconds else None,
            }
        )
    return found


def ratios(ours: "Figures", figures: Sequence["Figures"]) -> dict[str, dict[str, float | None]]:
    """How many times as long each peer takes, by the clock and by CPU seconds, beside what we aim at."""
    return {
        one.system: {
            "seconds": one.seconds / ours.seconds,
            "cpu_seconds": one.cpu_seconds / ours.cpu_seconds,
            "target": TARGETS.get((one.width, one.system)),
        }
        for one in figures
        if one.system != ours.system
    }


def growing(folder: Path, width: int, repeats: int, device: str, progress: Any) -> dict[str, Any]:
    """Ours with ever more clients in a round, then with ever more clients in all."""
    from protofed.speed.measure import as_rows, grow, machine

    by_round = [(max(AMONG, cohort), cohort) for cohort in COHORTS]
    by_all = [(users, ROUND) for users in USERS]
    figures = grow([*by_round, *by_all], folder, width=width, repeats=repeats, device=device, progress=progress)
    made = as_rows(figures)
    return {"machine": machine(), "by_round": made[: len(by_round)], "by_clients": made[len(by_round) :]}


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
