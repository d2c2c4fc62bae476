"""InteractionLog: who met what, when, in chronological order."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from protofed.errors import DataError

END_OF_2100 = 4_133_980_799
STEP = 1 << 17  # rows handled at once: few enough to stay in the cache, and whole columns would cost too much memory


@dataclass(frozen=True, slots=True)
class InteractionLog:
    """A chronological log of N events.

    Users and items are numbered in the order of their first event, so the items seen before any instant are always a
    prefix 0..n-1 of the numbering. `user_ids[u]` and `item_ids[i]` give the original identifiers.
    Events with the same timestamp keep the order of the rows they came from.
    """

    name: str
    users: Int[Tensor, " N"]  # int32
    items: Int[Tensor, " N"]  # int32
    times: Int[Tensor, " N"]  # int64, unix seconds UTC
    user_ids: pa.Array
    item_ids: pa.Array
    ratings: Tensor | None = None  # float32
    events: pa.Array | None = None  # dictionary-encoded event names
    sessions: Tensor | None = None  # int64, unique within a user

    def __len__(self) -> int:
        return len(self.times)

    @property
    def n_users(self) -> int:
        return len(self.user_ids)

    @property
    def n_items(self) -> int:
        return len(self.item_ids)

    @property
    def n_instants(self) -> int:
        """How many distinct timestamps there are."""
        return int((self.times[1:] != self.times[:-1]).sum()) + 1 if len(self) else 0


def check_seconds(times: np.ndarray, where: str, way_out: str = "") -> None:
    """Refuse timestamps that cannot be unix seconds: negative ones, and those after the year 2100."""
    way_out = f", {way_out}" if way_out else ""
    if len(times) and int(times.min()) < 0:
        raise DataError(
            f"{where}: timestamps must be unix seconds since 1970, found the negative {int(times.min())}; "
            f"drop or repair those rows{way_out}"
        )
    if len(times) and int(times.max()) > END_OF_2100:
        raise DataError(
            f"{where}: timestamps must be unix seconds before the year 2101, found {int(times.max())}; "
            f"they look like milliseconds: divide them by 1000{way_out}"
        )


def chronological(times: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """The stable order of rows by time (None where they are in order already), and the times in that order."""
    if np.all(times[1:] >= times[:-1]):
        return None, times
    low, row_bits = int(times.min()), len(times).bit_length()
    if (int(times.max()) - low).bit_length() + row_bits > 63:
        order = np.argsort(times, kind="stable")
        return order, times[order]
    # One integer holds time and row, so the keys are distinct and the fastest sort is as good as a stable one.
    keys, in_order = np.empty_like(times), np.empty_like(times)

    def join(rows: slice) -> None:
        piece = np.subtract(times[rows], low, out=keys[rows])
        piece <<= row_bits
        piece += np.arange(rows.start, rows.start + len(piece))

    def part(rows: slice) -> None:
        piece = np.right_shift(keys[rows], row_bits, out=in_order[rows])
        piece += low
        keys[rows] &= (1 << row_bits) - 1

    steps = [slice(start, start + STEP) for start in range(0, len(times), STEP)]  # each piece stays in the cache
    with ThreadPoolExecutor(2) as both:
        list(both.map(join, steps))
        keys.sort()
        list(both.map(part, steps))
    return keys, in_order


def first_appearance(codes: np.ndarray, n_codes: int) -> tuple[np.ndarray, np.ndarray]:
    """Renumber codes by first appearance: the new code of each row, and the old code of each new one."""
    rows = np.int32 if len(codes) < 2**31 else np.int64
    first: np.ndarray = np.full(n_codes, len(codes), dtype=rows)
    for end in range(len(codes), 0, -STEP):  # backwards, so that the last write, which wins, is the earliest row
        start = max(end - STEP, 0)
        first[codes[start:end][::-1]] = np.arange(end - 1, start - 1, -1, dtype=rows)
    old_of_new = codes[np.sort(first[first < len(codes)])]
    new_of_old = np.empty(n_codes, dtype=np.int32)
    new_of_old[old_of_new] = np.arange(len(old_of_new), dtype=np.int32)
    return np.take(new_of_old, codes, mode="clip"), old_of_new  # unchecked: faster


def integer_codes(values: np.ndarray) -> tuple[np.ndarray, pa.Array]:
    """Codes of integer identifiers, and the identifier of each code (some of which no row may use)."""
    low, high = int(values.min()), int(values.max())
    if values.dtype.itemsize < 4:  # 100 - -100 does not fit into 8 bits
        values = values.astype(np.int32)
    if high - low < 4 * len(values) + STEP:  # dense enough: the identifier itself is the code
        return values - low, pa.array(low + np.arange(high - low + 1, dtype=np.uint64 if high >= 2**63 else np.int64))
    known = np.unique(values)
    return np.searchsorted(known, values), pa.array(known)


def from_codes(
    name: str,
    users: np.ndarray,
    items: np.ndarray,
    times: np.ndarray,
    user_ids: pa.Array,
    item_ids: pa.Array,
    *,
    ratings: np.ndarray | None = None,
    events: pa.Array | None = None,
    sessions: np.ndarray | None = None,
) -> InteractionLog:
    """Sort rows of any order (stable by time) and number users and items by first appearance.

    `users` and `items` index into `user_ids` and `item_ids`; identifiers that no row uses are dropped.
    """
    if not len(times):
        raise DataError(f"{name}: a log needs at least one event, found none")
    times = np.require(times, np.int64, ["C", "W"])  # writable, as tensors must be
    order, times = chronological(times)
    if order is not None:
        users, items = users[order], items[order]
    with ThreadPoolExecutor(2) as both:
        columns = both.map(first_appearance, (users, items), (len(user_ids), len(item_ids)))
        (users, kept_users), (items, kept_items) = columns

    def sorted_(column: np.ndarray | None) -> np.ndarray | None:
        return column if column is None or order is None else column[order]

    ratings, sessions = sorted_(ratings), sorted_(sessions)
    return InteractionLog(
        name=name,
        users=torch.from_numpy(users),
        items=torch.from_numpy(items),
        times=torch.from_numpy(times),
        user_ids=user_ids.take(pa.array(kept_users)),
        item_ids=item_ids.take(pa.array(kept_items)),
        ratings=None if ratings is None else torch.from_numpy(np.require(ratings, np.float32, ["C", "W"])),
        events=events if events is None or order is None else events.take(pa.array(order)),
        sessions=None if sessions is None else torch.from_numpy(np.require(sessions, np.int64, ["C", "W"])),
    )


def from_columns(
    name: str, users: Sequence[object] | pa.Array, items: Sequence[object] | pa.Array, times: Sequence[int] | np.ndarray
) -> InteractionLog:
    """A log from three parallel columns of original identifiers and unix seconds, in any order."""
    user_codes, item_codes = (pa.array(column).dictionary_encode() for column in (users, items))
    return from_codes(
        name,
        user_codes.indices.to_numpy(),
        item_codes.indices.to_numpy(),
        np.asarray(times, dtype=np.int64),
        user_codes.dictionary,
        item_codes.dictionary,
    )


def select(log: InteractionLog, keep: Bool[Tensor, " N"]) -> InteractionLog:
    """The rows where `keep` is true, users and items numbered anew."""
    mask = keep.numpy()
    return from_codes(
        log.name,
        log.users.numpy()[mask],
        log.items.numpy()[mask],
        log.times.numpy()[mask],
        log.user_ids,
        log.item_ids,
        ratings=None if log.ratings is None else log.ratings.numpy()[mask],
        events=None if log.events is None else log.events.filter(pa.array(mask)),
        sessions=None if log.sessions is None else log.sessions.numpy()[mask],
    )


def renamed(log: InteractionLog, name: str) -> InteractionLog:
    """The same events under another name."""
    return replace(log, name=name)


def fingerprint(log: InteractionLog) -> str:
    """A name for the events of a log."""
    found = hashlib.sha256(log.name.encode())
    for column in (log.users, log.items, log.times):
        found.update(column.numpy().tobytes())
    for ids in (log.user_ids, log.item_ids):
        found.update(repr(ids.to_pylist()).encode())
    return found.hexdigest()[:16]
