"""Popularity under a budget: noised sums once a slice, on top of the base block's own, the same list for everybody.

What we implement: the release of `federation.popularity` and nothing beside it, so that its noise is the least the
budget allows. How it differs from `popularity`: a device that met many items says less of each, and sums go back to the
base block, for those of one slice alone drown in the noise.
Privacy: one release a slice by everybody, ledgered; the base block is not protected.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from protofed.backbone.training import Descend
from protofed.config import RunConfig
from protofed.federation.plan import Stream, ledger, plan_releases
from protofed.federation.popularity import base_votes, release_popularity
from protofed.inference.item_side import ItemCounts
from protofed.methods.popularity import counts_for
from protofed.methods.protocol import Diagnostics, World
from protofed.privacy.draws import SeededDraws
from protofed.privacy.ledger import Ledger
from protofed.privacy.mechanism import seeded_noise
from protofed.seeds import stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice


@dataclass(frozen=True, slots=True)
class NoisedPopularityState:
    """The sums so far, the noise and number of the releases that the budget pays for, and where the sums end."""

    counts: ItemCounts
    noise_multiplier: float
    allowed: int
    slice_index: int
    counts_until: int


@dataclass(frozen=True, slots=True)
class NoisedPopularity:
    """What was met most often so far, told through noise."""

    def start(self, world: World) -> NoisedPopularityState:
        (planned,) = plan_releases(world.config.privacy, (release_asked(world.config),))
        until, noise = world.base.bounds[-1].train_end, planned.noise_multiplier
        return NoisedPopularityState(base_votes(world.base), noise, planned.rounds, world.base.index, until)

    def learn(
        self, world: World, state: NoisedPopularityState, slice_: TimeSlice, descend: Descend
    ) -> tuple[NoisedPopularityState, Diagnostics]:
        index, seed, noise = slice_.index, world.config.seed, state.noise_multiplier
        counts, until, clients = state.counts, state.counts_until, 0
        if index <= state.allowed:
            noised = seeded_noise(stream(seed, "popularity noise", index))
            counts, clients = release_popularity(counts, slice_, noise, noised, SeededDraws(seed))
            until = slice_.bounds[-1].train_end
        told = {"popularity_clients": clients, "popularity_noise": noise}
        return NoisedPopularityState(counts, noise, state.allowed, index, until), told

    def score(self, world: World, state: NoisedPopularityState, queries: Queries) -> Float[Tensor, "B I"]:
        scores = counts_for(state.counts.total, queries.n_items).to(queries.tokens.device)
        return scores.expand(len(queries), -1)

    def evidence(self, state: NoisedPopularityState) -> Evidence:
        return Evidence(state.slice_index, counts_until=state.counts_until)

    def releases(self, world: World, state: NoisedPopularityState, slices_ahead: int = 0) -> Ledger:
        """One release a slice so far, and those of the next slices."""
        asked = Stream("popularity", 1.0, state.allowed, state.noise_multiplier)
        return ledger((asked,), {asked.name: state.slice_index + slices_ahead})


def release_asked(config: RunConfig) -> Stream:
    """A release a slice by everybody, with the noise that is given."""
    return Stream("popularity", 1.0, config.stream.n_slices, config.privacy.noise_multiplier)
