"""Each user's events in time order, and what a query may see of them."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

PAD = -2  # an empty place at the left of a short history
BOS = -1  # the start of every history: what a user without events consists of


@dataclass(frozen=True, slots=True)
class Histories:
    """N events laid out user by user: user u owns places start[u] .. start[u + 1] - 1, in time order.

    `place` and `before` are indexed by the event's position in the log: where it lies in that layout, and how many of
    the user's events its own history holds (those with a strictly smaller timestamp).
    """

    start: np.ndarray  # (n_users + 1,)
    items: np.ndarray  # (N,) in layout order
    times: np.ndarray  # (N,) in layout order
    users: np.ndarray  # (N,) in log order
    place: np.ndarray  # (N,) in log order
    before: np.ndarray  # (N,) in log order

    @property
    def n_users(self) -> int:
        return len(self.start) - 1

    def __len__(self) -> int:
        return len(self.items)


def histories(
    users: np.ndarray, items: np.ndarray, times: np.ndarray, n_users: int, *, row_order: bool = False
) -> Histories:
    """Lay a chronological log out by user. With `row_order`, earlier rows of the same timestamp count as history."""
    order = np.argsort(users, kind="stable")
    start = np.zeros(n_users + 1, dtype=np.int64)
    np.cumsum(np.bincount(users, minlength=n_users), out=start[1:])
    place = np.empty(len(users), dtype=np.int64)
    place[order] = np.arange(len(users))
    sorted_users, sorted_times = users[order], times[order]
    if row_order or not len(users):
        first_of_instant = np.arange(len(users))
    else:
        new = np.ones(len(users), dtype=bool)
        new[1:] = (sorted_users[1:] != sorted_users[:-1]) | (sorted_times[1:] != sorted_times[:-1])
        first_of_instant = np.maximum.accumulate(np.where(new, np.arange(len(users)), 0))
    before = (first_of_instant - start[sorted_users])[place]
    return Histories(start, items[order].astype(np.int64), sorted_times.astype(np.int64), users, place, before)


def tokens_ending_at(past: Histories, users: np.ndarray, last: np.ndarray, length: int) -> Int[Tensor, "B L"]:
    """The last `length` tokens of each history that ends with the user's token `last` (0 is BOS, i the i-th event)."""
    token = last[:, None] - np.arange(length - 1, -1, -1)[None]  # (B, L)
    place = past.start[users][:, None] + token - 1
    items = past.items[np.clip(place, 0, max(len(past) - 1, 0))] if len(past) else np.full(token.shape, PAD)
    return torch.from_numpy(np.where(token > 0, items, np.where(token == 0, BOS, PAD)))


def leading_padding(tokens: Int[Tensor, "B L"]) -> int:
    """How many columns at the left hold nothing but padding; the last column is always kept."""
    real = (tokens != PAD).any(0)
    real[-1:] = True
    return int(real.int().argmax()) if len(real) else 0


@dataclass(frozen=True, slots=True)
class Queries:
    """What a method is shown when it is asked to rank: who, when, and the user's own strictly earlier events.

    The whole past of query b is past_items[offsets[b] : offsets[b + 1]], oldest first; `tokens` are its last L tokens.
    There is no label in here.
    """

    users: Int[Tensor, " B"]
    times: Int[Tensor, " B"]
    tokens: Int[Tensor, "B L"]
    offsets: Int[Tensor, " B1"]
    past_items: Int[Tensor, " M"]
    past_times: Int[Tensor, " M"]
    slice_index: int
    n_items: int  # items available, numbered 0 .. n_items - 1

    def __len__(self) -> int:
        return len(self.users)


def queries_at(
    past: Histories, positions: np.ndarray, *, length: int, slice_index: int, n_items: int, times: np.ndarray
) -> Queries:
    """The queries asked just before the events at these log positions (`times` are the log's timestamps)."""
    users, counts = past.users[positions].astype(np.int64), past.before[positions]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    ragged = np.repeat(past.start[users] - offsets[:-1], counts) + np.arange(offsets[-1])
    return Queries(
        users=torch.from_numpy(users),
        times=torch.from_numpy(times[positions].astype(np.int64)),
        tokens=tokens_ending_at(past, users, counts, length),
        offsets=torch.from_numpy(offsets),
        past_items=torch.from_numpy(past.items[ragged]),
        past_times=torch.from_numpy(past.times[ragged]),
        slice_index=slice_index,
        n_items=n_items,
    )


def trimmed(queries: Queries) -> Queries:
    """The same queries without columns that only pad: positions are counted from the right end, so nothing changes."""
    return replace(queries, tokens=queries.tokens[:, leading_padding(queries.tokens) :])


def moved(queries: Queries, device: torch.device | str) -> Queries:
    """The same queries on another device."""
    columns = ("users", "times", "tokens", "offsets", "past_items", "past_times")
    return replace(queries, **{name: getattr(queries, name).to(device) for name in columns})


def met_before(queries: Queries, which: Int[Tensor, " M"], items: Int[Tensor, " M"]) -> Bool[Tensor, " M"]:
    """Whether the past of query `which` holds the item."""
    rows = torch.repeat_interleave(torch.arange(len(queries), device=items.device), queries.offsets.diff())
    past = (rows * queries.n_items + queries.past_items).sort().values
    if not len(past):
        return torch.zeros_like(items, dtype=torch.bool)
    wanted = which * queries.n_items + items
    return (past[torch.searchsorted(past, wanted).clamp(max=len(past) - 1)] == wanted) & (items < queries.n_items)


def distinct_past(queries: Queries) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"]]:
    """Every item in each query's own past once: which query, and which item."""
    rows = torch.repeat_interleave(torch.arange(len(queries), device=queries.users.device), queries.offsets.diff())
    codes = torch.unique(rows * queries.n_items + queries.past_items)
    return codes // queries.n_items, codes % queries.n_items


def past_counts(queries: Queries, weights: Tensor | None = None) -> Tensor:
    """How often (or with what total weight) each available item occurs in each query's own past, (B, n_items)."""
    device = queries.tokens.device
    rows = torch.repeat_interleave(torch.arange(len(queries), device=device), queries.offsets.diff())
    values = torch.ones(len(rows), device=device) if weights is None else weights
    flat = torch.zeros(len(queries) * queries.n_items, device=device)
    flat.index_add_(0, rows * queries.n_items + queries.past_items, values)
    return flat.view(len(queries), queries.n_items)
