"""The mechanism audited from outside: what the real aggregate lets an observer tell, no more and no less than promised.

A trial is a pair of rows of one large aggregate: entries are noised independently, so 100,000 trials are one call of
the real function. In one arm the canary takes part, in the other not; a statistic of the release tells them apart.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from auditing import ALPHA, limits, mu_lower_bound, upper
from scipy import stats
from torch import Tensor

from protofed.privacy.accountant import delta_of, gaussian_epsilon, noise_for
from protofed.privacy.draws import uniform
from protofed.privacy.ledger import Release
from protofed.privacy.mechanism import Noise, add_gaussian_noise, clip, seeded_noise
from protofed.privacy.upload import UploadRule
from protofed.seeds import stream
from protofed.server.fedkmeans import exact_sums, noised_sums

Z = 1.1282  # the noise of ε = 3.4 over 160 rounds at rate 0.05
TRIALS = 100_000
ROWS = 2  # rows of a trial: the canary's, and another
WIDTH = 3
CANARY = torch.tensor([2.0, 1.0, -2.0])  # three times too long: a mechanism that does not clip is seen to
Aggregate = Callable[[Tensor, Tensor, UploadRule, float, Noise], Tensor]


def rule(trials: int) -> UploadRule:
    return UploadRule(n_prototypes=trials * ROWS, width=WIDTH)


def others(trials: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two clients in every second row of a trial: known to the observer, not what it looks for."""
    z = torch.randn(2 * trials, WIDTH, generator=rng)
    return z, torch.arange(trials).repeat(2) * ROWS + 1


def release(aggregate: Aggregate, present: Tensor, noise: Noise) -> Tensor:
    """Y - Y0 of every trial, (trials, ROWS, WIDTH + 1): the canary is in the first row of the trials where present."""
    trials = len(present)
    z, block = others(trials, stream(0, "others"))
    without = exact_sums(z, block, rule(trials))
    at = torch.arange(trials)[present] * ROWS
    everybody = torch.cat((z, CANARY.expand(len(at), -1))), torch.cat((block, at))
    return (aggregate(*everybody, rule(trials), Z, noise) - without).reshape(trials, ROWS, WIDTH + 1)


def arms(aggregate: Aggregate, statistic: Callable[[Tensor], Tensor], trials: int = TRIALS) -> list[np.ndarray]:
    """The statistic's values without and with the canary."""
    return [
        statistic(release(aggregate, torch.full((trials,), arm), seeded_noise(stream(1, "audit", int(arm))))).numpy()
        for arm in (False, True)
    ]


def canary_row() -> Tensor:
    """The contribution e an intact mechanism lets the canary make."""
    return torch.cat((clip(CANARY[None].double(), 1.0)[0], torch.tensor([0.25])))


def along_canary(y: Tensor) -> Tensor:
    """<Y - Y0, e>: the best single statistic against Gaussian noise."""
    return (y[:, 0] * canary_row()).sum(dim=-1)


def count_only(y: Tensor) -> Tensor:
    """The canary row's count."""
    return y[:, 0, -1]


def any_noise(y: Tensor) -> Tensor:
    """How far the canary's row is from empty."""
    return y[:, 0].norm(dim=-1)


def test_the_intact_mechanism_leaks_what_it_promises_and_no_more():
    bound = mu_lower_bound(*arms(noised_sums, along_canary))
    assert 0.93 / Z <= bound <= 1 / Z


@pytest.mark.parametrize("statistic", [count_only, any_noise])
def test_the_intact_mechanism_leaks_no_more_through_other_statistics(statistic):
    assert mu_lower_bound(*arms(noised_sums, statistic)) <= 1 / Z


def no_clip(z: Tensor, block: Tensor, r: UploadRule, multiplier: float, noise: Noise) -> Tensor:
    long = torch.cat((z.double(), torch.full((len(z), 1), 0.25)), dim=1)
    sums = torch.zeros(r.n_prototypes, WIDTH + 1, dtype=torch.float64).index_add_(0, block, long)
    return add_gaussian_noise(sums, r.noise_std(multiplier, "central"), noise)


def noise_without_sensitivity(z: Tensor, block: Tensor, r: UploadRule, multiplier: float, noise: Noise) -> Tensor:
    return add_gaussian_noise(exact_sums(z, block, r), multiplier, noise)


def exact_counts(z: Tensor, block: Tensor, r: UploadRule, multiplier: float, noise: Noise) -> Tensor:
    noised = noised_sums(z, block, r, multiplier, noise)
    noised[:, -1] = exact_sums(z, block, r)[:, -1]
    return noised


def noise_in_occupied_rows(z: Tensor, block: Tensor, r: UploadRule, multiplier: float, noise: Noise) -> Tensor:
    exact = exact_sums(z, block, r)
    return torch.where(exact[:, -1:] > 0, noised_sums(z, block, r, multiplier, noise), exact)


def too_little_noise(z: Tensor, block: Tensor, r: UploadRule, multiplier: float, noise: Noise) -> Tensor:
    return noised_sums(z, block, r, multiplier / 1.25, noise)


@pytest.mark.parametrize(
    ("broken", "statistic"),
    [
        (no_clip, along_canary),
        (too_little_noise, along_canary),
        (exact_counts, count_only),
        (noise_in_occupied_rows, any_noise),
    ],
    ids=lambda part: part.__name__,
)
def test_a_broken_mechanism_is_caught_by_its_own_statistic(broken, statistic):
    assert mu_lower_bound(*arms(broken, statistic)) > 1 / Z


def noise_std_upper(aggregate: Aggregate, confidence: float = 1 - ALPHA) -> float:
    """An upper confidence limit of the noise's standard deviation, from the second rows, where the canary never is."""
    noise = release(aggregate, torch.zeros(TRIALS, dtype=torch.bool), seeded_noise(stream(2, "scale")))[:, 1].flatten()
    return math.sqrt(float((noise**2).sum()) / stats.chi2.ppf(1 - confidence, noise.numel()))


def test_noise_that_forgets_the_counts_share_of_the_sensitivity_is_caught_by_its_scale():
    promised = Z * math.hypot(1.0, 0.25)
    assert noise_std_upper(noise_without_sensitivity) < promised
    assert promised <= noise_std_upper(noised_sums) <= 1.01 * promised


def two_rounds(reuse: bool) -> list[np.ndarray]:
    """<Y2 - Y1, e> of two rounds, the canary in the second only."""
    absent = torch.zeros(TRIALS, dtype=torch.bool)
    values = []
    for arm in (False, True):
        first = release(noised_sums, absent, seeded_noise(stream(3, "first", int(arm))))
        again = stream(3, "first" if reuse else "second", int(arm))
        second = release(noised_sums, torch.full((TRIALS,), arm), seeded_noise(again))
        values.append(along_canary(second - first).numpy())
    return values


def test_reused_noise_is_caught_by_the_difference_of_two_rounds():
    assert mu_lower_bound(*two_rounds(reuse=True)) > 1 / Z
    assert 0.9 / (Z * math.sqrt(2)) <= mu_lower_bound(*two_rounds(reuse=False)) <= 1 / (Z * math.sqrt(2))


ROUNDS, RATE, RUNS = 160, 0.05, 20_000


def composed_losses(arm: bool) -> np.ndarray:
    """The log-likelihood ratio of `ROUNDS` rounds: with the canary's coins against without it."""
    sensitivity = float(canary_row().norm())
    total = torch.zeros(RUNS, dtype=torch.float64)
    noise = seeded_noise(stream(4, "composed", int(arm)))
    for round_ in range(ROUNDS):
        present = (uniform(5, "canary", torch.arange(RUNS), round_) < RATE) & torch.tensor(arm)
        shift = along_canary(release(noised_sums, present, noise)) / sensitivity**2  # N(0 or 1, Z²)
        total += torch.log1p(RATE * torch.expm1((shift - 0.5) / Z**2))
    return total.numpy()


def test_composed_rounds_follow_the_pld_curve_and_never_cross_it():
    without, with_ = composed_losses(False), composed_losses(True)
    ledger = (Release(Z, RATE, ROUNDS),)
    removing, adding = [], []
    for e in (0.0, 0.25, 0.5, 1.0, 1.5):
        promised = delta_of(ledger, e)
        removing.append(measured(with_ > e, without > e, e))
        adding.append(measured(without < -e, with_ < -e, e))
        assert max(low for low, _ in (removing[-1], adding[-1])) <= promised
        assert max(high for _, high in (removing[-1], adding[-1])) >= promised  # tight, not merely below
    assert removing[0][0] > 0.9 * delta_of(ledger, 0.0)


def measured(true: np.ndarray, false: np.ndarray, e: float) -> tuple[float, float]:
    """Confidence limits of P(true) - exp(e) P(false): δ at ε = e by the Neyman-Pearson test."""
    n, hits, alarms = len(true), int(true.sum()), int(false.sum())
    least = (1 - upper(n - hits, n)) - math.exp(e) * upper(alarms, n)
    most = upper(hits, n) - math.exp(e) * (1 - upper(n - alarms, n))
    return float(least), float(most)


def test_a_plain_epsilon_lower_bound_is_far_below_the_true_one(record_property):
    """Ten thousand trials show less than half of ε of one unsampled release: written down, not relied on."""
    without, with_ = arms(noised_sums, along_canary, 20_000)
    thresholds = np.quantile(without[:10_000], np.linspace(0.5, 0.999, 50))

    def shown(fpr: np.ndarray, fnr: np.ndarray) -> np.ndarray:
        return np.log(np.maximum(1 - fnr - 1e-5, 1e-12) / fpr)

    best = np.argmax(shown(*limits(without[:10_000], with_[:10_000], thresholds)))
    bound = float(shown(*limits(without[10_000:], with_[10_000:], thresholds[best : best + 1]))[0])
    record_property("epsilon_lower_bound", bound)
    assert 1.0 < bound < 0.6 * gaussian_epsilon(1 / Z, 1e-5)


def test_the_audited_noise_is_the_one_of_the_default_budget():
    assert noise_for(3.4, 1e-5, RATE, ROUNDS) == Z
