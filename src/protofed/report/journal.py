"""A run's log.jsonl: what its method told about each slice, costs and validation traces among it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from protofed.evaluation.adaptation import Trace
from protofed.experiments.records import log_lines

Told = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WarmUp:
    """How the backbone's training in the base block went."""

    steps: int  # to its best epoch
    steps_per_epoch: int
    stopped_early: bool  # by its validation part, not by the cap on epochs


def read_journal(log: str) -> tuple[Told, ...]:
    """What was told of slices 1..T, by slice; a resumed run repeats a slice, and the last word counts."""
    told = {
        line["slice"]: line for line in log_lines(log) if line.get("stage") == "learn" and _whole(line.get("slice"))
    }
    return tuple(told[index] for index in sorted(told) if index > 0)


def read_warm_up(log: str, most_epochs: int) -> WarmUp | None:
    """What was told of the warm-up, of which a run tells the same whenever it resumes; None where nothing was."""
    for line in log_lines(log):
        if line.get("stage") == "warm-up":
            epochs, steps, trace = (line.get(name) for name in ("epochs", "steps_per_epoch", "validation_ndcg10"))
            if isinstance(epochs, int) and isinstance(steps, int) and isinstance(trace, list):
                return WarmUp(epochs * steps, steps, 1 < len(trace) <= most_epochs)
    return None


def mean_told(journal: Sequence[Told], name: str) -> float:
    """The mean of a number over the slices that tell it; NaN where none does."""
    values = [float(record[name]) for record in journal if _number(record.get(name))]
    return float(np.mean(values)) if values else math.nan


def traces(journal: Sequence[Told], batch_size: int) -> dict[int, Trace]:
    """The validation trace of each slice whose training kept one: a point before the first epoch and after each.

    Where clients train too, the trace is that of new item rows alone and says nothing about the method: left out.
    """
    found = {}
    for record in journal:
        values = record.get("validation_ndcg10")
        if values and "active_clients" not in record and _number(record.get("steps_per_epoch")):
            steps = np.arange(len(values)) * int(record["steps_per_epoch"])
            found[int(record["slice"])] = Trace(steps, steps * batch_size, np.array(values, dtype=np.float64))
    return found


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
