"""The geometric median against scipy's minimiser, on points where Weiszfeld stumbles, and with outliers."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Generator, Tensor

from protofed.server.geometric_median import geometric_median, objective, weiszfeld_step


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed), dtype=torch.float64)


def alone(points: Tensor) -> Tensor:
    return geometric_median(points, torch.zeros(len(points), dtype=torch.long), torch.zeros_like(points[:1]))[0]


def best_sum(points: np.ndarray) -> float:
    """The least sum of distances that scipy finds, from the mean and from every point."""
    tries = [
        minimize(
            lambda c: np.linalg.norm(points - c, axis=1).sum(), start, method="Nelder-Mead", options={"xatol": 1e-9}
        )
        for start in (points.mean(0), np.median(points, 0))
    ]
    return float(min(min(t.fun for t in tries), *(np.linalg.norm(points - p, axis=1).sum() for p in points)))


@pytest.mark.parametrize("seed", range(8))
def test_no_other_point_has_a_smaller_sum_of_distances(seed):
    points = drawn(3 + 4 * seed, 3, seed=seed)
    found = float((points - alone(points)).norm(dim=-1).sum())
    assert found <= best_sum(points.numpy()) * (1 + 1e-6)


def test_an_equilateral_triangle_has_its_centre():
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 3**0.5 / 2]], dtype=torch.float64)
    torch.testing.assert_close(alone(points), points.mean(0))


def test_a_wide_triangle_has_its_obtuse_corner():
    corner = torch.tensor([0.0, 0.1], dtype=torch.float64)
    points = torch.stack([torch.tensor([-1.0, 0.0]).double(), torch.tensor([1.0, 0.0]).double(), corner])
    torch.testing.assert_close(alone(points), corner, atol=1e-9, rtol=0)


def test_an_upload_in_the_starting_point_does_not_hold_the_iteration():
    """The mean of the five is the first of them, where plain Weiszfeld divides by zero; the median is elsewhere."""
    others = torch.tensor([[-4.0, 0.0], [1.0, 0.1], [1.0, 0.1], [2.0, -0.2]], dtype=torch.float64)
    points = torch.cat([others.mean(0, keepdim=True), others])
    assert float((points - alone(points)).norm(dim=-1).sum()) <= best_sum(points.numpy()) * (1 + 1e-6)
    assert (alone(points) - points[0]).norm() > 0.1


def test_a_corner_of_120_degrees_is_the_median_though_the_iteration_only_creeps_there():
    points = torch.tensor([[0.0, 0.0], [0.5, 3**0.5 / 2], [0.5, -(3**0.5) / 2]], dtype=torch.float64)
    torch.testing.assert_close(alone(points), torch.zeros(2).double(), atol=1e-9, rtol=0)


def test_an_upload_that_is_the_median_is_a_fixed_point_of_the_step():
    points = torch.tensor([[0.0, 0.0], [-3.0, 0.0], [1.0, 0.4], [2.0, -0.4]], dtype=torch.float64)
    zero = torch.zeros(4, dtype=torch.long)
    assert torch.equal(weiszfeld_step(points, zero, points[:1]), points[:1])


def test_a_hand_computed_step_away_from_an_upload():
    points = torch.tensor([[0.0], [1.0], [1.0], [2.0]], dtype=torch.float64)
    after = weiszfeld_step(points, torch.zeros(4, dtype=torch.long), torch.zeros(1, 1).double())
    mean = (1 + 1 + 2 / 2) / (1 + 1 + 1 / 2)  # Weiszfeld's mean of the others
    assert float(after) == pytest.approx((1 - 1 / 3) * mean)  # |R| = 3, one upload stays


def test_a_point_that_is_most_of_the_uploads_is_the_median():
    points = torch.cat([torch.ones(5, 3).double(), drawn(4, 3)])
    torch.testing.assert_close(alone(points), torch.ones(3).double())


@pytest.mark.parametrize("n", [1, 2])
def test_one_or_two_uploads(n):
    points = drawn(n, 3)
    assert float((points - alone(points)).norm(dim=-1).sum()) == pytest.approx(
        float((points - points.mean(0)).norm(dim=-1).sum()), abs=1e-9
    )


def test_a_few_wild_uploads_do_not_carry_the_centre_away():
    honest, wild = 0.1 * drawn(20, 4), 1000 + drawn(6, 4, seed=1)
    points = torch.cat([honest, wild])
    assert alone(points).norm() < 0.3
    assert points.mean(0).norm() > 100


def test_clusters_are_solved_together_as_each_alone():
    z, assigned = drawn(60, 5), torch.randint(6, (60,), generator=Generator().manual_seed(1))
    together = geometric_median(z, assigned, torch.zeros(6, 5).double())
    for k in range(6):
        torch.testing.assert_close(together[k], alone(z[assigned == k]), atol=1e-9, rtol=0)


def test_empty_clusters_keep_their_prototype_and_broken_uploads_are_left_out():
    z, v = drawn(5, 3).float(), drawn(4, 3, seed=1).float()
    broken = torch.cat([z, torch.full((1, 3), float("nan"))])
    after = geometric_median(broken, torch.tensor([0, 0, 0, 2, 2, 2]), v)
    assert torch.equal(after[[1, 3]], v[[1, 3]])
    torch.testing.assert_close(after, geometric_median(z, torch.tensor([0, 0, 0, 2, 2]), v))
    nobody = geometric_median(broken[5:], torch.tensor([1]), v)
    assert torch.equal(nobody, v)


def test_the_objective_is_the_sum_of_distances_in_each_cluster():
    z = torch.tensor([[3.0, 4.0], [0.0, 1.0], [6.0, 8.0]])
    assert objective(z, torch.tensor([0, 1, 0]), torch.zeros(2, 2)).tolist() == [15, 1]
