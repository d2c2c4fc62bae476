"""The events of one host's users, and a slice of them: everything that a host can see of a log."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from protofed.data.interactions import InteractionLog, first_appearance
from protofed.deployment.orders import Cut
from protofed.errors import DataError
from protofed.seeds import user_keys
from protofed.slices.candidates import NO_CANDIDATE, query_key, sample_negatives
from protofed.slices.histories import histories
from protofed.slices.partition import SliceBounds
from protofed.slices.stream import QuerySet, TimeSlice


@dataclass(frozen=True, slots=True)
class Events:
    """Own users' events in time order: users numbered by their first event here, items as in the public catalogue."""

    name: str
    users: np.ndarray
    items: np.ndarray
    times: np.ndarray
    user_ids: pa.Array
    item_ids: pa.Array  # of the whole catalogue
    keys: np.ndarray  # of the users


def events_of_users(log: InteractionLog, keep: np.ndarray) -> pa.Table:
    """The rows of a log of the users that `keep` selects, by original ids: what a host's events.parquet holds."""
    rows = keep[log.users.numpy()]
    users, items = pa.array(log.users.numpy()[rows]), pa.array(log.items.numpy()[rows])
    columns = {"user": log.user_ids.take(users), "item": log.item_ids.take(items), "time": log.times.numpy()[rows]}
    return pa.table(columns)


def own_events(name: str, table: pa.Table, catalogue: pa.Array) -> Events:
    """The events of a host's table; one on an item that the public catalogue lacks is refused."""
    items = pc.index_in(table["item"].combine_chunks(), value_set=catalogue.cast(table["item"].type))
    if items.null_count:
        unknown = table["item"].filter(pc.is_null(items))[0].as_py()
        raise DataError(
            f"{name}: item {unknown!r} of a host's events is not among the catalogue's {len(catalogue):,} items; "
            "leave its events out until the model knows it"
        )
    times = table["time"].to_numpy()
    order = np.argsort(times, kind="stable")
    coded = table["user"].combine_chunks().dictionary_encode()
    users, kept = first_appearance(coded.indices.to_numpy()[order], len(coded.dictionary))
    user_ids = coded.dictionary.take(pa.array(kept))
    columns = (users.astype(np.int64), items.to_numpy()[order].astype(np.int64), times[order].astype(np.int64))
    return Events(name, *columns, user_ids, catalogue, user_keys(user_ids.to_pylist()))


def slice_of(events: Events, cut: Cut, n_negatives: int, *, row_order: bool = False) -> TimeSlice:
    """What a host's devices may learn from in a slice."""
    start, train_end, val_end = np.searchsorted(events.times, (cut.start, cut.train_end, cut.val_end)).tolist()
    users, items, times = (column[:val_end] for column in (events.users, events.items, events.times))
    n_users = int(users.max(initial=-1)) + 1
    return TimeSlice(
        index=cut.index,
        bounds=(SliceBounds(cut.index, start, train_end, val_end, val_end),),
        past=histories(users, items, times, n_users, row_order=row_order),
        times=times,
        n_train_items=cut.train_items,
        validation=questions(events, cut, np.arange(train_end, val_end), n_negatives),
        user_keys=events.keys[:n_users],
    )


def questions(events: Events, cut: Cut, positions: np.ndarray, n_negatives: int) -> QuerySet:
    """Validation events as ranking questions, against the candidates that a simulation of the whole log draws."""
    end = int(positions[-1]) + 1 if len(positions) else 0
    users, items, times = events.users[positions], events.items[positions], events.times[positions].tolist()
    user_ids, item_ids = events.user_ids.take(pa.array(users)), events.item_ids.take(pa.array(items))
    rows = zip(user_ids.to_pylist(), item_ids.to_pylist(), times, strict=True)
    keys = [query_key(events.name, cut.index, user, item, time) for user, item, time in rows]
    met = np.unique(events.users[:end] * cut.val_items + events.items[:end])
    if keys:
        negatives = torch.from_numpy(sample_negatives(keys, cut.val_items, users, met, n_negatives)).long()
    else:
        negatives = torch.full((0, n_negatives), NO_CANDIDATE)
    columns = (torch.from_numpy(items), torch.from_numpy(users), negatives, torch.full_like(negatives, NO_CANDIDATE))
    return QuerySet(cut.index, "val", positions, *columns, cut.val_items, {})
