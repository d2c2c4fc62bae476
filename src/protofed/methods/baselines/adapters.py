"""Adapters: small residual bottlenecks inside a frozen backbone, one set for all slices or one for each.

Adapters: Houlsby et al., Parameter-efficient transfer learning for NLP, ICML 2019.
AdapterCL: Madotto et al., Continual learning in task-oriented dialogue systems, EMNLP 2021.

What we implement: x + up(gelu(down(x))) after each attention's output and each feed-forward part, before they are added
to the stream. `Adapters` trains one set, warm-started from slice to slice. `AdapterCL` keeps one set per slice, each
copied from the one before it and then left alone; a query is read with the set whose loss on the query's own last 5
history items is lowest (the dialogue systems' perplexity), never with that of its true slice. New rows learn by the
shared rule, in their own slice, and serve every set; nothing else moves.
How it differs: norms stay frozen (Houlsby trains them); up starts at zero, so a fresh set is exactly the backbone,
which is also the base block's set. The dialogue systems' extra LayerNorm is left out. The loss that chooses is the
training's, against fixed uniform items drawn once from the seed; of equal sets, and for users without a history, the
newest is taken. Bottleneck 4: 2,320 numbers in two blocks of width 64.
Privacy: adapters are released weights and the choice is made on the device from the user's own history; nothing else is
kept.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.backbone.functional import lending
from protofed.backbone.losses import LOSSES, draw_negatives, window_losses
from protofed.backbone.sasrec import SASRec
from protofed.backbone.small_modules import Weights, modules_and_rows, small_weights, with_adapters
from protofed.backbone.training import Descend
from protofed.methods.baselines.buffer import within
from protofed.methods.baselines.finetune_last import fine_tuned
from protofed.methods.frozen import BackboneState, backbone_evidence, backbone_scores, rows_for, start_from_backbone
from protofed.methods.protocol import Diagnostics, World
from protofed.methods.variants import way_of_modules
from protofed.seeds import stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice
from protofed.slices.windows import NO_TARGET, Windows

PROBES = 512  # validation queries that the log's share of choices rests on


@dataclass(frozen=True, slots=True)
class AdapterSetsState(BackboneState):
    """A backbone with the newest set attached, and the sets of all slices so far, oldest first."""

    sets: dict[str, Tensor]  # by the parameter's name, (t, ...)


def with_fresh_adapters(world: World, bottleneck: int) -> BackboneState:
    """The backbone with a set that changes nothing yet."""
    rng = stream(world.config.seed, "adapters")
    return replace(start_from_backbone(world), backbone=with_adapters(world.backbone, bottleneck, rng))


def learn_modules(
    world: World, state: BackboneState, slice_: TimeSlice, descend: Descend, rate: float
) -> tuple[BackboneState, Diagnostics]:
    """The attached set after the slice's train part, and how far it has come."""
    first, new = rows_for(world, state.backbone, slice_)
    model, fit = fine_tuned(world, (first, new), slice_, descend, trainable=modules_and_rows(new, rate))
    learned = BackboneState(model, slice_.index, max(state.newest_target, fit.newest_target))
    return learned, {**fit.diagnostics(), "module_change": way_of_modules(state.backbone, model)}


def own_last_items(tokens: Int[Tensor, "B L"], n: int) -> Windows:
    """Each history's last n items as targets, every one of them read from the token before it."""
    (rows, length), device = tokens.shape, tokens.device
    n = min(n, length - 1)
    asked = tokens[:, length - n :]
    sources = torch.arange(length - 1 - n, length - 1, device=device).expand(rows, -1)
    nobody = torch.full((rows,), -1, device=device)
    return Windows(nobody, tokens, sources, torch.where(asked >= 0, asked, NO_TARGET), nobody)


def set_at(sets: Weights, place: int) -> dict[str, Tensor]:
    return {name: tensor[place] for name, tensor in sets.items()}


def lowest(losses: Float[Tensor, "t B"]) -> Int[Tensor, " B"]:
    """The place of each column's lowest value; of equal ones the last."""
    places = torch.arange(len(losses), device=losses.device)[:, None]
    return torch.where(losses == losses.amin(0), places, -1).amax(0)


@dataclass(frozen=True, slots=True)
class Adapters:
    """One set of adapters for all slices."""

    bottleneck: int = 4
    learning_rate: float = 3e-3

    def __post_init__(self) -> None:
        within("bottleneck", self.bottleneck, 1, 65_536)

    def start(self, world: World) -> BackboneState:
        return with_fresh_adapters(world, self.bottleneck)

    def learn(
        self, world: World, state: BackboneState, slice_: TimeSlice, descend: Descend
    ) -> tuple[BackboneState, Diagnostics]:
        return learn_modules(world, state, slice_, descend, self.learning_rate)

    def score(self, world: World, state: BackboneState, queries: Queries) -> Float[Tensor, "B I"]:
        return backbone_scores(state, queries)

    def evidence(self, state: BackboneState) -> Evidence:
        return backbone_evidence(state)


@dataclass(frozen=True, slots=True)
class AdapterCL:
    """One set of adapters per slice; each query's own history says which of them reads it."""

    bottleneck: int = 4
    learning_rate: float = 3e-3
    history: int = 5  # how many of its last items are asked

    def __post_init__(self) -> None:
        within("bottleneck", self.bottleneck, 1, 65_536)
        within("history", self.history, 1, 100_000)

    def start(self, world: World) -> AdapterSetsState:
        begun = with_fresh_adapters(world, self.bottleneck)
        sets = {name: tensor[None] for name, tensor in small_weights(begun.backbone).items()}
        return AdapterSetsState(begun.backbone, begun.slice_index, begun.newest_target, sets)

    def learn(
        self, world: World, state: AdapterSetsState, slice_: TimeSlice, descend: Descend
    ) -> tuple[AdapterSetsState, Diagnostics]:
        after, diagnostics = learn_modules(world, state, slice_, descend, self.learning_rate)
        newest = small_weights(after.backbone)
        sets = {name: torch.cat([old.to(newest[name].device), newest[name][None]]) for name, old in state.sets.items()}
        learned = AdapterSetsState(after.backbone, after.slice_index, after.newest_target, sets)
        kept = {"adapter_sets": len(next(iter(sets.values()))), "newest_chosen": self._share(world, learned, slice_)}
        return learned, {**diagnostics, **kept}

    @torch.no_grad()
    def _share(self, world: World, state: AdapterSetsState, slice_: TimeSlice) -> float:
        """Which part of some validation queries would be read with the newest set."""
        some = np.arange(min(PROBES, len(slice_.validation)))
        if not len(some):
            return 0.0
        tokens = slice_.queries(some, world.config.backbone.history_length).tokens.to(state.backbone.items.device)
        chosen = self.chosen(world, state, tokens)
        return float((chosen == slice_.index - world.base.index).float().mean())

    def chosen(self, world: World, state: AdapterSetsState, tokens: Int[Tensor, "B L"]) -> Int[Tensor, " B"]:
        """The set that each history is read with."""
        config, model = world.config, state.backbone
        drawn = draw_negatives(1, config.training.negatives, model.n_rows, stream(config.seed, "adapter-cl"))
        negatives, asked = drawn.to(tokens.device).expand(len(tokens), -1), own_last_items(tokens, self.history)

        def losses() -> Tensor:
            return window_losses(model, asked, negatives, LOSSES[config.training.loss])[0]

        n_sets = len(next(iter(state.sets.values())))
        return lowest(torch.stack([lending(model, set_at(state.sets, place), losses) for place in range(n_sets)]))

    def score(self, world: World, state: AdapterSetsState, queries: Queries) -> Float[Tensor, "B I"]:
        model, chosen = state.backbone, self.chosen(world, state, queries.tokens)
        hidden = torch.zeros(len(queries), model.config.width, device=model.items.device)
        for place in chosen.unique().tolist():
            mine = chosen == place
            hidden[mine] = read_with(model, set_at(state.sets, place), queries.tokens[mine])
        return model.scores(hidden, queries.n_items)

    def evidence(self, state: AdapterSetsState) -> Evidence:
        return backbone_evidence(state)


def read_with(model: SASRec, weights: Weights, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B d"]:
    """The last hidden state of each history under these small modules."""
    return lending(model, weights, lambda: model.last_hidden(tokens))
