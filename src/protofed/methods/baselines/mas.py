"""MAS: weights that the model's output is sensitive to are held, whatever the labels were.

Aljundi et al., Memory Aware Synapses: learning what (not) to forget, ECCV 2018.
What we implement: after each slice (the base block too) the importance of a weight is the mean over 1,000 train
histories of |d ||F(x)||^2 / d weight|, one gradient per history, dropout off; importances add up over slices
(`accumulate="average"` halves the old at each), and the next slice's mean loss gains
strength * sum of importance * (weight - weight before)^2.
How it differs: F(x) is the vector of logits of 100 uniform items. The last hidden state (`output="hidden"`) comes out
of a LayerNorm, which keeps its length nearly constant: what lies before the norm would hardly count. Each slice's
importances are scaled to mean 1 over their non-zero entries; a row that is new in a slice is free in it.
Privacy: no labels are used, but the histories are: a private run takes those of the base block, which are not
protected, after every slice, at the weights that the slice released. The penalty depends on released weights alone, so
its gradient is added after the noise, outside of every clip.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Descend
from protofed.methods.baselines.importance import (
    AnchoredState,
    Examples,
    Objective,
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


def squared_logits(
    hidden: Float[Tensor, " d"], logits: Float[Tensor, " C"], chosen: Int[Tensor, ""]
) -> Float[Tensor, ""]:
    return (logits**2).sum()


def squared_hidden(
    hidden: Float[Tensor, " d"], logits: Float[Tensor, " C"], chosen: Int[Tensor, ""]
) -> Float[Tensor, ""]:
    return (hidden**2).sum()


OUTPUTS: Mapping[str, Objective] = {"logits": squared_logits, "hidden": squared_hidden}


def sensitivity(model: SASRec, examples: Examples, output: str) -> dict[str, Tensor]:
    """Per weight the mean over examples of the absolute gradient of the output's squared length."""
    chosen = torch.zeros(len(examples), dtype=torch.int64, device=examples.tokens.device)  # nothing depends on it
    return mean_gradient_sizes(model, examples, chosen, OUTPUTS[output], torch.abs)


@dataclass(frozen=True, slots=True)
class MAS:
    strength: float = 1.0  # lambda, for importances of mean 1
    output: Literal["logits", "hidden"] = "logits"
    accumulate: Literal["sum", "average"] = "sum"
    examples: int = 1_000
    candidates: int = 100

    def start(self, world: World) -> AnchoredState:
        begun = start_from_backbone(world)
        model = begun.backbone
        nothing = AnchoredState(model, begun.slice_index, begun.newest_target, weights_of(model), zeros_of(model))
        return self._consolidated(world, nothing, model, world.base, begun.newest_target)[0]

    def learn(
        self, world: World, state: AnchoredState, slice_: TimeSlice, descend: Descend
    ) -> tuple[AnchoredState, Diagnostics]:
        model, fit, penalty = learn_anchored(world, state, slice_, descend, self.strength)
        learned, mean = self._consolidated(world, state, model, slice_, fit.newest_target)
        share = share_above_zero(learned.importance)
        return learned, {"penalty": penalty, "sensitivity_mean": mean, "important_share": share, **fit.diagnostics()}

    def _consolidated(
        self, world: World, state: AnchoredState, model: SASRec, slice_: TimeSlice, newest: int
    ) -> tuple[AnchoredState, float]:
        """The learned weights as the next anchor, and the mean of this slice's importances before they were scaled."""
        examples = self._unlabelled(world, slice_)
        added, mean = scale_to_mean_one(sensitivity(model, examples, self.output))
        old = pad_rows(state.importance, added)
        share = 0.5 if self.accumulate == "average" and slice_.index > world.base.index else 1.0
        kept = 1.0 if self.accumulate == "sum" else 1 - share
        total = {name: kept * old[name] + share * added[name] for name in added}
        newest = max(state.newest_target, newest, examples.newest)
        return AnchoredState(model, slice_.index, newest, weights_of(model), total), mean

    def _unlabelled(self, world: World, slice_: TimeSlice) -> Examples:
        """Train histories with items that do not depend on what was met."""
        drawn = draw_examples(world, readable(world, slice_), self.examples, 0, "mas")
        rng = stream(world.config.seed, "mas-candidates", slice_.index)
        uniform = torch.randint(slice_.n_train_items, (len(drawn), self.candidates), generator=rng)
        return replace(drawn, candidates=uniform.to(drawn.candidates.device))

    def score(self, world: World, state: AnchoredState, queries: Queries) -> Float[Tensor, "B I"]:
        return backbone_scores(state, queries)

    def evidence(self, state: AnchoredState) -> Evidence:
        return backbone_evidence(state)
