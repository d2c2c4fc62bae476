"""A run's folder: one config, results that appear whole, a checkpoint that survives a kill at any point.

While a run is under way, slices/ holds the results of each finished slice and checkpoint.safetensors the newest state.
Both have checksums: whatever is not as it was written is an error before anything is computed.
metrics.parquet is written last: it is there if and only if the run is finished.
"""

import contextlib
import json
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from protofed.config import RunConfig, as_today, to_toml
from protofed.errors import DataError, RunFolderError
from protofed.experiments.records import read_text
from protofed.files import (
    UNFINISHED,
    file_checksum,
    load_tensors,
    locked,
    make_folder,
    remove_unfinished,
    save_tensors,
    write_text,
    written_atomically,
)
from protofed.privacy.ledger import Ledger, Trust, read_ledger, write_ledger
from protofed.snapshot import Snapshot

SORTED_BY = {  # the tables of a finished run, metrics last; ranks stay in the order of the queries
    "timing": ("slice", "stage"),
    "ranks": (),
    "per_user": ("user", "slice_trained", "slice_tested", "candidates", "subset"),
    "metrics": ("slice_trained", "slice_tested", "split", "candidates", "subset", "metric"),
}

LOCK, CHECKPOINT, CHECKSUMS = ".lock", "checkpoint.safetensors", "checksums.json"
EVENTS = "events"  # in environment.json: a name for the log's events
FILES = (
    *("config.toml", "environment.json", "ledger.json", "log.jsonl", CHECKPOINT),
    *(f"{name}.parquet" for name in SORTED_BY),
)


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path

    @property
    def finished(self) -> bool:
        return (self.path / "metrics.parquet").is_file()

    def table(self, name: str) -> pa.Table:
        """A finished table."""
        return pq.read_table(self.path / f"{name}.parquet")

    def log(self, record: Mapping[str, object]) -> None:
        """One more line of log.jsonl."""
        with open(self.path / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


@contextlib.contextmanager
def opened(path: Path, config: RunConfig, *, patience: float = 0.0) -> Iterator[RunFolder]:
    """The folder for this run: new, or holding the same run; locked against a second process."""
    folder, text = RunFolder(path), to_toml(config)
    _refuse_other(path, text)  # so that a folder of something else is not even given a lock
    make_folder(path)
    busy = f"another process is running in {path}; wait for it or choose another --out"
    with locked(path / LOCK, busy, patience=patience):
        _refuse_other(path, text)  # whoever held the lock before may have begun another run
        _refuse_wrong_kinds(path)
        remove_unfinished(path)
        write_text(path / "config.toml", text)
        if not folder.finished:
            make_folder(path / "slices")
            remove_unfinished(path / "slices")
        yield folder


def _refuse_other(path: Path, text: str) -> None:
    """Refuse a place that holds anything but this run, or what one that was killed has before its config."""
    written = path / "config.toml"
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"--out {path} is a file, a run needs a folder")
    if written.is_file():
        refuse_other_config(path, as_today(read_text(written)), text)
    elif path.is_dir() and any(found.name != LOCK and not found.name.endswith(UNFINISHED) for found in path.iterdir()):
        raise RunFolderError(f"--out {path} is not empty and holds no run; choose a new folder")


def refuse_other_config(path: Path, old: str, new: str) -> None:
    """Refuse a run folder whose config is not the one asked for; the message names the first difference."""
    if old == new:
        return
    pairs = zip(old.splitlines(), new.splitlines(), strict=False)
    was, now = next(((a, b) for a, b in pairs if a != b), ("another config", "this one"))
    raise RunFolderError(
        f"{path} holds another run ({was.strip()}, asked for {now.strip()}); choose a new folder or delete this one"
    )


def _refuse_wrong_kinds(path: Path) -> None:
    """Refuse a folder where a file belongs, and a file where a folder belongs, before a run works for them."""
    for name in FILES:
        if (path / name).is_dir():
            raise RunFolderError(f"{path / name} is a folder where a file belongs; remove it and run again")
    if (path / "slices").exists() and not (path / "slices").is_dir():
        raise RunFolderError(f"{path / 'slices'} is a file where a folder belongs; remove it and run again")


def refuse_other_log(folder: RunFolder, events: str) -> None:
    """Refuse to go on, or to show what is finished, with other events than the run began with."""
    began = events
    with contextlib.suppress(OSError, ValueError, AttributeError):  # none yet, or from before this was written down
        began = json.loads((folder.path / "environment.json").read_text(encoding="utf-8")).get(EVENTS, events)
    if began != events:
        raise RunFolderError(
            f"--out {folder.path} holds a run on other events: the log has changed since; choose a new folder"
        )


def describe(folder: RunFolder, environment: Mapping[str, object]) -> None:
    """Where the numbers come from, and an empty ledger of noised releases where there is none yet.

    One that is there and cannot be read is refused: it was the record of what the run has released.
    """
    write_text(folder.path / "environment.json", json.dumps(environment, indent=2) + "\n")
    path = folder.path / "ledger.json"
    if not path.is_file():
        write_ledger(path, ())
    try:
        read_ledger(path)
    except DataError as problem:
        raise RunFolderError(f"{problem}; start the run again in a new folder") from problem


def keep_ledger(folder: RunFolder, ledger: Ledger, trust: Trust) -> None:
    """Every release so far and the ones about to be made."""
    write_ledger(folder.path / "ledger.json", ledger, trust=trust)


def save_slice(folder: RunFolder, slice_index: int, tables: Mapping[str, pa.Table], state: Snapshot) -> None:
    """The results of one slice, their checksums, then the state after it; a kill in between only repeats the slice."""
    checksums = _read_checksums(folder) if slice_index and tables else {}
    for name, table in tables.items():
        part = _part(folder, name, slice_index)
        with written_atomically(part) as unfinished:
            pq.write_table(table, unfinished)
            checksums[part.name] = (slice_index, file_checksum(unfinished))
    if tables:
        write_text(folder.path / "slices" / CHECKSUMS, json.dumps(checksums, indent=0) + "\n")
    save_tensors(folder.path / CHECKPOINT, state.tensors, {"slice": str(slice_index), "outline": state.outline})


def load_checkpoint(folder: RunFolder) -> tuple[int, Snapshot] | None:
    """The newest finished slice and the state after it, or None where there is none yet."""
    path = folder.path / CHECKPOINT
    if not path.is_file():
        return None
    try:
        tensors, notes = load_tensors(path)
        return int(notes["slice"]), Snapshot(tensors, notes["outline"])
    except Exception as problem:
        reason = " ".join(str(problem).split())
        raise RunFolderError(f"{path} cannot be read ({reason}); delete it to start the run again") from problem


def _read_checksums(folder: RunFolder) -> dict[str, tuple[int, str]]:
    """Of every table in slices/: the slice it is of, and its checksum when it was written."""
    path = folder.path / "slices" / CHECKSUMS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): (int(slice_index), str(checksum)) for name, (slice_index, checksum) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError) as problem:
        way_out = f"delete {folder.path / CHECKPOINT} to start the run again"
        raise RunFolderError(f"{path} cannot be read ({problem}); {way_out}") from problem


def check_slices(folder: RunFolder, until: int) -> None:
    """Refuse tables of the slices up to `until` that are gone or are not as they were written."""
    way_out = f"delete {folder.path / CHECKPOINT} to start the run again"
    for name, (slice_index, written) in _read_checksums(folder).items():
        path = folder.path / "slices" / name
        if slice_index > until:
            continue  # the slice is repeated
        if not path.is_file():
            raise RunFolderError(f"{path} is missing; {way_out}")
        if file_checksum(path) != written:
            raise RunFolderError(f"{path} is damaged: its checksum does not match; {way_out}")


def finish(folder: RunFolder, n_slices: int) -> None:
    """Join the slices' tables, metrics last, and clear what is no longer needed."""
    for name, keys in SORTED_BY.items():
        parts = [_part(folder, name, index) for index in range(n_slices + 1)]
        if name == "ranks" and not all(part.is_file() for part in parts):
            continue  # its first slices are from before ranks were kept
        joined = pa.concat_tables((pq.read_table(part) for part in parts), promote_options="default")
        if keys:
            joined = joined.sort_by([(key, "ascending") for key in keys])
        with written_atomically(folder.path / f"{name}.parquet") as unfinished:
            pq.write_table(joined, unfinished, compression="zstd")
    shutil.rmtree(folder.path / "slices")


def _part(folder: RunFolder, name: str, slice_index: int) -> Path:
    return folder.path / "slices" / f"{name}-{slice_index}.parquet"


def environment(device: torch.device, command: str, seed: int) -> dict[str, object]:
    """Where the numbers came from."""
    versions = {}
    for package in ("protofed", "torch", "numpy", "scipy", "pyarrow", "safetensors", "polars", "dp-accounting"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "command": command,
        "seed": seed,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else (platform.processor() or "cpu"),
        "threads": torch.get_num_threads(),
        "versions": versions,
    }
