"""FullRetrain: a fresh model on everything so far, at every slice.

What we implement: weights drawn anew, trained on the train parts of slices 0..t until the validation part of slice t
stops improving, with the base block's epoch cap: it is a training from scratch, and a small cap would make it weak.
How it differs: called an oracle elsewhere; under drift it need not be one, so we only report it.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Descend, Task, train
from protofed.methods.frozen import BackboneState, backbone_evidence, backbone_scores, started
from protofed.methods.protocol import Diagnostics, World
from protofed.seeds import stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice


def rows_ever_trained(slice_: TimeSlice) -> Tensor:
    """Which of the items seen up to the train cut occur in some train part."""
    items = slice_.past.items[slice_.past.place[slice_.all_train_positions]]
    met = torch.zeros(slice_.n_train_items, dtype=torch.bool)
    met[torch.from_numpy(items)] = True
    return met


@dataclass(frozen=True, slots=True)
class FullRetrain:
    def start(self, world: World) -> BackboneState:
        return started(world)

    def learn(
        self, world: World, state: BackboneState, slice_: TimeSlice, descend: Descend
    ) -> tuple[BackboneState, Diagnostics]:
        config = world.config
        model = SASRec(config.backbone, slice_.n_train_items, stream(config.seed, "full-retrain", slice_.index))
        model.has_row = rows_ever_trained(slice_)
        task = Task(
            slice_,
            slice_.all_train_positions,
            config.training.base_epochs,
            config.training.learning_rate,
            config.training.prompt_rate,
        )
        model = model.to(state.backbone.items.device)
        model, fit = train(model, task, config.training, seed=config.seed, descend=descend, progress=world.progress)
        return BackboneState(model, slice_.index, fit.newest_target), fit.diagnostics()

    def score(self, world: World, state: BackboneState, queries: Queries) -> Float[Tensor, "B I"]:
        return backbone_scores(state, queries)

    def evidence(self, state: BackboneState) -> Evidence:
        return backbone_evidence(state)
