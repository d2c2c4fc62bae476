"""Algorithm 2, ServerAggregate: the uploads of one round in, the library of the next round out."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from protofed.client.codec import unit
from protofed.errors import ConfigError
from protofed.privacy.draws import normal, uniform
from protofed.privacy.ledger import Trust
from protofed.privacy.mechanism import Noise, discrete_gaussian
from protofed.privacy.upload import (
    UploadRule,
    central_upload,
    compact_local_upload,
    local_reach,
    local_sums,
    local_upload,
    opened,
    secure_std,
    secure_sums,
    secure_upload,
)
from protofed.server.assignment import nearest
from protofed.server.barycenter import representative, wasserstein_barycenter
from protofed.server.fedkmeans import exact_sums, fedkmeans, fedkmeans_as_printed, noised_sums
from protofed.server.geometric_median import geometric_median
from protofed.server.library import PrototypeLibrary
from protofed.server.pruning import Pruned, prune_or_reinit, shares
from protofed.server.seeding import spherical_kmeans
from protofed.server.separation import enforce_separation, literal_separation, smallest_distance

Aggregator = Literal["fedkmeans", "geometric-median", "barycenter"]
SECURE_SCALE = 2.0**16  # integer steps in one unit of an embedding
UPLOADS_AT_ONCE = 2_048  # of devices that noise all rows


@dataclass(frozen=True, slots=True)
class ServerRule:
    """How a server aggregates; public numbers."""

    upload: UploadRule
    noise_multiplier: float  # 0: exact sums, no privacy
    trust: Trust = "central"
    aggregator: Aggregator = "fedkmeans"
    momentum: float = 0.1  # beta
    margin: float = 0.5  # rho
    honest: int = 1  # secure aggregation: the fewest honest clients a round can have
    as_printed: bool = False  # Algorithm 2 to the letter; no ε can be stated for it

    def __post_init__(self) -> None:
        if self.trust == "local":
            self.upload.noise_std(self.noise_multiplier, "local")  # refuses local trust without noise
        private = self.noise_multiplier > 0
        if self.aggregator != "fedkmeans" and private and self.trust != "local":
            raise ConfigError(
                f"the {self.aggregator} aggregator has no noise of bounded sensitivity under {self.trust} trust; "
                "use fedkmeans, --trust local or --mode nodp"
            )


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What a round looked like from inside; a simulation may look, nobody releases it."""

    uploads: int
    clipped: float  # share of uploads longer than the radius
    signal_to_noise: float  # length of the exact sums over the expected length of their noise; infinite without noise
    smallest_distance: float  # between two prototypes, afterwards


def server_aggregate(
    library: PrototypeLibrary,
    users: Int[Tensor, " U"],
    z: Float[Tensor, "U P d_z"],
    rule: ServerRule,
    *,
    seed: int,
    round_: int,
    noise: Noise,
    rng: Generator,
) -> tuple[PrototypeLibrary, RoundReport]:
    """The library after one round of uploads. Algorithm 2, alg:server.

    `z` holds each sampled client's embedding, first of P points (the others serve the barycenter alone). Clients
    assign themselves with their clean embedding, clip, and quantise; noise covers all rows, sums and counts; what
    follows is post-processing. PruneOrReinit happens at the end of a slice (`slice_end`).
    """
    clean = z[:, 0]
    if rule.as_printed:
        return _printed_round(library, clean, rule, noise, rng)
    block = nearest(clean, library.v)
    report = round_report(library, clean, block, rule)
    if rule.aggregator == "fedkmeans":
        released = released_sums(users, clean, block, rule, seed=seed, round_=round_, noise=noise)
        library = fedkmeans(library, released, count_weight=rule.upload.count_weight, momentum=rule.momentum)
    else:
        # Under local noise a broken upload stays in, as noise: leaving it out would tell the server whose it was.
        fine = z.isfinite().flatten(1).all(1) | (rule.noise_multiplier > 0)
        points = _seen_points(users[fine], z[fine], library.v, rule, seed, round_)
        library = _robust(library, points, rule)
    v = enforce_separation(library.v, rule.margin, rng) if rule.margin else library.v
    return replace(library, v=v), replace(report, smallest_distance=float(smallest_distance(v)))


def released_sums(
    users: Int[Tensor, " U"],
    z: Float[Tensor, "U d_z"],
    block: Int[Tensor, " U"],
    rule: ServerRule,
    *,
    seed: int,
    round_: int,
    noise: Noise,
) -> Float[Tensor, "K row"]:
    """The noised sums and counts a round releases, by the upload format of the trust model."""
    upload = rule.upload
    if rule.noise_multiplier == 0 or rule.trust == "central":
        rounding = uniform(seed, "quantise", users, round_, (upload.width,))
        seen, block = opened(central_upload(z, block, upload, rounding), upload)
        return noised_sums(seen, block, upload, rule.noise_multiplier, noise)
    shape = (upload.n_prototypes, upload.width + 1)
    if rule.trust == "secure-aggregation" and len(users) < rule.honest:  # their noise would not reach the multiplier
        return torch.full(shape, torch.nan, dtype=torch.float64, device=z.device)
    whole_rows = _local_part if rule.trust == "local" else _secure_part
    parts = [  # a device noises all K rows, so that a round is added up some devices at a time
        whole_rows(users[at], z[at], block[at], rule, len(users), seed, round_)
        for at in (slice(first, first + UPLOADS_AT_ONCE) for first in range(0, max(len(users), 1), UPLOADS_AT_ONCE))
    ]
    total = torch.stack(parts).sum(0)
    return total if rule.trust == "local" else secure_sums(total, SECURE_SCALE)


def _local_part(
    users: Tensor, z: Tensor, block: Tensor, rule: ServerRule, n: int, seed: int, round_: int
) -> Float[Tensor, "K row"]:
    """The sum of some devices' uploads, each noised by itself."""
    upload = rule.upload
    std, shape = upload.noise_std(rule.noise_multiplier, "local"), (upload.n_prototypes, upload.width + 1)
    own, rounding = normal(seed, "local noise", users, round_, shape), uniform(seed, "quantise", users, round_, shape)
    return local_sums(local_upload(z, block, upload, std, own, rounding), upload, std)


def _secure_part(
    users: Tensor, z: Tensor, block: Tensor, rule: ServerRule, n: int, seed: int, round_: int
) -> Int[Tensor, "K row"]:
    """The sum of some devices' integers; of all n together only the total modulo 2^32 is ever seen."""
    upload = rule.upload
    std = secure_std(upload, rule.noise_multiplier, SECURE_SCALE, honest=rule.honest, clients=max(n, 1))
    shape = (upload.n_prototypes, upload.width + 1)
    share = discrete_gaussian(uniform(seed, "discrete noise", users, round_, shape), std)
    return secure_upload(z, block, upload, SECURE_SCALE, share).sum(0)


def round_report(
    library: PrototypeLibrary, z: Float[Tensor, "U d_z"], block: Int[Tensor, " U"], rule: ServerRule
) -> RoundReport:
    """Uploads, how many of them were clipped, and how the sums compare with their noise."""
    upload = rule.upload
    over = (z.norm(dim=-1) > upload.clip_radius * (1 + 1e-5)).float()
    exact = exact_sums(z, block, upload)
    std = upload.noise_std(rule.noise_multiplier, "central")
    length = std * exact.numel() ** 0.5
    if rule.trust == "local" and rule.noise_multiplier:
        length = upload.noise_std(rule.noise_multiplier, "local") * (exact.numel() * max(len(z), 1)) ** 0.5
    ratio = float(exact.norm()) / length if length else torch.inf
    clipped = float(over.mean()) if len(z) else 0.0
    return RoundReport(len(z), clipped, ratio, float(smallest_distance(library.v)))


def _seen_points(
    users: Tensor, z: Float[Tensor, "U P d_z"], v: Tensor, rule: ServerRule, seed: int, round_: int
) -> Float[Tensor, "U P d_z"]:
    """Single uploads as the server sees them: noised on the device under local trust, quantised otherwise.

    Under local trust each of the P points is noised as if it were alone, with sqrt(P) times the noise, so that the set
    costs what one upload costs.
    """
    upload, n = rule.upload, z.shape[1]
    seen = []
    for p in range(n):
        drawn = uniform(seed, f"quantise {p}", users, round_, (upload.width,))
        if rule.noise_multiplier == 0:
            block = nearest(z[:, p], v)
            seen.append(opened(central_upload(z[:, p], block, upload, drawn), upload)[0])
            continue
        std = upload.noise_std(rule.noise_multiplier, "local") * n**0.5
        own = normal(seed, f"local noise {p}", users, round_, (upload.width,))
        sent = compact_local_upload(z[:, p], v, upload, std, own, drawn)
        seen.append(opened(sent, upload, local_reach(upload, std))[0])
    return torch.stack(seen, dim=1).to(z.dtype)


def _robust(library: PrototypeLibrary, points: Float[Tensor, "U P d_z"], rule: ServerRule) -> PrototypeLibrary:
    """The library moved by momentum towards each cluster's geometric median or barycenter; empty clusters stay."""
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


def slice_end(library: PrototypeLibrary, rule: ServerRule, rng: Generator) -> tuple[PrototypeLibrary, int]:
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
    library: PrototypeLibrary, z: Float[Tensor, "U d_z"], rule: ServerRule, noise: Noise, rng: Generator
) -> tuple[PrototypeLibrary, RoundReport]:
    v, _, _ = server_aggregate_as_printed(library.v, z, rule.upload, noise=noise, rng=rng, margin=rule.margin)
    return replace(library, v=v, version=library.version + 1), round_report(library, z, nearest(z, library.v), rule)


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
