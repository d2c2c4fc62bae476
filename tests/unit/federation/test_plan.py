"""The budget of a stream: noise solved or given, rounds that the target pays for, and the ledger they leave."""

import math

import pytest
from scipy.stats import norm

from protofed.config import PrivacyConfig
from protofed.errors import ConfigError
from protofed.federation.plan import Plan, plan, releases
from protofed.privacy.accountant import epsilon, noise_for, rounds_within
from protofed.privacy.ledger import Release

DELTA = 1e-5


def privacy(
    target: float, noise: float, *, rate: float = 1.0, rounds: int = 5, trust: str = "central"
) -> PrivacyConfig:
    return PrivacyConfig(target, noise, sampling_rate=rate, rounds_per_slice=rounds, trust=trust)  # type: ignore[arg-type]


def delta_by_hand(target: float, noise: float, rounds: int) -> float:
    """δ(ε) of `rounds` Gaussians without sampling, by the formula of Balle and Wang (2018)."""
    mu = math.sqrt(rounds) / noise
    return float(norm.cdf(mu / 2 - target / mu) - math.exp(target) * norm.cdf(-mu / 2 - target / mu))


@pytest.mark.parametrize(("target", "n_slices", "rounds"), [(3.4, 8, 1), (1.0, 8, 20), (8.0, 2, 3)])
def test_the_solved_noise_is_the_least_that_keeps_all_rounds_in_the_target(target, n_slices, rounds):
    settled = plan(privacy(target, 0.0, rounds=rounds), n_slices, private=True)
    assert settled.rounds == n_slices * rounds
    assert delta_by_hand(target, settled.noise_multiplier, settled.rounds) <= DELTA
    assert delta_by_hand(target, settled.noise_multiplier - 2e-4, settled.rounds) > DELTA


@pytest.mark.parametrize("trust", ["central", "secure-aggregation", "local"])
def test_the_solved_noise_is_the_accountants(trust):
    settled = plan(privacy(3.4, 0.0, rounds=20, trust=trust), 8, private=True)
    assert settled == Plan(noise_for(3.4, DELTA, 1.0, 160, trust=trust), 160)


def test_the_default_budget_of_160_sampled_rounds_asks_for_the_contracts_noise():
    settled = plan(PrivacyConfig(), 8, private=True)
    assert settled.rounds == 160
    assert settled.noise_multiplier == pytest.approx(1.128, abs=5e-4)


def test_under_local_trust_sampling_buys_nothing():
    sampled = plan(privacy(3.4, 0.0, rate=0.05, rounds=2, trust="local"), 4, private=True)
    assert sampled == plan(privacy(3.4, 0.0, rate=1.0, rounds=2), 4, private=True)


def test_given_noise_without_a_target_makes_all_rounds():
    assert plan(privacy(0.0, 0.7), 8, private=True) == Plan(0.7, 40)


@pytest.mark.parametrize("noise", [2.0, 4.0, 20.0])
def test_with_both_given_uploads_stop_where_the_target_is_spent(noise):
    settled = plan(privacy(3.4, noise, rounds=20), 8, private=True)
    by_hand = max(n for n in range(1, 161) if delta_by_hand(3.4, noise, n) <= DELTA)
    assert settled == Plan(noise, by_hand)
    assert (noise < 20) == (by_hand < 160)


def test_with_both_given_sampled_rounds_are_those_within_the_target():
    config = privacy(1.5, 1.0, rate=0.05, rounds=5)
    settled = plan(config, 8, private=True)
    assert settled.rounds == rounds_within(1.5, DELTA, Release(1.0, 0.05, 40))
    assert 0 < settled.rounds < 40
    assert epsilon(releases(config, settled, 10**6), DELTA) <= 1.5
    assert epsilon((Release(1.0, 0.05, settled.rounds + 1),), DELTA) > 1.5


def test_zero_for_both_is_one_clear_line():
    line = (
        r"^a private run needs --target-epsilon or --noise-multiplier, got 0 for both; --mode nodp runs without noise$"
    )
    for trust in ("central", "secure-aggregation", "local"):
        with pytest.raises(ConfigError, match=line):
            plan(privacy(0.0, 0.0, trust=trust), 8, private=True)


def test_a_budget_that_the_first_round_would_overspend_is_one_clear_line():
    assert delta_by_hand(1.0, 0.5, 1) > DELTA
    line = r"^noise multiplier 0\.5 spends more than ε = 1 in its first round; raise it or the target$"
    with pytest.raises(ConfigError, match=line):
        plan(privacy(1.0, 0.5), 8, private=True)


@pytest.mark.parametrize("settings", [(3.4, 0.0), (0.0, 0.0), (3.4, 1.0)])
def test_without_privacy_there_is_no_noise_and_no_limit(settings):
    assert plan(privacy(*settings), 8, private=False) == Plan(0.0, 40)


def test_without_rounds_nothing_is_solved_or_spent():
    config = privacy(3.4, 0.0, rounds=0)
    settled = plan(config, 8, private=True)
    assert settled.rounds == 0
    assert releases(config, settled, 5) == ()


def test_the_ledger_counts_rounds_up_to_those_allowed():
    config, settled = privacy(3.4, 0.7, rate=0.25), Plan(0.7, 12)
    assert releases(config, settled, 0) == ()
    assert releases(config, settled, 5) == (Release(0.7, 0.25, 5),)
    assert releases(config, settled, 12) == releases(config, settled, 13) == (Release(0.7, 0.25, 12),)
