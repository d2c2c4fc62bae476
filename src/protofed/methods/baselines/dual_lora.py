"""Dual-LoRA: one low-rank update for the long run, one for the newest slice, merged.

Shi et al., Preliminary study on incremental learning for large language model-based recommender systems (LSAT), CIKM
2024; LoRA: Hu et al., LoRA: low-rank adaptation of large language models, ICLR 2022.

What we implement: LoRA on the query and value maps of every block. The short-term one starts anew at each slice and
trains on its train part, with the new rows (the shared rule). The long-term one goes on, at a tenth of the rate, on a
tenth of all train events so far, drawn anew. They are merged with a weight w of the long-term one, the best of 0.1 ..
0.9 on the slice's validation part. `merge="delta"` adds the updates, w B_l A_l + (1 - w) B_s A_s; `ensemble` adds
scores; `factor` averages A and B apart, as the published code does, which brings in cross terms B_l A_s.
How it differs: no dropout inside LoRA; both start from the same A, without which `factor` would mean nothing. Rank 2
each: 2 x 1,024 numbers in two blocks of width 64.
Privacy: two trainings a slice to be paid for. What a sample holds of the base block is learned plainly first, for free,
so that private steps see later events alone; which events those are is drawn event by event. A private run selects
nothing, so w is 0.5.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.backbone.functional import lending
from protofed.backbone.sasrec import SASRec
from protofed.backbone.small_modules import Weights, modules_and_rows, small_weights, with_lora, with_weights
from protofed.backbone.training import Descend, Fit, Task, best_of, train
from protofed.backbone.validation import exam_of, mean_grade
from protofed.methods.baselines.buffer import within
from protofed.methods.baselines.finetune_last import fine_tuned
from protofed.methods.frozen import BackboneState, backbone_evidence, on_base_block, rows_for, start_from_backbone
from protofed.methods.protocol import Diagnostics, World
from protofed.methods.variants import n_trained, way_of_modules
from protofed.privacy.draws import uniform
from protofed.seeds import numpy_stream, stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice

WEIGHTS = tuple(tenths / 10 for tenths in range(1, 10))
EVEN = 0.5  # where nothing says otherwise


@dataclass(frozen=True, slots=True)
class DualState(BackboneState):
    """A backbone with the long-term LoRA attached, the short-term one, and the share of the long-term one."""

    short: dict[str, Tensor]
    weight: float


def add_updates(long: Weights, short: Weights, weight: float) -> dict[str, Tensor]:
    """One LoRA of twice the rank whose update is weight times the long one's plus the rest of the short one's."""
    return {
        name: torch.cat([weight * tensor, (1 - weight) * short[name]], dim=1)
        if name.endswith("lora_up")
        else torch.cat([tensor, short[name]])
        for name, tensor in long.items()
    }


def average_factors(long: Weights, short: Weights, weight: float) -> dict[str, Tensor]:
    """One LoRA whose factors are means of the two, each apart."""
    return {name: weight * tensor + (1 - weight) * short[name] for name, tensor in long.items()}


@dataclass(frozen=True, slots=True)
class DualLoRA:
    rank: int = 2
    scaling: float = 2.0  # alpha / r
    learning_rate: float = 3e-2
    long_rate: float = 0.1  # of the long-term LoRA, as a part of the other's
    sample: float = 0.1  # share of all train events so far that it goes on with
    merge: Literal["delta", "ensemble", "factor"] = "delta"

    def __post_init__(self) -> None:
        within("rank", self.rank, 1, 65_536)
        within("long_rate", self.long_rate, 0, 1)
        within("sample", self.sample, 0, 1)

    def start(self, world: World) -> DualState:
        begun, model = start_from_backbone(world), self._fresh(world, world.backbone)
        return DualState(model, begun.slice_index, begun.newest_target, small_weights(model), EVEN)

    def learn(
        self, world: World, state: DualState, slice_: TimeSlice, descend: Descend
    ) -> tuple[DualState, Diagnostics]:
        first, new = rows_for(world, state.backbone, slice_)
        fresh, trainable = self._fresh(world, first), modules_and_rows(new, self.learning_rate)
        short, fit = fine_tuned(world, (fresh, new), slice_, descend, trainable=trainable)
        before = with_weights(short, small_weights(first))  # the rows are learned, the long-term LoRA is as it was
        long, long_fit = self._continued(world, before, slice_, descend)
        weight, traced = self._weight(world, long, small_weights(short), slice_)
        newest = max(state.newest_target, fit.newest_target, long_fit.newest_target)
        trained = n_trained(short, new) + n_trained(long, torch.zeros_like(new))
        return DualState(long, slice_.index, newest, small_weights(short), weight), {
            **replace(fit, trainable=trained).diagnostics(),
            "short_change": way_of_modules(fresh, short),
            "long_change": way_of_modules(before, long),
            "long_weight": weight,
            "merged_ndcg10": traced,
        }

    def _fresh(self, world: World, model: SASRec) -> SASRec:
        """The model with a LoRA that changes nothing yet; always the same one."""
        rng = stream(world.config.seed, "dual-lora")
        return with_lora(model, self.rank, self.scaling * self.rank, rng)

    def _continued(self, world: World, model: SASRec, slice_: TimeSlice, descend: Descend) -> tuple[SASRec, Fit]:
        """The long-term LoRA after a sample of everything so far; no row moves."""
        chosen = self._draw_sample(world, slice_)
        if world.config.privacy.wrap:
            public = chosen < slice_.bounds[0].end
            model, _ = self._train_long(world, model, world.base, chosen[public], on_base_block(world, descend))
            chosen = chosen[~public]
        return self._train_long(world, model, slice_, chosen, descend)

    def _draw_sample(self, world: World, slice_: TimeSlice) -> np.ndarray:
        """The train events so far on which the long-term LoRA goes on."""
        events, seed = slice_.all_train_positions, world.config.seed
        if world.config.privacy.wrap:  # each event has a coin of its own, whatever other events there are
            coins = uniform(seed, "dual-lora sample", torch.from_numpy(events), slice_.index).numpy()
        else:
            coins = numpy_stream(seed, "dual-lora", "sample", slice_.index).random(len(events))
        return np.asarray(events[coins < self.sample])

    def _train_long(
        self, world: World, model: SASRec, slice_: TimeSlice, events: np.ndarray, descend: Descend
    ) -> tuple[SASRec, Fit]:
        """The long-term LoRA after these events."""
        training, rate = world.config.training, self.learning_rate * self.long_rate
        return train(
            model,
            Task(slice_, events, training.slice_epochs, rate),
            training,
            seed=world.config.seed,
            descend=descend,
            trainable=modules_and_rows(torch.zeros(model.n_rows, dtype=torch.bool), rate),
            progress=world.progress,
        )

    def _weight(self, world: World, long: SASRec, short: Weights, slice_: TimeSlice) -> tuple[float, tuple[float, ...]]:
        """The share of the long-term LoRA that ranks the validation part best, and how each share ranks it."""
        if world.config.privacy.wrap or not len(slice_.validation):
            return EVEN, ()
        selection, length = world.config.training.selection, long.config.history_length
        exam = exam_of(slice_, selection, length, long.items.device)
        readers = [partial(self.last_hidden, long, short, weight) for weight in WEIGHTS]
        traced = tuple(mean_grade(long, exam, reader) for reader in readers)
        return WEIGHTS[best_of(traced)], traced

    def last_hidden(
        self, long: SASRec, short: Weights, weight: float, tokens: Int[Tensor, "B L"]
    ) -> Float[Tensor, "B d"]:
        """What the merged model makes of each history; a mean of scores is a score with the mean hidden state."""
        if self.merge == "ensemble":
            theirs = lending(long, short, lambda: long.last_hidden(tokens))
            return weight * long.last_hidden(tokens) + (1 - weight) * theirs
        merge = add_updates if self.merge == "delta" else average_factors
        own, other = small_weights(long), {name: tensor.to(tokens.device) for name, tensor in short.items()}
        return lending(long, merge(own, other, weight), lambda: long.last_hidden(tokens))

    def score(self, world: World, state: DualState, queries: Queries) -> Float[Tensor, "B I"]:
        hidden = self.last_hidden(state.backbone, state.short, state.weight, queries.tokens)
        return state.backbone.scores(hidden, queries.n_items)

    def evidence(self, state: DualState) -> Evidence:
        return backbone_evidence(state)
