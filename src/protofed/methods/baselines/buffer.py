"""What replay methods share: which events are kept, how they are learned again, and a fine-tuning with something added.

An event is kept as its log position: user, target and the event's own prefix follow from it, and negatives are drawn
anew at each replay, because a stored negative may have become a positive since.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from protofed.backbone.extras import Extra, Lots, Notes, uniform_items
from protofed.backbone.losses import LOSSES, window_losses
from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Descend
from protofed.errors import ConfigError
from protofed.methods.baselines.finetune_last import fine_tuned
from protofed.methods.frozen import BackboneState, rows_for
from protofed.methods.protocol import Diagnostics, World
from protofed.slices.histories import Histories, tokens_ending_at
from protofed.slices.stream import TimeSlice
from protofed.slices.windows import Windows, moved, pick_windows, real_targets, take, trimmed

EVENTS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many events a buffer holds: a share of the base block's train events, between two bounds; share 0 is none."""

    share: float = 0.05
    least: int = 2_000
    most: int = 30_000

    def __post_init__(self) -> None:
        within("capacity.share", self.share, 0, 1)
        within("capacity.least", self.least, 0, self.most)

    def of(self, world: World) -> int:
        wanted = round(self.share * len(world.base.train_positions))
        return min(max(wanted, self.least), self.most) if self.share > 0 else 0


def within(name: str, value: int | float, least: int | float, most: int | float) -> None:
    """Refuses a hyper-parameter outside its range (ends included)."""
    if not least <= value <= most:
        raise ConfigError(f"{name} must lie between {least:g} and {most:g}, got {value}")


def event_windows(past: Histories, positions: np.ndarray, length: int) -> Windows:
    """One window per event: its own prefix, read to the end, predicts it."""
    users = past.users[positions].astype(np.int64)
    return Windows(
        users=torch.from_numpy(users),
        tokens=tokens_ending_at(past, users, past.before[positions], length),
        sources=torch.full((len(positions), 1), length - 1),
        targets=torch.from_numpy(past.items[past.place[positions]])[:, None],
        newest=torch.from_numpy(positions.astype(np.int64)),
    )


def in_chunks(windows: Windows, device: torch.device, size: int = EVENTS_AT_ONCE) -> list[Windows]:
    """The windows in their order, some at a time, trimmed and on the device."""
    index = torch.arange(len(windows)).split(size)
    return [moved(trimmed(take(windows, chunk)), device) for chunk in index if len(chunk)]


def reservoir(
    kept: np.ndarray, seen: int, events: np.ndarray, capacity: int, rng: np.random.Generator
) -> tuple[np.ndarray, int]:
    """The buffer and the number of events met, after these: each event met so far is kept with the same probability.

    The n-th event fills a free slot, or else replaces slot j, uniform in 0 .. n - 1, if there is one.
    """
    free = max(capacity - len(kept), 0)
    kept, seen_now = np.concatenate([kept, events[:free]]), seen + len(events)
    late = events[free:]
    slot = rng.integers(0, np.arange(seen_now - len(late), seen_now) + 1)
    kept[slot[slot < capacity]] = late[slot < capacity]  # of two for one slot the later stays, as in a loop
    return kept, seen_now


def weighted_choice(weights: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """Places of n draws without replacement, each next one in proportion to its weight among those left, sorted.

    All of them where there are no more than n (Efraimidis and Spirakis, 2006: the n largest log(u) / weight).
    """
    keys = np.log1p(-rng.random(len(weights))) / weights
    return np.sort(np.argsort(-keys, kind="stable")[:n])


def rank_within(groups: np.ndarray) -> np.ndarray:
    """Per place, how many earlier places belong to the same group."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    rank = np.empty(len(groups), dtype=np.int64)
    rank[order] = np.arange(len(groups)) - np.searchsorted(ordered, ordered)
    return rank


def replay(
    world: World, slice_: TimeSlice, buffer: Int[Tensor, " n"], weight: float, rng: Generator, notes: Notes
) -> Extra | None:
    """Adds weight times the mean loss of as many kept events as the batch has windows; None where that is nothing.

    Events are drawn without replacement within a step; a buffer smaller than a batch is replayed whole.
    """
    if weight == 0 or not len(buffer):
        return None
    config = world.config.training
    device = world.backbone.items.device
    kept = moved(event_windows(slice_.past, buffer.cpu().numpy(), world.config.backbone.history_length), device)

    def losses(model: SASRec, batch: Windows, lots: Lots, notes: Notes) -> Float[Tensor, " W"]:
        again = pick_windows(kept, lots.distinct(len(kept), len(batch)))
        negatives = uniform_items(lots, len(again), config.negatives, slice_.n_train_items)
        sums, counts = window_losses(model, again, negatives, LOSSES[config.loss])
        notes.add("replay_loss", sums.sum(), counts.sum())
        return weight * (sums.sum() / counts.sum()) * real_targets(batch)

    return Extra(losses, notes, rng)


def fine_tuned_state(
    world: World, state: BackboneState, slice_: TimeSlice, descend: Descend, extra: Extra | None
) -> tuple[BackboneState, Diagnostics]:
    """FineTune-Last with something added to its loss; without `extra` it is FineTune-Last bit for bit."""
    model, fit = fine_tuned(world, rows_for(world, state.backbone, slice_), slice_, descend, extra=extra)
    return BackboneState(model, slice_.index, max(state.newest_target, fit.newest_target)), fit.diagnostics()


def newest(state: BackboneState, buffer: Int[Tensor, " n"]) -> int:
    """The newest event that has given a gradient or may at a replay."""
    return max(state.newest_target, int(buffer.max()) if len(buffer) else -1)
