"""Tiny runs that between them fill every section of the page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_folders import half_novel, write_run

N_SLICES = 4
USERS = {f"user {n:02d}": tuple(2 + (n + s) % 2 for s in range(N_SLICES + 1)) for n in range(12)}
LEDGER = [{"noise_multiplier": 1.0, "sampling_rate": 1.0, "count": 8}]
WEAK = [{"noise_multiplier": 4.0, "sampling_rate": 1.0, "count": 8}]
COSTS = {"trainable_parameters": 640, "trainable_parameters_per_user": 1024}
HELD = {
    "device_bytes_backbone": 2e6,
    "device_bytes_prototypes": 9e4,
    "device_bytes_prompts": 4096,
    "device_bytes_rows": 820.5,
}


def falling(level: float, seed: int = 0) -> Callable[[int, int, str, str, str], float]:
    """A slice is worth less before it is learned and a little less long after."""

    def value(tested: int, trained: int, candidates: str, subset: str, metric: str) -> float:
        missed = 0.06 * max(tested - trained, 0) + 0.01 * max(trained - tested, 0)
        factor = {"full": 0.2}.get(candidates, 1.0) * {"novel": 0.7, "repeat": 1.3}.get(subset, 1.0)
        return (level - missed + 0.004 * seed * (1 + tested % 2)) * factor * (1.3 if metric == "hr@10" else 1.0)

    return value


def moved(user: str, tested: int) -> float | None:
    """Later users drift more; nobody drifts in the base block."""
    return 0.01 * int(user.split()[1]) + 0.001 * tested if tested else None


def shares(lead: float) -> Callable[[int, str], float]:
    """Half of the events are on head items, and the head has so much more of the places."""

    def share(tested: int, metric: str) -> float:
        head, tail = (0.5 + lead + 0.01 * tested, 0.1 - lead / 10) if "exposure" in metric else (0.5, 0.2)
        return {"head": head, "tail": tail}.get(metric.split("_")[1].split("@")[0], 1 - head - tail)

    return share


def log(slices: int = N_SLICES, **told: Any) -> list[dict[str, Any]]:
    return [{"slice": t, "stage": "learn", **told} for t in range(slices + 1)]


def protofed(mode: str = "reference", ablate: str = "", lambda_max: float = 1.0, noise: float = 1.0) -> str:
    return (
        f'[protofed]\nmode = "{mode}"\nablate = "{ablate}"\nlambda_max = {lambda_max}\n'
        f"[privacy]\nnoise_multiplier = {noise}\ndelta = 1e-5\n"
    )


def write_every_section(root: Path) -> Path:
    """Two seeds of the full method, a run of everything else."""
    shared = {"users": USERS, "subsets": ("all", "novel", "repeat"), "asked": half_novel, "drift": moved}
    talk = log(bytes_up=65, bytes_down=8192, **COSTS, **HELD)
    ours = {"method": "protofed-sp", "log": talk, **shared}

    def write(name: str, level: float, **kind: Any) -> None:
        write_run(root / name, falling(level, kind.get("seed", 0)), shares=shares(0.4 * (0.9 - level)), **kind)

    for seed in (0, 1):
        write(f"sp-{seed}", 0.66, seed=seed, settings=protofed(), ledger=LEDGER, **ours)
        write(f"weak-{seed}", 0.60, seed=seed, settings=protofed(noise=4.0), ledger=WEAK, **ours)
    write("nodp", 0.70, settings=protofed("nodp"), **ours)
    write("no-long", 0.58, settings=protofed(ablate="long"), ledger=LEDGER, **ours)
    write("lambda", 0.64, settings=protofed(lambda_max=4.0), ledger=LEDGER, **ours)
    few = {f"user {n:02d}": 0.5 for n in range(6)}
    write("ewc", 0.62, method="ewc", settings="[privacy]\nwrap = true\n", ledger=LEDGER, skill=few, **shared)
    trace = log(steps_per_epoch=10, validation_ndcg10=[0.2, 0.4, 0.5, 0.49])
    write("last", 0.63, method="finetune-last", log=trace, skill=few, **shared)
    write("fedavg", 0.59, method="fedavg", log=log(bytes_up=4000, bytes_down=4000, **COSTS), **shared)
    write("frozen", 0.55, method="frozen", **shared)
    write("popularity", 0.25, method="popularity", **shared)
    return root
