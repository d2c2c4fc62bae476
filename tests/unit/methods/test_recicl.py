"""RecICL: demonstrations by hand, nothing in them of the answer or later, and weights that never move again."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, Tensor
from worlds import LENGTH, questions, random_model, shuffled_after, tiny_config, tiny_log, tiny_stream, warmed_up

from protofed.backbone.training import PlainDescent
from protofed.methods.baselines.demonstrations import Demonstrations, Format, demonstrations
from protofed.methods.baselines.recicl import InContext, RecICL, RecICLState
from protofed.methods.protocol import World
from protofed.slices.histories import BOS, PAD, histories, leading_padding, queries_at
from protofed.slices.stream import SliceStream
from protofed.snapshot import restore, take_snapshot

FORM = Format(count=2, span=3, pool=50, key=(1, 2))


@cache
def world() -> World:
    return World(tiny_config(), tiny_stream().slice_(0), warmed_up()[0])


@cache
def after(slices: int) -> tuple[RecICLState, Any]:
    method = RecICL(epochs=2)
    if not slices:
        return method.start(world()), {}
    return method.learn(world(), after(slices - 1)[0], tiny_stream().slice_(slices), PlainDescent())


def of(*tokens: int, form: Format = FORM) -> Demonstrations:
    return demonstrations(torch.tensor([tokens]), form)


def in_context(form: Format = FORM, **backbone: Any) -> InContext:
    rng = Generator().manual_seed(3)
    return InContext(
        random_model(50, **backbone), form, torch.randn(6, 8, generator=rng), torch.randn(form.count, 8, generator=rng)
    )


def test_the_layout_of_a_small_log_by_hand():
    """User 0 meets 10, 11, 12, 13 at times 1 to 4, user 1 meets 20 at time 2; user 0 asks before its last event."""
    users, items, times = np.array([0, 0, 1, 0, 0]), np.array([10, 11, 20, 12, 13]), np.array([1, 2, 2, 3, 4])
    past = histories(users, items, times, 2)
    asked = queries_at(past, np.array([4, 1, 0, 2]), length=6, slice_index=0, n_items=21, times=times)
    shown = demonstrations(asked.tokens, FORM)
    assert shown.items.tolist() == [[11, 12], [BOS, 10], [PAD, BOS], [PAD, BOS]]
    assert shown.shown.tolist() == [[True, True], [False, True], [False, False], [False, False]]
    assert shown.before[0].tolist() == [[PAD, BOS, 10], [BOS, 10, 11]]
    assert shown.before[1, 1].tolist() == [PAD, PAD, BOS]


def test_long_histories_give_their_newest_events_the_newest_last():
    shown = of(BOS, 1, 2, 3, 4, 5, 6, 7)
    assert shown.items.tolist() == [[6, 7]]
    assert shown.before.tolist() == [[[3, 4, 5], [4, 5, 6]]]


def test_a_user_with_one_event_has_one_demonstration_and_one_without_any_has_none():
    assert of(BOS, 5).shown.tolist() == [[False, True]]
    assert of(BOS, 5).negative_shown.tolist() == [[False, True]]
    assert not of(BOS).shown.any()
    assert not of(BOS).negative_shown.any()


def test_an_event_at_the_instant_of_the_query_is_in_no_demonstration():
    users, items, times = np.zeros(4, dtype=np.int64), np.array([10, 11, 12, 13]), np.array([1, 2, 3, 3])
    asked = queries_at(
        histories(users, items, times, 1), np.array([2, 3]), length=6, slice_index=0, n_items=14, times=times
    )
    for row in demonstrations(asked.tokens, FORM).items.tolist():
        assert row == [10, 11]


def test_demonstrations_do_not_depend_on_the_answer_or_on_anything_at_or_after_it():
    """The same log with other users and items from the query's position on: the query shows the same."""
    data = tiny_stream()
    for position in np.linspace(500, len(data.log) - 1, 7).astype(int):
        changed = SliceStream(shuffled_after(tiny_log(), int(position)), tiny_config().stream)
        user = int(data.past.users[position])
        log = [
            demonstrations(_tokens_before(stream, user, int(data.log.times[position])), FORM)
            for stream in (data, changed)
        ]
        assert all(torch.equal(getattr(log[0], name), getattr(log[1], name)) for name in Demonstrations.__slots__)


def _tokens_before(data: SliceStream, user: int, time: int) -> Tensor:
    """The user's last tokens strictly before a time, read off the log with a loop."""
    rows = zip(data.log.users.tolist(), data.log.items.tolist(), data.log.times.tolist(), strict=True)
    items = [BOS, *(item for who, item, when in rows if who == user and when < time)]
    return torch.tensor([([PAD] * LENGTH + items)[-LENGTH:]])


def test_a_query_of_the_stream_shows_only_events_strictly_older_than_itself():
    data = tiny_stream()
    asked, queries = questions(1, "test")
    shown = demonstrations(queries.tokens, FORM)
    for row in range(0, len(asked), 7):
        expected = demonstrations(_tokens_before(data, int(queries.users[row]), int(queries.times[row])), FORM)
        assert torch.equal(shown.items[row], expected.items[0])
        assert torch.equal(shown.before[row], expected.before[0])


@given(st.lists(st.integers(0, 49), min_size=1, max_size=12), st.integers(0, 2**31))
def test_a_negative_is_an_item_of_the_pool_that_the_user_has_not_met(items, key):
    shown = of(BOS, *items, form=replace(FORM, key=(key, 5)))
    for negative, there in zip(shown.negatives[0].tolist(), shown.negative_shown[0].tolist(), strict=True):
        assert not there or (0 <= negative < 50 and negative not in items)


def test_a_user_who_has_met_the_whole_pool_is_shown_no_negative():
    shown = of(BOS, 0, 1, 2, form=replace(FORM, pool=3))
    assert shown.shown.all()
    assert not shown.negative_shown.any()


def test_negatives_are_spread_over_the_pool_and_follow_the_key():
    tokens = torch.randint(1_000, (4_000, 6), generator=Generator().manual_seed(0))
    drawn = demonstrations(tokens, replace(FORM, pool=20)).negatives.flatten()
    counts = torch.bincount(drawn, minlength=20)
    assert len(counts) == 20
    assert (counts - 400).abs().max() < 5 * math.sqrt(400)
    assert not torch.equal(drawn, demonstrations(tokens, replace(FORM, pool=20, key=(9, 9))).negatives.flatten())


def test_the_input_vectors_of_a_demonstration_by_hand():
    model = in_context()
    found = model.demonstration_inputs(of(BOS, 1, 2), model.embed)[0].view(2, 6, 8)
    negatives = of(BOS, 1, 2).negatives[0]
    rows, root = model.items, math.sqrt(8)
    for age, (summary, item) in enumerate([(model.bos, 1), (rows[1], 2)]):
        expected = [summary, rows[item], 0 * summary, summary, rows[negatives[age]], 0 * summary]
        for kind, vector in enumerate(expected):
            assert torch.allclose(found[age, kind], vector * root + model.kinds[kind] + model.ages[age], atol=1e-5)


def test_a_summary_is_the_mean_of_the_items_before_the_event():
    model = in_context()
    found = model.demonstration_inputs(of(BOS, 1, 2, 3, 4), model.embed)[0].view(2, 6, 8)
    mean = model.items[[1, 2, 3]].mean(0) * math.sqrt(8)
    assert torch.allclose(found[1, 0], mean + model.kinds[0] + model.ages[1], atol=1e-5)
    assert torch.allclose(found[1, 3], mean + model.kinds[3] + model.ages[1], atol=1e-5)


def test_a_user_without_events_is_read_by_the_bare_backbone():
    model = in_context()
    tokens = torch.tensor([[PAD, PAD, BOS]])
    assert torch.allclose(model.last_hidden(tokens), random_model(50).last_hidden(tokens), atol=1e-5)


def test_demonstrations_that_are_not_there_are_seen_by_nobody():
    """With one event, the vectors of the older demonstration could be anything."""
    model, other = in_context(), in_context()
    with torch.no_grad():
        other.ages[0] *= -5.0
    tokens = torch.tensor([[BOS, 5]])
    assert torch.allclose(model.last_hidden(tokens), other.last_hidden(tokens), atol=1e-5)
    two = torch.tensor([[BOS, 4, 5]])
    assert not torch.allclose(model.last_hidden(two), other.last_hidden(two), atol=1e-2)


def test_labels_and_negatives_reach_the_answer():
    tokens = torch.tensor([[BOS, 4, 5, 6]])
    plain = in_context().last_hidden(tokens)
    for place in (2, 4, 5):  # "met", the item not met, "not met"
        model = in_context()
        with torch.no_grad():
            model.kinds[place] *= -3.0
        assert not torch.allclose(model.last_hidden(tokens), plain, atol=1e-3)


def test_padding_in_front_changes_nothing():
    model = in_context(history_length=12)
    long = torch.tensor([[PAD] * 8 + [BOS, 3, 7]])
    assert torch.allclose(model.last_hidden(long[:, leading_padding(long) :]), model.last_hidden(long), atol=1e-5)


def test_training_reads_a_target_as_serving_does():
    model = RecICL()._model(world(), after(0)[0])
    _, queries = questions(0, "val")
    assert torch.allclose(model.hidden(queries.tokens)[:, -1], model.last_hidden(queries.tokens), atol=1e-5)


def test_the_base_block_teaches_the_format():
    state = after(0)[0]
    drawn = RecICL()._drawn(world())
    assert not torch.equal(state.kinds, drawn[0])
    assert not torch.equal(state.ages, drawn[1])
    assert not torch.equal(state.backbone.items, world().backbone.items)
    assert float(state.trace.max()) > float(state.trace[0])


def test_later_slices_move_no_weight_and_only_add_rows():
    first, last = after(0)[0], after(2)[0]
    old, new = first.backbone.state_dict(), last.backbone.state_dict()
    n = len(old["items"])
    assert torch.equal(new["items"][:n], old["items"])
    assert new["has_row"][n:].any()
    assert all(torch.equal(new[key], old[key]) for key in old if key not in ("items", "has_row", "mean_row"))
    assert torch.equal(last.kinds, first.kinds)
    assert torch.equal(last.ages, first.ages)


@pytest.mark.parametrize("tested", [0, 1])
def test_scores_of_known_items_are_the_same_bits_after_every_later_slice(tested):
    """AF = BWT = 0 by construction, for histories and candidates whose items have rows when the slice is learned."""
    _, queries = questions(tested)
    then, scores = after(tested)[0], [RecICL().score(world(), after(t)[0], queries) for t in range(tested, 3)]
    rows = then.backbone.knows(queries.tokens) | (queries.tokens < 0)
    known = then.backbone.knows(torch.arange(queries.n_items))
    assert rows.all(1).sum() > 50
    for later in scores[1:]:
        assert torch.equal(later[rows.all(1)][:, known], scores[0][rows.all(1)][:, known])


def test_the_log_says_that_nothing_was_learned_and_that_demonstrations_matter():
    _, said = after(1)
    assert said["steps"] == 0
    assert said["new_rows"] > 0
    assert said["demonstration_effect"] > 0.01
    assert said["base_validation_ndcg10"] == pytest.approx(tuple(after(0)[0].trace.tolist()))


def test_the_state_survives_packing():
    state, (_, queries) = after(2)[0], questions(2)
    back = restore(take_snapshot(state))
    assert torch.equal(back.trace, state.trace)
    assert torch.equal(RecICL().score(world(), back, queries), RecICL().score(world(), state, queries))


def test_targets_are_drawn_from_the_base_blocks_train_part_alone():
    every = world().base.train_positions
    assert RecICL()._positions(world()) is every or np.array_equal(RecICL()._positions(world()), every)
    few = RecICL(targets=100)._positions(world())
    assert len(np.unique(few)) == 100
    assert np.isin(few, every).all()
    assert np.array_equal(few, RecICL(targets=100)._positions(world()))


def test_a_slice_without_validation_events_has_no_effect_to_report():
    slice_ = tiny_stream().slice_(1)
    blind = replace(slice_, validation=replace(slice_.validation, positions=slice_.validation.positions[:0]))
    assert RecICL().learn(world(), after(0)[0], blind, PlainDescent())[1]["demonstration_effect"] == 0.0
