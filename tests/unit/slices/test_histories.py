"""A history holds the user's strictly earlier events, oldest first, and nothing else."""

from collections import Counter

import numpy as np
import pytest
import torch
from small_logs import Event, earlier_events, events_of, random_log

from protofed.data.interactions import InteractionLog
from protofed.slices.histories import (
    BOS,
    PAD,
    Histories,
    distinct_past,
    histories,
    met_before,
    moved,
    past_counts,
    queries_at,
    tokens_ending_at,
    trimmed,
)

SEEDS = range(4)


def laid_out(log: InteractionLog, *, row_order: bool = False) -> Histories:
    columns = (column.numpy() for column in (log.users, log.items, log.times))
    return histories(*columns, log.n_users, row_order=row_order)


def last_tokens(items: list[int], length: int) -> list[int]:
    """BOS and the items, cut to the last `length` and padded at the left."""
    tokens = [BOS, *items][-length:]
    return [PAD] * (length - len(tokens)) + tokens


def asked(log: InteractionLog, positions: list[int], *, length: int = 6, row_order: bool = False):
    past = laid_out(log, row_order=row_order)
    where = np.array(positions, dtype=np.int64)
    return queries_at(past, where, length=length, slice_index=3, n_items=log.n_items, times=log.times.numpy())


@pytest.mark.parametrize("row_order", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_before_counts_the_events_of_the_history(seed, row_order):
    log = random_log(seed)
    events = events_of(log)
    past = laid_out(log, row_order=row_order)
    assert past.before.tolist() == [len(earlier_events(events, p, row_order=row_order)) for p in range(len(events))]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_layout_holds_each_users_events_in_time_order(seed):
    log = random_log(seed)
    events = events_of(log)
    past = laid_out(log)
    for user in range(log.n_users):
        places = slice(past.start[user], past.start[user + 1])
        own = [event for event in events if event.user == user]
        assert past.items[places].tolist() == [event.item for event in own]
        assert past.times[places].tolist() == [event.time for event in own]
    for position, event in enumerate(events):
        place = past.place[position]
        assert Event(int(past.users[position]), int(past.items[place]), int(past.times[place])) == event
    assert sorted(past.place.tolist()) == list(range(len(events)))
    assert (past.n_users, len(past)) == (log.n_users, len(log))


@pytest.mark.parametrize("length", [1, 2, 6, 50])
@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_are_bos_and_the_items_up_to_the_last_one_cut_at_the_left(seed, length):
    log = random_log(seed)
    past, events = laid_out(log), events_of(log)
    own = {user: [event.item for event in events if event.user == user] for user in range(log.n_users)}
    users, last = zip(*((user, n) for user in own for n in range(len(own[user]) + 1)), strict=True)
    tokens = tokens_ending_at(past, np.array(users), np.array(last), length)
    assert tokens.tolist() == [last_tokens(own[user][:n], length) for user, n in zip(users, last, strict=True)]


def test_users_without_events_have_a_history_of_bos_alone():
    nothing = np.zeros(0, dtype=np.int64)
    past = histories(nothing, nothing, nothing, 3)
    assert past.start.tolist() == [0, 0, 0, 0]
    assert tokens_ending_at(past, np.array([0, 2]), np.array([0, 0]), 3).tolist() == [[PAD, PAD, BOS]] * 2


@pytest.mark.parametrize("row_order", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_queries_show_exactly_the_past_of_each_event(seed, row_order):
    log = random_log(seed)
    events = events_of(log)
    positions = np.random.default_rng(seed).permutation(len(log))[:90].tolist()
    queries = asked(log, positions, row_order=row_order)
    for row, position in enumerate(positions):
        past = earlier_events(events, position, row_order=row_order)
        span = slice(int(queries.offsets[row]), int(queries.offsets[row + 1]))
        assert queries.past_items[span].tolist() == [event.item for event in past]
        assert queries.past_times[span].tolist() == [event.time for event in past]
        assert queries.tokens[row].tolist() == last_tokens([event.item for event in past], 6)
        assert (int(queries.users[row]), int(queries.times[row])) == (events[position].user, events[position].time)
    assert (len(queries), queries.slice_index, queries.n_items) == (90, 3, log.n_items)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_of_the_querys_own_instant_or_later_is_ever_shown(seed):
    log = random_log(seed)
    queries = asked(log, list(range(len(log))))
    rows = torch.repeat_interleave(torch.arange(len(queries)), queries.offsets.diff())
    assert bool((queries.past_times < queries.times[rows]).all())


@pytest.mark.parametrize("seed", SEEDS)
def test_changing_an_event_leaves_all_queries_up_to_its_instant_alone(seed):
    log = random_log(seed)
    events = events_of(log)
    changed = 120
    users, items, times = (column.numpy().copy() for column in (log.users, log.items, log.times))
    users[changed], items[changed] = (users[changed] + 1) % log.n_users, (items[changed] + 1) % log.n_items
    past, other = laid_out(log), histories(users, items, times, log.n_users)
    until = np.array([p for p, e in enumerate(events) if e.time <= events[changed].time and p != changed])
    shown, shown_after = (
        queries_at(layout, until, length=6, slice_index=0, n_items=log.n_items, times=times) for layout in (past, other)
    )
    for column in ("users", "tokens", "offsets", "past_items", "past_times"):
        assert torch.equal(getattr(shown, column), getattr(shown_after, column))


def test_no_queries_are_an_empty_set_of_the_right_width():
    queries = asked(random_log(0), [], length=6)
    assert (len(queries), tuple(queries.tokens.shape), queries.offsets.tolist()) == (0, (0, 6), [0])
    assert tuple(past_counts(queries).shape) == (0, queries.n_items)


@pytest.mark.parametrize("seed", SEEDS)
def test_past_counts_count_each_item_of_each_past(seed):
    log = random_log(seed)
    events = events_of(log)
    positions = list(range(0, len(log), 3))
    counts = past_counts(asked(log, positions))
    for row, position in enumerate(positions):
        seen = Counter(event.item for event in earlier_events(events, position))
        assert counts[row].tolist() == [seen[item] for item in range(log.n_items)]


@pytest.mark.parametrize("seed", SEEDS)
def test_an_item_was_met_before_exactly_where_the_past_holds_it(seed):
    log = random_log(seed)
    queries = asked(log, list(range(0, len(log), 3)))
    which, items = torch.meshgrid(torch.arange(len(queries)), torch.arange(log.n_items + 2), indexing="ij")
    found = met_before(queries, which.flatten(), items.flatten()).view_as(items)
    assert torch.equal(found[:, : log.n_items], past_counts(queries) > 0)
    assert not found[:, log.n_items :].any()
    assert not met_before(asked(log, []), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)).any()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_distinct_past_names_each_item_of_each_past_once(seed):
    log = random_log(seed)
    queries = asked(log, list(range(0, len(log), 3)))
    which, items = distinct_past(queries)
    assert torch.equal(torch.stack([which, items], dim=1), (past_counts(queries) > 0).nonzero())
    assert [len(column) for column in distinct_past(asked(log, []))] == [0, 0]


def test_past_counts_add_up_the_weights_given():
    log = random_log(1)
    events = events_of(log)
    positions = [30, 200, 31, 239]
    queries = asked(log, positions)
    rows = torch.repeat_interleave(torch.arange(4), queries.offsets.diff())
    ages = (queries.times[rows] - queries.past_times).float()
    weighed = past_counts(queries, 1 / ages)
    for row, position in enumerate(positions):
        expected = [0.0] * log.n_items
        for event in earlier_events(events, position):
            expected[event.item] += 1 / (events[position].time - event.time)
        assert weighed[row].tolist() == pytest.approx(expected, rel=1e-5)


def test_queries_keep_their_content_when_they_move():
    queries = asked(random_log(2), [5, 100, 239])
    there = moved(queries, torch.device("meta"))
    assert all(getattr(there, name).device.type == "meta" for name in ("users", "times", "tokens", "past_items"))
    back = moved(queries, "cpu")
    for name in ("users", "times", "tokens", "offsets", "past_items", "past_times"):
        assert torch.equal(getattr(back, name), getattr(queries, name))
    assert (back.slice_index, back.n_items) == (queries.slice_index, queries.n_items)


@pytest.mark.parametrize("positions", [[], [0], [0, 3, 5], [0, 239]])
def test_trimmed_queries_lose_only_columns_that_pad_in_every_row(positions):
    queries = asked(random_log(3), positions, length=30)
    short = trimmed(queries)
    lost = 30 - short.tokens.shape[1]
    assert torch.equal(short.tokens, queries.tokens[:, lost:])
    assert bool((queries.tokens[:, :lost] == PAD).all())
    assert not positions or bool((short.tokens[:, 0] != PAD).any())
    assert torch.equal(short.past_items, queries.past_items)
