"""What each row costs: bytes on the wire and on a device, trainable numbers, seconds; and rows of equal cost."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from protofed.methods.names import OURS
from protofed.report.layout import (
    MISSING,
    Cell,
    Column,
    Line,
    Missing,
    Part,
    Table,
    beside,
    cells_of,
    known,
    mean_of,
    number,
)
from protofed.report.prices import UNPRICED, equal_groups
from protofed.report.runs import MAIN
from protofed.report.sections import Row, Section, slug
from protofed.report.tables import CONTINUAL, MEASURES, NAMES, Results, headline, key_of, measured
from protofed.report.variants import compared, side_rows


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


WIRE, TRAINABLE = "bytes, per client and round", "trainable"
cheap = partial(Column, lower_is_better=True)
COLUMNS = {  # of what a row may tell
    "traffic": cheap("both ways", WIRE, "up and down together", show=size),
    "bytes_up": cheap("up", WIRE, "from a client to the server in one round", show=size),
    "bytes_down": cheap("down", WIRE, "from the server to a client in one round", show=size),
    "trainable_parameters": cheap("shared", TRAINABLE, "numbers that learn, one copy for all", show=count),
    "trainable_parameters_per_user": cheap(
        "per user", TRAINABLE, "numbers that learn, a copy for every user", show=count
    ),
    "learn": cheap(
        "learn, s", "time", "wall clock of all slices together, mean over seeds", show=partial(number, digits=1)
    ),
    "learn_slice": cheap("a slice", "time", "wall clock of learning, mean over slices and seeds", show=duration),
}
BLOCK = ("bytes_up", "bytes_down", "trainable_parameters", "trainable_parameters_per_user", "learn")
EFFICIENCY = ("learn_slice", "trainable_parameters", "trainable_parameters_per_user", "bytes_up", "bytes_down")
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


def cost_of(row: Row) -> dict[str, float]:
    """What the runs of a row told about their costs, by the names in COLUMNS; NaN where they do not."""
    told = {name: mean_of(run.told(name) for run in row.runs) for name in BLOCK[:-1]}
    learn = mean_of(run.seconds.get("learn", math.nan) for run in row.runs)
    per_slice = learn / max(row.runs[0].n_slices, 1)
    return {"traffic": told["bytes_up"] + told["bytes_down"], **told, "learn": learn, "learn_slice": per_slice}


def hardware_of(row: Row) -> str:
    """The devices that its runs name."""
    devices = dict.fromkeys(str(run.environment.get("device", "")) for run in row.runs)
    return ", ".join(filter(None, devices)) or MISSING


def cost_block(section: Section) -> tuple[list[Column], dict[str, tuple[Cell, ...]]]:
    """The columns of the costs that at least one row tells, and their cells by row."""
    costs = {row.label: cost_of(row) for row in section.rows}
    names = [name for name in BLOCK if any(math.isfinite(cost[name]) for cost in costs.values())]
    columns = [COLUMNS[name] for name in names]
    return columns, {label: cells_of(columns, [cost[name] for name in names]) for label, cost in costs.items()}


def efficiency(section: Section) -> Part | Missing:
    """The efficiency table of the paper, as far as runs tell it."""
    costs = [(row, cost_of(row)) for row in section.rows]
    told = [(row, cost) for row, cost in costs if math.isfinite(cost["learn"]) or math.isfinite(cost["traffic"])]
    if not told:
        return Missing("Efficiency", "no run kept its time or told its bytes")
    hardware = Column("hardware", "", "where the time was spent", ranked=False, text=True)
    columns = (*(COLUMNS[name] for name in EFFICIENCY), hardware)
    lines = []
    for row, cost in sorted(told, key=lambda pair: (known(pair[1]["learn_slice"], math.inf), pair[0].label)):
        cells = cells_of(columns, [*(cost[name] for name in EFFICIENCY), hardware_of(row)])
        lines.append(Line(row.label, cells, row.is_trivial))
    name = f"{section.slug}-efficiency"
    note = (
        "A dash: the method does not tell. Times compare only on the same hardware; the backbone's warm-up, which all "
        "share, is in none of them."
    )
    return Part(name, "Efficiency", note, (Table(f"{name}-table", "", columns, tuple(lines)),))


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


def headline_with_costs(results: Results) -> Table:
    """The headline table, costs at its right."""
    return beside(headline(results), *cost_block(results.section))


def equal_epsilon(results: Results) -> Part | Missing:
    """The private rows of each budget that at least two rows share."""
    title, section = "At equal ε", results.section
    if not results.prices:
        return Missing(title, "no row released anything under a ledger")
    aside = side_rows(section, noise=False)
    prices = {label: price for label, price in results.prices.items() if label not in aside}
    shared = {words: labels for words, labels in equal_groups(prices).items() if len(labels) > 1}
    if not shared:
        alone = "; ".join(f"{label}: {found.said()}" for label, found in prices.items())
        return Missing(title, f"no two private rows share a budget ({alone})")
    columns = [(Column(f"{c}, {s}", NAMES[metric]), results.of(key_of((c, s, metric)))) for c, s, metric in MEASURES]
    columns += [(CONTINUAL[name], results.of(name)) for name in ("AF", "BWT")]
    costs, tables = cost_block(section), []
    for words, labels in shared.items():
        rows = [row for row in section.rows if row.label in labels]
        tables.append(beside(measured(f"{section.slug}-equal-{slug(words)}", words, columns, rows), *costs))
    note = "Rows whose ledgers come to the same ε (to one decimal), δ and trust, against who sees what is released."
    if not all(found.known for found in prices.values()):
        note = f"{UNPRICED}: rows are grouped by what ε is computed from."
    return Part(f"{section.slug}-equal-epsilon", title, note, tuple(tables))


def equal_bytes(results: Results) -> Part | Missing:
    """Rows by what a client sends and receives in a round, ProtoFed-SP's between two lines."""
    title, section = "At equal bytes", results.section
    costs = [(row, cost_of(row)) for row in compared(section)]
    told = [(row, cost) for row, cost in costs if math.isfinite(cost["traffic"])]
    if len(told) < 2 or not any(row.is_ours for row, _ in told):
        ours = any(row.is_ours for row, _ in costs)
        silent = f"{OURS} does not tell its bytes" if ours else f"there is no {OURS} row"
        return Missing(title, silent if told else "no row tells bytes_up and bytes_down")
    names = ("traffic", "bytes_up", "bytes_down")
    measured = {MAIN: Column("sampled, all", "NDCG@10"), MEASURES[-1]: Column("full, novel", "NDCG@10")}
    columns = (*(COLUMNS[name] for name in names), *measured.values())
    lines = []
    for row, cost in sorted(told, key=lambda pair: (pair[1]["traffic"], pair[0].label)):
        accuracy = [results.estimates[row.label][key_of(measure)].mean for measure in measured]
        values = [*(cost[name] for name in names), *accuracy]
        lines.append(Line(row.label, cells_of(columns, values), marked=row.is_ours))
    name = f"{section.slug}-equal-bytes"
    note = (
        "Fewest bytes first; the rows above ProtoFed-SP's lines send less, those below more. Rows that send nothing or "
        "do not tell are left out."
    )
    return Part(name, title, note, (Table(f"{name}-table", "", columns, tuple(lines)),))
