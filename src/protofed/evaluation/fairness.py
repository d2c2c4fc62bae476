"""Who is shown and who is served: exposure of popular and rare items, accuracy for busy and quiet users."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from protofed.evaluation.strata import TERTILES, tertiles


@dataclass(frozen=True, slots=True)
class ItemDisparity:
    """Exposure relative to availability (1.0 is proportional), and the plain share of all exposure."""

    head: float
    tail: float
    head_share: float
    tail_share: float

    @property
    def disparity(self) -> float:
        return abs(self.head - self.tail)

    @property
    def share_disparity(self) -> float:
        return abs(self.head_share - self.tail_share)


@dataclass(frozen=True, slots=True)
class UserDisparity:
    """Mean NDCG@10 over the users of the busiest and of the quietest third."""

    high: float
    low: float

    @property
    def disparity(self) -> float:
        return abs(self.high - self.low)


def position_exposure(
    scores: Float[Tensor, "B I"], mask: Bool[Tensor, "B I"] | None = None, *, k: int = 10
) -> Float[Tensor, "B I"]:
    """Each candidate's expected share of attention: 1 / log2(r + 1) at rank r up to k, 0 below.

    Candidates with equal scores share the weights of the ranks they cover, so the order of the columns (where the
    positive sits) does not matter. NaN ranks last; masked candidates get nothing and take no rank.
    """
    valid = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    keys = scores.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    keys = keys.masked_fill(~valid, -torch.inf)
    ascending = keys.sort(dim=1).values
    width = scores.shape[1]
    above = width - torch.searchsorted(ascending, keys, right=True)
    reached = width - torch.searchsorted(ascending, keys)
    reached = reached.minimum(valid.sum(1, keepdim=True))  # masked candidates share the bottom with NaN and -inf
    ranks = torch.arange(1, width + 1, device=scores.device).double()
    weights = torch.where(ranks <= k, 1 / torch.log2(ranks + 1), 0.0)
    total = torch.nn.functional.pad(weights.cumsum(0), (1, 0))  # (I + 1): what the first r ranks are worth
    shared = (total[reached] - total[above]) / (reached - above).clamp(min=1)
    return shared * valid


def exposure_by_item(
    scores: Float[Tensor, "B I"],
    candidates: Int[Tensor, "B I"],
    n_items: int,
    mask: Bool[Tensor, "B I"] | None = None,
    *,
    k: int = 10,
) -> tuple[Float[Tensor, " n_items"], Int[Tensor, " n_items"]]:
    """Each item's exposure in the top-k lists and how often it was a candidate; add up batches at will."""
    valid = torch.ones_like(candidates, dtype=torch.bool) if mask is None else mask
    # On the CPU: the order of atomic additions on an accelerator would move the last digits from run to run.
    items = candidates[valid].cpu().long()
    shares = position_exposure(scores, mask, k=k)[valid].cpu()
    exposure = torch.bincount(items, weights=shares, minlength=n_items)
    # Without queries bincount forgets the type of the weights.
    return exposure.double(), torch.bincount(items, minlength=n_items)


def head_items(train_counts: Num[Tensor, " n_items"], *, fraction: float = 0.2) -> Bool[Tensor, " n_items"]:
    """The most frequent fifth of the items (at least one); equal counts go by item number, lower numbers first.

    Count the items available so far and no others: items of the future would widen the head.
    """
    return _places(train_counts) < _part(fraction, len(train_counts))


def bottom_items(train_counts: Num[Tensor, " n_items"], *, fraction: float = 0.2) -> Bool[Tensor, " n_items"]:
    """The least frequent fifth of the items (at least one): the narrow reading of "tail"."""
    n_items = len(train_counts)
    return _places(train_counts) >= n_items - _part(fraction, n_items)


def item_disparity(
    exposure: Float[Tensor, " n_items"],
    availability: Int[Tensor, " n_items"],
    head: Bool[Tensor, " n_items"],
    tail: Bool[Tensor, " n_items"] | None = None,
) -> ItemDisparity:
    """The exposure of head and tail (all other items, unless given); NaN for a group that was never a candidate."""
    tail = ~head if tail is None else tail
    shown, seen = float(exposure.sum()), float(availability.sum())
    shares, expected = [], []
    for group in (head, tail):
        present = float(availability[group].sum())
        shares.append(float(exposure[group].sum()) / shown if present else float("nan"))
        expected.append(present / seen if present else float("nan"))
    return ItemDisparity(shares[0] / expected[0], shares[1] / expected[1], *shares)


def user_disparity(
    ndcg_sums: Float[np.ndarray, " U"], counts: Int[np.ndarray, " U"], activity: Num[np.ndarray, " U"]
) -> UserDisparity:
    """Mean NDCG@10 over users of the busiest and the quietest third of all users with any activity up to the slice.

    Every user weighs the same; users without a query are absent; a third without queries is NaN.
    """
    third = tertiles(activity, activity > 0)

    def mean_of(label: str) -> float:
        members = (third == TERTILES.index(label)) & (counts > 0)
        return float((ndcg_sums[members] / counts[members]).mean()) if members.any() else float("nan")

    return UserDisparity(high=mean_of("high"), low=mean_of("low"))


def _places(train_counts: Num[Tensor, " n_items"]) -> Int[Tensor, " n_items"]:
    """Each item's place, from 0, in the order of falling counts."""
    return torch.sort(train_counts.cpu(), descending=True, stable=True).indices.argsort()


def _part(fraction: float, n_items: int) -> int:
    return max(1, round(fraction * n_items))
