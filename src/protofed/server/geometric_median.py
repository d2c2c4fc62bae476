"""The geometric median of each cluster of uploads: a centre that a few wild uploads cannot carry away."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

AT_A_POINT = 1e-9  # nearer than this an iterate counts as lying on the upload


def geometric_median(
    z: Float[Tensor, "N d_z"],
    assigned: Int[Tensor, " N"],
    v: Float[Tensor, "K d_z"],
    *,
    iterations: int = 200,
) -> Float[Tensor, "K d_z"]:
    """The point with the least sum of distances to each cluster's uploads. Eq. (10), eq:geom_median.

    Weiszfeld's iterations for all clusters at once, started at the cluster means, with the step of Vardi and Zhang
    (2000) at an upload; a cluster without uploads keeps its v_k. Uploads that are not finite are left out.
    """
    fine = z.isfinite().all(-1)
    x, cluster = z[fine].double(), assigned[fine]
    counts = torch.zeros(len(v), dtype=x.dtype, device=x.device).index_add(0, cluster, torch.ones_like(x[:, 0]))
    centre = _sums(x, cluster, len(v)) / counts.clamp(min=1)[:, None]
    for _ in range(iterations):
        centre = weiszfeld_step(x, cluster, centre)
    centre = _snapped(x, cluster, centre)
    return torch.where(counts[:, None] > 0, centre.to(v.dtype), v)


def _sums(values: Float[Tensor, "N d_z"], cluster: Int[Tensor, " N"], n: int) -> Float[Tensor, "K d_z"]:
    return torch.zeros(n, values.shape[1], dtype=values.dtype, device=values.device).index_add(0, cluster, values)


def weiszfeld_step(
    x: Float[Tensor, "N d_z"], cluster: Int[Tensor, " N"], centre: Float[Tensor, "K d_z"]
) -> Float[Tensor, "K d_z"]:
    """The next iterate (1 - g) T + g y: T is Weiszfeld's mean of the other points, g = min(1, n_here / |R|)."""
    distance: Tensor = (x - centre[cluster]).norm(dim=-1, keepdim=True)
    away: Bool[Tensor, "N 1"] = distance > AT_A_POINT
    weight = torch.where(away, 1 / distance.clamp(min=AT_A_POINT), 0)
    total = _sums(weight, cluster, len(centre))  # (K, 1)
    here = _sums((~away).to(x.dtype), cluster, len(centre))
    mean = torch.where(total > 0, _sums(weight * x, cluster, len(centre)) / total.clamp(min=1e-300), centre)
    pull: Tensor = ((mean - centre) * total).norm(dim=-1, keepdim=True)  # |R|
    stay = torch.where(here > 0, (here / pull.clamp(min=1e-300)).clamp(max=1), 0)
    return (1 - stay) * mean + stay * centre


def _snapped(
    x: Float[Tensor, "N d_z"], cluster: Int[Tensor, " N"], centre: Float[Tensor, "K d_z"]
) -> Float[Tensor, "K d_z"]:
    """The centre, or the cluster's upload nearest to it where that is at least as good.

    A median that is an upload is approached ever more slowly and never reached.
    """
    distance: Tensor = (x - centre[cluster]).norm(dim=-1)
    least = torch.full_like(centre[:, 0], torch.inf).scatter_reduce(0, cluster, distance, "amin")
    closest = (distance == least[cluster]).nonzero()[:, 0]
    candidate = centre.index_copy(0, cluster[closest], x[closest])
    better = objective(x, cluster, candidate) <= objective(x, cluster, centre)
    return torch.where(better[:, None], candidate, centre)


def objective(
    z: Float[Tensor, "N d_z"], assigned: Int[Tensor, " N"], centre: Float[Tensor, "K d_z"]
) -> Float[Tensor, " K"]:
    """Each cluster's sum of distances to its centre: what the geometric median makes least."""
    distance: Tensor = (z - centre[assigned]).norm(dim=-1)
    return torch.zeros_like(centre[:, 0]).index_add(0, assigned, distance)
