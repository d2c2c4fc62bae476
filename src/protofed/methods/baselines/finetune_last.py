"""FineTune-Last: yesterday's weights, today's slice.

What we implement: all weights warm-started from the previous slice, new item rows by the shared rule, trained on the
current slice's train part alone, stopped early on its validation part; the optimiser starts anew at each slice.
How it differs: "train only on the current slice" also allows a cold start; `cold=True` gives that reading.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from protofed.backbone.new_items import with_new_rows
from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Descend, ExtraLosses, Fit, Task, Trainable, everything, train
from protofed.methods.frozen import BackboneState, backbone_evidence, backbone_scores, started
from protofed.methods.protocol import Diagnostics, World
from protofed.progress import Progress
from protofed.seeds import stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice


def fine_tuned(
    world: World,
    first: SASRec,
    slice_: TimeSlice,
    descend: Descend,
    *,
    extra: ExtraLosses | None = None,
    trainable: Trainable = everything,
    progress: Progress | None = None,
) -> tuple[SASRec, Fit]:
    """`first` trained on the slice's train part as FineTune-Last would, plus what the method adds to the loss."""
    training = world.config.training
    task = Task(slice_, slice_.train_positions, training.slice_epochs, training.slice_learning_rate)
    return train(
        first,
        task,
        training,
        seed=world.config.seed,
        descend=descend,
        trainable=trainable,
        extra=extra,
        progress=progress or world.progress,
    )


@dataclass(frozen=True, slots=True)
class FineTuneLast:
    cold: bool = False

    def start(self, world: World) -> BackboneState:
        return started(world)

    def learn(
        self, world: World, state: BackboneState, slice_: TimeSlice, descend: Descend
    ) -> tuple[BackboneState, Diagnostics]:
        model, fit = fine_tuned(world, self._first_weights(world, state, slice_), slice_, descend)
        learned = BackboneState(model, slice_.index, max(state.newest_target, fit.newest_target))
        return learned, fit.diagnostics()

    def _first_weights(self, world: World, state: BackboneState, slice_: TimeSlice) -> SASRec:
        if not self.cold:
            return with_new_rows(state.backbone, slice_)[0]
        rng = stream(world.config.seed, "cold-start", slice_.index)
        return SASRec(world.config.backbone, slice_.n_train_items, rng).to(state.backbone.items.device)

    def score(self, world: World, state: BackboneState, queries: Queries) -> Float[Tensor, "B I"]:
        return backbone_scores(state, queries)

    def evidence(self, state: BackboneState) -> Evidence:
        return backbone_evidence(state)
