"""What must hold of metrics for any scores, any matrix and any users."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from protofed.evaluation.forgetting import af, af_literal, af_over_time, bwt
from protofed.evaluation.ranking import (
    LEAST_NDCG_PER_HIT,
    check_ndcg_hr_ratio,
    per_query,
    rank_of_positive,
    summarise,
    summarise_by_user,
)
from protofed.evaluation.significance import PerUser, bootstrap_difference, bootstrap_interval
from protofed.evaluation.strata import benjamini_hochberg, holm, sign_flip_p, tertiles

seeds = st.integers(0, 2**32 - 1)
few_levels = st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 1.0, math.inf, math.nan])
unit = st.floats(0, 1, allow_subnormal=False)
quick = settings(deadline=None, max_examples=40)


def score_rows(width: int = 12) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.float32, st.tuples(st.integers(1, 5), st.just(width)), elements=few_levels)


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    size = draw(st.integers(2, 9))
    return draw(arrays(np.float64, (size, size), elements=unit))


@st.composite
def tables(draw: st.DrawFn) -> PerUser:
    rng = np.random.default_rng(draw(seeds))
    counts = rng.integers(0, 5, size=(draw(st.integers(1, 20)), draw(st.integers(1, 4))))
    counts[0] += 1  # at least one query per slice
    return PerUser(counts * rng.random(counts.shape), counts)


@quick
@given(score_rows(), seeds)
def test_permuting_candidates_leaves_ranks_alone(scores, seed):
    rng = np.random.default_rng(seed)
    positive, order = rng.integers(0, 12, size=len(scores)), rng.permutation(12)
    mask = rng.random(scores.shape) < 0.7
    moved = np.argsort(order)[positive]  # column `order[i]` moves to place i
    for ties in ("pessimistic", "half"):
        before = rank_of_positive(*map(torch.tensor, (scores, positive, mask)), ties=ties)
        after = rank_of_positive(*map(torch.tensor, (scores[:, order], moved, mask[:, order])), ties=ties)
        assert torch.equal(before, after)


@quick
@given(score_rows(), seeds)
def test_a_rank_lies_between_one_and_the_number_of_candidates(scores, seed):
    rng = np.random.default_rng(seed)
    positive, mask = torch.tensor(rng.integers(0, 12, size=len(scores))), torch.tensor(rng.random(scores.shape) < 0.7)
    worst = rank_of_positive(torch.tensor(scores), positive, mask)
    expected = rank_of_positive(torch.tensor(scores), positive, mask, ties="half")
    candidates = mask.scatter(1, positive[:, None], True).sum(1)
    assert ((worst >= 1) & (worst <= candidates) & (expected >= 1) & (expected <= worst)).all()


@quick
@given(arrays(np.float64, (4, 20), elements=st.integers(-50, 50).map(float)), seeds)
def test_an_increasing_change_of_scores_leaves_ranks_alone(scores, seed):
    positive = torch.tensor(np.random.default_rng(seed).integers(0, 20, size=4))
    stretched = torch.tensor(scores) * 4 + 3
    assert torch.equal(rank_of_positive(torch.tensor(scores), positive), rank_of_positive(stretched, positive))


@quick
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40))
def test_a_longer_list_never_scores_less_and_mrr_never_more_than_ndcg_or_ndcg_than_hr(ranks):
    values = per_query(torch.tensor(ranks))
    for name in ("hr", "ndcg", "mrr"):
        assert (values[f"{name}@5"] <= values[f"{name}@10"]).all()
        assert (values[f"{name}@10"] <= values[f"{name}@20"]).all()
    for k in (5, 10, 20):
        assert (values[f"mrr@{k}"] <= values[f"ndcg@{k}"]).all()
        assert (values[f"ndcg@{k}"] <= values[f"hr@{k}"]).all()


@quick
@given(st.lists(st.integers(0, 30), min_size=10, max_size=10), st.integers(0, 50))
def test_hits_that_never_increase_down_the_list_stay_above_the_bound(counts, misses):
    falling = sorted(counts, reverse=True)
    ranks = torch.repeat_interleave(torch.arange(1, 12), torch.tensor([*falling, misses + 1]))
    found = summarise(ranks)
    assert check_ndcg_hr_ratio(found["ndcg@10"], found["hr@10"]) is None
    assert found["hr@10"] == 0 or found["ndcg@10"] / found["hr@10"] >= LEAST_NDCG_PER_HIT - 1e-9


@quick
@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 4))
def test_micro_and_macro_agree_when_every_user_has_as_many_queries(ranks, repeats):
    repeated = torch.tensor(ranks).repeat_interleave(repeats)
    users = torch.arange(len(ranks)).repeat_interleave(repeats)
    micro, macro = summarise(repeated), summarise_by_user(repeated, users)
    assert all(math.isclose(micro[name], macro[name], abs_tol=1e-12) for name in micro)


@quick
@given(matrices())
def test_forgetting_is_never_less_than_minus_backward_transfer(a):
    assert af(a) >= -bwt(a) - 1e-12
    assert af_literal(a) >= af(a) - 1e-12


@quick
@given(matrices(), st.floats(-1, 1))
def test_shifting_every_value_changes_no_forgetting(a, shift):
    assert np.allclose(af_over_time(a), af_over_time(a + shift))


@quick
@given(matrices())
def test_the_last_of_forgetting_over_time_is_forgetting(a):
    assert af_over_time(a)[-1] == af(a)
    assert af_over_time(a)[0] == 0


@quick
@given(tables(), seeds)
def test_a_bootstrap_interval_contains_the_mean(table, seed):
    found = bootstrap_interval(table, np.random.default_rng(seed), draws=400)
    assert found.low - 1e-12 <= found.mean <= found.high + 1e-12


@quick
@given(tables(), seeds)
def test_identical_methods_never_differ(table, seed):
    found = bootstrap_difference(table, table, np.random.default_rng(seed), draws=100)
    assert (found.mean, found.low, found.high, found.p_value) == (0, 0, 0, 1)


@quick
@given(arrays(np.float64, st.integers(0, 30), elements=st.one_of(unit, st.just(math.nan))))
def test_corrected_p_values_are_ordered_alike_and_holm_is_the_stricter(p):
    hochberg, strict = benjamini_hochberg(p), holm(p)
    made = ~np.isnan(p)
    assert (p[made] <= hochberg[made] + 1e-12).all()
    assert (hochberg[made] <= strict[made] + 1e-12).all()
    assert (strict[made] <= 1).all()
    order = np.argsort(p[made], kind="stable")
    assert (np.diff(hochberg[made][order]) >= 0).all()
    assert (np.diff(strict[made][order]) >= 0).all()


@quick
@given(arrays(np.float64, st.integers(1, 9), elements=st.integers(-20, 20).map(float)), seeds)
def test_flipping_every_sign_leaves_the_p_value_alone(differences, seed):
    rng = np.random.default_rng(seed)
    p = sign_flip_p(differences, rng)
    assert p == sign_flip_p(-differences, rng) == sign_flip_p(rng.permutation(differences), rng)
    assert p >= 2 / 2 ** len(differences) or len(differences) == 1


@quick
@given(arrays(np.int64, st.integers(0, 40), elements=st.integers(0, 5)))
def test_thirds_are_ordered_and_equally_large(values):
    groups = tertiles(values)
    sizes = [int((groups == g).sum()) for g in range(3)]
    assert max(sizes) - min(sizes) <= 1
    for low, high in ((0, 1), (1, 2)):
        if sizes[low] and sizes[high]:
            assert values[groups == low].max() <= values[groups == high].min()
