"""FineTune-Last: yesterday's weights, today's slice.

What we implement: all weights warm-started from the previous slice, new item rows by the shared rule, trained on the
current slice's train part alone, stopped early on its validation part; the optimiser starts anew at each slice.
How it differs: "train only on the current slice" also allows a cold start; `cold=True` gives that reading.
Under `--variant peft` the backbone stays frozen and one shared prompt trains beside the slice's new rows: this is
prompt tuning (Lester et al., The power of scale for parameter-efficient prompt tuning, EMNLP 2021), warm-started from
slice to slice, and the catalogue's `prompt-tuning` is nothing else. The prompt has as many tokens as those the warm-up
met (the original has 100), starts at drawn item rows and always has the length of the backbone's inputs; at slice 0 it
has learned nothing yet. `cold=True` draws it anew at each slice.
Privacy: the prompt is small, so a private step adds little noise to it; nothing else is kept.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from protofed.backbone.extras import Extra
from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Descend, Fit, Task, Trainable, train
from protofed.methods.frozen import BackboneState, backbone_evidence, backbone_scores, rows_for, start_from_backbone
from protofed.methods.protocol import Diagnostics, World
from protofed.methods.variants import attach_prompt, is_peft, parts_to_train
from protofed.progress import Progress
from protofed.seeds import stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice


def fine_tuned(
    world: World,
    first: tuple[SASRec, Bool[Tensor, " n"]],
    slice_: TimeSlice,
    descend: Descend,
    *,
    extra: Extra | None = None,
    trainable: Trainable | None = None,
    progress: Progress | None = None,
) -> tuple[SASRec, Fit]:
    """`first` trained on the slice's train part as FineTune-Last would, plus what the method adds to the loss.

    `first` is what `rows_for` gives: a model and which of its rows are new. What trains follows from the variant.
    """
    (model, new), training = first, world.config.training
    task = Task(slice_, slice_.train_positions, training.slice_epochs, training.slice_learning_rate)
    return train(
        model,
        task,
        training,
        seed=world.config.seed,
        descend=descend,
        trainable=trainable or parts_to_train(world, new),
        extra=extra,
        progress=progress or world.progress,
    )


@dataclass(frozen=True, slots=True)
class FineTuneLast:
    cold: bool = False

    def start(self, world: World) -> BackboneState:
        return start_from_backbone(world)

    def learn(
        self, world: World, state: BackboneState, slice_: TimeSlice, descend: Descend
    ) -> tuple[BackboneState, Diagnostics]:
        model, fit = fine_tuned(world, self._first_weights(world, state, slice_), slice_, descend)
        learned = BackboneState(model, slice_.index, max(state.newest_target, fit.newest_target))
        return learned, fit.diagnostics()

    def _first_weights(
        self, world: World, state: BackboneState, slice_: TimeSlice
    ) -> tuple[SASRec, Bool[Tensor, " n"]]:
        warm, new = rows_for(world, state.backbone, slice_)
        if not self.cold:
            return warm, new
        if is_peft(world):
            return attach_prompt(world, warm, "cold-start", slice_.index), new
        rng = stream(world.config.seed, "cold-start", slice_.index)
        return SASRec(world.config.backbone, slice_.n_train_items, rng).to(warm.items.device), new

    def score(self, world: World, state: BackboneState, queries: Queries) -> Float[Tensor, "B I"]:
        return backbone_scores(state, queries)

    def evidence(self, state: BackboneState) -> Evidence:
        return backbone_evidence(state)
