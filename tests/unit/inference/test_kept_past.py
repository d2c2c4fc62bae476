"""What a device keeps of its past: the numbers of the whole past until something has to go, then the newest of it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pasts import queries_of

from protofed.inference import kept_past
from protofed.inference.head import own_cells
from protofed.inference.kept_past import EMPTY, after_event, keep_past, kept_cells, no_past, size
from protofed.inference.own_past import NUMBERS

DAY = 24 * 3600
PAST = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 90 * DAY)), max_size=40)
COUNT, EVENTS, FOLLOWED = (NUMBERS.index(name) for name in ("count", "events", "followed"))


def folded(past):
    past = sorted(past, key=lambda event: event[1])
    return keep_past((item for item, _ in past), (time for _, time in past))


def some_past(n: int, items: int, seed: int = 0) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    return list(
        zip(rng.integers(items, size=n).tolist(), np.sort(rng.integers(300 * DAY, size=n)).tolist(), strict=True)
    )


@settings(deadline=None, max_examples=60)
@given(PAST, st.integers(0, 30 * DAY))
def test_nothing_gone_the_numbers_are_those_of_the_whole_past(past, later):
    now = max((time for _, time in past), default=0) + later
    whole, kept = own_cells(queries_of([past], now, 7), 7), kept_cells(folded(past), now, 7)
    assert kept.items.tolist() == whole.items.tolist()
    assert kept.x.numpy() == pytest.approx(whole.x.numpy(), rel=1e-4, abs=1e-4)


def test_one_event_more_is_the_longer_past_and_leaves_the_shorter_one_alone():
    past = some_past(30, 7)
    short = folded(past[:-1])
    before = kept_cells(short, 400 * DAY, 7).x
    longer = after_event(short, *past[-1])
    assert torch.equal(kept_cells(longer, 400 * DAY, 7).x, kept_cells(folded(past), 400 * DAY, 7).x)
    assert torch.equal(kept_cells(short, 400 * DAY, 7).x, before)


def test_it_fits_into_32_kilobytes_whatever_was_met():
    assert size(no_past()) == size(folded(some_past(5_000, 2_000))) <= 32 * 1024


def test_items_met_longest_ago_go_first_and_what_stays_keeps_its_numbers(monkeypatch):
    monkeypatch.setattr(kept_past, "ITEMS", 4)
    past = some_past(60, 9)
    kept = folded(past)
    newest = list(dict.fromkeys(item for item, _ in reversed(past)))[:4]
    assert sorted(kept.items.tolist()) == sorted(newest)
    assert kept.n_events == 60
    assert set(kept.owners[kept.owners != EMPTY]) <= set(range(4))
    x = kept_cells(kept, 301 * DAY, 9).x
    whole = own_cells(queries_of([past], 301 * DAY, 9), 9)
    assert torch.equal(x[:, EVENTS], whole.x[:4, EVENTS])
    for row, item in zip(x, sorted(newest), strict=True):  # counted since it came back last
        assert row[COUNT] <= whole.x[whole.items.tolist().index(item), COUNT] + 1e-6


def test_transitions_seen_longest_ago_go_first(monkeypatch):
    monkeypatch.setattr(kept_past, "TRANSITIONS", 2)
    past = [(0, 0), (1, 1), (0, 2), (2, 3), (0, 4)]  # 0 -> 1 was seen before 1 -> 0, 0 -> 2, 2 -> 0
    x = kept_cells(folded(past), 5, 3).x
    assert x[:, FOLLOWED].tolist() == pytest.approx([0.0, 0.0, np.log(2)])
