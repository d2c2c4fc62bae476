"""Forgetting and transfer on a matrix small enough to work out by hand, and against loops."""

import logging
import math

import numpy as np
import pytest

from protofed.evaluation.forgetting import (
    accuracy,
    af,
    af_literal,
    af_over_time,
    base_scratch,
    bwt,
    final_accuracy,
    fwt,
)

# Rows are tested, columns trained: slice 1 scores 0.8 with the base model, before it is learned.
A = np.array(
    [
        [0.6, 0.5, 0.4],
        [0.8, 0.7, 0.5],
        [0.2, 0.3, 0.9],
    ]
)
SCRATCH = np.array([np.nan, 0.05, 0.04])


def with_empty_slice(s: int) -> np.ndarray:
    matrix = A.copy()
    matrix[s] = np.nan
    return matrix


def slow_af(a: np.ndarray, *, literal: bool = False) -> float:
    end = len(a) - 1
    total = 0.0
    for s in range(end):
        total += max(a[s][t] for t in range(0 if literal else s, end)) - a[s][end]
    return total / end


def test_accuracy_is_the_mean_diagonal_without_the_base_block():
    assert accuracy(A) == pytest.approx((0.7 + 0.9) / 2)


def test_the_final_model_is_averaged_over_every_slice():
    assert final_accuracy(A) == pytest.approx((0.4 + 0.5 + 0.9) / 3)


def test_forgetting_counts_from_when_a_slice_was_learned():
    assert af(A) == pytest.approx(((0.6 - 0.4) + (0.7 - 0.5)) / 2)


def test_literal_forgetting_also_looks_before_a_slice_was_learned():
    assert af_literal(A) == pytest.approx(((0.6 - 0.4) + (0.8 - 0.5)) / 2)


def test_forgetting_over_time_starts_at_zero_and_ends_at_af():
    assert af_over_time(A).tolist() == pytest.approx([0.0, 0.1, 0.2])


def test_forgetting_is_negative_when_old_slices_improve():
    assert af(np.array([[0.3, 0.5], [0.1, 0.6]])) == pytest.approx(-0.2)


def test_backward_transfer_compares_the_end_with_the_day_a_slice_was_learned():
    assert bwt(A) == pytest.approx(((0.4 - 0.6) + (0.5 - 0.7)) / 2)


def test_forward_transfer_compares_the_day_before_with_scratch():
    assert fwt(A, SCRATCH) == pytest.approx(((0.8 - 0.05) + (0.3 - 0.04)) / 2)


def test_against_the_base_model_the_first_slice_transfers_nothing():
    assert fwt(A, base_scratch(A)) == pytest.approx((0.0 + (0.3 - 0.2)) / 2)


def test_all_averages_equal_loops_over_a_full_stream():
    a = np.random.default_rng(5).random((9, 9))
    scratch = np.random.default_rng(6).random(9)
    assert af(a) == pytest.approx(slow_af(a))
    assert af_literal(a) == pytest.approx(slow_af(a, literal=True))
    assert af_over_time(a)[1:].tolist() == pytest.approx([slow_af(a[: t + 1, : t + 1]) for t in range(1, 9)])
    assert bwt(a) == pytest.approx(sum(a[s][8] - a[s][s] for s in range(8)) / 8)
    assert fwt(a, scratch) == pytest.approx(sum(a[s][s - 1] - scratch[s] for s in range(1, 9)) / 8)
    assert accuracy(a) == pytest.approx(sum(a[t][t] for t in range(1, 9)) / 8)


def test_a_slice_without_queries_is_left_out_of_every_average():
    a = with_empty_slice(1)
    assert accuracy(a) == pytest.approx(0.9)
    assert final_accuracy(a) == pytest.approx((0.4 + 0.9) / 2)
    assert af(a) == pytest.approx(0.2)
    assert af_literal(a) == pytest.approx(0.2)
    assert bwt(a) == pytest.approx(-0.2)
    assert fwt(a, SCRATCH) == pytest.approx(0.3 - 0.04)
    assert af_over_time(a).tolist() == pytest.approx([0.0, 0.1, 0.2])


def test_the_warning_names_the_slice_that_is_left_out(caplog):
    with caplog.at_level(logging.WARNING):
        accuracy(with_empty_slice(2))
        af(with_empty_slice(2))  # slice T is no term of AF
    assert caplog.messages == ["accuracy leaves out slices without queries: 2"]


def test_forgetting_over_time_warns_once(caplog):
    with caplog.at_level(logging.WARNING):
        af_over_time(with_empty_slice(0))
    assert caplog.messages == ["AF leaves out slices without queries: 0"]


def test_nothing_but_empty_slices_gives_nan():
    nothing = np.full((3, 3), np.nan)
    assert all(math.isnan(f(nothing)) for f in (accuracy, final_accuracy, af, af_literal, bwt))


def test_a_base_block_alone_has_forgotten_nothing():
    base = np.array([[0.6]])
    assert (af(base), af_literal(base), af_over_time(base).tolist()) == (0.0, 0.0, [0.0])
    assert math.isnan(accuracy(base))
    assert math.isnan(bwt(base))
