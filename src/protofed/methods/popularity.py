"""Popularity of the slice: everybody gets what was met most often in the current train part."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from protofed.backbone.training import Descend
from protofed.methods.protocol import Diagnostics, World
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice


@dataclass(frozen=True, slots=True)
class PopularityState:
    counts: Int[Tensor, " n"]
    slice_index: int


def counts_for(counts: Shaped[Tensor, " n"], n_items: int) -> Float[Tensor, " I"]:
    """Counts of items 0 .. n_items - 1; an item that was not counted has 0."""
    kept = counts[:n_items].float()
    return torch.nn.functional.pad(kept, (0, n_items - len(kept)))


@dataclass(frozen=True, slots=True)
class Popularity:
    """Train counts of the slice, the same list for everybody."""

    def start(self, world: World) -> PopularityState:
        return PopularityState(world.base.train_counts(), world.base.index)

    def learn(
        self, world: World, state: PopularityState, slice_: TimeSlice, descend: Descend
    ) -> tuple[PopularityState, Diagnostics]:
        return PopularityState(slice_.train_counts(), slice_.index), {}

    def score(self, world: World, state: PopularityState, queries: Queries) -> Float[Tensor, "B I"]:
        scores = counts_for(state.counts, queries.n_items).to(queries.tokens.device)
        return scores.expand(len(queries), -1)

    def evidence(self, state: PopularityState) -> Evidence:
        return Evidence(state.slice_index, popularity=state.counts)
