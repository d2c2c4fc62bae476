"""Self-correction by hand: what counts is where the new version errs more than the last."""

import math

import numpy as np
import pytest
import torch
from worlds import (
    LENGTH,
    every_value,
    questions,
    random_model,
    shuffled_after,
    tiny_config,
    tiny_log,
    tiny_stream,
    warmed_up,
)

from protofed.backbone import training
from protofed.backbone.extras import Notes, Streamed
from protofed.backbone.losses import draw_negatives
from protofed.backbone.training import PlainDescent
from protofed.errors import ConfigError
from protofed.methods.baselines.finetune_last import FineTuneLast
from protofed.methods.baselines.reloop import (
    ReLoop,
    Scores,
    mix_negatives,
    pairwise_correction,
    pointwise_correction,
)
from protofed.methods.protocol import World
from protofed.seeds import stream
from protofed.slices.stream import SliceStream
from protofed.slices.windows import take, training_windows
from protofed.snapshot import restore, take_snapshot


def world_of(data=None, **settings):
    return World(tiny_config(**settings), (data or tiny_stream()).slice_(0), warmed_up()[0])


def learn(method, data=None, **settings):
    world = world_of(data, **settings)
    return method.learn(world, method.start(world), (data or tiny_stream()).slice_(1), PlainDescent())


def same(one, other):
    one, other = every_value(one), every_value(other)
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def batch_of(n):
    slice_ = tiny_stream().slice_(1)
    rng = np.random.default_rng(0)
    return take(
        training_windows(slice_.past, slice_.train_positions, length=LENGTH, stride=6, rng=rng), torch.arange(n)
    )


def correction(model, last, batch, **settings):
    """What one batch adds, and what the log hears."""
    notes = Notes()
    extra = ReLoop()._correction(world_of(**settings), last, tiny_stream().slice_(1), notes)
    return extra(model, batch), notes.means()


def test_margins_that_shrank_count_by_how_much_and_others_not_at_all():
    new = Scores(torch.tensor([[1.0]]), torch.tensor([[[0.5, -1.0, 3.0]]]))
    last = Scores(torch.tensor([[2.0]]), torch.tensor([[[0.0, 1.0, 0.0]]]))
    per_target, pairs = pairwise_correction(new, last, torch.ones(1, 1, 3, dtype=torch.bool))
    assert pairs.tolist() == [[[1.5, 0.0, 4.0]]]  # margins 2, 1, 2 became 0.5, 2, -2
    assert per_target.item() == pytest.approx(5.5 / 3)
    per_target, _ = pairwise_correction(new, last, torch.tensor([[[True, True, False]]]))
    assert per_target.item() == pytest.approx(0.75)
    per_target, _ = pairwise_correction(new, last, torch.zeros(1, 1, 3, dtype=torch.bool))
    assert per_target.item() == 0


def test_probabilities_that_moved_the_wrong_way_count_by_how_much():
    def logit(p):
        return math.log(p / (1 - p))

    new = Scores(torch.tensor([[logit(0.6)]]), torch.tensor([[[logit(0.3), logit(0.1)]]]))
    last = Scores(torch.tensor([[logit(0.9)]]), torch.tensor([[[logit(0.2), logit(0.5)]]]))
    valid = torch.ones(1, 1, 2, dtype=torch.bool)
    per_target, gained = pointwise_correction(new, last, torch.tensor([[True]]), valid)
    assert per_target.item() == pytest.approx(0.3 + 0.1 / 2, abs=1e-6)
    assert gained.flatten().tolist() == pytest.approx([0.1, 0.0], abs=1e-6)
    per_target, _ = pointwise_correction(new, last, torch.tensor([[False]]), valid)
    assert per_target.item() == pytest.approx(0.05, abs=1e-6)


def test_half_of_the_negatives_are_uniform_and_half_the_last_versions_favourites_of_the_pool():
    last, hidden = random_model(300), torch.randn(2, 3, 8, generator=stream(0, "hidden"))
    found = mix_negatives(last, hidden, 7, 20, 300, Streamed(stream(0, "t")))
    rng = stream(0, "t")
    uniform, pool = draw_negatives(2, 3, 300, rng), draw_negatives(2, 20, 300, rng)
    assert found.shape == (2, 3, 7)
    for w in range(2):
        for p in range(3):
            by_score = sorted(pool[w].tolist(), key=lambda i: -float(hidden[w, p] @ last.items.detach()[i]))
            assert found[w, p, :3].tolist() == uniform[w].tolist()
            assert found[w, p, 3:].tolist() == by_score[:4]


@pytest.mark.parametrize("loss", ["softmax", "bce"])
def test_a_model_that_equals_the_last_version_is_not_corrected(loss):
    added, means = correction(warmed_up()[0], warmed_up()[0], batch_of(8), training__loss=loss)
    assert added.tolist() == [0.0] * 8
    assert means == {"correction": 0, "active_pairs": 0}


@pytest.mark.parametrize("loss", ["softmax", "bce"])
def test_targets_without_a_row_in_the_last_version_are_not_corrected(loss):
    other, rowless = random_model(130, width=16, layers=1, history_length=LENGTH), warmed_up()[0]
    none = torch.zeros_like(rowless.has_row)
    knows_nothing = restore(take_snapshot(rowless))
    knows_nothing.has_row = none
    added, means = correction(other, knows_nothing, batch_of(8), training__loss=loss)
    assert added.tolist() == [0.0] * 8
    assert means == {"correction": 0, "active_pairs": 0}
    added, means = correction(other, rowless, batch_of(8), training__loss=loss)
    assert (added > 0).all()
    assert 0 < means["active_pairs"] <= 1


def test_a_windows_term_depends_on_its_own_events_alone():
    other, batch = random_model(130, width=16, layers=1, history_length=LENGTH), batch_of(8)
    swapped = take(batch, torch.tensor([0, 1, 2, 3, 7, 6, 5, 4]))
    one, two = (correction(other, warmed_up()[0], b)[0] for b in (batch, swapped))
    assert one[:4].tolist() == pytest.approx(two[:4].tolist(), rel=1e-5)


def test_alpha_enters_as_its_odds():
    other, batch, world = random_model(130, width=16, layers=1, history_length=LENGTH), batch_of(4), world_of()
    added = [
        ReLoop(alpha=alpha)._correction(world, warmed_up()[0], tiny_stream().slice_(1), Notes())(other, batch)
        for alpha in (0.5, 0.8)
    ]
    assert (added[1] / added[0]).tolist() == pytest.approx([4.0] * 4, rel=1e-4)


def test_without_correction_the_weights_are_those_of_finetune_last_bit_for_bit():
    state, diagnostics = learn(ReLoop(alpha=0.0))
    assert same(state, learn(FineTuneLast())[0])
    assert (diagnostics["correction"], diagnostics["active_pairs"]) == (0, 0)


@pytest.mark.parametrize("loss", ["softmax", "bce", "bpr"])
def test_correction_changes_the_scores_and_the_log_says_how_often_it_was_active(loss):
    _, queries = questions()
    state, diagnostics = learn(ReLoop(), training__loss=loss)
    plain, _ = learn(FineTuneLast(), training__loss=loss)
    scores = [ReLoop().score(world_of(), each, queries) for each in (state, plain)]
    assert not torch.allclose(*scores, atol=1e-4)
    assert diagnostics["correction"] > 0
    assert 0.01 < diagnostics["active_pairs"] < 1


def test_a_stronger_correction_leaves_fewer_active_pairs():
    weak, strong = (learn(ReLoop(alpha=alpha))[1]["active_pairs"] for alpha in (0.01, 0.95))
    assert strong < weak


def test_the_state_survives_packing_and_the_same_seed_gives_it_again():
    state, _ = learn(ReLoop())
    assert same(restore(take_snapshot(state)), state)
    assert same(learn(ReLoop())[0], state)


def test_nothing_after_the_train_cut_gives_a_gradient(monkeypatch):
    monkeypatch.setattr(training, "mean_grade", lambda *_: float("nan"))  # keeps the last epoch
    cut = tiny_stream().bounds[1].train_end
    changed = SliceStream(shuffled_after(tiny_log(), cut), tiny_config().stream)
    assert same(learn(ReLoop(), changed)[0], learn(ReLoop())[0])
    assert ReLoop().evidence(learn(ReLoop())[0]).newest_target < cut


def test_values_out_of_range_are_refused():
    with pytest.raises(ConfigError, match=r"alpha must lie in \[0, 1\), got 1.0"):
        ReLoop(alpha=1.0)
    with pytest.raises(ConfigError, match="negatives must lie between 2 and the pool of 100, got 101"):
        ReLoop(negatives=101)
