"""SI: what a weight earns is -gradient * move, by hand and step by step; strength 0 is FineTune-Last."""

from collections import deque
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from worlds import every_value, learned, questions, tiny_config, tiny_stream, warmed_up

from protofed.backbone.training import Fit, PlainDescent
from protofed.methods.baselines import synaptic_intelligence
from protofed.methods.baselines.importance import Springs, quadratic, weights_of, zeros_of
from protofed.methods.baselines.synaptic_intelligence import (
    EarningDescent,
    SynapticIntelligence,
    consolidate,
    warm_up_again,
)
from protofed.methods.protocol import World
from protofed.slices.windows import Windows
from protofed.snapshot import restore, take_snapshot

SI = SynapticIntelligence


@cache
def world() -> World:
    return World(tiny_config(), tiny_stream().slice_(0), warmed_up()[0])


@cache
def repeated() -> tuple[Any, Any, Any]:
    return warm_up_again(world())


@pytest.fixture(autouse=True)
def _the_warm_up_is_repeated_once(monkeypatch):
    monkeypatch.setattr(synaptic_intelligence, "warm_up_again", lambda world: repeated())


@cache
def after_slice_1(method: SI) -> tuple[Any, Any]:
    return method.learn(world(), method.start(world()), tiny_stream().slice_(1), PlainDescent())


def blind(slice_: Any) -> Any:
    """A slice whose validation part selects nothing: the last epoch stays."""
    return replace(slice_, validation=replace(slice_.validation, positions=slice_.validation.positions[:0]))


def a_batch() -> Windows:
    column = torch.zeros(2, 1, dtype=torch.int64)
    return Windows(column[:, 0], column, column, column, column[:, 0])


def earning(**settings: Any) -> EarningDescent:
    nothing = {"w": torch.zeros(2)}
    plain = {"descend": PlainDescent(1e9), "springs": Springs(0.0, {}, {})}
    return EarningDescent(**(plain | {"earned": nothing, "epochs": deque([{"w": torch.zeros(2)}])} | settings))


def squares(weight: torch.Tensor) -> Any:
    """Two windows of 3 and 1 targets whose mean loss is w_0^2 + 2 w_1^2."""

    def losses(batch: Windows) -> tuple[torch.Tensor, torch.Tensor]:
        mean = weight[0] ** 2 + 2 * weight[1] ** 2
        return torch.stack([3 * mean, mean]), torch.tensor([3, 1])

    return losses


def test_the_path_of_two_steps_by_hand():
    """SGD at rate 0.1 on w0^2 + 2 w1^2: gradients (2 w0, 4 w1), moves -0.1 times that."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    watch, optimiser = earning(), torch.optim.SGD([{"params": [weight], "weight_decay": 0.0}], lr=0.1)
    for _ in range(2):
        watch(squares(weight), a_batch(), optimiser)
    # w0: 1 -> 0.8 -> 0.64, gradients 2 and 1.6; w1: -2 -> -1.2 -> -0.72, gradients -8 and -4.8
    assert weight.tolist() == pytest.approx([0.64, -0.72])
    assert watch.earned["w"].tolist() == pytest.approx([2 * 0.2 + 1.6 * 0.16, 8 * 0.8 + 4.8 * 0.48])


def test_a_clipped_step_is_weighed_with_the_whole_gradient():
    weight = nn.Parameter(torch.tensor([3.0, 0.0]))
    watch, optimiser = earning(descend=PlainDescent(1.0)), torch.optim.SGD([weight], lr=0.5)
    watch(squares(weight), a_batch(), optimiser)
    assert weight.tolist() == pytest.approx([2.5, 0])  # gradient 6, clipped to 1
    assert watch.earned["w"].tolist() == pytest.approx([6 * 0.5, 0])


def test_weight_decay_earns_nothing():
    earned = []
    for decay in (0.0, 0.3):
        weight = nn.Parameter(torch.tensor([1.0, -2.0]))
        watch = earning()
        watch(squares(weight), a_batch(), torch.optim.AdamW([weight], lr=0.1, weight_decay=decay))
        earned.append(watch.earned["w"])
    assert torch.allclose(earned[0], earned[1], atol=1e-5)
    assert (earned[0] > 0).all()


def test_the_penalty_moves_the_weights_but_has_no_part_in_the_gradient():
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    springs = Springs(0.5, {"w": torch.tensor([0.0, 0.0])}, {"w": torch.tensor([4.0, 0.0])})
    watch = earning(springs=springs)
    watch(squares(weight), a_batch(), torch.optim.SGD([{"params": [weight], "weight_decay": 0.0}], lr=0.1))
    # the penalty 0.5 * 4 * w0^2 adds a gradient of 4 to the loss's own 2
    assert weight.tolist() == pytest.approx([1 - 0.1 * (2 + 4), -1.2])
    assert watch.earned["w"].tolist() == pytest.approx([2 * 0.6, 8 * 0.8])
    assert springs.mean() == pytest.approx(0.5 * 4 * 1)


def test_consolidation_by_hand():
    importance = {"items": torch.tensor([[1.0], [1.0]])}
    earned = {"items": torch.tensor([[0.5], [-3.0], [0.2]])}
    start, end = {"items": torch.tensor([[0.0], [0.0], [7.0]])}, {"items": torch.tensor([[2.0], [1.0], [7.0]])}
    found = consolidate(importance, earned, start, end, damping=1.0)["items"].flatten()
    assert found.tolist() == pytest.approx([1 + 0.5 / 5, 0, 0.2 / 1])  # no importance below 0, the new row starts at 0


def test_only_what_was_earned_until_the_best_epoch_counts():
    watch = earning(epochs=deque([{"w": torch.zeros(2)}], maxlen=4))
    for epoch in range(1, 7):
        watch.earned["w"] += 1
        watch.progress("slice 1", epoch, 9)
    fit = Fit((0.1, 0.2, 0.3, 0.5, 0.4, 0.4, 0.4), 1, 0)
    assert watch.earned_until_best(fit)["w"].tolist() == [3, 3]
    assert watch.earned_until_best(Fit((0.1, 0.2, 0.3, 0.3, 0.4, 0.4, 0.6), 1, 0))["w"].tolist() == [6, 6]


def test_repeating_the_warm_up_ends_at_the_shared_backbone_and_earns_what_the_loss_lost():
    first, last, earned = repeated()
    assert all(torch.equal(tensor, last.state_dict()[name]) for name, tensor in world().backbone.state_dict().items())
    assert not torch.equal(first.items, last.items)
    assert sum(float(tensor.sum()) for tensor in earned.values()) > 0


def test_the_sum_of_all_that_is_earned_is_close_to_what_the_loss_lost():
    """With small plain steps and no noise the path integral is the fall of the loss."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    watch, optimiser = earning(), torch.optim.SGD([{"params": [weight], "weight_decay": 0.0}], lr=1e-3)
    for _ in range(400):
        watch(squares(weight), a_batch(), optimiser)
    lost = (1 + 2 * 4) - float(weight.detach()[0] ** 2 + 2 * weight.detach()[1] ** 2)
    assert float(watch.earned["w"].sum()) == pytest.approx(lost, rel=0.01)


def test_strength_0_is_finetune_last_bit_for_bit():
    state, diagnostics = after_slice_1(SI(strength=0.0))
    plain = learned("finetune-last").state.backbone.state_dict()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in state.backbone.state_dict().items())
    assert diagnostics["penalty"] == 0


def test_the_default_strength_changes_the_scores_and_says_so():
    _, queries = questions()
    state, diagnostics = after_slice_1(SI())
    assert not torch.equal(SI().score(world(), state, queries), learned("finetune-last").scores(queries))
    assert diagnostics["penalty"] > 0
    assert diagnostics["earned"] > 0
    assert 0.3 < diagnostics["important_share"] <= 1


def test_the_stronger_the_penalty_the_closer_the_weights_stay():
    first, last, earned = repeated()
    importance = consolidate(zeros_of(first), earned, weights_of(first), weights_of(last), SI().damping)

    def distance(strength: float) -> float:
        method = SI(strength=strength)
        state, _ = method.learn(world(), method.start(world()), blind(tiny_stream().slice_(1)), PlainDescent())
        return float(quadratic(weights_of(state.backbone), weights_of(world().backbone), importance))

    free, held, tight = (distance(strength) for strength in (0.0, 10.0, 1e3))
    assert free > 1.5 * held
    assert held > tight


def test_no_importance_is_negative_and_new_rows_have_some():
    state, _ = after_slice_1(SI())
    assert all((tensor >= 0).all() for tensor in state.importance.values())
    new = state.backbone.has_row[world().backbone.n_rows :]
    rows = state.importance["items"][world().backbone.n_rows :]
    assert (rows[new] > 0).any()
    assert (rows[~new] == 0).all()


def test_a_state_comes_back_from_its_tensors_and_learns_on_the_same():
    state, _ = after_slice_1(SI())
    back = restore(take_snapshot(state))
    one, two = (SI().learn(world(), at, tiny_stream().slice_(2), PlainDescent())[0] for at in (state, back))
    assert every_value(one).keys() == every_value(two).keys()
    assert all(torch.equal(tensor, every_value(two)[name]) for name, tensor in every_value(one).items())


def test_no_gradient_comes_from_the_validation_part():
    """With the validation events' items replaced, and selection blind, the very same weights are learned."""
    slice_ = blind(tiny_stream().slice_(1))
    items = slice_.past.items.copy()
    items[slice_.past.place[np.arange(*slice_.bounds[-1].part("val"))]] = 0
    other = replace(slice_, past=replace(slice_.past, items=items))
    one, two = (SI().learn(world(), SI().start(world()), s, PlainDescent())[0] for s in (slice_, other))
    assert all(torch.equal(tensor, every_value(two)[name]) for name, tensor in every_value(one).items())
    assert one.newest_target < slice_.bounds[-1].train_end
