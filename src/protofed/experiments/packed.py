"""The two files of a pack: their columns, the code of the ranks, and the queries that runs of one stream share.

DATASET.queries.parquet lists the test queries of every stream once; DATASET.runs.parquet has a row per run.
"""

import hashlib
import lzma
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Bool, UInt8

from protofed.errors import RunFolderError
from protofed.experiments.evaluate import CANDIDATES, METRICS_SCHEMA
from protofed.experiments.run import TIMING_SCHEMA
from protofed.files import written_atomically

FORMAT = {b"protofed": b"pack-1"}
RUNS, QUERIES = ".runs.parquet", ".queries.parquet"
TEXTS = {"environment": "environment.json", "ledger": "ledger.json", "log": "log.jsonl"}
REPORTED = ("ndcg@10", "hr@10")
DRIFT = "drift"  # of a query's user in its slice; runs of earlier versions do not say it
# Neighbouring bytes tell nothing of each other; a large dictionary would only cost time.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 20, "lc": 0, "lp": 0, "pb": 0}]


def _many(rows: pa.Schema) -> pa.ListType:
    """A table as one value; the name is the one that reading gives, so that what was read is written the same."""
    return pa.list_(pa.field("element", pa.struct(list(rows))))


RUNS_SCHEMA = pa.schema(
    [
        ("folder", pa.string()),  # below the folder that was packed
        ("config", pa.string()),
        *((name, pa.string()) for name in TEXTS),
        ("timing", _many(TIMING_SCHEMA)),
        ("metrics", _many(METRICS_SCHEMA.remove(METRICS_SCHEMA.get_field_index("split")))),  # less what ranks tell
        ("queries", pa.string()),  # this and the next: null where the run kept no ranks
        ("ranks", pa.binary()),
    ],
    metadata=FORMAT,
)


def encoded(ranks: UInt8[np.ndarray, "kinds N"], repeat: Bool[np.ndarray, " N"]) -> bytes:
    """The ranks, compressed: each kind in the order of the kinds before it, which puts queries alike side by side."""
    known = [repeat]
    parts = []
    for column in ranks:
        parts.append(column[np.lexsort(known)].tobytes())
        known.append(column)
    return lzma.compress(b"".join(parts), filters=FILTERS)


def decoded(blob: bytes, repeat: Bool[np.ndarray, " N"]) -> UInt8[np.ndarray, "kinds N"]:
    """The ranks that `encoded` was given."""
    parts = np.frombuffer(lzma.decompress(blob), dtype=np.uint8).reshape(len(CANDIDATES), len(repeat))
    known = [repeat]
    for part in parts:
        column = np.empty_like(part)
        column[np.lexsort(known)] = part
        known.append(column)
    return np.stack(known[1:])


def numbered(ranks: pa.Table) -> pa.Table:
    """The queries behind a table of ranks: slice, user, subsets; users are numbers, in the order of their ids.

    So a draw of users by their sorted names, as a report makes it, draws the same ones from numbers.
    """
    users = ranks["user"].combine_chunks()
    numbers = pc.index_in(users, value_set=pc.unique(users).sort())
    return ranks.drop_columns(list(CANDIDATES)).set_column(1, "user", numbers).combine_chunks()


def index_name(queries: pa.Table) -> str:
    """What the queries of a stream are called: a hash of them."""
    digest = hashlib.sha256()
    for name, column in zip(queries.column_names, queries.columns, strict=True):
        digest.update(name.encode() + b"\0" + np.ascontiguousarray(column.to_numpy()).tobytes())
    return digest.hexdigest()[:12]


def by_index(queries: pa.Table) -> dict[str, pa.Table]:
    """The queries of each stream, without the columns that it does not have."""
    names = pc.unique(queries["index"]).to_pylist()
    parts = {name: queries.filter(pc.equal(queries["index"], name)).drop_columns("index") for name in names}
    return {
        name: part.select([column for column in part.column_names if part[column].null_count < max(len(part), 1)])
        for name, part in parts.items()
    }


def joined(indices: Mapping[str, pa.Table]) -> pa.Table:
    """The queries of all streams in one table; a column that a stream does not have is null there."""
    tables = [
        indices[name].add_column(0, "index", pa.array([name] * len(indices[name]), pa.string()))
        for name in sorted(indices)
    ]
    return pa.concat_tables(tables, promote_options="default")


def read_packed(path: Path) -> pa.Table:
    """A file of a pack."""
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as problem:
        reason = str(problem).splitlines()[0]
        raise RunFolderError(f"{path} cannot be read ({reason}); fetch the pack again") from problem
    found = (table.schema.metadata or {}).get(b"protofed", b"nothing").decode(errors="replace")
    if found != FORMAT[b"protofed"].decode():
        raise RunFolderError(f"{path} must be of the format pack-1, found {found}; use the protofed that packed it")
    return table


def write_packed(path: Path, table: pa.Table) -> None:
    """A file of a pack, whole or not at all."""
    with written_atomically(path) as unfinished:
        pq.write_table(
            table.combine_chunks().replace_schema_metadata(FORMAT),
            unfinished,
            compression="zstd",
            compression_level=19,
            write_statistics=False,  # they repeat whole configs
        )
