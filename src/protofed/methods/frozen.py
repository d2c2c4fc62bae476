"""The frozen backbone: warmed up on the base block, then only new items get rows."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from protofed.backbone.new_items import only_rows, with_new_rows
from protofed.backbone.sasrec import SASRec, grown
from protofed.backbone.training import Descend, PlainDescent, Task, train
from protofed.methods.protocol import Diagnostics, World
from protofed.methods.variants import first_model
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice


@dataclass(frozen=True, slots=True)
class BackboneState:
    """A backbone and how far it has learned."""

    backbone: SASRec
    slice_index: int
    newest_target: int


def start_from_backbone(world: World) -> BackboneState:
    """The warmed-up backbone as it is, or with what the run's variant attaches."""
    return BackboneState(first_model(world), world.base.index, int(world.base.train_positions[-1]))


def rows_for(world: World, model: SASRec, slice_: TimeSlice) -> tuple[SASRec, Bool[Tensor, " n"]]:
    """A copy with rows for the slice's new items, and which rows those are: the one place where the rule is chosen."""
    if world.config.privacy.wrap:
        return with_public_rows(world, model, slice_)
    return with_new_rows(model, slice_)


def with_public_rows(world: World, model: SASRec, slice_: TimeSlice) -> tuple[SASRec, Bool[Tensor, " n"]]:
    """A copy that has read nothing of the slice but the size of the catalogue: new items start at the mean row or at
    the one from content.

    Where all weights train, every row of the catalogue may be moved by noised steps, met or not; elsewhere new items
    have none. No row is to be learned apart from the others: which ones were met is the users' secret.
    """
    bigger = grown(model, slice_.n_train_items)
    none = torch.zeros(bigger.n_rows, dtype=torch.bool)
    if world.config.variant == "standard":
        with torch.no_grad():
            bigger.items[~bigger.has_row] = model.untrained((~bigger.has_row).nonzero()[:, 0])
        bigger.has_row = torch.ones_like(bigger.has_row)
        bigger.refresh_mean_row()
    return bigger, none


def readable(world: World, slice_: TimeSlice) -> TimeSlice:
    """Whose events a method may keep, count or differentiate outside a private step: the slice's own, as a rule.

    Under privacy only the base block's, which the claim does not cover.
    """
    return world.base if world.config.privacy.wrap else slice_


def on_base_block(world: World, descend: Descend) -> Descend:
    """The descent for a training on nothing but the base block: the given one, under privacy a plain one, for free."""
    return PlainDescent(world.config.training.max_grad_norm) if world.config.privacy.wrap else descend


def after_base_block(slice_: TimeSlice) -> np.ndarray:
    """The train events so far that the claim protects: all that a private step may learn from.

    A step that also saw base events would go on hearing users whose later events are gone: deleting these would
    exchange a contribution for another, not remove it, and move the sum by twice the radius.
    """
    return slice_.all_train_positions[slice_.all_train_positions >= slice_.bounds[0].end]


def backbone_scores(state: BackboneState, queries: Queries) -> Float[Tensor, "B I"]:
    """Inner products of the last hidden state with every available item's row."""
    return state.backbone.scores(state.backbone.last_hidden(queries.tokens), queries.n_items)


def backbone_evidence(state: BackboneState) -> Evidence:
    return Evidence(state.slice_index, newest_target=state.newest_target, item_rows=state.backbone.n_rows)


def learn_new_rows(
    world: World, state: BackboneState, slice_: TimeSlice, descend: Descend
) -> tuple[BackboneState, Diagnostics]:
    """Rows of the items that are new in this slice, started by the shared rule and learned once; nothing else moves."""
    model, new = rows_for(world, state.backbone, slice_)
    if not new.any():
        return BackboneState(model.eval(), slice_.index, state.newest_target), {"new_rows": 0}
    config = world.config
    task = Task(slice_, slice_.train_positions, config.training.slice_epochs, config.training.slice_learning_rate)
    model, fit = train(
        model,
        task,
        config.training,
        seed=config.seed,
        descend=descend,
        trainable=only_rows(new),
        progress=world.progress,
    )
    learned = BackboneState(model, slice_.index, max(state.newest_target, fit.newest_target))
    return learned, {"new_rows": int(new.sum()), **fit.diagnostics()}


@dataclass(frozen=True, slots=True)
class Frozen:
    """Base backbone and the shared new-item rule, no popularity prior. `new_rows=False` leaves the mean row to all."""

    new_rows: bool = True

    def start(self, world: World) -> BackboneState:
        return start_from_backbone(world)

    def learn(
        self, world: World, state: BackboneState, slice_: TimeSlice, descend: Descend
    ) -> tuple[BackboneState, Diagnostics]:
        if not self.new_rows:
            return BackboneState(state.backbone, slice_.index, state.newest_target), {}
        return learn_new_rows(world, state, slice_, descend)

    def score(self, world: World, state: BackboneState, queries: Queries) -> Float[Tensor, "B I"]:
        return backbone_scores(state, queries)

    def evidence(self, state: BackboneState) -> Evidence:
        return backbone_evidence(state)
