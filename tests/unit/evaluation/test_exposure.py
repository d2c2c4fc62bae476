"""Places in the Top-10 against loops over ranked lists; groups and shares by hand."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protofed.evaluation.exposure import GROUPS, popularity_groups, shares, top_places

NAN, INF = float("nan"), float("inf")


def slow_places(row: list[float], groups: list[int], k: int) -> list[float]:
    """The mean over all orders in which tied items could come."""
    keys = [-INF if np.isnan(value) else value for value in row]
    totals, n = [0.0] * len(GROUPS), 0
    for order in itertools.permutations(range(len(keys))):
        if all(keys[a] >= keys[b] for a, b in itertools.pairwise(order)):
            n += 1
            for item in order[:k]:
                totals[groups[item]] += 1
    return [total / n for total in totals]


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 7))
def test_places_are_those_of_all_rankings_that_the_scores_allow(seed, n_items, k):
    rng = np.random.default_rng(seed)
    scores = rng.choice([0.0, 1.0, 1.0, 2.5, -3.0, NAN, INF, -INF], size=(3, n_items))
    groups = rng.integers(0, len(GROUPS), size=n_items)
    found = top_places(torch.from_numpy(scores), torch.from_numpy(groups), k=k)
    slow = [slow_places(row.tolist(), groups.tolist(), k) for row in scores]
    assert found.tolist() == [pytest.approx(row, abs=1e-5) for row in slow]
    assert found.sum(1).tolist() == [pytest.approx(min(k, n_items))] * 3


def test_places_do_not_depend_on_the_batch_or_on_the_order_of_the_items():
    rng = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 9, (40, 200), generator=rng).float()
    groups = torch.randint(0, 3, (200,), generator=rng)
    whole, mixed = top_places(scores, groups), torch.randperm(200, generator=rng)
    assert torch.equal(torch.cat([top_places(part, groups) for part in scores.split(7)]), whole)
    assert torch.equal(top_places(scores[:, mixed], groups[mixed]), whole)


def test_the_head_is_the_most_frequent_fifth_and_the_tail_the_least_frequent():
    counts = torch.tensor([5, 0, 9, 1, 1, 7, 3, 0, 2, 4])
    groups = [GROUPS[place] for place in popularity_groups(counts).tolist()]
    assert [item for item, group in enumerate(groups) if group == "head"] == [2, 5]
    assert [item for item, group in enumerate(groups) if group == "tail"] == [1, 7]
    assert groups.count("middle") == 6


def test_a_single_item_is_the_head():
    assert popularity_groups(torch.tensor([0])).tolist() == [0]


def test_shares_add_up_to_one_and_nothing_has_none():
    assert shares(np.array([6, 3, 1])).tolist() == [0.6, 0.3, 0.1]
    assert np.isnan(shares(np.zeros(3))).all()
