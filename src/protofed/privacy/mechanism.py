"""Clip and noise: the two steps that make a sum private, and where the noise comes from."""

import math
import os
import secrets
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from protofed.errors import ConfigError

Noise = Callable[[tuple[int, ...]], Tensor]  # standard normal float64 numbers of a shape
GRID = 2.0**-32  # releases are multiples of it, so that no low-order bit of a float carries a user's data
SMALLEST_DISCRETE_STD = 4.0  # below it, a sum of discrete Gaussians is measurably not one


def clip(z: Float[Tensor, "U d_z"], radius: float) -> Float[Tensor, "U d_z"]:
    """Each row no longer than the radius; a row that is not finite becomes zero. clip of Eq. (9), eq:fedkmeans."""
    z = z.where(finite_rows(z)[:, None], 0.0)
    # A huge but finite row would overflow when squared: bring its largest entry to the radius first.
    z = z * (radius / z.abs().amax(dim=-1, keepdim=True).clamp(min=radius))
    shorter = z * (radius / z.norm(dim=-1, keepdim=True).clamp(min=radius))
    over = shorter.norm(dim=-1, keepdim=True) > radius  # rounding may leave a row one bit too long
    return torch.where(over, shorter * (1 - 4 * torch.finfo(z.dtype).eps), shorter)


def finite_rows(z: Float[Tensor, "U d_z"]) -> Bool[Tensor, " U"]:
    """Which rows hold numbers only."""
    return torch.isfinite(z).all(dim=-1)


def seeded_noise(rng: Generator) -> Noise:
    """Noise from a named stream, drawn on the generator's device: for simulation, since a published seed voids it."""

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=rng, device=rng.device, dtype=torch.float64)

    return draw


def os_noise(shape: tuple[int, ...]) -> Float[Tensor, "..."]:
    """Noise from the operating system's generator: for deployments."""
    n = math.prod(shape)
    words = np.frombuffer(os.urandom(8 * n), dtype=np.uint64) >> np.uint64(12)  # 52 bits
    drawn: Tensor = torch.special.ndtri((torch.from_numpy(words.astype(np.float64)) + 0.5) * 2.0**-52)
    return drawn.reshape(shape)


def add_gaussian_noise(sums: Float[Tensor, "*shape"], std: float, noise: Noise) -> Float[Tensor, "*shape"]:
    """The sums with independent Gaussian noise in every entry, on a grid of 2^-32. ξ of Eq. (8) and Eq. (9).

    The grid matters because the low bits of a floating-point sum can betray what was added (Mironov 2012).
    """
    if not (math.isfinite(std) and std >= 0):
        raise ConfigError(f"the noise's standard deviation must be a finite number >= 0, got {std}")
    if std == 0:
        return sums
    drawn = noise(tuple(sums.shape)).to(device=sums.device, dtype=torch.float64)
    return ((sums.to(torch.float64) + std * drawn) / GRID).round().mul(GRID).to(sums.dtype)


def discrete_gaussian(uniforms: Float[Tensor, "*shape"], std: float) -> Int[Tensor, "*shape"]:
    """Integers with probability proportional to exp(-x² / 2 std²), from uniform numbers by inverting the distribution.

    Exact up to the 52 bits of a uniform number; the simulator's counterpart of `os_discrete_gaussian`.
    """
    reach = math.ceil(9 * std) + 1
    support = torch.arange(-reach, reach + 1, device=uniforms.device, dtype=torch.float64)
    weight = torch.exp(-(support**2) / (2 * std * std))
    below = torch.cumsum(weight, 0) / weight.sum()
    return torch.searchsorted(below, uniforms.double().contiguous(), right=True).clamp(max=2 * reach) - reach


def os_discrete_gaussian(shape: tuple[int, ...], std: float) -> Int[Tensor, "..."]:
    """The same by exact integer arithmetic from the operating system (Canonne, Kamath, Steinke 2020, Algorithm 3)."""
    variance = Fraction(std) ** 2
    values = [_one_discrete_gaussian(variance) for _ in range(math.prod(shape))]
    return torch.tensor(values, dtype=torch.int64).reshape(shape)


def _one_discrete_gaussian(variance: Fraction) -> int:
    t = math.isqrt(int(variance)) + 1
    while True:
        proposal = _discrete_laplace(t)
        if _bernoulli_exp((abs(proposal) - variance / t) ** 2 / (2 * variance)):
            return proposal


def _discrete_laplace(t: int) -> int:
    """An integer with probability proportional to exp(-|x| / t)."""
    while True:
        low = secrets.randbelow(t)
        if not _bernoulli_exp(Fraction(low, t)):
            continue
        high = 0
        while _bernoulli_exp(Fraction(1)):
            high += 1
        size, negative = low + t * high, secrets.randbelow(2)
        if size or not negative:  # minus zero would count zero twice
            return -size if negative else size


def _bernoulli_exp(gamma: Fraction) -> bool:
    """True with probability exp(-gamma), without rounding."""
    while gamma > 1:
        if not _bernoulli_exp(Fraction(1)):
            return False
        gamma -= 1
    k = 1
    while secrets.randbelow(gamma.denominator * k) < gamma.numerator:
        k += 1
    return k % 2 == 1
