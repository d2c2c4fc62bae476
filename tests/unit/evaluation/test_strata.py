"""Groups, the sign-flip test and its corrections against enumeration, SciPy and numbers worked out by hand."""

import math
from itertools import product

import numpy as np
import pytest
from scipy.stats import false_discovery_control, permutation_test

from protofed.evaluation.strata import (
    benjamini_hochberg,
    cold_start,
    group_mean,
    holm,
    per_user_p,
    sign_flip_p,
    strata,
    tertiles,
)

RNG = np.random.default_rng


def slow_sign_flip(differences: list[float]) -> float:
    """Exact only for whole numbers: no rounding to worry about."""
    observed = abs(sum(differences))
    patterns = list(product((-1, 1), repeat=len(differences)))
    extreme = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) >= observed for signs in patterns]
    return sum(extreme) / len(patterns)


def slow_holm(p: list[float]) -> list[float]:
    order = sorted(range(len(p)), key=p.__getitem__)
    adjusted, running = [0.0] * len(p), 0.0
    for place, i in enumerate(order):
        running = max(running, min(1.0, (len(p) - place) * p[i]))
        adjusted[i] = running
    return adjusted


def test_tertiles_split_by_value():
    assert tertiles(np.array([30.0, 10.0, 20.0, 60.0, 50.0, 40.0])).tolist() == [1, 0, 0, 2, 2, 1]


def test_tied_users_are_split_by_their_order():
    assert tertiles(np.array([1, 1, 1, 1, 1, 1])).tolist() == [0, 0, 1, 1, 2, 2]


def test_ineligible_users_and_nan_belong_to_no_third():
    values, eligible = np.array([5.0, np.nan, 1.0, 9.0, 3.0]), np.array([True, True, True, False, True])
    assert tertiles(values, eligible).tolist() == [2, -1, 0, -1, 1]
    assert tertiles(np.array([])).tolist() == []


def test_a_user_is_new_in_the_slice_of_its_first_interaction():
    assert cold_start(np.array([0, 2, 3]), t=3).tolist() == [False, False, True]


def test_strata_cover_the_eligible_users_once_per_kind():
    rng = RNG(1)
    eligible = rng.random(50) < 0.6
    first = rng.integers(0, 5, size=50)
    groups = strata(
        drift=rng.random(50), activity=rng.integers(0, 9, size=50), first_slice=first, t=4, eligible=eligible
    )
    for kind in (
        ("new_user", "returning"),
        *(tuple(f"{k}_{n}" for n in ("low", "middle", "high")) for k in ("drift", "activity")),
    ):
        assert (sum(groups[name].astype(int) for name in kind) == eligible).all()
    assert (groups["new_user"] == (eligible & (first == 4))).all()


def test_a_group_mean_weighs_queries():
    sums, counts = np.array([1.0, 0.0, 5.0]), np.array([1, 3, 5])
    assert group_mean(sums, counts, np.array([True, True, False])) == 0.25
    assert math.isnan(group_mean(sums, counts, np.zeros(3, dtype=bool)))


def test_six_wins_in_a_row_have_the_smallest_p_there_is():
    assert sign_flip_p(np.ones(6), RNG(0)) == 2 / 64


def test_no_difference_has_p_one():
    assert sign_flip_p(np.zeros(8), RNG(0)) == 1.0
    assert sign_flip_p(np.zeros(20), RNG(0)) == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_few_differences_are_enumerated_exactly(seed):
    differences = RNG(seed).integers(-9, 10, size=7 + seed % 4).astype(float)
    assert sign_flip_p(differences, RNG(0)) == slow_sign_flip(differences.tolist())


def test_enumeration_agrees_with_scipy():
    differences = RNG(8).normal(0.4, 1.0, size=9)
    theirs = permutation_test((differences,), np.sum, permutation_type="samples", n_resamples=10_000)
    assert sign_flip_p(differences, RNG(0)) == pytest.approx(theirs.pvalue)


def test_many_differences_are_sampled_close_to_the_exact_value():
    differences = RNG(2).integers(-5, 8, size=14).astype(float)
    assert sign_flip_p(differences, RNG(0)) == pytest.approx(slow_sign_flip(differences.tolist()), abs=0.015)


def test_sampling_never_returns_zero():
    assert sign_flip_p(np.ones(60), RNG(0), draws=99) == 0.01


def test_sampling_in_chunks_counts_every_draw(monkeypatch):
    differences = RNG(3).normal(0.2, 1.0, size=20)
    whole = sign_flip_p(differences, RNG(0), draws=999)
    monkeypatch.setattr("protofed.evaluation.strata.CHUNK", 20 * 7)
    assert sign_flip_p(differences, RNG(0), draws=999) == whole


def test_users_with_fewer_than_six_queries_are_not_tested():
    users, differences = np.array([3] * 5 + [1] * 6), np.array([1.0] * 5 + [0.5] * 6)
    ids, means, p = per_user_p(differences, users, seed=0)
    assert (ids.tolist(), means.tolist()) == ([1, 3], [0.5, 1.0])
    assert p[0] == 2 / 64
    assert math.isnan(p[1])


def test_the_p_of_a_user_does_not_depend_on_who_else_is_tested():
    differences, users = RNG(4).normal(size=60), np.repeat([5, 2, 9], 20)
    together = dict(zip(*[column.tolist() for column in per_user_p(differences, users, seed=7)[::2]], strict=True))
    alone = per_user_p(differences[:20], users[:20], seed=7)[2]
    assert together[5] == alone[0]


def test_no_users_give_no_p_values():
    assert [len(column) for column in per_user_p(np.zeros(0), np.zeros(0, dtype=int), seed=0)] == [0, 0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_benjamini_hochberg_agrees_with_scipy(seed):
    p = RNG(seed).random(30) ** 3
    p[5] = p[6]
    assert benjamini_hochberg(p).tolist() == pytest.approx(false_discovery_control(p, method="bh").tolist())


@pytest.mark.parametrize("seed", range(5))
def test_holm_equals_a_loop(seed):
    p = RNG(seed).random(20) ** 3
    assert holm(p).tolist() == pytest.approx(slow_holm(p.tolist()))


def test_corrections_of_three_tests_by_hand():
    p = np.array([0.04, 0.01, 0.03])
    assert benjamini_hochberg(p).tolist() == pytest.approx([0.04, 0.03, 0.04])
    assert holm(p).tolist() == pytest.approx([0.06, 0.03, 0.06])


@pytest.mark.parametrize("correct", [benjamini_hochberg, holm])
def test_a_test_that_was_not_made_does_not_count(correct):
    with_gaps = correct(np.array([np.nan, 0.01, 0.2, np.nan]))
    assert with_gaps[1:3].tolist() == correct(np.array([0.01, 0.2])).tolist()
    assert np.isnan(with_gaps[[0, 3]]).all()
