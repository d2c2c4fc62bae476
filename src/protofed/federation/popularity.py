"""Popularity released with noise: once a slice every device says which items it met, all of it clipped together.

A device's say is 1 / sqrt(n) for each of the n items it met in the slice: a vector of length 1 over the whole public
catalogue. Sums of it stand beside sums over parts of the base block, which are of the same kind and without noise.
"""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from protofed.client.introductions import Introductions, clip_introductions, make_item_upload
from protofed.inference.item_side import ItemCounts, count_covisits
from protofed.privacy.draws import Draws
from protofed.privacy.mechanism import Noise
from protofed.server.accept import accept_items
from protofed.server.newcomers import sum_introductions
from protofed.slices.histories import Histories
from protofed.slices.stream import TimeSlice

PARTS = 8  # the base block is as long as eight slices
OTHER_STREAM = 1_000_000  # numbers its uploads apart from those of new items: nobody can join the two


def votes(past: Histories, positions: np.ndarray, n_items: int) -> Introductions:
    """What each device says of the items it met in these events; the length of all that one says is at most 1."""
    codes = np.unique(past.users[positions].astype(np.int64) * n_items + past.items[past.place[positions]])
    users, items = torch.from_numpy(codes // n_items), torch.from_numpy(codes % n_items)
    return Introductions(users, items, clip_introductions(users, torch.ones(len(users), 1), 1.0))


def sum_votes(said: Introductions, n_items: int, std: float, noise: Noise) -> Float[Tensor, " I"]:
    """Noised sums over devices for every item of the catalogue, met or not."""
    return sum_introductions(said, torch.ones(n_items, dtype=torch.bool), std, noise)[:, 0]


def release_popularity(
    counts: ItemCounts, slice_: TimeSlice, std: float, noise: Noise, draws: Draws
) -> tuple[ItemCounts, int]:
    """One release: the counts with this slice's noised sums in them, and how many devices were heard."""
    n_items, index = slice_.n_train_items, OTHER_STREAM + slice_.index
    said = votes(slice_.past, slice_.train_positions, n_items)
    upload, _ = make_item_upload(said, torch.from_numpy(slice_.user_keys), draws, index)
    accepted, _ = accept_items([upload], slice_index=index, n_items=n_items, width=1)
    recent = sum_votes(accepted, n_items, std, noise)
    return add_recent(counts, recent), len(accepted.users.unique())


def add_recent(counts: ItemCounts, recent: Float[Tensor, " I"]) -> ItemCounts:
    """The counts with one more slice's sums."""
    total = F.pad(counts.total, (0, len(recent) - len(counts.total))) + recent
    return ItemCounts(recent, total, counts.covisits, counts.known)


def base_votes(base: TimeSlice, age: int = 0) -> ItemCounts:
    """The base block's own sums, part by part and without noise, as they were so many parts before its end."""
    parts = base_parts(base)
    n_items, until = base.n_train_items, PARTS - age
    silent: Noise = lambda shape, std: torch.zeros(shape, dtype=torch.float64)  # noqa: E731
    sums = [sum_votes(votes(base.past, part, n_items), n_items, 0.0, silent) for part in parts[:until]]
    total = torch.stack(sums).sum(0)
    end = int(parts[until - 1][-1]) + 1
    return ItemCounts(sums[-1], total, count_covisits(base.past, end, n_items), known=items_met(base, end))


def rehearse_popularity(base: TimeSlice, age: int, std: float, noise: Noise) -> ItemCounts:
    """The base block's counts of so many parts ago, and what releases of the parts since would have told."""
    counts = base_votes(base, age)
    for part in base_parts(base)[PARTS - age :]:
        counts = add_recent(
            counts, sum_votes(votes(base.past, part, base.n_train_items), base.n_train_items, std, noise)
        )
    return counts


def base_parts(base: TimeSlice) -> list[np.ndarray]:
    """The base block's train part in eighths."""
    return [part for part in np.array_split(base.train_positions, PARTS) if len(part)]


def items_met(base: TimeSlice, until: int) -> int:
    """How many items were met before that log position; they are numbered as they came."""
    met = base.past.items[base.past.place[:until]]
    return int(met.max()) + 1 if len(met) else 0
