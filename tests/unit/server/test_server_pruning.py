"""Use of prototypes over rounds, and what becomes of those that nobody uses."""

import pytest
import torch
from torch import Generator

from protofed.client.codec import unit
from protofed.server.pruning import most_reseeded, prune_or_reinit, shares, unused, update_usage


def rng(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def library(n: int, d: int = 16) -> torch.Tensor:
    return unit(torch.randn(n, d, generator=rng()))


def test_shares_ignore_counts_that_noise_made_negative():
    assert shares(torch.tensor([3.0, -2.0, 1.0, float("nan")])).tolist() == [0.75, 0, 0.25, 0]
    assert shares(torch.tensor([-1.0, 0.0])).tolist() == [0, 0]


def test_usage_is_a_rolling_mean_of_shares():
    usage = update_usage(torch.tensor([0.5, 0.5]), torch.tensor([30.0, 10.0]), decay=0.9)
    assert usage.tolist() == pytest.approx([0.9 * 0.5 + 0.1 * 0.75, 0.9 * 0.5 + 0.1 * 0.25])
    assert update_usage(usage, torch.tensor([-1.0, 0.0])).tolist() == usage.tolist()


def test_a_balanced_library_is_pruned_by_nobody_but_the_printed_threshold():
    usage = torch.full((128,), 1 / 128)
    assert not unused(usage).any()
    assert unused(usage, 0.01).all()


@pytest.mark.parametrize("uploads", [50, 250])
def test_the_printed_threshold_reseeds_most_prototypes_every_round(uploads):
    picks = torch.randint(128, (200, uploads), generator=rng())
    idle = [unused(shares(torch.bincount(row, minlength=128).float()), 0.01).float().mean() for row in picks]
    assert torch.stack(idle).mean() >= 0.6


def test_the_least_used_prototype_moves_next_to_the_most_used():
    v, usage = library(16), torch.full((16,), 0.06)
    usage[3], usage[5], usage[11] = 0.2, 0.001, 0.0005
    after = prune_or_reinit(v, usage, torch.zeros(16, dtype=torch.long), rng(1))
    assert after.reseeded.nonzero()[:, 0].tolist() == [11]  # one of sixteen is all that 5 % allow
    assert float((after.v[11] - v[3]).norm()) == pytest.approx(0.3, abs=0.05)
    assert float(after.v[11].norm()) == pytest.approx(1, abs=1e-6)
    assert after.usage[[3, 11]].tolist() == pytest.approx([0.1, 0.1])
    assert after.versions.tolist() == [0] * 11 + [1] + [0] * 4
    others = torch.arange(16) != 11
    assert torch.equal(after.v[others], v[others])


def test_what_was_handed_in_is_not_changed():
    v, usage, versions = library(4), torch.tensor([0.97, 0.0, 0.02, 0.01]), torch.zeros(4, dtype=torch.long)
    copies = v.clone(), usage.clone(), versions.clone()
    prune_or_reinit(v, usage, versions, rng(1))
    assert all(torch.equal(a, b) for a, b in zip((v, usage, versions), copies, strict=True))


def test_at_most_five_percent_and_at_least_one_are_reseeded():
    assert [most_reseeded(n) for n in (1, 16, 39, 40, 128)] == [1, 1, 1, 2, 6]
    usage = torch.zeros(128)
    usage[0] = 1
    after = prune_or_reinit(library(128), usage, torch.zeros(128, dtype=torch.long), rng(1))
    assert int(after.reseeded.sum()) == 6
    assert int(after.versions.sum()) == 6
    assert float(after.usage.sum()) == pytest.approx(1)
    assert after.usage.sort().values[-7:].tolist() == [0.125] * 6 + [
        0.25
    ]  # halves, quarters, three of them split again


def test_a_library_in_use_is_left_alone():
    v, usage = library(8), torch.full((8,), 1 / 8)
    after = prune_or_reinit(v, usage, torch.arange(8), rng(1))
    assert torch.equal(after.v, v)
    assert torch.equal(after.versions, torch.arange(8))
    assert not after.reseeded.any()


@pytest.mark.parametrize("n", [1, 5])
def test_a_library_without_any_use_has_nothing_to_split(n):
    after = prune_or_reinit(library(n), torch.zeros(n), torch.zeros(n, dtype=torch.long), rng(1))
    assert torch.equal(after.v[0], library(n)[0])
    assert int(after.reseeded.sum()) == 0
