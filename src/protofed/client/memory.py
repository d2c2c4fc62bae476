"""What devices remember of their users' own events; nothing of it ever leaves them."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from protofed.slices.histories import Histories, histories


@dataclass(frozen=True, slots=True)
class Memory:
    """The events of U users, user by user, oldest first: user u owns places offsets[u] .. offsets[u + 1] - 1."""

    offsets: Int[Tensor, " U1"]
    items: Int[Tensor, " M"]
    times: Int[Tensor, " M"]

    @property
    def counts(self) -> Int[Tensor, " U"]:
        """How many events each user has."""
        return self.offsets.diff()


@dataclass(frozen=True, slots=True)
class NewEvents:
    """What U users did since their memories end, and from which of their own events on a slice learns."""

    memory: Memory
    first: Int[Tensor, " U"]  # counted from 0 over the whole memory; beyond its end: there is nothing to learn from


def no_memory(n: int) -> Memory:
    """The memory of n users who have done nothing."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return Memory(torch.zeros(n + 1, dtype=torch.int64), nothing, nothing)


def gather_places(starts: Int[Tensor, " U"], counts: Int[Tensor, " U"]) -> Int[Tensor, " M"]:
    """The places starts[u] .. starts[u] + counts[u] - 1 of all users, one user after the other."""
    before = counts.cumsum(0) - counts
    return torch.repeat_interleave(starts - before, counts) + torch.arange(int(counts.sum()))


def offsets_of(counts: Int[Tensor, " U"]) -> Int[Tensor, " U1"]:
    """Where each user's events begin, and where the last one's end."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def select_events(memory: Memory, users: Int[Tensor, " n"]) -> Memory:
    """The memories of some of the users."""
    counts = memory.counts[users]
    places = gather_places(memory.offsets[users], counts)
    return Memory(offsets_of(counts), memory.items[places], memory.times[places])


def append_events(memory: Memory, more: Memory) -> Memory:
    """Each user's events followed by the user's new ones."""
    counts = memory.counts + more.counts
    offsets = offsets_of(counts)
    items = torch.empty(int(offsets[-1]), dtype=torch.int64)
    times = torch.empty_like(items)
    old, new = gather_places(offsets[:-1], memory.counts), gather_places(offsets[:-1] + memory.counts, more.counts)
    for kept, first, second in ((items, memory.items, more.items), (times, memory.times, more.times)):
        kept[old], kept[new] = first, second
    return Memory(offsets, items, times)


def replace_events(memory: Memory, users: Int[Tensor, " n"], part: Memory) -> Memory:
    """The memory with these users' events replaced by those of `part`."""
    counts = memory.counts.index_copy(0, users, part.counts)
    offsets, stay = offsets_of(counts), torch.ones(len(counts), dtype=torch.bool)
    stay[users] = False
    others = stay.nonzero()[:, 0]
    items = torch.empty(int(offsets[-1]), dtype=torch.int64)
    times = torch.empty_like(items)
    for whose, source, chosen in ((others, memory, others), (users, part, torch.arange(len(users)))):
        to = gather_places(offsets[whose], counts[whose])
        at = gather_places(source.offsets[chosen], source.counts[chosen])
        items[to], times[to] = source.items[at], source.times[at]
    return Memory(offsets, items, times)


def as_histories(memory: Memory, *, row_order: bool = False) -> Histories:
    """The memories as histories, whose log positions are places in the memory."""
    counts = memory.counts
    users = torch.repeat_interleave(torch.arange(len(counts)), counts).numpy()
    return histories(users, memory.items.numpy(), memory.times.numpy(), len(counts), row_order=row_order)


def events_between(
    past: Histories, users: Int[Tensor, " n"], first: Int[Tensor, " n"], end: Int[Tensor, " n"]
) -> Memory:
    """Of each user's own events in a log those from its number `first` to before `end`, counted from 0."""
    counts = (end - first).clamp(min=0)
    places = gather_places(torch.from_numpy(past.start)[users] + first, counts).numpy()
    items, times = torch.from_numpy(past.items[places]), torch.from_numpy(past.times[places])
    return Memory(offsets_of(counts), items, times)


def events_until(past: Histories, position: int) -> Int[Tensor, " N"]:
    """How many events each user of a log has before a log position."""
    counted: np.ndarray = np.bincount(past.users[:position], minlength=past.n_users)
    return torch.from_numpy(counted.astype(np.int64))


def new_events(past: Histories, users: Int[Tensor, " n"], known: Int[Tensor, " n"], start: int, end: int) -> NewEvents:
    """What these users did in a log before position `end` beyond their `known` events; learned from `start` on."""
    memory = events_between(past, users, known, events_until(past, end)[users])
    return NewEvents(memory, events_until(past, start)[users])


def places_since(memory: Memory, first: Int[Tensor, " U"]) -> np.ndarray:
    """The places of each user's events from number `first` on."""
    return gather_places(memory.offsets[:-1] + first, (memory.counts - first).clamp(min=0)).numpy()
