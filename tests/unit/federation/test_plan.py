"""The budget of a stream: noise solved or given, rounds that the target pays for, and the ledger they leave."""

import math

import pytest
from scipy.stats import norm

from protofed.config import PrivacyConfig, RunConfig, override
from protofed.errors import ConfigError
from protofed.federation.plan import Stream, ledger, plan_releases
from protofed.methods.protofed_rules import streams_asked
from protofed.privacy.accountant import epsilon, noise_for, rounds_within
from protofed.privacy.ledger import Ledger, Release

DELTA = 1e-5


def privacy(
    target: float, noise: float, *, rate: float = 1.0, rounds: int = 5, trust: str = "central"
) -> PrivacyConfig:
    return PrivacyConfig(target, noise, sampling_rate=rate, rounds_per_slice=rounds, trust=trust)  # type: ignore[arg-type]


def one(config: PrivacyConfig, n_slices: int) -> Stream:
    return Stream("prototypes", config.sampling_rate, n_slices * config.rounds_per_slice, config.noise_multiplier)


def plan(config: PrivacyConfig, n_slices: int, *, private: bool = True) -> Stream:
    (settled,) = plan_releases(config, (one(config, n_slices),), private=private)
    return settled


def made(settled: Stream, rounds: int) -> Ledger:
    return ledger((settled,), {settled.name: rounds})


def delta_by_hand(target: float, noise: float, rounds: int) -> float:
    """δ(ε) of `rounds` Gaussians without sampling, by the formula of Balle and Wang (2018)."""
    mu = math.sqrt(rounds) / noise
    return float(norm.cdf(mu / 2 - target / mu) - math.exp(target) * norm.cdf(-mu / 2 - target / mu))


@pytest.mark.parametrize(("target", "n_slices", "rounds"), [(3.4, 8, 1), (1.0, 8, 20), (8.0, 2, 3)])
def test_the_solved_noise_is_the_least_that_keeps_all_rounds_in_the_target(target, n_slices, rounds):
    settled = plan(privacy(target, 0.0, rounds=rounds), n_slices)
    assert settled.rounds == n_slices * rounds
    assert delta_by_hand(target, settled.noise_multiplier, settled.rounds) <= DELTA
    assert delta_by_hand(target, settled.noise_multiplier - 2e-4, settled.rounds) > DELTA


@pytest.mark.parametrize("trust", ["central", "secure-aggregation", "local"])
def test_the_solved_noise_is_the_accountants(trust):
    settled = plan(privacy(3.4, 0.0, rounds=20, trust=trust), 8)
    assert (settled.noise_multiplier, settled.rounds) == (noise_for(3.4, DELTA, 1.0, 160, trust=trust), 160)


def test_the_default_budget_of_160_sampled_rounds_asks_for_the_contracts_noise():
    settled = plan(PrivacyConfig(), 8)
    assert settled.rounds == 160
    assert settled.noise_multiplier == pytest.approx(1.128, abs=5e-4)


def test_under_local_trust_sampling_buys_nothing():
    sampled = plan(privacy(3.4, 0.0, rate=0.05, rounds=2, trust="local"), 4)
    whole = plan(privacy(3.4, 0.0, rate=1.0, rounds=2), 4)
    assert (sampled.noise_multiplier, sampled.rounds) == (whole.noise_multiplier, whole.rounds)


def test_given_noise_without_a_target_makes_all_rounds():
    assert plan(privacy(0.0, 0.7), 8) == one(privacy(0.0, 0.7), 8) == Stream("prototypes", 1.0, 40, 0.7)


@pytest.mark.parametrize("noise", [2.0, 4.0, 20.0])
def test_with_both_given_uploads_stop_where_the_target_is_spent(noise):
    settled = plan(privacy(3.4, noise, rounds=20), 8)
    by_hand = max(n for n in range(1, 161) if delta_by_hand(3.4, noise, n) <= DELTA)
    assert (settled.noise_multiplier, settled.rounds) == (noise, by_hand)
    assert (noise < 20) == (by_hand < 160)


def test_with_both_given_sampled_rounds_are_those_within_the_target():
    config = privacy(1.5, 1.0, rate=0.05, rounds=5)
    settled = plan(config, 8)
    assert settled.rounds == rounds_within(1.5, DELTA, Release(1.0, 0.05, 40))
    assert 0 < settled.rounds < 40
    assert epsilon(made(settled, 10**6), DELTA) <= 1.5
    assert epsilon((Release(1.0, 0.05, settled.rounds + 1),), DELTA) > 1.5


def test_zero_for_both_is_one_clear_line():
    line = (
        r"^a private run needs --target-epsilon or --noise-multiplier, got 0 for both; --mode nodp runs without noise$"
    )
    for trust in ("central", "secure-aggregation", "local"):
        with pytest.raises(ConfigError, match=line):
            plan(privacy(0.0, 0.0, trust=trust), 8)


def test_a_budget_that_the_first_round_would_overspend_is_one_clear_line():
    assert delta_by_hand(1.0, 0.5, 1) > DELTA
    line = r"^noise multiplier 0\.5 spends more than ε = 1 in its first round; raise it or the target$"
    with pytest.raises(ConfigError, match=line):
        plan(privacy(1.0, 0.5), 8)


@pytest.mark.parametrize("settings", [(3.4, 0.0), (0.0, 0.0), (3.4, 1.0)])
def test_without_privacy_there_is_no_noise_and_no_limit(settings):
    assert plan(privacy(*settings), 8, private=False) == Stream("prototypes", 1.0, 40)


def test_without_rounds_nothing_is_solved_or_spent():
    settled = plan(privacy(3.4, 0.0, rounds=0), 8)
    assert settled == Stream("prototypes", 1.0, 0)
    assert made(settled, 5) == ()


def test_the_ledger_counts_each_streams_rounds_up_to_those_allowed():
    settled = (Stream("prototypes", 0.25, 12, 0.7), Stream("new items", 1.0, 4, 2.0))
    rounds, rows = Release(0.7, 0.25, 12), Release(2.0, 1.0, 4, "new items")
    assert ledger(settled) == ledger(settled, {"prototypes": 13, "new items": 5}) == (rounds, rows)
    assert ledger(settled, {"prototypes": 5, "new items": 0}) == (Release(0.7, 0.25, 5),)
    assert ledger(settled, {"prototypes": 0, "new items": 2}) == (Release(2.0, 1.0, 2, "new items"),)


GOLDEN = [  # prototypes' noise and rounds, new items' noise; of eight slices at q = 0.05
    ({}, 1.7802, 160, 4.065),
    ({"target_epsilon": 1.0}, 4.775, 160, 12.2372),
    ({"noise_multiplier": 1.0}, 1.0, 21, 4.065),
    ({"noise_multiplier": 1.6}, 1.6, 121, 4.065),
    ({"noise_multiplier": 1.8}, 1.8, 160, 4.065),
    ({"noise_multiplier": 0.8, "target_epsilon": 0.0}, 0.8, 160, 1.6),
    ({"newcomer_noise": 6.0}, 1.2694, 160, 6.0),
    ({"newcomer_noise": 6.0, "noise_multiplier": 1.2}, 1.2, 131, 6.0),
    ({"newcomer_share": 0.5}, 1.2404, 160, 6.5252),
    ({"trust": "secure-aggregation"}, 1.7802, 160, 4.065),
    ({"rounds_per_slice": 0}, 0.0, 0, 0.0),
]


@pytest.mark.parametrize(("settings", "noise", "rounds", "rows"), GOLDEN)
def test_with_new_items_every_number_is_what_the_contract_says(settings, noise, rounds, rows):
    config = override(RunConfig(), {f"privacy.{name}": value for name, value in settings.items()})
    prototypes, new_items = plan_releases(config.privacy, streams_asked(config))
    assert (prototypes.noise_multiplier, prototypes.rounds, new_items.noise_multiplier) == (noise, rounds, rows)


@pytest.mark.parametrize(
    ("rounds", "settings", "noise", "paid"),
    [
        (20, {}, 1.1282, 160),
        (40, {}, 1.3794, 320),
        (20, {"trust": "local"}, 15.7582, 160),
        (20, {"noise_multiplier": 0.8}, 0.8, 20),
    ],
)
def test_alone_every_number_is_what_the_contract_says(rounds, settings, noise, paid):
    settled = plan(PrivacyConfig(rounds_per_slice=rounds, **settings), 8)
    assert (settled.noise_multiplier, settled.rounds) == (noise, paid)


def test_a_plan_is_priced_together_and_keeps_the_order_of_its_streams():
    config = RunConfig()
    for streams in (streams_asked(config), streams_asked(config)[::-1]):
        settled = plan_releases(config.privacy, streams)
        assert [stream.name for stream in settled] == [stream.name for stream in streams]
        assert 3.39 < epsilon(ledger(settled), DELTA) <= 3.4


def test_a_stream_with_a_share_alone_spends_its_share():
    settled = plan_releases(PrivacyConfig(), (Stream("one", 1.0, 8, share=0.5), Stream("other", 1.0, 2, share=0.25)))
    assert [round(epsilon(ledger((stream,)), DELTA), 2) for stream in settled] == [1.7, 0.85]
