"""ε against values computed before and elsewhere: printed tables, and Opacus's accountant."""

import math

import pytest

from protofed.privacy.accountant import epsilon, gaussian_epsilon, noise_for
from protofed.privacy.ledger import Release

DELTA = 1e-5
Q = 0.05


def half_a_digit(printed: str) -> float:
    decimals = len(printed.partition(".")[2])
    return 0.5000001 * 10**-decimals if decimals else 0.5000001


def as_printed(value: float, printed: str) -> bool:
    return abs(value - float(printed)) <= half_a_digit(printed)


@pytest.mark.parametrize(
    ("rounds", "accountant", "multiplier"),
    [(160, "pld", 1.128), (160, "rdp", 1.203), (480, "pld", 1.590), (480, "rdp", 1.694)],
)
def test_the_noise_for_epsilon_3_4_is_the_known_one(rounds, accountant, multiplier):
    found = noise_for(3.4, DELTA, Q, rounds, accountant)
    assert round(found, 3) == multiplier
    assert epsilon((Release(found, Q, rounds),), DELTA, accountant=accountant) <= 3.4
    assert epsilon((Release(found - 1e-4, Q, rounds),), DELTA, accountant=accountant) > 3.4


@pytest.mark.parametrize(
    ("target", "rounds", "multiplier"),
    [(3.4, 50, "0.97"), (3.4, 1000, "2.28"), (1.8, 100, "1.54"), (8.0, 200, ".83")],
)
def test_the_rdp_noise_for_other_budgets_is_the_tabulated_one(target, rounds, multiplier):
    assert as_printed(noise_for(target, DELTA, Q, rounds, "rdp"), multiplier)


@pytest.mark.parametrize(
    ("uploads", "sigma", "printed"),
    [
        *[(1, 0.2, "33.1"), (1, 0.4, "13.2"), (1, 0.8, "5.7"), (8, 0.4, "54.4"), (50, 0.8, "75.9"), (100, 0.8, "131")],
        *[(50, 0.4, "231"), (100, 0.4, "418"), (8, 0.8, "20.7")],
    ],
)
def test_composed_uploads_without_amplification_cost_the_tabulated_epsilon(uploads, sigma, printed):
    ledger = (Release(sigma, Q, uploads),)
    assert as_printed(epsilon(ledger, DELTA, adversary="server", trust="local"), printed)


@pytest.mark.parametrize(
    ("uploads", "sigma", "tabulated"), [(100, 0.2, 1463), (200, 0.4, 776), (1000, 0.2, 13174), (1000, 0.8, 950)]
)
def test_the_largest_tabulated_cells_are_a_little_above_the_exact_value(uploads, sigma, tabulated):
    ours = gaussian_epsilon(math.sqrt(uploads) / sigma, DELTA)
    assert ours <= tabulated <= 1.002 * ours


def test_the_exact_gaussian_agrees_with_sixty_digits_of_precision():
    mpmath = pytest.importorskip("mpmath", reason="mpmath is not installed")
    mpmath.mp.dps = 60
    mu = mpmath.sqrt(1000) / mpmath.mpf("0.8")

    def excess(e):
        return mpmath.ncdf(mu / 2 - e / mu) - mpmath.exp(e) * mpmath.ncdf(-mu / 2 - e / mu) - mpmath.mpf("1e-5")

    exact = float(mpmath.findroot(excess, (948, 950), solver="bisect"))
    assert gaussian_epsilon(math.sqrt(1000) / 0.8, DELTA) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(
    ("clients", "sigma", "rounds", "rdp", "pld"),
    [
        *[(50, 0.2, 8, ".95", ".69"), (50, 0.2, 200, "2.86", "2.57"), (50, 0.4, 1000, "2.60", "2.39")],
        *[(50, 0.8, 8, ".10", ".08"), (250, 0.2, 500, "1.57", "1.43"), (250, 0.8, 1000, ".48", ".44")],
    ],
)
def test_noise_that_adds_up_over_clients_gives_the_tabulated_epsilon(clients, sigma, rounds, rdp, pld):
    ledger = (Release(sigma * math.sqrt(clients), Q, rounds),)
    assert as_printed(epsilon(ledger, DELTA, trust="secure-aggregation", accountant="rdp"), rdp)
    assert as_printed(epsilon(ledger, DELTA, trust="secure-aggregation"), pld)


@pytest.mark.parametrize(
    ("sigma", "rounds", "rdp", "pld"),
    [
        *[(0.2, 8, "70.2", "57.9"), (0.2, 1000, "995", "787"), (0.4, 100, "38.5", "32.1"), (0.4, 1, "9.37", "8.36")],
        *[(0.8, 10, "3.60", "2.86"), (0.8, 100, "6.66", "5.74"), (0.8, 1000, "19.3", "17.6")],
    ],
)
def test_central_noise_on_sums_gives_the_tabulated_epsilon(sigma, rounds, rdp, pld):
    ledger = (Release(sigma, Q, rounds),)
    assert as_printed(epsilon(ledger, DELTA, accountant="rdp"), rdp)
    assert as_printed(epsilon(ledger, DELTA), pld)


@pytest.mark.parametrize(("uploads", "printed"), [(8, "12"), (22, "24")])
def test_a_server_that_draws_the_coins_sees_multiplier_1_2_without_amplification(uploads, printed):
    ledger = (Release(1.2, Q, 160, max_uploads=uploads),)
    assert as_printed(epsilon(ledger, DELTA, adversary="server", trust="secure-aggregation"), printed)


def test_three_streams_at_3_4_each_cost_far_more_than_3_4_together():
    one = Release(1.1282, Q, 160)
    three = (one, Release(1.1282, Q, 160, "popularity"), Release(1.1282, Q, 160, "new items"))
    assert epsilon((one,), DELTA) == pytest.approx(3.4, abs=1e-3)
    assert epsilon(three, DELTA) == pytest.approx(5.88, abs=5e-3)
    assert epsilon(three, DELTA, accountant="rdp") == pytest.approx(6.47, abs=5e-3)


@pytest.mark.parametrize(("sigma", "rate", "rounds"), [(1.2026, 0.05, 160), (0.8, 0.05, 100), (2.0, 0.2, 50)])
def test_rdp_agrees_with_opacus(sigma, rate, rounds):
    analysis = pytest.importorskip("opacus.accountants.analysis.rdp", reason="Opacus is not installed")
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(11, 65)) + [128, 256, 512, 1024]
    spent = analysis.compute_rdp(q=rate, noise_multiplier=sigma, steps=rounds, orders=orders)
    theirs, _ = analysis.get_privacy_spent(orders=orders, rdp=spent, delta=DELTA)
    assert epsilon((Release(sigma, rate, rounds),), DELTA, accountant="rdp") == pytest.approx(theirs, rel=1e-3)


def test_opacus_own_accountant_object_gives_the_same_epsilon():
    accountants = pytest.importorskip("opacus.accountants", reason="Opacus is not installed")
    theirs = accountants.RDPAccountant()
    theirs.history = [(1.2026, Q, 160)]
    ours = epsilon((Release(1.2026, Q, 160),), DELTA, accountant="rdp")
    assert ours == pytest.approx(theirs.get_epsilon(delta=DELTA), rel=5e-3)


def test_pld_agrees_with_opacus_prv():
    accountants = pytest.importorskip("opacus.accountants", reason="Opacus is not installed")
    theirs = accountants.PRVAccountant()
    theirs.history = [(0.8, Q, 100)]
    assert epsilon((Release(0.8, Q, 100),), DELTA) == pytest.approx(theirs.get_epsilon(delta=DELTA), rel=5e-3)
