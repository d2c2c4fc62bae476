"""EWC: the Fisher is a mean of squared per-event gradients, springs pull as they should, 0 is FineTune-Last."""

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator
from worlds import LENGTH, every_value, learned, questions, random_model, tiny_config, tiny_stream, warmed_up

from protofed.backbone.losses import LOSSES
from protofed.backbone.one_window import OneWindowLoss
from protofed.backbone.training import PlainDescent
from protofed.methods.baselines.ewc import EWC, choice_probabilities, diagonal_fisher, joint_anchor, log_likelihood
from protofed.methods.baselines.importance import (
    Examples,
    Springs,
    SprungInRounds,
    draw_examples,
    drawing_back,
    mean_gradient_sizes,
    pad_rows,
    quadratic,
    scale_to_mean_one,
    share_above_zero,
    weights_of,
)
from protofed.methods.baselines.mas import MAS
from protofed.methods.protocol import World
from protofed.privacy.descent import Meter, PrivateDescent
from protofed.slices.histories import BOS, PAD
from protofed.slices.windows import NO_TARGET, Windows
from protofed.snapshot import restore, take_snapshot

FEW = EWC(examples=64)


@cache
def world() -> World:
    return World(tiny_config(), tiny_stream().slice_(0), warmed_up()[0])


@cache
def after_slice_1(method: EWC) -> tuple[Any, Any]:
    return method.learn(world(), method.start(world()), tiny_stream().slice_(1), PlainDescent())


def some_examples() -> Examples:
    tokens = torch.tensor([[PAD, BOS, 3, 1, 3, 2], [BOS, 0, 1, 2, 3, 4], [PAD, PAD, PAD, PAD, PAD, BOS]])
    return Examples(
        tokens, torch.tensor([[3, 0, 0, 6], [5, 4, 1, 0], [1, 2, 5, 7]]), 0
    )  # repeated items, item 7 unknown


def model_without_row_5() -> Any:
    model = random_model(7)
    model.has_row[5] = False
    return model


def slow_fisher(model: Any, examples: Examples, chosen: list[int]) -> dict[str, torch.Tensor]:
    """One backward pass per example through the whole table, squared, averaged."""
    total = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    model.requires_grad_(True)
    for tokens, candidates, choice in zip(examples.tokens, examples.candidates, chosen, strict=True):
        model.zero_grad()
        logits = model.embed(candidates) @ model.last_hidden(tokens[None])[0]
        logits.log_softmax(-1)[choice].backward()
        for name, parameter in model.named_parameters():
            total[name] += parameter.grad**2 / len(examples)
    return total


def test_the_fisher_is_the_mean_of_squared_gradients_one_example_at_a_time():
    model, examples = model_without_row_5(), some_examples()
    found = mean_gradient_sizes(model, examples, torch.tensor([0, 2, 3]), log_likelihood, torch.square)
    expected = slow_fisher(model, examples, [0, 2, 3])
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-9), name
    assert (found["items"][5] == 0).all()  # an item without a row has nothing to hold
    assert (found["items"][4] > 0).any()


def test_the_fisher_of_two_candidates_matches_the_formula_by_hand():
    """d log p(first) / d row = p(second) * hidden for the first row, -p(second) * hidden for the second."""
    model = random_model(4)
    examples = Examples(torch.tensor([[PAD, PAD, PAD, PAD, PAD, BOS]]), torch.tensor([[1, 2]]), 0)
    hidden = model.last_hidden(examples.tokens)[0].detach()
    second = torch.sigmoid((model.items[2] - model.items[1]) @ hidden).detach()
    found = diagonal_fisher(model, examples, "true", Generator())["items"]
    assert torch.allclose(found[1], (second * hidden) ** 2, rtol=1e-4)
    assert torch.allclose(found[2], (second * hidden) ** 2, rtol=1e-4)
    assert (found[[0, 3]] == 0).all()


@pytest.mark.slow
def test_sampled_labels_follow_the_models_own_probabilities():
    model, examples = random_model(7), some_examples()
    n = 1_000
    many = Examples(examples.tokens[:1].expand(n, -1), examples.candidates[:1].expand(n, -1), 0)
    probabilities = choice_probabilities(model, many)[0]
    expected = sum(
        float(p) * slow_fisher(random_model(7), replace_rows(examples), [choice])["norm.weight"]
        for choice, p in enumerate(probabilities)
    )
    found = diagonal_fisher(model, many, "sample", Generator().manual_seed(0))["norm.weight"]
    assert torch.allclose(found, expected, rtol=0.2)
    true = diagonal_fisher(model, many, "true", Generator())["norm.weight"]
    assert not torch.allclose(true, expected, rtol=0.2)


def replace_rows(examples: Examples) -> Examples:
    return Examples(examples.tokens[:1], examples.candidates[:1], 0)


def test_examples_are_train_events_with_their_own_history_and_no_positive_among_the_negatives():
    slice_ = tiny_stream().slice_(1)
    examples = draw_examples(world(), slice_, 200, 20, "test")
    assert len(examples) == 200
    assert (examples.candidates[:, 1:] != examples.candidates[:, :1]).all()
    assert 0 <= int(examples.candidates.min()) <= int(examples.candidates.max()) < slice_.n_train_items
    assert examples.newest in slice_.train_positions
    asked = {
        (tuple(tiny_tokens(slice_, position)), int(slice_.past.items[slice_.past.place[position]]))
        for position in slice_.train_positions
    }
    rows = zip(examples.tokens.tolist(), examples.candidates[:, 0].tolist(), strict=True)
    assert all((tuple(tokens), item) in asked for tokens, item in rows)
    assert len(draw_examples(world(), slice_, 10**6, 20, "test")) == len(slice_.train_positions)


def tiny_tokens(slice_: Any, position: int) -> list[int]:
    past = slice_.past
    first = past.start[past.users[position]]
    history = [BOS, *past.items[first : first + past.before[position]].tolist()][-LENGTH:]
    return [PAD] * (LENGTH - len(history)) + history


def test_the_penalty_of_two_weights_by_hand_and_new_rows_are_free():
    weights = {"items": torch.tensor([[1.0], [5.0], [100.0]]), "bias": torch.tensor([2.0])}
    anchor = {"items": torch.tensor([[0.0], [3.0]]), "bias": torch.tensor([2.5])}
    importance = {"items": torch.tensor([[3.0], [0.5]]), "bias": torch.tensor([8.0])}
    assert quadratic(weights, anchor, importance) == pytest.approx(3 * 1 + 0.5 * 4 + 8 * 0.25)


def test_the_mean_loss_of_a_batch_gains_the_penalty_once():
    model = random_model(7)
    anchor = {name: weight + 0.1 for name, weight in weights_of(model).items()}
    ones = {name: torch.ones_like(weight) for name, weight in anchor.items()}
    targets = torch.tensor([[1, 2, 3], [4, NO_TARGET, NO_TARGET]])
    batch = Windows(torch.arange(2), torch.full((2, 6), BOS), torch.zeros_like(targets), targets, torch.zeros(2).long())
    springs = Springs(0.5, anchor, ones)
    added = drawing_back(springs)(model, batch)
    expected = 0.5 * 0.01 * sum(weight.numel() for weight in anchor.values())
    assert float(added.detach().sum() / 4) == pytest.approx(expected, rel=1e-4)
    assert springs.mean() == pytest.approx(expected, rel=1e-4)
    assert drawing_back(Springs(0.0, anchor, ones)) is None


def in_one_round(springs: Springs | None) -> tuple[dict[str, torch.Tensor], PrivateDescent]:
    """What a private round with noise leaves in the gradients of a model, with and without springs."""
    slice_, model = tiny_stream().slice_(1), copy.deepcopy(warmed_up()[0]).requires_grad_(True)
    private = PrivateDescent(3, 1.0, 0.3, 0.5, 1, slice_.past.n_users, Meter(0, 1))
    descend = private if springs is None else SprungInRounds(private, springs)
    (round_,) = descend.rounds()
    windows = descend.cohort(slice_.past, slice_.train_positions, round_, length=LENGTH, stride=6)
    loss = OneWindowLoss(model, LOSSES["softmax"], 8, model.n_rows, 6)
    descend.gradients(loss, windows, torch.optim.SGD(model.parameters(), lr=0.1))
    return {name: weight.grad for name, weight in model.named_parameters()}, private


def test_in_a_private_round_the_springs_pull_after_the_noise_and_nobodys_clip_feels_them():
    weights, rng = weights_of(warmed_up()[0]), Generator().manual_seed(0)
    anchor = {name: weight + torch.randn(weight.shape, generator=rng) for name, weight in weights.items()}
    importance = {name: 100 * torch.rand(weight.shape, generator=rng) for name, weight in weights.items()}
    springs = Springs(0.5, anchor, importance)
    (held, private), (free, alone) = in_one_round(springs), in_one_round(None)
    assert private.meter == alone.meter  # who took part and who was clipped
    for name, weight in weights.items():
        pull = 2 * 0.5 * importance[name] * (weight - anchor[name])
        assert torch.allclose(held[name], free[name] + pull, rtol=1e-5, atol=1e-6)
    assert springs.mean() == pytest.approx(0.5 * float(quadratic(weights, anchor, importance)), rel=1e-5)


def learned_in_two_rounds(method: EWC | MAS) -> tuple[dict[str, torch.Tensor], Meter]:
    slice_, meter = tiny_stream().slice_(1), Meter(0, 2)
    private = PrivateDescent(3, 1.0, 0.3, 50.0, 2, slice_.past.n_users, meter)
    state, _ = method.learn(world(), method.start(world()), slice_, private)
    return weights_of(state.backbone), meter


@pytest.mark.parametrize("kind", [EWC, MAS])
def test_a_strong_spring_moves_private_weights_and_clips_nobody(kind):
    """The first round starts at the anchor and is the same for both; in the second the springs are stretched."""
    (held, meter), (free, alone) = (
        learned_in_two_rounds(kind(strength=strength, examples=64)) for strength in (1e6, 0.0)
    )
    assert (meter.taken_part, meter.clipped) == (alone.taken_part, alone.clipped)
    assert meter.taken_part > 0
    assert meter.clipped == 0
    assert not torch.allclose(held["items"], free["items"], atol=1e-5)


def test_importances_are_scaled_by_the_mean_of_those_that_are_not_zero():
    scaled, mean = scale_to_mean_one({"a": torch.tensor([0.0, 2.0]), "b": torch.tensor([[6.0]])})
    assert mean == 4
    assert [tensor.flatten().tolist() for tensor in scaled.values()] == [[0, 0.5], [1.5]]
    nothing, mean = scale_to_mean_one({"a": torch.zeros(2)})
    assert (nothing["a"].tolist(), mean) == ([0, 0], 0)


def test_importance_of_a_smaller_table_is_padded_with_zeros():
    bigger = pad_rows(
        {"items": torch.ones(2, 1), "b": torch.tensor([3.0])}, {"items": torch.ones(3, 1), "b": torch.ones(1)}
    )
    assert bigger["items"].flatten().tolist() == [1, 1, 0]
    assert bigger["b"].tolist() == [3]
    assert share_above_zero(bigger) == 0.75


def test_two_springs_pull_like_one_around_their_weighted_mean():
    rng = Generator().manual_seed(0)
    one, other, at = ({"w": torch.randn(5, generator=rng)} for _ in range(3))
    stiff, soft = ({"w": torch.rand(5, generator=rng)} for _ in range(2))
    stiff["w"][0] = soft["w"][0] = 0
    at["w"].requires_grad_(True)
    apart = torch.autograd.grad(quadratic(at, one, stiff) + quadratic(at, other, soft), at["w"])[0]
    anchor = joint_anchor(one, stiff, other, soft)
    assert anchor["w"][0] == other["w"][0]
    together = torch.autograd.grad(quadratic(at, anchor, {"w": stiff["w"] + soft["w"]}), at["w"])[0]
    assert torch.allclose(apart, together, atol=1e-6)


def test_strength_0_is_finetune_last_bit_for_bit():
    state, diagnostics = after_slice_1(replace(FEW, strength=0.0))
    plain = learned("finetune-last").state.backbone.state_dict()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in state.backbone.state_dict().items())
    assert diagnostics["penalty"] == 0


def test_the_default_strength_changes_the_scores_and_says_so():
    _, queries = questions()
    state, diagnostics = after_slice_1(FEW)
    assert not torch.equal(FEW.score(world(), state, queries), learned("finetune-last").scores(queries))
    assert diagnostics["penalty"] > 0
    assert diagnostics["fisher_mean"] > 0
    assert 0.5 < diagnostics["important_share"] <= 1


def test_the_stronger_the_springs_the_closer_the_weights_stay():
    """Every epoch must count, so that early stopping does not choose the distance."""

    def distance(strength: float) -> float:
        method, chosen = (
            replace(FEW, strength=strength),
            replace(tiny_stream().slice_(1), validation=nothing_to_select_by()),
        )
        before = method.start(world())
        state, _ = method.learn(world(), before, chosen, PlainDescent())
        return float(quadratic(weights_of(state.backbone), before.anchor, before.importance))

    free, held, tight = (distance(strength) for strength in (0.0, 1.0, 1e3))
    assert free > 1.5 * held
    assert held > tight


def nothing_to_select_by() -> Any:
    asked = tiny_stream().query_set(1, "val")
    return replace(asked, positions=asked.positions[:0])


def test_the_fisher_adds_up_and_decays():
    once = FEW.start(world()).importance
    kept, _ = after_slice_1(replace(FEW, strength=0.0))
    halved, _ = after_slice_1(replace(FEW, strength=0.0, decay=0.5))
    gone, _ = after_slice_1(replace(FEW, strength=0.0, decay=0.0))
    for name, base in pad_rows(once, kept.importance).items():
        assert torch.allclose(kept.importance[name], base + gone.importance[name], atol=1e-4)
        assert torch.allclose(halved.importance[name], 0.5 * base + gone.importance[name], atol=1e-4)
    assert scale_to_mean_one(gone.importance)[1] == pytest.approx(1, rel=1e-4)


def test_the_anchor_is_the_newest_model_or_the_weighted_mean_of_all():
    latest, _ = after_slice_1(FEW)
    assert all(torch.equal(latest.anchor[name], weight) for name, weight in weights_of(latest.backbone).items())
    separate, _ = after_slice_1(replace(FEW, anchors="separate"))
    old, new = world().backbone.norm.weight, separate.backbone.norm.weight
    between = separate.anchor["norm.weight"]
    assert ((between - old) * (new - between) >= -1e-9).all()
    assert not torch.allclose(between, new, atol=1e-5)
    n_old = world().backbone.n_rows
    assert torch.allclose(separate.anchor["items"][n_old:], separate.backbone.items[n_old:], atol=1e-6)


def test_a_state_comes_back_from_its_tensors_and_learns_on_the_same():
    method = FEW
    state, _ = after_slice_1(method)
    back = restore(take_snapshot(state))
    slice_ = tiny_stream().slice_(2)
    one, other = (method.learn(world(), start, slice_, PlainDescent())[0] for start in (state, back))
    assert every_value(one).keys() == every_value(other).keys()
    assert all(torch.equal(tensor, every_value(other)[name]) for name, tensor in every_value(one).items())


def test_no_gradient_comes_from_the_validation_part():
    """With the validation events' items replaced, and selection blind, the very same weights are learned."""
    slice_ = replace(tiny_stream().slice_(1), validation=nothing_to_select_by())
    items = slice_.past.items.copy()
    held_out = np.arange(*slice_.bounds[-1].part("val"))
    items[slice_.past.place[held_out]] = 0
    other = replace(slice_, past=replace(slice_.past, items=items))
    one, two = (FEW.learn(world(), FEW.start(world()), s, PlainDescent())[0] for s in (slice_, other))
    assert all(torch.equal(tensor, every_value(two)[name]) for name, tensor in every_value(one).items())
    assert one.newest_target < slice_.bounds[-1].train_end
