"""FullRetrain: a fresh model on everything so far, at every slice.

What we implement: weights drawn anew, trained on the train parts of slices 0..t until the validation part of slice t
stops improving, with the base block's epoch cap: it is a training from scratch, and a small cap would make it weak.
How it differs: called an oracle elsewhere; under drift it need not be one, so we only report it. Under `--variant peft`
the backbone of the base block stays and its prompt is drawn anew and trained on everything so far; item rows keep to
the rule for all: those of earlier slices stay as they were learned, this slice's learn now.
Privacy: a private run starts every slice from the warm-up, which has learned the base block for free (under `peft` a
plain training of the new prompt does), and takes its private steps on all train events after it, and on those alone: a
user's events of slice 1 are paid for again in every later one.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from protofed.backbone.content import like_content_of
from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Descend, Fit, Task, train
from protofed.methods.frozen import (
    BackboneState,
    after_base_block,
    backbone_evidence,
    backbone_scores,
    on_base_block,
    rows_for,
    start_from_backbone,
)
from protofed.methods.protocol import Diagnostics, World
from protofed.methods.variants import attach_prompt, is_peft, parts_to_train
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


def first_weights(world: World, state: BackboneState, slice_: TimeSlice) -> tuple[SASRec, Tensor]:
    """Weights drawn anew, and which rows are new to a frozen backbone, whose prompt alone is drawn anew.

    Under privacy those of the warm-up, since some noised steps from nothing lead nowhere.
    """
    if is_peft(world):
        first, new = rows_for(world, state.backbone, slice_)
        return attach_prompt(world, first, "full-retrain", slice_.index), new
    if world.config.privacy.wrap:
        return rows_for(world, world.backbone, slice_)
    rng = stream(world.config.seed, "full-retrain", slice_.index)
    model = SASRec(world.config.backbone, slice_.n_train_items, rng)
    model.has_row = rows_ever_trained(slice_)
    model = like_content_of(model, world.backbone)
    return model, model.has_row


def train_on(
    world: World, model: SASRec, new: Tensor, slice_: TimeSlice, events: np.ndarray, descend: Descend
) -> tuple[SASRec, Fit]:
    """The model after a training as long as the base block's on these events."""
    config = world.config
    rate = 0.0 if is_peft(world) else config.training.prompt_rate
    task = Task(slice_, events, config.training.base_epochs, config.training.learning_rate, rate)
    return train(
        model,
        task,
        config.training,
        seed=config.seed,
        descend=descend,
        trainable=parts_to_train(world, new),
        progress=world.progress,
    )


@dataclass(frozen=True, slots=True)
class FullRetrain:
    def start(self, world: World) -> BackboneState:
        return start_from_backbone(world)

    def learn(
        self, world: World, state: BackboneState, slice_: TimeSlice, descend: Descend
    ) -> tuple[BackboneState, Diagnostics]:
        model, new = first_weights(world, state, slice_)
        model = model.to(state.backbone.items.device)
        events = slice_.all_train_positions
        if world.config.privacy.wrap:
            events = after_base_block(slice_)
            if is_peft(world):
                free = on_base_block(world, descend)
                model, _ = train_on(world, model, new, world.base, world.base.train_positions, free)
        model, fit = train_on(world, model, new, slice_, events, descend)
        return BackboneState(model, slice_.index, fit.newest_target), fit.diagnostics()

    def score(self, world: World, state: BackboneState, queries: Queries) -> Float[Tensor, "B I"]:
        return backbone_scores(state, queries)

    def evidence(self, state: BackboneState) -> Evidence:
        return backbone_evidence(state)
