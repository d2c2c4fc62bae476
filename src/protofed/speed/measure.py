"""Plays the systems side by side on this machine: first whether they agree, then what each takes, in turns."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import protofed
from protofed.errors import MachineError
from protofed.progress import Progress, silent

CHECKED = 2  # rounds that all systems play before anything is timed
TOLERANCE = 1e-5  # how far apart prototypes and uploads may be
GROUP, MOST = 2.0, 50  # seconds that a group of rounds should take at least, and its rounds at most
LONG = 20.0  # seconds: a round that takes so long is played once
MATRIX = 1_024  # of the matrix product that the machine's rate is measured by


@dataclass(frozen=True, slots=True)
class Player:
    """One system in a process of its own."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    started: float  # seconds until it was ready

    def play(self, rounds: int) -> dict[str, Any]:
        """What so many rounds took, and what they ended with."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{rounds}\n")
        self.process.stdin.flush()
        return heard(self.process, self.name, self.log)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a system took: medians over the repeats, with the least and the most."""

    system: str
    width: int
    cohort: int
    clients: int
    rounds: int  # of a repeat
    seconds: float  # a round
    least: float
    most: float
    cpu_seconds: float  # a round
    memory: int  # bytes at the peak
    start: float  # seconds until it was ready

    @property
    def updates(self) -> float:
        """Clients a second."""
        return self.cohort / self.seconds


def heard(process: subprocess.Popen[str], name: str, log: Path) -> dict[str, Any]:
    """The next line of a system; one that ended instead is an error that quotes its last words."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        said = " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-300:]
        raise MachineError(f"{name} ended before it had played its rounds: {said or 'it said nothing'}; see {log}")
    return dict(json.loads(line))


@contextlib.contextmanager
def player(
    name: str, python: Path, folder: Path, *, width: int, clients: int, cohort: int, device: str
) -> Iterator[Player]:
    """The system, ready to play; its process ends with the block."""
    log, began = folder / f"{name}-{width}.log", time.monotonic()
    size = [f"--{key}={value}" for key, value in dict(width=width, clients=clients, cohort=cohort).items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(protofed.__file__).parents[1])}
    with open(log, "w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [str(python), "-m", "protofed.speed.systems", name, *size, f"--device={device}"], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    try:
        heard(process, name, log)
        yield Player(name, process, log, time.monotonic() - began)
    finally:
        end(process)


def end(process: subprocess.Popen[str], grace: float = 20.0) -> None:
    """No more rounds: the process goes, and with it all that it started."""
    family = [each for each in descendants(process.pid)]
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    for each in [*family, *descendants(process.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def descendants(pid: int) -> list[psutil.Process]:
    """A process and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        here = psutil.Process(pid)
        return [*here.children(recursive=True), here]
    return []


def compare(
    pythons: Mapping[str, Path],
    folder: Path,
    *,
    width: int,
    clients: int,
    cohort: int,
    repeats: int,
    device: str = "cpu",
    progress: Progress = silent,
) -> tuple[list[Figures], float, list[float]]:
    """What each system took, how far apart the systems were before, and the machine's matrix products a second."""
    with contextlib.ExitStack() as open_:
        size: dict[str, Any] = {"width": width, "clients": clients, "cohort": cohort, "device": device}
        players = []
        for done, (name, python) in enumerate(pythons.items()):
            progress(f"start, width {width}", done, len(pythons), name)
            players.append(open_.enter_context(player(name, python, folder, **size)))
        first = {each.name: each.play(CHECKED) for each in players}
        apart = largest_difference(first)
        if not apart <= TOLERANCE:
            raise MachineError(
                f"the systems differ by {apart:.1e} after {CHECKED} rounds at width {width}, more than "
                f"{TOLERANCE:g}; nothing was timed"
            )
        rounds = {name: group_of(told["seconds"] / CHECKED) for name, told in first.items()}
        told: dict[str, list[dict[str, Any]]] = {each.name: [] for each in players}
        rates = []
        for repeat in range(repeats):
            for each in players:
                progress(f"width {width}", repeat, repeats, each.name)
                told[each.name].append(each.play(rounds[each.name]))
            rates.append(matrix_rate(device))
        figures = [figures_of(each.name, each.started, told[each.name], width, clients, cohort) for each in players]
    return figures, apart, rates


def group_of(seconds: float) -> int:
    """How many rounds are timed together where one takes so long."""
    return min(MOST, max(1, round(GROUP / seconds)))


def largest_difference(told: Mapping[str, dict[str, Any]]) -> float:
    """From the first system, over prototypes and uploads; what is not finite or of another shape is infinitely far."""
    first, *others = told.values()
    most = 0.0
    for other in others:
        for name in ("v", "z"):
            one, two = np.array(first[name]), np.array(other[name])
            if one.shape != two.shape or not np.isfinite(one - two).all():
                return float("inf")
            most = max(most, float(np.abs(one - two).max()))
    return most


def figures_of(
    name: str, started: float, told: Sequence[dict[str, Any]], width: int, clients: int, cohort: int
) -> Figures:
    """Medians over the repeats."""
    each = [one["seconds"] / one["rounds"] for one in told]
    cpu = statistics.median(one["cpu_seconds"] / one["rounds"] for one in told)
    memory, rounds = max(one["memory"] for one in told), told[0]["rounds"]
    middle = statistics.median(each)
    return Figures(name, width, cohort, clients, rounds, middle, min(each), max(each), cpu, memory, started)


def matrix_rate(device: str) -> float:
    """Floating-point operations a second of one large square product: of a core's own time, or on the GPU."""
    threads, clock = torch.get_num_threads(), time.perf_counter if device == "cuda" else time.process_time
    torch.set_num_threads(1)
    n = MATRIX * (8 if device == "cuda" else 1)
    a = torch.randn(n, n, device=device)
    best = float("inf")
    for _ in range(4):
        began = clock()
        a @ a
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, clock() - began)
    torch.set_num_threads(threads)
    return 2 * n**3 / best


def flops_of_round(width: int, cohort: int) -> int:
    """Of all matrix products in a round of the stack; attention counted as the products that it consists of."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from protofed.speed.workload import made_up, update_together

    work = made_up(cohort, cohort, width)
    everybody = torch.arange(cohort)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        update_together(work, everybody, work.first_prompts(everybody), work.model.v)
    return int(counter.get_total_flops())


def grow(
    sizes: Sequence[tuple[int, int]],
    folder: Path,
    *,
    width: int,
    repeats: int,
    device: str,
    progress: Progress = silent,
) -> list[Figures]:
    """Our simulator alone with so many clients and so many of them in a round."""
    found = []
    for done, (clients, cohort) in enumerate(sizes):
        progress("growth", done, len(sizes), f"{cohort:,} of {clients:,} clients")
        size: dict[str, Any] = {"width": width, "clients": clients, "cohort": cohort, "device": device}
        with player("stack", Path(sys.executable), folder, **size) as who:
            first = who.play(1)
            again = repeats if first["seconds"] < LONG else 0  # a round that long needs no warming up
            told = [who.play(group_of(first["seconds"])) for _ in range(again)] or [first]
            found.append(figures_of(who.name, who.started, told, width, clients, cohort))
    return found


def machine() -> dict[str, Any]:
    """What the figures were made on."""
    model = "unknown"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    memory = round(psutil.virtual_memory().total / 2**30)
    load = [round(each, 1) for each in os.getloadavg()]
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": memory,
        "gpu": gpu,
        "torch": torch.__version__,
        "load": load,
    }


def as_rows(figures: Sequence[Figures]) -> list[dict[str, Any]]:
    """For JSON and CSV."""
    return [{**asdict(one), "updates_per_second": one.updates} for one in figures]
