"""The head for one question at a time: its weights laid out flat, plain arrays in place of a stack of questions.

A stack of questions is answered by `with_head`; here are the same numbers to rounding, in a fraction of the calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from protofed.inference.head import FittedHead, Part, counts_alone
from protofed.inference.item_side import SPAN, popularity_numbers
from protofed.inference.kept_past import KeptPast, KeptView, numbers_at, view_of


@dataclass(frozen=True, slots=True)
class FlatPart:
    """A part as one product: its line is the first column, its hidden layer the others."""

    least: Float[Tensor, " f"]
    most: Float[Tensor, " f"]
    centre: Float[Tensor, " f"]
    weights: Float[Tensor, "f h1"]
    bias: Float[Tensor, " h1"]
    narrow: Float[Tensor, " h"]


@dataclass(frozen=True, slots=True)
class FlatHead:
    """A head with all that counts say of every item, whoever asks."""

    beta: float
    own: FlatPart | None
    items: FlatPart | None
    y: Float[Tensor, "I 3"]  # numbers of POPULARITY
    plain: Float[Tensor, " I"] | None  # what r makes of them alone
    offsets: np.ndarray  # of each item's neighbours, as in Covisits
    neighbours: np.ndarray
    weights: np.ndarray
    root: np.ndarray  # what an item's co-visits are divided by for its popularity


@torch.no_grad()
def lay_out_head(fitted: FittedHead, n_items: int) -> FlatHead:
    """The head made ready for one question after another about so many items."""
    head, counts, near = fitted.head, fitted.counts, fitted.counts.covisits
    y = popularity_numbers(counts, n_items)
    return FlatHead(
        beta=float(head.log_beta.exp()),
        own=None if head.own is None else lay_out_part(head.own),
        items=None if head.items is None else lay_out_part(head.items),
        y=y,
        plain=None if head.items is None else counts_alone(head.items, y[None])[0],
        offsets=near.offsets.numpy(),
        neighbours=near.items.numpy(),
        weights=near.weights.numpy().astype(np.float64),
        root=(1 + counts.total.clamp(min=0).double()).sqrt().numpy(),
    )


def lay_out_part(part: Part) -> FlatPart:
    """A part with its spread divided into the weights; the centre is taken off first, so that nothing cancels."""
    weights = torch.cat([part.line.weight, part.widen.weight]) / part.spread
    bias = torch.cat([part.line.bias + part.narrow.bias, part.widen.bias])
    return FlatPart(part.least, part.most, part.centre, weights.T.contiguous(), bias, part.narrow.weight[0].clone())


@dataclass(frozen=True, slots=True)
class FlatPast:
    """What a device's past tells the head, whatever the time of the question."""

    own: KeptView | None
    near: Tensor  # items that were met together with its newest ones
    lift: Float[Tensor, " C"]  # what r adds for that


@torch.inference_mode()
def lay_out_past(flat: FlatHead, past: KeptPast | None, newest: Sequence[int]) -> FlatPast:
    """A device's past made ready: what it keeps, and its newest items, oldest first."""
    near, lift = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    if flat.items is not None and flat.plain is not None:
        near, z = met_together(flat, newest)
        lift = value_of(flat.items, torch.cat([flat.y[near], z], dim=1)) - flat.plain[near]
    return FlatPast(None if flat.own is None or past is None else view_of(past, len(flat.y)), near, lift)


@torch.inference_mode()
def add_head(flat: FlatHead, scores: Float[Tensor, " I"], past: FlatPast, now: int) -> Float[Tensor, " I"]:
    """The final scores of a question asked at `now`, from the scores inside."""
    whole = scores * flat.beta if flat.plain is None else torch.add(flat.plain, scores, alpha=flat.beta)
    whole.index_add_(0, past.near, past.lift)
    if flat.own is not None and past.own is not None:
        whole.index_add_(0, past.own.items, value_of(flat.own, numbers_at(past.own, now)))
    return whole


def value_of(part: FlatPart, x: Float[Tensor, "P f"]) -> Float[Tensor, " P"]:
    """What the part says of some items."""
    out = torch.addmm(part.bias, x.clamp(part.least, part.most).sub_(part.centre), part.weights)
    return out[:, 0] + F.gelu(out[:, 1:]) @ part.narrow


def met_together(flat: FlatHead, newest: Sequence[int]) -> tuple[Tensor, Float[Tensor, "C 2"]]:
    """The neighbours of the newest SPAN items and the numbers of COVISITS; the newest counts whole, the next half."""
    recent = [(item, 1 / n) for n, item in enumerate(reversed(newest[-SPAN:]), 1) if item < len(flat.offsets) - 1]
    spans = [(slice(flat.offsets[item], flat.offsets[item + 1]), share) for item, share in recent]
    met = np.concatenate([flat.neighbours[:0], *(flat.neighbours[span] for span, _ in spans)])
    weights = np.concatenate([flat.weights[:0], *(flat.weights[span] * share for span, share in spans)])
    asked = met < len(flat.y)
    items, where = np.unique(met[asked], return_inverse=True)
    summed = np.bincount(where, weights[asked], minlength=len(items))
    z = np.log1p([summed, summed / flat.root[items]]).T.astype(np.float32)
    return torch.from_numpy(items), torch.from_numpy(z)
