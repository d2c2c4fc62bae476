"""SliceStream: the log cut into slices, and exactly what may be seen of it at each of them."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from protofed.config import StreamConfig
from protofed.data.interactions import InteractionLog
from protofed.seeds import user_keys
from protofed.slices.candidates import hard_negatives, query_key, sample_negatives
from protofed.slices.histories import Histories, Queries, histories, queries_at
from protofed.slices.partition import SliceBounds, partition

SUBSETS = (
    "all", "repeat", "novel", "new_item", "known_item", "new_user", "returning", "empty_history", "unseen_item",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuerySet:
    """The events of one slice's validation or test part as ranking questions, with their candidates and flags."""

    slice_index: int
    part: str
    positions: np.ndarray  # (B,) in the log
    positives: Int[Tensor, " B"]
    users: Int[Tensor, " B"]
    negatives: Int[Tensor, "B n"]  # candidates.NO_CANDIDATE pads
    hard: Int[Tensor, "B n"]  # of repeats; NO_CANDIDATE elsewhere
    n_items: int  # items seen up to the end of the part
    subsets: dict[str, np.ndarray]  # name of SUBSETS -> (B,) bool

    def __len__(self) -> int:
        return len(self.positions)


def take_questions(asked: QuerySet, places: slice) -> QuerySet:
    """Some of the questions, in their order."""
    columns = ("positions", "positives", "users", "negatives", "hard")
    subsets = {name: chosen[places] for name, chosen in asked.subsets.items()}
    return replace(asked, subsets=subsets, **{name: getattr(asked, name)[places] for name in columns})


def halves(asked: QuerySet) -> tuple[QuerySet, QuerySet]:
    """The earlier and the later half of a part's questions."""
    middle = len(asked) // 2
    return take_questions(asked, slice(None, middle)), take_questions(asked, slice(middle, None))


@dataclass(frozen=True, slots=True)
class TimeSlice:
    """What a method may learn from at slice `index`: the log up to the end of the validation part, and nothing later.

    Gradients come from `train_positions` only; the validation part selects.
    """

    index: int
    bounds: tuple[SliceBounds, ...]  # of slices 0 .. index
    past: Histories  # of all events before the end of the validation part
    times: np.ndarray
    n_train_items: int  # items seen up to the train cut: negatives and new rows come from these
    validation: QuerySet
    user_keys: np.ndarray  # of the users so far, whose numbers follow their first appearance: what draws are keyed by

    @property
    def train_positions(self) -> np.ndarray:
        return np.arange(*self.bounds[-1].part("train"))

    @property
    def all_train_positions(self) -> np.ndarray:
        """The train parts of this slice and all earlier ones."""
        return np.concatenate([np.arange(*bounds.part("train")) for bounds in self.bounds])

    def train_counts(self) -> Int[Tensor, " n"]:
        """How often each item occurs in the slice's train part."""
        items = self.past.items[self.past.place[self.train_positions]]
        return torch.from_numpy(np.bincount(items, minlength=self.n_train_items))

    def queries(self, chunk: np.ndarray, length: int) -> Queries:
        """Some validation queries, by their place in `validation`."""
        where = self.validation.positions[chunk]
        return queries_at(
            self.past, where, length=length, slice_index=self.index, n_items=self.validation.n_items, times=self.times
        )


class SliceStream:
    """A log, its slices, its candidate sets. Derived tables are computed on first use and never change."""

    def __init__(self, log: InteractionLog, config: StreamConfig | None = None) -> None:
        self.log = log
        self.config = config = config or StreamConfig()
        self.bounds = partition(
            log,
            n_slices=config.n_slices,
            base_fraction=config.base_fraction,
            edges=config.edges,
            base=config.base,
        )
        self._users = log.users.numpy().astype(np.int64)
        self._items = log.items.numpy().astype(np.int64)
        self._times = log.times.numpy()
        self._query_sets: dict[tuple[int, str], QuerySet] = {}

    @property
    def n_slices(self) -> int:
        """T: slices 1..T follow the base block."""
        return len(self.bounds) - 1

    @cached_property
    def past(self) -> Histories:
        return self._histories(len(self.log))

    @cached_property
    def items_until(self) -> np.ndarray:
        """How many items have been seen before each log position, (N + 1,)."""
        return np.concatenate([[0], np.maximum.accumulate(self._items) + 1])

    @cached_property
    def _user_keys(self) -> np.ndarray:
        return user_keys(self.log.user_ids.to_pylist())

    def n_available(self, slice_index: int) -> int:
        """Items first seen in this slice or earlier, in any part."""
        return int(self.items_until[self.bounds[slice_index].end])

    def n_train_items(self, slice_index: int) -> int:
        """Items seen up to the slice's train cut."""
        return int(self.items_until[self.bounds[slice_index].train_end])

    def slice_(self, index: int) -> TimeSlice:
        """The prefix of the log that learning at this slice may see."""
        bounds = self.bounds[index]
        past = self._histories(bounds.val_end)
        return TimeSlice(
            index=index,
            bounds=self.bounds[: index + 1],
            past=past,
            times=self._times[: bounds.val_end],
            n_train_items=self.n_train_items(index),
            validation=self.query_set(index, "val"),
            user_keys=self._user_keys[: past.n_users],
        )

    def queries(self, asked: QuerySet, chunk: np.ndarray, length: int) -> Queries:
        """Some queries of a set, without their labels."""
        return queries_at(
            self.past,
            asked.positions[chunk],
            length=length,
            slice_index=asked.slice_index,
            n_items=asked.n_items,
            times=self._times,
        )

    def query_set(self, slice_index: int, part: str) -> QuerySet:
        """The ranking questions of one part of one slice."""
        key = (slice_index, part)
        if key not in self._query_sets:
            self._query_sets[key] = self._make_query_set(slice_index, part)
        return self._query_sets[key]

    def _histories(self, end: int) -> Histories:
        columns = self._users[:end], self._items[:end], self._times[:end]
        n_users = int(self._users[:end].max()) + 1  # how many users are still to come is the future's secret
        return histories(*columns, n_users, row_order=self.config.row_order_history)

    def _make_query_set(self, slice_index: int, part: str) -> QuerySet:
        positions = np.arange(*self.bounds[slice_index].part(part))
        users, items = self._users[positions], self._items[positions]
        end = self.bounds[slice_index].part(part)[1]  # validation questions know nothing of the test part
        n_items = int(self.items_until[end])
        keys = self._keys(slice_index, positions)
        met = np.unique(self._users[:end] * n_items + self._items[:end])  # up to the part's end
        negatives = sample_negatives(keys, n_items, users, met, self.config.n_negatives)
        subsets = self._subsets(slice_index, positions)
        hard = np.full_like(negatives, -1)
        rows = np.flatnonzero(subsets["repeat"])
        own = [self._own_past(position) for position in positions[rows].tolist()]
        hard[rows] = hard_negatives([keys[row] for row in rows], own, negatives[rows], self.config.n_negatives // 2)
        return QuerySet(
            slice_index=slice_index,
            part=part,
            positions=positions,
            positives=torch.from_numpy(items),
            users=torch.from_numpy(users),
            negatives=torch.from_numpy(negatives).long(),
            hard=torch.from_numpy(hard).long(),
            n_items=n_items,
            subsets=subsets,
        )

    def _keys(self, slice_index: int, positions: np.ndarray) -> list[bytes]:
        user_ids = self.log.user_ids.take(self._users[positions]).to_pylist()
        item_ids = self.log.item_ids.take(self._items[positions]).to_pylist()
        rows = zip(user_ids, item_ids, self._times[positions].tolist(), strict=True)
        return [query_key(self.log.name, slice_index, user, item, time) for user, item, time in rows]

    def _own_past(self, position: int) -> np.ndarray:
        """The distinct items of the event's history, the event's own item left out."""
        first = self.past.start[self._users[position]]
        own = np.unique(self.past.items[first : first + self.past.before[position]])
        return np.asarray(own[own != self._items[position]])

    def _subsets(self, slice_index: int, positions: np.ndarray) -> dict[str, np.ndarray]:
        bounds = self.bounds[slice_index]
        users, items = self._users[positions], self._items[positions]
        repeat = self._repeats[positions]
        new_item = items >= self.items_until[bounds.start]
        seen_users = np.zeros(self.log.n_users, dtype=bool)
        seen_users[self._users[: bounds.start]] = True
        flags = {
            "all": np.ones(len(positions), dtype=bool),
            "repeat": repeat,
            "novel": ~repeat,
            "new_item": new_item,
            "known_item": ~new_item,
            "new_user": ~seen_users[users],
            "returning": seen_users[users],
            "empty_history": self.past.before[positions] == 0,
            "unseen_item": items >= self.items_until[bounds.train_end],
        }
        return {name: flags[name] for name in SUBSETS}

    @cached_property
    def _repeats(self) -> np.ndarray:
        """Per log position: whether the item is in the event's own history."""
        codes = self._users * self.log.n_items + self._items
        order = np.argsort(codes, kind="stable")
        first = np.ones(len(codes), dtype=bool)
        first[1:] = codes[order][1:] != codes[order][:-1]
        first_place = np.maximum.accumulate(np.where(first, np.arange(len(codes)), 0))
        first_position = np.empty(len(codes), dtype=np.int64)
        first_position[order] = order[first_place]
        earlier = self.past.place[first_position] - self.past.start[self._users]  # its rank among the user's events
        return np.asarray(earlier < self.past.before)


def slice_log(log: InteractionLog, **settings: Any) -> SliceStream:
    """The log cut into slices; keyword settings are those of StreamConfig, e.g. slice_log(log, n_slices=4)."""
    return SliceStream(log, StreamConfig(**settings))
