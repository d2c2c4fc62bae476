"""Alignment against its definition, autograd, exact assignment and POT."""

import math

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Generator, Tensor

from protofed.client.alignment import (
    DIVERGENCES,
    alignment_loss,
    info_nce,
    relative_entropy,
    sinkhorn_plan,
    squared_euclidean,
    wasserstein_alignment,
)
from protofed.client.codec import unit
from protofed.errors import ConfigError


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed), dtype=torch.float64)


def bregman(psi, x: Tensor, y: Tensor) -> float:
    """D(x || y) = psi(x) - psi(y) - <grad psi(y), x - y>, the gradient by autograd."""
    y = y.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(psi(y), y)
    return float((psi(x) - psi(y) - slope @ (x - y)).detach())


def half_square(x: Tensor) -> Tensor:
    return x.square().sum() / 2


def negative_entropy(x: Tensor) -> Tensor:
    return (x * x.log()).sum()


def test_the_euclidean_divergence_is_the_bregman_divergence_of_half_the_square():
    z, v = drawn(4, 6), drawn(5, 6, seed=1)
    slow = [[bregman(half_square, a, b) for b in v] for a in z]
    torch.testing.assert_close(squared_euclidean(z, v), torch.tensor(slow, dtype=torch.float64))


def test_on_the_sphere_it_is_one_minus_cosine():
    z, v = unit(drawn(4, 6)), unit(drawn(5, 6, seed=1))
    torch.testing.assert_close(squared_euclidean(z, v), 1 - z @ v.T)


def test_the_entropic_divergence_is_the_bregman_divergence_of_negative_entropy_between_softmaxes():
    z, v = unit(drawn(4, 6)), unit(drawn(5, 6, seed=1))
    x, y = (math.sqrt(6) * z).softmax(-1), (math.sqrt(6) * v).softmax(-1)
    slow = [[bregman(negative_entropy, a, b) for b in y] for a in x]
    torch.testing.assert_close(relative_entropy(z, v), torch.tensor(slow, dtype=torch.float64))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_is_zero_at_itself_and_positive_elsewhere(name):
    z = unit(drawn(6, 5))
    gap = DIVERGENCES[name](z, z)
    assert gap.diagonal().abs().max() < 1e-12
    assert gap[~torch.eye(6, dtype=torch.bool)].min() > 1e-3


def test_the_loss_is_the_sum_written_out():
    z, v, gamma, tau_a = unit(drawn(4, 6)), unit(drawn(5, 6, seed=1)), 0.5, 0.1
    loss = alignment_loss(z, v, gamma=gamma, tau_a=tau_a)
    for u in range(4):
        gaps = [float((z[u] - v[k]).square().sum()) / 2 for k in range(5)]
        k = gaps.index(min(gaps))
        chances = [math.exp(float(z[u] @ v[j]) / tau_a) for j in range(5)]
        assert float(loss[u]) == pytest.approx(gaps[k] - gamma * math.log(chances[k] / sum(chances)))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_gradient_is_that_of_the_nearest_prototype_alone(name):
    z, v = unit(drawn(4, 6)).requires_grad_(True), unit(drawn(5, 6, seed=1))
    assert torch.autograd.gradcheck(lambda x: alignment_loss(x, v, divergence=DIVERGENCES[name]), z)


def test_a_step_down_the_gradient_brings_a_vector_nearer_to_its_prototype():
    z, v = unit(drawn(8, 6)).requires_grad_(True), unit(drawn(5, 6, seed=1))
    (slope,) = torch.autograd.grad(alignment_loss(z, v).sum(), z)
    before, after = squared_euclidean(z, v), squared_euclidean(unit(z - 0.01 * slope), v)
    assert (after.min(-1).values < before.min(-1).values).all()


def test_one_prototype_leaves_only_the_pull():
    z, v = unit(drawn(4, 6)), unit(drawn(1, 6, seed=1))
    torch.testing.assert_close(alignment_loss(z, v, gamma=7.0), squared_euclidean(z, v)[:, 0])


@pytest.mark.parametrize("tau_a", [0.0, -1.0])
def test_an_alignment_temperature_that_is_not_positive_is_refused(tau_a):
    with pytest.raises(ConfigError, match="tau_a must be greater than 0"):
        info_nce(drawn(1, 3), drawn(2, 3), torch.tensor([0]), tau_a=tau_a)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_stack_is_aligned_as_each_client_alone(name):
    z, v = unit(drawn(7, 6)).float(), unit(drawn(5, 6, seed=1)).float()
    together = alignment_loss(z, v, divergence=DIVERGENCES[name])
    alone = torch.cat([alignment_loss(one[None], v, divergence=DIVERGENCES[name]) for one in z])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-6)


def test_plans_have_their_marginals_and_points_without_mass_send_nothing():
    a = torch.tensor([[0.5, 0.3, 0.2, 0.0]], dtype=torch.float64)
    b = torch.tensor([[0.6, 0.4]], dtype=torch.float64)
    plan = sinkhorn_plan(drawn(1, 4, 2).abs(), a, b, epsilon=0.1, iterations=300)
    torch.testing.assert_close(plan.sum(2), a, atol=1e-9, rtol=0)
    torch.testing.assert_close(plan.sum(1), b, atol=1e-9, rtol=0)


def test_the_transport_cost_of_one_point_is_its_mean_squared_distance_to_the_prototypes():
    x, v = unit(drawn(3, 1, 6)), unit(drawn(5, 6, seed=1))
    cost = wasserstein_alignment(x, v, mass=torch.ones(3, 1, dtype=torch.float64))
    torch.testing.assert_close(cost, (x - v).square().sum(-1).mean(-1))


def test_with_little_entropy_the_cost_is_that_of_the_best_assignment():
    x, v = unit(drawn(3, 5, 6)), unit(drawn(5, 6, seed=1))
    mass = torch.ones(3, 5, dtype=torch.float64)
    cost = wasserstein_alignment(x, v, mass=mass, epsilon=0.003, iterations=3000)
    for u in range(3):
        table = (x[u][:, None] - v).square().sum(-1).numpy()
        assert float(cost[u]) == pytest.approx(table[linear_sum_assignment(table)].sum() / 5, abs=2e-3)


def test_the_plan_is_the_one_of_pot():
    ot = pytest.importorskip("ot", reason="POT is not installed")
    x, v = unit(drawn(4, 6)), unit(drawn(5, 6, seed=1))
    a, b = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), torch.full((5,), 0.2, dtype=torch.float64)
    cost = (x[:, None] - v).square().sum(-1)
    plan = sinkhorn_plan(cost[None], a[None], b[None], epsilon=0.05, iterations=500)[0]
    oracle = ot.sinkhorn(a.numpy(), b.numpy(), cost.numpy(), reg=0.05, numItermax=5000, stopThr=1e-12)
    torch.testing.assert_close(plan, torch.from_numpy(oracle), atol=1e-7, rtol=0)


def test_the_gradient_is_that_of_the_regularised_cost():
    """<P, C> + eps * KL(P || a b^T) at its minimum, by finite differences."""
    x, v = unit(drawn(1, 3, 4)), unit(drawn(5, 4, seed=1))
    mass, eps = torch.ones(1, 3, dtype=torch.float64), 0.1

    def regularised(points: Tensor) -> float:
        cost = (points[:, :, None] - v).square().sum(-1)
        a, b = mass / 3, torch.full((1, 5), 0.2, dtype=torch.float64)
        plan = sinkhorn_plan(cost, a, b, epsilon=eps, iterations=500)
        return float((plan * cost).sum() + eps * (plan * (plan / (a[..., None] * b[:, None])).log()).sum())

    at = x.clone().requires_grad_(True)
    cost = wasserstein_alignment(at, v, mass=mass, epsilon=eps, iterations=500).sum()
    (slope,) = torch.autograd.grad(cost, at)
    for i in range(3):
        for j in range(4):
            step = torch.zeros_like(x)
            step[0, i, j] = 1e-5
            assert float(slope[0, i, j]) == pytest.approx(
                (regularised(x + step) - regularised(x - step)) / 2e-5, abs=1e-6
            )


def test_absent_points_do_not_count_and_a_client_without_points_costs_nothing():
    x, v = unit(drawn(2, 4, 6)), unit(drawn(5, 6, seed=1))
    mass = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0] * 4], dtype=torch.float64)
    at = x.clone().requires_grad_(True)
    cost = wasserstein_alignment(at, v, mass=mass)
    alone = wasserstein_alignment(x[:1, :2], v, mass=mass[:1, :2])
    torch.testing.assert_close(cost.detach(), torch.stack([alone[0], torch.zeros_like(alone[0])]))
    (slope,) = torch.autograd.grad(cost.sum(), at)
    assert slope.isfinite().all()
    assert not slope[0, 2:].any()
    assert not slope[1].any()


def test_weights_of_the_mixture_move_the_mass():
    x, v = unit(drawn(1, 1, 6)), unit(drawn(2, 6, seed=1))
    cost = wasserstein_alignment(
        x, v, mass=torch.ones(1, 1, dtype=torch.float64), mix_w=torch.tensor([3.0, 1.0]).double()
    )
    gaps = (x[0] - v).square().sum(-1)
    torch.testing.assert_close(cost[0], 0.75 * gaps[0] + 0.25 * gaps[1])


def test_an_epsilon_that_is_not_positive_is_refused():
    with pytest.raises(ConfigError, match="epsilon must be greater than 0, got 0"):
        sinkhorn_plan(
            drawn(1, 2, 2), torch.ones(1, 2).double() / 2, torch.ones(1, 2).double() / 2, epsilon=0.0, iterations=1
        )
