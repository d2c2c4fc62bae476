"""Every target is learned once per pass, from the newest token strictly older than it."""

from collections import Counter

import numpy as np
import pytest
import torch
from small_logs import BURST, Event, earlier_events, events_of, log_of, random_log

from protofed.data.interactions import InteractionLog
from protofed.slices.histories import BOS, PAD, Histories, histories
from protofed.slices.windows import NO_TARGET, Windows, batches, concatenate, moved, take, training_windows, trimmed

LENGTH, STRIDE = 8, 3
COLUMNS = ("users", "tokens", "sources", "targets", "newest")


def laid_out(log: InteractionLog) -> Histories:
    return histories(*(column.numpy() for column in (log.users, log.items, log.times)), log.n_users)


def traceable_log(seed: int) -> InteractionLog:
    """A random log where every event has an item of its own, so that an item's number is its log position."""
    log = random_log(seed)
    rows = [(event.user, f"only-{position}", event.time) for position, event in enumerate(events_of(log))]
    traceable = log_of(rows)
    assert traceable.items.tolist() == list(range(len(log)))
    return traceable


def cut(log: InteractionLog, positions: np.ndarray, *, seed: int = 0, length: int = LENGTH, stride: int = STRIDE):
    return training_windows(laid_out(log), positions, length=length, stride=stride, rng=np.random.default_rng(seed))


def some_positions(log: InteractionLog, kind: str) -> np.ndarray:
    n = len(log)
    if kind == "with gaps":
        return np.concatenate([np.arange(n // 5), np.arange(n // 3, n // 2), np.arange(3 * n // 4, n)])
    if kind == "scattered":
        return np.sort(np.random.default_rng(5).permutation(n)[: n // 3])
    return np.arange(n // 2, n) if kind == "the later half" else np.arange(n)


def learned(windows: Windows) -> list[tuple[int, int, list[int]]]:
    """User, target and the tokens up to the target's source, of every target."""
    return [
        (int(windows.users[w]), int(target), windows.tokens[w, : int(source) + 1].tolist())
        for w in range(len(windows))
        for source, target in zip(windows.sources[w], windows.targets[w], strict=True)
        if target != NO_TARGET
    ]


def history_tokens(events: list[Event], position: int) -> list[int]:
    return [BOS, *(event.item for event in earlier_events(events, position))]


KINDS = ["all", "the later half", "with gaps", "scattered"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_every_target_appears_exactly_once_wherever_the_runs_are_cut(seed, kind):
    log = traceable_log(seed)
    positions = some_positions(log, kind)
    for draw in range(5):
        targets = [target for _, target, _ in learned(cut(log, positions, seed=draw))]
        assert sorted(targets) == positions.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_target_is_predicted_from_the_real_history_ending_at_its_newest_strictly_older_token(seed, kind):
    log = traceable_log(seed)
    events = events_of(log)
    for user, target, seen in learned(cut(log, some_positions(log, kind))):
        real = [token for token in seen if token != PAD]
        assert user == events[target].user
        assert seen == [PAD] * (len(seen) - len(real)) + real
        assert real == history_tokens(events, target)[-len(real) :]
        assert real  # the source itself is never an empty place


@pytest.mark.parametrize("seed", range(4))
def test_everything_up_to_a_source_is_strictly_older_than_its_target(seed):
    log = traceable_log(seed)
    times = log.times.tolist()
    for _, target, seen in learned(cut(log, np.arange(len(log)))):
        assert all(times[token] < times[target] for token in seen if token >= 0)


@pytest.mark.parametrize("seed", range(4))
def test_without_ties_and_gaps_a_target_reads_its_whole_history_or_more_than_length_minus_stride_tokens(seed):
    rows = [(event.user, position, position) for position, event in enumerate(events_of(random_log(seed)))]
    log = log_of(rows)
    events = events_of(log)
    for _, target, seen in learned(cut(log, some_positions(log, "the later half"))):
        n_read = sum(token != PAD for token in seen)
        assert n_read > min(LENGTH - STRIDE, len(history_tokens(events, target)) - 1)


@pytest.mark.parametrize(("length", "stride"), [(1, 1), (3, 5), (8, 1), (8, 8), (50, 25)])
def test_any_length_and_stride_cover_all_targets_with_windows_of_that_size(length, stride):
    log = traceable_log(9)
    windows = cut(log, np.arange(len(log)), length=length, stride=stride)
    assert windows.tokens.shape[1] == length
    assert int((windows.targets != NO_TARGET).sum(1).max()) <= stride
    assert int((windows.targets != NO_TARGET).sum(1).min()) >= 1
    assert sorted(target for _, target, _ in learned(windows)) == list(range(len(log)))


@pytest.mark.parametrize("kind", KINDS)
def test_newest_is_the_position_of_each_windows_newest_target(kind):
    log = traceable_log(2)
    windows = cut(log, some_positions(log, kind))
    assert windows.newest.tolist() == windows.targets.max(1).values.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_with_repeated_items_the_targets_are_those_of_the_positions_with_their_counts(seed):
    log = random_log(seed)
    events = events_of(log)
    positions = some_positions(log, "with gaps")
    found = Counter((user, target) for user, target, _ in learned(cut(log, positions)))
    assert found == Counter((events[p].user, events[p].item) for p in positions)


def test_a_crowded_instant_is_learned_from_what_came_before_it_alone():
    # Events 1..14 happen at once: none may be a token of another's history, whatever the window holds.
    rows = [("ann", "first", 0), *(("ann", f"at-once-{n}", 10) for n in range(BURST)), ("ann", "last", 20)]
    for seed in range(10):
        by_target = {t: seen for _, t, seen in learned(cut(log_of(rows), np.arange(BURST + 2), seed=seed, length=4))}
        assert [token for token in by_target[0] if token != PAD] == [BOS]
        for target in range(1, BURST + 1):
            assert [token for token in by_target[target] if token != PAD] == [BOS, 0]
        assert by_target[BURST + 1] == [BURST - 3, BURST - 2, BURST - 1, BURST]


def test_the_cutting_places_differ_between_draws_and_repeat_with_the_same_one():
    log = traceable_log(0)
    one, other, again = (cut(log, np.arange(len(log)), seed=seed) for seed in (0, 1, 0))
    assert {tuple(row) for row in one.targets.tolist()} != {tuple(row) for row in other.targets.tolist()}
    assert all(torch.equal(getattr(one, name), getattr(again, name)) for name in COLUMNS)


def test_no_targets_give_no_windows_and_no_batches():
    windows = cut(random_log(0), np.arange(0))
    assert (len(windows), tuple(windows.tokens.shape)) == (0, (0, LENGTH))
    assert list(batches(windows, 4, torch.Generator().manual_seed(0))) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_each_window_taken_alone_keeps_all_its_targets(seed, kind):
    log = traceable_log(seed)
    windows = cut(log, some_positions(log, kind))
    for w in range(len(windows)):
        whole = Windows(*(getattr(windows, name)[w : w + 1] for name in COLUMNS))
        alone = take(windows, torch.tensor([w]))
        assert learned(alone) == learned(whole)
        assert torch.equal(alone.newest, whole.newest)


def test_taking_no_window_gives_none():
    windows = take(cut(random_log(0), np.arange(60)), torch.zeros(0, dtype=torch.int64))
    assert (len(windows), windows.tokens.shape[1]) == (0, LENGTH)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_batches_of_a_pass_hold_every_window_once_in_the_drawn_order(size):
    log = traceable_log(3)
    windows = cut(log, some_positions(log, "with gaps"))
    parts = list(batches(windows, size, torch.Generator().manual_seed(4)))
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(4))
    assert sorted(order.tolist()) == list(range(len(windows)))
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert 1 <= len(parts[-1]) <= size
    assert [entry for part in parts for entry in learned(part)] == learned(take(windows, order))
    assert sorted(learned(take(windows, order))) == sorted(learned(windows))


def test_batches_come_in_another_order_from_another_generator():
    windows = cut(traceable_log(3), np.arange(240))
    one, other = (next(batches(windows, 1000, torch.Generator().manual_seed(seed))) for seed in (0, 1))
    assert one.newest.tolist() != other.newest.tolist()


def test_concatenated_windows_follow_each_other_unchanged():
    log = traceable_log(1)
    narrow = cut(log, np.arange(0, 240, 60), stride=1)
    wide = cut(log, np.arange(100, 240), stride=5)
    joined = concatenate([narrow, wide])
    assert learned(joined) == learned(narrow) + learned(wide)
    assert joined.newest.tolist() == narrow.newest.tolist() + wide.newest.tolist()


def test_windows_keep_their_content_when_they_move():
    windows = cut(random_log(2), np.arange(240))
    assert all(getattr(moved(windows, "meta"), name).device.type == "meta" for name in COLUMNS)
    assert all(torch.equal(getattr(moved(windows, "cpu"), name), getattr(windows, name)) for name in COLUMNS)


@pytest.mark.parametrize("n", [0, 1, 6, 240])
def test_trimmed_windows_lose_only_columns_that_pad_in_every_row(n):
    log = traceable_log(4)
    windows = cut(log, np.arange(n), length=20)
    short = trimmed(windows)
    lost = 20 - short.tokens.shape[1]
    assert torch.equal(short.tokens, windows.tokens[:, lost:])
    assert bool((windows.tokens[:, :lost] == PAD).all())
    assert not n or bool((short.tokens[:, 0] != PAD).any())
    read = [(user, target, [t for t in seen if t != PAD]) for user, target, seen in learned(windows)]
    assert [(user, target, [t for t in seen if t != PAD]) for user, target, seen in learned(short)] == read
    assert bool((short.sources >= 0).all())
