"""LwF: soft labels by hand, lists of items the teacher knows, strength 0 is FineTune-Last."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator
from worlds import every_value, learned, questions, random_model, tiny_config, tiny_stream, warmed_up

from protofed.backbone.extras import Notes, Streamed
from protofed.backbone.sasrec import grown
from protofed.backbone.training import PlainDescent
from protofed.methods.baselines.lwf import (
    Lists,
    LwF,
    divergence,
    grade_lists,
    imitating,
    known_items,
    logits_of,
    newest_targets,
)
from protofed.methods.protocol import World
from protofed.slices.histories import BOS, PAD
from protofed.slices.windows import NO_TARGET, Windows, training_windows
from protofed.snapshot import restore, take_snapshot


@cache
def world() -> World:
    return World(tiny_config(), tiny_stream().slice_(0), warmed_up()[0])


@cache
def after_slice_1(method: LwF) -> tuple[Any, Any]:
    return method.learn(world(), method.start(world()), tiny_stream().slice_(1), PlainDescent())


def blind(slice_: Any) -> Any:
    """A slice whose validation part selects nothing: the last epoch stays."""
    return replace(slice_, validation=replace(slice_.validation, positions=slice_.validation.positions[:0]))


def lots(seed: int) -> Streamed:
    return Streamed(Generator().manual_seed(seed))


def a_batch() -> Windows:
    """The last window's newest target, item 9, is too new for a teacher of 7 rows."""
    tokens = torch.tensor([[BOS, 3, 1, 2], [PAD, PAD, BOS, 4], [BOS, 0, 5, 6]])
    targets = torch.tensor([[1, 2, 6], [5, NO_TARGET, NO_TARGET], [6, NO_TARGET, 9]])
    return Windows(torch.arange(3), tokens, torch.full_like(targets, 3), targets, torch.zeros(3, dtype=torch.int64))


def everywhere(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bool)


def test_the_divergence_of_two_items_by_hand():
    """Teacher logits (2, 0) have spread 1; softened at 2 the teacher says sigmoid(1), a student at (0, 0) one half."""
    found = divergence(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 0.0]]), everywhere(1, 2), 2.0)
    p = 1 / (1 + math.exp(-1))
    assert float(found) == pytest.approx(4 * (p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p))))


def test_the_divergence_is_a_plain_kl_of_standardised_logits():
    rng = Generator().manual_seed(0)
    teacher, student = (5 * torch.randn(4, 9, generator=rng) for _ in range(2))
    for row, found in enumerate(divergence(teacher, student, everywhere(4, 9), 3.0)):
        scale = float(np.std(teacher[row].numpy())) * 3
        p, q = (np.exp(z[row].numpy() / scale) for z in (teacher, student))
        p, q = p / p.sum(), q / q.sum()
        assert float(found) == pytest.approx(9 * float((p * np.log(p / q)).sum()), rel=1e-4)


def test_what_is_not_real_does_not_count():
    rng = Generator().manual_seed(0)
    teacher, student = (torch.randn(2, 6, generator=rng) for _ in range(2))
    real = torch.tensor([[True, True, True, True, False, False]] * 2)
    less = divergence(teacher[:, :4], student[:, :4], everywhere(2, 4), 2.0)
    assert torch.allclose(divergence(teacher, student, real, 2.0), less, atol=1e-6)


def test_the_teacher_itself_is_nowhere_apart_and_scale_and_shift_of_both_do_not_matter():
    rng = Generator().manual_seed(0)
    teacher, student = (torch.randn(3, 8, generator=rng) for _ in range(2))
    assert divergence(teacher, teacher + 7, everywhere(3, 8), 2.0).abs().max() < 1e-5
    one, other = (divergence(k * teacher, k * student, everywhere(3, 8), 2.0) for k in (1, 10))
    assert torch.allclose(one, other, rtol=1e-4)
    assert (one > 0.01).all()


def test_the_gradient_draws_the_student_to_the_teacher():
    teacher, student = torch.tensor([[3.0, 0.0, -1.0]]), torch.zeros(1, 3, requires_grad=True)
    divergence(teacher, student, everywhere(1, 3), 2.0).sum().backward()
    assert student.grad[0, 0] < 0 < student.grad[0, 2]


def test_the_newest_target_is_the_last_real_one_even_behind_a_gap():
    assert newest_targets(a_batch()).tolist() == [6, 5, 9]


def test_the_last_token_of_every_training_window_predicts_the_newest_target():
    slice_ = tiny_stream().slice_(1)
    rng = np.random.default_rng(0)
    windows = training_windows(slice_.past, slice_.train_positions, length=12, stride=6, rng=rng)
    last = (windows.sources == 11) & (windows.targets != NO_TARGET)
    newest = newest_targets(windows)
    assert all(newest[row] in windows.targets[row][last[row]] for row in range(len(windows)))
    assert torch.equal(newest, torch.from_numpy(slice_.past.items[slice_.past.place[windows.newest.numpy()]]))


def test_a_list_holds_the_target_uniform_items_and_the_teachers_best_each_once_and_known():
    teacher = random_model(7)
    teacher.has_row[4] = False
    found = grade_lists(teacher, known_items(teacher), a_batch(), Lists(uniform=20, best=3, pool=1_000), lots(0))
    assert found.items.shape == (3, 1 + 20 + 3)
    assert found.items[:, 0].tolist() == [6, 5, 9]
    scores = teacher.last_hidden(a_batch().tokens) @ teacher.items.T
    scores[:, 4] = -torch.inf
    assert torch.equal(found.items[:, -3:], scores.topk(3).indices)
    for items, real in zip(found.items, found.real, strict=True):
        kept = items[real].tolist()
        assert len(kept) == len(set(kept))
        assert set(kept) == set(items.tolist()) - {4, 9}
    assert torch.allclose(found.logits, logits_of(teacher, found.hidden, found.items))
    assert not found.real[2, 0]  # the teacher has no opinion of a new item


def test_the_pool_limits_where_the_teachers_best_come_from():
    teacher = random_model(400)
    small = grade_lists(teacher, known_items(teacher), a_batch(), Lists(uniform=1, best=5, pool=10), lots(0))
    best = (teacher.last_hidden(a_batch().tokens) @ teacher.items.T).topk(5).indices
    assert not torch.equal(small.items[:, -5:], best)
    assert len(small.items[:, -5:].unique()) <= 10


def test_a_model_that_is_its_own_teacher_gains_nothing_and_new_rows_cost_nothing():
    teacher = random_model(7)
    student = grown(teacher, 10)
    student.items.data[7:] = 50.0
    student.has_row[:] = True
    extra = imitating(teacher, 1.0, 2.0, Lists(20, 3), Generator().manual_seed(0), Notes())
    assert extra(student, a_batch()).abs().max() < 1e-4
    student.items.data[:7] += torch.randn(7, 8, generator=Generator().manual_seed(1))
    assert extra(student, a_batch()).min() > 1e-3


def test_a_window_weighs_as_many_times_as_it_has_targets():
    teacher, student, notes = random_model(7), random_model(7, seed=1), Notes()
    lists = Lists(20, 3)
    found = imitating(teacher, 0.5, 2.0, lists, Generator().manual_seed(0), notes)(student, a_batch()).detach()
    asked = grade_lists(teacher, known_items(teacher), a_batch(), lists, lots(0))
    theirs = logits_of(student, student.last_hidden(a_batch().tokens), asked.items).detach()
    apart = divergence(asked.logits, theirs, asked.real, 2.0)
    assert torch.allclose(found, 0.5 * apart * torch.tensor([3, 1, 2]))
    assert notes.mean("divergence") == pytest.approx(float(apart.mean()))


def test_strength_0_is_finetune_last_bit_for_bit():
    state, diagnostics = after_slice_1(LwF(strength=0.0))
    plain = learned("finetune-last").state.backbone.state_dict()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in state.backbone.state_dict().items())
    assert diagnostics["divergence"] == 0


def test_the_default_strength_changes_the_scores_and_says_so():
    _, queries = questions()
    state, diagnostics = after_slice_1(LwF())
    assert not torch.equal(LwF().score(world(), state, queries), learned("finetune-last").scores(queries))
    assert diagnostics["divergence"] > 0


def test_the_stronger_the_teacher_the_closer_its_grades():
    """Judged on lists neither of them was trained with, the last epoch kept."""
    slice_ = tiny_stream().slice_(1)
    windows = training_windows(slice_.past, slice_.train_positions, length=12, stride=6, rng=np.random.default_rng(0))
    asked = grade_lists(world().backbone, known_items(world().backbone), windows, Lists(), lots(9))

    def apart(strength: float) -> float:
        method = LwF(strength=strength)
        model = method.learn(world(), method.start(world()), blind(slice_), PlainDescent())[0].backbone
        student = logits_of(model, model.last_hidden(windows.tokens), asked.items)
        return float(divergence(asked.logits, student, asked.real, 2.0).mean())

    free, held, tight = (apart(strength) for strength in (0.0, 3.0, 100.0))
    assert free > held > tight


def test_a_state_comes_back_from_its_tensors_and_learns_on_the_same():
    state, _ = after_slice_1(LwF())
    back = restore(take_snapshot(state))
    one, two = (LwF().learn(world(), at, tiny_stream().slice_(2), PlainDescent())[0] for at in (state, back))
    assert every_value(one).keys() == every_value(two).keys()
    assert all(torch.equal(tensor, every_value(two)[name]) for name, tensor in every_value(one).items())


def test_no_gradient_comes_from_the_validation_part():
    """With the validation events' items replaced, and selection blind, the very same weights are learned."""
    slice_ = blind(tiny_stream().slice_(1))
    items = slice_.past.items.copy()
    items[slice_.past.place[np.arange(*slice_.bounds[-1].part("val"))]] = 0
    other = replace(slice_, past=replace(slice_.past, items=items))
    one, two = (LwF().learn(world(), LwF().start(world()), s, PlainDescent())[0] for s in (slice_, other))
    assert all(torch.equal(tensor, every_value(two)[name]) for name, tensor in every_value(one).items())
    assert one.newest_target < slice_.bounds[-1].train_end
