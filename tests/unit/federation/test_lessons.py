"""Whose windows a slice holds, how they are cut into chunks, and draws no chunk can change; against plain loops."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from protofed.federation.lessons import ClientData, chunks, client_data, negatives_of, session_starts, stack_size
from protofed.privacy.draws import uniform
from protofed.slices.histories import PAD, Histories, histories
from protofed.slices.windows import NO_TARGET, Windows, training_windows

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
            negatives = negatives_of(windows, 9, 57, seed=5, step=300_002)
            found |= dict(zip(windows.newest.tolist(), negatives.tolist(), strict=True))
        assert found == expected
    assert len(expected) == len(data.windows)


def test_other_steps_and_seeds_draw_other_negatives():
    windows = the_data(a_log(0), np.arange(200)).windows
    draws = [negatives_of(windows, 20, 1000, seed=seed, step=step) for seed, step in ((0, 0), (0, 1), (1, 0))]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert float((draws[a] == draws[b]).float().mean()) < 0.01


def test_negatives_are_uniform_over_the_available_items():
    windows = the_data(a_log(0), np.arange(200)).windows
    drawn = torch.cat([negatives_of(windows, 60, 61, seed=0, step=step).flatten() for step in range(20)])
    counts = Counter(drawn.tolist())
    expected = len(drawn) / 61
    chi_squared = sum((counts[item] - expected) ** 2 / expected for item in range(61))
    assert set(counts) == set(range(61))
    assert chi_squared < 100  # 60 degrees of freedom: beyond it once in a thousand


def test_where_all_items_are_asked_for_each_comes_once():
    windows = the_data(a_log(0), np.arange(200)).windows
    for n in (12, 50):
        negatives = negatives_of(windows, n, 12, seed=0, step=0)
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
