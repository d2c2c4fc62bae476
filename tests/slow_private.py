"""Private sums the slow, obvious way: a loop over users and windows, an ordinary backward pass, a norm, a division."""

from typing import Any

import torch
from torch import Tensor

from protofed.backbone.extras import Dealt, Notes
from protofed.backbone.losses import window_losses
from protofed.backbone.one_window import OneWindowLoss
from protofed.privacy.descent import PrivateDescent
from protofed.slices.windows import Windows, take


def users_of(batch: Windows) -> list[int]:
    return sorted(set(batch.users.tolist()))


def slow_mean_loss(private: PrivateDescent, loss: OneWindowLoss, own: Windows, notes: Notes) -> Tensor:
    """One user's mean loss over its targets; every window is asked alone, with draws of its own."""
    total, counted = torch.zeros(()), 0
    for place in range(len(own)):
        window = take(own, torch.tensor([place]))
        negatives = private.negatives(window, loss.negatives, loss.n_items, loss.round_)
        sums, counts = window_losses(loss.model, window, negatives, loss.element_loss)
        total, counted = total + sums.sum(), counted + int(counts.sum())
        if loss.extra is not None:
            numbers = private.numbers(window, loss.needs(own.tokens.shape[1]).numbers, loss.round_)
            lots = Dealt(numbers[0])
            total = total + loss.extra.losses(loss.model, window, lots, notes).sum()
            assert lots.used == len(numbers[0])
    return total / counted


def slow_gradients(private: PrivateDescent, loss: OneWindowLoss, batch: Windows, weights: dict[str, Any], notes: Notes):
    """Each user's gradient of its mean loss, dense."""
    for user in users_of(batch):
        own = take(batch, (batch.users == user).nonzero()[:, 0])
        mean = slow_mean_loss(private, loss, own, notes)
        yield torch.autograd.grad(mean, list(weights.values()), allow_unused=True, materialize_grads=True)


def slow_sums(
    private: PrivateDescent, loss: OneWindowLoss, batch: Windows, weights: dict[str, Any], notes: Notes | None = None
) -> dict[str, Tensor]:
    """The sum over users of their gradients, each clipped to the radius."""
    total = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in weights.items()}
    for found in slow_gradients(private, loss, batch, weights, Notes() if notes is None else notes):
        length = float(torch.cat([each.flatten() for each in found]).double().norm())
        for name, each in zip(weights, found, strict=True):
            total[name] += min(1.0, private.clip_radius / max(length, 1e-300)) * each.double()
    return total


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The length of the difference of two sums."""
    return float(sum((one[name] - other[name]).square().sum() for name in one).sqrt())
