"""Disparities of items and users worked out by hand."""

import math

import numpy as np
import pytest
import torch

from protofed.evaluation.fairness import (
    bottom_items,
    head_items,
    item_disparity,
    user_disparity,
)


def test_items_are_as_far_apart_as_the_shares_of_head_and_tail():
    head, tail = np.array([0.7, 0.1, 0.2, np.nan]), np.array([0.1, 0.4, 0.2, np.nan])
    assert item_disparity(head, tail).tolist() == pytest.approx([0.6, 0.3, 0.0, np.nan], nan_ok=True)


def test_the_head_is_the_most_frequent_fifth_and_ties_go_to_lower_numbers():
    counts = torch.tensor([1, 9, 3, 3, 3, 0, 0, 0, 0, 0])
    assert head_items(counts).nonzero().flatten().tolist() == [1, 2]
    assert bottom_items(counts).nonzero().flatten().tolist() == [8, 9]
    assert head_items(torch.tensor([0, 5])).tolist() == [False, True]
    assert bottom_items(torch.tensor([0, 5])).tolist() == [True, False]


def test_users_are_compared_by_their_own_means():
    activity = np.array([1, 2, 3, 4, 5, 6, 0])
    counts = np.array([1, 2, 1, 1, 4, 1, 1])
    sums = np.array([0.2, 0.8, 1.0, 1.0, 4.0, 0.5, 1.0])
    found = user_disparity(sums, counts, activity)
    assert found.low == pytest.approx((0.2 + 0.4) / 2)
    assert found.high == pytest.approx((1.0 + 0.5) / 2)
    assert found.disparity == pytest.approx(0.45)


def test_a_third_of_users_without_queries_is_nan():
    found = user_disparity(np.array([0.0, 0.5, 0.5]), np.array([0, 1, 1]), np.array([1, 2, 3]))
    assert math.isnan(found.low)
    assert found.high == 0.5
