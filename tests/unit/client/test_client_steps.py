"""Steps against closed forms, torch.optim.AdamW and each client alone; broken clients stay where they are."""

import pytest
import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from protofed.client.alignment import alignment_loss
from protofed.client.codec import random_linear_codec, unit
from protofed.client.drift import drift_gate, fit_gate
from protofed.client.prompts import PromptState, compose, mixture
from protofed.client.router import route
from protofed.client.steps import (
    adamw_start,
    adamw_step,
    clip_gradient,
    gradient,
    group_soft_threshold,
    long_term_prox,
    long_term_step,
    relative_lambda,
    short_term_step,
    soft_threshold,
    sparsity,
)

NAN = float("nan")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed))


def stack(n: int = 6, scale: float = 1.0) -> PromptState:
    return PromptState(scale * drawn(n, 3, 4, seed=1), scale * drawn(n, 3, 4, seed=2))


def test_a_hand_computed_soft_threshold():
    x = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0])
    assert soft_threshold(x, 1.0).tolist() == [-2, 0, 0, 0, 0, 0, 2]


def test_a_hand_computed_group_threshold():
    x = torch.tensor([[[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]]])
    torch.testing.assert_close(group_soft_threshold(x, 1.0), torch.tensor([[[2.4, 3.2], [0.0, 0.0], [0.0, 0.0]]]))


def test_the_short_step_is_the_equation_written_out():
    state, grad = stack(), drawn(6, 3, 4, seed=3)
    after, moved = short_term_step(state, grad, eta_s=0.5, lambda_p=0.4)
    for index in torch.cartesian_prod(torch.arange(6), torch.arange(3), torch.arange(4)).tolist():
        u, i, j = index
        z = float(state.short[u, i, j] - 0.5 * grad[u, i, j])
        expected = (1 if z > 0 else -1) * max(abs(z) - 0.5 * 0.4, 0)
        assert float(after.short[u, i, j]) == pytest.approx(expected, abs=1e-6)
    assert torch.equal(after.long, state.long)
    assert moved.all()


def test_a_relative_threshold_of_one_silences_half_of_a_fresh_prompt():
    state = PromptState(torch.zeros(5, 8, 64), torch.zeros(5, 8, 64))
    grad = drawn(5, 8, 64) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e6])[:, None, None]
    for ratio, least, most in ((0.5, 0.2, 0.35), (1.0, 0.49, 0.51), (2.0, 0.75, 0.9)):
        after, _ = short_term_step(state, grad, eta_s=5e-3, lambda_p=relative_lambda(grad, ratio))
        assert ((sparsity(after.short) > least) & (sparsity(after.short) < most)).all()


def test_the_printed_threshold_leaves_nearly_every_coordinate_alive():
    short = 0.02 * drawn(20, 8, 64, seed=1)
    grad = drawn(20, 8, 64)
    grad = grad / grad.flatten(1).norm(dim=-1)[:, None, None]
    for lambda_p in (1e-4, 1e-3):
        after, _ = short_term_step(PromptState(short, short), grad, eta_s=5e-3, lambda_p=lambda_p)
        assert sparsity(after.short).max() < 0.05


def test_the_printed_threshold_freezes_a_fresh_prompt_whose_gradients_are_small():
    zero = torch.zeros(2, 8, 64)
    after, _ = short_term_step(PromptState(zero, zero), 1e-4 * drawn(2, 8, 64).sign(), eta_s=5e-3, lambda_p=1e-3)
    assert sparsity(after.short).tolist() == [1, 1]


def test_whole_tokens_are_dropped_together():
    state = PromptState(torch.zeros(4, 8, 64), torch.zeros(4, 8, 64))
    grad = drawn(4, 8, 64) * torch.linspace(0.1, 1, 8)[:, None]
    lambda_p = relative_lambda(grad, 1.0, by_row=True)
    after, _ = short_term_step(state, grad, eta_s=0.1, lambda_p=lambda_p, by_row=True)
    zero = after.short == 0
    assert torch.equal(zero.all(-1), zero.any(-1))
    assert zero.all(-1).sum(-1).tolist() == [4, 4, 4, 4]


def test_each_client_has_its_own_median():
    grad = torch.tensor([[[1.0, -2.0, 3.0]], [[10.0, 20.0, -30.0]]])
    assert relative_lambda(grad, 0.5).tolist() == [1.0, 10.0]
    assert relative_lambda(torch.tensor([[[3.0, 4.0]]]), 1.0, by_row=True).tolist() == [5.0]


def test_a_clipped_gradient_keeps_its_direction_and_a_short_one_is_left_alone():
    grad = torch.tensor([[[3.0, 4.0]], [[0.3, 0.4]]])
    torch.testing.assert_close(clip_gradient(grad, 1.0), torch.tensor([[[0.6, 0.8]], [[0.3, 0.4]]]))


def test_the_long_step_is_a_gradient_step():
    state, grad = stack(), drawn(6, 3, 4, seed=3)
    after, moved = long_term_step(state, grad, eta_l=0.1)
    assert torch.equal(after.long, state.long - 0.1 * grad)
    assert torch.equal(after.short, state.short)
    assert moved.all()


def tether(centre: Tensor):
    return lambda p: (p - centre).square().sum((1, 2)) / 2


def test_the_proximal_step_minimises_its_objective():
    """With A = ||p - c||^2 / 2 the minimiser is (p0 - eta G + eta lambda c) / (1 + eta lambda)."""
    state, grad, centre = stack(), drawn(6, 3, 4, seed=3), drawn(6, 3, 4, seed=4)
    lambda_s = torch.linspace(0.1, 1, 6)
    after, _ = long_term_prox(state, grad, tether(centre), eta_l=0.3, lambda_s=lambda_s, inner_prox_steps=40)
    pull = (0.3 * lambda_s)[:, None, None]
    torch.testing.assert_close(after.long, (state.long - 0.3 * grad + pull * centre) / (1 + pull), atol=1e-6, rtol=0)


def test_five_repetitions_solve_the_alignment_step_of_a_codec():
    codec, v = random_linear_codec(3, 4, Generator().manual_seed(0), d_z=6), unit(drawn(5, 6))
    state, grad, lambda_s = stack(), drawn(6, 3, 4, seed=3), torch.ones(6)

    def alignment(p: Tensor) -> Tensor:
        return alignment_loss(codec.encode(p), v)

    after, _ = long_term_prox(state, grad, alignment, eta_l=1e-2, lambda_s=lambda_s)
    residual = grad + (after.long - state.long) / 1e-2 + gradient(alignment, after.long)
    assert residual.abs().max() < 1e-3 * grad.abs().max()


def test_one_repetition_is_algorithm_one():
    state, grad, centre = stack(), drawn(6, 3, 4, seed=3), drawn(6, 3, 4, seed=4)
    lambda_s = torch.linspace(0.1, 1, 6)
    prox, _ = long_term_prox(state, grad, tether(centre), eta_l=0.3, lambda_s=lambda_s, inner_prox_steps=1)
    whole = grad + lambda_s[:, None, None] * (state.long - centre)
    torch.testing.assert_close(prox.long, long_term_step(state, whole, eta_l=0.3)[0].long)


def test_stacked_adamw_is_torch_adamw_client_by_client():
    prompts = drawn(5, 3, 4)
    stacked, state = prompts, adamw_start(prompts)
    alone = [torch.nn.Parameter(p.clone()) for p in prompts]
    optimisers = [torch.optim.AdamW([p], lr=0.01, weight_decay=0.1) for p in alone]
    for step in range(30):
        grad = drawn(5, 3, 4, seed=10 + step)
        active = torch.arange(5) < 5 - step // 10  # clients run out of steps one after the other
        stacked, state, moved = adamw_step(stacked, grad, state, lr=0.01, weight_decay=0.1, active=active)
        for u in range(5):
            if active[u]:
                alone[u].grad = grad[u].clone()
                optimisers[u].step()
        assert torch.equal(moved, active)
    torch.testing.assert_close(stacked, torch.stack([p.detach() for p in alone]), atol=1e-6, rtol=0)
    assert state.steps.tolist() == [30, 30, 30, 20, 10]


@pytest.mark.parametrize("poison", [NAN, float("inf"), -float("inf")])
def test_a_client_with_a_gradient_that_is_not_finite_stays_and_is_named(poison):
    state, grad = stack(), drawn(6, 3, 4, seed=3)
    broken = grad.clone()
    broken[2, 0, 1] = poison
    moments = adamw_start(state.long)
    others = torch.tensor([0, 1, 3, 4, 5])
    fine = {
        "short": lambda g: short_term_step(state, g, eta_s=0.1, lambda_p=relative_lambda(g, 1.0)),
        "long": lambda g: long_term_step(state, g, eta_l=0.1),
        "prox": lambda g: long_term_prox(state, g, tether(state.short), eta_l=0.1, lambda_s=torch.ones(6)),
    }
    for step in fine.values():
        (clean, _), (after, moved) = step(grad), step(broken)
        assert moved.tolist() == [True, True, False, True, True, True]
        for name in ("long", "short"):
            assert torch.equal(getattr(after, name)[2], getattr(state, name)[2])
            assert torch.equal(getattr(after, name)[others], getattr(clean, name)[others])
    new, after, moved = adamw_step(state.long, broken, moments, lr=0.1)
    assert torch.equal(new[2], state.long[2])
    assert after.steps.tolist() == [1, 1, 0, 1, 1, 1]
    assert after.first.isfinite().all()
    assert not moved[2]


def test_a_step_that_overflows_is_not_taken():
    state = stack(2)
    grad = torch.ones(2, 3, 4)
    grad[0] = 3e38
    after, moved = long_term_step(state, grad, eta_l=1e3)
    assert moved.tolist() == [False, True]
    assert torch.equal(after.long[0], state.long[0])


def test_a_gradient_whose_square_overflows_does_not_spoil_the_moments():
    prompts, grad = drawn(2, 3, 4), torch.ones(2, 3, 4)
    grad[0] = 1e30
    new, state, moved = adamw_step(prompts, grad, adamw_start(prompts), lr=0.1)
    assert moved.tolist() == [False, True]
    assert torch.equal(new[0], prompts[0])
    assert not state.second[0].any()


def test_a_stack_steps_as_each_client_alone_to_the_bit():
    state, grad = stack(), drawn(6, 3, 4, seed=3)
    short, _ = short_term_step(state, grad, eta_s=0.1, lambda_p=relative_lambda(grad, 1.0))
    long, _ = long_term_step(state, grad, eta_l=0.1)
    adam, _, _ = adamw_step(state.long, grad, adamw_start(state.long), lr=0.1)
    for u in range(6):
        one, g = PromptState(state.long[u : u + 1], state.short[u : u + 1]), grad[u : u + 1]
        alone, _ = short_term_step(one, g, eta_s=0.1, lambda_p=relative_lambda(g, 1.0))
        assert torch.equal(alone.short[0], short.short[u])
        assert torch.equal(long_term_step(one, g, eta_l=0.1)[0].long[0], long.long[u])
        assert torch.equal(adamw_step(one.long, g, adamw_start(one.long), lr=0.1)[0][0], adam[u])


class Counting(TorchDispatchMode):
    """Counts the tensor operations that are dispatched."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def local_step(n: int) -> int:
    """Routes, composes, aligns and steps n clients; how many tensor operations it took."""
    codec, v = random_linear_codec(3, 4, Generator().manual_seed(0), d_z=6), unit(drawn(5, 6))
    state, queries, drift = stack(n), unit(drawn(n, 6, seed=5)), drawn(n, seed=6).abs()
    gate, moments = fit_gate(drawn(50).abs()), adamw_start(state.long)
    with Counting() as count:
        chosen, weights = route(queries, v, top_m=4, temperature=0.07)
        routed = mixture(codec.decode(v), chosen, weights)

        def loss(p: Tensor) -> Tensor:
            prompt = compose(PromptState(p, state.short), drift_gate(drift, gate), routed, norm=torch.tensor(1.0))
            return prompt.square().sum((1, 2)) + alignment_loss(codec.encode(p), v)

        grad = gradient(loss, state.long)
        short_term_step(state, grad, eta_s=0.1, lambda_p=relative_lambda(grad, 1.0))
        adamw_step(state.long, grad, moments, lr=1e-3)
    return count.calls


def test_eight_clients_take_as_many_tensor_operations_as_sixty_four():
    assert local_step(8) == local_step(64) > 50
