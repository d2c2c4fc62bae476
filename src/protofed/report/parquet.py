"""Columns of a run's parquet files; a damaged file or a missing column is one clear line."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from protofed.errors import RunFolderError


def read_parquet(
    path: Path, columns: Sequence[str], optional: Sequence[str] = (), *, words: Sequence[str] = ()
) -> pa.Table:
    """Some columns, and of the optional ones those that are there; `words` are read as dictionaries."""
    way_out = "delete its folder and run again with the same command"
    try:
        found = pq.read_schema(path).names
        missing = [column for column in columns if column not in found]
        if not missing:
            extra = [column for column in optional if column in found]
            return pq.read_table(path, columns=[*columns, *extra], read_dictionary=list(words))
    except (pa.ArrowException, OSError) as problem:
        reason = str(problem).splitlines()[0]
        raise RunFolderError(f"{path} is not a readable parquet file ({reason}); {way_out}") from problem
    raise RunFolderError(f"{path} has no column {', '.join(missing)} (found {', '.join(found)}); {way_out}")
