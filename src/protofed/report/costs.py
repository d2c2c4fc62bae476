"""What each row costs: bytes on the wire and on a device, trainable numbers, seconds; blank where none is told."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from protofed.report.layout import MISSING, Cell, Column, Line, Missing, Part, Table, cells_of, known, mean_of, number
from protofed.report.sections import Row, Section


def size(value: float) -> str:
    """Bytes in decimal units, three figures: 1.05 MB."""
    return _scaled(value, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)), "B")


def count(value: float) -> str:
    """A number of things, three figures: 12.3 k."""
    return _scaled(value, (("G", 1e9), ("M", 1e6), ("k", 1e3)), "")


def duration(seconds: float) -> str:
    """Seconds as people say them: 12 ms, 3.4 s, 5.0 min, 1.2 h."""
    if not math.isfinite(seconds):
        return MISSING
    if seconds < 0.001:
        return "< 1 ms" if seconds else "0 s"
    units = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 0.001))
    unit, scale = next((unit, scale) for unit, scale in units if seconds >= scale)
    return f"{seconds / scale:.{0 if seconds / scale >= 10 else 1}f} {unit}"


def _scaled(value: float, units: Sequence[tuple[str, float]], plain: str) -> str:
    if not math.isfinite(value):
        return MISSING
    unit, scale = next(((unit, scale) for unit, scale in units if value >= scale), (plain, 1.0))
    digits = max(0, 2 - int(math.log10(value / scale))) if value and scale > 1 else 0
    return f"{value / scale:.{digits}f} {unit}".strip()


WIRE = "bytes, per client and round"
cheap = partial(Column, lower_is_better=True)
COLUMNS = {
    "bytes_up": cheap("up", WIRE, "from a client to the server in one round", show=size),
    "bytes_down": cheap("down", WIRE, "from the server to a client in one round", show=size),
    "trainable_parameters": cheap("shared", "trainable", "numbers that learn, one copy for all", show=count),
    "trainable_parameters_per_user": cheap(
        "per user", "trainable", "numbers that learn, a copy for every user", show=count
    ),
    "learn": cheap(
        "learn, s", "time", "wall clock of all slices together, mean over seeds", show=partial(number, digits=1)
    ),
}
EFFICIENCY = ("trainable_parameters", "trainable_parameters_per_user", "bytes_up", "bytes_down")
HELD = {  # what log.jsonl may tell about a client's memory, and what it is
    f"device_bytes_{name}": Column(label, "bytes a device holds", hint, ranked=False, show=size)
    for name, label, hint in (
        ("backbone", "backbone", "the frozen model, all public item rows among it"),
        ("encoders", "encoders", "what turns histories and prompts into queries"),
        ("prototypes", "prototypes", "the library as it is sent, and decoded"),
        ("prompts", "prompts", "the user's own, with what tracks drift and choice"),
        ("rows", "own rows", "of the items the user met, mean over clients"),
        ("own", "own copy", "other numbers that belong to one user alone"),
    )
}


@dataclass(frozen=True, slots=True)
class Cost:
    """One row's costs, means over seeds; NaN where it does not tell."""

    bytes_up: float
    bytes_down: float
    trainable_parameters: float
    trainable_parameters_per_user: float
    learn: float
    slice_seconds: float
    hardware: str

    @property
    def traffic(self) -> float:
        return self.bytes_up + self.bytes_down

    def of(self, names: Sequence[str]) -> list[float]:
        """Some of the costs."""
        return [getattr(self, name) for name in names]


def cost_of(row: Row) -> Cost:
    """What the runs of a row told about their costs."""
    told = {name: mean_of(run.told(name) for run in row.runs) for name in EFFICIENCY}
    learn = mean_of(run.seconds.get("learn", math.nan) for run in row.runs)
    slices = max(run.n_slices for run in row.runs)
    devices = dict.fromkeys(str(run.environment.get("device", "")) for run in row.runs)
    hardware = ", ".join(filter(None, devices)) or MISSING
    return Cost(**told, learn=learn, slice_seconds=learn / slices if slices else math.nan, hardware=hardware)


def cost_block(section: Section) -> tuple[list[Column], dict[str, tuple[Cell, ...]]]:
    """The columns of the costs that at least one row tells, and their cells by row."""
    costs = {row.label: cost_of(row) for row in section.rows}
    names = [name for name in COLUMNS if any(math.isfinite(getattr(cost, name)) for cost in costs.values())]
    columns = [COLUMNS[name] for name in names]
    return columns, {label: cells_of(columns, cost.of(names)) for label, cost in costs.items()}


def efficiency(section: Section) -> Part | Missing:
    """The efficiency table of the paper, as far as runs tell it."""
    costs = [(row, cost_of(row)) for row in section.rows]
    told = [(row, cost) for row, cost in costs if np.isfinite([cost.learn, cost.traffic]).any()]
    if not told:
        return Missing("Efficiency", "no run kept its time or told its bytes")
    columns = (
        cheap("a slice", "time", "wall clock of learning, mean over slices and seeds", show=duration),
        *(COLUMNS[name] for name in EFFICIENCY),
        Column("hardware", "", "where the time was spent", ranked=False, text=True),
    )
    told.sort(key=lambda pair: (known(pair[1].slice_seconds, math.inf), pair[0].label))
    lines = tuple(
        Line(row.label, cells_of(columns, [cost.slice_seconds, *cost.of(EFFICIENCY), cost.hardware]), row.is_trivial)
        for row, cost in told
    )
    name = f"{section.slug}-efficiency"
    note = (
        "A dash: the method does not tell. Times compare only on the same hardware; the backbone's warm-up, which all "
        "share, is in none of them."
    )
    return Part(name, "Efficiency", note, (Table(f"{name}-table", "", columns, lines),))


def device_memory(section: Section) -> Part | Missing:
    """What a client has to hold between slices, computed from shapes, for the rows that tell it."""
    title = "On-device memory"
    held = {row.label: np.array([mean_of(run.told(name) for run in row.runs) for name in HELD]) for row in section.rows}
    held = {label: values for label, values in held.items() if np.isfinite(values).any()}
    if not held:
        return Missing(title, "no run tells it: log.jsonl holds no device_bytes_backbone")
    shown = np.isfinite(np.array([*held.values()])).any(axis=0)
    total = cheap("together", "", "the sum of what is told", show=size)
    columns = (total, *(column for column, is_shown in zip(HELD.values(), shown, strict=True) if is_shown))
    sizes = {label: [float(np.nansum(values)), *values[shown].tolist()] for label, values in held.items()}
    order = sorted(sizes, key=lambda label: (sizes[label][0], label))
    lines = tuple(Line(label, cells_of(columns, sizes[label])) for label in order)
    name = f"{section.slug}-memory"
    note = (
        "What a client keeps between slices, from the shapes of its tensors: no optimiser state and no activations, "
        "which come and go. Rows that do not tell are left out."
    )
    return Part(name, title, note, (Table(f"{name}-table", "", columns, lines),))
