"""Which events experience replay keeps, how often each is kept, and what replaying them adds to the loss."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import LENGTH, every_value, questions, shuffled_after, tiny_config, tiny_log, tiny_stream, warmed_up

from protofed.backbone import training
from protofed.backbone.extras import Notes
from protofed.backbone.losses import LOSSES, draw_negatives, window_losses
from protofed.backbone.training import PlainDescent
from protofed.errors import ConfigError
from protofed.methods.baselines.buffer import (
    Capacity,
    event_windows,
    rank_within,
    replay,
    reservoir,
    weighted_choice,
)
from protofed.methods.baselines.experience_replay import ERFreq, ERRandom, add_degrees, draw_evenly, event_weights
from protofed.methods.baselines.finetune_last import FineTuneLast
from protofed.methods.protocol import World
from protofed.seeds import stream
from protofed.slices.histories import BOS, PAD, histories
from protofed.slices.stream import SliceStream
from protofed.slices.windows import NO_TARGET, take, training_windows
from protofed.snapshot import restore, take_snapshot

SMALL = Capacity(least=100)
METHODS = [
    ERRandom(capacity=SMALL),
    ERRandom(capacity=SMALL, user_balanced=True),
    *(ERFreq(capacity=SMALL, mode=mode) for mode in ("inv_degree", "freq", "sqrt_inv")),
]


def world_of(data=None):
    data = data or tiny_stream()
    return World(tiny_config(), data.slice_(0), warmed_up()[0])


def learn_on(method, data):
    world = world_of(data)
    return method.learn(world, method.start(world), data.slice_(1), PlainDescent())


@cache
def learn(method):
    return learn_on(method, tiny_stream())


def same(one, other):
    one, other = every_value(one), every_value(other)
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


@given(st.integers(0, 8), st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(0, 2**31))
def test_the_reservoir_is_the_textbook_loop(capacity, parts, seed):
    kept, seen, by_hand, n, at = np.zeros(0, dtype=np.int64), 0, [], 0, 0
    fast, slow = np.random.default_rng(seed), np.random.default_rng(seed)
    for size in parts:
        events = np.arange(at, at + size)
        at += size
        kept, seen = reservoir(kept, seen, events, capacity, fast)
        late = events[max(capacity - len(by_hand), 0) :]
        slots = iter(slow.integers(0, np.arange(at - len(late), at) + 1).tolist())
        for event in events.tolist():
            n += 1
            if len(by_hand) < capacity:
                by_hand.append(event)
            elif (slot := next(slots)) < capacity:
                by_hand[slot] = event
    assert kept.tolist() == by_hand
    assert seen == n == at


def test_the_reservoir_keeps_every_event_of_the_stream_equally_often():
    rng, times_kept = np.random.default_rng(0), np.zeros(30)
    for _ in range(3_000):
        kept, seen = reservoir(np.zeros(0, dtype=np.int64), 0, np.arange(12), 6, rng)
        kept, _ = reservoir(kept, seen, np.arange(12, 30), 6, rng)
        times_kept[kept] += 1
    assert times_kept / 3_000 == pytest.approx(np.full(30, 6 / 30), abs=0.03)


def test_draws_are_in_proportion_to_their_weights_and_without_replacement():
    rng, weights, first = np.random.default_rng(0), np.array([1.0, 2.0, 5.0]), np.zeros(3)
    for _ in range(4_000):
        first[weighted_choice(weights, 1, rng)] += 1
    assert first / 4_000 == pytest.approx(weights / 8, abs=0.03)
    pairs = [tuple(weighted_choice(weights, 2, rng).tolist()) for _ in range(4_000)]
    expected = 1 / 8 * 2 / 7 + 2 / 8 * 1 / 6  # 0 then 1, or 1 then 0
    assert pairs.count((0, 1)) / 4_000 == pytest.approx(expected, abs=0.02)
    assert weighted_choice(weights, 9, rng).tolist() == [0, 1, 2]


def test_weights_by_hand():
    users, items = np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1])
    past = histories(users, items, np.arange(4), 2)
    degrees = np.array([3, 1]), np.array([2, 2])
    events = np.arange(4)
    assert event_weights(past, events, *degrees, "inv_degree").tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])
    assert event_weights(past, events, *degrees, "freq").tolist() == [2, 2, 2, 2]
    assert event_weights(past, events, *degrees, "sqrt_inv").tolist() == pytest.approx([6**-0.5] * 3 + [2**-0.5])
    assert add_degrees(torch.tensor([3, 1]), np.array([1, 3, 3])).tolist() == [3, 2, 0, 2]
    assert add_degrees(torch.tensor([3, 1]), np.array([0])).tolist() == [4, 1]


def test_places_are_ranked_within_their_group():
    assert rank_within(np.array([5, 2, 5, 5, 2])).tolist() == [0, 0, 1, 2, 1]


def test_a_balanced_buffer_gives_nobody_a_second_event_before_everybody_has_one():
    users = np.repeat([0, 1, 2], [10, 3, 1])
    kept = draw_evenly(np.arange(14) + 100, users, 7, np.random.default_rng(0))
    counts = np.bincount(users[kept - 100])
    assert len(set(kept.tolist())) == 7
    assert counts.tolist() == [3, 3, 1]
    assert draw_evenly(np.arange(14), users, 99, np.random.default_rng(0)).tolist() == list(range(14))


def test_a_kept_event_is_predicted_from_its_own_prefix():
    slice_ = tiny_stream().slice_(1)
    users, items, times = (column.tolist() for column in (tiny_log().users, tiny_log().items, tiny_log().times))
    positions = np.array([0, 7, 400, 901])
    windows = event_windows(slice_.past, positions, LENGTH)
    for row, position in enumerate(positions.tolist()):
        earlier = [
            i for u, i, t in zip(users, items, times, strict=True) if u == users[position] and t < times[position]
        ]
        tokens = ([PAD] * LENGTH + [BOS] + earlier)[-LENGTH:]
        assert windows.tokens[row].tolist() == tokens
        assert windows.targets[row].tolist() == [items[position]]
        assert (windows.sources[row].item(), windows.newest[row].item()) == (LENGTH - 1, position)


def batch_of(slice_, n):
    rng = np.random.default_rng(0)
    return take(
        training_windows(slice_.past, slice_.train_positions, length=LENGTH, stride=6, rng=rng), torch.arange(n)
    )


def test_replay_adds_beta_times_the_mean_loss_of_the_kept_events_to_the_mean_loss():
    world, slice_, model = world_of(), tiny_stream().slice_(1), warmed_up()[0]
    batch, buffer, notes = batch_of(slice_, 9), torch.tensor([3, 50, 77, 200]), Notes()
    added = replay(world, slice_, buffer, 0.7, stream(0, "t"), notes)(model, batch)
    rng = stream(0, "t")
    order = torch.randperm(4, generator=rng)
    negatives = draw_negatives(4, 32, slice_.n_train_items, rng)
    windows = event_windows(slice_.past, buffer[order].numpy(), LENGTH)
    losses, _ = window_losses(model, windows, negatives, LOSSES["softmax"])
    counts = (batch.targets != NO_TARGET).sum(1)
    assert added.tolist() == pytest.approx((0.7 * losses.mean() * counts).tolist(), rel=1e-4)
    assert notes.means()["replay_loss"] == pytest.approx(float(losses.mean()), rel=1e-4)


def test_a_step_replays_as_many_events_as_the_batch_has_windows(monkeypatch):
    sizes = []
    from protofed.methods.baselines import buffer

    spied = buffer.window_losses
    monkeypatch.setattr(buffer, "window_losses", lambda m, w, *rest: sizes.append(len(w)) or spied(m, w, *rest))
    world, slice_ = world_of(), tiny_stream().slice_(1)
    extra = replay(world, slice_, torch.arange(100), 1.0, stream(0, "t"), Notes())
    extra(warmed_up()[0], batch_of(slice_, 9))
    assert sizes == [9]


@pytest.mark.parametrize("kind", [ERRandom, ERFreq])
@pytest.mark.parametrize("nothing", [{"beta": 0.0}, {"capacity": Capacity(share=0.0)}])
def test_without_replay_the_weights_are_those_of_finetune_last_bit_for_bit(kind, nothing):
    state, diagnostics = learn(kind(**nothing))
    assert same(state.model.backbone, learn(FineTuneLast())[0].backbone)
    assert diagnostics["replay_loss"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_replay_changes_the_scores_and_the_log_says_so(method):
    state, diagnostics = learn(method)
    _, queries = questions()
    plain = FineTuneLast().score(world_of(), learn(FineTuneLast())[0], queries)
    assert not torch.allclose(method.score(world_of(), state, queries), plain, atol=1e-3)
    assert diagnostics["replay_buffer"] == 100
    assert diagnostics["replay_loss"] > 0.1


@pytest.mark.parametrize("method", METHODS)
def test_the_buffer_holds_train_events_alone_each_once_and_some_of_each_slice(method):
    kept = learn(method)[0].buffer.numpy()
    parts = [np.arange(*tiny_stream().bounds[index].part("train")) for index in (0, 1)]
    assert len(kept) == len(set(kept.tolist())) == 100
    assert np.isin(kept, np.concatenate(parts)).all()
    assert all(np.isin(kept, part).any() for part in parts)


@pytest.mark.parametrize("method", [ERRandom(), ERRandom(user_balanced=True), ERFreq()])
def test_a_buffer_larger_than_the_log_holds_every_train_event(method):
    state, _ = learn(method)
    assert sorted(state.buffer.tolist()) == tiny_stream().slice_(1).all_train_positions.tolist()


def test_during_a_slice_only_events_of_earlier_slices_are_replayed(monkeypatch):
    from protofed.methods.baselines import experience_replay

    handed = []
    spied = experience_replay.replay
    monkeypatch.setattr(
        experience_replay, "replay", lambda w, s, buffer, *r: handed.append(buffer) or spied(w, s, buffer, *r)
    )
    learn_on(ERRandom(), tiny_stream())
    assert int(handed[0].max()) < tiny_stream().bounds[0].train_end


def test_degrees_count_all_train_events_so_far_and_the_reservoir_all_it_has_met():
    positions = tiny_stream().slice_(1).all_train_positions
    degrees, reservoir_ = learn(ERFreq(capacity=SMALL))[0], learn(ERRandom(capacity=SMALL))[0]
    assert torch.equal(degrees.user_degree, torch.bincount(tiny_log().users[positions].long()))
    assert torch.equal(degrees.item_degree, torch.bincount(tiny_log().items[positions].long()))
    assert reservoir_.seen == len(positions)


def test_inverse_degrees_keep_rarer_users_and_item_frequency_more_popular_items():
    means = {}
    for mode in ("inv_degree", "freq"):
        state, _ = learn(ERFreq(capacity=SMALL, mode=mode))
        users, items = tiny_log().users[state.buffer].long(), tiny_log().items[state.buffer].long()
        means[mode] = float(state.user_degree[users].float().mean()), float(state.item_degree[items].float().mean())
    assert means["inv_degree"][0] < 0.9 * means["freq"][0]
    assert means["freq"][1] > 1.1 * means["inv_degree"][1]


@pytest.mark.parametrize("method", METHODS)
def test_the_state_survives_packing_and_the_same_seed_gives_it_again(method):
    state, _ = learn(method)
    assert same(restore(take_snapshot(state)), state)
    assert same(learn_on(method, tiny_stream())[0], state)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_after_the_train_cut_gives_a_gradient_or_enters_the_buffer(method, monkeypatch):
    monkeypatch.setattr(training, "mean_grade", lambda *_: float("nan"))  # keeps the last epoch
    cut = tiny_stream().bounds[1].train_end
    changed = SliceStream(shuffled_after(tiny_log(), cut), tiny_config().stream)
    state, _ = learn_on(method, tiny_stream())
    assert same(learn_on(method, changed)[0], state)
    assert method.evidence(state).newest_target < cut
    ahead = replace(state, buffer=torch.cat([state.buffer, torch.tensor([cut])]))
    assert method.evidence(ahead).newest_target == cut


def test_values_out_of_range_are_refused():
    with pytest.raises(ConfigError, match=r"capacity.share must lie between 0 and 1, got 1.5"):
        Capacity(share=1.5)
    with pytest.raises(ConfigError, match=r"capacity.least must lie between 0 and 30000, got -1"):
        Capacity(least=-1)
    for kind in (ERRandom, ERFreq):
        with pytest.raises(ConfigError, match="beta must lie between 0 and 1e"):
            kind(beta=-1.0)


def test_the_capacity_is_a_share_of_the_base_block_between_its_bounds():
    n = len(tiny_stream().slice_(0).train_positions)
    assert Capacity(share=0.05, least=1).of(world_of()) == round(0.05 * n)
    assert Capacity().of(world_of()) == 2_000
    assert Capacity(share=1.0, least=1, most=30).of(world_of()) == 30
    assert Capacity(share=0.0).of(world_of()) == 0
