"""The release of new items' sums audited from outside, as `test_privacy_audit` does with the prototypes'.

A trial is three new items of one large catalogue: its canary meets two of them, two known clients the third. Items are
noised independently, so 100,000 trials are one call of the real functions, from the clients' histories to the release.
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
from worlds import random_model

from protofed.client.introductions import Introductions, Map, clip_introductions, coordinates, introductions, map_of
from protofed.federation.plan import Stream, ledger
from protofed.privacy.accountant import epsilon, gaussian_epsilon
from protofed.privacy.mechanism import Noise, seeded_noise
from protofed.seeds import stream
from protofed.server.newcomers import sum_introductions
from protofed.slices.histories import Histories, histories

Z = 1.1282
TRIALS = 100_000
KNOWN = 6  # items of the base block
ROWS = 3  # new items of a trial: two of the canary's, and another
WANTED = torch.arange(KNOWN + TRIALS * ROWS) >= KNOWN
PUBLIC = random_model(KNOWN)
Aggregate = Callable[[bool, Noise], Tensor]  # with the canaries or without: what is released of every item


@cache
def public_map() -> Map:
    return map_of(PUBLIC.items.detach(), r=2)


def past(present: bool) -> Histories:
    """Everybody's events; users 0 .. TRIALS - 1 are the canaries, who have some if present.

    A canary meets known item 0, three times its first new item, its second, known item 1; others a known and a new one.
    """
    new = KNOWN + torch.arange(TRIALS) * ROWS
    canary = torch.stack([0 * new, new, new, new, new + 1, 0 * new + 1], dim=1)[: TRIALS * present]
    others = torch.arange(2 * TRIALS)
    theirs = torch.stack([2 + others % 4, new.repeat(2) + 2], dim=1)
    users = torch.cat([torch.arange(len(canary)).repeat_interleave(6), TRIALS + others.repeat_interleave(2)])
    items = torch.cat([canary.flatten(), theirs.flatten()])
    return histories(users.numpy(), items.numpy(), np.arange(len(users)), 3 * TRIALS)


@cache
def said(present: bool, radius: float = 1.0) -> Introductions:
    events = past(present)
    return introductions(events, np.arange(len(events)), len(events), PUBLIC, public_map(), WANTED, radius=radius)


def no_noise(shape: tuple[int, ...], std: float) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


@cache
def exact(present: bool) -> Tensor:
    return sum_introductions(said(present), WANTED, 0.0, no_noise)


def intact(present: bool, noise: Noise) -> Tensor:
    return sum_introductions(said(present), WANTED, Z, noise)


def trials(aggregate: Aggregate, present: bool, *names: str | int) -> Tensor:
    """Y - Y0 of every trial, (TRIALS, ROWS, 1 + r), Y0 being what the known clients say."""
    released = aggregate(present, seeded_noise(stream(1, *names, int(present))))
    return (released - exact(False))[KNOWN:].reshape(TRIALS, ROWS, -1)


def arms(aggregate: Aggregate, statistic: Callable[[Tensor], Tensor]) -> list[np.ndarray]:
    """The statistic's values without and with the canary."""
    return [statistic(trials(aggregate, present, "audit")).numpy() for present in (False, True)]


@cache
def canary_rows() -> Tensor:
    """The contribution e by hand: counts 3 and 1, each event among the same two known items, length 1 in all."""
    place = coordinates(public_map(), PUBLIC.items.detach()[:2]).mean(0)
    event = torch.cat((torch.ones(1), place))
    raw = torch.stack((3 * event, event))
    return raw / raw.norm()


def along_canary(y: Tensor) -> Tensor:
    """<Y - Y0, e>: the best single statistic against Gaussian noise."""
    return (y[:, :2] * canary_rows()).sum(dim=(1, 2))


def count_only(y: Tensor) -> Tensor:
    return y[:, 0, 0]


def place_only(y: Tensor) -> Tensor:
    return (y[:, 0, 1:] * canary_rows()[0, 1:]).sum(dim=1)


def any_noise(y: Tensor) -> Tensor:
    """How far the canary's first item is from having been met by nobody."""
    return y[:, 0].norm(dim=-1)


def test_the_canary_says_what_is_audited_and_the_known_clients_are_heard():
    found = trials(lambda present, noise: exact(present), True)
    torch.testing.assert_close(found[:, :2], canary_rows().expand(TRIALS, -1, -1), atol=3e-6, rtol=0)
    assert not found[:, 2].any()
    assert (exact(False)[KNOWN + 2 :: ROWS, 0] > 0.1).all()
    assert len(said(True).users.unique()) == 3 * TRIALS


def test_the_intact_release_leaks_what_it_promises_and_no_more():
    bound = mu_lower_bound(*arms(intact, along_canary))
    assert 0.93 / Z <= bound <= 1 / Z


@pytest.mark.parametrize("statistic", [count_only, place_only, any_noise])
def test_the_intact_release_leaks_no_more_through_other_statistics(statistic):
    assert mu_lower_bound(*arms(intact, statistic)) <= 1 / Z


def no_clip(present: bool, noise: Noise) -> Tensor:
    return sum_introductions(said(present, radius=1e9), WANTED, Z, noise)


def each_item_clipped_alone(present: bool, noise: Noise) -> Tensor:
    """Whoever meets many new items says more than the noise hides."""
    raw = said(present, radius=1e9)
    alone = clip_introductions(torch.arange(len(raw.users)), raw.values, 1.0)
    return sum_introductions(Introductions(raw.users, raw.items, alone), WANTED, Z, noise)


def too_little_noise(present: bool, noise: Noise) -> Tensor:
    return sum_introductions(said(present), WANTED, Z / 1.25, noise)


def exact_counts(present: bool, noise: Noise) -> Tensor:
    return torch.cat((exact(present)[:, :1], intact(present, noise)[:, 1:]), dim=1)


def exact_places(present: bool, noise: Noise) -> Tensor:
    return torch.cat((intact(present, noise)[:, :1], exact(present)[:, 1:]), dim=1)


def noise_for_items_met(present: bool, noise: Noise) -> Tensor:
    """As if only items that somebody met had sums."""
    met = torch.zeros_like(WANTED).index_fill(0, said(present).items, True)
    return intact(present, noise) * met[:, None]


@pytest.mark.parametrize(
    ("broken", "statistic"),
    [
        (no_clip, along_canary),
        (each_item_clipped_alone, along_canary),
        (too_little_noise, along_canary),
        (exact_counts, count_only),
        (exact_places, place_only),
        (noise_for_items_met, any_noise),
    ],
    ids=lambda part: part.__name__,
)
def test_a_broken_release_is_caught_by_its_own_statistic(broken, statistic):
    assert mu_lower_bound(*arms(broken, statistic)) > 1 / Z


def test_the_noise_of_items_that_only_others_met_has_the_promised_size():
    noise = trials(intact, False, "scale")[:, 2].flatten().double()
    limit = math.sqrt(float((noise**2).sum()) / stats.chi2.ppf(ALPHA, noise.numel()))
    assert Z <= limit <= 1.01 * Z


def two_slices(reuse: bool) -> list[np.ndarray]:
    """<Y2 - Y1, e> of two slices, the canary in the second only."""
    values = []
    for present in (False, True):
        streams = ["slice 1", "slice 1" if reuse else "slice 2"]
        noises = [seeded_noise(stream(2, name, int(present))) for name in streams]
        change = intact(present, noises[1]) - intact(False, noises[0])
        values.append(along_canary(change[KNOWN:].reshape(TRIALS, ROWS, -1)).numpy())
    return values


def test_reused_noise_is_caught_by_the_difference_of_two_slices():
    assert mu_lower_bound(*two_slices(reuse=True)) > 1 / Z
    assert 0.9 / (Z * math.sqrt(2)) <= mu_lower_bound(*two_slices(reuse=False)) <= 1 / (Z * math.sqrt(2))


SLICES = 8


def all_slices(present: bool) -> np.ndarray:
    """<sum of all slices' Y - Y0, e>, the canary in every slice or in none: nobody is sampled out."""
    return torch.stack([along_canary(trials(intact, present, "slice", t)) for t in range(SLICES)]).sum(0).numpy()


def test_a_stream_of_slices_leaks_what_the_ledger_charges_and_no_more():
    bound, promised = mu_lower_bound(all_slices(False), all_slices(True)), math.sqrt(SLICES) / Z
    assert 0.93 * promised <= bound <= promised
    charged = epsilon(ledger((Stream("new items", 1.0, SLICES, Z),)), 1e-5)
    assert gaussian_epsilon(bound, 1e-5) < charged <= 1.01 * gaussian_epsilon(promised, 1e-5)
