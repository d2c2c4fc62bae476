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
from protofed.backbone.training import Descend, Task, train
from protofed.methods.frozen import BackboneState, backbone_evidence, backbone_scores, started
from protofed.methods.protocol import Diagnostics, World
from protofed.seeds import stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice


@dataclass(frozen=True, slots=True)
class FineTuneLast:
    cold: bool = False

    def start(self, world: World) -> BackboneState:
        return started(world)

    def learn(
        self, world: World, state: BackboneState, slice_: TimeSlice, descend: Descend
    ) -> tuple[BackboneState, Diagnostics]:
        config = world.config
        model = self._first_weights(world, state, slice_)
        task = Task(slice_, slice_.train_positions, config.training.slice_epochs, config.training.slice_learning_rate)
        model, fit = train(model, task, config.training, seed=config.seed, descend=descend, progress=world.progress)
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
