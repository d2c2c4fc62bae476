"""What a run knows about its users, read once whatever the page asks of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool

from protofed.experiments.records import DRIFT, WORDS

SUM_COLUMN = {"ndcg@10": "ndcg10_sum", "hr@10": "hr10_sum"}


@dataclass(frozen=True, slots=True)
class Rows:
    """What users were asked in a slice and how it was answered, a row for each user and slice."""

    words: Mapping[str, pa.Array]  # what the numbers in some columns stand for, among them the users' names
    columns: Mapping[str, np.ndarray]

    def where(self, chosen: Bool[np.ndarray, " n"]) -> "Rows":
        """Some of the rows."""
        return Rows(self.words, {name: column[chosen] for name, column in self.columns.items()})

    def says(self, column: str, word: str) -> Bool[np.ndarray, " n"]:
        """Which rows have the word in a column."""
        return np.asarray(self.columns[column] == self.words[column].index(word).as_py())

    def users(self) -> pa.Array:
        """The users with a row."""
        return self.words["user"].take(pa.array(np.unique(self.columns["user"])))

    def by_user(self, column: str, users: pa.Array, slices: range) -> np.ndarray:
        """A column by user and slice; 0 where there is no row, and rows of other users left out."""
        values = self.columns[column]
        spread = np.zeros((len(users), len(slices)), dtype=values.dtype)
        places = pc.fill_null(pc.index_in(self.words["user"], value_set=users), -1).to_numpy(zero_copy_only=False)
        place, at = places[self.columns["user"]], self.columns["slice_tested"] - slices.start
        wanted = place >= 0
        spread[place[wanted], at[wanted]] = values[wanted]
        return spread


class Users:
    """The rows of A[t, t], read on first use."""

    def __init__(self, read: Callable[[], pa.Table]) -> None:
        self.read = read

    def rows(self, candidates: str, subset: str) -> Rows:
        """The rows of one kind of query, in the order of the file."""
        return self._all.where(self._all.says("candidates", candidates) & self._all.says("subset", subset))

    @cached_property
    def drift(self) -> Rows | None:
        """How far each user moved in each slice, where that is known; None in older runs."""
        rows = self.rows("sampled", "all")
        return rows.where(np.isfinite(rows.columns[DRIFT])) if DRIFT in rows.columns else None

    @cached_property
    def _all(self) -> Rows:
        table = self.read()
        arrays = {name: table[name].combine_chunks() for name in table.column_names}
        numbers = {name: array.indices if name in WORDS else array for name, array in arrays.items()}
        columns = {name: array.to_numpy(zero_copy_only=False) for name, array in numbers.items()}
        return Rows({name: arrays[name].dictionary.cast(pa.string()) for name in WORDS}, columns)
