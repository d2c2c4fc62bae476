"""FedRAP: its penalty and curriculum by hand, what C and D may hold, and scores computed one user at a time."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Generator, Tensor
from worlds import LENGTH, questions, tiny_config, tiny_stream, warmed_up_on

from protofed.backbone.losses import LOSSES
from protofed.backbone.new_items import with_new_rows
from protofed.backbone.training import PlainDescent
from protofed.client.lessons import chunks
from protofed.client.own_rows import OwnRows, find
from protofed.federation.stacked import ClientWeights, draw_negatives_of_steps, gradients, pair_items
from protofed.methods.baselines.federated import slice_data
from protofed.methods.baselines.fedrap import FedRAP, FedRAPState, Penalties, penalties_at, penalty, round_losses
from protofed.methods.protocol import World

CPU = torch.device("cpu")


def world_of(**settings: object) -> World:
    config = tiny_config(**{"privacy__sampling_rate": 0.3, **settings})
    return World(config, tiny_stream().slice_(0), warmed_up_on(tiny_config(), tiny_stream())[0])


@cache
def learned(variant: str = "standard") -> tuple[FedRAPState, dict]:
    world = world_of(variant=variant)
    state, told = FedRAP().learn(world, FedRAP().start(world), tiny_stream().slice_(1), PlainDescent())
    return state, dict(told)


def test_the_penalty_by_hand():
    c = torch.tensor([[1.0, 0.0], [2.0, -2.0], [0.0, 0.5]])
    d = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    met, owners = torch.tensor([True, True, False]), torch.tensor([0, 0, 1])
    found = penalty(c, d, met, owners, 2, Penalties(separation=10.0, sparsity=1.0, margin=5.0))
    # client 0: squared distances 2 and 8, the latter counted as 5, over 2 coordinates; mean |C| = (0.5 + 2) / 2
    # client 1 has a C but no D of its own
    assert found.tolist() == pytest.approx([1.25 - 10 * (2 / 2 + 5 / 2) / 2, 0.25])


def test_beyond_the_margin_nothing_pushes_c_and_d_apart():
    weights = Penalties(separation=1.0, sparsity=0.0, margin=1.0)
    met, owners = torch.ones(2, dtype=torch.bool), torch.tensor([0, 0])
    c, d = torch.zeros(2, 2), torch.tensor([[0.3, 0.4], [3.0, 4.0]], requires_grad=True)
    penalty(c, d, met, owners, 1, weights).sum().backward()
    assert torch.allclose(d.grad, torch.tensor([[-0.15, -0.2], [0.0, 0.0]]))  # -2 D / 2 coordinates / 2 rows


def test_the_curriculum_starts_at_nothing_and_ends_at_the_full_weights():
    assert penalties_at(0, 0.1, 0.2, 1.0) == Penalties(0.0, 0.0, 1.0)
    assert penalties_at(5, 0.1, 0.2, 1.0) == Penalties(0.1 * math.tanh(0.5), 0.2 * math.tanh(0.5), 1.0)
    assert penalties_at(200, 0.1, 0.2, 1.0).sparsity == pytest.approx(0.2)


def some_losses(method: FedRAP, state: FedRAPState, round_: int) -> tuple[Tensor, ClientWeights]:
    """Loss and gradient of the first clients of slice 1 at the broadcast."""
    world, slice_ = world_of(), tiny_stream().slice_(1)
    model = with_new_rows(world.backbone, slice_)[0]
    server = method.server(world, model, state.shared.prompt)
    data = slice_data(world, slice_)
    where, windows = next(chunks(data, 5, CPU))
    lesson = pair_items(windows, draw_negatives_of_steps(windows, 1, 8, slice_.n_train_items, seed=0, key=0), 5)
    losses = round_losses(method, state, LOSSES["softmax"])(server, lesson, data.users[where], round_)
    return gradients(losses, ClientWeights(torch.zeros(5, 0), model.embed(lesson.items)), 0)


def test_the_curriculum_reaches_the_loss():
    method, state = FedRAP(separation=3.0, sparsity=2.0), learned()[0]
    plain, flat = some_losses(FedRAP(separation=0.0, sparsity=0.0), state, 20)
    early, _ = some_losses(method, state, 0)
    late, slope = some_losses(method, state, 20)
    assert torch.equal(early, plain)
    assert (late != plain).all()
    assert not torch.allclose(slope.rows, flat.rows)


def test_a_user_has_rows_for_the_items_of_its_own_history_and_for_no_others():
    own, slice_ = learned()[0].own, tiny_stream().slice_(1)
    until = slice_.bounds[-1].train_end
    active = set(slice_.past.users[slice_.train_positions].tolist())
    events = zip(slice_.past.users[:until].tolist(), slice_.past.items[slice_.past.place[:until]].tolist(), strict=True)
    met = {(user, item) for user, item in events if user in active}
    assert set(zip(own.clients.tolist(), own.items.tolist(), strict=True)) == met
    assert (own.rows != 0).any(-1).float().mean() > 0.3  # rows that this slice's windows read have moved


def test_the_transformer_stays_as_the_base_block_left_it():
    state, old = learned()[0], world_of().backbone
    for name, parameter in old.named_parameters():
        if name != "items":
            assert torch.equal(dict(state.shared.backbone.named_parameters())[name], parameter)
    first = with_new_rows(old, tiny_stream().slice_(1))[0]
    assert not torch.equal(state.shared.backbone.items, first.items)


def test_the_peft_variant_moves_only_rows_of_items_that_came_after_the_base_block():
    state, told = learned("peft")
    old, items = world_of().backbone, state.shared.backbone.items
    first = with_new_rows(old, tiny_stream().slice_(1))[0]
    new = torch.ones(len(items), dtype=torch.bool)
    new[: old.n_rows] = ~old.has_row
    new &= first.has_row
    assert torch.equal(items[~new], first.items[~new])
    assert (items[new] != first.items[new]).any()
    assert told["trainable_parameters"] == int(new.sum()) * 16
    assert told["bytes_up"] == 4 * told["trainable_parameters"]


def test_a_score_is_the_biased_hidden_state_times_c_plus_d():
    state, (_, queries) = learned()[0], questions()
    model, own, shared = state.shared.backbone, state.own, state.shared
    found = FedRAP().score(world_of(), state, queries)
    known = torch.isin(queries.users, shared.owners)
    assert 0 < int(known.sum()) < len(queries)
    for b in (int(known.nonzero()[0]), int((~known).nonzero()[0])):
        user = queries.users[b]
        every = torch.arange(queries.n_items)
        rows = model.embed(every)
        hit, place = find(own, user.expand(len(every)), every)
        rows = rows + own.rows[place] * hit[:, None]
        bias = shared.personal[shared.owners == user].sum(0)
        hidden = model.last_hidden(queries.tokens[b : b + 1], None, lambda items, r=rows: r[items.clamp(min=0)])
        torch.testing.assert_close(found[b], rows @ (hidden[0] + bias), atol=1e-4, rtol=0)
        assert bool(bias.any()) == bool(known[b])


def test_a_row_for_what_a_client_met_later_does_not_answer_an_earlier_question():
    world, (asked, queries) = world_of(), questions(1)
    state, _ = FedRAP().learn(world, learned()[0], tiny_stream().slice_(2), PlainDescent())
    told, own, edges, given_away = FedRAP().score(world, state, queries), state.own, queries.offsets.tolist(), 0
    for b, user in enumerate(queries.users.tolist()):
        past = queries.past_items[edges[b] : edges[b + 1]]
        mine = own.clients == user
        known = mine & torch.isin(own.items, past)
        given_away += int(asked.positives[b]) in set(own.items[mine & ~known].tolist())
        before = replace(state, own=OwnRows(own.clients[known], own.items[known], own.rows[known]))
        only = tiny_stream().queries(asked, np.array([b]), LENGTH)
        assert torch.allclose(FedRAP().score(world, before, only)[0], told[b], atol=1e-5)
    assert given_away > len(queries) / 8  # clients do hold rows for many of these very answers


def test_d_and_the_bias_take_part_in_the_uploads():
    state = learned()[0]
    noise = torch.randn(state.own.rows.shape, generator=Generator().manual_seed(0))
    other_d = replace(state, own=OwnRows(state.own.clients, state.own.items, state.own.rows + noise))
    shifted = replace(state.shared, personal=state.shared.personal + 0.3)
    for changed in (other_d, replace(state, shared=shifted)):
        assert not torch.allclose(some_losses(FedRAP(), state, 3)[1].rows, some_losses(FedRAP(), changed, 3)[1].rows)


def test_the_log_says_that_both_parts_live():
    told = learned()[1]
    assert told["own_rows"] == len(learned()[0].own) > 0
    assert told["own_row_norm"] > 0
    assert told["upload_norm"] > 0
    assert told["separation_weight"] == pytest.approx(0.1 * math.tanh(4 / 10))
    assert told["trainable_parameters_per_user"] > 16
