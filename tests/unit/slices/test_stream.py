"""The stream shows each slice exactly what it may know, and flags each query as its definition says."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from small_logs import earlier_events, events_of, log_of, random_log, rows_of

from protofed.config import StreamConfig
from protofed.data.interactions import InteractionLog, renamed
from protofed.slices.candidates import NO_CANDIDATE, query_key, sample_negatives
from protofed.slices.histories import BOS, PAD
from protofed.slices.stream import SUBSETS, QuerySet, SliceStream

CONFIG = StreamConfig(n_slices=3, n_negatives=6)
SHARED = Path(__file__).parents[4] / "shared" / "data"
PLACES = [(index, part) for index in range(4) for part in ("val", "test")]


def flags_by_hand(stream: SliceStream, slice_index: int, position: int) -> dict[str, bool]:
    events, bounds = events_of(stream.log), stream.bounds[slice_index]
    asked = events[position]
    history = earlier_events(events, position, row_order=stream.config.row_order_history)
    repeat = asked.item in {event.item for event in history}
    new_item = asked.item not in {event.item for event in events[: bounds.start]}
    new_user = asked.user not in {event.user for event in events[: bounds.start]}
    return {
        "all": True,
        "repeat": repeat,
        "novel": not repeat,
        "new_item": new_item,
        "known_item": not new_item,
        "new_user": new_user,
        "returning": not new_user,
        "empty_history": not history,
        "unseen_item": asked.item not in {event.item for event in events[: bounds.train_end]},
    }


def same(one: object, other: object) -> bool:
    """Whether two values of the stream hold the same bits, all the way down."""
    if type(one) is not type(other):
        return False
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def with_another_future(log: InteractionLog, position: int, seed: int) -> InteractionLog:
    """The same log up to this position; the same instants after it, with other users and items, mostly strangers."""
    rng = np.random.default_rng(seed)
    kept, lost = rows_of(log)[:position], rows_of(log)[position:]
    strangers = [(f"later-{rng.integers(30)}", f"later-{rng.integers(90)}", time) for _, _, time in lost]
    known = [(kept[rng.integers(position)][0], kept[rng.integers(position)][1], time) for _, _, time in lost]
    return log_of([*kept, *(strangers[k] if rng.random() < 0.6 else known[k] for k in range(len(lost)))], log.name)


@pytest.mark.parametrize("row_order", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_query_carries_the_flags_of_its_definition(seed, row_order):
    stream = SliceStream(random_log(seed), dataclasses.replace(CONFIG, row_order_history=row_order))
    for index, part in PLACES:
        asked = stream.query_set(index, part)
        assert tuple(asked.subsets) == SUBSETS
        for row, position in enumerate(asked.positions.tolist()):
            assert {name: bool(asked.subsets[name][row]) for name in SUBSETS} == flags_by_hand(stream, index, position)


def test_the_random_logs_of_these_tests_put_queries_into_every_subset():
    counts = dict.fromkeys(SUBSETS, 0)
    for seed in range(3):
        stream = SliceStream(random_log(seed), CONFIG)
        for index, part in PLACES:
            for name, flags in stream.query_set(index, part).subsets.items():
                counts[name] += int(flags.sum())
    assert min(counts.values()) >= 3


@pytest.mark.parametrize("seed", range(3))
def test_a_query_set_asks_for_every_event_of_its_part(seed):
    stream = SliceStream(random_log(seed), CONFIG)
    events = events_of(stream.log)
    for index, part in PLACES:
        asked = stream.query_set(index, part)
        start, end = stream.bounds[index].part(part)
        assert asked.positions.tolist() == list(range(start, end))
        assert asked.positives.tolist() == [event.item for event in events[start:end]]
        assert asked.users.tolist() == [event.user for event in events[start:end]]
        assert asked.n_items == len({event.item for event in events[:end]})
        assert (len(asked), asked.slice_index, asked.part) == (end - start, index, part)
        assert stream.query_set(index, part) is asked


@pytest.mark.parametrize("seed", range(3))
def test_negatives_are_distinct_available_and_never_met_by_the_user_up_to_the_parts_end(seed):
    stream = SliceStream(random_log(seed), CONFIG)
    events = events_of(stream.log)
    for index, part in PLACES:
        asked, end = stream.query_set(index, part), stream.bounds[index].part(part)[1]
        seen = {event.item for event in events[:end]}
        for user, positive, row in zip(
            asked.users.tolist(), asked.positives.tolist(), asked.negatives.tolist(), strict=True
        ):
            allowed = seen - {event.item for event in events[:end] if event.user == user}
            real = [item for item in row if item != NO_CANDIDATE]
            assert len(set(real)) == len(real) == min(6, len(allowed))
            assert set(real) <= allowed
            assert positive not in real


@pytest.mark.parametrize("seed", range(3))
def test_hard_negatives_of_repeats_are_own_past_items_then_the_sampled_ones(seed):
    stream = SliceStream(random_log(seed), CONFIG)
    events = events_of(stream.log)
    n_checked = 0
    for index, part in PLACES:
        asked = stream.query_set(index, part)
        for row, position in enumerate(asked.positions.tolist()):
            hard, positive = asked.hard[row].tolist(), int(asked.positives[row])
            if not asked.subsets["repeat"][row]:
                assert hard == [NO_CANDIDATE] * 6
                continue
            own = {event.item for event in earlier_events(events, position)} - {positive}
            n_own = min(3, len(own))
            assert len(set(hard[:n_own])) == n_own
            assert set(hard[:n_own]) <= own
            assert hard[n_own:] == asked.negatives[row, : 6 - n_own].tolist()
            assert positive not in hard
            n_checked += 1
    assert n_checked > 10


@pytest.mark.parametrize("seed", range(3))
def test_candidates_are_drawn_from_the_original_identifiers_of_the_query(seed):
    stream = SliceStream(random_log(seed), CONFIG)
    rows = rows_of(stream.log)
    asked, end = stream.query_set(2, "test"), stream.bounds[2].end
    keys = [query_key("toy", 2, *rows[position]) for position in asked.positions]
    met = np.unique(stream.log.users[:end].long() * asked.n_items + stream.log.items[:end])
    by_hand = sample_negatives(keys, asked.n_items, asked.users.numpy(), met, 6)
    assert asked.negatives.tolist() == by_hand.tolist()


def test_candidates_do_not_depend_on_any_seed():
    sets = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        random.seed(seed)
        sets.append(SliceStream(random_log(4), CONFIG).query_set(1, "test"))
    assert same(*sets)


def test_renumbering_the_users_leaves_candidates_alone():
    log = random_log(5)
    rows = rows_of(log)
    # The first event goes to a stranger who is then user 0, and everybody else's number moves.
    shifted = log_of([("stranger", rows[0][1], rows[0][2]), *rows[1:]])
    first = rows[0][0]
    assert shifted.user_ids.to_pylist().index("user-1") != log.user_ids.to_pylist().index("user-1")
    for index, part in PLACES:
        one, other = (SliceStream(each, CONFIG).query_set(index, part) for each in (log, shifted))
        untouched = [row for row, position in enumerate(one.positions) if rows[position][0] != first]
        assert untouched
        assert one.negatives[untouched].tolist() == other.negatives[untouched].tolist()


def test_identifiers_of_another_type_draw_the_same_candidates():
    rows = [(user, item, time) for user, item, time in events_of(random_log(6))]
    numbers, texts = log_of(rows), log_of([(str(user), str(item), time) for user, item, time in rows])
    assert same(*(SliceStream(log, CONFIG).query_set(1, "test") for log in (numbers, texts)))


def test_another_data_set_name_draws_other_candidates_for_the_same_events():
    log = random_log(7)
    one, other = (SliceStream(each, CONFIG).query_set(3, "test") for each in (log, renamed(log, "other")))
    assert one.positives.tolist() == other.positives.tolist()
    assert one.negatives.tolist() != other.negatives.tolist()


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("seed", range(3))
def test_a_slice_is_bit_identical_whatever_happens_after_its_validation_part(seed, index):
    log = random_log(seed)
    stream = SliceStream(log, CONFIG)
    end = stream.bounds[index].val_end
    other = SliceStream(with_another_future(log, end, seed), CONFIG)
    assert other.log.users.tolist()[end:] != log.users.tolist()[end:]
    one, two = stream.slice_(index), other.slice_(index)
    assert same(one, two)
    assert torch.equal(one.train_counts(), two.train_counts())
    everything = np.arange(len(one.validation))
    assert same(one.queries(everything, 9), two.queries(everything, 9))
    for earlier in range(index):
        assert same(stream.query_set(earlier, "test"), other.query_set(earlier, "test"))


@pytest.mark.parametrize("index", range(4))
def test_test_questions_are_bit_identical_whatever_happens_after_their_slice(index):
    log = random_log(8)
    stream = SliceStream(log, CONFIG)
    other = SliceStream(with_another_future(log, stream.bounds[index].end, 8), CONFIG)
    one, two = stream.query_set(index, "test"), other.query_set(index, "test")
    assert same(one, two)
    everything = np.arange(len(one))
    assert same(stream.queries(one, everything, 9), other.queries(two, everything, 9))


@pytest.mark.parametrize("seed", range(3))
def test_item_counts_are_those_of_the_events_up_to_each_cut(seed):
    stream = SliceStream(random_log(seed), CONFIG)
    items = stream.log.items.tolist()
    assert stream.items_until.tolist() == [len(set(items[:position])) for position in range(len(items) + 1)]
    for index, bounds in enumerate(stream.bounds):
        assert stream.n_available(index) == len(set(items[: bounds.end]))
        assert stream.n_train_items(index) == len(set(items[: bounds.train_end]))


@pytest.mark.parametrize("seed", range(3))
def test_a_slice_learns_from_its_train_part_and_counts_it(seed):
    stream = SliceStream(random_log(seed), CONFIG)
    items = stream.log.items.tolist()
    for index, bounds in enumerate(stream.bounds):
        slice_ = stream.slice_(index)
        train = range(bounds.start, bounds.train_end)
        assert slice_.train_positions.tolist() == list(train)
        assert slice_.all_train_positions.tolist() == [
            p for b in stream.bounds[: index + 1] for p in range(*b.part("train"))
        ]
        assert slice_.n_train_items == stream.n_train_items(index)
        counted = [sum(items[p] == item for p in train) for item in range(slice_.n_train_items)]
        assert slice_.train_counts().tolist() == counted
        assert (len(slice_.past), len(slice_.times)) == (bounds.val_end, bounds.val_end)
        assert slice_.past.n_users == len(set(stream.log.users[: bounds.val_end].tolist()))


@pytest.mark.parametrize("row_order", [False, True])
def test_questions_show_the_users_own_past_and_no_label(row_order):
    stream = SliceStream(random_log(9), dataclasses.replace(CONFIG, row_order_history=row_order))
    events = events_of(stream.log)
    for index, part in PLACES:
        asked = stream.query_set(index, part)
        chunk = np.arange(len(asked))[::2]
        shown = [stream.queries(asked, chunk, 5)]
        shown += [stream.slice_(index).queries(chunk, 5)] if part == "val" else []
        for queries in shown:
            assert (queries.n_items, queries.slice_index) == (asked.n_items, index)
            for row, position in enumerate(asked.positions[chunk].tolist()):
                past = [e.item for e in earlier_events(events, position, row_order=row_order)]
                assert queries.tokens[row].tolist() == ([PAD] * 5 + [BOS, *past])[-5:]
                assert queries.past_items[queries.offsets[row] : queries.offsets[row + 1]].tolist() == past


def test_a_hand_made_slice_is_flagged_as_one_reads_it():
    # Base: 0..5; slice 1: train 6..13, validation 14, test 15.. (three events at one instant).
    rows = [
        ("ann", "tea", 0),
        ("bob", "rye", 1),
        ("ann", "rye", 2),
        ("bob", "tea", 3),
        ("ann", "jam", 4),
        ("bob", "jam", 5),
    ]
    rows += [("ann", "tea", 6 + n) for n in range(8)] + [("bob", "fig", 14)]
    rows += [("ann", "fig", 15), ("ann", "nut", 15), ("cat", "tea", 15)]
    stream = SliceStream(log_of(rows), StreamConfig(n_slices=1, base_fraction=1 / 3, n_negatives=2))
    assert stream.bounds[1].part("test") == (15, 18)
    asked = stream.query_set(1, "test")
    flagged = {name: np.flatnonzero(flags).tolist() for name, flags in asked.subsets.items()}
    assert flagged == {
        "all": [0, 1, 2],
        "repeat": [],
        "novel": [0, 1, 2],
        "new_item": [0, 1],
        "known_item": [2],
        "new_user": [2],
        "returning": [0, 1],
        "empty_history": [2],
        "unseen_item": [0, 1],
    }
    # Ann has met everything, the events of her own query's instant included; cat has met tea alone.
    assert asked.negatives[:2].tolist() == [[NO_CANDIDATE] * 2] * 2
    assert set(asked.negatives[2].tolist()) <= {1, 2, 3, 4}


def test_the_default_stream_has_eight_slices_after_the_base_block():
    stream = SliceStream(random_log(0, n=400, n_instants=200))
    assert (stream.n_slices, len(stream.bounds), stream.config) == (8, 9, StreamConfig())


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real logs of ../shared/data")
def test_gowalla_has_full_candidate_sets_and_the_known_shares_of_repeats():
    from protofed.data.prepared import load_log

    stream = SliceStream(load_log("gowalla_1k", SHARED))
    sets: list[QuerySet] = [stream.query_set(index, "test") for index in range(1, 9)]
    assert [len(asked) for asked in sets] == [769] * 8
    for asked in sets:
        assert 0.39 <= asked.subsets["repeat"].mean() <= 0.60
        assert asked.negatives.shape[1] == 99
        assert int(asked.negatives.min()) >= 0
        assert int(asked.hard[torch.from_numpy(asked.subsets["repeat"])].min()) >= 0
        assert all(len(set(row)) == 99 for row in asked.negatives.tolist())
