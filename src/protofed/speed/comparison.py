"""What `protofed speed` tells: systems side by side with what we aim at, and how ours grows."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protofed.errors import ConfigError, check_installed
from protofed.progress import Progress
from protofed.speed.measure import Figures, as_rows, compare, flops_of_round, grow, machine
from protofed.speed.workload import HEADS

OURS = "stack"
TARGETS = {(64, "pfl"): 4.0, (64, "flower"): 12.0, (256, "pfl"): 2.0, (256, "flower"): 4.0}
COHORTS, USERS = (50, 500, 5_000, 50_000), (1_000, 10_000, 100_000, 1_000_000)
AMONG, ROUND = 1_000, 500  # clients in all where the round grows, and clients of a round where all of them grow


def checked(
    widths: Sequence[int], peers: str, pfl: Path | None, clients: int, cohort: int, repeats: int, device: str
) -> dict[str, Path]:
    """The python that plays each system; what cannot be played is refused."""
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
    pythons: Mapping[str, Path], folder: Path, widths: Sequence[int], size: Mapping[str, Any], progress: Progress
) -> dict[str, Any]:
    """The comparison at each width."""
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


def ratios(ours: Figures, figures: Sequence[Figures]) -> dict[str, dict[str, float | None]]:
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


def growing(folder: Path, width: int, repeats: int, device: str, progress: Progress) -> dict[str, Any]:
    """Ours with ever more clients in a round, then with ever more clients in all."""
    by_round = [(max(AMONG, cohort), cohort) for cohort in COHORTS]
    by_all = [(users, ROUND) for users in USERS]
    figures = grow([*by_round, *by_all], folder, width=width, repeats=repeats, device=device, progress=progress)
    made = as_rows(figures)
    return {"machine": machine(), "by_round": made[: len(by_round)], "by_clients": made[len(by_round) :]}
