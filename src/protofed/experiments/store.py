"""Finished runs in a few small files: the settings and the rank of every test query are kept, the rest is computed.

DATASET.queries.parquet lists the test queries of every stream once; DATASET.runs.parquet has a row for each run, its
ranks coded beside those of an earlier run that they resemble. A store outlives the run folders it was made from: adding
runs keeps the others, and a run of the same config replaces.
"""

import hashlib
import lzma
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from jaxtyping import Float, Int

from protofed.errors import RunFolderError
from protofed.evaluation.ranking import METRICS
from protofed.experiments.evaluate import CANDIDATES, LAST_RANK, METRICS_SCHEMA, applies
from protofed.experiments.rank_code import Ranks, decoded
from protofed.experiments.records import (
    DRIFT,
    METRIC_COLUMNS,
    TEXTS,
    Record,
    Unfinished,
    name_below,
    read_folder,
    read_unfinished,
    run_folders,
)

FORMAT = {b"protofed": b"pack-2"}
RUNS, QUERIES = ".runs.parquet", ".queries.parquet"
SUMS = {"ndcg@10": "ndcg10_sum", "hr@10": "hr10_sum"}  # what a report reads of the ranks
KEPT = pa.schema([field for field in METRICS_SCHEMA if field.name != "split"])


# Lists have the name `element` that reading gives them, so that what was read is written the same.
SCHEMA = pa.schema(
    [
        ("folder", pa.string()),  # below the folder that was packed, and below the name it was given in the store
        *((name, pa.string()) for name in TEXTS),
        ("seconds", pa.map_(pa.string(), pa.float64())),  # by stage
        ("metrics", pa.list_(pa.field("element", pa.struct(list(KEPT))))),  # less what ranks tell
        ("queries", pa.string()),  # this and the next two: null where the run kept no ranks
        ("like", pa.list_(pa.field("element", pa.int32()))),  # the rows whose ranks these are coded beside
        ("ranks", pa.binary()),
    ],
    metadata=FORMAT,
)


@dataclass(frozen=True, slots=True)
class Held:
    """A run in a store, its ranks as they were."""

    folder: str
    texts: Mapping[str, str]
    seconds: Mapping[str, float]
    metrics: pa.Table  # KEPT, less what ranks tell
    queries: str | None  # the name of its stream; this and the next: None where the run kept no ranks
    ranks: Ranks | None

    @property
    def key(self) -> tuple[str, str]:
        return self.folder, self.texts["config"]


@dataclass(frozen=True, slots=True)
class Block:
    """The queries of one subset under one kind of candidates, and the (slice, user) pairs that ask them."""

    kind: int  # its place in CANDIDATES
    subset: str
    queries: Int[np.ndarray, " n"]
    pair: Int[np.ndarray, " n"]  # of each query
    first: Int[np.ndarray, " P"]  # a query of each pair
    counts: Int[np.ndarray, " P"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the queries of a stream say about every run of it."""

    blocks: tuple[Block, ...]
    users: pa.Table  # A[t, t] by user, without its sums, a block after the other
    cells: pa.Table  # the metrics of A[t, t] without metric and value
    of_cells: tuple[tuple[int, Int[np.ndarray, " _"]], ...]  # of each cell: the kind's place and the queries


def find_records(root: Path) -> tuple[tuple[Record, ...], tuple[Unfinished, ...]]:
    """The finished and the unfinished runs of a store, or those in folders at or below `root`."""
    store, below = place_of(root)
    if is_store(store):
        return tuple(read_store(store, below)), ()
    done, others = run_folders(root)
    unfinished = tuple(read_unfinished(folder, name_below(folder, root)) for folder in others)
    if not done:
        waiting = f", {len(unfinished)} unfinished" if unfinished else ""
        raise RunFolderError(
            f"{root} holds no finished run (a folder with config.toml and metrics.parquet){waiting}; "
            f"run `protofed run --out {root}/NAME` first"
        )
    return tuple(read_folder(folder, name_below(folder, root)) for folder in done), unfinished


def find_configs(root: Path) -> tuple[list[str], list[str]]:
    """The configs of finished and of unfinished runs, and nothing else of them."""
    store, below = place_of(root)
    if is_store(store):
        tables = [read_file(path).select(["folder", "config"]).to_pylist() for path in files_of(store)]
        return [row["config"] for table in tables for row in table if row["folder"].startswith(below)], []
    done, others = run_folders(root)
    texts = [[(f / TEXTS["config"]).read_text("utf-8", "replace") for f in own] for own in (done, others)]
    return texts[0], texts[1]


def place_of(path: Path) -> tuple[Path, str]:
    """The store that a path means, and how the folders of its runs begin: results/overall is `overall/` in results."""
    if not path.exists() and is_store(path.parent):
        return path.parent, f"{path.name}/"
    return path, ""


def is_store(folder: Path) -> bool:
    """Whether a folder is a store, by the names in it."""
    return next(folder.glob(f"*{RUNS}"), None) is not None


def files_of(store: Path) -> list[Path]:
    """The files with the runs of a store, one for each data set."""
    return sorted(store.glob(f"*{RUNS}"))


def queries_at(path: Path) -> Path:
    """The file with the queries of the runs in a file."""
    return path.with_name(path.name.removesuffix(RUNS) + QUERIES)


def read_store(store: Path, below: str = "") -> Iterator[Record]:
    """The runs of a store whose folders begin so."""
    held = {path: read_held(path, below) for path in files_of(store)}
    if not any(held.values()):
        folders = (folder for path in held for folder in read_file(path)["folder"].to_pylist())
        known = ", ".join(sorted({folder.partition("/")[0] for folder in folders}))
        raise RunFolderError(f"{store} holds no run below {below}; there are {known}")
    taken = Counter(run.folder for runs in held.values() for run in runs)
    for path, runs in held.items():
        streams = read_streams(path, [run.queries for run in runs if run.queries])
        asked = {name: ask(name, queries) for name, queries in streams.items()}
        for run in runs:
            name = run.folder.removeprefix(below)
            if taken[run.folder] > 1:  # packed from several places
                name = f"{name}-{hashlib.sha256(run.texts['config'].encode()).hexdigest()[:8]}"
            yield record(run, name, store, asked.get(run.queries or ""))


def read_held(path: Path, below: str = "") -> list[Held]:
    """The runs in a file whose folders begin so, in its order."""
    table = read_file(path)
    metrics = [pa.Table.from_struct_array(cell.values) for cell in table["metrics"]]
    rows = table.drop_columns("metrics").to_pylist()
    streams = read_streams(path, table["queries"].drop_null().to_pylist())

    @cache
    def ranks_of(place: int) -> Ranks | None:
        row = rows[place]
        if row["ranks"] is None:
            return None
        try:
            beside = [ranks for other in row["like"] if (ranks := ranks_of(other)) is not None]
            return decoded(row["ranks"], streams[row["queries"]]["repeat"].to_numpy(), beside)
        except (lzma.LZMAError, ValueError, IndexError) as problem:
            told = f"the ranks of {row['folder']} are damaged ({problem})"
            raise RunFolderError(f"{path}: {told}; fetch the pack again") from problem

    found = []
    for place, row in enumerate(rows):
        ranks = ranks_of(place)  # in the order of the file, so that no chain of runs gets long
        if row["folder"].startswith(below):
            texts = {text: row[text] for text in TEXTS if row[text] is not None}
            found.append(Held(row["folder"], texts, dict(row["seconds"]), metrics[place], row["queries"], ranks))
    return found


def read_streams(path: Path, needed: Iterable[str]) -> dict[str, pa.Table]:
    """The queries of the streams that the runs in a file belong to."""
    names, at = sorted(set(needed)), queries_at(path)
    found = by_stream(read_file(at)) if names else {}
    if missing := [name for name in names if name not in found]:
        raise RunFolderError(f"{at} lacks the queries {', '.join(missing)}; fetch the pack again")
    return {name: found[name] for name in names}


def record(run: Held, name: str, store: Path, asked: Asked | None) -> Record:
    """A run as a report reads it; what follows from the ranks is computed from them."""
    metrics, users = run.metrics.select(METRIC_COLUMNS), None
    if asked is not None and run.ranks is not None:
        metrics = pa.concat_tables([metrics, *(diagonal(asked, metric, run.ranks) for metric in SUMS)])
        users = partial(by_user, asked, run.ranks)
    return Record(name, store / name, run.texts, run.seconds, metrics, users)


def gains(metric: str) -> Float[np.ndarray, " ranks"]:
    """What each rank up to LAST_RANK is worth; rank 0 is none and worth NaN."""
    value, k = METRICS[metric]
    worth: np.ndarray = value(torch.arange(LAST_RANK + 1), k).numpy()
    worth[0] = np.nan
    return worth


def diagonal(asked: Asked, metric: str, ranks: Ranks) -> pa.Table:
    """The metrics that say A[t, t], averaged as a run does it."""
    worth = gains(metric)[ranks]
    values = [float(torch.from_numpy(worth[kind, queries]).mean()) for kind, queries in asked.of_cells]
    table = asked.cells.append_column("metric", pa.array([metric] * len(values), pa.string()))
    return table.append_column("value", pa.array(values, pa.float64())).select(METRIC_COLUMNS)


def by_user(asked: Asked, ranks: Ranks) -> pa.Table:
    """A[t, t] by user."""
    table = asked.users
    for metric, column in SUMS.items():
        worth = gains(metric)[ranks]
        sums = [np.bincount(b.pair, worth[b.kind, b.queries], len(b.counts)) for b in asked.blocks]
        table = table.append_column(column, pa.array(np.concatenate(sums), pa.float64()))
    return table


def ask(name: str, queries: pa.Table) -> Asked:
    """What the queries of a stream say about every run of it; a user is called by the stream and a padded number."""
    slices, users = (queries[column].to_numpy().astype(np.int64) for column in ("slice", "user"))
    n_users, blocks = int(users.max(initial=0)) + 1, []
    for kind, subset in ((kind, f.name) for kind in CANDIDATES for f in queries.schema if f.type == pa.bool_()):
        if applies(kind, subset):
            chosen = np.flatnonzero(queries[subset].to_numpy())
            codes = slices[chosen] * n_users + users[chosen]
            _, first, pair, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
            blocks.append(Block(CANDIDATES.index(kind), subset, chosen, pair, chosen[first], counts))
    first = np.concatenate([block.first for block in blocks])
    names = pa.array([f"{name}-{number:0{len(str(n_users))}}" for number in range(n_users)], pa.string())
    repeats = [len(block.counts) for block in blocks]
    columns = {
        "user": pa.DictionaryArray.from_arrays(pa.array(users[first].astype(np.int32)), names),
        "slice_tested": pa.array(slices[first].astype(np.int32)),
        "candidates": _words([CANDIDATES[block.kind] for block in blocks], repeats),
        "subset": _words([block.subset for block in blocks], repeats),
        "n": pa.array(np.concatenate([block.counts for block in blocks])),
    }
    if DRIFT in queries.column_names:
        columns[DRIFT] = queries[DRIFT].take(pa.array(first))
    return Asked(tuple(blocks), pa.table(columns), *_cells(blocks, slices))


def _cells(
    blocks: Sequence[Block], slices: Int[np.ndarray, " N"]
) -> tuple[pa.Table, tuple[tuple[int, np.ndarray], ...]]:
    """The cells of A[t, t] that have queries, and which those are."""
    rows, queries = [], []
    for block in blocks:
        for t in np.unique(slices[block.first]).tolist():
            own = block.queries[slices[block.queries] == t]
            about = {"slice_trained": t, "slice_tested": t, "candidates": CANDIDATES[block.kind]}
            counts = {"n_queries": len(own), "n_users": int((slices[block.first] == t).sum())}
            rows.append({**about, "subset": block.subset, **counts})
            queries.append((block.kind, own))
    schema = pa.schema([field for field in KEPT if field.name not in ("metric", "value")])
    return pa.Table.from_pylist(rows, schema=schema), tuple(queries)


def _words(words: Sequence[str], repeats: Sequence[int]) -> pa.DictionaryArray:
    return pa.array(words, pa.string()).dictionary_encode().take(pa.array(np.repeat(np.arange(len(words)), repeats)))


def by_stream(queries: pa.Table) -> dict[str, pa.Table]:
    """The queries of each stream, without the columns that it does not have."""
    names = pc.unique(queries["index"]).to_pylist()
    parts = {name: queries.filter(pc.equal(queries["index"], name)).drop_columns("index") for name in names}
    return {
        name: part.select([c for c in part.column_names if part[c].null_count < max(len(part), 1)])
        for name, part in parts.items()
    }


def read_file(path: Path) -> pa.Table:
    """A file of a store."""
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as problem:
        reason = str(problem).splitlines()[0]
        raise RunFolderError(f"{path} cannot be read ({reason}); fetch the pack again") from problem
    found = (table.schema.metadata or {}).get(b"protofed", b"nothing").decode(errors="replace")
    wanted = FORMAT[b"protofed"].decode()
    if found != wanted:
        raise RunFolderError(f"{path} must be of the format {wanted}, found {found}; use the protofed that packed it")
    return table
