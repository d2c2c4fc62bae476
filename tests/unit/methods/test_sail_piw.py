"""SAIL-PIW: weights by hand, clusters that gather, newcomers left alone, strength 0 is FineTune-Last."""

import copy
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator
from worlds import LENGTH, every_value, learned, questions, tiny_config, tiny_log, tiny_stream, warmed_up

from protofed.backbone.extras import Notes
from protofed.backbone.training import PlainDescent
from protofed.methods.baselines.lwf import LwF
from protofed.methods.baselines.sail_piw import (
    SailPIW,
    Weighting,
    clustering_loss,
    evenness,
    returning_users,
    scale_to_mean_one,
)
from protofed.methods.protocol import World
from protofed.slices.windows import training_windows
from protofed.snapshot import restore, take_snapshot

SAIL = SailPIW()


@cache
def world() -> World:
    return World(tiny_config(), tiny_stream().slice_(0), warmed_up()[0])


@cache
def after_slice_1(method: SailPIW) -> tuple[Any, Any]:
    return method.learn(world(), method.start(world()), tiny_stream().slice_(1), PlainDescent())


def blind(slice_: Any) -> Any:
    """A slice whose validation part selects nothing: the last epoch stays."""
    return replace(slice_, validation=replace(slice_.validation, positions=slice_.validation.positions[:0]))


def two_clusters() -> Weighting:
    """Transforms that double and that swap, and a network that adds up the change and multiplies it by 3."""
    weighting = Weighting(2, 2, Generator()).requires_grad_(False)
    weighting.centres.copy_(torch.tensor([[1.0, 0.0], [0.5, 1.0]]))
    weighting.transforms.copy_(torch.tensor([[[2.0, 0.0], [0.0, 2.0]], [[0.0, 1.0], [1.0, 0.0]]]))
    weighting.widen.weight.fill_(1.0), weighting.widen.bias.zero_()
    weighting.narrow.weight.copy_(torch.tensor([[3.0, 0.0]])), weighting.narrow.bias.zero_()
    return weighting


def test_interests_and_weight_by_hand():
    weighting = two_clusters()
    old, new = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    # turned centres: (1, 0) doubled is (2, 0); (0.5, 1) swapped is (1, 0.5)
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    first_old, first_new = sigmoid(0 - 0.5), sigmoid(2 - 1)
    assert weighting.interests(old)[0].tolist() == pytest.approx([first_old, 1 - first_old])
    assert weighting.interests(new)[0].tolist() == pytest.approx([first_new, 1 - first_new])
    change = 2 * (first_old - first_new) ** 2
    assert float(weighting(old, new)) == pytest.approx(math.log1p(math.exp(3 * change)), rel=1e-5)


def test_who_has_not_changed_weighs_what_the_networks_biases_say():
    weighting = two_clusters()
    same = torch.tensor([[0.3, -1.0], [5.0, 2.0]])
    assert weighting(same, same).tolist() == pytest.approx([math.log(2)] * 2)


def test_weights_have_mean_1_over_those_who_count():
    found = scale_to_mean_one(torch.tensor([1.0, 3.0, 50.0]), torch.tensor([True, True, False]))
    assert found.tolist() == pytest.approx([0.5, 1.5, 0])
    assert scale_to_mean_one(torch.ones(2), torch.zeros(2, dtype=torch.bool)).tolist() == [0, 0]


def test_evenness_is_1_for_equal_weights_and_0_for_a_single_one():
    assert float(evenness(torch.full((5,), 0.3), torch.ones(5).bool())) == pytest.approx(1)
    assert float(evenness(torch.tensor([0.0, 2.0, 0.0]), torch.ones(3).bool())) == 0
    shares = np.array([0.25, 0.75])
    assert float(evenness(torch.tensor([1.0, 9.0, 3.0]), torch.tensor([True, False, True]))) == pytest.approx(
        -(shares * np.log(shares)).sum() / np.log(2)
    )
    assert float(evenness(torch.zeros(0), torch.zeros(0).bool())) == 0


def test_the_clustering_loss_matches_a_slow_reference():
    rng = Generator().manual_seed(0)
    rows, centres = torch.randn(6, 3, generator=rng), torch.randn(2, 3, generator=rng)
    q = np.array([[1 / (1 + ((r - c) ** 2).sum()) for c in centres.numpy()] for r in rows.numpy()])
    q /= q.sum(1, keepdims=True)
    p = q**2 / q.sum(0)
    p /= p.sum(1, keepdims=True)
    assert float(clustering_loss(rows, centres)) == pytest.approx((p * np.log(p / q)).sum() / 6, rel=1e-4)


def test_descending_the_clustering_loss_draws_centres_to_their_groups():
    rng = Generator().manual_seed(0)
    rows = torch.cat([0.1 * torch.randn(20, 2, generator=rng) + shift for shift in (-3, 3)])
    before = torch.tensor([[-1.0, -1.0], [1.5, 1.0]])
    centres = before.clone().requires_grad_(True)
    optimiser = torch.optim.Adam([centres], lr=0.1)
    for _ in range(150):
        optimiser.zero_grad()
        clustering_loss(rows, centres).backward()
        optimiser.step()
    means = rows.view(2, 20, 2).mean(1)
    assert ((centres.detach() - means).norm(dim=1) < (before - means).norm(dim=1)).all()


def test_returning_users_have_an_event_before_the_slice():
    slice_ = tiny_stream().slice_(1)
    users = tiny_log().users.numpy()
    before = set(users[: slice_.bounds[-1].start].tolist())
    found = returning_users(slice_)
    assert {user for user in range(len(found)) if found[user]} == before
    assert len(found) == slice_.past.n_users


def pull_on_the_backbone(slice_: Any) -> tuple[float, dict[str, float]]:
    """The largest gradient that the addition to the loss gives any weight of a student, and what was noted."""
    model = copy.deepcopy(learned("finetune-last").state.backbone).requires_grad_(True)
    windows = training_windows(
        slice_.past, tiny_stream().slice_(1).train_positions, length=LENGTH, stride=6, rng=np.random.default_rng(0)
    )
    notes = Notes()
    weighting = SAIL._seeded(world(), SAIL.start(world()), slice_)
    extra = SAIL._imitating(world(), (world().backbone, model), slice_, weighting.requires_grad_(True), notes)
    extra(model, windows).sum().backward()
    return max(float(weight.grad.abs().max()) for weight in model.parameters()), notes.means()


def test_newcomers_are_not_held_to_the_teacher():
    slice_ = tiny_stream().slice_(1)
    all_new = replace(slice_, bounds=(*slice_.bounds[:-1], replace(slice_.bounds[-1], start=0)))
    assert not returning_users(all_new).any()
    (pull, noted), (none, nothing) = (pull_on_the_backbone(each) for each in (slice_, all_new))
    assert pull > 0.01
    assert none == 0  # the clusters' loss holds the item rows fixed
    assert noted["weight_spread"] > 0 == nothing["weight_spread"]


def test_fixed_weights_leave_the_network_as_it_was_drawn_and_joint_ones_train_it():
    begun = SAIL.start(world()).weighting
    fixed, joint = (after_slice_1(replace(SAIL, weights=kind))[0].weighting for kind in ("fixed", "joint"))
    for name in ("widen.weight", "narrow.weight", "transforms"):
        assert not torch.allclose(joint[name], begun[name], atol=1e-4)
        assert torch.allclose(fixed[name], begun[name], atol=1e-4)  # weight decay alone
    assert not torch.equal(fixed["centres"], begun["centres"])


def test_centres_start_at_item_rows_of_the_slice_and_the_rest_is_carried_on():
    state, _ = after_slice_1(SAIL)
    weighting = SAIL._seeded(world(), state, tiny_stream().slice_(2))
    rows = state.backbone.items[state.backbone.has_row]
    assert weighting.centres.shape == (10, 16)
    assert all((rows == centre).all(1).any() for centre in weighting.centres)
    assert torch.equal(weighting.transforms, state.weighting["transforms"])
    assert not torch.equal(weighting.centres, state.weighting["centres"])


def test_strength_0_is_finetune_last_bit_for_bit():
    state, diagnostics = after_slice_1(replace(SAIL, strength=0.0))
    plain = learned("finetune-last").state.backbone.state_dict()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in state.backbone.state_dict().items())
    assert diagnostics["divergence"] == 0


def test_the_default_strength_changes_the_scores_and_says_so():
    _, queries = questions()
    state, diagnostics = after_slice_1(SAIL)
    scores = SAIL.score(world(), state, queries)
    assert not torch.equal(scores, learned("finetune-last").scores(queries))
    lwf, _ = LwF().learn(world(), LwF().start(world()), tiny_stream().slice_(1), PlainDescent())
    assert not torch.equal(scores, LwF().score(world(), lwf, queries))
    assert diagnostics["divergence"] > 0
    assert diagnostics["weight_spread"] > 0
    assert 0.9 < diagnostics["weight_evenness"] <= 1.0001


def test_a_state_comes_back_from_its_tensors_and_learns_on_the_same():
    state, _ = after_slice_1(SAIL)
    back = restore(take_snapshot(state))
    one, two = (SAIL.learn(world(), at, tiny_stream().slice_(2), PlainDescent())[0] for at in (state, back))
    assert every_value(one).keys() == every_value(two).keys()
    assert all(torch.equal(tensor, every_value(two)[name]) for name, tensor in every_value(one).items())


def test_the_same_seed_gives_the_same_state_whatever_the_global_generator_says():
    with torch.random.fork_rng([]):
        torch.manual_seed(99)
        again, _ = SAIL.learn(world(), SAIL.start(world()), tiny_stream().slice_(1), PlainDescent())
    assert all(
        torch.equal(tensor, every_value(again)[name]) for name, tensor in every_value(after_slice_1(SAIL)[0]).items()
    )


def test_no_gradient_comes_from_the_validation_part():
    """With the validation events' items replaced, and selection blind, the very same weights are learned."""
    slice_ = blind(tiny_stream().slice_(1))
    items = slice_.past.items.copy()
    items[slice_.past.place[np.arange(*slice_.bounds[-1].part("val"))]] = 0
    other = replace(slice_, past=replace(slice_.past, items=items))
    one, two = (SAIL.learn(world(), SAIL.start(world()), s, PlainDescent())[0] for s in (slice_, other))
    assert all(torch.equal(tensor, every_value(two)[name]) for name, tensor in every_value(one).items())
    assert one.newest_target < slice_.bounds[-1].train_end
