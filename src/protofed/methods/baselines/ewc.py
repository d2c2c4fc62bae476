"""EWC: weights that the past's likelihood depends on are held by springs.

Kirkpatrick et al., Overcoming catastrophic forgetting in neural networks, PNAS 2017; online form: Schwarz et al.,
Progress & Compress, ICML 2018.
What we implement: online EWC. After each slice (the base block too) the diagonal Fisher F_t of the softmax over the
item met and 99 uniform negatives is estimated at the learned weights from 1,000 train events, one gradient per event,
squared, then averaged, dropout off, the label drawn from the model (`labels="true"` is the empirical Fisher).
F <- decay * F + F_t, and the next slice's mean loss gains strength / 2 * sum of F * (weight - anchor)^2.
How it differs: each F_t is scaled to mean 1 over its non-zero entries, so that one strength serves every log.
`anchors="separate"` is the original sum of one spring per slice; a sum of squares is again one square, around the
F-weighted mean of all anchors, so it needs no more memory. A row that is new in a slice is free in it.
Privacy: F is a statistic of raw events, so a private run estimates it, after every slice, on the base block's train
events, which are not protected, at the weights that the slice released. The anchor has been released too, so the
spring pulls after the noise, outside of every clip.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Descend
from protofed.methods.baselines.importance import (
    AnchoredState,
    Examples,
    Weights,
    draw_examples,
    learn_anchored,
    mean_gradient_sizes,
    pad_rows,
    scale_to_mean_one,
    share_above_zero,
    weights_of,
    zeros_of,
)
from protofed.methods.frozen import backbone_evidence, backbone_scores, readable, start_from_backbone
from protofed.methods.protocol import Diagnostics, World
from protofed.seeds import stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice


def log_likelihood(
    hidden: Float[Tensor, " d"], logits: Float[Tensor, " C"], chosen: Int[Tensor, ""]
) -> Float[Tensor, ""]:
    """log p(chosen | history, candidates)."""
    return logits.log_softmax(-1).gather(0, chosen[None])[0]


def diagonal_fisher(
    model: SASRec, examples: Examples, labels: Literal["sample", "true"], rng: Generator
) -> dict[str, Tensor]:
    """Per weight the mean over examples of the squared gradient of the label's log-likelihood."""
    chosen = torch.zeros(len(examples), dtype=torch.int64)  # the first candidate is what was met
    if labels == "sample":
        chosen = torch.multinomial(choice_probabilities(model, examples).cpu(), 1, generator=rng)[:, 0]
    return mean_gradient_sizes(model, examples, chosen.to(examples.tokens.device), log_likelihood, torch.square)


@torch.no_grad()
def choice_probabilities(model: SASRec, examples: Examples) -> Float[Tensor, "N C"]:
    """p(candidate | history, candidates)."""
    hidden = model.last_hidden(examples.tokens)
    return (model.embed(examples.candidates) @ hidden[..., None])[..., 0].softmax(-1)


def joint_anchor(anchor: Weights, importance: Weights, newest: Weights, added: Weights) -> dict[str, Tensor]:
    """Where the sum of two springs rests: the mean of their anchors, each weighing its importance."""
    total = {name: importance[name] + added[name] for name in added}
    resting = {name: (importance[name] * anchor[name] + added[name] * newest[name]) / total[name] for name in added}
    return {name: torch.where(total[name] > 0, resting[name], newest[name]) for name in added}


@dataclass(frozen=True, slots=True)
class EWC:
    strength: float = 1.0  # lambda, for a Fisher of mean 1
    decay: float = 1.0  # gamma: what the past's Fisher is multiplied with at each slice
    labels: Literal["sample", "true"] = "sample"
    anchors: Literal["latest", "separate"] = "latest"
    examples: int = 1_000
    negatives: int = 99

    def start(self, world: World) -> AnchoredState:
        begun = start_from_backbone(world)
        model = begun.backbone
        nothing = AnchoredState(model, begun.slice_index, begun.newest_target, weights_of(model), zeros_of(model))
        return self._consolidated(world, nothing, model, world.base, begun.newest_target)[0]

    def learn(
        self, world: World, state: AnchoredState, slice_: TimeSlice, descend: Descend
    ) -> tuple[AnchoredState, Diagnostics]:
        model, fit, penalty = learn_anchored(world, state, slice_, descend, self.strength / 2)
        learned, fisher_mean = self._consolidated(world, state, model, slice_, fit.newest_target)
        share = share_above_zero(learned.importance)
        return learned, {"penalty": penalty, "fisher_mean": fisher_mean, "important_share": share, **fit.diagnostics()}

    def _consolidated(
        self, world: World, state: AnchoredState, model: SASRec, slice_: TimeSlice, newest: int
    ) -> tuple[AnchoredState, float]:
        """The learned weights as the next anchor, and the mean of this slice's Fisher before it was scaled."""
        examples = draw_examples(world, readable(world, slice_), self.examples, self.negatives, "ewc")
        rng = stream(world.config.seed, "ewc-labels", slice_.index)
        added, mean = scale_to_mean_one(diagonal_fisher(model, examples, self.labels, rng))
        anchor, old = weights_of(model), pad_rows(state.importance, added)
        old = {name: self.decay * tensor for name, tensor in old.items()}
        if self.anchors == "separate":
            anchor = joint_anchor(pad_rows(state.anchor, added), old, anchor, added)
        total = {name: old[name] + added[name] for name in added}
        newest = max(state.newest_target, newest, examples.newest)
        return AnchoredState(model, slice_.index, newest, anchor, total), mean

    def score(self, world: World, state: AnchoredState, queries: Queries) -> Float[Tensor, "B I"]:
        return backbone_scores(state, queries)

    def evidence(self, state: AnchoredState) -> Evidence:
        return backbone_evidence(state)
