"""Private steps: one user moves a sum by at most the radius, noise lies everywhere, rounds are counted."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_private import apart, slow_sums, users_of
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import LENGTH, random_model, tiny_config, tiny_stream, warmed_up

from protofed.backbone import training
from protofed.backbone.extras import Extra, Notes
from protofed.backbone.losses import LOSSES
from protofed.backbone.one_window import OneWindowLoss
from protofed.backbone.recorded import Shape
from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import InRounds, PlainDescent, Task, everything, train
from protofed.errors import ProtoFedError
from protofed.privacy import descent as descents
from protofed.privacy.accountant import epsilon
from protofed.privacy.descent import CutsByUser, Meter, PrivateDescent, weights_of
from protofed.privacy.ledger import Release
from protofed.privacy.user_gradients import Rows, chunks, clipped_sum
from protofed.slices.windows import NO_TARGET, Windows, pick_windows, real_targets, take, training_windows

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
    whole, _, _ = clipped_sum(parts, radius)
    for user in range(n_users):
        kept = torch.arange(n_users) != user
        less, _, _ = clipped_sum([part[kept] for part in parts], radius)
        moved = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(whole, less, strict=True)))
        assert moved <= radius * (1 + 1e-9)


def test_contributions_are_clipped_over_all_tensors_together():
    long, short = [torch.tensor([[3.0, 0.0], [0.3, 0.0]]), torch.tensor([[4.0], [0.4]])]
    (first, second), _, clipped = clipped_sum([long, short], 1.0)
    assert torch.allclose(first, torch.tensor([0.6 + 0.3, 0.0], dtype=torch.float64), atol=1e-7)
    assert torch.allclose(second, torch.tensor([0.8 + 0.4], dtype=torch.float64), atol=1e-7)
    assert clipped.tolist() == [True, False]


def test_a_contribution_that_is_not_finite_counts_as_zero_and_as_clipped():
    (total,), _, clipped = clipped_sum([torch.tensor([[math.nan, 1.0], [math.inf, 0.0], [0.1, 0.2]])], 1.0)
    assert torch.allclose(total, torch.tensor([0.1, 0.2], dtype=torch.float64))
    assert clipped.tolist() == [True, True, False]


def test_the_sum_over_nobody_is_zero():
    (total,), _, clipped = clipped_sum([torch.zeros(0, 2, 3)], 1.0)
    assert total.shape == (2, 3)
    assert not total.any()
    assert not len(clipped)


def test_rows_of_a_table_count_towards_the_length_as_the_whole_table_would():
    rng = Generator().manual_seed(0)
    weights, table = torch.randn(3, 4, generator=rng), torch.zeros(3, 5, 2)
    owners, items = torch.tensor([0, 0, 2]), torch.tensor([1, 4, 1])
    table[owners, items] = torch.randn(3, 2, generator=rng)
    (dense, whole), _, long = clipped_sum([weights, table], 1.5)
    (again,), rows, clipped = clipped_sum([weights], 1.5, Rows(owners, items, table[owners, items]))
    assert torch.allclose(torch.zeros(5, 2, dtype=torch.float64).index_add(0, items, rows.values), whole)
    assert torch.allclose(again, dense)
    assert torch.equal(clipped, long)
    assert long.any()


def test_rows_that_are_not_finite_take_the_rest_of_their_user_with_them():
    values = torch.tensor([[math.inf, 0.0], [0.1, 0.0]])
    (dense,), rows, clipped = clipped_sum([torch.ones(2, 1)], 9.0, Rows(torch.arange(2), torch.arange(2), values))
    assert dense.tolist() == [1.0]
    assert torch.allclose(rows.values, torch.tensor([[0.0, 0.0], [0.1, 0.0]], dtype=torch.float64))
    assert clipped.tolist() == [True, False]


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


def a_loss(extra: Extra | None = None, n_rows: int = 0, **settings: object) -> OneWindowLoss:
    n_items = tiny_stream().slice_(1).n_train_items
    model = random_model(max(n_items, n_rows), history_length=LENGTH).requires_grad_(True)
    return OneWindowLoss(model, LOSSES["softmax"], 8, n_items, STRIDE, extra, **settings)  # type: ignore[arg-type]


def of(loss: OneWindowLoss) -> dict[str, Tensor]:
    return dict(loss.model.named_parameters())


def in_chunks_of(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(descents, "windows_at_once", lambda *_: n)


def crowd(private: PrivateDescent, round_: int = 2) -> Windows:
    """Users with one to four windows, short and long ones."""
    slice_ = tiny_stream().slice_(1)
    return private.cohort(slice_.past, slice_.train_positions, round_, length=LENGTH, stride=2)


@pytest.mark.parametrize("places", [1, 12, 1000])
@pytest.mark.parametrize("loss_name", list(LOSSES))
def test_the_sum_of_clipped_gradients_equals_that_of_a_slow_loop_over_users(monkeypatch, places, loss_name):
    in_chunks_of(monkeypatch, places)
    private, loss = descent(), replace(a_loss(round_=2), element_loss=LOSSES[loss_name])
    batch = crowd(private)
    assert set(torch.bincount(batch.users).tolist()) >= {0, 1, 2, 4}
    fast, slow = private.sums(loss, batch, of(loss)), slow_sums(private, loss, batch, of(loss))
    assert apart(fast, slow) < 1e-6 * math.sqrt(len(users_of(batch)))
    assert private.meter.taken_part == len(users_of(batch)) > 3
    assert 0 < private.meter.clipped <= private.meter.taken_part


def a_penalty(told: Notes) -> Extra:
    """One that reads the whole table, and draws."""

    def losses(model: SASRec, batch: Windows, lots, notes: Notes) -> Tensor:
        drawn = lots.uniform((len(batch), 3)).sum(-1)
        notes.add("drawn", drawn.sum())
        return drawn * (model.items.square().sum() + model.embed(batch.targets).sum()) * real_targets(batch)

    return Extra(losses, told)


def test_a_penalty_on_the_whole_table_and_what_it_tells_equal_those_of_a_slow_loop(monkeypatch):
    in_chunks_of(monkeypatch, 8)
    told, slowly = Notes(), Notes()
    private, loss = descent(clip_radius=50.0), a_loss(a_penalty(told))
    batch = crowd(private)
    fast, slow = private.sums(loss, batch, of(loss)), slow_sums(private, loss, batch, of(loss), slowly)
    assert not loss.needs(LENGTH).rows_alone
    assert apart(fast, slow) < 1e-6 * private.clip_radius * math.sqrt(len(users_of(batch)))
    assert float(told.counts["drawn"]) == float(slowly.counts["drawn"]) == len(batch)
    assert told.mean("drawn") == pytest.approx(slowly.mean("drawn"), rel=1e-6)


def test_what_a_loss_needs_is_found_without_anybodys_data():
    plain, penalised = a_loss().needs(LENGTH), a_loss(a_penalty(Notes())).needs(LENGTH)
    assert plain.numbers == 0
    assert plain.look_ups == ((1, LENGTH + STRIDE + 8),)  # tokens, targets and negatives at once
    assert plain.rows_alone
    assert penalised.numbers == 3
    assert penalised.look_ups == (*plain.look_ups, (1, STRIDE))


@pytest.mark.parametrize("places", [4, 8, 1000])
def test_chunks_hold_every_window_once_and_split_nobody(places):
    private, loss = descent(sampling_rate=1.0), a_loss()
    batch = crowd(private)
    negatives = private.negatives(batch, 8, loss.n_items, 0)
    seen, met, n_users = [], [], 0
    for chunk in chunks(batch, negatives, Shape(4, LENGTH, STRIDE), lambda _: places):
        here = (chunk.owners < chunk.n_users).nonzero()[:, 0]
        own = pick_windows(chunk.inputs.batch, here)
        assert len(chunk.owners) == places
        assert len(set(own.users.tolist())) == chunk.n_users
        assert not (chunk.inputs.batch.targets[chunk.owners == chunk.n_users] != NO_TARGET).any()
        for user in set(own.users.tolist()):
            targets = real_targets(batch)[batch.users == user].sum()
            assert set(chunk.targets[here][own.users == user].tolist()) == {int(targets)}
            assert len(set(chunk.owners[here][own.users == user].tolist())) == 1
        seen += [[u, *t] for u, t in zip(own.users.tolist(), own.newest[:, None].tolist(), strict=True)]
        met += users_of(own)
        n_users += chunk.n_users
    assert sorted(seen) == sorted([u, t] for u, t in zip(batch.users.tolist(), batch.newest.tolist(), strict=True))
    assert sorted(met) == users_of(batch)
    assert n_users == len(met)


def test_a_user_is_read_in_a_shape_that_its_own_windows_decide():
    private, loss = descent(sampling_rate=1.0), a_loss()
    batch = crowd(private)

    def lengths(some: Windows) -> dict[int, int]:
        negatives = private.negatives(some, 8, loss.n_items, 0)
        found = chunks(some, negatives, Shape(4, LENGTH, STRIDE), lambda _: 64)
        return {user: c.inputs.batch.tokens.shape[1] for c in found for user in users_of(c.inputs.batch)}

    together = lengths(batch)
    assert set(together.values()) == {3, 6, 12}
    for user in users_of(batch)[:5]:
        alone = take(batch, (batch.users == user).nonzero()[:, 0])
        assert lengths(alone)[user] == together[user]


def test_more_windows_of_a_user_than_a_round_allows_are_refused():
    private, loss = descent(windows_per_user=1), a_loss()
    batch = crowd(descent())
    with pytest.raises(ValueError, match="a user may have 1 windows in a private round, got 4"):
        private.sums(loss, batch, of(loss))


@pytest.mark.slow
def test_removing_one_user_moves_the_sum_by_at_most_the_radius_and_rounding(monkeypatch):
    in_chunks_of(monkeypatch, 16)
    private, loss = descent(sampling_rate=1.0), a_loss()
    batch = crowd(private)
    whole = private.sums(loss, batch, of(loss))
    for user in users_of(batch)[:6]:
        rest = take(batch, (batch.users != user).nonzero()[:, 0])
        moved = apart(whole, private.sums(loss, rest, of(loss)))
        assert 0 < moved <= private.clip_radius * (1 + 1e-5)  # others move to other places, where products may round


def test_a_users_gradient_does_not_depend_on_the_size_of_the_chunk(monkeypatch):
    private, loss = descent(), a_loss()
    batch, sums = crowd(private), []
    one = take(batch, (batch.users == users_of(batch)[0]).nonzero()[:, 0])
    for places in (4, 32, 256):
        in_chunks_of(monkeypatch, places)
        sums.append(private.sums(loss, one, of(loss)))
    assert max(apart(sums[0], each) for each in sums) <= 1e-6 * private.clip_radius


class Counting(TorchDispatchMode):
    """Counts the tensor operations that are dispatched."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_a_chunk_of_three_users_takes_as_many_tensor_operations_as_one_of_forty(monkeypatch):
    in_chunks_of(monkeypatch, 512)
    private, loss = descent(sampling_rate=1.0), a_loss()
    everybody, counts = crowd(private), []
    long = take(everybody, (everybody.tokens[:, 0] != -2).nonzero()[:, 0])  # windows of one length: one chunk
    for n in (3, 40):
        batch = take(long, torch.isin(long.users, torch.tensor(users_of(long)[:n])).nonzero()[:, 0])
        assert len(users_of(batch)) == n
        private.sums(loss, batch, of(loss))
        with Counting() as count:
            private.sums(loss, batch, of(loss))
        counts.append(count.calls)
    assert counts[0] == counts[1] > 200


def test_a_user_whose_gradient_is_no_number_counts_as_zero_and_leaves_the_others_alone(monkeypatch):
    in_chunks_of(monkeypatch, 16)
    private = descent()
    batch = crowd(private)
    bad = users_of(batch)[1]

    def losses(model: SASRec, batch: Windows, lots, notes: Notes) -> Tensor:
        return torch.where(batch.users == bad, math.nan, 0.0) * model.embed(batch.targets).sum()

    loss = a_loss(Extra(losses, Notes()))
    rest = take(batch, (batch.users != bad).nonzero()[:, 0])
    assert apart(private.sums(loss, batch, of(loss)), private.sums(loss, rest, of(loss))) < 1e-6


def test_weights_that_are_not_the_backbones_are_refused():
    model, stranger = random_model(5), torch.nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(ProtoFedError, match=r"weights of the backbone alone, got others of shapes \[\(3, 2\)\]"):
        weights_of(model, torch.optim.SGD([*model.parameters(), stranger], lr=1.0))


def test_losses_of_a_whole_batch_are_refused():
    def losses(batch: Windows) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(batch)), real_targets(batch)

    with pytest.raises(ProtoFedError, match="need the loss of one window"):
        descent()(losses, crowd(descent()), torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))


UNTOUCHED = 3000


def stepped(private: PrivateDescent, batch: Windows) -> dict[str, Tensor]:
    """The gradients of one private step on a table with rows that nobody can touch, at its end."""
    loss = a_loss(n_rows=tiny_stream().slice_(1).n_train_items + UNTOUCHED)
    private.meter.spend(1)
    private.gradients(loss, batch, torch.optim.SGD(loss.model.parameters(), lr=0.0))
    return {name: weight.grad for name, weight in of(loss).items()}  # type: ignore[misc]


def test_noise_of_the_stated_size_lies_on_coordinates_that_nobody_touched():
    private = descent(noise_multiplier=1.3)
    unit = private.sampling_rate * private.n_users / (1.3 * private.clip_radius)
    untouched = stepped(private, cohort(private))["items"][-UNTOUCHED:] * unit
    assert float(untouched.std()) == pytest.approx(1.0, abs=0.03)
    assert float(untouched.mean()) == pytest.approx(0.0, abs=0.03)


def test_a_round_without_a_cohort_is_noise_and_no_two_rounds_share_it():
    private = descent(noise_multiplier=1.0, sampling_rate=1e-9)
    nobody = cohort(private)
    assert len(nobody) == 0
    first, second = stepped(private, nobody)["items"], stepped(private, nobody)["items"]
    assert first.std() > 0
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 0.05


def test_the_mean_is_over_the_expected_cohort_not_over_the_one_that_came():
    private, loss = descent(), a_loss(n_rows=tiny_stream().slice_(1).n_train_items + UNTOUCHED)
    batch = cohort(private)
    expected, found = private.sampling_rate * private.n_users, stepped(private, batch)
    assert len(users_of(batch)) != expected
    for name, total in private.sums(loss, batch, of(loss)).items():
        assert torch.allclose(found[name], (total / expected).float())


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
    monkeypatch.setattr(training, "exam_of", asked)
    monkeypatch.setattr(training, "mean_grade", asked)
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


def test_only_a_private_descent_counts_as_one():
    assert isinstance(descent(), InRounds)
    assert not isinstance(PlainDescent(), InRounds)
    assert everything(warmed_up()[0])


def test_160_rounds_at_rate_005_and_multiplier_11282_cost_an_epsilon_of_34():
    price = epsilon((Release(1.1282, 0.05, 160, "gradients"),), 1e-5)
    assert price == pytest.approx(3.4, abs=2e-3)
    assert price <= 3.4
