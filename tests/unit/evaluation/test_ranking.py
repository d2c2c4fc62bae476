"""Ranks and top-k metrics against loops, scikit-learn and numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score

from protofed.evaluation.ranking import (
    LEAST_NDCG_PER_HIT,
    METRICS,
    check_ndcg_hr_ratio,
    hit_rate,
    mrr,
    ndcg,
    per_query,
    rank_of_positive,
    summarise,
    summarise_by_user,
    uniform_reference,
    user_totals,
)

NAN, INF = float("nan"), float("inf")


def slow_rank(scores: list[float], positive: int, mask: list[bool], *, half: bool = False) -> float:
    others = [s for i, s in enumerate(scores) if i != positive and mask[i]]
    if math.isnan(scores[positive]):
        return 1 + len(others)
    above = sum(1 for s in others if s > scores[positive])
    equal = sum(1 for s in others if s == scores[positive])
    return 1 + above + (equal / 2 if half else equal)


def test_the_best_scored_positive_is_first_and_the_worst_last():
    scores = torch.tensor([[3.0, 1.0, 2.0], [1.0, 3.0, 2.0]])
    assert rank_of_positive(scores, torch.tensor([0, 0])).tolist() == [1, 3]


def test_the_rank_of_a_tied_positive_is_pessimistic():
    assert rank_of_positive(torch.zeros(1, 100), torch.tensor([0])).tolist() == [100]
    assert rank_of_positive(torch.tensor([[2.0, 5.0, 2.0, 1.0, 2.0]]), torch.tensor([2])).tolist() == [4]


def test_half_ties_give_the_expected_rank():
    ranks = rank_of_positive(
        torch.tensor([[2.0, 5.0, 2.0, 1.0, 2.0], [2.0, 1.0, 0.0, 2.0, 0.0]]), torch.tensor([2, 0]), ties="half"
    )
    assert ranks.tolist() == [3.0, 1.5]


def test_a_nan_positive_is_last_among_the_valid_candidates():
    scores = torch.tensor([[NAN, 1.0, NAN, 0.0], [NAN, 1.0, 2.0, 0.0]])
    mask = torch.tensor([[True, True, True, True], [True, False, True, True]])
    assert rank_of_positive(scores, torch.tensor([0, 0]), mask).tolist() == [4, 3]
    assert rank_of_positive(torch.full((1, 100), NAN), torch.tensor([7])).tolist() == [100]


def test_a_nan_negative_stands_above_nobody():
    assert rank_of_positive(torch.tensor([[0.0, NAN, 1.0, NAN]]), torch.tensor([0])).tolist() == [2]


def test_infinite_scores_are_ordered_and_tie():
    scores = torch.tensor([[-INF, -INF, 0.0], [INF, INF, 0.0], [-INF, 0.0, INF]])
    assert rank_of_positive(scores, torch.tensor([0, 0, 0])).tolist() == [3, 2, 3]


def test_masked_candidates_do_not_count_and_the_positive_always_does():
    scores = torch.tensor([[1.0, 9.0, 2.0, 0.0]])
    mask = torch.tensor([[False, False, True, True]])
    assert rank_of_positive(scores, torch.tensor([0]), mask).tolist() == [2]


@pytest.mark.parametrize("ties", ["pessimistic", "half"])
def test_ranks_equal_a_loop_over_candidates(ties):
    rng = np.random.default_rng(3)
    scores = rng.integers(0, 6, size=(200, 12)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.1] = NAN
    positive, mask = rng.integers(0, 12, size=200), rng.random(scores.shape) < 0.8
    fast = rank_of_positive(torch.tensor(scores), torch.tensor(positive), torch.tensor(mask), ties=ties)
    rows = zip(scores.tolist(), positive.tolist(), mask.tolist(), strict=True)
    assert fast.tolist() == [slow_rank(*row, half=ties == "half") for row in rows]


def test_metrics_of_a_few_ranks_are_what_the_formulas_say():
    ranks = torch.tensor([1, 3, 5, 6, 100])
    assert hit_rate(ranks, 5).tolist() == [1, 1, 1, 0, 0]
    assert ndcg(ranks, 5).tolist() == pytest.approx([1, 0.5, 1 / math.log2(6), 0, 0])
    assert mrr(ranks, 5).tolist() == pytest.approx([1, 1 / 3, 1 / 5, 0, 0])


def test_ndcg_agrees_with_scikit_learn_when_one_item_is_relevant():
    rng = np.random.default_rng(0)
    scores = rng.permuted(np.tile(np.arange(100.0), (50, 1)), axis=1)
    positive = rng.integers(0, 100, size=50)
    relevance = np.eye(100)[positive]
    ranks = rank_of_positive(torch.tensor(scores), torch.tensor(positive))
    for k in (5, 10, 20):
        assert float(ndcg(ranks, k).mean()) == pytest.approx(ndcg_score(relevance, scores, k=k))


def test_the_table_holds_the_nine_metrics_at_their_cut_offs():
    assert list(METRICS) == [f"{name}@{k}" for name in ("hr", "ndcg", "mrr") for k in (5, 10, 20)]
    first_miss = {name: float(values[0]) for name, values in per_query(torch.tensor([11])).items()}
    assert {name for name, value in first_miss.items() if value > 0} == {"hr@20", "ndcg@20", "mrr@20"}


def test_a_uniform_ranking_of_a_hundred_scores_the_known_values():
    expected = {
        "hr@5": 0.05, "hr@10": 0.10, "hr@20": 0.20,
        "ndcg@5": 0.0295, "ndcg@10": 0.0454, "ndcg@20": 0.0704,
        "mrr@5": 0.0228, "mrr@10": 0.0293, "mrr@20": 0.0360,
    }  # fmt: skip
    reference = uniform_reference(100)
    assert {name: round(value, 4) for name, value in reference.items()} == expected
    assert uniform_reference(3)["hr@5"] == 1.0


def test_random_scores_come_close_to_the_uniform_reference():
    scores = torch.rand(20_000, 100, generator=torch.Generator().manual_seed(1))
    measured = summarise(rank_of_positive(scores, torch.zeros(20_000, dtype=torch.int64)))
    assert measured == pytest.approx(uniform_reference(100), abs=0.01)


def test_no_queries_give_nan_and_not_zero():
    nothing = torch.zeros(0, dtype=torch.int64)
    assert all(math.isnan(value) for value in summarise(nothing).values())
    assert all(math.isnan(value) for value in summarise_by_user(nothing, nothing).values())


def test_micro_weighs_queries_and_macro_weighs_users():
    ranks, users = torch.tensor([1, 1, 1, 50]), torch.tensor([4, 4, 4, 9])
    assert summarise(ranks)["hr@10"] == 0.75
    assert summarise_by_user(ranks, users)["hr@10"] == 0.5


def test_user_totals_list_present_users_in_order():
    ids, counts, sums = user_totals(torch.tensor([0.5, 1.0, 0.25]), torch.tensor([7, 2, 7]))
    assert (ids.tolist(), counts.tolist(), sums.tolist()) == ([2, 7], [1, 2], [1.0, 0.75])


def test_the_least_ndcg_per_hit_is_that_of_hits_spread_evenly_over_ten_ranks():
    assert round(LEAST_NDCG_PER_HIT, 4) == 0.4544
    even = summarise(torch.arange(1, 11))
    assert even["ndcg@10"] / even["hr@10"] == pytest.approx(LEAST_NDCG_PER_HIT)
    assert check_ndcg_hr_ratio(even["ndcg@10"], even["hr@10"]) is None


def test_hits_that_pile_up_low_in_the_list_are_reported():
    low = summarise(torch.tensor([9, 10, 10, 40]))
    message = check_ndcg_hr_ratio(low["ndcg@10"], low["hr@10"])
    assert message is not None
    assert "0.2" in message
    assert "0.4544" in message


def test_few_hits_of_a_ranker_that_shuffles_its_first_ten_are_not_reported():
    """2,368 queries, 64 hits in expectation: a run of a small shop, whose full ranking of new items is hard."""
    rng = np.random.default_rng(0)
    reported = 0
    for _ in range(2_000):
        ranks = torch.from_numpy(rng.integers(1, 371, 2_368))
        told = summarise(ranks)
        reported += check_ndcg_hr_ratio(told["ndcg@10"], told["hr@10"], len(ranks)) is not None
        assert (check_ndcg_hr_ratio(told["ndcg@10"], told["hr@10"]) is None) == (
            told["ndcg@10"] / told["hr@10"] > LEAST_NDCG_PER_HIT
        )
    assert reported < 10
    low = summarise(torch.cat([torch.arange(6, 11).repeat(8), torch.full((2_000,), 99)]))
    assert check_ndcg_hr_ratio(low["ndcg@10"], low["hr@10"], 2_040) is not None


def test_a_usual_ratio_no_hit_and_no_query_are_not_reported():
    assert check_ndcg_hr_ratio(0.55, 0.8) is None
    assert check_ndcg_hr_ratio(0.0, 0.0) is None
    assert check_ndcg_hr_ratio(NAN, NAN) is None
