"""MAS: importance is how much the output's length reacts, label or no label; strength 0 is FineTune-Last."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator
from worlds import every_value, learned, questions, random_model, tiny_config, tiny_stream, warmed_up

from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import PlainDescent
from protofed.config import BackboneConfig
from protofed.methods.baselines.importance import Examples, pad_rows, quadratic, scale_to_mean_one, weights_of
from protofed.methods.baselines.mas import MAS, sensitivity
from protofed.methods.protocol import World
from protofed.slices.histories import BOS, PAD
from protofed.snapshot import restore, take_snapshot

FEW = MAS(examples=64)


@cache
def world() -> World:
    return World(tiny_config(), tiny_stream().slice_(0), warmed_up()[0])


@cache
def after_slice_1(method: MAS) -> tuple[Any, Any]:
    return method.learn(world(), method.start(world()), tiny_stream().slice_(1), PlainDescent())


def blind(slice_: Any) -> Any:
    """A slice whose validation part selects nothing: the last epoch stays."""
    return replace(slice_, validation=replace(slice_.validation, positions=slice_.validation.positions[:0]))


def some_examples() -> Examples:
    tokens = torch.tensor([[PAD, BOS, 3, 1, 3, 2], [BOS, 0, 1, 2, 3, 4], [PAD, PAD, PAD, PAD, PAD, BOS]])
    return Examples(tokens, torch.tensor([[3, 0, 0, 6], [5, 4, 1, 0], [1, 2, 5, 4]]), 0)


def slow_sensitivity(model: SASRec, examples: Examples, output: str) -> dict[str, torch.Tensor]:
    total = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    model.requires_grad_(True)
    for tokens, candidates in zip(examples.tokens, examples.candidates, strict=True):
        model.zero_grad()
        hidden = model.last_hidden(tokens[None])[0]
        (hidden if output == "hidden" else model.embed(candidates) @ hidden).square().sum().backward()
        for name, parameter in model.named_parameters():
            total[name] += (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).abs()
    return {name: tensor / len(examples) for name, tensor in total.items()}


@pytest.mark.parametrize("output", ["logits", "hidden"])
def test_importance_is_the_mean_of_absolute_gradients_one_example_at_a_time(output):
    model, examples = random_model(7), some_examples()
    found, expected = sensitivity(model, examples, output), slow_sensitivity(random_model(7), examples, output)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-3, atol=1e-5), name


def test_importance_of_an_output_row_by_hand():
    """d (row . hidden)^2 / d row = 2 * (row . hidden) * hidden where the row is a candidate alone."""
    model = random_model(4)
    examples = Examples(torch.tensor([[PAD, PAD, PAD, PAD, PAD, BOS]]), torch.tensor([[1, 2]]), 0)
    hidden = model.last_hidden(examples.tokens)[0].detach()
    found = sensitivity(model, examples, "logits")["items"]
    assert torch.allclose(found[2], (2 * (model.items[2] @ hidden) * hidden).abs().detach(), rtol=1e-4)
    assert (found[[0, 3]] == 0).all()


def test_the_length_of_a_normalised_state_is_blind_to_all_before_the_norm_and_the_logits_are_not():
    config = BackboneConfig(width=8, layers=2, heads=2, ffn_width=2, history_length=6, dropout=0.0)
    fresh = SASRec(config, 7, Generator().manual_seed(0)).eval()  # its last norm is still plain
    logits, hidden = (sensitivity(fresh, some_examples(), output) for output in ("logits", "hidden"))
    for name in ("items", "blocks.0.value.weight", "blocks.1.narrow.weight"):
        assert float(hidden[name].max()) < 1e-3 * float(logits[name].max())


def test_no_label_has_a_say():
    """Other items at the drawn events, with the same histories, give the same importances."""
    slice_ = tiny_stream().slice_(1)
    last_of_user = slice_.past.start[1:][np.diff(slice_.past.start) > 0] - 1  # nobody's history holds these
    items = slice_.past.items.copy()
    items[last_of_user] = (items[last_of_user] + 1) % slice_.n_train_items
    other = replace(slice_, past=replace(slice_.past, items=items))
    state = FEW.start(world())
    one, two = (FEW._consolidated(world(), state, world().backbone, s, 0)[0] for s in (slice_, other))
    assert any(np.isin(slice_.past.place[slice_.train_positions], last_of_user))
    assert not torch.equal(state.importance["norm.weight"], one.importance["norm.weight"])
    assert all(torch.equal(tensor, two.importance[name]) for name, tensor in one.importance.items())


def test_importances_add_up_or_are_averaged():
    base = FEW.start(world()).importance
    total, _ = after_slice_1(replace(FEW, strength=0.0))
    mean, _ = after_slice_1(replace(FEW, strength=0.0, accumulate="average"))
    for name, tensor in total.importance.items():
        assert torch.allclose(mean.importance[name], tensor / 2, rtol=1e-4, atol=1e-6)
        assert (tensor - pad_rows(base, total.importance)[name] >= -1e-5).all()
    assert scale_to_mean_one(base)[1] == pytest.approx(1, rel=1e-4)


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
    assert diagnostics["sensitivity_mean"] > 0
    assert 0.5 < diagnostics["important_share"] <= 1


def test_the_stronger_the_penalty_the_closer_the_weights_stay():
    def distance(strength: float) -> float:
        method = replace(FEW, strength=strength)
        before = method.start(world())
        state, _ = method.learn(world(), before, blind(tiny_stream().slice_(1)), PlainDescent())
        return float(quadratic(weights_of(state.backbone), before.anchor, before.importance))

    free, held, tight = (distance(strength) for strength in (0.0, 1.0, 1e3))
    assert free > 1.5 * held
    assert held > tight


def test_a_state_comes_back_from_its_tensors_and_learns_on_the_same():
    state, _ = after_slice_1(FEW)
    back = restore(take_snapshot(state))
    one, two = (FEW.learn(world(), at, tiny_stream().slice_(2), PlainDescent())[0] for at in (state, back))
    assert every_value(one).keys() == every_value(two).keys()
    assert all(torch.equal(tensor, every_value(two)[name]) for name, tensor in every_value(one).items())


def test_no_gradient_comes_from_the_validation_part():
    """With the validation events' items replaced, and selection blind, the very same weights are learned."""
    slice_ = blind(tiny_stream().slice_(1))
    items = slice_.past.items.copy()
    items[slice_.past.place[np.arange(*slice_.bounds[-1].part("val"))]] = 0
    other = replace(slice_, past=replace(slice_.past, items=items))
    one, two = (FEW.learn(world(), FEW.start(world()), s, PlainDescent())[0] for s in (slice_, other))
    assert all(torch.equal(tensor, every_value(two)[name]) for name, tensor in every_value(one).items())
    assert one.newest_target < slice_.bounds[-1].train_end
