"""The bootstrap against loops that draw users one by one, and known spreads."""

import math

import numpy as np
import pytest

from protofed.evaluation.significance import (
    PerUser,
    average_seeds,
    bootstrap_difference,
    bootstrap_interval,
    bootstrap_means,
    mean_and_std,
)

RNG = np.random.default_rng


def table(n_users: int, n_slices: int, seed: int, lift: float = 0.0) -> PerUser:
    """Query counts that depend on the shape alone, and sums that depend on the seed."""
    counts = RNG(99).integers(0, 4, size=(n_users, n_slices))
    return PerUser(counts * (RNG(seed).random((n_users, n_slices)) * 0.5 + lift), counts)


def slow_mean(sums: np.ndarray, counts: np.ndarray, users: list[int]) -> float:
    """The mean over slices of the mean over queries, for users listed as often as they were drawn."""
    per_slice = []
    for t in range(sums.shape[1]):
        n = sum(counts[u, t] for u in users)
        if n:
            per_slice.append(sum(sums[u, t] for u in users) / n)
    return sum(per_slice) / len(per_slice)


def slow_bootstrap(sums: np.ndarray, counts: np.ndarray, rng: np.random.Generator, draws: int) -> np.ndarray:
    n = len(sums)
    return np.array([slow_mean(sums, counts, rng.integers(0, n, size=n).tolist()) for _ in range(draws)])


def test_the_mean_of_one_slice_weighs_queries():
    found = bootstrap_interval(PerUser(np.array([[1.0], [0.0]]), np.array([[1], [3]])), RNG(0))
    assert found.mean == 0.25
    assert (found.low, found.high) == (0.0, 1.0)  # a quarter of the draws holds one user alone, either way


def test_the_mean_of_several_slices_weighs_slices():
    found = bootstrap_interval(PerUser(np.array([[1.0, 0.0]]), np.array([[1, 99]])), RNG(0))
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)


def test_intervals_equal_a_loop_over_draws_and_users():
    t = table(12, 3, seed=1)
    t = PerUser(t.sums[t.counts.any(1)], t.counts[t.counts.any(1)])
    found = bootstrap_interval(t, RNG(5), draws=300)
    slow = slow_bootstrap(t.sums, t.counts, RNG(5), draws=300)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(slow, [0.025, 0.975])))
    assert found.mean == pytest.approx(slow_mean(t.sums, t.counts, list(range(len(t.sums)))))


def test_tables_drawn_together_each_keep_their_own_queries_and_slices():
    counts = RNG(3).integers(1, 4, size=(9, 3))
    others = RNG(4).integers(1, 4, size=(9, 3))
    tables = [PerUser(RNG(seed).random(of.shape) * of, of) for seed, of in ((0, counts), (1, others), (2, counts))]
    tables.append(PerUser(tables[0].sums[:, :2], counts[:, :2]))
    for found, each in zip(bootstrap_means(tables, RNG(5), 40), tables, strict=True):
        assert found == pytest.approx(slow_bootstrap(each.sums, each.counts, RNG(5), draws=40))


def test_the_interval_of_a_plain_mean_has_the_textbook_width():
    values = RNG(0).normal(1.0, 2.0, size=(400, 1))
    found = bootstrap_interval(PerUser(values, np.ones((400, 1), dtype=int)), RNG(1))
    standard_error = values.std() / 20
    assert found.high - found.low == pytest.approx(2 * 1.96 * standard_error, rel=0.08)


def test_the_interval_covers_the_truth_about_95_times_in_100():
    rng, covered = RNG(3), 0
    for _ in range(200):
        values = rng.random((60, 1))
        found = bootstrap_interval(PerUser(values, np.ones((60, 1), dtype=int)), rng, draws=400)
        covered += found.low <= 0.5 <= found.high
    assert 0.90 <= covered / 200 <= 0.99


def test_users_without_queries_change_nothing():
    t = table(10, 2, seed=1)
    padded = PerUser(np.vstack([t.sums, np.zeros((5, 2))]), np.vstack([t.counts, np.zeros((5, 2), dtype=int)]))
    assert bootstrap_interval(padded, RNG(0)) == bootstrap_interval(t, RNG(0))


def test_a_slice_without_queries_is_left_out():
    t = table(10, 2, seed=1)
    padded = PerUser(np.hstack([t.sums, np.zeros((10, 1))]), np.hstack([t.counts, np.zeros((10, 1), dtype=int)]))
    a, b = bootstrap_interval(padded, RNG(0)), bootstrap_interval(t, RNG(0))
    assert (a.mean, a.low, a.high) == pytest.approx((b.mean, b.low, b.high))


def test_no_queries_give_nan():
    found = bootstrap_interval(PerUser(np.zeros((3, 1)), np.zeros((3, 1), dtype=int)), RNG(0))
    assert all(math.isnan(x) for x in (found.mean, found.low, found.high))


def test_chunks_do_not_change_the_interval(monkeypatch):
    t = table(30, 2, seed=1)
    whole = bootstrap_interval(t, RNG(4))
    monkeypatch.setattr("protofed.evaluation.significance.CHUNK", 30 * 17)
    parts = bootstrap_interval(t, RNG(4))
    assert (parts.low, parts.high) == pytest.approx((whole.low, whole.high), rel=1e-12)


def test_a_method_against_itself_differs_by_exactly_nothing():
    t = table(50, 8, seed=1)
    found = bootstrap_difference(t, t, RNG(0))
    assert (found.mean, found.low, found.high, found.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_a_constant_lift_is_found_with_certainty():
    counts = np.ones((40, 1), dtype=int)
    base = RNG(1).random((40, 1))
    found = bootstrap_difference(PerUser(base + 0.1, counts), PerUser(base, counts), RNG(0))
    assert (found.mean, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    assert found.p_value == 2 / 2001


def test_pairing_gives_a_narrower_interval_than_two_separate_ones():
    a, b = table(60, 1, seed=1, lift=0.02), table(60, 1, seed=1)
    paired, alone = bootstrap_difference(a, b, RNG(0)), bootstrap_interval(a, RNG(0))
    assert paired.high - paired.low < 0.1 * (alone.high - alone.low)


def test_swapping_the_methods_turns_the_difference_round():
    a, b = table(25, 2, seed=1), table(25, 2, seed=2)
    there, back = bootstrap_difference(a, b, RNG(0)), bootstrap_difference(b, a, RNG(0))
    assert (back.mean, back.low, back.high) == pytest.approx((-there.mean, -there.high, -there.low))
    assert back.p_value == there.p_value


def test_other_queries_are_refused_in_one_clear_line():
    a = table(5, 1, seed=1)
    with pytest.raises(ValueError, match="same queries for both methods"):
        bootstrap_difference(a, PerUser(a.sums, a.counts + 1), RNG(0))
    with pytest.raises(ValueError, match=r"shapes \(5, 1\) and \(4, 1\)"):
        bootstrap_difference(a, PerUser(a.sums[:4], a.counts[:4]), RNG(0))


def test_seeds_are_averaged_before_users_are_drawn():
    a, b = table(20, 2, seed=1), table(20, 2, seed=2)
    averaged = average_seeds(np.stack([a.sums, b.sums]), a.counts)
    assert averaged.sums.tolist() == ((a.sums + b.sums) / 2).tolist()
    assert averaged.counts is a.counts


def test_the_spread_over_seeds_uses_the_sample_divisor():
    assert mean_and_std(np.array([1.0, 2.0, 3.0])) == (2.0, 1.0)
    mean, std = mean_and_std(np.array([0.5]))
    assert mean == 0.5
    assert math.isnan(std)
