"""INFER: replay of the events that, learned again, would help most on questions held out earlier.

Zhang et al., "Influential Exemplar Replay for Incremental Learning in Recommender Systems", AAAI 2024. No code is
published; the formulas are our reconstruction.

What we implement: after a slice, each train event z has a benefit. `once` (INFER_ONCE): η <∇L_Q, ∇l_z>, what one
virtual step along z takes off the loss of a reference set Q, to first order. `vanilla`: <∇L_Q, (H + δI)^-1 ∇l_z>,
classical influence with its sign turned so that positive helps, by conjugate gradients. Gradients are over the last
block and the last LayerNorm, dropout off. Each slice keeps its events of largest |benefit|, at most `per_user` of a
user; the buffer's places are shared equally among slices, and a slice that needs fewer leaves the rest to the others.
Replay is L_rec(current) + β L_rec(kept), as in experience replay.
How it differs: Q holds the validation parts of *earlier* slices alone (at most 2,000 events), because a validation part
gives no gradient in its own slice. The base block has no such Q: its events are a random draw, whose benefit is
computed after slice 1; from then on a stored benefit stays. `cosine` divides by the gradients' lengths, `signed` keeps
the largest benefit instead of the largest |benefit|.
Privacy: the buffer and the choice itself depend on raw events. A private run chooses once, after slice 1, among the
base block's train events with its validation part as Q, neither of which is protected, and replays them inside each
user's clipped loss as experience replay does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from protofed.backbone.functional import lending
from protofed.backbone.losses import LOSSES, draw_negatives, window_losses
from protofed.backbone.sasrec import SASRec
from protofed.backbone.small_modules import small_parameters
from protofed.backbone.training import Descend
from protofed.methods.baselines.buffer import (
    EVENTS_AT_ONCE,
    Capacity,
    event_windows,
    in_chunks,
    newest,
    rank_within,
    within,
)
from protofed.methods.baselines.experience_replay import MAX_WEIGHT, learn_with_replay
from protofed.methods.frozen import BackboneState, backbone_evidence, backbone_scores, readable, start_from_backbone
from protofed.methods.protocol import Diagnostics, World
from protofed.methods.variants import learning_rate
from protofed.seeds import numpy_stream, stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice
from protofed.slices.windows import Windows

Weights = dict[str, Tensor]
Asked = list[tuple[Windows, Tensor]]  # events and their negatives, some at a time


@dataclass(frozen=True, slots=True)
class InferState:
    """A backbone and the kept events: log position, benefit, and whether that has been computed yet."""

    model: BackboneState
    buffer: Int[Tensor, " n"]
    benefit: Float[Tensor, " n"]
    judged: Bool[Tensor, " n"]


@dataclass(frozen=True, slots=True)
class EventLosses:
    """The loss of each event, with other weights in place of some of the model's."""

    model: SASRec
    loss: str

    def __call__(self, weights: Weights, events: Windows, negatives: Int[Tensor, "W n"]) -> Float[Tensor, " W"]:
        return lending(self.model, weights, lambda: window_losses(self.model, events, negatives, LOSSES[self.loss])[0])

    def dense_tail(self) -> Weights:
        """The last block and the last LayerNorm, or the small modules where they are what trains: no item rows."""
        small = small_parameters(self.model)
        if small:
            return {name: p.detach() for name, p in small.items()}
        last = f"blocks.{len(self.model.blocks) - 1}."
        return {name: p.detach() for name, p in self.model.named_parameters() if name.startswith((last, "norm."))}


@contextmanager
def differentiable_attention() -> Iterator[None]:
    """Attention by plain products: the fused kernels have neither second derivatives nor batches of gradients."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def with_negatives(world: World, slice_: TimeSlice, positions: np.ndarray, purpose: str, device: torch.device) -> Asked:
    """Events with fixed draws of negatives."""
    config, rng = world.config, stream(world.config.seed, "infer", purpose, slice_.index)
    events = in_chunks(event_windows(slice_.past, positions, config.backbone.history_length), device)
    n, n_items = config.training.negatives, slice_.n_train_items
    return [(chunk, draw_negatives(len(chunk), n, n_items, rng).to(device)) for chunk in events]


def mean_gradient(losses: EventLosses, weights: Weights, asked: Asked) -> Weights:
    """The gradient of the mean loss."""
    total = {name: torch.zeros_like(value) for name, value in weights.items()}
    for events, negatives in asked:
        part = grad(lambda w, e=events, n=negatives: losses(w, e, n).sum())(weights)
        total = {name: value + part[name] for name, value in total.items()}
    n = max(sum(len(events) for events, _ in asked), 1)
    return {name: value / n for name, value in total.items()}


def inner_products(losses: EventLosses, weights: Weights, along: Weights, asked: Asked) -> Float[Tensor, " N"]:
    """<along, ∇l_z> for every event: how the slope of the weighted sum along it depends on each event's weight."""
    parts = [torch.zeros(0, device=next(iter(weights.values())).device)]
    for events, negatives in asked:

        def slope(counted: Tensor, e: Windows = events, n: Tensor = negatives) -> Tensor:
            return dot(grad(lambda w: (counted * losses(w, e, n)).sum())(weights), along)

        parts.append(grad(slope)(torch.ones(len(events), device=negatives.device)))
    return torch.cat(parts)


def gradient_norms(losses: EventLosses, weights: Weights, asked: Asked, chunk: int = 32) -> Float[Tensor, " N"]:
    """||∇l_z|| for every event."""

    def one(w: Weights, users: Tensor, tokens: Tensor, sources: Tensor, targets: Tensor, drawn: Tensor) -> Tensor:
        event = Windows(users[None], tokens[None], sources[None], targets[None], users[None])
        return losses(w, event, drawn[None])[0]

    parts = [torch.zeros(0, device=next(iter(weights.values())).device)]
    per_event = vmap(grad(one), in_dims=(None, 0, 0, 0, 0, 0), chunk_size=chunk)
    for events, negatives in asked:
        each = per_event(weights, events.users, events.tokens, events.sources, events.targets, negatives)
        parts.append(sum(g.flatten(1).square().sum(1) for g in each.values()).sqrt())
    return torch.cat(parts)


def earlier_validation(slice_: TimeSlice, *, base_only: bool = False) -> np.ndarray:
    """The events of all validation parts before this slice's own, which gives no gradient yet; or the base block's."""
    earlier = slice_.bounds[: min(1, slice_.index)] if base_only else slice_.bounds[:-1]
    parts = [np.arange(*bounds.part("val")) for bounds in earlier]
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def draw_sorted(positions: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """At most n of the positions, drawn without replacement."""
    return np.sort(rng.permutation(positions)[:n])


def mean_size(benefit: np.ndarray) -> float:
    """The mean |benefit|, for the log."""
    return float(np.abs(benefit).mean()) if len(benefit) else 0.0


def dot(a: Weights, b: Weights) -> Tensor:
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()


def plus(a: Weights, b: Weights, factor: Tensor | float = 1.0) -> Weights:
    return {name: value + factor * b[name] for name, value in a.items()}


def conjugate_gradients(apply: Callable[[Weights], Weights], right: Weights, steps: int) -> Weights:
    """x with apply(x) near `right`; stops where the curvature is not positive, as far as it has come."""
    x = {name: torch.zeros_like(value) for name, value in right.items()}
    residual, direction = right, right
    for _ in range(steps):
        applied = apply(direction)
        curvature, size = dot(direction, applied), dot(residual, residual)
        if curvature <= 0 or size < 1e-20:
            break
        x = plus(x, direction, size / curvature)
        residual = plus(residual, applied, -size / curvature)
        direction = plus(residual, direction, dot(residual, residual) / size)
    return x


def precondition(losses: EventLosses, weights: Weights, right: Weights, asked: Asked, damping: float) -> Weights:
    """(H + damping I)^-1 right, H the Hessian of the mean loss over these events."""

    def damped(direction: Weights) -> Weights:
        product = grad(lambda w: dot(mean_gradient(losses, w, asked), direction))(weights)
        return plus(product, direction, damping)

    return conjugate_gradients(damped, right, steps=20)


def shares(sizes: list[int], capacity: int) -> list[int]:
    """Places of each group: all get the same, but none more than it has, and what is left goes to the others."""
    given = [0] * len(sizes)
    for done, group in enumerate(sorted(range(len(sizes)), key=lambda g: sizes[g])):
        given[group] = min(sizes[group], (capacity - sum(given)) // (len(sizes) - done))
    return given


def best_per_slice(
    slices: np.ndarray, users: np.ndarray, value: np.ndarray, capacity: int, per_user: int
) -> np.ndarray:
    """Places of the most valuable events of each slice, at most `per_user` of a user in a slice, sorted."""
    order = np.argsort(-value, kind="stable")
    allowed = rank_within(slices[order] * (users.max(initial=0) + 1) + users[order]) < per_user
    order = order[allowed]
    groups, sizes = np.unique(slices[order], return_counts=True)
    quota = dict(zip(groups.tolist(), shares(sizes.tolist(), capacity), strict=True))
    fits = rank_within(slices[order]) < np.array([quota[s] for s in slices[order].tolist()], dtype=np.int64)
    return np.sort(order[fits])


@dataclass(frozen=True, slots=True)
class Infer:
    """Experience replay whose buffer is chosen by influence on earlier validation parts."""

    beta: float = 1.0
    capacity: Capacity = field(default_factory=Capacity)
    estimate: Literal["once", "vanilla"] = "once"
    per_user: int = 5
    reference: int = 2_000
    damping: float = 0.01
    cosine: bool = False
    signed: bool = False

    def __post_init__(self) -> None:
        within("beta", self.beta, 0, MAX_WEIGHT)
        within("per_user", self.per_user, 1, 10**9)
        within("reference", self.reference, 1, 10**9)
        within("damping", self.damping, 0, 1e6)

    def start(self, world: World) -> InferState:
        """A random draw of the base block, still without benefits."""
        base, capacity = world.base.train_positions, self.capacity.of(world)
        drawn = numpy_stream(world.config.seed, "infer", "base").random(len(base))
        kept = best_per_slice(np.zeros_like(base), world.base.past.users[base], drawn, capacity, self.per_user)
        buffer = torch.from_numpy(base[kept])
        return InferState(
            start_from_backbone(world), buffer, torch.zeros(len(buffer)), torch.zeros(len(buffer), dtype=torch.bool)
        )

    def learn(
        self, world: World, state: InferState, slice_: TimeSlice, descend: Descend
    ) -> tuple[InferState, Diagnostics]:
        model, diagnostics = learn_with_replay(world, state.model, slice_, descend, state.buffer, self.beta)
        judged, buffer, private = state.judged.numpy(), state.buffer.numpy(), world.config.privacy.wrap
        if private and judged.all():  # chosen among the base block's events, which are never looked at again
            return replace(state, model=model), {**diagnostics, "kept_benefit": mean_size(state.benefit.numpy())}
        fresh = np.concatenate([buffer[~judged], slice_.train_positions]) if not private else world.base.train_positions
        events = np.concatenate([buffer[judged], fresh])
        new = self._benefits(world, model.backbone, slice_, fresh)
        benefit = np.concatenate([state.benefit.numpy()[judged], new])
        starts = np.array([bounds.start for bounds in slice_.bounds])
        slices = np.searchsorted(starts, events, side="right") - 1
        value, users = benefit if self.signed else np.abs(benefit), slice_.past.users[events]
        kept = best_per_slice(slices, users, value, self.capacity.of(world), self.per_user)
        learned = InferState(
            model,
            torch.from_numpy(events[kept]),
            torch.from_numpy(benefit[kept]),
            torch.ones(len(kept), dtype=torch.bool),
        )
        helpful = float((new > 0).mean())
        return learned, {**diagnostics, "kept_benefit": mean_size(benefit[kept]), "helpful_share": helpful}

    def _benefits(self, world: World, model: SASRec, slice_: TimeSlice, events: np.ndarray) -> np.ndarray:
        """What learning each event once more would take off the reference loss."""
        config, device = world.config.training, model.items.device
        losses = EventLosses(model, config.loss)
        weights = losses.dense_tail()
        rng = numpy_stream(world.config.seed, "infer", slice_.index)
        held_out = earlier_validation(slice_, base_only=world.config.privacy.wrap)
        reference = draw_sorted(held_out, self.reference, rng)
        candidates = with_negatives(world, slice_, events, "candidates", device)
        with differentiable_attention():
            along = mean_gradient(losses, weights, with_negatives(world, slice_, reference, "reference", device))
            if self.estimate == "vanilla":
                some = draw_sorted(readable(world, slice_).train_positions, EVENTS_AT_ONCE, rng)
                curvature = with_negatives(world, slice_, some, "curvature", device)
                along = precondition(losses, weights, along, curvature, self.damping)
            slopes = inner_products(losses, weights, along, candidates)
            if self.cosine:
                lengths = gradient_norms(losses, weights, candidates) * dot(along, along).sqrt()
                slopes = slopes / lengths.clamp(min=1e-12)
            elif self.estimate == "once":
                slopes = slopes * learning_rate(world)
        return slopes.detach().cpu().numpy()

    def score(self, world: World, state: InferState, queries: Queries) -> Float[Tensor, "B I"]:
        return backbone_scores(state.model, queries)

    def evidence(self, state: InferState) -> Evidence:
        return replace(backbone_evidence(state.model), newest_target=newest(state.model, state.buffer))
