"""Whose items fill the Top-10: places of popular, middling and rare items in the full ranking."""

import numpy as np
import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from protofed.evaluation.fairness import bottom_items, head_items

GROUPS = ("head", "middle", "tail")
PLACES = {group: f"exposure_{group}@10" for group in GROUPS}  # as metrics.parquet calls them
EVENTS = {group: f"events_{group}" for group in GROUPS}


def popularity_groups(train_counts: Num[Tensor, " I"]) -> Int[Tensor, " I"]:
    """Each item's place in GROUPS: the most frequent fifth, the least frequent fifth, and all between.

    Where the fifths meet (fewer than two items) the head goes first.
    """
    head, bottom = head_items(train_counts), bottom_items(train_counts)
    return torch.where(head, 0, torch.where(bottom, 2, 1))


def top_places(scores: Float[Tensor, "B I"], groups: Int[Tensor, " I"], *, k: int = 10) -> Float[Tensor, "B G"]:
    """How many of each query's k best places go to each group; a row adds up to k, or to all items if those are fewer.

    Items that tie for the last places share them, so the order of the columns does not matter. NaN ranks last.
    """
    keys = scores.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    last = keys.topk(min(k, keys.shape[1]), dim=1, sorted=True).values[:, -1:]  # (B, 1)
    member = torch.nn.functional.one_hot(groups.to(keys.device), len(GROUPS)).float()  # (I, G)
    above, level = (keys > last).float() @ member, (keys == last).float() @ member  # (B, G)
    left = min(k, keys.shape[1]) - above.sum(1, keepdim=True)
    return above + left * level / level.sum(1, keepdim=True)


def shares(amounts: Num[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """Each group's part of the whole; NaN where there is nothing to share."""
    whole = amounts.sum()
    return amounts / whole if whole else np.full(len(amounts), np.nan)
