"""First prototypes: Lloyd's iterations against a slow loop, planted clusters against scikit-learn, too few points."""

import math

import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from torch import Generator, Tensor

from protofed.client.codec import unit
from protofed.errors import ConfigError
from protofed.server.seeding import spherical_kmeans


def rng(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def planted(
    n_clusters: int, each: int, d: int = 8, spread: float = 0.15, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Unit vectors around random directions, shuffled; which direction each belongs to; the directions."""
    drawn = rng(seed)
    centres = unit(torch.randn(n_clusters, d, generator=drawn))
    truth = torch.arange(n_clusters).repeat_interleave(each)[torch.randperm(n_clusters * each, generator=drawn)]
    return unit(centres[truth] + spread * torch.randn(len(truth), d, generator=drawn)), truth, centres


def lloyd_by_hand(points: list[list[float]], centres: list[list[float]], iterations: int) -> list[list[float]]:
    """The textbook loop: nearest centre by cosine, mean of each cluster, back to the sphere; empty clusters stay."""
    for _ in range(iterations):
        cosines = [[sum(a * b for a, b in zip(x, c, strict=True)) for c in centres] for x in points]
        owner = [row.index(max(row)) for row in cosines]
        for k in range(len(centres)):
            mine = [x for x, o in zip(points, owner, strict=True) if o == k]
            total = [sum(column) for column in zip(*mine, strict=True)]
            length = math.sqrt(sum(t * t for t in total))
            if mine and length > 1e-6:
                centres[k] = [t / length for t in total]
    return centres


@pytest.mark.parametrize("seed", range(4))
def test_the_iterations_are_those_of_a_slow_loop_from_the_same_seeds(seed):
    points, _, _ = planted(5, 12, spread=0.5, seed=seed)
    seeds = spherical_kmeans(points, 6, rng(seed), iterations=0)
    by_hand = lloyd_by_hand(points.tolist(), seeds.tolist(), 25)
    torch.testing.assert_close(spherical_kmeans(points, 6, rng(seed)), torch.tensor(by_hand), atol=1e-5, rtol=0)


def test_seeds_are_different_points_of_the_data():
    points, _, _ = planted(4, 10)
    seeds = spherical_kmeans(points, 20, rng(), iterations=0)
    found = [(points == seed).all(1).nonzero()[:, 0].tolist() for seed in seeds]
    assert all(len(places) == 1 for places in found)
    assert len({places[0] for places in found}) == 20


def test_planted_clusters_are_recovered_and_as_tight_as_scikit_learn_finds_them():
    points, truth, centres = planted(6, 40, d=16)
    v = spherical_kmeans(points, 6, rng(1))
    owner = (points @ v.T).argmax(1)
    assert adjusted_rand_score(truth.tolist(), owner.tolist()) == 1.0
    assert float((v @ centres.T).max(0).values.min()) > 0.98
    reference = KMeans(6, n_init=10, random_state=0).fit(points.double().numpy())
    assert adjusted_rand_score(reference.labels_, owner.tolist()) == 1.0
    cosine_of_theirs = torch.from_numpy(reference.cluster_centers_).float()[torch.from_numpy(reference.labels_).long()]
    ours, theirs = (points * v[owner]).sum(), (points * unit(cosine_of_theirs)).sum()
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_of_several_starts_the_tightest_is_taken(seed):
    points = unit(torch.randn(60, 5, generator=rng(seed)))

    def tightness(v: torch.Tensor) -> float:
        return float((points @ v.T).amax(1).double().sum())

    one_stream = rng(seed)
    each = [tightness(spherical_kmeans(points, 8, one_stream)) for _ in range(6)]
    assert tightness(spherical_kmeans(points, 8, rng(seed), starts=6)) == max(each) > min(each)


def test_every_prototype_is_a_unit_vector():
    points, _, _ = planted(3, 30)
    v = spherical_kmeans(points, 12, rng())
    torch.testing.assert_close(v.norm(dim=1), torch.ones(12))


def test_points_that_are_not_finite_or_zero_are_left_out():
    points, _, _ = planted(3, 20)
    broken = torch.cat([points, torch.full((2, 8), torch.nan), torch.full((1, 8), torch.inf), torch.zeros(3, 8)])
    assert torch.equal(spherical_kmeans(broken, 4, rng()), spherical_kmeans(points, 4, rng()))


@pytest.mark.parametrize("n", [0, 1, 3])
def test_with_fewer_points_than_prototypes_the_rest_are_random_directions(n):
    points = unit(torch.randn(n, 8, generator=rng(5)))
    v = spherical_kmeans(points, 6, rng())
    torch.testing.assert_close(v.norm(dim=1), torch.ones(6))
    assert all(float((v - point).norm(dim=1).min()) < 1e-6 for point in points)
    distances = torch.cdist(v, v)[~torch.eye(6, dtype=torch.bool)]
    assert float(distances.min()) > 0.1
    assert not torch.equal(v, spherical_kmeans(points, 6, rng(1)))


def test_equal_points_give_one_seed_and_not_the_same_one_again():
    point = unit(torch.ones(1, 8))
    v = spherical_kmeans(point.expand(50, -1), 3, rng())
    assert (v == point).all(1).sum() == 1
    assert float(torch.cdist(v, v)[~torch.eye(3, dtype=torch.bool)].min()) > 0.1


def test_the_same_stream_gives_the_same_prototypes():
    points, _, _ = planted(4, 10)
    assert torch.equal(spherical_kmeans(points, 5, rng(3)), spherical_kmeans(points, 5, rng(3)))


def test_no_prototypes_at_all_is_one_clear_line():
    with pytest.raises(ConfigError, match=r"^a library needs at least one prototype, got 0$"):
        spherical_kmeans(torch.ones(3, 8), 0, rng())
