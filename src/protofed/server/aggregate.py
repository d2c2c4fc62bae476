"""Algorithm 2, ServerAggregate: the accepted uploads of one round in, the library of the next round out."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from protofed.client.codec import unit
from protofed.client.upload import nearest
from protofed.privacy.mechanism import Noise
from protofed.privacy.upload import NOTHING, SECURE_SCALE, RoundRule, UploadRule, secure_std, secure_sums
from protofed.server.accept import Accepted
from protofed.server.barycenter import representative, wasserstein_barycenter
from protofed.server.fedkmeans import exact_sums, fedkmeans, fedkmeans_as_printed, noised_sums
from protofed.server.geometric_median import geometric_median
from protofed.server.library import PrototypeLibrary
from protofed.server.pruning import Pruned, prune_or_reinit, shares
from protofed.server.seeding import spherical_kmeans
from protofed.server.separation import enforce_separation, literal_separation, smallest_distance


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What a round looked like from inside; a simulation may look, nobody releases it. NaN: not known here."""

    uploads: int
    refused: int = 0
    loss: float = torch.nan  # mean over the cohort
    moved: float = torch.nan  # mean length of an upload
    clipped: float = torch.nan  # share of uploads that had to be shortened
    signal_to_noise: float = torch.nan  # length of the exact sums over the expected length of their noise
    smallest_distance: float = torch.nan  # between two prototypes, afterwards


def server_aggregate(
    library: PrototypeLibrary, accepted: Accepted, rule: RoundRule, noise: Noise, rng: Generator
) -> tuple[PrototypeLibrary, RoundReport]:
    """The library after one round of accepted uploads. Algorithm 2, alg:server.

    Devices assigned themselves and clipped; noise covers all rows, sums and counts, and what follows is
    post-processing. PruneOrReinit happens at the end of a slice (`slice_end`).
    """
    if rule.as_printed:
        library = _printed_round(library, accepted, rule, noise, rng)
    elif rule.aggregator != "fedkmeans":
        library = _robust(library, accepted, rule)
    elif (released := release_sums(accepted, rule, noise)) is not None:
        library = fedkmeans(library, released, count_weight=rule.upload.count_weight, momentum=rule.momentum)
    else:
        library = replace(library, version=library.version + 1)
    v = enforce_separation(library.v, rule.margin, rng) if rule.margin and not rule.as_printed else library.v
    return replace(library, v=v), report_round(accepted, rule, v)


def release_sums(accepted: Accepted, rule: RoundRule, noise: Noise) -> Float[Tensor, "K row"] | None:
    """The noised sums and counts that a round releases; None where too few uploads came to hide one another."""
    if rule.form == "points":
        return noised_sums(accepted.points[:, 0], accepted.block, rule.upload, rule.noise_multiplier, noise)
    if rule.form == "integers":
        if accepted.n < rule.least or accepted.total is None:
            return None
        secure_std(rule.upload, rule.noise_multiplier, SECURE_SCALE, least=rule.least, clients=accepted.n)
        return secure_sums(accepted.total, SECURE_SCALE)
    if accepted.total is None:  # nobody's noise is in it
        return None
    return accepted.total


def report_round(accepted: Accepted, rule: RoundRule, v: Float[Tensor, "K d_z"]) -> RoundReport:
    """How many uploads were used and refused, and how the sums compare with their noise."""
    refused, apart = sum(accepted.refused.values()), float(smallest_distance(v))
    if rule.form != "points":
        return RoundReport(accepted.n, refused, smallest_distance=apart)
    exact = exact_sums(accepted.points[:, 0], accepted.block, rule.upload)
    length = rule.upload.noise_std(rule.noise_multiplier, "central") * exact.numel() ** 0.5
    ratio = float(exact.norm()) / length if length else torch.inf
    return RoundReport(accepted.n, refused, signal_to_noise=ratio, smallest_distance=apart)


def _robust(library: PrototypeLibrary, accepted: Accepted, rule: RoundRule) -> PrototypeLibrary:
    """The library moved by momentum towards each cluster's geometric median or barycenter; empty clusters stay.

    Where the points carry noise all of them stay in, for leaving one out would tell whose it was.
    """
    heard = (accepted.block != NOTHING) | (rule.form == "noised points")
    points = accepted.points[heard].to(library.v)
    block = nearest(points[:, 0], library.v)
    counts = torch.bincount(block, minlength=library.n_prototypes).to(library.v)
    if rule.aggregator == "geometric-median":
        centre = geometric_median(points[:, 0], block, library.v)
    else:
        support = library.v[:, None].expand(-1, points.shape[1], -1)
        centre = representative(wasserstein_barycenter(points, block, support.contiguous()))
    moved = unit(torch.lerp(library.v, centre, rule.momentum))
    v = torch.where((counts > 0)[:, None], moved, library.v)
    ema_counts = torch.lerp(library.ema_counts, counts, rule.momentum)
    return PrototypeLibrary(v, ema_counts[:, None] * v, ema_counts, library.version + 1)


def slice_end(library: PrototypeLibrary, rule: RoundRule, rng: Generator) -> tuple[PrototypeLibrary, int]:
    """The library with idle prototypes re-seeded from its heaviest ones, and how many were; costs no ε."""
    versions = torch.zeros(library.n_prototypes, dtype=torch.long)
    pruned: Pruned = prune_or_reinit(library.v, library.ema_counts.clamp(min=0), versions, rng)
    n = int(pruned.reseeded.sum())
    if not n:
        return library, 0
    v = enforce_separation(pruned.v, rule.margin, rng) if rule.margin else pruned.v
    split = pruned.usage != library.ema_counts.clamp(min=0)  # the re-seeded and those they were split from
    sums = torch.where(split[:, None], pruned.usage[:, None] * v, library.ema_sums)
    counts = torch.where(split, pruned.usage, library.ema_counts)
    return PrototypeLibrary(v, sums, counts, library.version + 1), n


def _printed_round(
    library: PrototypeLibrary, accepted: Accepted, rule: RoundRule, noise: Noise, rng: Generator
) -> PrototypeLibrary:
    z = accepted.points[accepted.block != NOTHING, 0].to(library.v)
    v, _, _ = server_aggregate_as_printed(library.v, z, rule.upload, noise=noise, rng=rng, margin=rule.margin)
    return replace(library, v=v, version=library.version + 1)


def server_aggregate_as_printed(
    v: Float[Tensor, "K d_z"],
    z: Float[Tensor, "U d_z"],
    upload: UploadRule,
    *,
    noise: Noise,
    rng: Generator,
    sigma: float = 0.4,
    momentum: float = 0.5,
    margin: float = 0.5,
    threshold: float = 0.01,
) -> tuple[Float[Tensor, "K d_z"], Int[Tensor, " U"], float]:
    """Algorithm 2 as printed: prototypes, assignments, and the share that was re-seeded. No ε can be stated for it.

    Noise on means, one pass of separation, exact counts, and re-seeding by k-means++ on the uploads themselves.
    """
    block = nearest(z, v)
    v = fedkmeans_as_printed(v, z, block, upload, sigma=sigma, momentum=momentum, noise=noise)
    v = literal_separation(v, margin)
    idle = shares(torch.bincount(block, minlength=len(v)).float()) < threshold
    if idle.any() and len(z):
        seeds = spherical_kmeans(z, int(idle.sum()), rng, iterations=0)
        v = v.index_copy(0, idle.nonzero()[:, 0], seeds.to(v))
    return v, block, float(idle.float().mean())
