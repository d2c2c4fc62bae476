"""What ties a long-term prompt to the prototypes: a Bregman pull, a contrast, or a distance between distributions."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.errors import ConfigError

Divergence = Callable[[Tensor, Tensor], Tensor]  # z (U, d_z), v (K, d_z) -> (U, K)


def squared_euclidean(z: Float[Tensor, "U d_z"], v: Float[Tensor, "K d_z"]) -> Float[Tensor, "U K"]:
    """D(z || v) of Psi(x) = ||x||^2 / 2, that is half the squared distance; 1 - cosine on the unit sphere."""
    return (z.square().sum(-1)[:, None] + v.square().sum(-1)) / 2 - z @ v.T


def relative_entropy(z: Float[Tensor, "U d_z"], v: Float[Tensor, "K d_z"]) -> Float[Tensor, "U K"]:
    """D(z || v) of Psi(x) = sum x log x, that is Kullback-Leibler, between softmaxes of the vectors.

    The vectors are stretched by sqrt(d_z) first: coordinates of a unit vector are so small that every softmax of them
    is nearly uniform.
    """
    stretch = z.shape[-1] ** 0.5
    log_x, log_y = (z * stretch).log_softmax(-1), (v * stretch).log_softmax(-1)
    x = log_x.exp()
    gap: Tensor = (x * log_x).sum(-1)[:, None] - x @ log_y.T
    return gap


DIVERGENCES: Mapping[str, Divergence] = {"euclidean": squared_euclidean, "entropy": relative_entropy}


def info_nce(
    z: Float[Tensor, "U d_z"], v: Float[Tensor, "K d_z"], positive: Int[Tensor, " U"], *, tau_a: float
) -> Float[Tensor, " U"]:
    """Cross-entropy of picking the positive prototype among all by inner product; second term of Eq. (5), eq:align."""
    if not tau_a > 0:
        raise ConfigError(f"the alignment temperature tau_a must be greater than 0, got {tau_a}; the paper uses 0.1")
    logits = z @ v.T / tau_a  # (U, K)
    return logits.logsumexp(-1) - logits.gather(1, positive[:, None])[:, 0]


def alignment_loss(
    z: Float[Tensor, "U d_z"],
    v: Float[Tensor, "K d_z"],
    *,
    gamma: float = 0.5,
    tau_a: float = 0.1,
    divergence: Divergence = squared_euclidean,
) -> Float[Tensor, " U"]:
    """Each client's Bregman pull to its nearest prototype plus gamma times InfoNCE. Eq. (5), eq:align."""
    pull, positive = divergence(z, v).min(-1)
    return pull + gamma * info_nce(z, v, positive, tau_a=tau_a)


def wasserstein_alignment(
    points: Float[Tensor, "U P d_z"],
    v: Float[Tensor, "K d_z"],
    *,
    mass: Float[Tensor, "U P"],
    mix_w: Float[Tensor, " K"] | None = None,
    epsilon: float = 0.05,
    iterations: int = 100,
) -> Float[Tensor, " U"]:
    """Each client's transport cost from its points to the mixture of prototypes. Eqs. (6)-(7), eq:wasserstein.

    Absent points have mass 0 (a client without any point costs 0); prototypes weigh alike unless told. The plan is
    entropic and held fixed in the gradient, which by the envelope theorem is that of the regularised cost. The paper
    does not say how the long prompt enters its set of session embeddings: the caller puts z_u among the points.
    """
    cost = (points[:, :, None] - v).square().sum(-1)  # (U, P, K)
    total = mass.sum(-1, keepdim=True)
    a = mass / total.clamp(min=1e-12)
    b = torch.full_like(v[:, 0], 1 / len(v)) if mix_w is None else mix_w / mix_w.sum()
    plan = sinkhorn_plan(cost.detach(), a, b.expand(len(a), -1), epsilon=epsilon, iterations=iterations)
    return torch.where(total[:, 0] > 0, (plan * cost).sum((1, 2)), torch.zeros_like(total[:, 0]))


@torch.no_grad()
def sinkhorn_plan(
    cost: Float[Tensor, "B P S"],
    a: Float[Tensor, "B P"],
    b: Float[Tensor, "B S"],
    *,
    epsilon: float,
    iterations: int,
) -> Float[Tensor, "B P S"]:
    """Entropic transport plans with marginals a and b, by Sinkhorn's iterations on logarithms.

    Column sums are exact, row sums as good as the iterations. A point without mass takes no part.
    """
    if not epsilon > 0:
        raise ConfigError(f"Sinkhorn's epsilon must be greater than 0, got {epsilon}; 0.05 suits unit vectors")
    kernel, log_a, log_b = -cost / epsilon, a.log(), b.log()
    f, g = torch.zeros_like(a), torch.zeros_like(b)
    for _ in range(iterations):
        g = log_b - _logsumexp(kernel + f[:, :, None], 1)
        f = log_a - _logsumexp(kernel + g[:, None, :], 2)
    g = log_b - _logsumexp(kernel + f[:, :, None], 1)
    return torch.exp(kernel + f[:, :, None] + g[:, None, :])


def _logsumexp(x: Tensor, dim: int) -> Tensor:
    """logsumexp that is 0 where nothing was summed, so that no infinity is taken from another."""
    total = x.logsumexp(dim)
    return torch.where(total == -torch.inf, torch.zeros_like(total), total)
