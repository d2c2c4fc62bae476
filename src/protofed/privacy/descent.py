"""User-level DP-SGD: each round a Poisson cohort, one clipped gradient per user, noise on every coordinate.

Abadi et al., Deep learning with differential privacy, CCS 2016; per user: McMahan et al., Learning differentially
private recurrent language models, ICLR 2018. The sum over users of clipped gradients moves by at most the radius when
one user is added or removed, because nothing in a user's gradient depends on anybody else: its windows, their cut, its
negatives and the draws of extra losses are keyed by the user or the event and by the round, there is no dropout, and
losses are computed one user at a time. The sum is divided by a fixed number, never by the size of the cohort. Weight
decay and the optimiser's moments depend on released gradients and weights alone.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.backbone.training import WindowLosses
from protofed.errors import ProtoFedError
from protofed.privacy.draws import bernoulli, uniform
from protofed.privacy.mechanism import add_gaussian_noise, seeded_noise
from protofed.seeds import stream
from protofed.slices.histories import Histories
from protofed.slices.windows import Windows, take, training_windows, trimmed

WINDOWS_PER_USER = 4  # m_u: a user's windows in one round, at most
CELLS_AT_ONCE = 4_000_000  # entries of per-user gradients held at once


def clipped_sum(contributions: list[Tensor], radius: float) -> tuple[list[Tensor], float]:
    """The sum over users of contributions clipped to the radius, and which share of users was clipped.

    Each tensor is (U, ...) and a user's contribution is its row of all of them, concatenated; one that is not finite
    counts as zero. In double precision: adding or removing a user moves the sum by at most the radius.
    """
    rows = [tensor.reshape(len(tensor), math.prod(tensor.shape[1:])) for tensor in contributions]
    lengths = torch.stack([torch.linalg.vector_norm(each, dim=1, dtype=torch.float64) for each in rows]).norm(dim=0)
    finite, long = lengths.isfinite(), ~(lengths <= radius)
    factors = torch.where(long, radius / lengths, 1.0)
    if not finite.all():  # 0 times infinity is no number
        factors, rows = factors.where(finite, 0.0), [each.where(finite[:, None], 0.0) for each in rows]
    sums = [factors @ each.to(torch.float64) for each in rows]
    share = float(long.double().mean()) if len(long) else 0.0
    return [total.view(tensor.shape[1:]) for total, tensor in zip(sums, contributions, strict=True)], share


@dataclass(slots=True)
class Meter:
    """Rounds of private steps: those the ledger lists, those handed out, those made; and what the log keeps of them."""

    next_round: int
    end: int  # rounds from here on are not in the ledger, which is written ahead
    asked: int = 0
    made: int = 0
    first_round: int = -1
    taken_part: int = 0
    clipped: float = 0.0

    def spend(self, n: int) -> range:
        """The next rounds: n of them, or as many as the ledger still lists."""
        spent = range(self.next_round, min(self.next_round + n, max(self.end, self.next_round)))
        self.first_round = spent.start if self.first_round < 0 else self.first_round
        self.next_round, self.asked = spent.stop, self.asked + n
        return spent

    def release(self) -> int:
        """The number of the round that is about to be released; one that was not handed out is an error."""
        round_ = self.first_round + self.made
        if self.first_round < 0 or round_ >= self.next_round:
            raise ProtoFedError(f"a private step beyond the {self.made} that the ledger pays for was refused")
        self.made += 1
        return round_

    def diagnostics(self) -> dict[str, int | float]:
        """Of the cohorts; like all metrics of a run, the claim does not cover them."""
        return {
            "private_rounds": self.made,
            "cohort": self.taken_part / max(self.made, 1),
            "clipped_share": self.clipped / max(self.taken_part, 1),
        }


class CutsByUser(np.random.Generator):
    """Where each user's run of targets is cut, keyed by user and round: who else is there does not matter."""

    def __init__(self, seed: int, round_: int) -> None:
        super().__init__(np.random.PCG64(0))
        self.seed, self.round = seed, round_

    def integers(self, low: int, high: int, size: int) -> Any:  # type: ignore[override]
        drawn = uniform(self.seed, "private cuts", torch.arange(size), self.round)
        return low + (drawn.numpy() * (high - low)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class PrivateDescent:
    """Steps along the noised mean of clipped per-user gradients, `rounds_per_training` times a training."""

    seed: int
    noise_multiplier: float  # z: the noise's standard deviation is z times the radius
    sampling_rate: float  # q
    clip_radius: float  # S
    rounds_per_training: int
    n_users: int  # N: everybody who may take part; public
    meter: Meter
    windows_per_user: int = WINDOWS_PER_USER

    def rounds(self) -> range:
        return self.meter.spend(self.rounds_per_training)

    def sampled(self, round_: int) -> np.ndarray:
        """Each user's coin of the round, independent of all others and of everything released."""
        return bernoulli(self.seed, "coin", torch.arange(self.n_users), round_, self.sampling_rate).numpy()

    def cohort(self, past: Histories, positions: np.ndarray, round_: int, *, length: int, stride: int) -> Windows:
        """The sampled users' windows over the events at these positions, at most `windows_per_user` of each."""
        mine = positions[self.sampled(round_)[past.users[positions]]]
        windows = training_windows(past, mine, length=length, stride=stride, rng=CutsByUser(self.seed, round_))
        lot = uniform(self.seed, "private windows", windows.newest, round_).numpy()
        order = np.lexsort((lot, windows.users.numpy()))
        users = windows.users.numpy()[order]
        drawn = np.arange(len(users)) - np.searchsorted(users, users)  # rank of the lot among the user's
        return take(windows, torch.from_numpy(order[drawn < self.windows_per_user]))

    def negatives(self, windows: Windows, n: int, n_items: int, round_: int) -> Int[Tensor, "W n"]:
        """Uniform items for each window, drawn by a counter keyed by its newest target."""
        if n >= n_items:
            return torch.arange(n_items, device=windows.newest.device).expand(len(windows), -1)
        drawn = uniform(self.seed, "private negatives", windows.newest, round_, (n,))
        return (drawn * n_items).long().clamp(max=n_items - 1)

    def gradients(self, losses: WindowLosses, batch: Windows, optimiser: torch.optim.Optimizer) -> None:
        """The noised mean of clipped per-user gradients, in every parameter's `grad`; without a cohort, noise alone."""
        weights = [p for group in optimiser.param_groups for p in group["params"]]
        sums = self.sums(losses, batch, weights)
        noise = seeded_noise(stream(self.seed, "private noise", self.meter.release()))
        std = self.noise_multiplier * self.clip_radius
        for weight, total in zip(weights, sums, strict=True):
            noised = add_gaussian_noise(total, std, noise) / (self.sampling_rate * self.n_users)
            weight.grad = noised.to(weight.dtype)

    def sums(self, losses: WindowLosses, batch: Windows, weights: list[Tensor]) -> list[Float[Tensor, "..."]]:
        """Over the users of the batch, the sum of their clipped gradients, before any noise."""
        total = [torch.zeros(weight.shape, dtype=torch.float64, device=weight.device) for weight in weights]
        users = torch.unique(batch.users).tolist()
        at_once = max(1, CELLS_AT_ONCE // sum(weight.numel() for weight in weights))
        for first in range(0, len(users), at_once):
            some = [gradient_of_one(losses, of_user(batch, user), weights) for user in users[first : first + at_once]]
            part, share = clipped_sum([torch.stack(each) for each in zip(*some, strict=True)], self.clip_radius)
            total = [a + b for a, b in zip(total, part, strict=True)]
            self.meter.clipped += share * len(some)
        self.meter.taken_part += len(users)
        return total

    def __call__(self, losses: WindowLosses, batch: Windows, optimiser: torch.optim.Optimizer) -> None:
        self.gradients(losses, batch, optimiser)
        optimiser.step()


def of_user(batch: Windows, user: int) -> Windows:
    """The windows of one user alone, as long as its own histories are: the others' lengths must not matter."""
    return trimmed(take(batch, (batch.users == user).nonzero()[:, 0]))


def gradient_of_one(losses: WindowLosses, windows: Windows, weights: list[Tensor]) -> tuple[Tensor, ...]:
    """The gradient of one user's mean loss over all its targets."""
    sums, counts = losses(windows)
    mean = sums.sum() / counts.sum().clamp(min=1)
    return torch.autograd.grad(mean, weights, allow_unused=True, materialize_grads=True)
