"""Numbers of a user's own past against slow loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pasts import queries_of

from protofed.inference.own_past import DAY, NUMBERS, near, own_past

PAST = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 90 * 24 * 3600)), max_size=9)


def by_hand(past: list[tuple[int, int]], item: int, now: int) -> list[float]:
    """The numbers of one item of one past, one at a time."""
    past = sorted(past, key=lambda event: event[1])
    items = [i for i, _ in past]
    ages = [(now - t) / DAY for i, t in past if i == item]
    follow = [(now - t) / DAY for n, (i, t) in enumerate(past) if n and i == item and items[n - 1] == items[-1]]
    since = len(items) - 1 - max(n for n, i in enumerate(items) if i == item)

    def bump(period: float, width: float) -> float:
        angles = [2 * math.pi * 24 * age / period for age in ages]
        return sum(math.exp((math.cos(a) - 1) / (2 * math.pi * width / period) ** 2) for a in angles)

    return [
        math.log1p(len(ages)),
        *(math.log1p(10 * sum(0.5 ** (age / h) for age in ages)) for h in (0.25, 2, 14, 90)),
        math.log1p(since),
        float(items[-1] == item),
        math.log1p(len(follow)),
        math.log1p(sum(0.5 ** (age / 30) for age in follow)),
        math.log1p(bump(24, 1.5)),
        math.log1p(bump(168, 3.0)),
        len(ages) / len(items),
        math.log1p(len(items)),
        1 - len(set(items)) / len(items),
        math.log1p(min(ages)),
        math.log1p(min(ages)) ** 2 / 10,
        float(len(ages) == 1),
        1.0,
    ]


@settings(deadline=None, max_examples=60)
@given(st.lists(PAST, min_size=1, max_size=4))
def test_the_numbers_are_those_of_a_slow_loop(pasts):
    now = 100 * 24 * 3600
    which, items, x = own_past(queries_of(pasts, now))
    expected = [(q, item) for q, past in enumerate(pasts) for item in sorted({i for i, _ in past})]
    assert list(zip(which.tolist(), items.tolist(), strict=True)) == expected
    assert x.shape == (len(expected), len(NUMBERS))
    for row, (q, item) in zip(x, expected, strict=True):
        assert row.tolist() == pytest.approx(by_hand(pasts[q], item, now), rel=1e-4, abs=1e-5)


def test_two_instants_are_near_in_the_day_whatever_the_day():
    hours = torch.tensor([0.0, 24.0, 1.5, 22.5, 12.0], dtype=torch.float64)
    found = near(hours, 24.0, 1.5)
    assert found[:2].tolist() == pytest.approx([1.0, 1.0])
    assert found[2] == pytest.approx(found[3])
    assert found[2] == pytest.approx(math.exp(-0.5), abs=0.01)
    assert found[4] < 1e-4
