"""Clip and noise: the two steps that make a sum private, and where the noise comes from.

Releases are whole numbers of steps of 2^-32. A simulation rounds continuous noise to them; a deployment adds an exact
discrete Gaussian of whole steps (`os_noise`), which keeps the δ(ε) of the continuous one, at which releases are priced,
up to `rounding_delta`:

Let s be the standard deviation in steps. (1) Sums lie on the grid, so that those of neighbours differ by whole steps;
rounding the sum plus a continuous Gaussian is then the same as adding a rounded Gaussian R: post-processing, so R keeps
δ(ε). (2) Poisson's summation formula gives the discrete Gaussian D the continuous density φ at whole numbers, but for a
factor within 2 exp(-19 s²) of 1; R has the integral of φ over the step around them. The two differ by the midpoint
rule's error, φ''/24, and the total variation of φ' is 0.968 / s²: summed and halved, D and R are 0.0202 / s² +
O(1 / s³) apart in total variation, below 1 / (40 s²) for s >= 4. (3) n numbers, over all coordinates, rounds and
streams, whichever way each release depends on earlier ones, are at most n / (40 s²) apart; exchanging R for D in two
neighbouring runs raises δ by at most (1 + exp(ε)) times that. For 160 rounds of 128 x 65 numbers at s =
1.163 · 2^32 and ε = 3.4 this is 4.2e-14, beside δ = 1e-5.
"""

import math
import os
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from protofed.errors import ConfigError

Noise = Callable[[tuple[int, ...], float], Tensor]  # of a shape and a standard deviation, both in steps of the grid
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

    def draw(shape: tuple[int, ...], std: float) -> Tensor:
        return std * torch.randn(shape, generator=rng, device=rng.device, dtype=torch.float64)

    return draw


def os_noise(shape: tuple[int, ...], std: float) -> Int[Tensor, "..."]:
    """Whole steps of discrete Gaussian noise from the operating system's generator: for deployments."""
    if std < SMALLEST_DISCRETE_STD:
        raise ConfigError(
            f"discrete noise needs a standard deviation of {SMALLEST_DISCRETE_STD:g} steps or more, got {std:g}"
        )
    return os_discrete_gaussian(shape, std)


def add_gaussian_noise(sums: Float[Tensor, "*shape"], std: float, noise: Noise) -> Float[Tensor, "*shape"]:
    """The sums with independent Gaussian noise in every entry, on a grid of 2^-32. ξ of Eq. (8) and Eq. (9).

    The grid matters because the low bits of a floating-point sum can betray what was added (Mironov 2012). Noise of
    whole steps is added to whole steps: sums that are not on the grid are rounded to it first, which in n coordinates
    moves a difference of two of them by at most sqrt(n) steps.
    """
    if not (math.isfinite(std) and std >= 0):
        raise ConfigError(f"the noise's standard deviation must be a finite number >= 0, got {std}")
    if std == 0:
        return sums
    steps, drawn = sums.to(torch.float64) / GRID, noise(tuple(sums.shape), std / GRID).to(sums.device)
    noised = steps + drawn if drawn.is_floating_point() else (steps.round().long() + drawn).to(torch.float64)
    return noised.round().mul(GRID).to(sums.dtype)


def rounding_delta(std: float, numbers: int, epsilon: float) -> float:
    """What `os_noise` may add to δ(ε) of the continuous Gaussian: see the head of this file. `std` in steps."""
    return (1 + math.exp(epsilon)) * numbers / (40 * std**2)


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
    p, q = (Fraction(std) ** 2).as_integer_ratio()  # the variance
    t, n, kept, missing = math.isqrt(p // q) + 1, math.prod(shape), [np.zeros(0, dtype=np.int64)], math.prod(shape)
    while missing:
        proposed = discrete_laplace(t, missing + missing // 2 + 8)
        off = abs(proposed.astype(object)) * (t * q) - p  # (|x| - variance / t)² / (2 variance), as a fraction
        kept.append(proposed[bernoulli_exp(off * off, 2 * p * q * t * t)][:missing])
        missing -= len(kept[-1])
    return torch.from_numpy(np.concatenate(kept)).reshape(shape) if n else torch.zeros(shape, dtype=torch.int64)


def discrete_laplace(t: int, n: int) -> np.ndarray:
    """At most n integers, each x with probability proportional to exp(-|x| / t)."""
    low = draw_below(t, n)
    low = low[bernoulli_exp(low.astype(object), t)]
    high, going = np.zeros(len(low), dtype=np.int64), np.arange(len(low))
    while len(going):
        going = going[bernoulli_exp(np.ones(len(going), dtype=object), 1)]
        high[going] += 1
    size, negative = low + t * high, draw_below(2, len(low)) == 1
    signed = np.where(negative, -size, size)
    return np.asarray(signed[(size > 0) | ~negative])  # minus zero would count zero twice


def bernoulli_exp(a: np.ndarray, b: int) -> np.ndarray:
    """For each whole number a: true with probability exp(-a / b), without rounding."""
    whole, rest = a // b, a % b
    true, place = np.ones(len(a), dtype=bool), np.arange(len(a))
    left = whole.copy()
    while len(place := place[left[place] > 0]):  # exp(-1) for each whole one, as long as it goes on
        true[place] = _below_one(np.ones(len(place), dtype=object), 1)
        place = place[true[place]]
        left[place] -= 1
    place = np.flatnonzero(true)
    true[place] = _below_one(rest[place], b)
    return true


def _below_one(a: np.ndarray, b: int) -> np.ndarray:
    """The same for a <= b: of coins that fall with a / b, a / 2b, a / 3b .. the first that does not is an odd one."""
    odd, going, k = np.zeros(len(a), dtype=bool), np.arange(len(a)), 1
    while len(going):
        falls = toss(a[going], b * k)
        odd[going[~falls]] = k % 2 == 1
        going, k = going[falls], k + 1
    return odd


def toss(a: np.ndarray, b: int) -> np.ndarray:
    """For each whole number a <= b: true with probability a / b, to the last bit.

    62 bits of a random binary fraction are compared with those of a / b; where they are the same, the rest decides.
    """
    threshold, rest = (a << 62) // b, (a << 62) % b
    drawn = _words(len(a), 62).astype(object)
    true, same = np.asarray(drawn < threshold, dtype=bool), np.asarray(drawn == threshold, dtype=bool)
    if same.any():
        true[same] = toss(rest[same], b)
    return true


def draw_below(bound: int, n: int) -> np.ndarray:
    """n uniform whole numbers in 0 .. bound - 1; bound at most 2^62."""
    drawn, wrong = np.zeros(n, dtype=np.int64), np.arange(n)
    while len(wrong):
        drawn[wrong] = _words(len(wrong), max(1, (bound - 1).bit_length()))
        wrong = wrong[drawn[wrong] >= bound]
    return drawn


def _words(n: int, bits: int) -> np.ndarray:
    """n whole numbers of so many random bits."""
    words = np.frombuffer(os.urandom(8 * n + 8), dtype=np.uint64)[:n]
    return np.asarray(words >> np.uint64(64 - bits), dtype=np.int64)
