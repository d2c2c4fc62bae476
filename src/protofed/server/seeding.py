"""Where prototypes start: spherical k-means on the embeddings of base users, seeded apart from each other."""

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from protofed.client.codec import unit
from protofed.errors import ConfigError


def spherical_kmeans(
    z: Float[Tensor, "n d_z"], k: int, rng: Generator, *, iterations: int = 25, starts: int = 1
) -> Float[Tensor, "K d_z"]:
    """k unit vectors at the centres of unit vectors, by k-means++ seeds and Lloyd's iterations on cosines.

    Of several starts the one whose centres are nearest to the points. Prototypes of a frozen base, so no ε is spent.
    With fewer distinct points than k the rest are random directions.
    """
    if k < 1:
        raise ConfigError(f"a library needs at least one prototype, got {k}")
    points = z[z.isfinite().all(-1) & (z.norm(dim=-1) > 0)]
    found = [_centres(points, k, rng, iterations) for _ in range(starts)]
    return max(found, key=lambda centres: _closeness(points, centres))


def _closeness(points: Float[Tensor, "n d_z"], centres: Float[Tensor, "K d_z"]) -> float:
    """The sum over points of the cosine with their nearest centre."""
    return float((points @ centres.T).amax(-1).double().sum()) if len(points) else 0.0


def _centres(points: Float[Tensor, "n d_z"], k: int, rng: Generator, iterations: int) -> Float[Tensor, "K d_z"]:
    centres = _seeds(points, k, rng)
    for _ in range(iterations if len(points) else 0):
        nearest = (points @ centres.T).argmax(-1)
        sums = torch.zeros_like(centres).index_add(0, nearest, points)
        length: Tensor = sums.norm(dim=-1, keepdim=True)
        centres = torch.where(length > 1e-6, sums / length.clamp(min=1e-6), centres)
    return centres


def _seeds(points: Float[Tensor, "n d_z"], k: int, rng: Generator) -> Float[Tensor, "K d_z"]:
    """k-means++ (Arthur and Vassilvitskii 2007): a seed is drawn by its squared distance from the others."""
    random = unit(torch.randn(k, points.shape[1], generator=rng)).to(points)
    draws = torch.rand(k, generator=rng, dtype=torch.float64)
    chosen: list[Tensor] = []
    far = torch.full_like(points[:, 0], 2.0, dtype=torch.float64)
    for i in range(k):
        mass = far.cpu().cumsum(0)
        if not len(points) or float(mass[-1]) <= 1e-9:  # nothing left that is not a seed already
            chosen.append(random[i])
            continue
        place = int(torch.searchsorted(mass, draws[i] * mass[-1]).clamp(max=len(points) - 1))
        chosen.append(points[place])
        gap = 2 - 2 * (points @ points[place]).double()
        far = torch.minimum(far, torch.where(gap < 1e-6, torch.zeros_like(gap), gap))
    return torch.stack(chosen)
