"""ε behaves as a price must, and says against whom."""

import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed.errors import ConfigError, MissingExtra
from protofed.privacy.accountant import (
    NOTES,
    adjacency,
    delta_of,
    epsilon,
    gaussian_delta,
    gaussian_epsilon,
    guarantees,
    noise_for,
    rounds_within,
    usual_uploads,
)
from protofed.privacy.ledger import Release

DELTA = 1e-5
multipliers, rates, counts = st.floats(0.7, 4), st.floats(0.01, 0.5), st.integers(1, 30)


def test_an_empty_ledger_costs_nothing_and_a_release_without_noise_everything():
    assert epsilon((), DELTA) == 0
    assert epsilon((Release(1.0, 0.1), Release(0.0, 0.1)), DELTA) == math.inf


@settings(max_examples=8, deadline=None)
@given(multipliers, rates, counts, st.integers(2, 5), st.sampled_from(["pld", "rdp"]))
def test_counting_a_release_n_times_equals_releasing_it_n_times(multiplier, rate, count, n, accountant):
    once = tuple(Release(multiplier, rate, count, str(i)) for i in range(n))
    counted = (Release(multiplier, rate, count * n),)
    assert epsilon(once, DELTA, accountant=accountant) == pytest.approx(epsilon(counted, DELTA, accountant=accountant))


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(multipliers, rates, counts)
def test_more_noise_fewer_rounds_and_rarer_sampling_cost_less_and_rdp_never_less_than_pld(multiplier, rate, count):
    price = epsilon((Release(multiplier, rate, count),), DELTA)
    assert epsilon((Release(1.3 * multiplier, rate, count),), DELTA) <= price + 1e-6
    assert epsilon((Release(multiplier, rate, count + 5),), DELTA) >= price - 1e-6
    assert epsilon((Release(multiplier, rate / 2, count),), DELTA) <= price + 1e-6
    assert epsilon((Release(multiplier, rate, count),), DELTA, accountant="rdp") >= price - 1e-3


@settings(max_examples=6, deadline=None)
@given(multipliers, rates, counts)
def test_the_server_never_gets_a_smaller_epsilon_than_who_sees_the_release(multiplier, rate, count):
    ledger = (Release(multiplier, rate, count),)
    for trust in ("central", "secure-aggregation", "local"):
        seen = epsilon(ledger, DELTA, trust=trust)
        assert epsilon(ledger, DELTA, trust=trust, adversary="server") >= seen - 1e-3


def test_at_rate_one_both_adversaries_and_both_roads_agree():
    ledger = (Release(3.5, 1.0, 8),)
    released = epsilon(ledger, DELTA)
    assert released == epsilon(ledger, DELTA, adversary="server", trust="secure-aggregation")
    assert released == pytest.approx(gaussian_epsilon(math.sqrt(8) / 3.5, DELTA))
    mixed = (*ledger, Release(500.0, 0.5))  # goes through the PLD instead of the closed form
    assert epsilon(mixed, DELTA) == pytest.approx(released, rel=1e-3)


def test_everybody_once_a_slice_needs_less_noise_a_slice_than_twenty_sampled_rounds():
    all_at_once, sampled = noise_for(3.4, DELTA, 1.0, 8), noise_for(3.4, DELTA, 0.05, 160)
    assert (all_at_once, sampled) == (3.5237, 1.1282)
    # A slice's noise beside its signal: n clients once, or 20 sums of n / 20.
    assert all_at_once < sampled * math.sqrt(20)


def test_under_central_trust_nothing_is_promised_against_the_server():
    assert epsilon((Release(5.0, 0.01),), DELTA, adversary="server") == math.inf
    with pytest.raises(ConfigError, match="no noise protects against a server under central trust"):
        noise_for(3.4, DELTA, 0.05, 160, adversary="server")


def test_under_local_trust_neighbours_differ_by_an_exchange_and_nothing_is_amplified():
    ledger = (Release(2.0, 0.05, 160),)
    assert adjacency("local") == "replace one user"
    assert adjacency("central") == adjacency("secure-aggregation") == "add or remove one user"
    both = {epsilon(ledger, DELTA, trust="local", adversary=adversary) for adversary in ("release", "server")}
    assert both == {gaussian_epsilon(math.sqrt(160) / 2.0, DELTA)}


def test_local_noise_for_one_upload_is_the_known_one():
    multiplier = noise_for(3.4, DELTA, 1.0, 1, trust="local")
    assert round(multiplier, 2) == 1.25
    assert round(2 * multiplier, 2) == 2.49


def test_a_cap_on_uploads_helps_against_the_server_only():
    free, capped = Release(1.2, 0.05, 160), Release(1.2, 0.05, 160, max_uploads=8)
    assert epsilon((free,), DELTA) == epsilon((capped,), DELTA)
    server = {"adversary": "server", "trust": "secure-aggregation"}
    assert epsilon((capped,), DELTA, **server) == pytest.approx(gaussian_epsilon(math.sqrt(8) / 1.2, DELTA))
    assert epsilon((free,), DELTA, **server) == pytest.approx(gaussian_epsilon(math.sqrt(160) / 1.2, DELTA))


def test_160_rounds_at_5_percent_are_8_uploads_on_average_and_rarely_more_than_22():
    assert usual_uploads(Release(1.2, 0.05, 160), DELTA) == (8, 22)
    assert usual_uploads(Release(1.2, 0.05, 160, max_uploads=10), DELTA) == (8, 10)


@given(st.floats(0.01, 50), st.floats(1e-9, 0.1))
def test_the_exact_gaussian_inverts_itself(mu, delta):
    e = gaussian_epsilon(mu, delta)
    assert gaussian_delta(e, mu) <= delta * (1 + 1e-5)
    assert e == 0 or gaussian_delta(e * (1 - 1e-6), mu) >= delta * (1 - 1e-5)


def test_the_pld_curve_of_an_unsampled_release_is_the_exact_one():
    for e in (0.0, 0.5, 2.0):
        assert delta_of((Release(1.5, 1.0, 4),), e) == pytest.approx(gaussian_delta(e, 2 / 1.5), rel=1e-3)


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(st.floats(0.5, 8), st.floats(0.02, 1.0), st.integers(1, 200))
def test_solved_noise_keeps_the_budget_and_a_ten_thousandth_less_does_not(target, rate, rounds):
    multiplier = noise_for(target, DELTA, rate, rounds)
    assert epsilon((Release(multiplier, rate, rounds),), DELTA) <= target
    assert epsilon((Release(multiplier - 1e-4, rate, rounds),), DELTA) > target


@pytest.mark.slow
def test_what_is_spent_already_raises_the_noise_of_the_rest():
    spent = (Release(1.5, 0.05, 160, "popularity"),)
    multiplier = noise_for(3.4, DELTA, 0.05, 160, spent=spent)
    assert multiplier > noise_for(3.4, DELTA, 0.05, 160)
    assert epsilon((*spent, Release(multiplier, 0.05, 160)), DELTA) <= 3.4


@pytest.mark.slow
def test_a_budget_that_is_spent_is_refused():
    with pytest.raises(ConfigError, match="it is spent, or too small"):
        noise_for(1.0, DELTA, 0.05, 10, spent=(Release(0.8, 0.05, 200),))


@pytest.mark.slow
def test_uploads_stop_when_the_budget_is_spent():
    release = Release(1.1282, 0.05, 400)
    assert rounds_within(3.4, DELTA, release) == 160
    assert rounds_within(3.4, DELTA, release, spent=(Release(1.1282, 0.05, 100),)) == 60
    assert rounds_within(3.4, DELTA, release, spent=(Release(1.1282, 0.05, 161),)) == 0
    assert rounds_within(3.4, DELTA, Release(1.1282, 0.05, 20)) == 20


def test_a_guarantee_is_stated_for_every_trust_and_adversary_with_all_it_depends_on():
    rows = guarantees((Release(1.1282, 0.05, 160),), DELTA)
    assert [(row.trust, row.adversary) for row in rows] == list(NOTES)
    by = {(row.trust, row.adversary): row for row in rows}
    assert by["central", "release"].pld == pytest.approx(3.4, abs=1e-3)
    assert by["central", "server"].pld == by["central", "server"].rdp == math.inf
    assert by["secure-aggregation", "server"].pld == pytest.approx(109.82, abs=0.01)
    assert {row.delta for row in rows} == {DELTA}
    assert {row.unit for row in rows} == {"user"}
    assert {row.uploads for row in rows} == {160}


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_a_delta_that_is_none_is_refused(delta):
    with pytest.raises(ConfigError, match="delta must lie strictly between 0 and 1"):
        epsilon((Release(1.0, 0.1),), delta)


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_a_target_that_is_none_is_refused(target):
    with pytest.raises(ConfigError, match="target epsilon must be a finite number above 0"):
        noise_for(target, DELTA, 0.05, 10)


def test_without_dp_accounting_sampled_releases_name_the_library_and_unsampled_ones_are_priced(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    for accountant in ("pld", "rdp"):
        with pytest.raises(MissingExtra, match="dp-accounting is not installed"):
            epsilon((Release(1.0, 0.1),), DELTA, accountant=accountant)
    assert epsilon((Release(3.5237, 1.0, 8),), DELTA) == pytest.approx(3.4, abs=1e-3)
