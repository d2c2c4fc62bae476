"""Whose windows a slice holds, where they are cut, and draws that no stack, log or order can change; by plain loops."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from protofed.client.lessons import (
    ClientData,
    CutsByKey,
    Lesson,
    chunks,
    client_data,
    draw_negatives,
    draw_negatives_by_event,
    lesson_to,
    own_windows,
    session_starts,
    stack_size,
)
from protofed.privacy.draws import SeededDraws, event_keys, uniform
from protofed.seeds import user_keys
from protofed.slices.histories import PAD, Histories, histories
from protofed.slices.windows import NO_TARGET, Windows, take, training_windows

CPU = torch.device("cpu")
LENGTH, STRIDE = 8, 3
HOUR = 3600.0


def a_log(seed: int, n: int = 200, n_users: int = 11) -> Histories:
    """Every event has an item of its own: an item's number is its log position. Some events share an instant."""
    rng = np.random.default_rng(seed)
    users = (rng.random(n) * n_users * (0.4 + 0.6 * np.arange(n) / n)).astype(np.int64)
    times = np.sort(rng.integers(0, 2 * n, n)) * 600
    return histories(users, np.arange(n), times, n_users)


def the_data(past: Histories, positions: np.ndarray, *, newest: int | None = None, seed: int = 0) -> ClientData:
    rng = np.random.default_rng(seed)
    return client_data(past, positions, length=LENGTH, stride=STRIDE, rng=rng, newest=newest)


def told(windows: Windows, w: int) -> tuple[list[int], list[tuple[int, int]]]:
    """A window's tokens without padding, and (target, how far its source is from the right end)."""
    tokens = [t for t in windows.tokens[w].tolist() if t != PAD]
    width = windows.tokens.shape[1]
    pairs = zip(windows.targets[w].tolist(), windows.sources[w].tolist(), strict=True)
    return tokens, [(target, width - source) for target, source in pairs if target != NO_TARGET]


def slow_data(past: Histories, positions: np.ndarray, newest: int | None, seed: int = 0) -> dict[int, list]:
    """Per active user its windows, oldest first; only the latest where so many are asked for."""
    rng = np.random.default_rng(seed)
    windows = training_windows(past, positions, length=LENGTH, stride=STRIDE, rng=rng)
    by_user: dict[int, list] = {}
    for w in sorted(range(len(windows)), key=lambda w: int(windows.newest[w])):
        by_user.setdefault(int(windows.users[w]), []).append((int(windows.newest[w]), *told(windows, w)))
    return {user: by_user[user][-newest:] if newest else by_user[user] for user in sorted(by_user)}


def as_dictionary(data: ClientData) -> dict[int, list]:
    found = {}
    for place, user in enumerate(data.users.tolist()):
        own = range(int(data.starts[place]), int(data.starts[place + 1]))
        assert all(int(data.windows.users[w]) == user for w in own)
        found[user] = [(int(data.windows.newest[w]), *told(data.windows, w)) for w in own]
    return found


@pytest.mark.parametrize("newest", [None, 1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_every_active_user_owns_its_windows_oldest_first(seed, newest):
    past = a_log(seed)
    for positions in (np.arange(len(past)), np.arange(90, 130), np.arange(0, len(past), 7)):
        data = the_data(past, positions, newest=newest)
        assert as_dictionary(data) == slow_data(past, positions, newest)
        assert list(as_dictionary(data)) == sorted(set(past.users[positions].tolist()))
        assert int(data.starts[-1]) == len(data.windows)


def test_the_newest_windows_hold_each_users_latest_targets():
    past = a_log(1)
    data = the_data(past, np.arange(len(past)), newest=1)
    assert len(data.windows) == len(data)
    for user, windows in as_dictionary(data).items():
        assert windows[0][0] == np.flatnonzero(past.users == user)[-1]


@pytest.mark.parametrize("seed", range(3))
def test_all_targets_are_learned_once(seed):
    past = a_log(seed)
    positions = np.arange(60, 200)
    targets = the_data(past, positions).windows.targets
    assert sorted(targets[targets != NO_TARGET].tolist()) == positions.tolist()


def test_a_slice_without_events_has_no_clients_and_no_chunks():
    for newest in (None, 2):
        data = the_data(a_log(0), np.arange(0), newest=newest)
        assert (len(data), len(data.windows), data.starts.tolist()) == (0, 0, [0])
        assert list(chunks(data, 4, CPU)) == []


@pytest.mark.parametrize("size", [1, 4, 7, 1000])
def test_chunks_hold_whole_clients_in_order_with_their_windows_untouched(size):
    past = a_log(2)
    positions = np.arange(50, 200)
    data = the_data(past, positions)
    expected, found = slow_data(past, positions, None), {}
    places = []
    for where, windows in chunks(data, size, CPU):
        users = data.users[where].tolist()
        places.append((where.start, where.stop))
        assert sorted(set(windows.users.tolist())) == list(range(len(users)))
        for w in range(len(windows)):
            entry = (int(windows.newest[w]), *told(windows, w))
            found.setdefault(users[int(windows.users[w])], []).append(entry)
    assert found == expected
    assert [start for start, _ in places] == list(range(0, len(data), size))
    assert places[-1][1] == len(data)
    assert all(stop - start == size for start, stop in places[:-1])


def test_a_chunk_of_short_histories_is_narrow():
    users = np.array([0] * 2 + [1] * 30)
    past = histories(users, np.arange(32), np.arange(32), 2)
    data = the_data(past, np.arange(32))
    widths = [windows.tokens.shape[1] for _, windows in chunks(data, 1, CPU)]
    assert widths == [2, LENGTH]


def test_chunks_leave_the_data_as_it_was():
    data = the_data(a_log(3), np.arange(200))
    columns = ("users", "tokens", "sources", "targets", "newest")
    before = {name: getattr(data.windows, name).clone() for name in columns}
    list(chunks(data, 3, CPU))
    assert all(torch.equal(getattr(data.windows, name), column) for name, column in before.items())


def test_a_gpu_takes_more_clients_at_once_than_a_core():
    assert stack_size(64, torch.zeros(3, 64)) == 64
    with FakeTensorMode():  # no GPU is needed to say how many it would take
        assert stack_size(64, torch.zeros(3, 64, device="cuda")) == 512
        assert stack_size(64, torch.zeros(3, 256, device="cuda")) == 128  # four times as wide, a quarter of the clients
        assert stack_size(1, torch.zeros(3, 1024, device="cuda")) == 1


def slow_negatives(newest: int, n: int, n_items: int, seed: int, step: int) -> list[int]:
    numbers = uniform(seed, "client negatives", torch.tensor([newest]), step, (n,))[0].tolist()
    return [min(int(x * n_items), n_items - 1) for x in numbers]


def test_the_negatives_of_a_window_belong_to_its_newest_target_bit_for_bit_whatever_the_chunk():
    data = the_data(a_log(0), np.arange(200))
    expected = {w: slow_negatives(w, 9, 57, 5, 300_002) for w in data.windows.newest.tolist()}
    for size in (1, 7, len(data)):
        found = {}
        for _, windows in chunks(data, size, CPU):
            negatives = draw_negatives_by_event(windows, 9, 57, seed=5, step=300_002)
            found |= dict(zip(windows.newest.tolist(), negatives.tolist(), strict=True))
        assert found == expected
    assert len(expected) == len(data.windows)


def test_other_steps_and_seeds_draw_other_negatives():
    windows = the_data(a_log(0), np.arange(200)).windows
    draws = [
        draw_negatives_by_event(windows, 20, 1000, seed=seed, step=step) for seed, step in ((0, 0), (0, 1), (1, 0))
    ]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert float((draws[a] == draws[b]).float().mean()) < 0.01


def test_negatives_are_uniform_over_the_available_items():
    windows = the_data(a_log(0), np.arange(200)).windows
    drawn = torch.cat([draw_negatives_by_event(windows, 60, 61, seed=0, step=step).flatten() for step in range(20)])
    counts = Counter(drawn.tolist())
    expected = len(drawn) / 61
    chi_squared = sum((counts[item] - expected) ** 2 / expected for item in range(61))
    assert set(counts) == set(range(61))
    assert chi_squared < 100  # 60 degrees of freedom: beyond it once in a thousand


def test_where_all_items_are_asked_for_each_comes_once():
    windows = the_data(a_log(0), np.arange(200)).windows
    for n in (12, 50):
        negatives = draw_negatives_by_event(windows, n, 12, seed=0, step=0)
        assert negatives.tolist() == [list(range(12))] * len(windows)


def slow_starts(past: Histories, positions: np.ndarray, gap: float) -> list[int]:
    starts, last = [0] * past.n_users, {}
    asked = set(positions.tolist())
    for position in range(len(past)):
        user, time = int(past.users[position]), int(past.times[past.place[position]])
        if position in asked and (user not in last or time - last[user] > gap):
            starts[user] += 1
        last[user] = time
    return starts


@pytest.mark.parametrize("gap", [0.0, 600.0, 2 * HOUR, 8 * HOUR, 1e12])
@pytest.mark.parametrize("seed", range(3))
def test_sessions_begin_at_a_users_first_event_and_after_each_longer_pause(seed, gap):
    past = a_log(seed)
    for positions in (np.arange(len(past)), np.arange(120, 180), np.arange(0, 200, 3), np.arange(0)):
        assert session_starts(past, positions, gap).tolist() == slow_starts(past, positions, gap)


def test_a_hand_counted_diary():
    # Ann at 0, 1, 10 hours; Bob at 1 and at exactly 9 hours, which is no longer pause than 8; Cid never.
    past = histories(np.array([0, 0, 1, 1, 0]), np.arange(5), HOUR * np.array([0, 1, 1, 9, 10]), 3)
    assert session_starts(past, np.arange(5), 8 * HOUR).tolist() == [2, 1, 0]
    assert session_starts(past, np.array([3, 4]), 8 * HOUR).tolist() == [1, 0, 0]


N_USERS = 11
KEYS = torch.from_numpy(user_keys(f"user {n}" for n in range(N_USERS)))
DRAWS = SeededDraws(4)


def cuts_of(keys: Tensor = KEYS, *, purpose: str = "cuts", round_: int = 3, seed: int = 4) -> CutsByKey:
    return CutsByKey(SeededDraws(seed), purpose, keys, round_)


def test_a_users_cut_is_its_keys_uniform_number_spread_over_the_stride():
    for low, high in ((0, 3), (0, 25), (2, 9)):
        by_hand = [low + int(uniform(4, "cuts", key[None], 3).item() * (high - low)) for key in KEYS]
        assert cuts_of().integers(low, high, N_USERS).tolist() == by_hand
        assert all(low <= cut < high for cut in by_hand)


def test_a_users_cut_is_the_same_alone_in_any_stack_and_when_asked_again():
    together = cuts_of().integers(0, 1000, N_USERS).tolist()
    for places in ([4], [7, 1, 0], list(range(N_USERS))[::-1]):
        cuts = cuts_of(KEYS[places])
        assert cuts.integers(0, 1000, len(places)).tolist() == [together[place] for place in places]
        assert cuts.integers(0, 1000, len(places)).tolist() == [together[place] for place in places]
    assert cuts_of().integers(0, 1000, 4).tolist() == together[:4]  # who comes later does not matter


def test_another_slice_purpose_or_seed_cuts_elsewhere():
    here = cuts_of().integers(0, 10**6, N_USERS)
    for others in (cuts_of(round_=4), cuts_of(purpose="brief cuts"), cuts_of(seed=5)):
        assert not set(here.tolist()) & set(others.integers(0, 10**6, N_USERS).tolist())


def test_cuts_fall_everywhere_in_the_stride_alike():
    keys = torch.from_numpy(user_keys(range(4_000)))
    counts = Counter(cuts_of(keys).integers(0, 5, len(keys)).tolist())
    assert set(counts) == set(range(5))
    assert sum((n - 800) ** 2 / 800 for n in counts.values()) < 18.5  # 4 degrees of freedom: once in a thousand


def by_user(past: Histories) -> Histories:
    """The same events laid out as devices remember them: one user's after the other's."""
    return histories(np.repeat(np.arange(past.n_users), np.diff(past.start)), past.items, past.times, past.n_users)


def slow_own_windows(past: Histories, positions: np.ndarray, user: int, newest: int | None) -> list:
    """One user's windows: targets in time order, a new window where its cut and every stride after it say so."""
    mine = [p for p in positions.tolist() if past.users[p] == user]
    shift = int(uniform(4, "cuts", KEYS[user : user + 1], 3).item() * STRIDE)
    groups: dict[int, list[int]] = {}
    for n, position in enumerate(mine):
        groups.setdefault((n + shift) // STRIDE, []).append(position)
    first = int(past.start[user])
    windows = []
    for group in groups.values():
        targets = [int(past.items[past.place[p]]) for p in group]
        windows.append((int(past.place[group[-1]]) - first, targets))
    return windows[-newest:] if newest else windows


@pytest.mark.parametrize("newest", [None, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_own_windows_are_cut_by_key_and_number_each_users_events_from_0(seed, newest):
    past = a_log(seed)
    apart = np.arange(len(past)) * 600  # no two events share an instant
    past = by_user(histories(past.users, np.arange(len(past)), apart, N_USERS))
    for positions in (np.arange(len(past)), np.arange(90, 130)):
        windows = own_windows(past, positions, cuts_of(), length=LENGTH, stride=STRIDE, newest=newest)
        for user in range(N_USERS):
            mine = (windows.users == user).nonzero()[:, 0].tolist()
            found = [(int(windows.newest[w]), [target for target, _ in told(windows, w)[1]]) for w in mine]
            assert found == slow_own_windows(past, positions, user, newest)


def some_windows(seed: int = 0) -> Windows:
    past = by_user(a_log(seed))
    return own_windows(past, np.arange(len(past)), cuts_of(), length=LENGTH, stride=STRIDE)


def test_negatives_belong_to_a_users_key_its_own_event_and_the_step_bit_for_bit():
    windows = some_windows()
    found = draw_negatives(DRAWS, KEYS, windows, 9, 57, 300_002)
    for w in range(len(windows)):
        key = event_keys(KEYS[windows.users[w]][None], windows.newest[w][None])
        numbers = uniform(4, "client negatives", key, 300_002, (9,))[0].tolist()
        assert found[w].tolist() == [min(int(x * 57), 56) for x in numbers]


def by_event(windows: Windows, keys: Tensor, negatives: Tensor) -> dict[tuple[int, int], list[int]]:
    owners = keys[windows.users].tolist()
    return dict(zip(zip(owners, windows.newest.tolist(), strict=True), negatives.tolist(), strict=True))


def test_no_stack_and_no_order_changes_anybodys_negatives():
    windows = some_windows()
    whole = by_event(windows, KEYS, draw_negatives(DRAWS, KEYS, windows, 9, 57, 2))
    assert len(whole) == len(windows)
    shuffled = take(windows, torch.randperm(len(windows), generator=torch.Generator().manual_seed(0)))
    assert by_event(shuffled, KEYS, draw_negatives(DRAWS, KEYS, shuffled, 9, 57, 2)) == whole
    for users in ([3], [8, 2, 5], [10, 9]):
        part = take(windows, torch.isin(windows.users, torch.tensor(users)).nonzero()[:, 0])
        part = replace(part, users=torch.tensor([users.index(u) for u in part.users.tolist()]))
        keys = KEYS[users]
        alone = by_event(part, keys, draw_negatives(DRAWS, keys, part, 9, 57, 2))
        assert alone == {event: row for event, row in whole.items() if event[0] in keys.tolist()}
        assert alone


def test_what_others_do_in_the_log_changes_nobodys_negatives():
    past = a_log(0)
    own = slice(past.start[5], past.start[6])
    items, times = past.items[own], past.times[own]
    mine = histories(np.zeros(len(items), dtype=np.int64), items, times, 1)
    windows = own_windows(mine, np.arange(len(items)), cuts_of(KEYS[5:6]), length=LENGTH, stride=STRIDE)
    lonely = by_event(windows, KEYS[5:6], draw_negatives(DRAWS, KEYS[5:6], windows, 9, 57, 2))
    whole = some_windows()
    found = by_event(whole, KEYS, draw_negatives(DRAWS, KEYS, whole, 9, 57, 2))
    assert lonely == {event: row for event, row in found.items() if event[0] == int(KEYS[5])}


def test_another_user_event_step_or_seed_draws_other_negatives():
    windows = some_windows()
    strangers = torch.from_numpy(user_keys(f"stranger {n}" for n in range(N_USERS)))
    later = replace(windows, newest=windows.newest + 1000)
    draws = [
        draw_negatives(DRAWS, KEYS, windows, 20, 1000, 0),
        draw_negatives(DRAWS, strangers, windows, 20, 1000, 0),
        draw_negatives(DRAWS, KEYS, later, 20, 1000, 0),
        draw_negatives(DRAWS, KEYS, windows, 20, 1000, 1),
        draw_negatives(SeededDraws(5), KEYS, windows, 20, 1000, 0),
    ]
    for a in range(len(draws)):
        for b in range(a):
            assert float((draws[a] == draws[b]).float().mean()) < 0.01


def test_negatives_drawn_by_event_are_uniform_and_all_items_come_once_where_all_are_asked_for():
    windows = some_windows()
    drawn = torch.cat([draw_negatives(DRAWS, KEYS, windows, 60, 61, step).flatten() for step in range(20)])
    counts, expected = Counter(drawn.tolist()), len(drawn) / 61
    assert set(counts) == set(range(61))
    assert sum((counts[item] - expected) ** 2 / expected for item in range(61)) < 100  # once in a thousand, as above
    for n in (12, 50):
        assert draw_negatives(DRAWS, KEYS, windows, n, 12, 0).tolist() == [list(range(12))] * len(windows)


def test_a_lesson_that_goes_to_another_device_takes_both_kinds_of_windows_along():
    windows, numbers = some_windows(), torch.rand(N_USERS)
    for brief in (None, some_windows(1)):
        there = lesson_to(Lesson(windows, numbers[:, None], numbers, numbers, brief=brief), torch.device("meta"))
        assert there.windows.tokens.is_meta
        assert there.windows.tokens.shape == windows.tokens.shape
        assert (there.brief is None) == (brief is None)
        assert brief is None or (there.brief.tokens.is_meta and there.brief.tokens.shape == brief.tokens.shape)
        assert torch.equal(there.h[:, 0], numbers)
