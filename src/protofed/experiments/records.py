"""Finished runs as they are read, from folders of their own; `store` reads those that share a few files."""

import contextlib
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from protofed.config import as_today
from protofed.errors import RunFolderError

TEXTS = {"config": "config.toml", "environment": "environment.json", "ledger": "ledger.json", "log": "log.jsonl"}
METRICS, USERS, RANKS = "metrics.parquet", "per_user.parquet", "ranks.parquet"
DRIFT = "drift"  # of a user in a slice; runs of earlier versions do not say it
METRIC_COLUMNS = ("slice_trained", "slice_tested", "candidates", "subset", "metric", "value", "n_queries", "n_users")
USER_COLUMNS = ("user", "slice_tested", "candidates", "subset", "n", "ndcg10_sum", "hr10_sum")
WORDS = ("user", "candidates", "subset")


@dataclass(frozen=True, slots=True)
class Record:
    """What a report reads of a finished run."""

    name: str  # its folder, below the one that was read
    path: Path  # for messages
    texts: Mapping[str, str]  # by the names in TEXTS, those that the run kept
    seconds: Mapping[str, float]  # wall clock by stage
    metrics: pa.Table  # METRIC_COLUMNS of the test parts
    users: Callable[[], pa.Table] | None  # USER_COLUMNS of A[t, t], and the drift where it is known

    def file(self, text: str) -> Path:
        """Where one of the texts is."""
        return self.path / TEXTS[text]


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A run folder without metrics; its config is empty where it cannot be read."""

    folder: str
    config: Mapping[str, Any]


def run_folders(root: Path) -> tuple[list[Path], list[Path]]:
    """The folders of finished runs at or below `root`, and those of others, in order."""
    if not root.is_dir():
        raise RunFolderError(f"no folder at {root}; give the folder that `protofed run --out` wrote to")
    folders = sorted(Path(where) for where, _, files in os.walk(root) if TEXTS["config"] in files)
    done = [folder for folder in folders if (folder / METRICS).is_file()]
    return done, [folder for folder in folders if folder not in set(done)]


def name_below(folder: Path, root: Path) -> str:
    """What a run is called by where it is."""
    below = folder.relative_to(root).as_posix()
    return root.resolve().name if below == "." else below


def read_folder(folder: Path, name: str) -> Record:
    """A finished run in its own folder."""
    timing, users = folder / "timing.parquet", folder / USERS
    metrics = read_table(folder / METRICS, (*METRIC_COLUMNS, "split"))
    return Record(
        name,
        folder,
        {text: read_text(folder / file) for text, file in TEXTS.items() if (folder / file).is_file()},
        read_seconds(timing) if timing.is_file() else {},
        metrics.filter(pc.equal(metrics["split"], "test")).drop_columns("split"),
        partial(read_users, users) if users.is_file() else None,
    )


def read_users(path: Path) -> pa.Table:
    """The rows of A[t, t] in a per_user.parquet, each word once."""
    found = read_table(path, (*USER_COLUMNS, "slice_trained"), (DRIFT,), words=WORDS)
    found = found.filter(pc.equal(found["slice_trained"], found["slice_tested"]))
    return found.drop_columns("slice_trained").unify_dictionaries().combine_chunks()


def read_unfinished(folder: Path, name: str) -> Unfinished:
    """A run that is not over."""
    try:
        return Unfinished(name, tomllib.loads(as_today((folder / TEXTS["config"]).read_text(encoding="utf-8"))))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError):
        return Unfinished(name, {})


def read_seconds(path: Path) -> dict[str, float]:
    """Wall clock by stage in a timing.parquet, all slices together."""
    table = read_table(path, ("stage", "seconds"))
    spent: dict[str, float] = {}
    for stage, seconds in zip(table["stage"].to_pylist(), table["seconds"].to_pylist(), strict=True):
        spent[stage] = spent.get(stage, 0.0) + seconds
    return spent


def read_text(path: Path) -> str:
    """A run's text."""
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as problem:
        raise RunFolderError(f"{path} is not UTF-8 text ({problem}); delete its folder and run again") from problem


def parse_config(path: Path, text: str) -> dict[str, Any]:
    """The values of a run's config, as it would be written today; data set, method and seed are there."""
    try:
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise RunFolderError(f"{path} is not valid TOML ({problem}); run again into a new folder") from problem
    for key, kind in (("dataset", str), ("method", str), ("seed", int)):
        if not isinstance(config.get(key), kind):
            raise RunFolderError(f"{path} must give {key} as {kind.__name__}, found {config.get(key)!r}; is it a run?")
    return tomllib.loads(as_today(text))


def read_table(
    path: Path, columns: Sequence[str] | None = None, optional: Sequence[str] = (), *, words: Sequence[str] = ()
) -> pa.Table:
    """A run's table, or some columns and of the optional ones those that are there; `words` are read as dictionaries.

    A damaged file or a missing column is an error that names it.
    """
    way_out = "delete its folder and run again with the same command"
    try:
        found = pq.read_schema(path).names
        wanted = found if columns is None else [*columns, *(name for name in optional if name in found)]
        missing = [name for name in wanted if name not in found]
        if not missing:
            return pq.read_table(path, columns=wanted, read_dictionary=list(words))
    except (pa.ArrowException, OSError) as problem:
        reason = str(problem).splitlines()[0]
        raise RunFolderError(f"{path} is not a readable parquet file ({reason}); {way_out}") from problem
    raise RunFolderError(f"{path} has no column {', '.join(missing)} (found {', '.join(found)}); {way_out}")


def read_json(path: Path, way_out: str) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as problem:
        raise RunFolderError(f"{path} cannot be read ({problem}); {way_out}") from problem


def log_lines(log: str) -> Iterator[Mapping[str, Any]]:
    """The records of a log.jsonl; what a kill cut off is passed over."""
    for line in log.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record
