"""Teacher, student and proxies: each loss and each choice by hand, then what they do to each other over two slices."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
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
from protofed.backbone.small_modules import modules_and_rows, small_weights, with_lora
from protofed.backbone.training import PlainDescent
from protofed.config import BackboneConfig
from protofed.errors import ConfigError
from protofed.methods.baselines.ccd import (
    CCD,
    Chosen,
    Clock,
    Source,
    average_modules,
    average_weights,
    candidate_pool,
    count_above,
    draw_by_rank,
    item_scores,
    merge_chosen,
    pool_scores,
    relaxed_ranking_loss,
    soft_loss,
    sort_scores,
    student_config,
    unusable,
)
from protofed.methods.baselines.finetune_last import FineTuneLast, fine_tuned
from protofed.methods.frozen import rows_for
from protofed.methods.protocol import World
from protofed.progress import silent
from protofed.seeds import stream
from protofed.slices.histories import BOS, PAD
from protofed.slices.stream import SliceStream
from protofed.slices.windows import NO_TARGET, Windows, take, training_windows
from protofed.snapshot import restore, take_snapshot


def world_of(data=None):
    return World(tiny_config(training__base_epochs=3), (data or tiny_stream()).slice_(0), warmed_up()[0])


def learn_on(method, data=None, world=None):
    world = world or world_of(data)
    return method.learn(world, method.start(world), (data or tiny_stream()).slice_(1), PlainDescent())


learn = cache(learn_on)


def same(one, other):
    one, other = every_value(one), every_value(other)
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def batch_of(n):
    slice_, rng = tiny_stream().slice_(1), np.random.default_rng(0)
    return take(
        training_windows(slice_.past, slice_.train_positions, length=LENGTH, stride=6, rng=rng), torch.arange(n)
    )


def test_the_ranking_loss_is_the_probability_of_drawing_the_interesting_items_in_order():
    interesting, others = torch.tensor([[1.0, 0.5, -1.0]]), torch.tensor([[0.2, -0.3]])
    left, probability = [math.exp(s) for s in [1.0, 0.5, -1.0, 0.2, -0.3]], 1.0
    for _ in range(3):
        probability *= left[0] / sum(left)
        left = left[1:]
    assert relaxed_ranking_loss(interesting, others).item() == pytest.approx(-math.log(probability), rel=1e-5)


def test_a_proxy_moves_by_its_share_and_copies_rows_it_lacks():
    proxy, student = random_model(3), random_model(5, seed=1)
    student.has_row[4] = False
    student.refresh_mean_row()
    found = average_weights(proxy, student, 0.9)
    assert torch.allclose(found.items[:3], 0.9 * proxy.items + 0.1 * student.items[:3])
    assert torch.equal(found.items[3], student.items[3])
    assert torch.allclose(found.positions, 0.9 * proxy.positions + 0.1 * student.positions)
    assert found.has_row.tolist() == [True, True, True, True, False]
    assert torch.allclose(found.mean_row, found.items[:4].mean(0))
    assert same(average_weights(student, student, 0.0), student.requires_grad_(False))
    assert not found.items.requires_grad


def test_an_item_chosen_twice_counts_once_with_its_largest_label():
    one = Chosen(torch.tensor([[4, 7]]), torch.tensor([[0.2, 0.9]]), torch.tensor([[True, True]]))
    two = Chosen(torch.tensor([[4, 7]]), torch.tensor([[0.6, 0.99]]), torch.tensor([[True, False]]))
    found = merge_chosen([one, two])
    assert found.items.tolist() == [[4, 7, 4, 7]]
    assert found.valid.tolist() == [[True, True, False, False]]
    assert found.labels[0, :2].tolist() == pytest.approx([0.6, 0.9])
    scores = torch.tensor([[1.0, -2.0, 50.0, 50.0]])
    by_hand = [-(y * math.log(p) + (1 - y) * math.log(1 - p)) for y, p in [(0.6, 0.731059), (0.9, 0.119203)]]
    assert soft_loss(scores, found).item() == pytest.approx(sum(by_hand) / 2, rel=1e-4)


def test_a_place_is_ranked_by_the_usable_items_that_score_higher():
    scores, usable = torch.tensor([[0.1, 3.0, -1.0, 2.0, 2.0]]), torch.tensor([[True, False, True, True, True]])
    assert count_above(sort_scores(scores), usable, torch.tensor([[0, 1, 2, 3, 4]])).tolist() == [[2, 0, 3, 0, 0]]
    rng = stream(0, "scores")
    scores, usable = torch.randint(9, (7, 30), generator=rng) / 3, torch.rand(7, 30, generator=rng) < 0.7
    places = torch.randint(30, (7, 5), generator=rng)
    by_hand = [
        [int((usable[row] & (scores[row] > scores[row, place])).sum()) for place in places[row]] for row in range(7)
    ]
    assert count_above(sort_scores(scores), usable, places).tolist() == by_hand


def test_repeated_places_and_items_of_the_window_are_not_replayed():
    batch = Windows(
        users=torch.tensor([0]),
        tokens=torch.tensor([[PAD, BOS, 3]]),
        sources=torch.tensor([[1, 2]]),
        targets=torch.tensor([[5, NO_TARGET]]),
        newest=torch.tensor([9]),
    )
    assert unusable(torch.tensor([[0, 3, 4, 4, 5, 6]]), batch).tolist() == [[False, True, False, True, True, False]]


def test_the_pool_is_all_items_or_a_sample_with_the_teachers_favourites():
    teacher, hidden = random_model(200), torch.randn(3, 8, generator=stream(0, "h"))
    everything = candidate_pool(teacher, hidden, 200, 150, 50, Streamed(stream(0, "t")))
    assert everything.tolist() == [list(range(200))] * 3
    pool = candidate_pool(teacher, hidden, 200, 20, 5, Streamed(stream(0, "t")))
    drawn = torch.randint(200, (1, 20), generator=stream(0, "t"))[0].tolist()
    for row in range(3):
        best = (hidden[row] @ teacher.items.detach().T).topk(5).indices.tolist()
        assert pool[row].tolist() == sorted(drawn + best)


def test_a_pool_is_scored_as_its_items_are_also_those_without_a_row():
    model = random_model(30).requires_grad_(False)
    model.has_row[7:12] = False
    hidden, pool = torch.randn(4, 8, generator=stream(0, "h")), torch.randint(40, (4, 50), generator=stream(0, "p"))
    found = pool_scores(model.rows(40), hidden, pool)
    assert torch.equal(found, item_scores(model, hidden, pool))
    assert float(found[1, 0]) == pytest.approx(float(model.embed(pool[1, 0]) @ hidden[1]), rel=1e-5)


def test_draws_follow_their_logits_and_never_leave_what_is_allowed():
    logits = torch.tensor([0.0, math.log(3.0), 9.0]).expand(6_000, -1)
    allowed = torch.tensor([True, True, False]).expand(6_000, -1)
    uniform = torch.rand(6_000, 3, generator=stream(0, "t"))
    places, valid = draw_by_rank(logits, allowed, 1, uniform)
    assert valid.all()
    assert float((places == 1).float().mean()) == pytest.approx(0.75, abs=0.02)
    places, valid = draw_by_rank(logits[:50], allowed[:50], 3, uniform[:50])
    assert valid.sum(1).tolist() == [2] * 50
    assert all(set(row[ok].tolist()) == {0, 1} for row, ok in zip(places, valid, strict=True))


def test_a_student_has_a_quarter_of_the_width_and_one_block():
    paper = student_config(BackboneConfig(width=256, heads=4))
    assert (paper.width, paper.layers, paper.heads) == (64, 1, 4)
    assert student_config(BackboneConfig(width=6, heads=2)).width == 2


def test_the_replay_is_the_soft_loss_of_the_sources_top_items_fading_with_the_epochs():
    world, slice_, batch, clock = world_of(), tiny_stream().slice_(1), batch_of(5), Clock(silent, torch.zeros(()))
    learner, source = warmed_up()[0], random_model(100, width=4, layers=1, history_length=LENGTH).requires_grad_(False)
    method, notes = CCD(weight=0.8, top=3, n_stable=3, n_plastic=0), Notes()
    added = [method._replay(world, learner, slice_, [Source(source, 3)], clock, notes)(learner, batch)]
    clock("slice 1", 5, 30)
    added.append(method._replay(world, learner, slice_, [Source(source, 3)], clock, notes)(learner, batch))
    for row in range(5):
        met = {*batch.tokens[row].tolist(), *batch.targets[row].tolist()}
        its = source.last_hidden(batch.tokens[row : row + 1])[0] @ source.items.T
        top = sorted((i for i in range(100) if i not in met), key=lambda i: -float(its[i]))[:3]
        mine = learner.last_hidden(batch.tokens[row : row + 1])[0] @ learner.embed(torch.tensor(top)).T
        loss = F.binary_cross_entropy_with_logits(mine, its[top].sigmoid()).item()
        targets = int((batch.targets[row] != NO_TARGET).sum())
        assert added[0][row].item() == pytest.approx(0.8 * loss * targets, rel=1e-4)
        assert added[1][row].item() == pytest.approx(0.8 * math.exp(-0.5) * loss * targets, rel=1e-4)
    assert notes.means()["replayed_items"] == 3


def test_without_replay_the_teacher_is_finetune_last_bit_for_bit():
    state, diagnostics = learn(CCD(weight=0.0))
    assert same(state.teacher, learn(FineTuneLast())[0])
    assert diagnostics["replay_loss"] == 0


def test_replay_changes_the_teachers_scores_and_the_log_says_what_was_replayed():
    _, queries = questions()
    state, diagnostics = learn(CCD())
    plain, _ = learn(FineTuneLast())
    scores = CCD().score(world_of(), state, queries)
    assert not torch.allclose(scores, FineTuneLast().score(world_of(), plain, queries), atol=1e-3)
    assert diagnostics["replay_loss"] > 0.01
    assert 1 < diagnostics["replayed_items"] <= 9
    assert 0 < diagnostics["soft_label"] < 1


def test_the_student_is_distilled_and_distillation_draws_it_to_the_teachers_order():
    world, slice_ = world_of(), tiny_stream().slice_(1)
    asked, queries = questions(0, "val")
    teacher = warmed_up()[0]
    wanted = teacher.scores(teacher.last_hidden(queries.tokens), asked.n_items)
    agreement = []
    for strength in (0.0, 0.5):
        method = CCD(distillation=strength)
        student, fit = method._generated(world, method.start(world), slice_, PlainDescent())
        found = student.scores(student.last_hidden(queries.tokens), asked.n_items)
        agreement.append(float(torch.corrcoef(torch.stack([wanted.flatten(), found.flatten()]))[0, 1]))
        assert len(fit.trace) > 1
    assert agreement[1] > agreement[0] + 0.05


def test_the_first_proxies_are_the_generated_student_and_later_ones_follow_at_their_own_pace():
    first, _ = learn(CCD())
    assert same(first.stable, first.plastic)
    assert first.generations == 1
    assert not torch.equal(first.student.positions, first.stable.positions)
    second, _ = CCD().learn(world_of(), first, tiny_stream().slice_(2), PlainDescent())
    slow, fast = (float((proxy.positions - first.stable.positions).norm()) for proxy in (second.stable, second.plastic))
    assert slow > 0
    assert fast == pytest.approx(9 * slow, rel=1e-3)
    assert second.generations == 2


def test_the_student_can_be_scored_instead():
    _, queries = questions()
    state, _ = learn(CCD())
    scores = CCD(scored="student").score(world_of(), state, queries)
    expected = state.student.scores(state.student.last_hidden(queries.tokens), queries.n_items)
    assert torch.equal(scores, expected)
    assert not torch.equal(scores, CCD().score(world_of(), state, queries))


def test_the_state_survives_packing_and_the_same_seed_gives_it_again():
    state, _ = learn(CCD())
    assert same(restore(take_snapshot(state)), state)
    assert same(learn_on(CCD())[0], state)


def test_nothing_after_the_train_cut_gives_a_gradient(monkeypatch):
    monkeypatch.setattr(training, "mean_grade", lambda *_: float("nan"))  # keeps the last epoch
    cut = tiny_stream().bounds[1].train_end
    changed = SliceStream(shuffled_after(tiny_log(), cut), tiny_config().stream)
    state, _ = learn_on(CCD())
    assert same(learn_on(CCD(), changed)[0], state)
    assert CCD().evidence(state).newest_target < cut


def test_learning_leaves_the_models_it_started_from_alone():
    state, _ = learn(CCD())
    before = {name: tensor.clone() for name, tensor in every_value(state).items()}
    CCD().learn(world_of(), state, tiny_stream().slice_(2), PlainDescent())
    assert all(torch.equal(tensor, before[name]) for name, tensor in every_value(state).items())


def test_values_out_of_range_are_refused():
    with pytest.raises(ConfigError, match=r"keep_stable must lie between 0 and 1, got 1.1"):
        CCD(keep_stable=1.1)
    with pytest.raises(ConfigError, match="weight must lie between 0 and"):
        replace(CCD(), weight=-1.0)


def small_world():
    config = tiny_config(variant="peft", training__base_epochs=3)
    return World(config, tiny_stream().slice_(0), warmed_up()[0])


@pytest.fixture
def _last_epoch_counts(monkeypatch):
    """Two epochs in a tiny world need not help on its validation part; what they do is looked at all the same."""
    monkeypatch.setattr(training, "best_of", lambda trace: len(trace) - 1)


@pytest.mark.usefixtures("_last_epoch_counts")
def test_small_teacher_and_student_live_in_the_frozen_backbone_and_share_its_table():
    world = small_world()
    before = CCD().start(world)
    state, told = CCD().learn(world, before, tiny_stream().slice_(1), PlainDescent())
    base, first = world.backbone.state_dict(), rows_for(world, before.teacher.backbone, tiny_stream().slice_(1))
    for model, module in ((state.teacher.backbone, "lora"), (state.student, "prompt"), (state.stable, "prompt")):
        now = model.state_dict()
        assert all(module in name for name in now.keys() - base.keys())
        assert all(torch.equal(now[name], base[name]) for name in base.keys() - {"items", "has_row", "mean_row"})
        known = base["has_row"]
        assert torch.equal(now["items"][: len(known)][known], base["items"][known])
    assert torch.equal(state.student.items, state.teacher.backbone.items)
    assert torch.equal(state.student.mean_row, state.teacher.backbone.mean_row)
    new = first[1]
    assert new.any()
    assert not torch.equal(state.teacher.backbone.items[new], first[0].items[new])
    moved = small_weights(state.student), small_weights(before.student)
    assert not torch.equal(moved[0]["prompt.tokens"], moved[1]["prompt.tokens"])
    lora = sum(tensor.numel() for tensor in small_weights(state.teacher.backbone).values())
    assert lora == len(world.backbone.blocks) * 2 * (8 * 16 + 16 * 8)  # width 16: query and value, down and up
    assert told["trainable_parameters"] == lora + 16 * int(new.sum())
    assert told["replayed_items"] > 1


@pytest.mark.slow
@pytest.mark.usefixtures("_last_epoch_counts")
def test_without_replay_the_small_teacher_is_a_plain_lora_bit_for_bit():
    world, slice_ = small_world(), tiny_stream().slice_(1)
    state, _ = learn_on(CCD(weight=0.0), world=world)
    lora = with_lora(world.backbone, 8, 16.0, stream(world.config.seed, "ccd", "teacher"))
    first, new = rows_for(world, lora, slice_)
    plain, _ = fine_tuned(world, (first, new), slice_, PlainDescent(), trainable=modules_and_rows(new, 1e-2))
    assert same(state.teacher.backbone, plain)
    assert not same(learn_on(CCD(), world=world)[0].teacher.backbone, plain)


@pytest.mark.slow
@pytest.mark.usefixtures("_last_epoch_counts")
def test_small_proxies_average_prompts_and_nothing_else():
    world = small_world()
    first, _ = learn_on(CCD(), world=world)
    second, _ = CCD().learn(world, first, tiny_stream().slice_(2), PlainDescent())
    slow, fast = (float((p.prompt.tokens - first.stable.prompt.tokens).norm()) for p in (second.stable, second.plastic))
    assert slow > 0
    assert fast == pytest.approx(9 * slow, rel=1e-3)
    assert same(restore(take_snapshot(second)), second)
    mixed = average_modules(first.stable, second.student, 0.25)
    expected = 0.25 * first.stable.prompt.tokens + 0.75 * second.student.prompt.tokens
    assert torch.allclose(mixed.prompt.tokens, expected, atol=1e-7)
    assert torch.equal(mixed.items, second.student.items)
