"""Losses against one loop per target, and their gradients against finite differences."""

import math

import pytest
import torch
from torch import Generator, Tensor
from worlds import random_model

from protofed.backbone.losses import LOSSES, bce, bpr, draw_negatives, hidden_at, sampled_softmax, window_losses
from protofed.backbone.sasrec import SASRec
from protofed.slices.histories import BOS, PAD
from protofed.slices.windows import NO_TARGET, Windows

N_ROWS = 9
VOID = -math.inf
WINDOWS = Windows(
    users=torch.tensor([0, 1, 2]),
    tokens=torch.tensor([[PAD, PAD, BOS, 4, 4, 2], [BOS, 1, 2, 3, 8, 5], [PAD, PAD, PAD, PAD, PAD, BOS]]),
    sources=torch.tensor([[2, 3, 5], [5, 0, 0], [5, 0, 0]]),
    targets=torch.tensor([[4, 4, 0], [6, NO_TARGET, NO_TARGET], [NO_TARGET, NO_TARGET, NO_TARGET]]),
    newest=torch.tensor([10, 11, -1]),
)
NEGATIVES = torch.tensor([[4, 0, 7, 7], [1, 2, 6, 3], [0, 1, 2, 3]])  # windows 0 and 1 hold targets of their own


def slow_softmax(positive: float, negatives: list[float]) -> float:
    return -math.log(math.exp(positive) / (math.exp(positive) + sum(math.exp(n) for n in negatives)))


def slow_bce(positive: float, negatives: list[float]) -> float:
    against = [-math.log(1 - 1 / (1 + math.exp(-n))) for n in negatives]
    return -math.log(1 / (1 + math.exp(-positive))) + (sum(against) / len(against) if against else 0)


def slow_bpr(positive: float, negatives: list[float]) -> float:
    pairs = [-math.log(1 / (1 + math.exp(n - positive))) for n in negatives]
    return sum(pairs) / len(pairs) if pairs else 0


SLOW = {"softmax": slow_softmax, "bce": slow_bce, "bpr": slow_bpr}


def slow_window_losses(model: SASRec, windows: Windows, negatives: Tensor, name: str) -> tuple[list, list]:
    sums, counts = [], []
    hidden, rows = model.hidden(windows.tokens).tolist(), model.rows(N_ROWS).tolist()

    def score(window: int, place: int, item: int) -> float:
        return sum(h * e for h, e in zip(hidden[window][place], rows[item], strict=True))

    for window, drawn in enumerate(negatives.tolist()):
        losses = []
        for place, target in zip(windows.sources[window].tolist(), windows.targets[window].tolist(), strict=True):
            if target != NO_TARGET:
                others = [score(window, place, item) for item in drawn if item != target]
                losses.append(SLOW[name](score(window, place, target), others))
        sums.append(sum(losses))
        counts.append(len(losses))
    return sums, counts


@pytest.mark.parametrize("name", LOSSES)
def test_window_losses_are_sums_over_targets_written_with_loops(name):
    model = random_model(N_ROWS).double()
    sums, counts = window_losses(model, WINDOWS, NEGATIVES, LOSSES[name])
    expected_sums, expected_counts = slow_window_losses(model, WINDOWS, NEGATIVES, name)
    assert sums.tolist() == pytest.approx(expected_sums, abs=1e-12)
    assert counts.tolist() == expected_counts == [3, 1, 0]


def test_losses_by_hand():
    positive, negatives = torch.tensor([[0.0]]), torch.tensor([[[0.0, 0.0, 0.0]]])
    assert sampled_softmax(positive, negatives).item() == pytest.approx(math.log(4))
    assert bce(positive, negatives).item() == pytest.approx(2 * math.log(2))
    assert bpr(positive, negatives).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("name", LOSSES)
def test_a_void_negative_counts_for_nothing(name):
    positive = torch.tensor([[1.5, -0.5]])
    kept = torch.tensor([[[0.3, -2.0], [1.0, 0.7]]])
    with_void = torch.cat([kept, torch.full((1, 2, 2), VOID)], dim=-1)
    assert torch.allclose(LOSSES[name](positive, with_void), LOSSES[name](positive, kept))


@pytest.mark.parametrize("name", LOSSES)
def test_a_negative_that_is_the_target_gives_neither_loss_nor_gradient(name):
    model = random_model(N_ROWS)
    one = Windows(
        WINDOWS.users[1:2], WINDOWS.tokens[1:2], torch.tensor([[5]]), torch.tensor([[6]]), WINDOWS.newest[1:2]
    )
    values = []
    for drawn in ([[1, 2, 3]], [[1, 6, 2, 6, 3]]):
        model.zero_grad()
        sums, _ = window_losses(model, one, torch.tensor(drawn), LOSSES[name])
        sums.sum().backward()
        values.append((sums.detach(), model.items.grad.clone()))
    assert torch.allclose(values[0][0], values[1][0])
    assert torch.allclose(values[0][1], values[1][1], atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_target_without_any_valid_negative_still_has_finite_gradients(name):
    model = random_model(N_ROWS)
    one = Windows(
        WINDOWS.users[1:2], WINDOWS.tokens[1:2], torch.tensor([[5]]), torch.tensor([[6]]), WINDOWS.newest[1:2]
    )
    sums, _ = window_losses(model, one, torch.tensor([[6, 6]]), LOSSES[name])
    sums.sum().backward()
    assert sums.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", LOSSES)
def test_padding_targets_give_no_gradient(name):
    model = random_model(N_ROWS)
    sums, _ = window_losses(model, WINDOWS, NEGATIVES, LOSSES[name])
    sums[2].backward(retain_graph=True)  # a window of nothing but padding
    assert sums[2] == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    sums[1].backward()
    padded = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    trimmed = Windows(
        WINDOWS.users[1:2], WINDOWS.tokens[1:2], WINDOWS.sources[1:2, :1], WINDOWS.targets[1:2, :1], WINDOWS.newest[1:2]
    )
    window_losses(model, trimmed, NEGATIVES[1:2], LOSSES[name])[0].sum().backward()
    assert all(torch.allclose(p.grad, padded[key], atol=1e-6) for key, p in model.named_parameters())


def test_the_mean_row_gets_no_gradient_and_neither_does_an_unset_row():
    model = random_model(N_ROWS)
    model.has_row[6] = False
    window_losses(model, WINDOWS, NEGATIVES, LOSSES["softmax"])[0].sum().backward()
    assert not model.items.grad[6].any()  # the target of window 1
    assert model.items.grad[4].any()


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_agree_with_finite_differences(name):
    model = random_model(N_ROWS, seed=3).double()
    prompt = torch.randn(3, 2, 8, generator=Generator().manual_seed(1)).double()

    def loss() -> Tensor:
        return window_losses(model, WINDOWS, NEGATIVES, LOSSES[name], prompt)[0].sum()

    loss().backward()
    rng = Generator().manual_seed(2)
    for key, parameter in model.named_parameters():
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for place in torch.randint(len(flat), (2,), generator=rng).tolist():
            kept, values = float(flat[place]), []
            for step in (1e-6, -1e-6):
                flat[place] = kept + step
                values.append(float(loss().detach()))
            flat[place] = kept
            assert float(gradient[place]) == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-6, rel=1e-5), key


def test_negatives_are_uniform_over_the_items_given():
    drawn = draw_negatives(200, 50, 7, Generator().manual_seed(0))
    counts = torch.bincount(drawn.flatten(), minlength=7)
    assert len(counts) == 7
    assert (counts / drawn.numel()).tolist() == pytest.approx([1 / 7] * 7, abs=0.015)
    assert torch.equal(drawn, draw_negatives(200, 50, 7, Generator().manual_seed(0)))


def test_picked_hidden_states_are_those_that_gathering_gives_and_so_are_their_gradients():
    rng = Generator().manual_seed(0)
    hidden = torch.randn(5, 7, 4, generator=rng, dtype=torch.float64).requires_grad_(True)
    sources = torch.randint(7, (5, 9), generator=rng)  # more places than tokens: some are read twice
    weights = torch.randn(5, 9, 4, generator=rng, dtype=torch.float64)
    picked, gathered = hidden_at(hidden, sources), hidden.gather(1, sources[..., None].expand(-1, -1, 4))
    assert torch.equal(picked, gathered)
    slopes = [torch.autograd.grad((part * weights).sum(), hidden)[0] for part in (picked, gathered)]
    assert torch.allclose(*slopes, rtol=0, atol=1e-14)
