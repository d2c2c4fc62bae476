"""Finished runs as a report uses them: read from their records and checked."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from protofed.errors import DataError, RunFolderError
from protofed.evaluation.exposure import EVENTS, PLACES
from protofed.experiments.matrices import Matrix, Measure, matrices
from protofed.experiments.records import METRICS as METRICS_FILE
from protofed.experiments.records import Record, Unfinished, parse_config
from protofed.experiments.store import find_records
from protofed.privacy.ledger import Ledger, Trust, parse_ledger
from protofed.report.journal import Told, WarmUp, read_journal, read_warm_up
from protofed.report.users import Users

METRICS = ("ndcg@10", "hr@10")
SHARES = (*PLACES.values(), *EVENTS.values())  # of A[t, t] alone; runs of earlier versions have none


@dataclass(frozen=True, slots=True)
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
    users: Users | None = None  # None where the run kept none
    warm_up: WarmUp | None = None  # None where the run does not tell

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def n_slices(self) -> int:
        """T: the slices after the base block."""
        return max(len(matrix.values) for matrix in self.matrices.values()) - 1


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
        users=Users(record.users) if record.users is not None else None,
        warm_up=read_warm_up(log, config.get("training", {}).get("base_epochs", 0)),
    )


def reported_matrices(record: Record) -> dict[Measure, Matrix]:
    """A[s, t] of every measure at cut-off 10, and the shares of items by popularity."""
    metric = record.metrics["metric"]
    if not pc.any(pc.is_in(metric, value_set=pa.array(METRICS))).as_py():
        where = record.path / METRICS_FILE
        raise RunFolderError(f"{where} holds no test row of {' or '.join(METRICS)}; delete its folder and run again")
    return matrices(record.metrics.filter(pc.is_in(metric, value_set=pa.array([*METRICS, *SHARES]))))


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
