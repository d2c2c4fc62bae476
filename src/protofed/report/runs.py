"""Run folders: found below a path, read and checked."""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int64

from protofed.config import as_today
from protofed.errors import DataError, ProtoFedError, RunFolderError
from protofed.evaluation.exposure import EVENTS, PLACES
from protofed.privacy.ledger import Ledger, Release, Trust, read_ledger
from protofed.report.journal import Record, WarmUp, read_journal, read_warm_up
from protofed.report.parquet import read_parquet
from protofed.report.users import FILE, UserFile

METRICS = ("ndcg@10", "hr@10")
SHARES = (*PLACES.values(), *EVENTS.values())  # of A[t, t] alone; runs of earlier versions have none
Measure = tuple[str, str, str]  # candidates, subset, metric


@dataclass(frozen=True, slots=True)
class Matrix:
    """A[s, t] of one measure: row s is the slice tested, column t the last slice trained; NaN without queries."""

    values: Float[np.ndarray, "S S"]
    n_queries: Int64[np.ndarray, "S S"]

    @property
    def diagonal(self) -> Float[np.ndarray, " T"]:
        """A[t, t] for t = 1..T."""
        return np.diagonal(self.values)[1:]

    @property
    def diagonal_queries(self) -> Int64[np.ndarray, " T"]:
        """How many queries each A[t, t], t = 1..T, is the mean of."""
        return np.diagonal(self.n_queries)[1:]


@dataclass(frozen=True, slots=True)
class Run:
    """One finished run."""

    folder: str  # below the reported path, with forward slashes
    path: Path
    config_text: str
    config: Mapping[str, Any]
    matrices: Mapping[Measure, Matrix]
    seconds: Mapping[str, float]  # wall clock by stage
    environment: Mapping[str, Any]
    ledger: tuple[Mapping[str, Any], ...]
    releases: Ledger = ()  # the same releases, for pricing
    trust: Trust = "central"
    journal: tuple[Record, ...] = ()  # what the method told about slices 1..T
    users: UserFile | None = None  # None where the run kept none
    warm_up: WarmUp | None = None  # None where the run does not tell

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def n_slices(self) -> int:
        """T: the slices after the base block."""
        return max(len(matrix.values) for matrix in self.matrices.values()) - 1


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A run folder without metrics; its config is empty where it cannot be read."""

    folder: str
    config: Mapping[str, Any]


def find_runs(root: Path) -> tuple[tuple[Run, ...], tuple[Unfinished, ...]]:
    """The finished and the unfinished runs at or below `root`, ordered by folder."""
    if not root.is_dir():
        raise ProtoFedError(f"no folder at {root}; give the folder that `protofed run --out` wrote to")
    folders = sorted(Path(where) for where, _, files in os.walk(root) if "config.toml" in files)
    done = [folder for folder in folders if (folder / "metrics.parquet").is_file()]
    runs = tuple(read_run(folder, _name(folder, root)) for folder in done)
    unfinished = tuple(_read_unfinished(folder, _name(folder, root)) for folder in folders if folder not in set(done))
    if not runs:
        waiting = f", {len(unfinished)} unfinished" if unfinished else ""
        raise ProtoFedError(
            f"{root} holds no finished run (a folder with config.toml and metrics.parquet){waiting}; "
            f"run `protofed run --out {root}/NAME` first"
        )
    return runs, unfinished


def read_run(folder: Path, name: str) -> Run:
    """One finished run folder."""
    text = _read_text(folder / "config.toml")
    config = _config(folder / "config.toml", text)
    releases, trust = _releases(folder / "ledger.json")
    return Run(
        folder=name,
        path=folder,
        config_text=text,
        config=config,
        matrices=read_matrices(folder / "metrics.parquet"),
        seconds=_seconds(folder / "timing.parquet"),
        environment=_json(folder / "environment.json", dict),
        ledger=tuple(_in_words(release) for release in releases),
        releases=releases,
        trust=trust,
        journal=read_journal(folder / "log.jsonl"),
        users=UserFile(folder / FILE) if (folder / FILE).is_file() else None,
        warm_up=read_warm_up(folder / "log.jsonl", config.get("training", {}).get("base_epochs", 0)),
    )


def read_matrices(path: Path) -> dict[Measure, Matrix]:
    """A[s, t] of every measure at cut-off 10 on the test parts, and the shares of items by popularity."""
    columns = ["slice_trained", "slice_tested", "split", "candidates", "subset", "metric", "value", "n_queries"]
    table = read_parquet(path, columns)
    wanted = pc.is_in(table["metric"], value_set=pa.array([*METRICS, *SHARES]))
    table = table.filter(pc.and_(pc.equal(table["split"], "test"), wanted))
    if not pc.any(pc.is_in(table["metric"], value_set=pa.array(METRICS))).as_py():
        raise RunFolderError(f"{path} holds no test row of {' or '.join(METRICS)}; delete its folder and run again")
    tested, trained, value, n = (
        table[column].to_numpy() for column in ("slice_tested", "slice_trained", "value", "n_queries")
    )
    size = int(max(tested.max(), trained.max())) + 1
    measures = list(zip(*(table[column].to_pylist() for column in ("candidates", "subset", "metric")), strict=True))
    place = {measure: index for index, measure in enumerate(sorted(set(measures)))}
    where = np.fromiter((place[measure] for measure in measures), dtype=np.int64, count=len(measures))
    values = np.full((len(place), size, size), np.nan)
    values[where, tested, trained] = np.where(n > 0, value, np.nan)
    counts = np.zeros((len(place), size, size), dtype=np.int64)
    counts[where, tested, trained] = n
    return {measure: Matrix(values[index], counts[index]) for measure, index in place.items()}


def _name(folder: Path, root: Path) -> str:
    below = folder.relative_to(root).as_posix()
    return root.resolve().name if below == "." else below


def _read_unfinished(folder: Path, name: str) -> Unfinished:
    try:
        return Unfinished(name, tomllib.loads(as_today((folder / "config.toml").read_text(encoding="utf-8"))))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError):
        return Unfinished(name, {})


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise RunFolderError(f"{path} cannot be read as UTF-8 text ({problem})") from problem


def _config(path: Path, text: str) -> dict[str, Any]:
    try:
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise RunFolderError(f"{path} is not valid TOML ({problem}); run again into a new folder") from problem
    for key, kind in (("dataset", str), ("method", str), ("seed", int)):
        if not isinstance(config.get(key), kind):
            raise RunFolderError(f"{path} must give {key} as {kind.__name__}, found {config.get(key)!r}; is it a run?")
    return tomllib.loads(as_today(text))


def _seconds(path: Path) -> dict[str, float]:
    if not path.is_file():
        return {}
    table = read_parquet(path, ["stage", "seconds"])
    seconds: dict[str, float] = {}
    for stage, spent in zip(table["stage"].to_pylist(), table["seconds"].to_pylist(), strict=True):
        seconds[stage] = seconds.get(stage, 0.0) + spent
    return seconds


def _releases(path: Path) -> tuple[Ledger, Trust]:
    """What the ledger holds; a folder without one released nothing."""
    if not path.is_file():
        return (), "central"
    try:
        return read_ledger(path)
    except DataError as problem:
        raise RunFolderError(f"{problem}; delete its folder and run again") from problem


def _in_words(release: Release) -> dict[str, Any]:
    return {key: value for key, value in asdict(release).items() if value is not None}


def _json(path: Path, kind: type) -> Any:
    if not path.is_file():
        return kind()
    try:
        document = json.loads(_read_text(path))
    except json.JSONDecodeError as problem:
        raise RunFolderError(f"{path} is not valid JSON ({problem}); delete its folder and run again") from problem
    if not isinstance(document, kind):
        raise RunFolderError(f"{path} must hold a JSON {kind.__name__}, found {type(document).__name__}")
    return document
