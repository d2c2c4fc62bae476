"""What devices remember of events: against Python lists, user by user; the same windows as from the whole log."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protofed.client.lessons import CutsByKey, client_data, own_windows
from protofed.client.memory import (
    Memory,
    append_events,
    as_histories,
    events_between,
    events_until,
    gather_places,
    new_events,
    no_memory,
    offsets_of,
    places_since,
    replace_events,
    select_events,
)
from protofed.privacy.draws import SeededDraws
from protofed.seeds import user_keys
from protofed.slices.histories import Histories, histories

Diary = list[tuple[int, int]]  # one user's (item, time), oldest first
DIARIES = st.lists(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=6), max_size=7)
N_USERS = 6
LOGS = st.lists(
    st.tuples(st.integers(0, N_USERS - 1), st.integers(0, 50), st.integers(0, 2)), max_size=40
)  # who, what, how long after the event before


def whole(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def memory_of(diaries: list[Diary]) -> Memory:
    flat = [event for diary in diaries for event in diary]
    offsets = [sum(len(diary) for diary in diaries[:n]) for n in range(len(diaries) + 1)]
    return Memory(whole(offsets), whole([item for item, _ in flat]), whole([time for _, time in flat]))


def diaries_of(memory: Memory) -> list[Diary]:
    events = list(zip(memory.items.tolist(), memory.times.tolist(), strict=True))
    edges = memory.offsets.tolist()
    assert edges[-1] == len(events)
    return [events[first:last] for first, last in itertools.pairwise(edges)]


def log_of(events: list[tuple[int, int, int]], *, row_order: bool = False) -> Histories:
    users, items, pauses = (np.array([event[n] for event in events], dtype=np.int64) for n in range(3))
    return histories(users, items, np.cumsum(pauses), N_USERS, row_order=row_order)


def own_events(events: list[tuple[int, int, int]], user: int, end: int | None = None) -> Diary:
    """One user's events before a log position."""
    times = np.cumsum([pause for *_, pause in events]).tolist()
    pairs = zip(events[:end], times[:end], strict=True)
    return [(item, time) for (who, item, _), time in pairs if who == user]


@given(DIARIES)
def test_counts_are_how_many_events_each_user_has(diaries):
    memory = memory_of(diaries)
    assert memory.counts.tolist() == [len(diary) for diary in diaries]
    assert offsets_of(memory.counts).tolist() == memory.offsets.tolist()


@pytest.mark.parametrize("n", [0, 1, 5])
def test_no_memory_is_that_of_users_who_have_done_nothing(n):
    assert diaries_of(no_memory(n)) == [[]] * n


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=8))
def test_gathered_places_are_one_range_after_the_other(ranges):
    starts, counts = (whole([each[n] for each in ranges]) for n in (0, 1))
    assert gather_places(starts, counts).tolist() == [s + i for s, c in ranges for i in range(c)]


@given(DIARIES, st.data())
def test_selected_users_bring_their_events_in_the_order_asked_for(diaries, data):
    users = data.draw(st.lists(st.integers(0, len(diaries) - 1), max_size=8)) if diaries else []
    assert diaries_of(select_events(memory_of(diaries), whole(users))) == [diaries[u] for u in users]


@given(DIARIES, st.data())
def test_appended_events_follow_each_users_own(diaries, data):
    more = data.draw(st.lists(DIARIES.map(lambda some: some[0] if some else []), min_size=len(diaries)))
    more = more[: len(diaries)]
    found = append_events(memory_of(diaries), memory_of(more))
    assert diaries_of(found) == [old + new for old, new in zip(diaries, more, strict=True)]


@given(DIARIES, st.data())
def test_replaced_events_are_those_of_the_part_and_everybody_elses_stay(diaries, data):
    places = st.lists(st.integers(0, max(len(diaries) - 1, 0)), unique=True, max_size=len(diaries))
    users = sorted(data.draw(places))
    part = [data.draw(DIARIES.map(lambda some: some[0] if some else [])) for _ in users]
    expected = [part[users.index(u)] if u in users else diary for u, diary in enumerate(diaries)]
    assert diaries_of(replace_events(memory_of(diaries), whole(users), memory_of(part))) == expected


@given(DIARIES, st.data())
def test_places_learned_from_are_those_of_the_users_events_from_its_first_on(diaries, data):
    first = [data.draw(st.integers(0, len(diary) + 2)) for diary in diaries]
    memory = memory_of(diaries)
    places = places_since(memory, whole(first)).tolist()
    expected = [(u, n) for u, diary in enumerate(diaries) for n in range(first[u], len(diary))]
    assert places == [int(memory.offsets[u]) + n for u, n in expected]


@given(LOGS, st.data())
def test_events_until_a_position_are_counted_for_each_user(events, data):
    position = data.draw(st.integers(0, len(events)))
    assert events_until(log_of(events), position).tolist() == [
        len(own_events(events, user, position)) for user in range(N_USERS)
    ]


@given(LOGS, st.data())
def test_events_between_two_numbers_are_that_slice_of_a_users_own(events, data):
    users = sorted(data.draw(st.sets(st.integers(0, N_USERS - 1))))
    counts = [len(own_events(events, user)) for user in users]
    first, end = ([data.draw(st.integers(0, count)) for count in counts] for _ in range(2))
    found = events_between(log_of(events), whole(users), whole(first), whole(end))
    expected = [own_events(events, u)[a:b] for u, a, b in zip(users, first, end, strict=True)]
    assert diaries_of(found) == expected


@given(LOGS, st.data())
def test_new_events_are_those_between_what_is_known_and_the_end_learned_from_the_start_on(events, data):
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(events))] * 2)))
    users = sorted(data.draw(st.sets(st.integers(0, N_USERS - 1))))
    known = [data.draw(st.integers(0, len(own_events(events, user, start)))) for user in users]
    found = new_events(log_of(events), whole(users), whole(known), start, end)
    assert diaries_of(found.memory) == [own_events(events, u, end)[k:] for u, k in zip(users, known, strict=True)]
    remembered = [own_events(events, u)[:k] for u, k in zip(users, known, strict=True)]
    memory = append_events(memory_of(remembered), found.memory)
    learned = places_since(memory, found.first)
    expected = [event for u in users for event in own_events(events, u, end)[len(own_events(events, u, start)) :]]
    assert list(zip(memory.items[learned].tolist(), memory.times[learned].tolist(), strict=True)) == expected


@given(LOGS, st.booleans())
def test_a_memory_as_histories_is_every_users_part_of_the_logs(events, row_order):
    log = log_of(events, row_order=row_order)
    everybody = torch.arange(N_USERS)
    memory = events_between(log, everybody, torch.zeros_like(everybody), events_until(log, len(events)))
    found = as_histories(memory, row_order=row_order)
    for name in ("start", "items", "times"):
        assert np.array_equal(getattr(found, name), getattr(log, name))
    assert found.place.tolist() == list(range(len(events)))
    assert {int(log.place[p]): int(log.before[p]) for p in range(len(events))} == dict(enumerate(found.before.tolist()))


@pytest.mark.parametrize("row_order", [False, True])
@pytest.mark.parametrize(("length", "stride"), [(8, 3), (3, 2), (2, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_windows_from_memories_are_the_windows_from_the_log(seed, length, stride, row_order):
    rng = np.random.default_rng(seed)
    users, items = rng.integers(0, N_USERS, 160), rng.integers(0, 50, 160)
    times = np.sort(rng.integers(0, 90, 160))  # some of a user's events share an instant
    log = histories(users, items, times, N_USERS, row_order=row_order)
    keys = torch.from_numpy(user_keys(range(N_USERS)))
    start, end, chosen = 70, 130, torch.tensor([0, 2, 3, 5])
    targets = np.array([p for p in range(start, end) if users[p] in chosen.tolist()])
    cuts = CutsByKey(SeededDraws(1), "cuts", keys, 0)
    by_log = client_data(log, targets, length=length, stride=stride, rng=cuts).windows
    some = new_events(log, chosen, torch.zeros_like(chosen), start, end)
    cuts = CutsByKey(SeededDraws(1), "cuts", keys[chosen], 0)
    past = as_histories(some.memory, row_order=row_order)
    own = own_windows(past, places_since(some.memory, some.first), cuts, length=length, stride=stride)
    assert torch.equal(chosen[own.users], by_log.users)
    assert len(own) > 10
    for name in ("tokens", "sources", "targets"):
        assert torch.equal(getattr(own, name), getattr(by_log, name)), name
    numbers = [int((users[: int(p)] == users[int(p)]).sum()) for p in by_log.newest]  # of the user's own events
    assert own.newest.tolist() == numbers
