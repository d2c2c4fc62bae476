"""Prefix-Tuning: keys and values of their own, in front of every block's, in a frozen backbone.

Li and Liang, Prefix-tuning: optimizing continuous prompts for generation, ACL 2021.
What we implement: each block attends to `length` learned keys and values besides those of the history, the same for all
users, seen from every position. They train through a small network that all blocks share, which is folded into them
after each slice; the next slice goes on from there. New rows learn by the shared rule, nothing else moves.
How it differs: the network gives the change of the prefix since the last slice, 0 at first, because after folding there
is no network left to go on from. The first prefix is what a prompt of drawn items would have as keys and values, which
the prompt-aware warm-up can read; drawn at random it would be noise in every softmax. Length 8: 2,048 numbers in two
blocks of width 64; the network is larger, and gone after training (`network_parameters` in the log).
Privacy: a private step noises the network's gradient, which is larger than the prefix; nothing else is kept.
"""

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from protofed.backbone.small_modules import fold_prefix, modules_and_rows, reparametrise, small_parameters, with_prefix
from protofed.backbone.training import Descend
from protofed.methods.baselines.buffer import within
from protofed.methods.baselines.finetune_last import fine_tuned
from protofed.methods.frozen import BackboneState, backbone_evidence, backbone_scores, rows_for, start_from_backbone
from protofed.methods.protocol import Diagnostics, World
from protofed.methods.variants import n_trained, way_of_modules
from protofed.seeds import stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice


@dataclass(frozen=True, slots=True)
class PrefixTuning:
    length: int = 8
    learning_rate: float = 3e-4
    inner: int = 64  # width of the network's hidden layer

    def __post_init__(self) -> None:
        within("length", self.length, 1, 10_000)
        within("inner", self.inner, 1, 65_536)

    def start(self, world: World) -> BackboneState:
        rng = stream(world.config.seed, "prefix-tuning", "start")
        return replace(start_from_backbone(world), backbone=with_prefix(world.backbone, self.length, rng))

    def learn(
        self, world: World, state: BackboneState, slice_: TimeSlice, descend: Descend
    ) -> tuple[BackboneState, Diagnostics]:
        grown, new = rows_for(world, state.backbone, slice_)
        first = reparametrise(grown, self.inner, stream(world.config.seed, "prefix-tuning", slice_.index))
        trainable = modules_and_rows(new, self.learning_rate)
        network, fit = fine_tuned(world, (first, new), slice_, descend, trainable=trainable)
        model = fold_prefix(network)
        learned = BackboneState(model, slice_.index, max(state.newest_target, fit.newest_target))
        return learned, {
            **replace(fit, trainable=n_trained(model, new)).diagnostics(),
            "network_parameters": sum(parameter.numel() for parameter in small_parameters(network).values()),
            "module_change": way_of_modules(state.backbone, model),
        }

    def score(self, world: World, state: BackboneState, queries: Queries) -> Float[Tensor, "B I"]:
        return backbone_scores(state, queries)

    def evidence(self, state: BackboneState) -> Evidence:
        return backbone_evidence(state)
