"""The barycenter in cases with a known answer and against POT."""

import pytest
import torch
from torch import Generator, Tensor

from protofed.server.barycenter import representative, wasserstein_barycenter


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed), dtype=torch.float64)


def one_cluster(points: Tensor, support: Tensor, **settings: float | int) -> Tensor:
    return wasserstein_barycenter(points, torch.zeros(len(points), dtype=torch.long), support[None], **settings)[0]


def test_with_one_support_point_the_barycenter_is_the_mean_of_all_points():
    points = drawn(4, 3, 5)
    torch.testing.assert_close(one_cluster(points, drawn(1, 5, seed=1)), points.mean((0, 1))[None])


def test_the_barycenter_of_shifted_copies_is_the_middle_copy():
    shape = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    shifts = torch.tensor([[0.0, 1.0], [0.0, -1.0], [0.6, 0.0]], dtype=torch.float64)
    points = shape + shifts[:, None]
    found = one_cluster(points, shape + 0.1, epsilon=0.05, sinkhorn_iterations=300)
    torch.testing.assert_close(found, shape + shifts.mean(0), atol=1e-6, rtol=0)


def test_sorted_midpoints_are_the_barycenter_on_a_line():
    a, b = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([2.0, 7.0, 9.0])
    points = torch.stack([a[[2, 0, 1]], b[[1, 2, 0]]])[..., None].double()
    found = one_cluster(points, torch.tensor([[0.0], [3.0], [6.0]]).double(), epsilon=0.1, sinkhorn_iterations=500)
    torch.testing.assert_close(found[:, 0].sort().values, ((a + b) / 2).double(), atol=5e-3, rtol=0)


@pytest.mark.slow
def test_the_barycenter_is_the_one_of_pot():
    ot = pytest.importorskip("ot", reason="POT is not installed")
    points, start = drawn(3, 6, 2), drawn(4, 2, seed=1)
    found = one_cluster(points, start, epsilon=0.5, iterations=60, sinkhorn_iterations=500)
    equal = [torch.full((6,), 1 / 6, dtype=torch.float64).numpy()] * 3
    oracle = ot.bregman.free_support_sinkhorn_barycenter(
        [p.numpy() for p in points], equal, start.numpy(), reg=0.5, numItermax=60, numInnerItermax=5000, stopThr=1e-9
    )
    torch.testing.assert_close(found, torch.from_numpy(oracle), atol=1e-4, rtol=0)


def test_clusters_are_solved_together_as_each_alone_and_empty_ones_stay():
    points, support = drawn(9, 4, 3), drawn(4, 2, 3, seed=1)
    assigned = torch.tensor([0, 0, 1, 3, 3, 3, 1, 0, 3])
    together = wasserstein_barycenter(points, assigned, support)
    for k in (0, 1, 3):
        torch.testing.assert_close(together[k], one_cluster(points[assigned == k], support[k]), atol=1e-9, rtol=0)
    assert torch.equal(together[2], support[2])


def test_a_client_that_is_not_finite_is_left_out():
    points, support = drawn(4, 3, 2), drawn(2, 2, seed=1)
    broken = points.clone()
    broken[1, 0, 0] = float("inf")
    torch.testing.assert_close(one_cluster(broken, support), one_cluster(points[[0, 2, 3]], support))


def test_the_mean_of_a_barycenter_is_the_mean_of_the_clients_means():
    points = drawn(5, 4, 3)
    found = one_cluster(points, drawn(6, 3, seed=1), epsilon=0.3, sinkhorn_iterations=500)
    torch.testing.assert_close(representative(found[None])[0], points.mean((0, 1)), atol=1e-4, rtol=0)
