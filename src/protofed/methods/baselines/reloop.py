"""ReLoop: the new version must not err more than the last one did on the same examples.

Cai et al., "ReLoop: A Self-Correction Continual Learning Loop for Recommender Systems", SIGIR 2022.

What we implement: (1 - α) L_rec + α L_sc, divided by 1 - α (the optimiser does not see a common factor, and α = 0 is
then FineTune-Last bit for bit). The last version is the backbone as the slice found it. Under the pointwise loss L_sc
is the formula of the paper, max(p_last - p, 0) for the positive and max(p - p_last, 0) for negatives; under softmax or
pairwise training scores are no probabilities and the margin takes their place: max((s+ - s-)_last - (s+ - s-), 0).
How it differs: there is no log of impressions, so half of the negatives are uniform and half are those the last version
scores highest in a pool of 100 uniform items, "what it would have shown"; with uniform ones alone both versions are
right about nearly all of them and the term vanishes. They are drawn beside those of L_rec. A pair with an item that the
last version has no row for counts nothing. It keeps no buffer, although it is often filed under replay.
Privacy: the last version is the previous release itself and each window's term uses its own user's events alone, so
nothing further would have to be released.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.backbone.extras import Extra, Lots, Notes, uniform_items
from protofed.backbone.losses import states_at_sources
from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Descend
from protofed.errors import ConfigError
from protofed.methods.baselines.buffer import fine_tuned_state
from protofed.methods.frozen import BackboneState, backbone_evidence, backbone_scores, start_from_backbone
from protofed.methods.protocol import Diagnostics, World
from protofed.seeds import stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice
from protofed.slices.windows import NO_TARGET, Windows


@dataclass(frozen=True, slots=True)
class Scores:
    """One version's scores of each target and of its negatives."""

    positive: Float[Tensor, "W P"]
    negative: Float[Tensor, "W P n"]


def pairwise_correction(
    new: Scores, last: Scores, valid: Bool[Tensor, "W P n"]
) -> tuple[Float[Tensor, "W P"], Float[Tensor, "W P n"]]:
    """Per target the mean amount by which its margins shrank since the last version; and each pair's amount."""
    margin, margin_last = (s.positive[..., None] - s.negative for s in (new, last))
    shrunk = (margin_last - margin).clamp(min=0) * valid
    return shrunk.sum(-1) / valid.sum(-1).clamp(min=1), shrunk


def pointwise_correction(
    new: Scores, last: Scores, known: Bool[Tensor, "W P"], valid: Bool[Tensor, "W P n"]
) -> tuple[Float[Tensor, "W P"], Float[Tensor, "W P n"]]:
    """Per target the lost probability of the positive plus the mean gained by its negatives; and the latter."""
    lost = (last.positive.sigmoid() - new.positive.sigmoid()).clamp(min=0) * known
    gained = (new.negative.sigmoid() - last.negative.sigmoid()).clamp(min=0) * valid
    return lost + gained.sum(-1) / valid.sum(-1).clamp(min=1), gained


def scores_of(model: SASRec, batch: Windows, hidden: Float[Tensor, "W P d"], negatives: Int[Tensor, "W P n"]) -> Scores:
    """The targets and these negatives as the model scores them."""
    positive = (hidden * model.embed(batch.targets)).sum(-1)
    return Scores(positive, (hidden[..., None, :] * model.embed(negatives)).sum(-1))


@torch.no_grad()
def mix_negatives(
    last: SASRec, hidden: Float[Tensor, "W P d"], n: int, pool: int, n_items: int, lots: Lots
) -> Int[Tensor, "W P m"]:
    """Per target n // 2 uniform items and the n - n // 2 the last version scores highest in a uniform pool."""
    windows, targets = hidden.shape[:2]
    uniform, asked = (uniform_items(lots, windows, k, n_items) for k in (n // 2, pool))
    best = (hidden @ last.embed(asked).transpose(1, 2)).topk(min(n - n // 2, asked.shape[1]), dim=-1).indices
    shown = asked[:, None, :].expand(-1, targets, -1).gather(2, best)
    return torch.cat([uniform[:, None, :].expand(-1, targets, -1), shown], dim=-1)


@dataclass(frozen=True, slots=True)
class ReLoop:
    """Self-correction against the previous slice's weights, with share α of the loss."""

    alpha: float = 0.3
    negatives: int = 16
    pool: int = 100

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise ConfigError(f"alpha must lie in [0, 1), got {self.alpha}; at 1 nothing new would be learned")
        if not 2 <= self.negatives <= self.pool:
            raise ConfigError(f"negatives must lie between 2 and the pool of {self.pool}, got {self.negatives}")

    def start(self, world: World) -> BackboneState:
        return start_from_backbone(world)

    def learn(
        self, world: World, state: BackboneState, slice_: TimeSlice, descend: Descend
    ) -> tuple[BackboneState, Diagnostics]:
        notes = Notes()
        extra = self._correction(world, state.backbone, slice_, notes) if self.alpha > 0 else None
        learned, fit = fine_tuned_state(world, state, slice_, descend, extra)
        return learned, {**fit, "correction": 0.0, "active_pairs": 0.0, **notes.means()}

    def _correction(self, world: World, last: SASRec, slice_: TimeSlice, notes: Notes) -> Extra:
        """α / (1 - α) times the summed self-correction of each window."""
        rng = stream(world.config.seed, "reloop", slice_.index, device=last.items.device)
        pointwise, strength = world.config.training.loss == "bce", self.alpha / (1 - self.alpha)

        def losses(model: SASRec, batch: Windows, lots: Lots, notes: Notes) -> Float[Tensor, " W"]:
            with torch.no_grad():
                hidden = states_at_sources(last, batch)
                negatives = mix_negatives(last, hidden, self.negatives, self.pool, slice_.n_train_items, lots)
                before = scores_of(last, batch, hidden, negatives)
            real = batch.targets != NO_TARGET
            valid = last.knows(negatives) & (negatives != batch.targets[..., None]) & real[..., None]
            known = last.knows(batch.targets)
            now = scores_of(model, batch, states_at_sources(model, batch), negatives)
            if pointwise:
                per_target, pairs = pointwise_correction(now, before, known, valid)
            else:
                valid = valid & known[..., None]
                per_target, pairs = pairwise_correction(now, before, valid)
            notes.add("correction", (per_target * real).sum(), real.sum())
            notes.add("active_pairs", (pairs > 0).sum(), valid.sum())
            return strength * (per_target * real).sum(-1)

        return Extra(losses, notes, rng)

    def score(self, world: World, state: BackboneState, queries: Queries) -> Float[Tensor, "B I"]:
        return backbone_scores(state, queries)

    def evidence(self, state: BackboneState) -> Evidence:
        return backbone_evidence(state)
