"""What a client may say about items that came after the base block: how often it met them, and among what.

A frozen backbone has no row for such an item, and placing it by raw co-occurrences would be a query on people's events.
Each client therefore adds, for every newcomer it met, a count and the place of the item's neighbours among the public
rows, in few numbers; all it says is clipped together, so that a noised sum of it can be released. No equation of the
paper; see docs/paper_notes.md.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.backbone.new_items import neighbours
from protofed.backbone.sasrec import SASRec
from protofed.privacy.draws import Draws
from protofed.slices.histories import Histories

SPAN = 5  # events before and after, as in the shared rule
DIRECTIONS = 16  # r: coordinates of a place among the public rows


@dataclass(frozen=True, slots=True)
class Map:
    """Public coordinates of item rows: their r main directions around the mean row, scaled to length 1 on average."""

    mean: Float[Tensor, " d"]
    directions: Float[Tensor, "d r"]
    scale: float


@dataclass(frozen=True, slots=True)
class Introductions:
    """What each of M (client, item) pairs adds to its item: a count, then r coordinates; clipped per client."""

    users: Int[Tensor, " M"]  # ascending; on the server, places among the accepted
    items: Int[Tensor, " M"]
    values: Float[Tensor, "M r1"]


@dataclass(frozen=True, slots=True)
class ItemUpload:
    """What U devices send of new items once a slice, device after device. The types are those of `make_item_upload`."""

    slice_index: int
    tokens: Tensor  # (U,) int64: tell a second copy of an upload, and nothing else
    counts: Tensor  # (U,) int64: how many items each device speaks of
    items: Tensor  # (M,) int64
    values: Tensor  # (M, r1) float32

    def __len__(self) -> int:
        return self.tokens.numel()


def make_item_upload(
    said: Introductions, keys: Int[Tensor, " N"], draws: Draws, slice_index: int
) -> tuple[ItemUpload, Int[Tensor, " U"]]:
    """The devices' uploads and whose they are; `keys` are those of all users. Who met no new item sends nothing."""
    users, counts = said.users.unique_consecutive(return_counts=True)
    tokens = draws.tokens(keys[users], -slice_index)  # of no round of the prototypes: nobody can join the two
    return ItemUpload(slice_index, tokens, counts, said.items, said.values), users


def map_of(rows: Float[Tensor, "n d"], r: int = DIRECTIONS) -> Map:
    """The map on which these public rows lie."""
    mean = rows.mean(0)
    _, _, directions = torch.linalg.svd((rows - mean).double(), full_matrices=False)
    directions = directions[:r].T.to(rows.dtype)
    scale = float(((rows - mean) @ directions).norm(dim=-1).square().mean().sqrt())
    return Map(mean, directions, max(scale, 1e-12))


def coordinates(on: Map, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n r"]:
    return (rows - on.mean) @ on.directions / on.scale


def introductions(
    past: Histories,
    positions: np.ndarray,
    until: int,
    public: SASRec,
    on: Map,
    wanted: Bool[Tensor, " I"],
    *,
    radius: float = 1.0,
) -> Introductions:
    """Each client's counts and coordinates for the wanted items among these events, clipped to the radius.

    An event adds 1 to its item's count and the mean place of the items that the same client met around it and that
    have a public row and are not wanted themselves.
    """
    items = past.items[past.place[positions]]
    events = positions[wanted.numpy()[items]]
    values = torch.cat([torch.ones(len(events), 1), places(past, events, until, public, on, wanted)], dim=1)
    users, items = past.users[events].astype(np.int64), past.items[past.place[events]]
    pairs, which = np.unique(users * len(wanted) + items, return_inverse=True)
    summed = torch.zeros(len(pairs), values.shape[1]).index_add(0, torch.from_numpy(which), values)
    whose, what = torch.from_numpy(pairs // len(wanted)), torch.from_numpy(pairs % len(wanted))
    return Introductions(whose, what, clip_introductions(whose, summed, radius))


def places(
    past: Histories, events: np.ndarray, until: int, public: SASRec, on: Map, wanted: Bool[Tensor, " I"]
) -> Float[Tensor, "E r"]:
    """The mean coordinates of each event's public neighbours in its own client's history; zero where there are none."""
    usable = np.zeros(max(len(wanted), public.n_rows), dtype=bool)
    usable[: public.n_rows] = public.has_row.cpu().numpy()
    usable[: len(wanted)] &= ~wanted.numpy()
    where = coordinates(on, public.items.detach().cpu())
    event, other = neighbours(past, events, until, SPAN)
    use = usable[other]
    at, source = torch.from_numpy(event[use]), torch.from_numpy(other[use])
    total = torch.zeros(len(events)).index_add(0, at, torch.ones(len(at)))
    return torch.zeros(len(events), where.shape[1]).index_add(0, at, where[source]) / total.clamp(min=1)[:, None]


def clip_introductions(whose: Int[Tensor, " M"], values: Float[Tensor, "M r1"], radius: float) -> Float[Tensor, "M r1"]:
    """The values with each client's total length clipped to the radius; a client with NaN or infinity contributes 0."""
    n = int(whose.max()) + 1 if len(whose) else 0
    length = torch.zeros(n, dtype=torch.float64).index_add(0, whose, values.double().square().sum(-1)).sqrt()
    factor = torch.where(length.isfinite(), radius / length.clamp(min=radius), 0.0)
    heard = length.isfinite()[whose][:, None]
    return torch.where(heard, values * factor[whose][:, None].to(values.dtype), 0.0) * (1 - 1e-6)  # rounding
