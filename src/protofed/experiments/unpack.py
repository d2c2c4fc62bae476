"""Run folders from a pack: the files that a report reads; what follows from the ranks is computed from them."""

import contextlib
import lzma
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Bool, Float, Int, UInt8

from protofed.errors import RunFolderError
from protofed.evaluation.ranking import METRICS
from protofed.experiments.evaluate import CANDIDATES, LAST_RANK, METRICS_SCHEMA, applies
from protofed.experiments.packed import DRIFT, QUERIES, REPORTED, RUNS, TEXTS, by_index, decoded, read_packed

SUMS = {"ndcg@10": "ndcg10_sum", "hr@10": "hr10_sum"}


@dataclass(frozen=True, slots=True)
class Block:
    """The queries of one subset under one kind of candidates, and the (slice, user) pairs that ask them."""

    kind: str
    subset: str
    queries: Int[np.ndarray, " n"]
    pair: Int[np.ndarray, " n"]  # of each query
    first: Int[np.ndarray, " P"]  # a query of each pair
    slices: Int[np.ndarray, " P"]
    users: Int[np.ndarray, " P"]
    counts: Int[np.ndarray, " P"]


@dataclass(frozen=True, slots=True)
class Index:
    """All that runs of one stream share of their tables: who asked what, when."""

    repeat: Bool[np.ndarray, " N"]
    blocks: tuple[Block, ...]
    users: pa.Table  # per_user.parquet without its sums, a block after the other
    cells: pa.Table  # metrics.parquet of A[t, t] without metric and value
    asked: tuple[tuple[int, Int[np.ndarray, " _"]], ...]  # of each cell: the kind's place and the queries


def is_pack(folder: Path) -> bool:
    """Whether a folder is a pack, by the names in it."""
    return next(folder.glob(f"*{RUNS}"), None) is not None


@contextlib.contextmanager
def readable(folder: Path, *, users: bool = True) -> Iterator[Path]:
    """The folder itself, or if it is a pack, one with its runs that lasts as long as the block."""
    if not is_pack(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="protofed-") as into:
        unpack(folder, Path(into), users=users)
        yield Path(into)


def unpack(pack: Path, into: Path, *, users: bool = True) -> None:
    """Every run of a pack as a folder below `into`; without users, per_user.parquet is left out."""
    tables = {path: read_packed(path) for path in sorted(pack.glob(f"*{RUNS}"))}
    taken = Counter(name for runs in tables.values() for name in runs["folder"].to_pylist())
    for path, runs in tables.items():
        indices = indices_of(path.with_name(path.name.removesuffix(RUNS) + QUERIES), runs)
        for place, name in enumerate(runs["folder"].to_pylist()):
            run = runs.slice(place, 1)
            if taken[name] > 1:  # packed from several places
                name = f"{name}-{sha256(run['config'][0].as_py().encode()).hexdigest()[:8]}"
            write_run(into / checked(name, path), run, indices, users=users)


def checked(name: str, path: Path) -> PurePosixPath:
    """A folder's name, if it stays below where it is put."""
    below = PurePosixPath(name)
    if below.is_absolute() or ".." in below.parts or not below.parts:
        raise RunFolderError(f"{path} names a folder outside of the pack, {name!r}; fetch the pack again")
    return below


def indices_of(path: Path, runs: pa.Table) -> dict[str, Index]:
    """The index of every stream that the runs belong to."""
    needed = set(runs["queries"].drop_null().to_pylist())
    found = by_index(read_packed(path)) if needed else {}
    if needed - set(found):
        raise RunFolderError(f"{path} lacks the queries {', '.join(sorted(needed - set(found)))}; fetch the pack again")
    return {name: index_of(name, found[name]) for name in sorted(needed)}


def index_of(name: str, queries: pa.Table) -> Index:
    """What the queries of a stream say about every run of it; a user is called by the stream and a number."""
    slices, users = (queries[column].to_numpy().astype(np.int64) for column in ("slice", "user"))
    subsets = [field.name for field in queries.schema if field.type == pa.bool_()]
    blocks = tuple(
        _block(kind, subset, np.flatnonzero(queries[subset].to_numpy()), slices, users)
        for kind in CANDIDATES
        for subset in subsets
        if applies(kind, subset)
    )
    asked = _users(name, blocks)
    if DRIFT in queries.column_names:
        first = np.concatenate([block.first for block in blocks])
        asked = asked.append_column(DRIFT, queries[DRIFT].take(pa.array(first)))
    cells, of_cells = _cells(blocks, slices)
    return Index(queries["repeat"].to_numpy(), blocks, asked, cells, of_cells)


def write_run(folder: Path, run: pa.Table, indices: Mapping[str, Index], *, users: bool) -> None:
    """The files of one run, from its row."""
    folder.mkdir(parents=True, exist_ok=True)
    for column, file in {"config": "config.toml", **TEXTS}.items():
        text = run[column][0].as_py()
        if text is not None:
            (folder / file).write_text(text, encoding="utf-8", newline="")
    pq.write_table(_rows(run["timing"]), folder / "timing.parquet")
    kept = _rows(run["metrics"])
    metrics = [kept.append_column("split", pa.array(["test"] * len(kept), pa.string())).select(METRICS_SCHEMA.names)]
    index = indices.get(run["queries"][0].as_py())
    if index is not None:
        ranks = ranks_of(run, index)
        worth = {metric: gains(metric)[ranks] for metric in REPORTED}  # (kinds, N) each
        metrics += [diagonal(index, metric, worth[metric]) for metric in REPORTED]
        if users:
            write_users(folder / "per_user.parquet", index, worth)
    pq.write_table(pa.concat_tables(metrics), folder / "metrics.parquet")


def ranks_of(run: pa.Table, index: Index) -> UInt8[np.ndarray, "kinds N"]:
    """The ranks of every query of a run."""
    try:
        return decoded(run["ranks"][0].as_py(), index.repeat)
    except (lzma.LZMAError, ValueError) as problem:
        found = f"the ranks of {run['folder'][0]} are damaged ({problem})"
        raise RunFolderError(f"{found}; fetch the pack again") from problem


def gains(metric: str) -> Float[np.ndarray, " ranks"]:
    """What each rank up to LAST_RANK is worth; rank 0 is none and worth NaN."""
    value, k = METRICS[metric]
    worth: np.ndarray = value(torch.arange(LAST_RANK + 1), k).numpy()
    worth[0] = np.nan
    return worth


def diagonal(index: Index, metric: str, worth: Float[np.ndarray, "kinds N"]) -> pa.Table:
    """The rows of metrics.parquet that say A[t, t], averaged as a run does it."""
    values = [float(torch.from_numpy(worth[kind, queries]).mean()) for kind, queries in index.asked]
    table = index.cells.append_column("metric", pa.array([metric] * len(values), pa.string()))
    return table.append_column("value", pa.array(values, pa.float64())).select(METRICS_SCHEMA.names)


def write_users(path: Path, index: Index, worth: Mapping[str, Float[np.ndarray, "kinds N"]]) -> None:
    """per_user.parquet of A[t, t]."""
    table = index.users
    for metric, column in SUMS.items():
        sums = [
            np.bincount(block.pair, worth[metric][CANDIDATES.index(block.kind), block.queries], len(block.counts))
            for block in index.blocks
        ]
        table = table.append_column(column, pa.array(np.concatenate(sums), pa.float64()))
    plain = {"store_schema": False, "write_statistics": False}  # words are read as strings, and all of the file is read
    pq.write_table(table, path, compression="zstd", compression_level=1, **plain)


def _block(kind: str, subset: str, chosen: np.ndarray, slices: np.ndarray, users: np.ndarray) -> Block:
    n_users = int(users.max(initial=0)) + 1
    codes = slices[chosen] * n_users + users[chosen]
    pairs, first, pair, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    return Block(kind, subset, chosen, pair, chosen[first], pairs // n_users, pairs % n_users, counts)


def _users(name: str, blocks: Sequence[Block]) -> pa.Table:
    """The rows of per_user.parquet; padded numbers sort as the ids did that they stand for."""
    users, slices, counts = (
        np.concatenate([getattr(block, part) for block in blocks]) for part in ("users", "slices", "counts")
    )
    n_users = int(users.max(initial=0)) + 1
    names = pa.array([f"{name}-{number:0{len(str(n_users))}}" for number in range(n_users)], pa.string())
    tested = pa.array(slices.astype(np.int32))
    places = np.repeat(np.arange(len(blocks)), [len(block.counts) for block in blocks])
    return pa.table(
        {
            "user": pa.DictionaryArray.from_arrays(pa.array(users.astype(np.int32)), names),
            "slice_trained": tested,
            "slice_tested": tested,
            "candidates": _words([block.kind for block in blocks]).take(pa.array(places)),
            "subset": _words([block.subset for block in blocks]).take(pa.array(places)),
            "n": pa.array(counts),
        }
    )


def _cells(
    blocks: Sequence[Block], slices: Int[np.ndarray, " N"]
) -> tuple[pa.Table, tuple[tuple[int, Int[np.ndarray, " _"]], ...]]:
    """The cells of A[t, t] that have queries, and which those are."""
    rows, asked = [], []
    for block in blocks:
        for t in np.unique(block.slices).tolist():
            queries = block.queries[slices[block.queries] == t]
            n_users = int((block.slices == t).sum())
            about = {"slice_trained": t, "slice_tested": t, "split": "test", "n_queries": len(queries)}
            rows.append(about | {"candidates": block.kind, "subset": block.subset, "n_users": n_users})
            asked.append((CANDIDATES.index(block.kind), queries))
    without = [METRICS_SCHEMA.get_field_index(name) for name in ("value", "metric")]
    schema = METRICS_SCHEMA.remove(max(without)).remove(min(without))
    return pa.Table.from_pylist(rows, schema=schema), tuple(asked)


def _words(words: Sequence[str]) -> pa.DictionaryArray:
    return pa.array(words, pa.string()).dictionary_encode()


def _rows(cell: pa.ChunkedArray) -> pa.Table:
    """The table that is the only value of a column."""
    return pa.Table.from_struct_array(cell.combine_chunks().flatten())
