"""What everybody's events say about the items: how often each was met, and which items are met one after the other.

Where nothing may be shared these are counts of the base block; elsewhere they end at a slice's train cut.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from protofed.slices.histories import Histories, Queries

SPAN = 3  # events before or after, and newest items of a query that are looked up
KEPT = 32  # strongest neighbours of an item
POPULARITY = ("met lately", "met so far", "never met")
COVISITS = ("met together", "met together, for its popularity")


@dataclass(frozen=True, slots=True)
class Covisits:
    """Each item's strongest neighbours: those of item i are at offsets[i] .. offsets[i + 1] - 1."""

    offsets: Int[Tensor, " I1"]
    items: Int[Tensor, " N"]
    weights: Float[Tensor, " N"]


@dataclass(frozen=True, slots=True)
class ItemCounts:
    """How often each item was met lately and so far (noised sums count as they are), and what it was met with."""

    recent: Float[Tensor, " I"]
    total: Float[Tensor, " I"]
    covisits: Covisits
    known: int  # items from this number on were never met; they are numbered as they came

    def __len__(self) -> int:
        return len(self.total)


def count_items(past: Histories, recent: tuple[int, int], until: int, n_items: int) -> ItemCounts:
    """Counts of the events before log position `until`, and between the two of `recent`."""
    items = past.items[past.place]  # in log order

    def count(first: int, end: int) -> Tensor:
        return torch.from_numpy(np.bincount(items[first:end], minlength=n_items)[:n_items]).float()

    known = int(items[:until].max()) + 1 if until else 0
    return ItemCounts(count(*recent), count(0, until), count_covisits(past, until, n_items), known)


def count_covisits(past: Histories, until: int, n_items: int) -> Covisits:
    """Pairs of a user's events at most SPAN apart, weighted by 1 / distance, before log position `until`."""
    position = np.argsort(past.place, kind="stable")  # log position of each place
    inside = position < until
    items, users = past.items[inside], past.users[position][inside]
    pairs = []
    for apart in range(1, SPAN + 1):
        same = (users[apart:] == users[:-apart]) & (items[apart:] != items[:-apart])
        one, other = items[:-apart][same], items[apart:][same]
        weight = np.full(len(one), 1.0 / apart)
        pairs += [(one * n_items + other, weight), (other * n_items + one, weight)]
    codes, where = np.unique(np.concatenate([code for code, _ in pairs]), return_inverse=True)
    weights = np.bincount(where, np.concatenate([weight for _, weight in pairs]), minlength=len(codes))
    item, other = codes // n_items, codes % n_items
    order = np.lexsort((other, -weights, item))
    item, other, weights = item[order], other[order], weights[order]
    kept = np.arange(len(item)) - np.searchsorted(item, item) < KEPT
    offsets = np.concatenate([[0], np.cumsum(np.bincount(item[kept], minlength=n_items))])
    return Covisits(
        torch.from_numpy(offsets), torch.from_numpy(other[kept]), torch.from_numpy(weights[kept].astype(np.float32))
    )


def popularity_numbers(counts: ItemCounts, n_items: int) -> Float[Tensor, "I 3"]:
    """The numbers of POPULARITY; an item that came after the counts was never met."""
    columns = [F.pad(c[:n_items], (0, max(0, n_items - len(c)))) for c in (counts.recent, counts.total)]
    never = (torch.arange(n_items, device=counts.total.device) >= counts.known).float()
    return torch.stack([*(column.clamp(min=0).log1p() for column in columns), never], dim=1)


def covisit_numbers(
    counts: ItemCounts, queries: Queries
) -> tuple[Int[Tensor, " C"], Int[Tensor, " C"], Float[Tensor, "C 2"]]:
    """Which query, which item and the numbers of COVISITS, for the neighbours of each query's newest SPAN items.

    The newest counts whole, the one before it half, the third a third.
    """
    near, at = counts.covisits, queries.past_items.device
    ends = queries.offsets[1:]
    newest = ends[:, None] - 1 - torch.arange(SPAN, device=at)
    real = newest >= queries.offsets[:-1, None]
    query = torch.arange(len(queries), device=at)[:, None].expand_as(newest)[real]
    item, fresh = queries.past_items[newest[real]], (1 / torch.arange(1.0, SPAN + 1, device=at)).expand_as(newest)[real]
    counted = item < len(near.offsets) - 1
    query, item, fresh = query[counted], item[counted], fresh[counted]
    first, sizes = near.offsets[item], near.offsets.diff()[item]
    which = torch.repeat_interleave(query, sizes)
    place = torch.arange(len(which), device=at) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    place = place + torch.repeat_interleave(first, sizes)
    weights = near.weights[place].double() * torch.repeat_interleave(fresh, sizes)
    asked = near.items[place] < queries.n_items  # counts may know later items than a question about an earlier slice
    cells, cell = torch.unique((which * queries.n_items + near.items[place])[asked], return_inverse=True)
    summed = torch.zeros(len(cells), dtype=torch.float64, device=at).index_add(0, cell, weights[asked])
    which, items = cells // queries.n_items, cells % queries.n_items
    z = torch.stack([summed, summed / (1 + counts.total[items].clamp(min=0).double()).sqrt()], dim=1)
    return which, items, z.log1p().float()
