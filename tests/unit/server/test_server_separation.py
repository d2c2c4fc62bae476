"""Separation really holds afterwards; the printed pass is shown to fail where it does."""

import pytest
import torch
from torch import Generator, Tensor

from protofed.client.codec import unit
from protofed.errors import ConfigError
from protofed.server.separation import enforce_separation, literal_separation, smallest_distance


def rng(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def cap(n: int, d: int, spread: float, seed: int = 0) -> Tensor:
    """Unit vectors crowded around one of them."""
    return unit(torch.randn(1, d, generator=rng(seed)) + spread * torch.randn(n, d, generator=rng(seed + 1)))


def test_the_smallest_distance_is_that_of_the_closest_pair():
    v = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 3.0]])
    assert float(smallest_distance(v)) == 1
    assert float(smallest_distance(v[:1])) == float("inf")


@pytest.mark.parametrize(
    ("v", "margin"),
    [
        (cap(128, 64, 0.05), 0.5),
        (cap(16, 64, 0.0), 0.5),
        (cap(128, 64, 0.0), 0.5),
        (cap(12, 2, 0.3), 0.5),  # twelve on a circle have at most 0.518
        (cap(40, 3, 0.0), 0.5),
        (cap(6, 3, 0.1), 1.4),  # nearly an octahedron
        (torch.cat([cap(8, 6, 2.0)] * 2), 0.5),
        (torch.zeros(3, 5), 0.5),
    ],
    ids=["crowd", "16 equal", "128 equal", "circle", "sphere", "octahedron", "pairs", "zeros"],
)
def test_separation_holds_afterwards_on_the_sphere(v, margin):
    apart = enforce_separation(v, margin, rng())
    assert smallest_distance(apart) >= margin - 1e-3
    torch.testing.assert_close(apart.norm(dim=-1), torch.ones(len(v)), atol=1e-6, rtol=0)


def test_prototypes_that_are_apart_stay_where_they_are():
    v = unit(torch.randn(128, 64, generator=rng()))
    torch.testing.assert_close(enforce_separation(v, 0.5, rng()), v, atol=1e-6, rtol=0)


def test_two_close_prototypes_part_symmetrically_and_a_third_does_not_move():
    v = unit(torch.tensor([[1.0, 0.1, 0.0], [1.0, -0.1, 0.0], [0.0, 0.0, 1.0]]))
    apart = enforce_separation(v, 0.5, rng())
    torch.testing.assert_close(apart[0] * torch.tensor([1.0, -1.0, 1.0]), apart[1], atol=1e-6, rtol=0)
    torch.testing.assert_close(apart[2], v[2])
    assert 0.499 <= float((apart[0] - apart[1]).norm()) < 0.52


def test_the_order_of_prototypes_is_irrelevant():
    v, order = cap(32, 16, 0.1), torch.randperm(32, generator=rng(9))
    torch.testing.assert_close(
        enforce_separation(v[order], 0.5, rng(1)), enforce_separation(v, 0.5, rng(2))[order], atol=1e-5, rtol=0
    )


def test_a_crowd_spreads_but_is_not_thrown_across_the_sphere():
    v = cap(128, 64, 0.05)
    moved = (enforce_separation(v, 0.5, rng()) - v).norm(dim=-1)
    assert moved.max() < 0.42  # from one spot, 0.5 / sqrt(2) = 0.35 is the least that parts so many


@pytest.mark.parametrize(("n", "d", "margin"), [(128, 64, 1.5), (3, 8, 1.74), (2, 8, 2.1)])
def test_a_margin_that_no_arrangement_has_is_refused(n, d, margin):
    with pytest.raises(ConfigError, match=f"for {n} prototypes in {d} dimensions, got {margin}"):
        enforce_separation(unit(torch.randn(n, d, generator=rng())), margin, rng())


def test_one_prototype_has_nothing_to_be_separated_from():
    v = unit(torch.randn(1, 8, generator=rng()))
    torch.testing.assert_close(enforce_separation(v, 0.5, rng()), v)


def test_the_printed_pass_is_the_algorithm_written_out_for_two():
    v = torch.tensor([[0.1, 0.0], [-0.1, 0.0]])
    torch.testing.assert_close(literal_separation(v, 0.5), torch.tensor([[0.25, 0.0], [-0.25, 0.0]]))


def test_identical_prototypes_stay_identical_under_the_printed_pass():
    v = cap(16, 64, 0.0)
    assert torch.equal(literal_separation(v, 0.5), v)


def test_the_printed_pass_leaves_violations_and_leaves_the_sphere():
    after = literal_separation(cap(64, 64, 0.05), 0.5)
    assert smallest_distance(after) < 0.49
    assert after.norm(dim=-1).max() > 1.05


def test_the_printed_pass_depends_on_the_order():
    v, order = cap(32, 16, 0.1), torch.arange(31, -1, -1)
    assert (literal_separation(v[order], 0.5) - literal_separation(v, 0.5)[order]).abs().max() > 0.01
