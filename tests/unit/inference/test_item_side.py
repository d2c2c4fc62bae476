"""Counts of items and what is met together, against slow loops over the events."""

import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pasts import queries_of

from protofed.inference import item_side
from protofed.inference.item_side import (
    KEPT,
    SPAN,
    ItemCounts,
    count_covisits,
    count_items,
    covisit_numbers,
    popularity_numbers,
)
from protofed.slices.histories import histories

ITEMS = 6
EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, ITEMS - 1)), min_size=1, max_size=40)


def past_of(events):
    users, items = (np.array(column) for column in zip(*events, strict=True))
    return histories(users, items, np.arange(len(events)), 4)


def covisits_by_hand(events, until):
    together = defaultdict(float)
    for user in range(4):
        own = [item for u, item in events[:until] if u == user]
        for a in range(len(own)):
            for b in range(len(own)):
                if a != b and abs(a - b) <= SPAN and own[a] != own[b]:
                    together[own[a], own[b]] += 1 / abs(a - b)
    return together


def as_dictionary(near):
    owner = torch.repeat_interleave(torch.arange(len(near.offsets) - 1), near.offsets.diff())
    return {(int(i), int(j)): float(w) for i, j, w in zip(owner, near.items, near.weights, strict=True)}


@settings(max_examples=80)
@given(EVENTS, st.data())
def test_counts_end_where_they_are_told_to(events, data):
    until = data.draw(st.integers(1, len(events)))
    first = data.draw(st.integers(0, until))
    counts = count_items(past_of(events), (first, until), until, ITEMS)
    items = [item for _, item in events]
    assert counts.total.tolist() == [items[:until].count(i) for i in range(ITEMS)]
    assert counts.recent.tolist() == [items[first:until].count(i) for i in range(ITEMS)]
    assert counts.known == max(items[:until]) + 1
    assert as_dictionary(counts.covisits) == pytest.approx(covisits_by_hand(events, until))


def test_an_item_keeps_its_strongest_neighbours(monkeypatch):
    monkeypatch.setattr(item_side, "KEPT", 2)
    events = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 2), (3, 0), (3, 2), (0, 5), (0, 3)]
    near = as_dictionary(count_covisits(past_of(events), len(events), ITEMS))
    by_hand = covisits_by_hand(events, len(events))
    assert {j for i, j in near if i == 0} == {1, 2}
    assert all(near[pair] == pytest.approx(by_hand[pair]) for pair in near)
    assert KEPT >= 8


@settings(max_examples=60)
@given(
    EVENTS,
    st.lists(st.lists(st.integers(0, ITEMS + 1), max_size=6), min_size=1, max_size=4),
    st.sampled_from([ITEMS - 2, ITEMS, ITEMS + 2]),
)
def test_what_was_met_with_the_newest_items_is_that_of_a_slow_loop(events, pasts, n_items):
    """Items may have come after the counts, and counts may know items that came after the question."""
    pasts = [[item for item in past if item < n_items] for past in pasts]
    counts = count_items(past_of(events), (0, len(events)), len(events), ITEMS)
    queries = queries_of([[(item, 10 * k) for k, item in enumerate(past)] for past in pasts], 1_000, n_items)
    which, items, z = covisit_numbers(counts, queries)
    together = covisits_by_hand(events, len(events))
    expected = {}
    for q, past in enumerate(pasts):
        for rank, item in enumerate(past[::-1][:SPAN], start=1):
            for other in range(min(ITEMS, n_items)):
                if (item, other) in together:
                    expected[q, other] = expected.get((q, other), 0.0) + together[item, other] / rank
    assert list(zip(which.tolist(), items.tolist(), strict=True)) == sorted(expected)
    for q, item, (raw, scaled) in zip(which.tolist(), items.tolist(), z.tolist(), strict=True):
        total = float(counts.total[item])
        assert raw == pytest.approx(math.log1p(expected[q, item]), rel=1e-5)
        assert scaled == pytest.approx(math.log1p(expected[q, item] / math.sqrt(1 + total)), rel=1e-5)


def test_noise_below_nothing_counts_as_nothing_and_later_items_were_never_met():
    none = count_items(past_of([(0, 0), (0, 1)]), (0, 2), 2, 2)
    counts = replace(none, recent=torch.tensor([-3.0, 1.0]), total=torch.tensor([2.0, -0.5]))
    assert isinstance(counts, ItemCounts)
    assert len(counts) == 2
    found = popularity_numbers(counts, 4)
    assert found[:, 0].tolist() == pytest.approx([0.0, math.log(2), 0.0, 0.0])
    assert found[:, 1].tolist() == pytest.approx([math.log(3), 0.0, 0.0, 0.0])
    assert found[:, 2].tolist() == [0.0, 0.0, 1.0, 1.0]
