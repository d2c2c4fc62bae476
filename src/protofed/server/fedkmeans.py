"""DP-FedKMeans: the noised sums of a round, and how they move the prototypes."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.privacy.mechanism import GRID, Noise, add_gaussian_noise
from protofed.privacy.upload import UploadRule, contributions
from protofed.server.library import PrototypeLibrary

LEAST_MASS = 2.0  # uploads a round: one client adds one, whatever it sends; the default K feeds three on average


def exact_sums(
    z: Float[Tensor, "U d_z"], block: Int[Tensor, " U"], rule: UploadRule
) -> Float[Tensor, "{rule.n_prototypes} row"]:
    """The sum of all contributions: K rows of [sum of clipped embeddings; c · number of uploads]. Not to be released.

    Added as integers of 2^-32, so that neither the order of clients nor the size of chunks changes a bit; rounded
    towards zero, so that rounding cannot make a contribution longer.
    """
    rows, at = contributions(z, block, rule)
    total = torch.zeros(rule.n_prototypes, rows.shape[1], dtype=torch.int64, device=rows.device)
    return total.index_add_(0, at, (rows / GRID).trunc().long()).double() * GRID


def noised_sums(
    z: Float[Tensor, "U d_z"], block: Int[Tensor, " U"], rule: UploadRule, noise_multiplier: float, noise: Noise
) -> Float[Tensor, "{rule.n_prototypes} row"]:
    """What a round releases under central trust: all K rows, sums and counts, each entry noised alike.

    The noise is on sums of bounded contributions and on the counts too; the paper's is on means divided by exact
    counts, which bounds nothing. Rows that nobody fed are noised like the others. Multiplier 0 releases exact sums.
    """
    return add_gaussian_noise(exact_sums(z, block, rule), rule.noise_std(noise_multiplier, "central"), noise)


def fedkmeans(
    library: PrototypeLibrary,
    noised: Float[Tensor, "K row"],
    *,
    count_weight: float = 0.25,
    momentum: float = 0.1,
    least_mass: float = LEAST_MASS,
) -> PrototypeLibrary:
    """The library one round later: running averages of the noised sums, prototypes along them. Eq. (9), eq:fedkmeans.

    v_k = normalise(average of sums): a direction needs no division by a noised count, unlike the printed mean. A
    prototype whose average mass is below `least_mass` uploads a round, or whose average has no direction, stays as it
    is, so that one client alone cannot take it. Beside honest uploads, whose average has length L, one client turns it
    by at most asin(momentum · radius / L) a round and asin(radius / L) in all. A row with a non-finite number counts
    as no news. Post-processing: costs no ε.
    """
    noised = noised.to(library.v.dtype)
    news = torch.isfinite(noised).all(dim=-1)
    step = momentum * news.to(noised.dtype)
    sums, counts = noised[:, :-1].where(news[:, None], 0.0), noised[:, -1].where(news, 0.0) / count_weight
    ema_sums = torch.lerp(library.ema_sums, sums, step[:, None])
    ema_counts = torch.lerp(library.ema_counts, counts, step)
    length = ema_sums.norm(dim=-1)
    moves = (ema_counts >= least_mass) & (length > 1e-12) & news
    v = torch.where(moves[:, None], ema_sums / length.clamp(min=1e-12)[:, None], library.v)
    return PrototypeLibrary(v, ema_sums, ema_counts, library.version + 1)


def fedkmeans_as_printed(
    v: Float[Tensor, "K d_z"],
    z: Float[Tensor, "U d_z"],
    block: Int[Tensor, " U"],
    rule: UploadRule,
    *,
    sigma: float,
    momentum: float,
    noise: Noise,
) -> Float[Tensor, "K d_z"]:
    """The prototypes after the paper's own update, for the record: noise on means, exact counts. Eq. (9), eq:fedkmeans.

    No ε can be stated for it. An empty cluster, 0/0 as printed, keeps its prototype.
    """
    sums = exact_sums(z, block, rule).to(v.dtype)
    counts = (sums[:, -1] / rule.count_weight).round()
    means = sums[:, :-1] / counts.clamp(min=1)[:, None]
    moved = torch.lerp(v, add_gaussian_noise(means, sigma, noise), momentum)
    return torch.where(counts[:, None] > 0, moved, v)
