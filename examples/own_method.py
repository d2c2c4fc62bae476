"""A method of your own: what this user met lately, then what is popular.

From this folder:

    protofed run --dataset synthetic --method own_method:Habit --out runs/habit
    protofed bench --datasets synthetic --methods own_method:Habit,popularity,frozen --out runs/compared
    protofed report runs/compared -o report.html
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from protofed.slices.histories import past_counts
from protofed.slices.leaks import Evidence


@dataclass(frozen=True)
class State:
    slice_index: int
    counts: Tensor  # how often each item was met in the newest slice's train part


@dataclass(frozen=True)
class Habit:
    half_life: float = 10.0  # events after which a user's own event counts half; --set hyper.half_life=5

    def start(self, world):
        return State(world.base.index, world.base.train_counts())

    def learn(self, world, state, slice_, descend):
        return State(slice_.index, slice_.train_counts()), {}

    def score(self, world, state, queries):
        last = queries.offsets[1:].repeat_interleave(queries.offsets.diff())
        age = last - 1 - torch.arange(len(last))  # in the user's own events; 0 is the newest
        own = past_counts(queries, 0.5 ** (age / self.half_life))
        counted = state.counts[: queries.n_items]  # an older slice has fewer items, a newer one has more
        own[:, : len(counted)] += counted / state.counts.sum()
        return own

    def evidence(self, state):
        return Evidence(state.slice_index, popularity=state.counts)
