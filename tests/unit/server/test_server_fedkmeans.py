"""Sums do not depend on who comes first; prototypes follow their users and stay where nobody is."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed.client.upload import nearest
from protofed.privacy.mechanism import GRID, os_noise, seeded_noise
from protofed.privacy.upload import UploadRule
from protofed.seeds import stream
from protofed.server.fedkmeans import exact_sums, fedkmeans, fedkmeans_as_printed, noised_sums
from protofed.server.library import new_library

RULE = UploadRule(n_prototypes=3, width=4)


def clients(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(n, 4, generator=rng), torch.randint(3, (n,), generator=rng)


@given(st.integers(0, 60), st.integers(0, 2**32 - 1), st.integers(1, 59))
def test_neither_order_nor_chunks_change_a_bit_of_the_sums(n, seed, cut):
    z, block = clients(n, seed)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    sums = exact_sums(z, block, RULE)
    assert torch.equal(exact_sums(z[order], block[order], RULE), sums)
    assert torch.equal(exact_sums(z[:cut], block[:cut], RULE) + exact_sums(z[cut:], block[cut:], RULE), sums)


def test_sums_are_those_of_a_slow_loop():
    z, block = clients(40, 1)
    by_hand = torch.zeros(3, 5, dtype=torch.float64)
    for z_u, k in zip(z.double(), block.tolist(), strict=True):
        by_hand[k, :4] += z_u / max(1.0, z_u.norm().item())
        by_hand[k, 4] += 0.25
    assert torch.allclose(exact_sums(z, block, RULE), by_hand, atol=1e-7)


@settings(max_examples=50)
@given(st.integers(1, 10), st.integers(0, 2**32 - 1), st.floats(0, 1e30))
def test_adding_one_user_changes_the_sums_by_at_most_the_sensitivity(n, seed, size):
    z, block = clients(n, seed)
    z[0] *= size
    with_, without = exact_sums(z, block, RULE), exact_sums(z[1:], block[1:], RULE)
    assert (with_ - without).norm().item() <= RULE.sensitivity


def test_every_row_is_noised_alike_whether_anybody_fed_it_or_not():
    rule = UploadRule(n_prototypes=2_000, width=4)
    z = torch.ones(1_000, 4)
    block = torch.arange(1_000)
    noise = noised_sums(z, block, rule, 1.5, seeded_noise(stream(0, "n"))) - exact_sums(z, block, rule)
    for part in (noise[:1_000], noise[1_000:], noise[:, -1]):
        assert part.std().item() == pytest.approx(1.5 * rule.sensitivity, rel=0.06)


def test_sums_lie_on_the_grid_that_a_deployments_noise_has():
    z, block = clients(50, 4)
    steps = exact_sums(z, block, RULE) / GRID
    assert torch.equal(steps, steps.round())
    noised = noised_sums(z, block, RULE, 1.1282, os_noise) / GRID
    assert torch.equal(noised, noised.round())
    assert 0.5 < (noised - steps).std().item() * GRID / (1.1282 * RULE.sensitivity) < 2


def test_without_noise_the_release_is_the_sum():
    z, block = clients(10, 2)
    assert torch.equal(noised_sums(z, block, RULE, 0.0, os_noise), exact_sums(z, block, RULE))


def test_one_round_is_the_running_average_written_by_hand():
    library = new_library(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), mass=2.0)
    noised = torch.tensor([[0.0, 4.0, 1.0], [3.0, 0.0, 0.5]], dtype=torch.float64)
    after = fedkmeans(library, noised, momentum=0.5)
    assert torch.allclose(after.ema_sums, torch.tensor([[1.0, 2.0], [1.5, 1.0]]))
    assert after.ema_counts.tolist() == [3.0, 2.0]  # counts come scaled by c = 0.25
    assert torch.allclose(after.v, torch.tensor([[1.0, 2.0], [1.5, 1.0]]) / torch.tensor([[5.0], [3.25]]).sqrt())
    assert after.version == 1


def test_prototypes_with_little_mass_stay_as_they_are_but_keep_their_average():
    library = new_library(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), mass=1.5)
    noised = torch.tensor([[0.0, 9.0, -1.0], [9.0, 0.0, 9.0]], dtype=torch.float64)
    after = fedkmeans(library, noised, momentum=0.5, least_mass=1.0)
    assert after.v[0].tolist() == [1.0, 0.0]
    assert after.ema_sums[0].tolist() == [0.75, 4.5]
    assert after.v[1, 0] > 0.9


def test_empty_clusters_keep_their_prototype():
    library = new_library(torch.eye(3, 4))
    z = torch.tensor([[0.0, 0.0, 0.0, 1.0]]).expand(30, -1)
    for _ in range(20):
        library = fedkmeans(library, exact_sums(z, torch.zeros(30, dtype=torch.int64), RULE))
    assert torch.equal(library.v[1:], torch.eye(3, 4)[1:])
    assert library.v[0, 3] > 0.95
    assert library.version == 20


def test_a_row_that_is_not_finite_is_no_news():
    library = new_library(torch.eye(3, 4))
    noised = torch.zeros(3, 5, dtype=torch.float64)
    noised[1, 2] = math.nan
    after = fedkmeans(library, noised)
    assert torch.isfinite(after.v).all()
    assert torch.equal(after.v[1], library.v[1])
    assert torch.equal(after.ema_sums[1], library.ema_sums[1])


@given(st.integers(0, 2**32 - 1))
def test_prototypes_stay_on_the_sphere_whatever_the_noise(seed):
    library = new_library(torch.eye(3, 4))
    for round_ in range(5):
        noised = noised_sums(*clients(6, seed), RULE, 5.0, seeded_noise(stream(seed, "noise", round_)))
        library = fedkmeans(library, noised)
    assert torch.allclose(library.v.norm(dim=1), torch.ones(3), atol=1e-5)


def test_prototypes_find_their_clusters_through_the_noise_of_the_default_budget():
    rng = stream(0, "clusters")
    centres = torch.nn.functional.normalize(torch.randn(4, 16, generator=rng), dim=1)
    library = new_library(centres + 0.6 * torch.nn.functional.normalize(torch.randn(4, 16, generator=rng), dim=1))
    rule, noise = UploadRule(4, 16), seeded_noise(stream(0, "noise"))
    before = (library.v * centres).sum(dim=1).mean()
    for _ in range(60):
        z = torch.nn.functional.normalize(
            centres[torch.randint(4, (40,), generator=rng)] + 0.1 * torch.randn(40, 16, generator=rng), dim=1
        )
        library = fedkmeans(library, noised_sums(z, nearest(z, library.v), rule, 1.1282, noise))
    after = (library.v * centres).sum(dim=1)
    assert before < 0.9 < after.min()


def angle(one: torch.Tensor, other: torch.Tensor) -> float:
    """In degrees, between unit vectors."""
    return math.degrees(2 * math.asin(min(1.0, (one.double() - other.double()).norm().item() / 2)))


def after_rounds(n: int, honest: torch.Tensor, bad: torch.Tensor, width: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """The prototype of the same honest uploads in n rounds, with and without one client who sends `bad` every time."""
    rule, libraries = UploadRule(1, width), []
    for z in (torch.cat([honest, bad[None]]), honest):
        library = new_library(torch.eye(1, width))
        for _ in range(n):
            library = fedkmeans(library, exact_sums(z, torch.zeros(len(z), dtype=torch.int64), rule))
        libraries.append(library)
    return libraries[0].v[0], libraries[1].v[0]


@given(st.integers(1, 40), st.integers(0, 2**32 - 1), st.floats(0.01, 1e6))
def test_one_client_turns_a_prototype_by_no_more_than_its_share_of_the_running_sum(n, seed, size):
    rng = torch.Generator().manual_seed(seed)
    honest, bad = torch.randn(5, 4, generator=rng), size * torch.randn(4, generator=rng)
    honest = torch.nn.functional.normalize(honest + torch.tensor([3.0, 0, 0, 0]), dim=1)
    faded = 0.9**n
    length = (faded * 3 * torch.eye(1, 4)[0] + (1 - faded) * honest.sum(0)).norm().item()  # of the honest average
    moved, there = after_rounds(n, honest, bad)
    assert angle(moved, there) <= math.degrees(math.asin((1 - faded) / length)) + 0.01


def test_a_client_moves_a_prototype_by_two_degrees_a_round_and_by_twenty_if_it_never_stops():
    library = fedkmeans(new_library(torch.eye(1, 4), mass=2.7), torch.tensor([[2.7, 1, 0, 0, 1]], dtype=torch.float64))
    assert 2.0 < angle(library.v[0], torch.eye(1, 4)[0]) < math.degrees(math.asin(0.1 / 2.7)) < 2.13
    honest = 0.9 * torch.eye(1, 4).expand(3, -1)  # length 2.7
    moved, there = after_rounds(160, honest, torch.tensor([0.0, 1.0, 0.0, 0.0]))
    assert 20.2 < angle(moved, there) < math.degrees(math.asin(1 / 2.7)) < 21.8
    worst, there = after_rounds(160, honest, torch.tensor([-1 / 2.7, math.sqrt(1 - 1 / 2.7**2), 0.0, 0.0]))
    assert angle(worst, there) == pytest.approx(21.7, abs=0.1)


def test_a_prototype_without_honest_uploads_cannot_be_taken_by_one_client():
    """It is followed while the mass of its start lasts, six rounds; at a least mass of 1 it was taken whole."""
    nobody, bad = torch.zeros(0, 4), torch.tensor([0.0, 1.0, 0.0, 0.0])
    for rounds in (6, 7, 160, 1_000):
        moved, there = after_rounds(rounds, nobody, bad)
        assert angle(moved, there) < math.degrees(math.asin((1 - 0.9**6) / (3 * 0.9**6))) < 17.2
    assert torch.equal(after_rounds(7, nobody, bad)[0], after_rounds(1_000, nobody, bad)[0])


def test_a_prototype_that_is_fed_as_much_as_k_is_chosen_for_is_never_held():
    rule, library = UploadRule(2, 4), new_library(torch.eye(2, 4))
    z = torch.nn.functional.normalize(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), dim=1).expand(6, -1)
    for _ in range(30):
        before, library = library, fedkmeans(library, exact_sums(z, torch.arange(6) % 2, rule))
        assert (library.v != before.v).any(1).all()


def test_the_printed_update_moves_towards_the_mean_and_keeps_empty_clusters():
    v = torch.eye(3, 4)
    z = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.5]])
    moved = fedkmeans_as_printed(v, z, torch.tensor([0, 0]), RULE, sigma=0.0, momentum=0.5, noise=os_noise)
    assert torch.allclose(moved, torch.tensor([[0.5, 0, 0, 0.375], [0, 1.0, 0, 0], [0, 0, 1.0, 0]]))


def test_the_printed_noise_does_not_shrink_with_the_cluster():
    rule = UploadRule(n_prototypes=2_000, width=4)
    v, z = torch.zeros(2_000, 4), torch.zeros(20_000, 4)
    block = torch.arange(2_000).repeat(10)
    moved = fedkmeans_as_printed(v, z, block, rule, sigma=0.4, momentum=1.0, noise=seeded_noise(stream(0, "printed")))
    assert moved.std().item() == pytest.approx(0.4, rel=0.05)
