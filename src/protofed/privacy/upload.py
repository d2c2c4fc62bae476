"""What leaves a device: one format per trust model, each with a bounded contribution whatever the client holds.

A user's contribution to a round is its embedding and a weight for counting, put in the row of its prototype:
one-hot(prototype) ⊗ [clip(z); c]. Rows of other prototypes are zero. The formats:

central             clip → 8 bits; the server clips again and adds the noise      d_z bytes + index
secure-aggregation  clip → integers → discrete noise over all K rows; only sums   K · (d_z + 1) integers of 32 bits
local               clip → noise over all K rows → 8 bits                         K · (d_z + 1) bytes
local, compact      clip → noise → 8 bits; the index of the *noised* embedding    d_z bytes + index

A device without an event to learn from after the base block, a non-finite embedding or an index outside 0..K-1
contributes nothing. Where devices add the noise such a device sends its noise all the same: that it has nothing to
say is the user's secret, and the noise of a round must not depend on it.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor

from protofed.errors import ConfigError
from protofed.privacy.compression import LEVELS, dequantise, quantise
from protofed.privacy.ledger import Trust
from protofed.privacy.mechanism import SMALLEST_DISCRETE_STD, clip, finite_rows

NOTHING = -1  # the index of an upload that contributes nothing
FIELD_BITS = 32  # secure aggregation adds integers modulo 2^32
SECURE_SCALE = 2.0**16  # integer steps in one unit of an embedding
Aggregator = Literal["fedkmeans", "geometric-median", "barycenter"]


@dataclass(frozen=True, slots=True)
class UploadRule:
    """The public constants of an upload: they bound what one user can change."""

    n_prototypes: int  # K
    width: int = 64  # d_z
    clip_radius: float = 1.0
    count_weight: float = 0.25  # c: small, so that counting costs little of the sensitivity

    def __post_init__(self) -> None:
        if self.n_prototypes < 1 or self.width < 1:
            raise ConfigError(f"an upload needs K >= 1 and a width >= 1, got K {self.n_prototypes}, {self.width}")
        if not (0 < self.clip_radius < math.inf and 0 < self.count_weight < math.inf):
            raise ConfigError(
                f"clip radius and count weight must be finite and above 0, got {self.clip_radius}, {self.count_weight}"
            )

    @property
    def sensitivity(self) -> float:
        """Δ = sqrt(radius² + c²): what adding or removing one user can change, 1.031 by default."""
        return math.hypot(self.clip_radius, self.count_weight)

    @property
    def replace_sensitivity(self) -> float:
        """What exchanging one contribution for another can change: 2 radii in one row, or two whole rows."""
        return max(2 * self.clip_radius, math.sqrt(2) * self.sensitivity)

    def noise_std(self, noise_multiplier: float, trust: Trust) -> float:
        """The noise's standard deviation: on the sum, or on each single upload where trust is local."""
        if trust == "local" and noise_multiplier <= 0:
            raise ConfigError(
                f"local trust needs noise on the device: the noise multiplier must be above 0, got {noise_multiplier}"
            )
        return noise_multiplier * (self.replace_sensitivity if trust == "local" else self.sensitivity)


@dataclass(frozen=True, slots=True)
class RoundRule:
    """How uploads are made and how the server adds them up; the same public numbers for everybody."""

    upload: UploadRule
    noise_multiplier: float  # 0: exact sums, no privacy
    trust: Trust = "central"
    aggregator: Aggregator = "fedkmeans"
    momentum: float = 0.1  # beta
    margin: float = 0.5  # rho
    least: int = 2  # secure aggregation: a round of fewer uploads releases nothing
    as_printed: bool = False  # Algorithm 2 to the letter; no ε can be stated for it

    def __post_init__(self) -> None:
        private = self.noise_multiplier > 0
        if self.trust == "local":
            self.upload.noise_std(self.noise_multiplier, "local")  # refuses local trust without noise
        if self.trust == "secure-aggregation" and private:
            secure_std(self.upload, self.noise_multiplier, SECURE_SCALE, least=self.least, clients=self.least)
        if self.aggregator != "fedkmeans" and private and self.trust != "local":
            raise ConfigError(
                f"the {self.aggregator} aggregator has no noise of bounded sensitivity under {self.trust} trust; "
                "use fedkmeans, --trust local or --mode nodp"
            )

    @property
    def points(self) -> int:
        """How many embeddings a device sends: the barycenter alone takes two."""
        return 2 if self.aggregator == "barycenter" else 1

    @property
    def form(self) -> Literal["points", "noised points", "noised rows", "integers"]:
        """What travels: quantised embeddings, noised ones, all K rows noised, or integers of all K rows."""
        if self.noise_multiplier == 0 or self.trust == "central":
            return "points"
        if self.trust == "secure-aggregation":
            return "integers"
        return "noised rows" if self.aggregator == "fedkmeans" else "noised points"


@dataclass(frozen=True, slots=True)
class PointUploads:
    """A stack of 8-bit embeddings, each with the index of its prototype in clear."""

    codes: Int8[Tensor, "U d_z"]
    block: Int[Tensor, " U"]  # NOTHING where the upload contributes nothing


def usable(z: Float[Tensor, "U d_z"], block: Int[Tensor, " U"], rule: UploadRule) -> Bool[Tensor, " U"]:
    """Which rows may contribute: finite numbers and an existing prototype."""
    return finite_rows(z) & (block >= 0) & (block < rule.n_prototypes)


def contributions(
    z: Float[Tensor, "U d_z"], block: Int[Tensor, " U"], rule: UploadRule
) -> tuple[Float[Tensor, "U row"], Int[Tensor, " U"]]:
    """The one row [clip(z); c] of each user's contribution that is not zero, and which row it is.

    Unusable uploads are zero rows. Computed in float64, so that the length never exceeds Δ.
    """
    ok = usable(z, block, rule)
    weight = torch.full((len(z), 1), rule.count_weight, dtype=torch.float64, device=z.device)
    rows = torch.cat((clip(z.double(), rule.clip_radius), weight), dim=1)
    return rows.where(ok[:, None], 0.0), block.where(ok, 0)


def central_upload(
    z: Float[Tensor, "U d_z"], block: Int[Tensor, " U"], rule: UploadRule, uniforms: Float[Tensor, "U d_z"]
) -> PointUploads:
    """Clipped 8-bit embeddings for a server that is trusted to add the noise. Eq. (8), clipped before, not after."""
    codes = quantise(clip(z, rule.clip_radius), rule.clip_radius, uniforms)
    return PointUploads(codes, block.where(usable(z, block, rule), NOTHING))


def decode_points(
    uploads: PointUploads, rule: UploadRule, reach: float | None = None
) -> tuple[Float[Tensor, "U d_z"], Int[Tensor, " U"]]:
    """The embeddings a server works with, clipped once more: to the radius, or to what local noise needs.

    Rounding can lengthen a vector beyond the radius, and a dishonest client can send any codes.
    """
    if reach is not None:
        longest = local_length(rule, (reach - rule.clip_radius) / 4, rule.width)
        return clip(dequantise(uploads.codes, reach), longest), uploads.block
    return clip(dequantise(uploads.codes, rule.clip_radius), rule.clip_radius), uploads.block


def local_reach(rule: UploadRule, std: float) -> float:
    """The range of 8-bit codes of noised numbers: wide enough that cutting off is rare, and public."""
    return rule.clip_radius + 4 * std


def local_length(rule: UploadRule, std: float, numbers: int) -> float:
    """The length that an honest local upload of so many numbers exceeds once in 10^7; a server cuts off what is longer.

    Contribution, coding and noise each at their longest: the length of n normal numbers exceeds √n + 6 with a chance
    below exp(-18).
    """
    step = local_reach(rule, std) / LEVELS
    return rule.sensitivity + step * math.sqrt(numbers) + std * (math.sqrt(numbers) + 6)


def local_upload(
    z: Float[Tensor, "U d_z"],
    block: Int[Tensor, " U"],
    rule: UploadRule,
    std: float,
    noise: Float[Tensor, "U K row"],
    uniforms: Float[Tensor, "U K row"],
) -> Int8[Tensor, "U K row"]:
    """All K rows, noised on the device and then coded: the index is hidden too. Eq. (8), noise before compression.

    `noise` is standard normal and `std` is `rule.noise_std(multiplier, "local")`.
    """
    _check_local(std)
    return quantise(write_out(z, block, rule) + std * noise, local_reach(rule, std), uniforms)


def local_sums(codes: Int8[Tensor, "U K row"], rule: UploadRule, std: float) -> Float[Tensor, "K row"]:
    """The sum of local uploads, none longer than an honest one; their noise is in them already."""
    rows = dequantise(codes, local_reach(rule, std)).double().flatten(1)
    return clip(rows, local_length(rule, std, rows.shape[1])).view(codes.shape).sum(dim=0)


def compact_local_upload(
    z: Float[Tensor, "U d_z"],
    v: Float[Tensor, "K d_z"],
    rule: UploadRule,
    std: float,
    noise: Float[Tensor, "U d_z"],
    uniforms: Float[Tensor, "U d_z"],
) -> PointUploads:
    """A noised embedding and its nearest prototype, found *after* the noise: an index of the clean one would leak.

    K times smaller than `local_upload`, and in many dimensions the index is little better than chance.
    """
    _check_local(std)
    noised = (clip(z, rule.clip_radius) + std * noise).to(v.dtype)  # a broken embedding is noise around zero
    codes = quantise(noised, local_reach(rule, std), uniforms)
    sent = dequantise(codes, local_reach(rule, std)).to(v.dtype)
    return PointUploads(codes, torch.cdist(sent, v).argmin(dim=-1))


def compact_local_sums(uploads: PointUploads, rule: UploadRule, std: float) -> Float[Tensor, "K row"]:
    """The sum of compact local uploads. They are not clipped again: that would shrink what little signal there is."""
    z, block = decode_points(uploads, rule, local_reach(rule, std))
    ok = usable(z, block, rule)[:, None]
    rows = torch.cat((z.double(), torch.full_like(z[:, :1], rule.count_weight, dtype=torch.float64)), dim=1)
    sums = torch.zeros(rule.n_prototypes, rule.width + 1, dtype=torch.float64, device=z.device)
    return sums.index_add_(0, block.clamp(0, rule.n_prototypes - 1), rows.where(ok, 0.0))


def write_out(z: Float[Tensor, "U d_z"], block: Int[Tensor, " U"], rule: UploadRule) -> Float[Tensor, "U K row"]:
    """Contributions as dense (K, row) tables, zero rows included."""
    rows, at = contributions(z, block, rule)
    full = torch.zeros(len(rows), rule.n_prototypes, rule.width + 1, dtype=rows.dtype, device=rows.device)
    return full.scatter_(1, at[:, None, None].expand(-1, 1, rows.shape[1]), rows[:, None])


def secure_std(rule: UploadRule, noise_multiplier: float, scale: float, *, least: int, clients: int) -> float:
    """The noise of one device, in integer steps, such that all but one of `least` devices reach the multiplier.

    One device less, because whoever is to be protected takes its own noise along when it leaves; and no more than
    `least`, because those who drop out do the same. `clients` is the most that can take part: their sum must fit the
    field.
    """
    if least < 2:
        raise ConfigError(
            f"secure aggregation needs rounds of at least 2 uploads, got {least}; raise the sampling rate"
        )
    std = rule.noise_std(noise_multiplier, "secure-aggregation") * scale / math.sqrt(least - 1)
    if std < SMALLEST_DISCRETE_STD:
        raise ConfigError(
            f"a device's discrete noise must be at least {SMALLEST_DISCRETE_STD:g} steps wide, got {std:.3g}; "
            f"raise the scale of {scale:g}"
        )
    largest = clients * max(rule.clip_radius, rule.count_weight) * scale + 9 * std * math.sqrt(clients)
    if largest >= 2 ** (FIELD_BITS - 1):
        raise ConfigError(
            f"the sum of {clients} uploads at scale {scale:g} may reach {largest:.3g}, beyond the field's "
            f"{2 ** (FIELD_BITS - 1)}; lower the scale"
        )
    return std


def secure_upload(
    z: Float[Tensor, "U d_z"], block: Int[Tensor, " U"], rule: UploadRule, scale: float, noise: Int[Tensor, "U K row"]
) -> Int[Tensor, "U K row"]:
    """All K rows as integers with a device's share of discrete noise, modulo 2^32: alone they look random once masked.

    Rounded towards zero, so that rounding cannot raise the sensitivity. Each device noises every row: noise in its own
    row only would show which row that is.
    """
    steps: Tensor = (write_out(z, block, rule) * scale).trunc().long()
    return steps.add(noise).bitwise_and(2**FIELD_BITS - 1)


def secure_sums(total: Int[Tensor, "K row"], scale: float) -> Float[Tensor, "K row"]:
    """The noised sums from the one thing a secure aggregator reveals: the uploads' total modulo 2^32."""
    total = total & (2**FIELD_BITS - 1)
    signed = total.where(total < 2 ** (FIELD_BITS - 1), total - 2**FIELD_BITS)
    return signed.double() / scale


def upload_bytes(rule: UploadRule, trust: Trust, *, compact: bool = False) -> int:
    """How many bytes one client sends in a round; an index takes two, enough for K up to 65,536."""
    if trust == "central" or (trust == "local" and compact):
        return rule.width + 2
    numbers = rule.n_prototypes * (rule.width + 1)
    return numbers * FIELD_BITS // 8 if trust == "secure-aggregation" else numbers


def _check_local(std: float) -> None:
    if not 0 < std < math.inf:
        raise ConfigError(f"local trust needs noise on the device: its standard deviation must be above 0, got {std}")
