"""The release of popularity audited from outside, from the clients' histories to the noised sums.

A trial is three items of one large catalogue: its canary meets two of them, the first one twice, and two known clients
the third. Items are noised independently, so 100,000 trials are one call of the real functions.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from auditing import ALPHA, mu_lower_bound
from scipy import stats
from torch import Tensor

from protofed.client.introductions import Introductions
from protofed.federation import popularity
from protofed.federation.plan import Stream, ledger
from protofed.federation.popularity import release_popularity, sum_votes, votes
from protofed.inference.item_side import Covisits, ItemCounts
from protofed.privacy.accountant import epsilon, gaussian_epsilon
from protofed.privacy.draws import SeededDraws
from protofed.privacy.mechanism import Noise, seeded_noise
from protofed.seeds import stream
from protofed.server import accept
from protofed.slices.histories import Histories, histories
from protofed.slices.partition import SliceBounds
from protofed.slices.stream import QuerySet, TimeSlice

Z = 1.1282
TRIALS, ROWS, SLICES = 100_000, 3, 8
ITEMS = TRIALS * ROWS
CANARY = torch.tensor([1.0, 1.0, 0.0]) / math.sqrt(2)  # however often it met the first item
Aggregate = Callable[[bool, Noise], Tensor]  # with the canaries or without: what is released of every item


def past(present: bool) -> Histories:
    """Everybody's events: users 0 .. TRIALS - 1 are the canaries, who have some if present; others have one each."""
    first = torch.arange(TRIALS) * ROWS
    canary = torch.stack([first, first, first + 1], dim=1)[: TRIALS * present]
    users = torch.cat([torch.arange(len(canary)).repeat_interleave(3), TRIALS + torch.arange(2 * TRIALS)])
    items = torch.cat([canary.flatten(), first.repeat(2) + 2])
    return histories(users.numpy(), items.numpy(), np.arange(len(users)), 3 * TRIALS)


def a_slice(present: bool) -> TimeSlice:
    events, nobody, nothing = past(present), torch.zeros(0, dtype=torch.int64), np.zeros(0, dtype=np.int64)
    none = torch.zeros(0, 1, dtype=torch.int64)
    asked = QuerySet(1, "val", nothing, nobody, nobody, none, none, ITEMS, {})
    bounds = (SliceBounds(0, 0, 0, 0, 0), SliceBounds(1, 0, len(events), len(events), len(events)))
    return TimeSlice(1, bounds, events, np.arange(len(events)), ITEMS, asked, np.arange(3 * TRIALS))


def released(present: bool, noise: Noise) -> Tensor:
    """What the real release says of every item: from histories through uploads and what a server accepts."""
    nothing, nobody = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    counts = ItemCounts(nothing, nothing, Covisits(torch.zeros(1, dtype=torch.int64), nobody, nothing), 0)
    return release_popularity(counts, a_slice(present), Z, noise, SeededDraws(0))[0].recent


@cache
def said(present: bool) -> Introductions:
    events = past(present)
    return votes(events, np.arange(len(events)), ITEMS)


def no_noise(shape: tuple[int, ...], std: float) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


@cache
def exact(present: bool) -> Tensor:
    return sum_votes(said(present), ITEMS, 0.0, no_noise)


def intact(present: bool, noise: Noise) -> Tensor:
    return sum_votes(said(present), ITEMS, Z, noise)


def noise_of(present: bool, *names: str | int) -> Noise:
    return seeded_noise(stream(1, *names, int(present)))


def trials(aggregate: Aggregate, present: bool, *names: str | int) -> Tensor:
    """Y - Y0 of every trial, Y0 being what the known clients say."""
    return (aggregate(present, noise_of(present, *names)) - exact(False)).view(TRIALS, ROWS)


def along_canary(y: Tensor) -> Tensor:
    """<Y - Y0, e>: the best single statistic against Gaussian noise."""
    return y @ CANARY


def of_one_item(y: Tensor) -> Tensor:
    return y[:, 0]


def bound(aggregate: Aggregate, statistic: Callable[[Tensor], Tensor] = along_canary) -> float:
    """μ that the statistic shows, the canaries being there or not."""
    without, with_ = (statistic(trials(aggregate, present, "audit")).numpy() for present in (False, True))
    return mu_lower_bound(without, with_)


def test_the_canary_says_what_is_audited_and_the_known_clients_are_heard():
    found = trials(lambda present, noise: exact(present), True)
    torch.testing.assert_close(found, CANARY.expand(TRIALS, -1), atol=3e-6, rtol=0)
    assert exact(False).view(TRIALS, ROWS)[:, 2].tolist() == pytest.approx([2.0] * TRIALS, abs=1e-5)


def test_what_is_audited_is_the_real_release():
    for present in (False, True):
        found, expected = (each(present, noise_of(present, "real")) for each in (released, intact))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_the_intact_release_leaks_what_it_promises_and_no_more():
    assert 0.93 / Z <= bound(intact) <= 1 / Z
    assert bound(intact, of_one_item) <= 1 / Z


def each_item_alone(present: bool, noise: Noise) -> Tensor:
    """Whoever meets many items says more than the noise hides."""
    whole = said(present)
    return sum_votes(Introductions(whole.users, whole.items, torch.ones_like(whole.values)), ITEMS, Z, noise)


def too_little_noise(present: bool, noise: Noise) -> Tensor:
    return sum_votes(said(present), ITEMS, Z / 1.25, noise)


def noise_for_items_met(present: bool, noise: Noise) -> Tensor:
    return intact(present, noise) * (exact(present) > 0)


@pytest.mark.parametrize(
    ("broken", "statistic"),
    [(each_item_alone, along_canary), (too_little_noise, along_canary), (noise_for_items_met, lambda y: y[:, 0].abs())],
    ids=["each item alone", "too little noise", "noise for items met"],
)
def test_a_broken_release_is_caught(broken, statistic):
    assert bound(broken, statistic) > 1 / Z


def test_a_server_that_takes_any_length_is_caught_where_devices_do_not_clip(monkeypatch):
    for module in (popularity, accept):
        monkeypatch.setattr(module, "clip_introductions", lambda whose, values, radius: values)
    assert bound(released) > 1 / Z
    monkeypatch.undo()
    monkeypatch.setattr(popularity, "clip_introductions", lambda whose, values, radius: values)
    assert bound(released) <= 1 / Z  # the server clips once more


def test_the_noise_of_items_that_nobody_met_has_the_promised_size():
    noise = trials(intact, False, "scale").flatten().double()
    limit = math.sqrt(float((noise**2).sum()) / stats.chi2.ppf(ALPHA, noise.numel()))
    assert Z <= limit <= 1.01 * Z


@pytest.mark.parametrize("reused", [False, True])
def test_reused_noise_is_caught_by_the_difference_of_two_slices(reused):
    """<Y2 - Y1, e> of two slices, the canary in the second alone."""
    arms = []
    for present in (False, True):
        one, two = (noise_of(present, "slice 1" if reused else name) for name in ("slice 1", "slice 2"))
        change = intact(present, two) - intact(False, one)
        arms.append(along_canary(change.view(TRIALS, ROWS)).numpy())
    found, promised = mu_lower_bound(*arms), 1 / (Z * math.sqrt(2))
    assert found > 1 / Z if reused else 0.9 * promised <= found <= promised


def test_a_stream_of_slices_leaks_what_the_ledger_charges_and_no_more():
    without, with_ = (
        torch.stack([along_canary(trials(intact, present, t)) for t in range(SLICES)]).sum(0).numpy()
        for present in (False, True)
    )
    found, promised = mu_lower_bound(without, with_), math.sqrt(SLICES) / Z
    assert 0.93 * promised <= found <= promised
    charged = epsilon(ledger((Stream("popularity", 1.0, SLICES, Z),)), 1e-5)
    assert gaussian_epsilon(found, 1e-5) < charged <= 1.01 * gaussian_epsilon(promised, 1e-5)
