"""Disparity between popular and rare items, and between busy and quiet users."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from protofed.evaluation.strata import TERTILES, tertiles


@dataclass(frozen=True, slots=True)
class UserDisparity:
    """Mean NDCG@10 over the users of the busiest and of the quietest third."""

    high: float
    low: float

    @property
    def disparity(self) -> float:
        return abs(self.high - self.low)


def head_items(train_counts: Num[Tensor, " n_items"], *, fraction: float = 0.2) -> Bool[Tensor, " n_items"]:
    """The most frequent fifth of the items (at least one); equal counts go by item number, lower numbers first.

    Count the items available so far and no others: items of the future would widen the head.
    """
    return _places(train_counts) < _part(fraction, len(train_counts))


def bottom_items(train_counts: Num[Tensor, " n_items"], *, fraction: float = 0.2) -> Bool[Tensor, " n_items"]:
    """The least frequent fifth of the items (at least one): the narrow reading of "tail"."""
    n_items = len(train_counts)
    return _places(train_counts) >= n_items - _part(fraction, n_items)


def item_disparity(head: Float[np.ndarray, "..."], tail: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Disp_item: the distance between the shares of all Top-10 places that go to head and to tail items."""
    distance: np.ndarray = np.abs(head - tail)
    return distance


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
