"""Private steps: one user moves a sum by at most the radius, noise lies everywhere, rounds are counted."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor
from worlds import LENGTH, random_model, tiny_config, tiny_stream, warmed_up

from protofed.backbone import training
from protofed.backbone.losses import LOSSES, window_losses
from protofed.backbone.training import InRounds, PlainDescent, Task, everything, losses_of_one_user, train
from protofed.errors import ProtoFedError
from protofed.privacy.accountant import epsilon
from protofed.privacy.descent import CutsByUser, Meter, PrivateDescent, clipped_sum, of_user
from protofed.privacy.ledger import Release
from protofed.slices.windows import Windows, concatenate, take, training_windows

STRIDE = 6


def descent(**changes: object) -> PrivateDescent:
    plain = {
        "seed": 3,
        "noise_multiplier": 0.0,
        "sampling_rate": 0.3,
        "clip_radius": 0.5,
        "rounds_per_training": 4,
        "n_users": tiny_stream().slice_(1).past.n_users,
        "meter": Meter(0, 10_000),
    }
    return PrivateDescent(**{**plain, **changes})  # type: ignore[arg-type]


def cohort(private: PrivateDescent, positions: np.ndarray | None = None, round_: int = 0) -> Windows:
    slice_ = tiny_stream().slice_(1)
    chosen = slice_.train_positions if positions is None else positions
    return private.cohort(slice_.past, chosen, round_, length=LENGTH, stride=STRIDE)


def columns(windows: Windows) -> list[list[int]]:
    """Every window as plain numbers, padding of targets left out."""
    targets = [[item for item in row if item >= 0] for row in windows.targets.tolist()]
    return [[u, *t, -9, *g] for u, t, g in zip(windows.users.tolist(), windows.tokens.tolist(), targets, strict=True)]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.floats(0.01, 10), st.integers(0, 2**32 - 1), st.floats(-3, 6))
def test_removing_any_one_user_moves_a_clipped_sum_by_at_most_the_radius(n_users, radius, seed, size):
    rng = Generator().manual_seed(seed)
    parts = [10**size * torch.randn(n_users, *shape, generator=rng) for shape in ((3, 2), (4,), ())]
    whole, _ = clipped_sum(parts, radius)
    for user in range(n_users):
        kept = torch.arange(n_users) != user
        less, _ = clipped_sum([part[kept] for part in parts], radius)
        moved = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(whole, less, strict=True)))
        assert moved <= radius * (1 + 1e-9)


def test_contributions_are_clipped_over_all_tensors_together():
    long, short = [torch.tensor([[3.0, 0.0], [0.3, 0.0]]), torch.tensor([[4.0], [0.4]])]
    (first, second), share = clipped_sum([long, short], 1.0)
    assert torch.allclose(first, torch.tensor([0.6 + 0.3, 0.0], dtype=torch.float64), atol=1e-7)
    assert torch.allclose(second, torch.tensor([0.8 + 0.4], dtype=torch.float64), atol=1e-7)
    assert share == 0.5


def test_a_contribution_that_is_not_finite_counts_as_zero_and_as_clipped():
    (total,), share = clipped_sum([torch.tensor([[math.nan, 1.0], [math.inf, 0.0], [0.1, 0.2]])], 1.0)
    assert torch.allclose(total, torch.tensor([0.1, 0.2], dtype=torch.float64))
    assert share == pytest.approx(2 / 3)


def test_the_sum_over_nobody_is_zero():
    (total,), share = clipped_sum([torch.zeros(0, 2, 3)], 1.0)
    assert total.shape == (2, 3)
    assert not total.any()
    assert share == 0


def test_a_cohort_holds_the_sampled_users_and_at_most_four_windows_of_each():
    private = descent()
    windows, slice_ = cohort(private), tiny_stream().slice_(1)
    active = np.unique(slice_.past.users[slice_.train_positions])
    assert sorted(set(windows.users.tolist())) == [u for u in active if private.sampled(0)[u]]
    one_target = private.cohort(slice_.past, slice_.train_positions, 0, length=LENGTH, stride=1)
    assert max(torch.bincount(one_target.users)) == 4
    assert not torch.equal(one_target.newest, descent(seed=4, sampling_rate=0.3).cohort(
        slice_.past, slice_.train_positions, 0, length=LENGTH, stride=1).newest)  # fmt: skip


def test_a_users_windows_and_negatives_do_not_depend_on_who_else_has_events():
    private, slice_ = descent(sampling_rate=1.0), tiny_stream().slice_(1)
    users, everybody = slice_.past.users[slice_.train_positions], cohort(private)
    for left_out in (int(users.max()), int(users[0])):
        fewer = cohort(private, slice_.train_positions[users != left_out])
        kept = take(everybody, (everybody.users != left_out).nonzero()[:, 0])
        assert columns(fewer) == columns(kept)
        assert torch.equal(private.negatives(fewer, 8, 50, 0), private.negatives(kept, 8, 50, 0))


def test_cuts_stay_with_the_user_on_the_second_pass_over_a_crowded_instant():
    past, positions = crowded()
    rng = CutsByUser(1, 0)
    both = training_windows(past, positions, length=4, stride=3, rng=rng)
    alone = training_windows(past, positions[past.users[positions] == 0], length=4, stride=3, rng=CutsByUser(1, 0))
    mine = take(both, (both.users == 0).nonzero()[:, 0])
    assert sorted(columns(mine)) == sorted(columns(alone))
    assert len(alone) > 2


def crowded():
    from protofed.slices.histories import histories

    users = np.array([0] * 9 + [1] * 9)
    times = np.array([0, 1, 2, 3, 4, 4, 5, 5, 6] * 2)
    order = np.argsort(times, kind="stable")
    users, times = users[order], times[order]
    return histories(users, np.arange(18), times, 2), np.arange(18)


def slow_sum(model, private: PrivateDescent, batch: Windows, n_items: int, round_: int) -> list[Tensor]:
    """User by user: the whole table, an ordinary backward pass, a norm, a division."""
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for user in sorted(set(batch.users.tolist())):
        own = take(batch, (batch.users == user).nonzero()[:, 0])
        negatives = private.negatives(own, 8, n_items, round_)
        sums, counts = window_losses(model, own, negatives, LOSSES["softmax"])
        model.zero_grad()
        (sums.sum() / counts.sum()).backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
        scale = min(1.0, private.clip_radius / float(flat.norm()))
        total = [a + scale * p.grad.double() for a, p in zip(total, model.parameters(), strict=True)]
    return total


@pytest.mark.parametrize("cells", [1, 10**9])
def test_the_sum_of_clipped_gradients_equals_that_of_a_slow_loop_over_users(monkeypatch, cells):
    monkeypatch.setattr("protofed.privacy.descent.CELLS_AT_ONCE", cells)
    slice_, private = tiny_stream().slice_(1), descent()
    model = random_model(slice_.n_train_items, history_length=LENGTH).requires_grad_(True)
    config = tiny_config(training__negatives=8).training
    task = Task(slice_, slice_.train_positions, 1, 1e-3)
    batch = cohort(private, round_=2)
    losses = losses_of_one_user(model, task, config, private, 0, 2, None)
    fast = private.sums(losses, batch, list(model.parameters()))
    slow = slow_sum(model, private, batch, slice_.n_train_items, 2)
    for mine, reference in zip(fast, slow, strict=True):
        assert torch.allclose(mine, reference, atol=1e-6)
    assert private.meter.taken_part == len(set(batch.users.tolist())) > 3


def stepped(private: PrivateDescent, batch: Windows) -> list[Tensor]:
    """The gradients of one private step on a loss that touches a few rows."""
    weights = torch.nn.Parameter(torch.zeros(400, 50)), torch.nn.Parameter(torch.zeros(3000))
    optimiser = torch.optim.SGD(weights, lr=0.0)

    def losses(windows: Windows) -> tuple[Tensor, Tensor]:
        ones = torch.ones(len(windows))
        return weights[0][:2].sum() * ones, ones.long()

    private.meter.spend(1)
    private.gradients(losses, batch, optimiser)
    return [weight.grad for weight in weights]


def test_noise_of_the_stated_size_lies_on_coordinates_that_nobody_touched():
    private = descent(noise_multiplier=1.3)
    table, unused = stepped(private, cohort(private))
    unit = private.sampling_rate * private.n_users / (1.3 * private.clip_radius)
    untouched = torch.cat([table[2:].flatten(), unused]) * unit
    assert float(untouched.std()) == pytest.approx(1.0, abs=0.03)
    assert float(untouched.mean()) == pytest.approx(0.0, abs=0.03)


def test_a_round_without_a_cohort_is_noise_and_no_two_rounds_share_it():
    private = descent(noise_multiplier=1.0, sampling_rate=1e-9)
    nobody = cohort(private)
    assert len(nobody) == 0
    first, second = stepped(private, nobody)[0], stepped(private, nobody)[0]
    assert first.std() > 0
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 0.05


def test_the_mean_is_over_the_expected_cohort_not_over_the_one_that_came():
    private = descent(clip_radius=100.0)
    batch = cohort(private)
    table, _ = stepped(private, batch)
    came, expected = len(set(batch.users.tolist())), private.sampling_rate * private.n_users
    assert torch.allclose(table[:2], torch.full((2, 50), came / expected))


def test_a_step_that_the_ledger_does_not_list_is_refused():
    private = descent(meter=Meter(7, 9))
    assert list(private.rounds()) == [7, 8]
    assert list(private.rounds()) == []
    assert [private.meter.release(), private.meter.release()] == [7, 8]
    with pytest.raises(ProtoFedError, match="beyond the 2"):
        private.meter.release()


def test_a_private_training_makes_all_its_steps_and_never_asks_the_validation_part(monkeypatch):
    def asked(*_: object) -> float:
        raise AssertionError("the validation part was read")

    slice_, config, first = tiny_stream().slice_(1), tiny_config(), warmed_up()[0]
    monkeypatch.setattr(training, "validation_ndcg", asked)
    task = Task(slice_, slice_.train_positions, 0, 5e-3)  # no epochs: rounds count
    private = descent(noise_multiplier=1.0, sampling_rate=1e-9)
    model, fit = train(first, task, config.training, seed=0, descend=private)
    assert private.meter.made == fit.steps_per_epoch == 4
    assert fit.trace == ()
    assert fit.newest_target == slice_.train_positions[-1]
    assert all((a != b).any() for a, b in zip(model.parameters(), first.parameters(), strict=True))
    assert torch.equal(model.mean_row, model.items[model.has_row].mean(0))


def test_dropout_is_off_in_private_steps():
    slice_, config = tiny_stream().slice_(1), tiny_config()
    task = Task(slice_, slice_.train_positions, 1, 5e-3)
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(train(warmed_up()[0], task, config.training, seed=0, descend=descent(meter=Meter(0, 4)))[0])
    assert all(torch.equal(a, b) for a, b in zip(states[0].parameters(), states[1].parameters(), strict=True))
    assert warmed_up()[0].config.dropout > 0


def test_a_user_is_read_without_the_padding_that_others_need():
    batch = cohort(descent(sampling_rate=1.0))
    lengths = {of_user(batch, user).tokens.shape[1] for user in set(batch.users.tolist())}
    assert len(lengths) > 1
    assert concatenate([batch]).tokens.shape[1] == LENGTH


def test_only_a_private_descent_counts_as_one():
    assert isinstance(descent(), InRounds)
    assert not isinstance(PlainDescent(), InRounds)
    assert everything(warmed_up()[0])


def test_160_rounds_at_rate_005_and_multiplier_11282_cost_an_epsilon_of_34():
    price = epsilon((Release(1.1282, 0.05, 160, "gradients"),), 1e-5)
    assert price == pytest.approx(3.4, abs=2e-3)
    assert price <= 3.4
