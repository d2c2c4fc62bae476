"""Vectors that were made elsewhere: a .npy file in the order of the item table, or a parquet file with identifiers."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from protofed.errors import DataError
from protofed.features.content import Modality, modality

STATISTIC = re.compile(
    r"(^|_)(n|num|count|counts|freq|frequency|popularity|rank|rating|ratings|stars|score|reviews?|clicks?|views?|sales|"
    r"sold|purchases?|checkins?|first_seen|last_seen|trend|trending|ctr|conversion)(_|$)",
)  # of a column's name: it counts or rates events


def read_vectors(file: Path, items: pa.Table) -> Modality:
    """One vector for each row of the item table; items that a parquet file lacks have none."""
    if file.suffix not in (".npy", ".parquet"):
        raise DataError(f"{file}: vectors come as .npy or .parquet, found {file.suffix or 'no ending'}; convert it")
    if not file.is_file():
        raise DataError(f"{file}: there is no such file; name one by --vectors")
    found, present = _npy(file, items) if file.suffix == ".npy" else _parquet(file, items)
    with np.errstate(over="ignore"):
        values = found.astype(np.float32)  # what is too large for it becomes infinite
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values).all(1))[0])
        raise DataError(
            f"{file}: vectors must hold finite numbers, the one of item {items['item'][row].as_py()!r} holds NaN, "
            "infinity or more than 3e38; leave the item out"
        )
    return modality("vectors", torch.from_numpy(values), torch.from_numpy(present))


def _npy(file: Path, items: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    try:
        values = np.load(file, allow_pickle=False)
    except Exception as broken:  # whatever reading a header as Python ends in
        reason = " ".join(str(broken).split())[:200]
        raise DataError(f"{file}: must be a whole .npy file, found {reason}; write it again") from broken
    if values.ndim != 2 or values.dtype.kind not in "fiu" or len(values) != items.num_rows:
        raise DataError(
            f"{file}: needs one row of numbers for each of the {items.num_rows:,} items of the table, in its order, "
            f"found {values.dtype} of shape {values.shape}; write it again, or as parquet with a column `item`"
        )
    return values, np.ones(len(values), dtype=bool)


def _parquet(file: Path, items: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    try:
        table = pq.read_table(file)
        names = [name for name in table.column_names if name != "item"]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as broken:
        reason = " ".join(str(broken).split())[:200]
        raise DataError(f"{file}: must be a whole parquet file, found {reason}; write it again") from broken
    if "item" not in table.column_names or not names:
        raise DataError(f"{file}: needs the column `item` and vectors, found {', '.join(table.column_names)}; rename")
    refuse_statistics(file, names)
    ids = table["item"].combine_chunks().cast(pa.string())
    if len(ids.unique()) != len(ids):
        twice = next(each["values"] for each in ids.value_counts().to_pylist() if each["counts"] > 1)
        raise DataError(f"{file}: each item must be there once, found {twice!r} twice; drop one of its rows")
    rows = pc.index_in(items["item"].combine_chunks().cast(pa.string()), value_set=ids)
    found = np.concatenate([_numbers(table[name], name, file) for name in names], axis=1)
    present = pc.is_valid(rows).to_numpy(zero_copy_only=False)
    values = np.where(present[:, None], found[pc.fill_null(rows, 0).to_numpy()], 0.0)
    return values, present


def _numbers(column: pa.ChunkedArray, name: str, file: Path) -> np.ndarray:
    """A column of numbers, or of vectors that are equally long, as a matrix."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        numbers: np.ndarray = column.to_numpy().astype(np.float64)[:, None]
        return numbers
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise DataError(f"{file}: {name} must hold numbers or vectors, found {kind}; drop it")
    lengths = pc.unique(pc.list_value_length(column)).to_pylist()
    if len(lengths) != 1 or not lengths[0]:
        shown = ", ".join("null" if n is None else str(n) for n in lengths[:3])
        raise DataError(f"{file}: the vectors of {name} must be equally long, found lengths {shown}; drop those rows")
    matrix: np.ndarray = pc.list_flatten(column).to_numpy().astype(np.float64).reshape(len(column), -1)
    return matrix


def refuse_statistics(file: Path, names: list[str]) -> None:
    """Refuse columns that are named like counts or ratings of events: a catalogue does not know what people will do."""
    told = [name for name in names if STATISTIC.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())]
    if told:
        raise DataError(
            f"{file}: {told[0]} is named like a statistic of events, which would tell of the future; drop the column, "
            "or rename it if it is none"
        )
