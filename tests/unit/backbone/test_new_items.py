"""The new-item rule against dictionaries: what counts as met together, and which rows result."""

from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import random_model, shuffled_after, tiny_config, tiny_log, tiny_stream, warmed_up

from protofed.backbone.new_items import cooccurrences, neighbour_means, with_new_rows
from protofed.config import StreamConfig
from protofed.data.interactions import InteractionLog, from_columns
from protofed.slices.stream import SliceStream

SLICES = StreamConfig(n_slices=2, n_negatives=5)


def drawn_log(seed: int) -> InteractionLog:
    """Few users and items and many ties in time; more and more items turn up."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(40, 90))
    users, items = rng.integers(0, 5, size=n), rng.integers(0, np.linspace(3, 14, n).astype(int))
    return from_columns("hand-made", users.tolist(), items.tolist(), np.sort(rng.integers(0, n // 2 + 20, size=n)))


def slow_counts(data: SliceStream, index: int, span: int) -> dict[int, Counter]:
    """Per item of a train event, how often each other item stood at most `span` events away in the same history."""
    bounds = data.bounds[index]
    by_user = defaultdict(list)
    events = zip(data.log.users.tolist(), data.log.items.tolist(), strict=True)
    for position, (user, item) in enumerate(events):
        if position < bounds.train_end:
            by_user[user].append((position, item))
    counts: dict[int, Counter] = defaultdict(Counter)
    for own in by_user.values():
        for a, (position, item) in enumerate(own):
            if position >= bounds.start:
                for b, (_, other) in enumerate(own):
                    if a != b and abs(a - b) <= span:
                        counts[item][other] += 1
    return counts


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from([1, 2]))
def test_items_are_met_together_within_the_span_and_before_the_train_cut(seed, span, index):
    data = SliceStream(drawn_log(seed), SLICES)
    item, other = cooccurrences(data.slice_(index), span)
    found = Counter(zip(item.tolist(), other.tolist(), strict=True))
    expected = slow_counts(data, index, span)
    assert found == Counter({(a, b): n for a, row in expected.items() for b, n in row.items()})


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4), st.integers(0, 9))
def test_a_new_row_starts_at_the_weighted_mean_of_its_most_frequent_neighbours(seed, span, top, missing):
    data = SliceStream(drawn_log(seed), SLICES)
    slice_ = data.slice_(1)
    model = random_model(min(data.n_train_items(0), slice_.n_train_items))
    model.has_row[missing % model.n_rows] = False
    wanted = np.unique(slice_.past.items[slice_.past.place[slice_.train_positions]])
    rows, found = neighbour_means(slice_, model, wanted, span=span, top=top)
    counts = slow_counts(data, 1, span)
    for place, item in enumerate(wanted.tolist()):
        known = {o: n for o, n in counts[item].items() if o < model.n_rows and model.has_row[o]}
        chosen = sorted(known, key=lambda other: (-known[other], other))[:top]  # ties by item number
        assert bool(found[place]) == bool(chosen)
        if chosen:
            mean = sum(known[o] * model.items[o].detach().double() for o in chosen) / sum(known[o] for o in chosen)
            assert rows[place].tolist() == pytest.approx(mean.tolist(), abs=1e-5)
        else:
            assert not rows[place].any()


def test_the_weighted_mean_by_hand():
    users = ["a"] * 6 + ["b"] * 14
    items = ["x", "y", "x", "new", "x", "y"] + ["x", "y"] * 7
    times = [0, 1, 2, 40, 41, 42, *range(3, 17)]
    data = SliceStream(from_columns("hand", users, items, times), StreamConfig(n_slices=1))
    slice_ = data.slice_(1)
    assert slice_.train_positions.tolist() == list(range(10, 18))  # the last two are b's last event and "new"
    assert data.log.items[slice_.train_positions[-2:]].tolist() == [1, 2]
    model = random_model(2)
    rows, found = neighbour_means(slice_, model, np.array([2]), span=2, top=20)
    x, y = model.items.detach()
    assert found.tolist() == [True]
    assert rows[0].tolist() == pytest.approx(((x + y) / 2).tolist())  # a's y and x; what follows is validation and test
    (nearest,), _ = neighbour_means(slice_, model, np.array([2]), span=1)
    (lowest,), _ = neighbour_means(slice_, model, np.array([2]), span=2, top=1)
    (wide,), _ = neighbour_means(slice_, model, np.array([2]), span=3)
    assert nearest.tolist() == pytest.approx(x.tolist())
    assert lowest.tolist() == pytest.approx(x.tolist())  # of two met equally often, the one with the lower number
    assert wide.tolist() == pytest.approx(((2 * x + y) / 3).tolist())


def test_events_after_the_train_cut_never_count():
    data = tiny_stream()
    cut = data.bounds[1].train_end
    other = SliceStream(shuffled_after(tiny_log(), cut), tiny_config().stream)
    assert data.bounds == other.bounds
    model, _ = warmed_up()
    one, new_one = with_new_rows(model, data.slice_(1))
    two, new_two = with_new_rows(model, other.slice_(1))
    assert new_one.any()
    assert torch.equal(new_one, new_two)
    assert torch.equal(one.items, two.items)


def test_rows_appear_for_exactly_the_items_met_in_the_train_part_that_had_none():
    data, (model, _) = tiny_stream(), warmed_up()
    bigger, new = with_new_rows(model, data.slice_(1))
    bounds = data.bounds[1]
    met = set(data.log.items[bounds.start : bounds.train_end].tolist())
    expected = {item for item in met if item >= model.n_rows}
    assert set(new.nonzero()[:, 0].tolist()) == expected
    assert expected
    assert bigger.n_rows == data.n_train_items(1)
    assert set(bigger.has_row.nonzero()[:, 0].tolist()) == expected | set(range(model.n_rows))
    assert torch.equal(bigger.items[: model.n_rows], model.items)
    assert not torch.equal(bigger.rows(bigger.n_rows)[new], bigger.mean_row.expand(len(expected), -1))


def test_an_item_that_had_no_row_for_want_of_a_train_event_gets_one_later():
    data = tiny_stream()
    between = set(data.log.items[data.bounds[0].train_end : data.bounds[0].end].tolist())
    model, _ = warmed_up()
    skipped = {item for item in between if item >= model.n_rows}
    first, new_first = with_new_rows(model, data.slice_(1))
    assert skipped & set(new_first.nonzero()[:, 0].tolist())
    _, new_second = with_new_rows(first, data.slice_(2))
    assert not (new_second[: first.n_rows] & first.has_row).any()


def test_a_new_item_without_known_neighbours_keeps_the_mean_row():
    users = ["a"] * 30 + ["b"] * 10
    items = ["x", "y", "z"] * 10 + ["new"] * 10
    data = SliceStream(from_columns("hand", users, items, range(40)), StreamConfig(n_slices=1, base_fraction=0.75))
    model = random_model(3)
    bigger, new = with_new_rows(model, data.slice_(1))
    assert new.tolist() == [False, False, False, True]
    assert torch.equal(bigger.items[3], model.mean_row)
    assert bigger.has_row.all()
