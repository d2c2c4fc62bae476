"""The tables of a bench folder: every metric of every finished run in one file, one line per run in another."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from protofed.config import RunConfig, read_toml
from protofed.errors import ConfigError, RunFolderError
from protofed.experiments.evaluate import METRICS_SCHEMA
from protofed.experiments.records import log_lines, read_json, read_seconds, read_table
from protofed.files import WAIT, locked, written_atomically
from protofed.methods.labels import run_label
from protofed.privacy.ledger import read_ledger

FOLDERS = "*/*/*/seed-*/metrics.parquet"  # data set / method / variant / seed
IDENTITY = [(name, pa.string()) for name in ("dataset", "preset", "method", "variant", "label")] + [
    ("seed", pa.int64())
]
NARROW = {"value": pa.float32(), "n_queries": pa.int32(), "n_users": pa.int32()}
RESULTS_SCHEMA = pa.schema(IDENTITY + [(f.name, NARROW.get(f.name, f.type)) for f in METRICS_SCHEMA])
TEXT, WHOLE, REAL = pa.string(), pa.int64(), pa.float64()
RUNS_SCHEMA = pa.schema(
    [
        *IDENTITY,
        *((name, TEXT) for name in ("folder", "trust", "releases")),  # these two and delta: null where nothing left
        *((name, REAL) for name in ("delta", "warm_up_seconds", "learn_seconds", "evaluate_seconds")),
        *((name, WHOLE) for name in ("warm_up_epochs", "warm_up_steps_per_epoch", "threads")),
        *((name, TEXT) for name in ("device", "torch", "command", "config_sha256")),
    ]
)


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished run of the bench."""

    path: Path
    variant: str
    config: RunConfig

    @property
    def identity(self) -> dict[str, object]:
        """The columns that name the run in both tables."""
        config = self.config
        names = (config.dataset, config.preset, config.method, self.variant, run_label(config), config.seed)
        return dict(zip((name for name, _ in IDENTITY), names, strict=True))


def finished_runs(out: Path) -> tuple[Finished, ...]:
    """Every finished run below the bench folder, by data set, method, variant and seed."""
    found = (_finished(path.parent) for path in out.glob(FOLDERS))
    return tuple(sorted(found, key=lambda r: (r.config.dataset, r.config.method, r.variant, r.config.seed)))


def write_tables(out: Path) -> None:
    """results.parquet and runs.parquet, each whole; they depend on the finished runs alone.

    The lock makes whoever writes last see what others finished before.
    """
    busy = f"another bench has been writing the tables of {out} for {WAIT:g} s; end it or choose another --out"
    with locked(out / ".tables.lock", busy, patience=WAIT):
        runs = finished_runs(out)
        with (
            written_atomically(out / "results.parquet") as parquet,
            pq.ParquetWriter(parquet, RESULTS_SCHEMA, compression="zstd") as rows,
        ):
            for run in runs:  # one after the other: a large grid never has to fit into memory
                rows.write_table(results_of(run))
        with written_atomically(out / "runs.parquet") as parquet:
            level = pa.Table.from_pylist([run_row(run, out) for run in runs], schema=RUNS_SCHEMA)
            pq.write_table(level, parquet, compression="zstd")


def results_of(run: Finished) -> pa.Table:
    """The run's metrics with the columns that name it."""
    metrics = read_table(run.path / "metrics.parquet", METRICS_SCHEMA.names)
    named = [pa.repeat(pa.scalar(run.identity[name], kind), len(metrics)) for name, kind in IDENTITY]
    return pa.table([*named, *metrics.columns], names=RESULTS_SCHEMA.names).cast(RESULTS_SCHEMA)


def run_row(run: Finished, out: Path) -> dict[str, object]:
    """What there is to say about a run as a whole."""
    environment = read_json(run.path / "environment.json", "delete its folder and run again")
    return {
        **run.identity,
        "folder": run.path.relative_to(out).as_posix(),
        **released(run),
        **seconds(run.path),
        **_warm_up(run.path / "log.jsonl"),
        "device": environment.get("device"),
        "threads": environment.get("threads"),
        "torch": environment.get("versions", {}).get("torch"),
        "command": environment.get("command"),
        "config_sha256": hashlib.sha256((run.path / "config.toml").read_bytes()).hexdigest(),
    }


def released(run: Finished) -> dict[str, object]:
    """What ε is computed from: the whole ledger as JSON, its trust and δ."""
    ledger, trust = read_ledger(run.path / "ledger.json")
    releases = json.dumps([asdict(release) for release in ledger])
    return {"trust": trust, "releases": releases, "delta": run.config.privacy.delta} if ledger else {}


def seconds(folder: Path) -> dict[str, float]:
    """Wall clock by stage."""
    spent = read_seconds(folder / "timing.parquet").items()
    named = {f"{stage.replace('-', '_')}_seconds": value for stage, value in spent}
    return {key: value for key, value in named.items() if key in RUNS_SCHEMA.names}


def _finished(folder: Path) -> Finished:
    try:
        return Finished(folder, unquote(folder.parent.name), read_toml(folder / "config.toml"))
    except ConfigError as problem:
        raise RunFolderError(f"{folder / 'config.toml'}: {problem}; delete the folder and run again") from problem


def _warm_up(log: Path) -> dict[str, object]:
    """How the backbone was trained; a resumed run says it again, the last word counts."""
    lines = log_lines(log.read_text(encoding="utf-8", errors="replace")) if log.is_file() else ()
    told = ([line for line in lines if line.get("stage") == "warm-up"] or [{}])[-1]
    return {"warm_up_epochs": told.get("epochs"), "warm_up_steps_per_epoch": told.get("steps_per_epoch")}
