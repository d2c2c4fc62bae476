"""What each row costs: bytes on the wire and on a device, trainable numbers, seconds; blank where none is told."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from protofed.methods.names import OURS
from protofed.report.journal import mean_told
from protofed.report.layout import MISSING, Cell, Column, Line, Missing, Part, Table, number
from protofed.report.runs import Run
from protofed.report.sections import Row, Section
from protofed.report.tables import MAIN, Results, key_of
from protofed.report.variants import side_rows

WIRE = "bytes, per client and round"
TOLD = ("bytes_up", "bytes_down", "trainable_parameters", "trainable_parameters_per_user")
COLUMNS: Mapping[str, Column] = {
    "bytes_up": Column("up", WIRE, "from a client to the server in one round", lower_is_better=True),
    "bytes_down": Column("down", WIRE, "from the server to a client in one round", lower_is_better=True),
    "trainable_parameters": Column("shared", "trainable", "numbers that learn, one copy for all", lower_is_better=True),
    "trainable_parameters_per_user": Column(
        "per user", "trainable", "numbers that learn, a copy for every user", lower_is_better=True
    ),
    "learn": Column("learn, s", "time", "wall clock of all slices together, mean over seeds", lower_is_better=True),
}
MEMORY = "On-device memory"
EFFICIENCY = ("trainable_parameters", "trainable_parameters_per_user", "bytes_up", "bytes_down")
HELD = {  # what log.jsonl may tell about a client's memory, and what it is
    f"device_bytes_{name}": Column(label, "bytes a device holds", hint)
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


def cost_of(row: Row) -> Cost:
    """What the runs of a row told about their costs."""
    up, down, shared, own = (_mean([mean_told(run.journal, name) for run in row.runs]) for name in TOLD)
    learn = _mean([run.seconds.get("learn", math.nan) for run in row.runs])
    slices = max(run.n_slices for run in row.runs)
    return Cost(up, down, shared, own, learn, learn / slices if slices else math.nan, _hardware(row.runs))


def cost_block(section: Section) -> tuple[list[Column], dict[str, list[Cell]]]:
    """The columns of the costs that at least one row tells, and their cells by row."""
    costs = {row.label: cost_of(row) for row in section.rows}
    names = [name for name in COLUMNS if any(math.isfinite(getattr(cost, name)) for cost in costs.values())]
    cells = {label: [_cell(name, getattr(cost, name)) for name in names] for label, cost in costs.items()}
    return [COLUMNS[name] for name in names], cells


def efficiency(section: Section) -> Part | Missing:
    """The efficiency table of the paper, as far as runs tell it."""
    costs = {row.label: cost_of(row) for row in section.rows}
    known = {label: cost for label, cost in costs.items() if math.isfinite(cost.learn) or math.isfinite(cost.traffic)}
    if not known:
        return Missing("Efficiency", "no run kept its time or told its bytes")
    columns = (
        Column("a slice", "time", "wall clock of learning, mean over slices and seeds", lower_is_better=True),
        COLUMNS["trainable_parameters"],
        COLUMNS["trainable_parameters_per_user"],
        COLUMNS["bytes_up"],
        COLUMNS["bytes_down"],
        Column("hardware", "", "where the time was spent", ranked=False, text=True),
    )
    order = sorted(known, key=lambda label: (_last(known[label].slice_seconds), label))
    trivial = {row.label: row.is_trivial for row in section.rows}
    lines = tuple(Line(label, _cost_cells(known[label]), trivial[label]) for label in order)
    name = f"{section.slug}-efficiency"
    note = (
        "A dash: the method does not tell. Times compare only on the same hardware; the backbone's warm-up, which all "
        "share, is in none of them."
    )
    return Part(name, "Efficiency", note, (Table(f"{name}-table", "", columns, lines),))


def device_memory(section: Section) -> Part | Missing:
    """What a client has to hold between slices, computed from shapes, for the rows that tell it."""
    told = {
        row.label: [_mean([mean_told(run.journal, name) for run in row.runs]) for name in HELD] for row in section.rows
    }
    known = {label: values for label, values in told.items() if np.isfinite(values).any()}
    if not known:
        return Missing(MEMORY, "no run tells it: log.jsonl holds no device_bytes_backbone")
    shown = [place for place in range(len(HELD)) if any(math.isfinite(values[place]) for values in known.values())]
    names = [list(HELD)[place] for place in shown]
    sizes = {label: [values[place] for place in shown] for label, values in known.items()}
    sizes = {label: [float(np.nansum(values)), *values] for label, values in sizes.items()}
    order = sorted(sizes, key=lambda label: (sizes[label][0], label))
    total = Column("together", "", "the sum of what is told", lower_is_better=True)
    columns = (total, *(replace(HELD[name], ranked=False) for name in names))
    lines = tuple(Line(label, tuple(Cell(size(v), value=v) for v in sizes[label])) for label in order)
    name = f"{section.slug}-memory"
    table = Table(f"{name}-table", "", columns, lines)
    note = (
        "What a client keeps between slices, from the shapes of its tensors: no optimiser state and no activations, "
        "which come and go. Rows that do not tell are left out."
    )
    return Part(name, MEMORY, note, (table,))


def equal_bytes(results: Results) -> Part | Missing:
    """Rows by what a client sends and receives in a round, ProtoFed-SP's between two lines."""
    section = results.section
    aside = side_rows(section)
    costs = {row.label: cost_of(row) for row in section.rows if row.label not in aside}
    order = sorted((c.traffic, label) for label, c in costs.items() if math.isfinite(c.traffic))
    ours = {row.label for row in section.rows if row.is_ours}
    if len(order) < 2 or not ours & {label for _, label in order}:
        silent = f"{OURS} does not tell its bytes" if ours & set(costs) else f"there is no {OURS} row"
        return Missing("At equal bytes", silent if order else "no row tells bytes_up and bytes_down")
    columns = (
        Column("both ways", WIRE, "up and down together", lower_is_better=True),
        COLUMNS["bytes_up"],
        COLUMNS["bytes_down"],
        Column("sampled, all", "NDCG@10"),
        Column("full, novel", "NDCG@10"),
    )
    keys = (key_of(MAIN), "ndcg@10/full/novel")
    accuracy = {label: [results.estimates[label][key].mean for key in keys] for _, label in order}
    wire = {label: [costs[label].traffic, costs[label].bytes_up, costs[label].bytes_down] for _, label in order}
    lines = tuple(
        Line(
            label,
            (*(Cell(size(v), value=v) for v in wire[label]), *(Cell(number(v), value=v) for v in accuracy[label])),
            marked=label in ours,
        )
        for _, label in order
    )
    name = f"{section.slug}-equal-bytes"
    note = (
        "Fewest bytes first; the rows above ProtoFed-SP's lines send less, those below more. Rows that send nothing or "
        "do not tell are left out."
    )
    return Part(name, "At equal bytes", note, (Table(f"{name}-table", "", columns, lines),))


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
    value = seconds / scale
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"


def _scaled(value: float, units: Sequence[tuple[str, float]], plain: str) -> str:
    if not math.isfinite(value):
        return MISSING
    unit, scale = next(((unit, scale) for unit, scale in units if value >= scale), (plain, 1.0))
    digits = max(0, 2 - int(math.log10(value / scale))) if value and scale > 1 else 0
    return f"{value / scale:.{digits}f} {unit}".strip()


def _cell(name: str, value: float) -> Cell:
    if name == "learn":
        return Cell(number(value, 1), value=value)
    return Cell(size(value) if name.startswith("bytes") else count(value), value=value)


def _cost_cells(cost: Cost) -> tuple[Cell, ...]:
    learning = Cell(duration(cost.slice_seconds), value=cost.slice_seconds)
    return (learning, *(_cell(name, getattr(cost, name)) for name in EFFICIENCY), Cell(cost.hardware))


def _hardware(runs: Sequence[Run]) -> str:
    names = [str(run.environment.get("device", "")) for run in runs]
    return ", ".join(dict.fromkeys(name for name in names if name)) or MISSING


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return float(np.mean(known)) if known else math.nan


def _last(value: float) -> float:
    return value if math.isfinite(value) else math.inf
