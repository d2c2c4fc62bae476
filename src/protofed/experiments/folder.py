"""A run's folder: one config, results that appear whole, a checkpoint that survives a kill at any point.

While a run is under way, slices/ holds the results of each finished slice and checkpoint.safetensors the newest state.
metrics.parquet is written last: it is there if and only if the run is finished.
"""

import contextlib
import fcntl
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
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from protofed.config import RunConfig, from_toml, to_toml
from protofed.errors import ConfigError, RunFolderError
from protofed.files import remove_unfinished, write_text, written_atomically
from protofed.privacy.ledger import Ledger, Trust, write_ledger

SORTED_BY = {  # the tables of a finished run, metrics last; ranks stay in the order of the queries
    "timing": ("slice", "stage"),
    "ranks": (),
    "per_user": ("user", "slice_trained", "slice_tested", "candidates", "subset"),
    "metrics": ("slice_trained", "slice_tested", "split", "candidates", "subset", "metric"),
}


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
def opened(path: Path, config: RunConfig) -> Iterator[RunFolder]:
    """The folder for this run: new, or holding the same run; locked against a second process."""
    folder = RunFolder(path)
    written, text = path / "config.toml", to_toml(config)
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"--out {path} is a file, a run needs a folder")
    if written.is_file():
        _refuse_other(written, text)
    elif path.is_dir() and any(path.iterdir()):
        raise RunFolderError(f"--out {path} is not empty and holds no run; choose a new folder")
    path.mkdir(parents=True, exist_ok=True)
    with open(path / ".lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            raise RunFolderError(
                f"another process is running in {path}; wait for it or choose another --out"
            ) from problem
        remove_unfinished(path)
        (path / "slices").mkdir(exist_ok=True)
        remove_unfinished(path / "slices")
        write_text(written, text)
        yield folder


def _refuse_other(written: Path, text: str) -> None:
    old = written.read_text(encoding="utf-8")
    with contextlib.suppress(ConfigError):  # an older folder lacks the settings that came later, at their defaults
        old = to_toml(from_toml(old))
    differing = [(a, b) for a, b in zip(old.splitlines(), text.splitlines(), strict=False) if a != b]
    if old != text:
        was, now = differing[0] if differing else ("another config", "this one")
        raise RunFolderError(
            f"--out {written.parent} holds another run ({was.strip()}, asked for {now.strip()}); choose a new folder"
        )


def describe(folder: RunFolder, environment: Mapping[str, object]) -> None:
    """Where the numbers come from, and an empty ledger of noised releases where there is none yet."""
    write_text(folder.path / "environment.json", json.dumps(environment, indent=2) + "\n")
    if not (folder.path / "ledger.json").is_file():
        write_ledger(folder.path / "ledger.json", ())


def keep_ledger(folder: RunFolder, ledger: Ledger, trust: Trust) -> None:
    """Every release so far and the ones about to be made."""
    write_ledger(folder.path / "ledger.json", ledger, trust=trust)


def save_slice(
    folder: RunFolder, slice_index: int, tables: Mapping[str, pa.Table], state: Mapping[str, Tensor]
) -> None:
    """The results of one slice, then the state after it; a kill in between only repeats the slice."""
    for name, table in tables.items():
        with written_atomically(_part(folder, name, slice_index)) as unfinished:
            pq.write_table(table, unfinished)
    with written_atomically(folder.path / "checkpoint.safetensors") as unfinished:
        save_file(dict(state), unfinished, metadata={"slice": str(slice_index)})


def load_checkpoint(folder: RunFolder) -> tuple[int, dict[str, Tensor]] | None:
    """The newest finished slice and the state after it, or None where there is none yet."""
    path = folder.path / "checkpoint.safetensors"
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return int(file.metadata()["slice"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as problem:
        raise RunFolderError(f"{path} cannot be read ({problem}); delete it to start the run again") from problem


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
    packages = ("protofed", "torch", "numpy", "scipy", "pyarrow", "safetensors", "polars", "dp-accounting")
    versions = {}
    for package in packages:
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
