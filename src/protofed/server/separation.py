"""Prototypes kept apart: every two of them at least a margin from each other, on the unit sphere.

Works on what was already released, so it costs no privacy.
"""

import math

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from protofed.client.codec import unit
from protofed.errors import ConfigError

TOLERANCE = 1e-3  # how much nearer than the margin two prototypes may be left
COINCIDENT = 1e-6
OVERSHOOT = 1.01  # aim a little beyond the margin, to arrive in finitely many sweeps
STUBBORN_SWEEPS = 500  # further, longer steps where the usual sweeps were not enough


def smallest_distance(v: Float[Tensor, "K d_z"]) -> Float[Tensor, ""]:
    """Distance of the closest two prototypes; infinite where there are not two."""
    return _distances(v).min() if len(v) > 1 else torch.tensor(torch.inf)


def enforce_separation(
    v: Float[Tensor, "K d_z"], margin: float, rng: Generator, *, max_sweeps: int = 10
) -> Float[Tensor, "K d_z"]:
    """Unit vectors near the given ones, no two closer than the margin (to 1e-3). Eq. (11), eq:separation.

    Each sweep moves all prototypes at once, so their order is irrelevant; coincident ones part in random directions. A
    margin that no arrangement has is refused; one near the densest packing may leave the best arrangement found. The
    paper's single pass in order (`literal_separation`) is no projection and leaves violations.
    """
    _check_possible(margin, *v.shape)
    directions = unit(torch.randn(v.shape, generator=rng, dtype=torch.float64)).to(v.device)
    x = unit(torch.where(v.norm(dim=-1, keepdim=True) > COINCIDENT, v.double(), directions))
    best, reached = x, float(smallest_distance(x))
    for sweep in range(max_sweeps + STUBBORN_SWEEPS):
        if reached >= margin - TOLERANCE / 2:
            break
        x = unit(x + _push(x, directions, OVERSHOOT * margin, gentle=sweep < max_sweeps))
        now = float(smallest_distance(x))
        if now > reached:
            best, reached = x, now
    return best.to(v.dtype)


def _push(
    x: Float[Tensor, "K d_z"], directions: Float[Tensor, "K d_z"], margin: float, *, gentle: bool
) -> Float[Tensor, "K d_z"]:
    """How far each prototype goes: half of each missing distance, away from each one that is too close.

    Gentle steps shrink with the number of neighbours and never exceed margin / sqrt(2), so that a crowd is not thrown
    across the sphere.
    """
    distance = _distances(x)
    missing = (margin - distance).clamp(min=0) / 2  # (K, K); 0 on the diagonal, where the distance is infinite
    apart = distance >= COINCIDENT
    push = _away(x, torch.where(apart, missing / distance.clamp(min=COINCIDENT), 0))
    push = push + _away(directions, torch.where(apart, 0, missing / _distances(directions)))
    if not gentle:
        return push
    push = push / (missing > 0).sum(1, keepdim=True).clamp(min=1).sqrt()
    length: Tensor = push.norm(dim=-1, keepdim=True)
    return push * (margin / math.sqrt(2) / length.clamp(min=margin / math.sqrt(2)))


def _away(x: Float[Tensor, "K d_z"], weights: Float[Tensor, "K K"]) -> Float[Tensor, "K d_z"]:
    """The weighted sum of x_i - x_j over j, without building all differences."""
    return weights.sum(1, keepdim=True) * x - weights @ x


def _distances(x: Float[Tensor, "K d_z"]) -> Float[Tensor, "K K"]:
    """All distances, the diagonal infinite."""
    distance = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    return distance.masked_fill(torch.eye(len(x), dtype=torch.bool, device=x.device), torch.inf)


def _check_possible(margin: float, n: int, d_z: int) -> None:
    """Rankin's bound: how far apart n unit vectors can be at best."""
    most = 2.0 if n < 2 else math.sqrt(2 * n / (n - 1)) if n <= d_z + 1 else math.sqrt(2)
    if margin > most:
        raise ConfigError(
            f"the separation margin must not exceed {most:.4f} for {n} prototypes in {d_z} dimensions, got {margin}"
        )


def literal_separation(v: Float[Tensor, "K d_z"], margin: float, *, epsilon: float = 1e-8) -> Float[Tensor, "K d_z"]:
    """The vectors after Algorithm 2's EnforceSeparation as printed: one pass over the pairs, in order.

    Coincident prototypes stay coincident, later pushes undo earlier ones, and vectors leave the sphere.
    """
    x = list(v)
    for i in range(len(x)):
        for j in range(i + 1, len(x)):
            distance: Tensor = (x[i] - x[j]).norm()
            if distance < margin:
                delta = (margin - distance) / 2 * (x[i] - x[j]) / (distance + epsilon)
                x[i], x[j] = x[i] + delta, x[j] - delta
    return torch.stack(x)
