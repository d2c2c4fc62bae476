"""A small head on the device: the score of whatever model is inside, and what two small parts add to it.

score(i) = beta * inner(i) + m(own past with i), for items of the user's past, + r(counts of i, co-visits), for all.
A few hundred numbers, fitted among all items, so that what was met before is weighed against what was not. m reads
what never leaves a device; r reads counts that the setting allows everybody to have.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from protofed.inference.item_side import COVISITS, POPULARITY, ItemCounts, covisit_numbers, popularity_numbers
from protofed.inference.own_past import NUMBERS, own_past
from protofed.seeds import seeded
from protofed.slices.histories import Queries, moved

OWN_HIDDEN, ITEM_HIDDEN = 24, 8


class Part(nn.Module):
    """A line and one hidden layer over standardised numbers; as made it is 0 everywhere.

    Numbers beyond those it was fitted on count as the nearest of these: a small part should not be asked what it never
    saw.
    """

    centre: Tensor
    spread: Tensor
    least: Tensor
    most: Tensor

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        with seeded(0, "overwritten below"):
            self.line, self.widen, self.narrow = nn.Linear(width, 1), nn.Linear(width, hidden), nn.Linear(hidden, 1)
        for layer in (self.line, self.narrow):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        for name, value in (("centre", 0.0), ("spread", 1.0), ("least", -torch.inf), ("most", torch.inf)):
            self.register_buffer(name, torch.full((width,), value))

    def forward(self, x: Float[Tensor, "P f"]) -> Float[Tensor, " P"]:
        x = (x.clamp(self.least, self.most) - self.centre) / self.spread
        value: Tensor = self.line(x) + self.narrow(F.gelu(self.widen(x)))
        return value[:, 0]

    @torch.no_grad()
    def standardise(self, x: Float[Tensor, "P f"]) -> None:
        """Centre, spread and range of these numbers, in place."""
        self.centre.copy_(x.mean(0))
        self.spread.copy_(x.std(0, correction=0).clamp(min=1e-3))
        self.least.copy_(x.amin(0))
        self.most.copy_(x.amax(0))

    def leave_out(self, numbers: Sequence[int]) -> None:
        """From now on these numbers count as their mean, whatever they are; in place."""
        for bound in (self.least, self.most):
            bound[list(numbers)] = self.centre[list(numbers)]


class Head(nn.Module):
    """beta, m and r; as made it changes no ranking: beta is 1, m and r are 0. A part that is left out is None."""

    own: Part | None
    items: Part | None

    def __init__(self, *, own: bool = True, items: bool = True) -> None:
        super().__init__()
        self.log_beta = nn.Parameter(torch.zeros(()))
        self.own = Part(len(NUMBERS), OWN_HIDDEN) if own else None
        self.items = Part(len(POPULARITY) + len(COVISITS), ITEM_HIDDEN) if items else None

    @property
    def worn(self) -> bool:
        """Whether it changes any ranking."""
        return self.own is not None or self.items is not None


@dataclass(frozen=True, slots=True)
class Cells:
    """Numbers about some items of some queries: which query (ascending), which item."""

    which: Int[Tensor, " P"]
    items: Int[Tensor, " P"]
    x: Float[Tensor, "P f"]


def own_cells(queries: Queries, n_items: int) -> Cells:
    """What each query's own past says about the items in it."""
    which, items, x = own_past(queries)
    inside = items < n_items
    return Cells(which[inside], items[inside], x[inside])


def item_cells(queries: Queries, counts: ItemCounts, n_items: int) -> Cells:
    """What was met together with each query's newest items."""
    which, items, z = covisit_numbers(counts, queries)
    inside = items < n_items
    return Cells(which[inside], items[inside], z[inside])


def add_parts(
    head: Head,
    scores: Float[Tensor, "B I"],
    own: Cells,
    near: Cells,
    y: Float[Tensor, "A I 3"],
    ages: Int[Tensor, " B"],
) -> Float[Tensor, "B I"]:
    """The final scores: of query b with the counts y[ages[b]]."""
    whole = head.log_beta.exp() * scores
    if head.items is not None:
        plain = counts_alone(head.items, y)
        age = ages[near.which]
        together = head.items(torch.cat([y[age, near.items], near.x], dim=1)) - plain[age, near.items]
        whole = whole + (plain if len(plain) == 1 else plain[ages])
        whole = add_at(whole, near, together)
    return whole if head.own is None else add_at(whole, own, head.own(own.x))


def counts_alone(items: Part, y: Float[Tensor, "A I 3"]) -> Float[Tensor, "A I"]:
    """What r adds to items that were met together with nothing of a question."""
    return torch.stack([items(each) for each in F.pad(y, (0, len(COVISITS)))])


def add_at(scores: Float[Tensor, "B I"], cells: Cells, values: Float[Tensor, " P"]) -> Float[Tensor, "B I"]:
    """The scores with something added to cells that are all different ones."""
    where = (cells.which, cells.items)
    return scores.index_put(where, scores[where] + values)


@dataclass(frozen=True, slots=True)
class FittedHead:
    """A head and the counts it reads."""

    head: Head
    counts: ItemCounts


@torch.no_grad()
def with_head(fitted: FittedHead, scores: Float[Tensor, "B I"], queries: Queries) -> Float[Tensor, "B I"]:
    """The final scores of queries whose inner scores are given."""
    head, counts, n_items = fitted.head, fitted.counts, scores.shape[1]
    if not head.worn:
        return scores
    own, near = own_cells(queries, n_items), item_cells(queries, counts, n_items)
    ages = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    return add_parts(head, scores, own, near, popularity_numbers(counts, n_items)[None], ages)


def scores_under(
    fitted: FittedHead, inner: Sequence[Float[Tensor, "B I"]], queries: Queries
) -> list[Float[Tensor, "B I"]]:
    """The final scores of queries that were answered in several ways: what the head adds is the same for all."""
    if not fitted.head.worn or not inner:
        return list(inner)
    lift = with_head(fitted, torch.zeros(inner[0].shape), moved(queries, "cpu")).to(inner[0].device)
    beta = float(fitted.head.log_beta.exp())
    return [beta * scores + lift for scores in inner]
