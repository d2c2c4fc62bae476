"""Clipping bounds, noise is what it says."""

import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from protofed.errors import ConfigError
from protofed.privacy import mechanism
from protofed.privacy.draws import uniform
from protofed.privacy.mechanism import (
    GRID,
    add_gaussian_noise,
    bernoulli_exp,
    clip,
    discrete_gaussian,
    discrete_laplace,
    draw_below,
    os_discrete_gaussian,
    os_noise,
    rounding_delta,
    seeded_noise,
    toss,
)
from protofed.seeds import stream

rows = st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=3, max_size=3)


@given(st.lists(rows, min_size=1, max_size=6), st.floats(0.1, 10))
def test_clip_never_lengthens_and_never_exceeds_the_radius(values, radius):
    z = torch.tensor(values, dtype=torch.float64)
    clipped = clip(z, radius)
    assert (clipped.norm(dim=-1) <= radius).all()
    finite = torch.isfinite(z).all(dim=-1)
    assert (clipped[finite].abs() <= z[finite].abs() * (1 + 1e-12)).all()


@given(st.lists(rows, min_size=1, max_size=6))
def test_clip_in_single_precision_stays_in_the_ball_too(values):
    assert (clip(torch.tensor(values), 1.0).norm(dim=-1) <= 1).all()


def test_clip_keeps_short_rows_and_the_direction_of_long_ones():
    z = torch.tensor([[0.3, 0.4], [3.0, 4.0], [1e38, 0.0]])
    assert torch.equal(clip(z, 1.0)[0], z[0])
    assert clip(z, 1.0)[1].tolist() == pytest.approx([0.6, 0.8])
    assert clip(z, 1.0)[2].tolist() == pytest.approx([1.0, 0.0])


def test_a_row_that_is_not_finite_becomes_zero_and_leaves_the_others_alone():
    z = torch.tensor([[math.nan, 1.0], [math.inf, 0.0], [0.6, 0.8]])
    assert torch.equal(clip(z, 2.0), torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.6, 0.8]]))


def test_gaussian_noise_has_the_standard_deviation_asked_for():
    noised = add_gaussian_noise(torch.zeros(200_000, dtype=torch.float64), 1.7, seeded_noise(stream(0, "noise")))
    assert stats.kstest(noised.numpy() / 1.7, "norm").pvalue > 1e-3
    assert noised.std().item() == pytest.approx(1.7, rel=0.01)


def test_the_same_stream_gives_the_same_noise_and_another_gives_other_noise():
    sums = torch.zeros(10, dtype=torch.float64)
    a, b, c = (add_gaussian_noise(sums, 1.0, seeded_noise(stream(seed, "noise"))) for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_a_release_lies_on_a_public_grid():
    sums = torch.rand(1_000, dtype=torch.float64, generator=stream(0, "sums"))
    noised = add_gaussian_noise(sums, 1.0, seeded_noise(stream(0, "noise"))) / GRID
    assert torch.equal(noised, noised.round())


def test_without_noise_the_sums_are_exact():
    sums = torch.tensor([0.1, 0.2])
    assert torch.equal(add_gaussian_noise(sums, 0.0, os_noise), sums)


@pytest.mark.parametrize("std", [-1.0, math.nan, math.inf])
def test_a_standard_deviation_that_is_none_is_refused(std):
    with pytest.raises(ConfigError, match="standard deviation must be a finite number >= 0"):
        add_gaussian_noise(torch.zeros(2), std, os_noise)


def test_seeded_releases_are_the_same_to_the_bit_as_ever():
    sums = 10 * torch.randn(4_096, dtype=torch.float64, generator=stream(0, "sums"))
    for std in (1.1282 * math.hypot(1, 0.25), 0.25, 1e-9, 3e5):
        noised = add_gaussian_noise(sums, std, seeded_noise(stream(1, "noise")))
        drawn = torch.randn(4_096, dtype=torch.float64, generator=stream(1, "noise"))
        assert torch.equal(noised, ((sums + std * drawn) / GRID).round().mul(GRID))
    noised = add_gaussian_noise(sums.float(), 1.5, seeded_noise(stream(2, "noise")))
    assert hashlib.sha256(noised.numpy().tobytes()).hexdigest()[:16] == "d238b92c34b934c1"


STD = 1.1282 * math.hypot(1, 0.25)  # of a round's prototypes at the default budget


def test_noise_of_the_operating_system_is_whole_steps_normal_and_never_the_same():
    first, second = os_noise((128, 65), STD / GRID), os_noise((128, 65), STD / GRID)
    assert first.shape == (128, 65)
    assert first.dtype == torch.int64
    assert stats.kstest(first.flatten().numpy() * GRID / STD, "norm").pvalue > 1e-5
    assert not (first == second).any()
    assert stats.chi2.sf(uneven(first.flatten().numpy() % 16, 16), 15) > 1e-6  # the last bits say nothing


def uneven(codes: np.ndarray, n: int) -> float:
    """The chi-square statistic of codes that should be uniform."""
    expected = len(codes) / n
    return float(((np.bincount(codes, minlength=n) - expected) ** 2 / expected).sum())


def test_a_deployment_adds_whole_steps_to_whole_steps():
    sums = torch.rand(2_000, dtype=torch.float64, generator=stream(0, "sums")) - 0.5
    noised = add_gaussian_noise(sums, STD, os_noise) / GRID
    assert torch.equal(noised, noised.round())
    assert ((noised * GRID - sums).std() / STD).item() == pytest.approx(1, rel=0.1)
    seen = []

    def watched(shape: tuple[int, ...], std: float) -> torch.Tensor:
        seen.append(std)
        return torch.full(shape, 7)

    assert torch.equal(add_gaussian_noise(sums, STD, watched), ((sums / GRID).round() + 7) * GRID)
    assert seen == [STD / GRID]


def test_noise_of_too_few_steps_is_refused():
    with pytest.raises(ConfigError, match="a standard deviation of 4 steps or more, got 0"):
        add_gaussian_noise(torch.zeros(2), 1e-10, os_noise)


@pytest.mark.parametrize(("a", "b"), [(1, 3), (5, 7), (10**40 + 1, 3 * 10**40), (0, 5), (5, 5)])
def test_a_coin_falls_by_the_binary_fraction_of_its_chance_and_the_rest_decides_a_tie(a, b, monkeypatch):
    threshold, rest = divmod(a << 62, b)
    asked = []

    def scripted(n: int, bits: int) -> np.ndarray:
        asked.append(bits)
        return np.array([words[len(asked) - 1]] * n)

    monkeypatch.setattr(mechanism, "_words", scripted)
    for words, expected in (
        ([threshold - 1], True),
        ([threshold + 1], False),
        ([threshold, (rest << 62) // b - 1], True),
        ([threshold, (rest << 62) // b + 1], False),
    ):
        if min(words) >= 0 and max(words) < 2**62 and (rest or len(words) == 1):
            asked.clear()
            assert toss(np.array([a], dtype=object), b).tolist() == [expected]
            assert asked == [62] * len(words)


@pytest.mark.parametrize("gamma", [Fraction(0), Fraction(1, 7), Fraction(1), Fraction(9, 2), Fraction(8)])
def test_bernoulli_exp_has_the_chance_it_is_named_after(gamma):
    n, chance = 400_000, math.exp(-gamma)
    hits = bernoulli_exp(np.full(n, gamma.numerator, dtype=object), gamma.denominator).sum()
    assert abs(hits - n * chance) <= 5 * math.sqrt(n * chance * (1 - chance))


@pytest.mark.parametrize("bound", [1, 2, 5, 64])
def test_whole_numbers_below_a_bound_are_uniform(bound):
    assert stats.chi2.sf(uneven(draw_below(bound, 50_000), bound), max(bound - 1, 1)) > 1e-6


def test_every_step_beyond_five_standard_deviations_is_proposed_and_taken_as_often_as_it_should_be():
    """The chance of a step is that of its proposal times that of taking it, each large enough to be counted here.

    Words of 52 bits through the inverse distribution function reached one step in ten at 5.5 and one in 180 at 6.
    """
    std, t, n, tries = 4, 5, 400_000, 60_000
    proposed = np.bincount(np.abs(discrete_laplace(t, n)), minlength=200)
    taken = bernoulli_exp(np.repeat((np.arange(20, 33) * t - std**2) ** 2, tries).astype(object), 2 * std**2 * t**2)
    for x, kept in zip(range(20, 33), taken.reshape(-1, tries).sum(1), strict=True):
        for seen, ratio, base in (
            (proposed[x], math.exp(-x / t), proposed[1:].sum() / sum(math.exp(-y / t) for y in range(1, 200))),
            (kept, math.exp(-((x - std**2 / t) ** 2) / (2 * std**2)), tries),
        ):
            assert abs(seen - base * ratio) <= 5 * math.sqrt(base * ratio) + 3


@pytest.mark.parametrize("std", [4.0, 8.0, 33.3, 200.0])
def test_the_discrete_gaussian_is_as_near_to_the_rounded_one_as_the_price_says(std):
    k = np.arange(-math.ceil(12 * std), math.ceil(12 * std) + 1)
    discrete = np.exp(-(k**2) / (2 * std**2))
    rounded = stats.norm.cdf(-(np.abs(k) - 0.5) / std) - stats.norm.cdf(-(np.abs(k) + 0.5) / std)
    variation = np.abs(discrete / discrete.sum() - rounded).sum() / 2
    assert 0.019 / std**2 < variation < 1 / (40 * std**2)
    assert rounding_delta(std, 1, 0.0) == pytest.approx(2 / (40 * std**2))


def test_what_whole_steps_add_to_delta_is_nothing_beside_it():
    assert rounding_delta(STD / GRID, 160 * 128 * 65, 3.4) < 5e-14
    assert rounding_delta(0.1 / GRID, 480 * 1_000_000, 3.4) < 1e-5 / 1_000


def probabilities(std: float, reach: int) -> np.ndarray:
    weight = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * std**2))
    return weight / weight.sum()


@pytest.mark.parametrize("std", [0.7, 4.0])
def test_discrete_gaussian_draws_have_the_probabilities_of_their_definition(std):
    draws = discrete_gaussian(uniform(1, "discrete", torch.arange(200_000), 0), std)
    reach = math.ceil(3 * std)
    expected = probabilities(std, 10 * reach)[9 * reach : 11 * reach + 1] * len(draws)
    seen = np.bincount(np.clip(draws.numpy(), -reach - 1, reach + 1) + reach + 1, minlength=2 * reach + 3)[1:-1]
    assert stats.chi2.sf(((seen - expected) ** 2 / expected).sum(), 2 * reach + 1) > 1e-3


def test_the_exact_sampler_of_the_operating_system_has_those_probabilities_too():
    std, n = 2.5, 4_000
    draws = os_discrete_gaussian((n,), std).numpy()
    reach = 5
    expected = probabilities(std, 40)[40 - reach : 40 + reach + 1] * n
    seen = np.bincount(np.clip(draws, -reach - 1, reach + 1) + reach + 1, minlength=2 * reach + 3)[1:-1]
    assert stats.chi2.sf(((seen - expected) ** 2 / expected).sum(), 2 * reach + 1) > 1e-6
