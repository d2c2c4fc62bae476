"""Rows for items that came after the base block, from noised introductions: a release, then post-processing only.

What a noised introduction is worth was learned on the base block, whose events the claim does not cover: there every
fifth item in turn plays a newcomer, is introduced by the block's last events under the same noise, and a linear map
from the noisy sums to its trained row is fitted. Noise in the rehearsal shrinks what is not worth believing.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.client.introductions import Introductions
from protofed.privacy.mechanism import Noise, add_gaussian_noise

DOUBT = 5.0  # kappa: an item introduced so often counts half of what it would with no doubt
RIDGE = 1e-3


def sum_introductions(
    said: Introductions, wanted: Bool[Tensor, " I"], std: float, noise: Noise
) -> Float[Tensor, "I r1"]:
    """Noised sums over clients for every wanted item, met or not; zeros for all other items."""
    sums = torch.zeros(len(wanted), said.values.shape[1], dtype=torch.float64)
    sums.index_add_(0, said.items, said.values.double())
    noised = add_gaussian_noise(sums[wanted], std, noise)
    return torch.zeros_like(sums).index_put((wanted,), noised).float()


def row_features(sums: Float[Tensor, "n r1"]) -> Float[Tensor, "n f"]:
    """Features that predict a row: shrunken mean coordinates, log count and a constant."""
    count = sums[:, :1].clamp(min=0)
    return torch.cat([sums[:, 1:] / (count + DOUBT), count.log1p(), torch.ones_like(count)], dim=1)


def fit_map(
    seen: Float[Tensor, "n f"], rows: Float[Tensor, "n d"], weights: Float[Tensor, " n"]
) -> Float[Tensor, "f d"]:
    """Linear map from features to item rows, by weighted ridge regression."""
    seen, rows, weights = seen.double(), rows.double(), weights.double()
    square = seen.T @ (seen * weights[:, None])
    square = square + RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=torch.float64)
    solved: Tensor = torch.linalg.solve(square, seen.T @ (rows * weights[:, None]))
    return solved.float()


def predict_rows(
    sums: Float[Tensor, "n r1"], exposures: Int[Tensor, " n"], maps: Float[Tensor, "T f d"], mean: Float[Tensor, " d"]
) -> Float[Tensor, "n d"]:
    """Predicted row of each item, by the map for as many noised sums as were added up for it."""
    used = maps[(exposures - 1).clamp(0, len(maps) - 1)]  # (n, f, d)
    return mean + (row_features(sums)[:, None] @ used)[:, 0]
