"""Many finished runs as a few small files: what a report reads of each, and the rank of every test query.

A pack outlives the run folders it was made from: packing more runs adds to it, and a run of the same config replaces.
"""

import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from protofed.config import as_today
from protofed.errors import RunFolderError
from protofed.evaluation.ranking import METRICS
from protofed.experiments.evaluate import CANDIDATES, METRICS_SCHEMA, RANKS_SCHEMA
from protofed.experiments.packed import (
    DRIFT,
    QUERIES,
    REPORTED,
    RUNS,
    RUNS_SCHEMA,
    TEXTS,
    by_index,
    encoded,
    index_name,
    joined,
    numbered,
    read_packed,
    write_packed,
)
from protofed.experiments.run import TIMING_SCHEMA
from protofed.experiments.tidy import WAIT, read_table
from protofed.files import locked, make_folder, remove_unfinished
from protofed.progress import Progress, silent

OFF_DIAGONAL = ("sampled/all", "sampled/novel", "full/all", "full/novel")  # whose ndcg@10 is kept for s ≠ t too


@dataclass(frozen=True, slots=True)
class Packed:
    """What a call did to a pack."""

    runs: int  # put in by this call
    without_ranks: int  # of those
    repeated: int  # left out because an earlier folder holds the same config, or the pack does and with ranks
    unfinished: int  # left out because the run is not over
    held: int  # runs in the pack now
    n_bytes: int  # of the pack now


@dataclass(frozen=True, slots=True)
class Source:
    """A finished run folder that is to be packed."""

    path: Path
    name: str  # below the folder that is packed
    config: str

    @property
    def dataset(self) -> str:
        where = self.path / "config.toml"
        try:
            found = tomllib.loads(self.config).get("dataset")
        except tomllib.TOMLDecodeError as problem:
            raise RunFolderError(f"{where} is not valid TOML ({problem}); run again into a new folder") from problem
        if not isinstance(found, str):
            raise RunFolderError(f"{where} must give dataset as str, found {found!r}; is it a run?")
        return found

    @property
    def has_ranks(self) -> bool:
        return (self.path / "ranks.parquet").is_file()


def pack(root: Path, out: Path, progress: Progress = silent) -> Packed:
    """Every finished run at or below `root` added to the pack at `out`."""
    found, unfinished = sources(root)
    if out.exists() and not out.is_dir():
        raise RunFolderError(f"a pack is a folder, but {out} is a file")
    if out.resolve() == root.resolve():
        raise RunFolderError(f"the pack cannot lie at {root}, where its runs are; choose another folder")
    by_dataset: dict[str, list[Source]] = {}
    for source in found:
        by_dataset.setdefault(source.dataset, []).append(source)
    added: list[Source] = []
    make_folder(out)
    busy = f"another process has been packing into {out} for {WAIT:g} s; wait for it or choose another folder"
    with locked(out / ".lock", busy, patience=WAIT):
        remove_unfinished(out)
        for done, (dataset, own) in enumerate(sorted(by_dataset.items())):
            added += add(out, dataset, own)
            progress("pack", done + 1, len(by_dataset), dataset)
        files = [path for path in out.iterdir() if path.name.endswith((RUNS, QUERIES))]
        held = sum(pq.read_metadata(path).num_rows for path in files if path.name.endswith(RUNS))
    without = sum(not source.has_ranks for source in added)
    n_bytes = sum(path.stat().st_size for path in files)
    return Packed(len(added), without, len(found) - len(added), unfinished, held, n_bytes)


def sources(root: Path) -> tuple[list[Source], int]:
    """The finished runs at or below a folder, ordered by folder, and how many others are not finished."""
    if not root.is_dir():
        raise RunFolderError(f"no folder at {root}; give the folder that `protofed run --out` wrote to")
    folders = sorted(Path(where) for where, _, files in os.walk(root) if "config.toml" in files)
    done = [folder for folder in folders if (folder / "metrics.parquet").is_file()]
    if not done:
        raise RunFolderError(f"{root} holds no finished run (a folder with config.toml and metrics.parquet)")
    found = [Source(folder, _name(folder, root), _text(folder / "config.toml") or "") for folder in done]
    return found, len(folders) - len(done)


def add(out: Path, dataset: str, own: Sequence[Source]) -> list[Source]:
    """The runs of one data set put into its two files; those of them that are in it now."""
    runs_at, queries_at = (out / f"{quote(dataset, safe='')}{ending}" for ending in (RUNS, QUERIES))
    held = read_packed(runs_at) if runs_at.is_file() else RUNS_SCHEMA.empty_table()
    indices = by_index(read_packed(queries_at)) if queries_at.is_file() else {}
    configs = [as_today(text) for text in held["config"].to_pylist()]
    ranked = {config for config, blob in zip(configs, held["queries"].to_pylist(), strict=True) if blob is not None}
    chosen = choose(own, ranked)
    rows = [held.filter(pa.array([config not in chosen for config in configs], pa.bool_()))]
    for source in chosen.values():
        row, ranks = packed_run(source)
        rows.append(row)
        name = row["queries"][0].as_py()
        if ranks is not None and DRIFT not in indices.get(name, ranks).column_names:
            indices[name] = queries_of(source, ranks)
    runs = pa.concat_tables(rows).sort_by([("folder", "ascending"), ("config", "ascending")])
    needed = set(runs["queries"].drop_null().to_pylist())
    if indices:
        write_packed(queries_at, joined(indices))  # before the runs that need it, with all that the old ones need
    write_packed(runs_at, runs)
    if needed and needed < set(indices):
        write_packed(queries_at, joined({name: indices[name] for name in needed}))
    return list(chosen.values())


def choose(own: Sequence[Source], ranked: set[str]) -> dict[str, Source]:
    """One folder per config: the first that has ranks, else the first; none without them for a run held with them."""
    chosen: dict[str, Source] = {}
    for source in sorted(own, key=lambda source: not source.has_ranks):
        config = as_today(source.config)
        if source.has_ranks or config not in ranked:
            chosen.setdefault(config, source)
    return chosen


def packed_run(source: Source) -> tuple[pa.Table, pa.Table | None]:
    """A run's row, and the ranks in it where it kept them."""
    timing_at, ranks_at = source.path / "timing.parquet", source.path / "ranks.parquet"
    timing = read_table(timing_at, TIMING_SCHEMA) if timing_at.is_file() else TIMING_SCHEMA.empty_table()
    metrics = reported(read_table(source.path / "metrics.parquet", METRICS_SCHEMA), with_ranks=source.has_ranks)
    ranks = read_table(ranks_at, RANKS_SCHEMA) if source.has_ranks else None
    columns = [
        pa.array([source.name], pa.string()),
        pa.array([source.config], pa.string()),
        *(pa.array([_text(source.path / file)], pa.string()) for file in TEXTS.values()),
        _as_list(timing).cast(RUNS_SCHEMA.field("timing").type),
        _as_list(metrics).cast(RUNS_SCHEMA.field("metrics").type),
        pa.array([None if ranks is None else index_name(numbered(ranks))], pa.string()),
        pa.array([None if ranks is None else encoded(*_columns(ranks))], pa.binary()),
    ]
    return pa.table(columns, schema=RUNS_SCHEMA), ranks


def queries_of(source: Source, ranks: pa.Table) -> pa.Table:
    """The queries that a run answered, with the drift of their users where the run says it."""
    queries, users_at = numbered(ranks), source.path / "per_user.parquet"
    if not users_at.is_file() or DRIFT not in pq.read_schema(users_at).names:
        return queries
    return queries.append_column(DRIFT, query_drift(ranks, read_table(users_at)))


def query_drift(ranks: pa.Table, users: pa.Table) -> pa.Array:
    """The drift of each query's user in its slice; null where it is not known."""
    at_test = pc.equal(users["slice_trained"], users["slice_tested"])
    whole = pc.and_(pc.equal(users["candidates"], "sampled"), pc.equal(users["subset"], "all"))
    rows = users.filter(pc.and_(at_test, whole)).select(["user", "slice_tested", DRIFT]).to_pydict()
    known = dict(zip(zip(rows["user"], rows["slice_tested"], strict=True), rows[DRIFT], strict=True))
    asked = zip(ranks["user"].to_pylist(), ranks["slice"].to_pylist(), strict=True)
    return pa.array([known.get(key) for key in asked], pa.float64())


def reported(metrics: pa.Table, *, with_ranks: bool) -> pa.Table:
    """The rows of test parts that a report reads; with the ranks at hand, less those of A[t, t] that follow from them.

    A metric of A[t, t] that no rank tells is always kept.
    """
    metric, pairs = metrics["metric"], pc.binary_join_element_wise(metrics["candidates"], metrics["subset"], "/")
    dropped = [name for name in METRICS if with_ranks or name not in REPORTED]
    on = pc.invert(pc.is_in(metric, value_set=pa.array(dropped)))
    off = pc.and_(pc.is_in(pairs, value_set=pa.array(OFF_DIAGONAL)), pc.equal(metric, "ndcg@10"))
    diagonal = pc.equal(metrics["slice_tested"], metrics["slice_trained"])
    return metrics.filter(pc.and_(pc.equal(metrics["split"], "test"), pc.if_else(diagonal, on, off))).drop_columns(
        "split"
    )


def _columns(ranks: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    return np.stack([ranks[kind].to_numpy() for kind in CANDIDATES]), ranks["repeat"].to_numpy()


def _as_list(table: pa.Table) -> pa.ListArray:
    """All rows of a table as one value."""
    columns = [column.combine_chunks() for column in table.columns]
    rows = pa.StructArray.from_arrays(columns, fields=list(table.schema))
    return pa.ListArray.from_arrays(pa.array([0, len(table)], pa.int32()), rows)


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode() if path.is_file() else None
    except (OSError, UnicodeDecodeError) as problem:
        raise RunFolderError(f"{path} cannot be read as UTF-8 text ({problem})") from problem


def _name(folder: Path, root: Path) -> str:
    below = folder.relative_to(root).as_posix()
    return root.resolve().name if below == "." else below
