"""Random numbers that belong to a user and a round, whatever the batch they are drawn in.

A counter generator (Philox-4x32-10, Salmon et al. 2011) is a keyed hash of (user, round, position): nothing is drawn in
sequence, so a user's numbers are bit-equal alone, in a cohort of a million, or in chunks. For simulation only: whoever
knows the seed knows every draw, so a deployment takes coins and noise from the operating system (`SystemDraws`).
"""

import hashlib
import math
import secrets
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.privacy.mechanism import discrete_gaussian, os_discrete_gaussian
from protofed.seeds import seed_of

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
FINE = 2.0**48  # steps of a deployment's normal numbers in a standard deviation
NUMBERS_AT_ONCE = {"cpu": 1 << 16}  # drawn in one go: more leave the cache, and every step of the hash takes new memory
Words = tuple[Tensor, Tensor, Tensor, Tensor]  # four 32-bit words, each kept in an int64


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds of Philox-4x32: four random words for every counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = (
            c0 * MULTIPLIERS[0],
            c2 * MULTIPLIERS[1],
        )  # wrap around 2^64: the bits are those of the unsigned product
        c0, c1, c2, c3 = (p1 >> 32 & MASK) ^ c1 ^ k0, p1 & MASK, (p0 >> 32 & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = k0 + WEYL[0] & MASK, k1 + WEYL[1] & MASK
    return c0, c1, c2, c3


def uniform(
    seed: int, purpose: str, users: Int[Tensor, " U"], round_: int, shape: tuple[int, ...] = ()
) -> Float[Tensor, "U ..."]:
    """Numbers strictly between 0 and 1, `shape` of them for each user; 52 bits, float64, on the users' device."""
    n, key = math.prod(shape), seed_of(seed, "draws", purpose)
    at_once = NUMBERS_AT_ONCE.get(users.device.type, len(users) * n + 1) // max(n, 1)
    parts = [_uniform(key, some, round_, n) for some in users.split(max(at_once, 1))]
    return torch.cat(parts).reshape(len(users), *shape)


def _uniform(key: int, users: Int[Tensor, " U"], round_: int, n: int) -> Float[Tensor, "U n"]:
    """n numbers for each user."""
    wide = users.to(torch.int64)[:, None]
    position = torch.arange((n + 1) // 2, device=users.device)[None, :].expand(len(users), -1)  # two numbers a block
    counter = (position, torch.full_like(position, round_ & MASK), wide & MASK, wide >> 32 & MASK)
    a, b, c, d = philox(tuple(word.expand_as(position) for word in counter), (key & MASK, key >> 32 & MASK))  # type: ignore[arg-type]
    bits = torch.stack(((a >> 6 << 26) + (b >> 6), (c >> 6 << 26) + (d >> 6)), dim=-1)  # (U, blocks, 2)
    return (bits.flatten(1)[:, :n].to(torch.float64) + 0.5) * 2.0**-52


def normal(
    seed: int, purpose: str, users: Int[Tensor, " U"], round_: int, shape: tuple[int, ...] = ()
) -> Float[Tensor, "U ..."]:
    """Standard normal numbers, `shape` of them for each user, by the inverse distribution function.

    Element by element, unlike vectorised sines and logarithms, so that a batch cannot change the last bit.
    """
    drawn: Tensor = torch.special.ndtri(uniform(seed, purpose, users, round_, shape))
    return drawn


def event_keys(users: Int[Tensor, " W"], events: Int[Tensor, " W"]) -> Int[Tensor, " W"]:
    """A number for each (user, index of the user's own event), to draw by in place of the user's."""
    words = (events & MASK, events >> 32 & MASK, users & MASK, users >> 32 & MASK)
    high, low, _, _ = philox(words, (WEYL[0], WEYL[1]))
    return high << 32 | low


@runtime_checkable
class Draws(Protocol):
    """Where a device takes its random numbers from; `users` are keys, one row of numbers comes back for each."""

    def uniform(self, purpose: str, users: Int[Tensor, " U"], round_: int, shape: tuple[int, ...] = ()) -> Tensor:
        """Numbers strictly between 0 and 1."""
        ...

    def normal(self, purpose: str, users: Int[Tensor, " U"], round_: int, shape: tuple[int, ...] = ()) -> Tensor:
        """Standard normal numbers."""
        ...

    def discrete_gaussian(
        self, purpose: str, users: Int[Tensor, " U"], round_: int, shape: tuple[int, ...], std: float
    ) -> Tensor:
        """Integers of a discrete Gaussian."""
        ...

    def tokens(self, users: Int[Tensor, " U"], round_: int) -> Int[Tensor, " U"]:
        """What tells a device's uploads of a round apart from all others, and tells nothing else."""
        ...


def toss_coins(draws: Draws, users: Int[Tensor, " U"], round_: int, rate: float) -> Bool[Tensor, " U"]:
    """Whom a round asks for an upload: Poisson sampling, a coin for each user, true with probability `rate`.

    The coin of a round is independent of all earlier coins and of everything released, as accounting needs.
    """
    return draws.uniform("coin", users, round_) < rate


@dataclass(frozen=True, slots=True)
class SeededDraws:
    """Draws that anybody who knows the seed can repeat: for simulation."""

    seed: int

    def uniform(
        self, purpose: str, users: Int[Tensor, " U"], round_: int, shape: tuple[int, ...] = ()
    ) -> Float[Tensor, "U ..."]:
        return uniform(self.seed, purpose, users, round_, shape)

    def normal(
        self, purpose: str, users: Int[Tensor, " U"], round_: int, shape: tuple[int, ...] = ()
    ) -> Float[Tensor, "U ..."]:
        return normal(self.seed, purpose, users, round_, shape)

    def discrete_gaussian(
        self, purpose: str, users: Int[Tensor, " U"], round_: int, shape: tuple[int, ...], std: float
    ) -> Int[Tensor, "U ..."]:
        return discrete_gaussian(uniform(self.seed, purpose, users, round_, shape), std)

    def tokens(self, users: Int[Tensor, " U"], round_: int) -> Int[Tensor, " U"]:
        key = seed_of(self.seed, "token")
        words = (torch.full_like(users, round_ & MASK), torch.zeros_like(users), users & MASK, users >> 32 & MASK)
        high, low, _, _ = philox(words, (key & MASK, key >> 32 & MASK))
        return high << 32 | low


@dataclass(frozen=True, slots=True)
class SystemDraws:
    """Draws from the operating system, which nobody can repeat; a device's secret makes its tokens."""

    secret: bytes

    def uniform(
        self, purpose: str, users: Int[Tensor, " U"], round_: int, shape: tuple[int, ...] = ()
    ) -> Float[Tensor, "U ..."]:
        n = len(users) * math.prod(shape)
        words = np.frombuffer(secrets.token_bytes(8 * n), dtype=np.uint64) >> np.uint64(12)
        drawn = torch.from_numpy((words.astype(np.float64) + 0.5) * 2.0**-52)
        return drawn.reshape(len(users), *shape).to(users.device)

    def normal(
        self, purpose: str, users: Int[Tensor, " U"], round_: int, shape: tuple[int, ...] = ()
    ) -> Float[Tensor, "U ..."]:
        """Discrete Gaussian numbers on a very fine grid, by the exact sampler: none is out of reach."""
        return os_discrete_gaussian((len(users), *shape), FINE).to(users.device, torch.float64) / FINE

    def discrete_gaussian(
        self, purpose: str, users: Int[Tensor, " U"], round_: int, shape: tuple[int, ...], std: float
    ) -> Int[Tensor, "U ..."]:
        return os_discrete_gaussian((len(users), *shape), std).to(users.device)

    def tokens(self, users: Int[Tensor, " U"], round_: int) -> Int[Tensor, " U"]:
        made = [
            hashlib.blake2b(f"{user} {round_}".encode(), key=self.secret[:64], digest_size=8).digest()
            for user in users.tolist()
        ]
        return torch.tensor([int.from_bytes(token, "big", signed=True) for token in made], device=users.device)
