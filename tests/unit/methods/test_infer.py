"""Influence against plain autograd, one event at a time, and the choice it leads to."""

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
from protofed.backbone.losses import LOSSES, window_losses
from protofed.backbone.training import PlainDescent
from protofed.errors import ConfigError
from protofed.methods.baselines.buffer import Capacity
from protofed.methods.baselines.finetune_last import FineTuneLast
from protofed.methods.baselines.infer import (
    EventLosses,
    Infer,
    best_per_slice,
    conjugate_gradients,
    differentiable_attention,
    dot,
    earlier_validation,
    gradient_norms,
    inner_products,
    mean_gradient,
    plus,
    precondition,
    shares,
    with_negatives,
)
from protofed.methods.protocol import World
from protofed.slices.stream import SliceStream
from protofed.snapshot import restore, take_snapshot

SMALL = Capacity(least=60)
CPU = torch.device("cpu")


def world_of(data=None):
    return World(tiny_config(), (data or tiny_stream()).slice_(0), warmed_up()[0])


def learn(method, data=None):
    world = world_of(data)
    return method.learn(world, method.start(world), (data or tiny_stream()).slice_(1), PlainDescent())


def same(one, other):
    one, other = every_value(one), every_value(other)
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def case(n=6):
    """A small model, its tail weights, some train events and some reference events."""
    model = random_model(150, history_length=LENGTH).requires_grad_(False)
    losses, slice_ = EventLosses(model, "softmax"), tiny_stream().slice_(1)
    events = with_negatives(world_of(), slice_, slice_.train_positions[:n], "candidates", CPU)
    reference = with_negatives(world_of(), slice_, earlier_validation(slice_)[:10], "reference", CPU)
    return losses, losses.dense_tail(), events, reference


def slow_gradients(losses, events):
    """Per event the gradient over the tail, flattened, by one backward pass each."""
    model, names = losses.model, losses.dense_tail()
    tail = [p.requires_grad_(True) for name, p in model.named_parameters() if name in names]
    (windows, negatives), gradients = events[0], []
    for row in range(len(windows)):
        loss = window_losses(model, windows, negatives, LOSSES["softmax"])[0][row]
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, tail)]))
    model.requires_grad_(False)
    return torch.stack(gradients)


def in_double(losses):
    return EventLosses(losses.model.double(), losses.loss)


def flat(weights):
    return torch.cat([value.flatten() for value in weights.values()])


def test_the_tail_is_the_last_block_and_the_last_norm():
    losses, weights, _, _ = case()
    expected = {f"blocks.1.{name}" for name, _ in losses.model.blocks[1].named_parameters()}
    assert set(weights) == expected | {"norm.weight", "norm.bias"}


def test_gradients_inner_products_and_lengths_are_those_of_single_backward_passes():
    losses, weights, events, reference = case()
    slow, slow_reference = slow_gradients(losses, events), slow_gradients(losses, reference).mean(0)
    with differentiable_attention():
        along = mean_gradient(losses, weights, reference)
        products = inner_products(losses, weights, along, events)
        lengths = gradient_norms(losses, weights, events)
    assert torch.allclose(flat(along), slow_reference, atol=1e-5)
    assert torch.allclose(products, slow @ slow_reference, atol=1e-4)
    assert torch.allclose(lengths, slow.norm(dim=1), rtol=1e-4)


def test_the_benefit_is_what_one_small_step_takes_off_the_reference_loss():
    losses, weights, events, reference = case()
    losses, weights = in_double(losses), {name: value.double() for name, value in weights.items()}
    loss = lambda w: losses(w, *reference[0]).mean()  # noqa: E731
    with differentiable_attention():
        products = inner_products(losses, weights, mean_gradient(losses, weights, reference), events)
        for row in range(3):
            one = torch.zeros(len(products)).double()
            one[row] = 1.0
            step = torch.func.grad(lambda w, c=one: (c * losses(w, *events[0])).sum())(weights)
            drop = loss(weights) - loss(plus(weights, step, -1e-5))
            assert float(drop) / 1e-5 == pytest.approx(float(products[row]), rel=1e-2, abs=1e-5)


def test_conjugate_gradients_solve_a_small_system_and_stop_where_the_curvature_is_negative():
    matrix = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
    right = {"x": torch.tensor([1.0, 2.0])}
    found = conjugate_gradients(lambda v: {"x": matrix @ v["x"]}, right, steps=20)
    assert found["x"].tolist() == pytest.approx([1 / 11, 7 / 11], abs=1e-5)
    stopped = conjugate_gradients(lambda v: {"x": -v["x"]}, right, steps=20)
    assert stopped["x"].tolist() == [0.0, 0.0]


def test_preconditioning_inverts_the_damped_hessian():
    losses, weights, events, reference = case()
    losses, weights = in_double(losses), {name: value.double() for name, value in weights.items()}
    with differentiable_attention():
        right = mean_gradient(losses, weights, reference)
        x = precondition(losses, weights, right, events, damping=30.0)
        ahead, behind = (mean_gradient(losses, plus(weights, x, step), events) for step in (1e-4, -1e-4))
    back = plus({name: (ahead[name] - behind[name]) / 2e-4 for name in x}, x, 30.0)
    assert torch.allclose(flat(back), flat(right), atol=1e-4 * float(flat(right).norm()))
    assert float(dot(x, right)) > 0


def test_places_are_shared_equally_and_what_one_slice_does_not_need_goes_to_the_others():
    assert shares([10, 10, 10], 9) == [3, 3, 3]
    assert shares([1, 10, 10], 9) == [1, 4, 4]
    assert shares([10, 2], 100) == [10, 2]
    assert shares([5, 5], 0) == [0, 0]
    assert shares([], 7) == []


def test_each_slice_keeps_its_most_valuable_events_and_no_user_too_many():
    slices, users = np.array([0, 0, 0, 0, 1, 1]), np.array([7, 7, 7, 8, 7, 7])
    value = np.array([9.0, 8.0, 7.0, 1.0, 0.5, 0.6])
    assert best_per_slice(slices, users, value, 100, per_user=2).tolist() == [0, 1, 3, 4, 5]
    assert best_per_slice(slices, users, value, 2, per_user=2).tolist() == [0, 5]
    assert best_per_slice(slices, users, value, 4, per_user=1).tolist() == [0, 3, 5]
    assert best_per_slice(slices[:0], users[:0], value[:0], 4, per_user=1).tolist() == []


def test_the_reference_set_is_the_validation_parts_of_earlier_slices():
    bounds = tiny_stream().bounds
    assert earlier_validation(tiny_stream().slice_(0)).tolist() == []
    expected = [*range(bounds[0].train_end, bounds[0].val_end), *range(bounds[1].train_end, bounds[1].val_end)]
    assert earlier_validation(tiny_stream().slice_(2)).tolist() == expected


@pytest.mark.parametrize("nothing", [{"beta": 0.0}, {"capacity": Capacity(share=0.0)}])
def test_without_replay_the_weights_are_those_of_finetune_last_bit_for_bit(nothing):
    state, diagnostics = learn(Infer(**nothing))
    assert same(state.model.backbone, learn(FineTuneLast())[0].backbone)
    assert diagnostics["replay_loss"] == 0


def test_replay_changes_the_scores_and_the_log_says_what_the_kept_events_are_worth():
    _, queries = questions()
    state, diagnostics = learn(Infer(capacity=SMALL))
    plain = FineTuneLast().score(world_of(), learn(FineTuneLast())[0], queries)
    assert not torch.allclose(Infer().score(world_of(), state, queries), plain, atol=1e-3)
    assert diagnostics["replay_loss"] > 0.1
    assert diagnostics["kept_benefit"] > 0
    assert 0 < diagnostics["helpful_share"] < 1


def kept_by(**options):
    state, _ = learn(Infer(capacity=SMALL, **options))
    return state


def test_the_base_block_is_a_random_draw_that_gets_its_benefits_after_slice_1():
    start = Infer(capacity=SMALL).start(world_of())
    assert len(start.buffer) == 60
    assert not start.judged.any()
    users = np.bincount(tiny_log().users[start.buffer].numpy())
    assert users.max() <= 5
    state = kept_by()
    old = state.buffer < tiny_stream().bounds[0].end
    assert state.judged.all()
    assert int(old.sum()) == len(state.buffer) // 2 == 30
    assert set(state.buffer[old].tolist()) <= set(start.buffer.tolist())
    assert (state.benefit[old] != 0).all()


def test_the_kept_events_are_those_of_largest_benefit():
    method, slice_ = Infer(capacity=SMALL), tiny_stream().slice_(1)
    state = kept_by()
    positions = slice_.train_positions
    start = method.start(world_of())
    pool = np.concatenate([start.buffer.numpy(), positions])
    benefit = method._benefits(world_of(), state.model.backbone, slice_, pool)[len(start.buffer) :]
    taken, per_user = [], {}
    for place in np.argsort(-np.abs(benefit)).tolist():
        user = int(tiny_log().users[positions[place]])
        if per_user.get(user, 0) < 5 and len(taken) < 30:
            per_user[user] = per_user.get(user, 0) + 1
            taken.append(int(positions[place]))
    new = state.buffer[state.buffer >= tiny_stream().bounds[0].end]
    assert new.tolist() == sorted(taken)
    signed = kept_by(signed=True)
    assert (signed.benefit > 0).float().mean() > (state.benefit > 0).float().mean()


def test_a_stored_benefit_stays():
    method, state = Infer(capacity=SMALL), kept_by()
    later, _ = method.learn(world_of(), state, tiny_stream().slice_(2), PlainDescent())
    before = dict(zip(state.buffer.tolist(), state.benefit.tolist(), strict=True))
    old = [(p, b) for p, b in zip(later.buffer.tolist(), later.benefit.tolist(), strict=True) if p in before]
    assert len(old) == 40
    assert all(benefit == before[position] for position, benefit in old)


def test_cosines_lie_between_minus_one_and_one():
    state = kept_by(cosine=True)
    assert float(state.benefit.abs().max()) <= 1
    assert float(state.benefit.abs().max()) > 0.1


def test_classical_influence_ranks_otherwise_than_one_step():
    assert kept_by(estimate="vanilla").buffer.tolist() != kept_by().buffer.tolist()


def test_a_buffer_larger_than_the_log_holds_every_event_the_cap_per_user_allows():
    everything = Infer(per_user=10_000)
    assert learn(everything)[0].buffer.tolist() == tiny_stream().slice_(1).all_train_positions.tolist()


def test_the_state_survives_packing_and_the_same_seed_gives_it_again():
    method = Infer(capacity=SMALL)
    state, _ = learn(method)
    assert same(restore(take_snapshot(state)), state)
    assert same(learn(method)[0], state)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"estimate": "vanilla", "cosine": True}])
def test_nothing_after_the_train_cut_gives_a_gradient_or_a_benefit_or_enters_the_buffer(options, monkeypatch):
    monkeypatch.setattr(training, "mean_grade", lambda *_: float("nan"))  # keeps the last epoch
    method, cut = Infer(capacity=SMALL, **options), tiny_stream().bounds[1].train_end
    changed = SliceStream(shuffled_after(tiny_log(), cut), tiny_config().stream)
    state, _ = learn(method)
    assert same(learn(method, changed)[0], state)
    assert method.evidence(state).newest_target < cut


def test_values_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="per_user must lie between 1 and"):
        Infer(per_user=0)
