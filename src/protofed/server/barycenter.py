"""The 2-Wasserstein barycenter of the clients of each cluster, where a client sends a small set of points."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.client.alignment import sinkhorn_plan


def wasserstein_barycenter(
    points: Float[Tensor, "N P d_z"],
    assigned: Int[Tensor, " N"],
    support: Float[Tensor, "K S d_z"],
    *,
    epsilon: float = 0.05,
    iterations: int = 30,
    sinkhorn_iterations: int = 100,
) -> Float[Tensor, "K S d_z"]:
    """S support points for each cluster, at the entropic barycenter of its clients' point sets, unnumbered (iii).

    Free support with equal masses, all clusters and clients at once: transport every client to its cluster's support,
    move each support point to the mean of what it received, repeat. A cluster without clients keeps its support; a
    client whose points are not finite is left out. The result is the local optimum that the given support leads to.
    """
    fine = points.flatten(1).isfinite().all(-1)
    x, cluster = points[fine], assigned[fine]
    mass_here, mass_there = _equal(len(x), support.shape[1], x), _equal(len(x), x.shape[1], x)
    counts = torch.zeros_like(support[:, 0, 0]).index_add(0, cluster, torch.ones_like(x[:, 0, 0]))
    for _ in range(iterations):
        cost = (support[cluster][:, :, None] - x[:, None]).square().sum(-1)  # (N, S, P)
        plan = sinkhorn_plan(cost, mass_here, mass_there, epsilon=epsilon, iterations=sinkhorn_iterations)
        received = plan / plan.sum(-1, keepdim=True).clamp(min=1e-30) @ x  # (N, S, d_z)
        total = torch.zeros_like(support).index_add(0, cluster, received)
        support = torch.where(counts[:, None, None] > 0, total / counts.clamp(min=1)[:, None, None], support)
    return support


def _equal(n: int, size: int, like: Tensor) -> Float[Tensor, "n size"]:
    return torch.full((n, size), 1 / size, dtype=like.dtype, device=like.device)


def representative(support: Float[Tensor, "K S d_z"]) -> Float[Tensor, "K d_z"]:
    """One vector for each barycenter, its mean: what becomes v_k.

    The mean of a barycenter with equal masses is the mean of the clients' means whatever its support does, so with one
    vector for each prototype this aggregator averages, as FedKMeans does.
    """
    return support.mean(1)
