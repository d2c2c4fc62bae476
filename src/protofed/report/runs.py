"""Finished runs as a report uses them: read from their records and checked."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool

from protofed.config import flatten
from protofed.errors import DataError, RunFolderError
from protofed.evaluation.exposure import EVENTS, PLACES
from protofed.experiments.matrices import Matrix, Measure, matrices
from protofed.experiments.records import DRIFT, WORDS, Record, Unfinished, log_lines, parse_config
from protofed.experiments.records import METRICS as METRICS_FILE
from protofed.experiments.store import find_records
from protofed.privacy.ledger import Ledger, Trust, parse_ledger
from protofed.report.layout import mean_of

MAIN: Measure = ("sampled", "all", "ndcg@10")
METRICS = ("ndcg@10", "hr@10")
SUM_COLUMN = {"ndcg@10": "ndcg10_sum", "hr@10": "hr10_sum"}
SHARES = (*PLACES.values(), *EVENTS.values())  # of A[t, t] alone; runs of earlier versions have none
NOT_SETTINGS = ("seed", "out", "root", "device")  # they may differ between the seeds of one row
Told = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WarmUp:
    """How the backbone's training in the base block went."""

    steps: int  # to its best epoch
    steps_per_epoch: int
    stopped_early: bool  # by its validation part, not by the cap on epochs


@dataclass(frozen=True, slots=True)
class Rows:
    """What users were asked in a slice and how it was answered, a row for each user and slice."""

    words: Mapping[str, pa.Array]  # what the numbers in some columns stand for, among them the users' names
    columns: Mapping[str, np.ndarray]

    def where(self, chosen: Bool[np.ndarray, " n"]) -> "Rows":
        """Some of the rows."""
        return Rows(self.words, {name: column[chosen] for name, column in self.columns.items()})

    def later(self) -> "Rows":
        """The rows of slices 1..T."""
        return self.where(self.columns["slice_tested"] > 0)

    def of(self, candidates: str, subset: str) -> "Rows":
        """The rows of one kind of query."""
        says = {"candidates": candidates, "subset": subset}
        kinds = [self.columns[name] == self.words[name].index(word).as_py() for name, word in says.items()]
        return self.where(kinds[0] & kinds[1])

    def drift(self) -> "Rows | None":
        """How far each user moved in each slice, where that is known; None in older runs."""
        rows = self.of("sampled", "all")
        return rows.where(np.isfinite(rows.columns[DRIFT])) if DRIFT in rows.columns else None

    def users(self) -> pa.Array:
        """The users with a row, by name."""
        return self.words["user"].take(pa.array(np.unique(self.columns["user"]))).sort()

    def by_user(self, column: str, users: pa.Array, slices: range) -> np.ndarray:
        """A column by user and slice; 0 where there is no row, and rows of other users left out."""
        values = self.columns[column]
        spread = np.zeros((len(users), len(slices)), dtype=values.dtype)
        places = pc.fill_null(pc.index_in(self.words["user"], value_set=users), -1).to_numpy(zero_copy_only=False)
        place, at = places[self.columns["user"]], self.columns["slice_tested"] - slices.start
        wanted = place >= 0
        spread[place[wanted], at[wanted]] = values[wanted]
        return spread


@dataclass(frozen=True)
class Run:
    """One finished run."""

    folder: str  # below the reported path, with forward slashes
    config_text: str
    config: Mapping[str, Any]
    matrices: Mapping[Measure, Matrix]
    seconds: Mapping[str, float]  # wall clock by stage
    environment: Mapping[str, Any]
    releases: Ledger = ()
    trust: Trust = "central"
    journal: tuple[Told, ...] = ()  # what the method told about slices 1..T
    read_users: Callable[[], pa.Table] | None = None  # None where the run kept none
    warm_up: WarmUp | None = None  # None where the run does not tell

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def n_slices(self) -> int:
        """T: the slices after the base block."""
        return max(len(matrix.values) for matrix in self.matrices.values()) - 1

    @property
    def n_candidates(self) -> int:
        """How many items a sampled query ranks, the positive among them."""
        return 1 + int(self.settings.get("stream.n_negatives", 99))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What decides the run's numbers, seed aside, by dotted names."""
        return flat({key: value for key, value in self.config.items() if key not in NOT_SETTINGS})

    @cached_property
    def asked(self) -> Rows | None:
        """What its users were asked, A[t, t], read once whatever the page asks of it; None where the run kept none."""
        if self.read_users is None:
            return None
        table = self.read_users()
        arrays = {name: table[name].combine_chunks() for name in table.column_names}
        numbers = {name: array.indices if name in WORDS else array for name, array in arrays.items()}
        columns = {name: array.to_numpy(zero_copy_only=False) for name, array in numbers.items()}
        return Rows({name: arrays[name].dictionary.cast(pa.string()) for name in WORDS}, columns)

    def told(self, name: str) -> float:
        """The mean of a number over the slices whose log tells it; NaN where none does."""
        return mean_of(float(record[name]) for record in self.journal if is_number(record.get(name)))


def find_runs(root: Path) -> tuple[tuple[Run, ...], tuple[Unfinished, ...]]:
    """The finished and the unfinished runs at or below `root`, ordered by folder."""
    records, unfinished = find_records(root)
    return tuple(read_run(record) for record in records), unfinished


def read_run(record: Record) -> Run:
    """One finished run."""
    text, log = record.texts["config"], record.texts.get("log", "")
    config = parse_config(record.file("config"), text)
    releases, trust = _releases(record)
    return Run(
        folder=record.name,
        config_text=text,
        config=config,
        matrices=reported_matrices(record),
        seconds=record.seconds,
        environment=_environment(record),
        releases=releases,
        trust=trust,
        journal=read_journal(log),
        read_users=record.users,
        warm_up=read_warm_up(log, config.get("training", {}).get("base_epochs", 0)),
    )


def reported_matrices(record: Record) -> dict[Measure, Matrix]:
    """A[s, t] of every measure at cut-off 10, and the shares of items by popularity."""
    metric = record.metrics["metric"]
    if not pc.any(pc.is_in(metric, value_set=pa.array(METRICS))).as_py():
        where = record.path / METRICS_FILE
        raise RunFolderError(f"{where} holds no test row of {' or '.join(METRICS)}; delete its folder and run again")
    return matrices(record.metrics.filter(pc.is_in(metric, value_set=pa.array([*METRICS, *SHARES]))))


def read_journal(log: str) -> tuple[Told, ...]:
    """What log.jsonl tells of slices 1..T, by slice; a resumed run repeats a slice, and the last word counts."""
    learned = [line for line in log_lines(log) if line.get("stage") == "learn" and is_number(line.get("slice"))]
    told = {line["slice"]: line for line in learned}
    return tuple(told[index] for index in sorted(told) if index > 0)


def read_warm_up(log: str, most_epochs: int) -> WarmUp | None:
    """What was told of the warm-up, of which a run tells the same whenever it resumes; None where nothing was."""
    for line in log_lines(log):
        if line.get("stage") == "warm-up":
            epochs, steps, trace = (line.get(name) for name in ("epochs", "steps_per_epoch", "validation_ndcg10"))
            if isinstance(epochs, int) and isinstance(steps, int) and isinstance(trace, list):
                return WarmUp(epochs * steps, steps, 1 < len(trace) <= most_epochs)
    return None


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """The values of nested tables by dotted names, what is no single value as text; empty tables are left out."""
    found = {key: value for key, value in flatten(table).items() if value != {}}
    return {key: value if isinstance(value, str | int | float | None) else str(value) for key, value in found.items()}


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _releases(record: Record) -> tuple[Ledger, Trust]:
    """What the ledger holds; a run without one released nothing."""
    if "ledger" not in record.texts:
        return (), "central"
    try:
        return parse_ledger(record.texts["ledger"], record.file("ledger"))
    except DataError as problem:
        raise RunFolderError(f"{problem}; delete its folder and run again") from problem


def _environment(record: Record) -> dict[str, Any]:
    path = record.file("environment")
    try:
        found = json.loads(record.texts.get("environment", "{}"))
    except json.JSONDecodeError as problem:
        raise RunFolderError(f"{path} is not valid JSON ({problem}); delete its folder and run again") from problem
    if not isinstance(found, dict):
        raise RunFolderError(f"{path} must hold a JSON dict, found {type(found).__name__}")
    return found
