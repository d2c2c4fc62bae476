"""Experience replay: FineTune-Last that also learns some kept events of earlier slices, at every step.

ER-Random: Chaudhry et al., "On Tiny Episodic Memories in Continual Learning", 2019.
ER-Freq: after Ahrabian et al., "Structure Aware Experience Replay for Incremental Learning in Graph-based Recommender
Systems", CIKM 2021.

What we implement: L = L_rec(current) + β L_rec(replayed), with as many replayed events as the batch has windows, drawn
without replacement from the buffer as it was when the slice began, each predicted from its own prefix against freshly
drawn negatives. ER-Random fills the buffer by reservoir sampling over all train events of the stream; ER-Freq draws it
anew at each slice's end from the old buffer and the slice's train part, weighted, with today's degrees.
How it differs: SAER replays rare users (`inv_degree`); the name ER-Freq suggests frequent items, which is `freq`, and
`sqrt_inv` is 1 / sqrt(deg(user) deg(item)). SAER's distillation variant is left out, and the loss is not re-weighted
by 1 / P. A buffer that is larger than what has been met holds all of it. `user_balanced` keeps a user's second event
only when everybody's first is kept.
Privacy: the buffer is a stored copy of events, and ER-Freq's degrees are counts of them. A private run keeps the buffer
and the degrees of the base block, which is not protected, as they were; a user's step replays as many kept events as
it has windows, drawn by the user and the round, inside the loss whose gradient is clipped.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.backbone.extras import Notes
from protofed.backbone.training import Descend
from protofed.methods.baselines.buffer import (
    Capacity,
    fine_tuned_state,
    newest,
    rank_within,
    replay,
    reservoir,
    weighted_choice,
    within,
)
from protofed.methods.frozen import BackboneState, backbone_evidence, backbone_scores, start_from_backbone
from protofed.methods.protocol import Diagnostics, World
from protofed.seeds import numpy_stream, stream
from protofed.slices.histories import Histories, Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice

MAX_WEIGHT = 1e6


@dataclass(frozen=True, slots=True)
class ReplayState:
    """A backbone, the log positions of the kept events, and how many events have been met in all."""

    model: BackboneState
    buffer: Int[Tensor, " n"]
    seen: int


@dataclass(frozen=True, slots=True)
class DegreeState:
    """A backbone, the log positions of the kept events, and everybody's number of train events so far."""

    model: BackboneState
    buffer: Int[Tensor, " n"]
    user_degree: Int[Tensor, " users"]
    item_degree: Int[Tensor, " items"]


def learn_with_replay(
    world: World, model: BackboneState, slice_: TimeSlice, descend: Descend, buffer: Tensor, beta: float
) -> tuple[BackboneState, Diagnostics]:
    """The backbone after the slice's train part and the replayed buffer, together."""
    notes, device = Notes(), world.backbone.items.device
    rng = stream(world.config.seed, "replay", slice_.index, device=device)
    learned, fit = fine_tuned_state(world, model, slice_, descend, replay(world, slice_, buffer, beta, rng, notes))
    model = replace(learned, newest_target=newest(learned, buffer))
    return model, {**fit, "replay_buffer": len(buffer), "replay_loss": 0.0, **notes.means()}


def draw_evenly(events: np.ndarray, users: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """n of the events such that nobody has two more than somebody who could have had more, drawn at random."""
    order = rng.permutation(len(events))
    by_round = np.argsort(rank_within(users[order]), kind="stable")
    return np.sort(events[order[by_round[:n]]])


@dataclass(frozen=True, slots=True)
class ERRandom:
    """A reservoir of everything met so far, replayed beside the current slice."""

    beta: float = 1.0
    capacity: Capacity = field(default_factory=Capacity)
    user_balanced: bool = False

    def __post_init__(self) -> None:
        within("beta", self.beta, 0, MAX_WEIGHT)

    def start(self, world: World) -> ReplayState:
        empty = ReplayState(start_from_backbone(world), torch.zeros(0, dtype=torch.int64), 0)
        return self._kept(world, empty, world.base)

    def learn(
        self, world: World, state: ReplayState, slice_: TimeSlice, descend: Descend
    ) -> tuple[ReplayState, Diagnostics]:
        model, diagnostics = learn_with_replay(world, state.model, slice_, descend, state.buffer, self.beta)
        learned = replace(state, model=model)
        return learned if world.config.privacy.wrap else self._kept(world, learned, slice_), diagnostics

    def _kept(self, world: World, state: ReplayState, slice_: TimeSlice) -> ReplayState:
        capacity, rng = self.capacity.of(world), numpy_stream(world.config.seed, "er-random", slice_.index)
        old, new = state.buffer.cpu().numpy(), slice_.train_positions
        if self.user_balanced:
            both = np.concatenate([old, new])
            kept, seen = draw_evenly(both, slice_.past.users[both], capacity, rng), state.seen + len(new)
        else:
            kept, seen = reservoir(old, state.seen, new, capacity, rng)
        return replace(state, buffer=torch.from_numpy(kept), seen=seen)

    def score(self, world: World, state: ReplayState, queries: Queries) -> Float[Tensor, "B I"]:
        return backbone_scores(state.model, queries)

    def evidence(self, state: ReplayState) -> Evidence:
        return replace(backbone_evidence(state.model), newest_target=newest(state.model, state.buffer))


def add_degrees(degree: Int[Tensor, " n"], met: np.ndarray) -> Int[Tensor, " m"]:
    """The degrees with these codes counted in."""
    more = torch.from_numpy(np.bincount(met, minlength=len(degree)))
    return more + torch.nn.functional.pad(degree.cpu(), (0, len(more) - len(degree)))


def event_weights(
    past: Histories, events: np.ndarray, user_degree: np.ndarray, item_degree: np.ndarray, mode: str
) -> np.ndarray:
    """What each event is drawn in proportion to."""
    of_user, of_item = user_degree[past.users[events]], item_degree[past.items[past.place[events]]]
    if mode == "inv_degree":
        return np.asarray(1.0 / of_user)
    return np.asarray(of_item.astype(np.float64) if mode == "freq" else 1.0 / np.sqrt(of_user * of_item))


@dataclass(frozen=True, slots=True)
class ERFreq:
    """A buffer drawn by degree: rare users' events are likelier to be kept (or frequent items', see `mode`)."""

    beta: float = 1.0
    capacity: Capacity = field(default_factory=Capacity)
    mode: Literal["inv_degree", "freq", "sqrt_inv"] = "inv_degree"

    def __post_init__(self) -> None:
        within("beta", self.beta, 0, MAX_WEIGHT)

    def start(self, world: World) -> DegreeState:
        none = torch.zeros(0, dtype=torch.int64)
        return self._kept(world, DegreeState(start_from_backbone(world), none, none, none), world.base)

    def learn(
        self, world: World, state: DegreeState, slice_: TimeSlice, descend: Descend
    ) -> tuple[DegreeState, Diagnostics]:
        model, diagnostics = learn_with_replay(world, state.model, slice_, descend, state.buffer, self.beta)
        learned = replace(state, model=model)
        return learned if world.config.privacy.wrap else self._kept(world, learned, slice_), diagnostics

    def _kept(self, world: World, state: DegreeState, slice_: TimeSlice) -> DegreeState:
        past, new = slice_.past, slice_.train_positions
        user_degree = add_degrees(state.user_degree, past.users[new])
        item_degree = add_degrees(state.item_degree, past.items[past.place[new]])
        both = np.concatenate([state.buffer.cpu().numpy(), new])
        weights = event_weights(past, both, user_degree.numpy(), item_degree.numpy(), self.mode)
        rng = numpy_stream(world.config.seed, "er-freq", slice_.index)
        kept = both[weighted_choice(weights, self.capacity.of(world), rng)]
        return DegreeState(state.model, torch.from_numpy(kept), user_degree, item_degree)

    def score(self, world: World, state: DegreeState, queries: Queries) -> Float[Tensor, "B I"]:
        return backbone_scores(state.model, queries)

    def evidence(self, state: DegreeState) -> Evidence:
        return replace(backbone_evidence(state.model), newest_target=newest(state.model, state.buffer))
