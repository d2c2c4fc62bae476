"""The loss of one window, in a form that a private descent maps over many windows at once.

A window reads a few hundred rows of the item table, and a gradient of the whole table for each of them would cost a
hundred times more. So a look-up adds a change, which is zero, to the rows it returns: the gradient with respect to that
change is the gradient of the rows, in the order in which they were read (`LookUps`).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.backbone.extras import Dealt, Extra, Lots, Notes
from protofed.backbone.functional import lending
from protofed.backbone.losses import ElementLoss, window_losses
from protofed.backbone.sasrec import SASRec
from protofed.slices.histories import PAD
from protofed.slices.windows import NO_TARGET, Windows

T = TypeVar("T")
TABLE = "items"  # the item table's name among a backbone's parameters
PLENTY = 10**9  # more random numbers than any extra loss asks for


@dataclass(frozen=True, slots=True)
class Needs:
    """What the loss of a window asks for: random numbers, and look-ups of these shapes.

    `rows_alone` is false where the table is read in another way too, say by a penalty on all of it.
    """

    numbers: int
    look_ups: tuple[tuple[int, ...], ...]
    rows_alone: bool


@dataclass(frozen=True, slots=True)
class OneWindowLoss:
    """What a window loses in a private round, and what is to be drawn for it."""

    model: SASRec
    element_loss: ElementLoss
    negatives: int  # uniform items for each window
    n_items: int
    targets: int  # of a window, at most
    extra: Extra | None = None
    round_: int = 0
    known_needs: dict[int, Needs] = field(default_factory=dict)  # by tokens; the same in all rounds of a training

    def __call__(
        self, model: SASRec, window: Windows, negatives: Int[Tensor, "1 n"], lots: Lots
    ) -> tuple[Float[Tensor, ""], Notes]:
        """The summed loss of one window's targets as this model has it, and what the extra loss told."""
        notes = Notes()
        sums, _ = window_losses(model, window, negatives, self.element_loss)
        if self.extra is not None:
            sums = sums + self.extra.losses(model, window, lots, notes)
        return sums.sum(), notes

    def needs(self, tokens: int) -> Needs:
        """Found by asking once, about a window without events, so that nobody's data decides it."""
        if tokens not in self.known_needs:
            self.known_needs[tokens] = self._asked(tokens)
        return self.known_needs[tokens]

    def _asked(self, tokens: int) -> Needs:
        device = self.model.items.device
        window, table = empty_window(tokens, self.targets, device), self.model.items.detach().requires_grad_(True)
        negatives = torch.zeros(1, min(self.negatives, self.n_items), dtype=torch.int64, device=device)
        lots, look_ups = Dealt(torch.zeros(1, device=device).expand(PLENTY)), LookUps(self.model)
        asked = reading(self.model, look_ups)
        with torch.enable_grad():
            loss = lending(self.model, {TABLE: table}, lambda: self(asked, window, negatives, lots)[0])
            (elsewhere, *_) = torch.autograd.grad(loss, [table, *look_ups.changes], allow_unused=True)
        return Needs(lots.used, tuple(tuple(items.shape) for items in look_ups.items), elsewhere is None)


@dataclass(slots=True)
class LookUps:
    """`SASRec.embed` with a change added to each row that is read for a gradient; made up where none is given."""

    model: SASRec
    given: Sequence[Tensor] | None = None
    items: list[Tensor] = field(default_factory=list)  # what was read, in order
    changes: list[Tensor] = field(default_factory=list)

    def __call__(self, items: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape d"]:
        with torch.no_grad():
            rows = SASRec.embed(self.model, items)
        if not torch.is_grad_enabled():
            return rows
        change = torch.zeros_like(rows, requires_grad=True) if self.given is None else self.given[len(self.items)]
        self.items.append(items.clamp(0, self.model.n_rows - 1))
        self.changes.append(change)
        return rows + torch.where(self.model.knows(items)[..., None], change, 0.0)


def reading(model: SASRec, look_ups: LookUps) -> SASRec:
    """The same model, weights shared, that looks items up in this way."""
    other = copy.copy(model)
    other.embed = look_ups  # type: ignore[method-assign]
    return other


def empty_window(tokens: int, targets: int, device: torch.device) -> Windows:
    """One window without events."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    columns = zero[:, None].expand(-1, targets)
    return Windows(zero, zero[:, None].expand(-1, tokens) + PAD, columns, columns + NO_TARGET, zero - 1)
