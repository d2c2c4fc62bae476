"""Clipping bounds, noise is what it says."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from protofed.errors import ConfigError
from protofed.privacy.draws import uniform
from protofed.privacy.mechanism import (
    GRID,
    add_gaussian_noise,
    clip,
    discrete_gaussian,
    os_discrete_gaussian,
    os_noise,
    seeded_noise,
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


def test_noise_of_the_operating_system_is_normal_and_never_the_same():
    first, second = os_noise((300, 200)), os_noise((300, 200))
    assert first.shape == (300, 200)
    assert stats.kstest(first.flatten().numpy(), "norm").pvalue > 1e-5
    assert not (first == second).any()


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
