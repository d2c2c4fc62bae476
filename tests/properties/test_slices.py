"""What must hold of slices, histories, windows and candidates for any log."""

from collections import Counter
from itertools import accumulate, pairwise

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from protofed.config import StreamConfig
from protofed.data.interactions import InteractionLog, from_columns
from protofed.errors import DataError
from protofed.slices.candidates import NO_CANDIDATE, query_key, sample_negatives
from protofed.slices.histories import BOS, PAD, histories, past_counts, queries_at
from protofed.slices.leaks import check_candidates
from protofed.slices.partition import PARTS, partition
from protofed.slices.stream import SliceStream
from protofed.slices.windows import NO_TARGET, batches, take, training_windows

seeds = st.integers(0, 2**32 - 1)
quick = settings(deadline=None, max_examples=40)


def rows(least: int = 1, most: int = 50) -> st.SearchStrategy[list[tuple[int, int, int]]]:
    """User, item and seconds since the previous event; 0 is the likeliest, so instants are crowded."""
    row = st.tuples(st.integers(0, 5), st.integers(0, 12), st.sampled_from([0, 0, 0, 1, 1, 7]))
    return st.lists(row, min_size=least, max_size=most)


def log_of(rows: list[tuple[int, int, int]]) -> InteractionLog:
    users, items, gaps = zip(*rows, strict=True)
    return from_columns("any", users, items, list(accumulate(gaps)))


def columns_of(log: InteractionLog) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return log.users.numpy(), log.items.numpy(), log.times.numpy()


def history(log: InteractionLog, position: int) -> list[int]:
    users, items, times = (column.tolist() for column in (log.users, log.items, log.times))
    return [i for u, i, t in zip(users, items, times, strict=True) if u == users[position] and t < times[position]]


@quick
@given(
    rows(),
    st.integers(1, 6),
    st.sampled_from(["count", "duration"]),
    st.sampled_from(["block", "slice-1"]),
    st.floats(0.01, 0.99),
)
def test_a_log_is_cut_between_instants_into_all_its_events_or_refused(drawn, n_slices, edges, base, fraction):
    log = log_of(drawn)
    assume(base == "block" or n_slices > 1)
    n_wanted = n_slices + (base == "block")
    try:
        bounds = partition(log, n_slices=n_slices, edges=edges, base=base, base_fraction=fraction)
    except DataError:
        assert log.n_instants < 3 * n_wanted
        return
    times = log.times.tolist()
    parts = [times[slice(*b.part(name))] for b in bounds for name in PARTS]
    assert len(bounds) == n_wanted
    assert [time for part in parts for time in part] == times
    assert all(parts)
    assert all(left[-1] < right[0] for left, right in pairwise(parts))


@quick
@given(rows(), st.integers(1, 9))
def test_a_question_shows_the_last_tokens_of_its_strictly_earlier_events(drawn, length):
    log = log_of(drawn)
    past = histories(*columns_of(log), log.n_users)
    positions = np.arange(len(log))
    queries = queries_at(past, positions, length=length, slice_index=0, n_items=log.n_items, times=log.times.numpy())
    for position in range(len(log)):
        own = history(log, position)
        assert queries.tokens[position].tolist() == ([PAD] * length + [BOS, *own])[-length:]
        assert queries.past_items[queries.offsets[position] : queries.offsets[position + 1]].tolist() == own
    assert past_counts(queries).sum(1).tolist() == past.before.tolist()


@quick
@given(rows(), st.integers(1, 9), st.integers(1, 9), seeds)
def test_each_target_is_learned_once_from_a_suffix_of_its_history(drawn, length, stride, seed):
    log = log_of([(user, position, gap) for position, (user, _, gap) in enumerate(drawn)])  # an item is its position
    rng = np.random.default_rng(seed)
    positions = np.flatnonzero(rng.random(len(log)) < 0.7)
    past = histories(*columns_of(log), log.n_users)
    windows = training_windows(past, positions, length=length, stride=stride, rng=rng)
    assert sorted(windows.targets[windows.targets != NO_TARGET].tolist()) == positions.tolist()
    for tokens, sources, targets in zip(windows.tokens.tolist(), windows.sources, windows.targets, strict=True):
        assert 1 <= int((targets != NO_TARGET).sum()) <= stride
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            if target != NO_TARGET:
                whole = [PAD] * length + [BOS, *history(log, target)]
                assert tokens[: source + 1] == whole[-source - 1 :]
                assert tokens[source] != PAD


@quick
@given(rows(), st.integers(1, 6), st.integers(1, 5), st.integers(1, 7), seeds)
def test_batches_hold_each_target_of_the_windows_once(drawn, length, stride, size, seed):
    log = log_of(drawn)
    past = histories(*columns_of(log), log.n_users)
    positions = np.arange(0, len(log), 2)
    windows = training_windows(past, positions, length=length, stride=stride, rng=np.random.default_rng(seed))
    parts = list(batches(windows, size, torch.Generator().manual_seed(seed)))
    assert Counter(position for part in parts for position in part.newest.tolist()) == Counter(windows.newest.tolist())
    learned = Counter(target for part in parts for target in part.targets.ravel().tolist() if target != NO_TARGET)
    assert learned == Counter(log.items[positions].tolist())
    alone = [take(windows, torch.tensor([w])) for w in range(len(windows))]
    assert sum(int((one.targets != NO_TARGET).sum()) for one in alone) == len(positions)


@quick
@given(st.integers(1, 40), st.integers(1, 15), st.sets(st.integers(0, 39)), seeds)
def test_negatives_are_as_many_distinct_allowed_items_as_there_are_places(n_available, n, forbidden, seed):
    user = seed % 3
    banned = {item for item in forbidden if item < n_available}
    codes = np.array(sorted(user * n_available + item for item in banned), dtype=np.int64)
    keys = [query_key("any", 1, seed, row, row) for row in range(3)]
    for row in sample_negatives(keys, n_available, np.full(3, user), codes, n).tolist():
        real = [item for item in row if item != NO_CANDIDATE]
        assert len(real) == len(set(real)) == min(n, n_available - len(banned))
        assert set(real) <= set(range(n_available)) - banned
        assert row[: len(real)] == real


@quick
@given(rows(least=30), st.integers(1, 3), st.integers(1, 12))
def test_every_subset_is_split_from_its_opposite_and_candidates_pass_the_leak_checker(drawn, n_slices, n_negatives):
    log = log_of(drawn)
    assume(log.n_instants >= 3 * (n_slices + 1))
    stream = SliceStream(log, StreamConfig(n_slices=n_slices, n_negatives=n_negatives))
    for index in range(n_slices + 1):
        for part in ("val", "test"):
            asked = stream.query_set(index, part)
            check_candidates(stream, asked)
            flags = asked.subsets
            for one, opposite in (("repeat", "novel"), ("new_item", "known_item"), ("new_user", "returning")):
                assert np.array_equal(flags[one], ~flags[opposite])
            repeats = [int(asked.positives[row]) in history(log, p) for row, p in enumerate(asked.positions)]
            assert flags["repeat"].tolist() == repeats
            assert not (flags["empty_history"] & flags["repeat"]).any()
            assert not (flags["unseen_item"] & ~flags["new_item"]).any()


@quick
@given(rows(least=30), st.integers(0, 2), seeds)
def test_a_slice_knows_nothing_of_what_follows_its_validation_part(drawn, index, seed):
    log = log_of(drawn)
    assume(log.n_instants >= 9)
    config, rng = StreamConfig(n_slices=2, n_negatives=4), np.random.default_rng(seed)
    end = SliceStream(log, config).bounds[index].val_end
    future = [(int(rng.integers(20)), int(rng.integers(40)), gap) for _, _, gap in drawn[end:]]
    one, other = (SliceStream(log_of(each), config).slice_(index) for each in (drawn, drawn[:end] + future))
    assert one.bounds == other.bounds
    assert (one.n_train_items, one.validation.n_items) == (other.n_train_items, other.validation.n_items)
    for column in ("start", "items", "times", "users", "place", "before"):
        assert np.array_equal(getattr(one.past, column), getattr(other.past, column))
    for column in ("positives", "users", "negatives", "hard"):
        assert torch.equal(getattr(one.validation, column), getattr(other.validation, column))
    for name, flags in one.validation.subsets.items():
        assert np.array_equal(flags, other.validation.subsets[name])
    assert torch.equal(one.train_counts(), other.train_counts())
