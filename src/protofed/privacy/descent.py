"""User-level DP-SGD: each round a Poisson cohort, one clipped gradient per user, noise on every coordinate.

Abadi et al., Deep learning with differential privacy, CCS 2016; per user: McMahan et al., Learning differentially
private recurrent language models, ICLR 2018. The sum over users of clipped gradients moves by at most the radius when
one user is added or removed, because nothing in a user's gradient depends on anybody else: its windows, their cut, its
negatives and the draws of extra losses are keyed by the user or the event and by the round, there is no dropout, and
each loss is that of one user alone (privacy/user_gradients.py, also for what rounding may do). The sum is divided by a
fixed number, never by the size of the cohort. Weight decay and the optimiser's moments depend on released gradients and
weights alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from protofed.backbone.one_window import TABLE, OneWindowLoss
from protofed.backbone.recorded import Shape
from protofed.backbone.training import WindowLosses
from protofed.errors import ProtoFedError
from protofed.privacy.draws import SeededDraws, toss_coins, uniform
from protofed.privacy.mechanism import add_gaussian_noise, seeded_noise
from protofed.privacy.user_gradients import Gradients, chunks, clipped_sum, gradients_of, windows_at_once
from protofed.seeds import stream
from protofed.slices.histories import Histories
from protofed.slices.windows import Windows, take, training_windows

WINDOWS_PER_USER = 4  # m_u: a user's windows in one round, at most
BELOW_ONE = 1 - 2.0**-24  # the largest number below 1 that single precision has


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
        return toss_coins(SeededDraws(self.seed), torch.arange(self.n_users), round_, self.sampling_rate).numpy()

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

    def numbers(self, windows: Windows, n: int, round_: int) -> Float[Tensor, "W n"]:
        """What each window's extra loss draws from, drawn by a counter keyed by its newest target."""
        return uniform(self.seed, "extra loss", windows.newest, round_, (n,)).clamp(max=BELOW_ONE)

    def gradients(self, loss: OneWindowLoss, batch: Windows, optimiser: torch.optim.Optimizer) -> None:
        """The noised mean of clipped per-user gradients, in every parameter's `grad`; without a cohort, noise alone."""
        weights = weights_of(loss.model, optimiser)
        sums = self.sums(loss, batch, weights)
        noise = seeded_noise(stream(self.seed, "private noise", self.meter.release()))
        std = self.noise_multiplier * self.clip_radius
        for name, weight in weights.items():
            noised = add_gaussian_noise(sums[name], std, noise) / (self.sampling_rate * self.n_users)
            weight.grad = noised.to(weight.dtype)

    def sums(self, loss: OneWindowLoss, batch: Windows, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Over the users of the batch, the sum of their clipped gradients, before any noise."""
        total = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in weights.items()}
        negatives = self.negatives(batch, loss.negatives, loss.n_items, loss.round_)
        most = Shape(self.windows_per_user, loss.model.config.history_length, loss.targets)
        expected = self.sampling_rate * self.n_users  # public, unlike the cohort's size
        for chunk in chunks(batch, negatives, most, lambda tokens: windows_at_once(loss, tokens, weights, expected)):
            needs = loss.needs(chunk.inputs.batch.tokens.shape[1])
            found = gradients_of(loss, weights, chunk, self.numbers(chunk.inputs.batch, needs.numbers, loss.round_))
            dense, rows, long = clipped_sum(list(found.dense.values()), self.clip_radius, found.rows)
            for name, part in zip(found.dense, dense, strict=True):
                total[name] += part
            if rows is not None:
                total[TABLE].index_add_(0, rows.items, rows.values)
            self.meter.taken_part += chunk.n_users
            self.meter.clipped += int(long[:-1].sum())
            tell(loss, found, chunk.owners < chunk.n_users)
        return total

    def __call__(self, losses: WindowLosses | OneWindowLoss, batch: Windows, optimiser: torch.optim.Optimizer) -> None:
        self.gradients(by_window(losses), batch, optimiser)
        optimiser.step()


def weights_of(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """What the optimiser trains, by the name it has in the model; anything else cannot be trained privately."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    trained = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    if foreign := [tuple(parameter.shape) for parameter in trained if id(parameter) not in names]:
        raise ProtoFedError(f"private steps train weights of the backbone alone, got others of shapes {foreign}")
    return {names[id(parameter)]: parameter for parameter in trained}


def tell(loss: OneWindowLoss, found: Gradients, here: Bool[Tensor, " W"]) -> None:
    """Adds what the extra loss told of the windows that are here to its notes."""
    if loss.extra is None:
        return
    sums, counts = found.told
    for name in sums:
        loss.extra.notes.add(name, sums[name].where(here, 0.0).sum(), counts[name].where(here, 0.0).sum())


def by_window(losses: WindowLosses | OneWindowLoss) -> OneWindowLoss:
    """Refuses losses that cannot be asked window by window."""
    if not isinstance(losses, OneWindowLoss):
        raise ProtoFedError("private steps need the loss of one window (OneWindowLoss), got losses of a whole batch")
    return losses
