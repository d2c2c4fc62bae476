"""PCL: zero prompts change nothing, attention by hand, short histories, what trains, training agrees with serving."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor
from worlds import LENGTH, questions, random_model, tiny_config, tiny_stream, warmed_up

from protofed.backbone.losses import sampled_softmax, window_losses
from protofed.backbone.new_items import with_new_rows
from protofed.backbone.training import PlainDescent
from protofed.methods.baselines.pcl import PCL, PCLState, Prompted, contextual_prompt, prompted_model, prompts_and_rows
from protofed.methods.frozen import backbone_scores, start_from_backbone
from protofed.methods.protocol import World
from protofed.slices.histories import BOS, PAD, queries_at
from protofed.slices.windows import training_windows
from protofed.snapshot import restore, take_snapshot


@cache
def world() -> World:
    return World(tiny_config(), tiny_stream().slice_(0), warmed_up()[0])


def blind(slices: int) -> Any:
    """A slice whose validation part selects nothing: the last epoch stays, even where it is worse than zero prompts."""
    slice_ = tiny_stream().slice_(slices)
    return replace(slice_, validation=replace(slice_.validation, positions=slice_.validation.positions[:0]))


@cache
def after(slices: int) -> tuple[PCLState, Any]:
    method = PCL()
    if not slices:
        return method.start(world()), {}
    return method.learn(world(), after(slices - 1)[0], blind(slices), PlainDescent())


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed))


def a_prompted_model(t: int = 2, tau: int = 3) -> Prompted:
    return Prompted(random_model(9), drawn(t, tau, 8), drawn(3, 8, 8, seed=1))


def added(model: Prompted, tokens: list[int]) -> Tensor:
    """What the prompts add to each token's input vector."""
    asked = torch.tensor([tokens])
    return (model.token_inputs(asked) - super(Prompted, model).token_inputs(asked))[0]


def test_the_contextual_prompt_by_hand():
    """Two slices, d = 1: means 1 and 3, fits 2 * 1 and 2 * 3 (W_q q = 2, W_k = 1), values doubled by W_v."""
    prompts = torch.tensor([[[0.0], [2.0]], [[3.0], [3.0]]])
    found = contextual_prompt(torch.tensor([[1.0]]), prompts, torch.tensor([[[2.0]], [[1.0]], [[2.0]]]))
    weight = 1 / (1 + math.exp(4))
    assert float(found) == pytest.approx(2 * (weight * 1 + (1 - weight) * 3))


def test_the_fit_is_divided_by_the_root_of_the_width():
    eye = torch.eye(4).expand(3, 4, 4)
    prompts = torch.stack([torch.eye(4)[:1], torch.eye(4)[1:2]])  # means e_0 and e_1
    found = contextual_prompt(torch.tensor([[6.0, 0, 0, 0]]), prompts, eye)
    weight = 1 / (1 + math.exp(-6 / 2))
    assert found[0].tolist() == pytest.approx([weight, 1 - weight, 0, 0])


def test_zero_prompts_change_no_score():
    backbone = warmed_up()[0]
    d = backbone.config.width
    model = Prompted(backbone, torch.zeros(3, 8, d), drawn(3, d, d))
    _, queries = questions()
    found = model.scores(model.last_hidden(queries.tokens), queries.n_items)
    assert torch.equal(found, backbone.scores(backbone.last_hidden(queries.tokens), queries.n_items))


def test_before_the_first_slice_scores_are_the_backbones():
    _, queries = questions()
    assert torch.equal(
        PCL().score(world(), after(0)[0], queries), backbone_scores(start_from_backbone(world()), queries)
    )


def test_prompts_sit_on_the_newest_items_right_aligned():
    model = a_prompted_model(tau=3)
    tokens = [BOS, 4, 5, 6, 7, 8]
    rows = model.embed(torch.tensor([6, 7, 8])) * math.sqrt(8)
    context = contextual_prompt(rows.mean(0, keepdim=True), model.prompts(), model.attention)
    assert torch.equal(added(model, tokens)[:3], torch.zeros(3, 8))
    assert torch.allclose(added(model, tokens)[3:], model.newest + context, atol=1e-5)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_history_shorter_than_the_prompt_meets_its_last_vectors_and_bos_and_padding_none(n):
    model = a_prompted_model(tau=3)
    tokens = [PAD] * (5 - n) + [BOS] + [4, 5][:n]
    assert torch.equal(added(model, tokens)[: 6 - n], torch.zeros(6 - n, 8))
    if n:
        context = contextual_prompt(
            model.embed(torch.tensor([4, 5][:n])).mean(0)[None] * math.sqrt(8), model.prompts(), model.attention
        )
        assert torch.allclose(added(model, tokens)[6 - n :], model.newest[-n:] + context, atol=1e-5)


def test_padding_in_front_changes_nothing():
    model = a_prompted_model(tau=4)
    short, long = torch.tensor([[BOS, 3, 7]]), torch.tensor([[PAD, PAD, PAD, BOS, 3, 7]])
    assert torch.allclose(model.last_hidden(short), model.last_hidden(long), atol=1e-5)


def test_a_target_is_trained_on_the_state_it_is_served_from():
    """Windows of one target, as `learn` cuts them, and the queries asked just before the same events."""
    slice_ = tiny_stream().slice_(1)
    positions = slice_.train_positions
    windows = training_windows(slice_.past, positions, length=LENGTH, stride=1, rng=np.random.default_rng(0))
    by_position = windows.newest.argsort()
    assert windows.newest[by_position].tolist() == positions.tolist()
    served = queries_at(slice_.past, positions, length=LENGTH, slice_index=1, n_items=9, times=slice_.times)
    assert torch.equal(windows.tokens[by_position], served.tokens)
    assert (windows.sources[:, 0] == LENGTH - 1).all()
    model = prompted_model(after(1)[0])
    trained = model.hidden(windows.tokens[by_position])[:, LENGTH - 1]
    assert torch.allclose(trained, model.last_hidden(served.tokens), atol=1e-5)


def test_windows_of_many_targets_would_not_be_served_as_trained():
    """Why `learn` cuts one target per window: an older target's state misses the prompt it is served with."""
    model = a_prompted_model(tau=2)
    window, history = torch.tensor([[BOS, 1, 2, 3, 4]]), torch.tensor([[PAD, BOS, 1, 2, 3]])
    assert not torch.allclose(model.hidden(window)[:, 3], model.last_hidden(history), atol=1e-3)


def test_gradients_reach_the_newest_prompt_the_attention_the_norm_and_new_rows_alone():
    model, new = a_prompted_model(), torch.zeros(9, dtype=torch.bool)
    new[7:] = True
    model.requires_grad_(False)
    for parameter in (p for group in prompts_and_rows(new, head=True)(model) for p in group["params"]):
        parameter.requires_grad_(True)
    tokens = torch.tensor([[BOS, 1, 2, 3, 7, 4]])
    windows = training_windows(
        tiny_stream().slice_(1).past,
        tiny_stream().slice_(1).train_positions[:1],
        length=6,
        stride=1,
        rng=np.random.default_rng(0),
    )
    windows = replace(windows, tokens=tokens, sources=torch.tensor([[5]]), targets=torch.tensor([[8]]))
    window_losses(model, windows, torch.tensor([[0, 5, 6]]), sampled_softmax)[0].sum().backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert touched == {"newest", "attention", "norm.weight", "norm.bias", "items"}
    assert torch.equal(model.items.grad[:7], torch.zeros(7, 8))
    assert (model.items.grad[7:].abs().sum(1) > 0).all()
    assert (model.attention.grad.abs().sum((1, 2)) > 0).all()


def test_learning_moves_the_prompt_and_leaves_earlier_prompts_and_the_backbone_where_they_are():
    (first, said), (second, _) = after(1), after(2)
    assert first.prompts.shape == (1, 8, 16)
    assert first.prompts.abs().sum() > 0
    assert said["prompt_length"] == pytest.approx(float(first.prompts[0].norm(dim=-1).mean()))
    assert torch.equal(second.prompts[0], first.prompts[0])
    assert second.prompts.shape == (2, 8, 16)
    assert torch.equal(after(0)[0].prompts, torch.zeros(0, 8, 16))
    old, new = world().backbone.state_dict(), second.backbone.state_dict()
    free = {"items", "has_row", "mean_row", "norm.weight", "norm.bias"}
    assert all(torch.equal(new[key], old[key]) for key in old if key not in free)
    assert torch.equal(new["items"][: len(old["items"])], old["items"])
    assert not torch.equal(new["norm.weight"], old["norm.weight"])


def test_prompts_change_scores():
    _, queries = questions()
    state = after(1)[0]
    assert not torch.allclose(PCL().score(world(), state, queries), backbone_scores(state, queries), atol=1e-3)


def test_without_the_head_the_output_norm_stays():
    state, _ = PCL(head=False).learn(world(), after(0)[0], blind(1), PlainDescent())
    assert torch.equal(state.backbone.norm.weight, world().backbone.norm.weight)


def test_two_slices_of_prompts_survive_packing():
    state, (_, queries) = after(2)[0], questions(2)
    back = restore(take_snapshot(state))
    assert torch.equal(back.prompts, state.prompts)
    assert torch.equal(PCL().score(world(), back, queries), PCL().score(world(), state, queries))


def test_a_slice_without_train_events_adds_a_prompt_of_zeros():
    slice_ = tiny_stream().slice_(1)
    bounds = replace(slice_.bounds[-1], train_end=slice_.bounds[-1].start)
    nothing = replace(slice_, bounds=(*slice_.bounds[:-1], bounds), n_train_items=world().base.n_train_items)
    assert not len(nothing.train_positions)
    assert not with_new_rows(world().backbone, nothing)[1].any()
    state, said = PCL().learn(world(), after(0)[0], nothing, PlainDescent())
    assert torch.equal(state.prompts, torch.zeros(1, 8, 16))
    assert said["new_rows"] == 0
    _, queries = questions()
    assert torch.equal(PCL().score(world(), state, queries), backbone_scores(start_from_backbone(world()), queries))


def test_the_newest_target_is_the_last_train_event():
    assert after(1)[0].newest_target == int(tiny_stream().slice_(1).train_positions[-1])
