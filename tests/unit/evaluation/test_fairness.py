"""Exposure against loops over ranked lists, and disparities worked out by hand."""

import math

import numpy as np
import pytest
import torch

from protofed.evaluation.fairness import (
    bottom_items,
    exposure_by_item,
    head_items,
    item_disparity,
    position_exposure,
    user_disparity,
)

NAN, INF = float("nan"), float("inf")
W = [1 / math.log2(rank + 1) for rank in range(1, 101)]


def slow_disparity(scores: np.ndarray, candidates: np.ndarray, head: set[int]) -> tuple[float, float, float, float]:
    """Both groups' exposure by the printed formula, for candidate sets of 100 without ties."""
    shown, available = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    for row_scores, row in zip(scores, candidates, strict=True):
        ranked = sorted(zip(row_scores, row, strict=True), reverse=True)
        for weight, (_, item) in zip(W[:10], ranked[:10], strict=True):
            shown[item in head] += weight
        for item in row:
            available[item in head] += 1
    relative = [shown[g] / available[g] * (100 / sum(W[:10])) for g in (True, False)]
    return *relative, shown[True] / sum(shown.values()), shown[False] / sum(shown.values())


def test_attention_falls_with_rank_and_ends_after_k():
    exposure = position_exposure(torch.tensor([[0.1, 0.9, 0.5, 0.3]]), k=2)
    assert exposure.tolist() == [pytest.approx([0.0, W[0], W[1], 0.0])]


def test_tied_candidates_share_the_ranks_they_cover():
    exposure = position_exposure(torch.tensor([[0.5, 0.9, 0.5, 0.5]]), k=3)
    shared = (W[1] + W[2]) / 3
    assert exposure.tolist() == [pytest.approx([shared, W[0], shared, shared])]


def test_nan_and_minus_infinity_share_the_bottom():
    exposure = position_exposure(torch.tensor([[NAN, 1.0, -INF]]), k=3)
    assert exposure.tolist() == [pytest.approx([(W[1] + W[2]) / 2, W[0], (W[1] + W[2]) / 2])]


def test_masked_candidates_take_no_rank():
    scores = torch.tensor([[9.0, 1.0, NAN, 0.0]])
    mask = torch.tensor([[False, True, True, True]])
    assert position_exposure(scores, mask, k=10).tolist() == [pytest.approx([0.0, W[0], W[2], W[1]])]


def test_exposure_equals_the_printed_formula_on_hundred_candidate_sets():
    rng = np.random.default_rng(2)
    candidates = np.stack([rng.permutation(300)[:100] for _ in range(40)])
    scores = rng.permuted(np.tile(np.arange(100.0), (40, 1)), axis=1) + 50 * (candidates < 60)
    scores += rng.random(scores.shape) * 0.01  # no ties
    head = torch.arange(300) < 60
    found = item_disparity(*exposure_by_item(torch.tensor(scores), torch.tensor(candidates), 300), head)
    expected = slow_disparity(scores, candidates, set(range(60)))
    assert (found.head, found.tail, found.head_share, found.tail_share) == pytest.approx(expected)
    assert found.disparity == pytest.approx(abs(expected[0] - expected[1]))
    assert found.head_share + found.tail_share == pytest.approx(1)
    assert found.head > 1 > found.tail


def test_equal_scores_expose_every_group_in_proportion():
    candidates = torch.stack([torch.randperm(50, generator=torch.Generator().manual_seed(s))[:20] for s in range(30)])
    found = item_disparity(*exposure_by_item(torch.zeros(30, 20), candidates, 50), torch.arange(50) < 10)
    assert (found.head, found.tail, found.disparity) == pytest.approx((1.0, 1.0, 0.0), abs=1e-12)


def test_batches_add_up_to_the_whole():
    rng = torch.Generator().manual_seed(4)
    scores, candidates = torch.rand(8, 30, generator=rng), torch.randint(0, 40, (8, 30), generator=rng)
    mask = torch.rand(8, 30, generator=rng) < 0.7
    whole = exposure_by_item(scores, candidates, 40, mask)
    parts = [exposure_by_item(scores[rows], candidates[rows], 40, mask[rows]) for rows in (slice(0, 3), slice(3, 8))]
    assert (parts[0][0] + parts[1][0]).tolist() == pytest.approx(whole[0].tolist())
    assert torch.equal(parts[0][1] + parts[1][1], whole[1])
    assert int(whole[1].sum()) == int(mask.sum())


def test_a_group_that_was_never_a_candidate_is_nan():
    exposure, availability = exposure_by_item(torch.rand(4, 5), torch.arange(5).repeat(4, 1), 10)
    found = item_disparity(exposure, availability, torch.arange(10) >= 5)
    assert math.isnan(found.head)
    assert math.isnan(found.head_share)
    assert math.isnan(found.disparity)
    assert found.tail == pytest.approx(1.0)


def test_no_queries_at_all_are_nan():
    nothing = exposure_by_item(torch.zeros(0, 5), torch.zeros(0, 5, dtype=torch.int64), 4)
    found = item_disparity(*nothing, torch.arange(4) < 1)
    assert math.isnan(found.tail)
    assert math.isnan(found.tail_share)


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
