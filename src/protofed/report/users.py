"""What a run knows about its users, read or computed once whatever the page asks of it."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from protofed.experiments.records import DRIFT

SUM_COLUMN = {"ndcg@10": "ndcg10_sum", "hr@10": "hr10_sum"}
NOTHING = ("", "")


class Users:
    """The rows of A[t, t], by (candidates, subset), read on first use."""

    def __init__(self, read: Callable[[], pa.Table]) -> None:
        self.read = read

    def rows(self, candidates: str, subset: str) -> pa.Table:
        """One user and slice a row; `user` is dictionary-encoded."""
        return self._parts.get((candidates, subset), self._parts[NOTHING])

    @cached_property
    def drift(self) -> pa.Table | None:
        """How far each user moved in each slice (user, slice_tested, drift), where known; None in older runs."""
        rows = self.rows("sampled", "all")
        if DRIFT not in rows.column_names:
            return None
        return rows.select(["user", "slice_tested", DRIFT]).filter(pc.is_valid(rows[DRIFT]))

    @cached_property
    def _parts(self) -> dict[tuple[str, str], pa.Table]:
        """Neighbouring rows after one sort, so that a part is a view of the whole."""
        whole, names = self.read(), []
        code = np.zeros(len(whole), dtype=np.int64)
        for word in ("candidates", "subset"):
            column = _only_chunk(whole[word])
            names.append(column.dictionary.to_pylist())
            code = code * len(names[-1]) + column.indices.to_numpy()
        order = np.argsort(code, kind="stable")
        kinds, starts = np.unique(code[order], return_index=True)
        ends = [*starts[1:].tolist(), len(whole)][: len(kinds)]
        table = whole.drop_columns(["candidates", "subset"]).take(pa.array(order))
        parts = {
            (names[0][kind // len(names[1])], names[1][kind % len(names[1])]): table.slice(start, end - start)
            for kind, start, end in zip(kinds.tolist(), starts.tolist(), ends, strict=True)
        }
        return parts | {NOTHING: table.slice(0, 0)}


def _only_chunk(column: pa.ChunkedArray) -> pa.DictionaryArray:
    return column.chunk(0) if column.num_chunks else pa.array([], pa.dictionary(pa.int32(), pa.string()))
