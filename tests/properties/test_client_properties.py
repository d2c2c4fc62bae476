"""What must hold of client and server steps for any prompts, any prototypes and any clients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Generator, Tensor

from protofed.client.alignment import alignment_loss, relative_entropy, squared_euclidean
from protofed.client.codec import random_linear_codec, unit
from protofed.client.drift import adaptive_stability, drift_gate, fit_gate
from protofed.client.prompts import PromptState, compose, mixture
from protofed.client.router import route
from protofed.client.steps import clip_gradient, group_soft_threshold, short_term_step, soft_threshold, sparsity
from protofed.server.geometric_median import geometric_median
from protofed.server.pruning import prune_or_reinit, update_usage
from protofed.server.separation import enforce_separation, smallest_distance

seeds = st.integers(0, 2**32 - 1)
quick = settings(deadline=None, max_examples=40)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed), dtype=dtype)


@quick
@given(seeds, st.integers(1, 9), st.integers(1, 12), st.integers(1, 6), st.floats(0.01, 5))
def test_routing_weights_are_positive_sorted_and_sum_to_one(seed, n, n_prototypes, top_m, temperature):
    keys = unit(drawn(seed + 1, n_prototypes, 8))
    chosen, weights = route(unit(drawn(seed, n, 8)), keys, top_m=top_m, temperature=temperature)
    assert chosen.shape == (n, min(top_m, n_prototypes))
    assert all(len(set(row)) == len(row) for row in chosen.tolist())
    assert (weights >= 0).all()
    assert (weights.diff(dim=-1) <= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(n))


@quick
@given(st.floats(-5, 5), st.floats(0, 3))
def test_the_soft_threshold_minimises_the_penalised_distance(x, threshold):
    shrunk = float(soft_threshold(torch.tensor([x], dtype=torch.float64), threshold)[0])
    grid = np.concatenate([np.linspace(-6, 6, 1201), [0.0, shrunk]])

    def penalised(y: float) -> float:
        return (y - x) ** 2 / 2 + threshold * abs(y)

    refined = minimize_scalar(penalised, bounds=(-6, 6), method="bounded").fun
    assert penalised(shrunk) <= min(min(map(penalised, grid)), refined) + 1e-9


@quick
@given(seeds, st.floats(0, 3))
def test_the_group_threshold_minimises_the_distance_with_lengths_penalised(seed, threshold):
    x = drawn(seed, 1, 1, 3, dtype=torch.float64)
    shrunk = group_soft_threshold(x, threshold)[0, 0]

    def penalised(y: Tensor) -> Tensor:
        return (y - x[0, 0]).square().sum(-1) / 2 + threshold * y.norm(dim=-1)

    around = torch.cat([shrunk + 0.3 * drawn(seed + 1, 2000, 3, dtype=torch.float64), torch.zeros(1, 3).double()])
    assert penalised(shrunk) <= penalised(around).min() + 1e-12


@quick
@given(seeds, st.floats(1e-3, 10), st.floats(1e-3, 10))
def test_a_larger_threshold_never_leaves_more_alive_nor_anything_longer(seed, one, other):
    x = drawn(seed, 2, 3, 4)
    little, much = (soft_threshold(x, t) for t in sorted((one, other)))
    assert (much.abs() <= little.abs()).all()
    assert (sparsity(much) >= sparsity(little)).all()
    assert ((little * x) >= 0).all()


@quick
@given(seeds, st.floats(1e-3, 10))
def test_clipping_never_lengthens_and_never_turns(seed, radius):
    grad = 3 * drawn(seed, 4, 2, 3)
    clipped = clip_gradient(grad, radius)
    length = clipped.flatten(1).norm(dim=-1)
    assert (length <= torch.minimum(grad.flatten(1).norm(dim=-1), torch.tensor(radius)) * (1 + 1e-5)).all()
    torch.testing.assert_close(unit(clipped.flatten(1)), unit(grad.flatten(1)), atol=1e-5, rtol=0)


@quick
@given(seeds, st.integers(1, 7), st.integers(1, 5))
def test_who_else_is_in_the_stack_is_irrelevant(seed, n, top_m):
    state = PromptState(drawn(seed, n, 2, 4), drawn(seed + 1, n, 2, 4))
    c, queries, v = drawn(seed + 2, 6, 2, 4), unit(drawn(seed + 3, n, 8)), unit(drawn(seed + 4, 6, 8))
    grad, gate, order = drawn(seed + 5, n, 2, 4), drawn(seed + 6, n), drawn(seed + 7, n).argsort()

    def step(rows: Tensor) -> tuple[Tensor, Tensor]:
        part = PromptState(state.long[rows], state.short[rows])
        routed = mixture(c, *route(queries[rows], v, top_m=top_m, temperature=0.07))
        after, _ = short_term_step(part, grad[rows], eta_s=0.1, lambda_p=0.5)
        return compose(after, gate[rows], routed), after.short

    everyone, alone = step(order), [step(u[None]) for u in order]
    torch.testing.assert_close(everyone[0], torch.cat([a[0] for a in alone]), atol=1e-6, rtol=1e-5)
    assert torch.equal(everyone[1], torch.cat([a[1] for a in alone]))


@quick
@given(seeds, st.integers(1, 6))
def test_divergences_are_never_negative_and_the_loss_is_no_less_than_the_least(seed, n_prototypes):
    z, v = unit(drawn(seed, 5, 8)), unit(drawn(seed + 1, n_prototypes, 8))
    for divergence in (squared_euclidean, relative_entropy):
        gaps = divergence(z, v)
        assert gaps.min() > -1e-6
        assert (alignment_loss(z, v, divergence=divergence) >= gaps.min(-1).values - 1e-6).all()


@quick
@given(seeds, st.integers(2, 16), st.integers(1, 4))
def test_a_linear_codec_gives_back_any_unit_vector(seed, d, prompt_length):
    d_z = min(8, d * prompt_length)
    codec = random_linear_codec(prompt_length, d, Generator().manual_seed(seed), d_z=d_z)
    v = unit(drawn(seed + 1, 5, d_z))
    torch.testing.assert_close(codec.encode(codec.decode(v)), v, atol=2e-6, rtol=0)


@quick
@given(seeds, st.integers(2, 50))
def test_more_drift_opens_the_gate_and_loosens_the_anchor(seed, n):
    drifts = drawn(seed, n).abs().sort().values
    alpha = drift_gate(drifts, fit_gate(drifts))
    stability = adaptive_stability(drifts, kappa=2.0)
    assert ((alpha >= 0) & (alpha <= 1)).all()
    assert (alpha.diff() >= 0).all()
    assert ((stability >= 0.1) & (stability <= 1)).all()
    assert (stability.diff() <= 0).all()


@quick
@given(seeds, st.integers(1, 40), st.integers(6, 32), st.floats(0, 1), st.floats(0.05, 0.6))
def test_separation_holds_afterwards(seed, n, d, crowding, margin):
    centre, noise = drawn(seed, 1, d), drawn(seed + 1, n, d)
    v = unit(centre + (crowding if crowding > 0.1 else 0.0) * noise)
    apart = enforce_separation(v, margin, Generator().manual_seed(seed))
    assert smallest_distance(apart) >= margin - 1e-3
    torch.testing.assert_close(apart.norm(dim=-1), torch.ones(n), atol=1e-5, rtol=0)


@quick
@given(seeds, st.integers(1, 40))
def test_pruning_keeps_the_size_the_sphere_and_the_total_use(seed, n):
    rng = Generator().manual_seed(seed)
    v, usage = unit(drawn(seed, n, 8)), update_usage(torch.zeros(n), torch.rand(n, generator=rng) ** 6)
    after = prune_or_reinit(v, usage, torch.zeros(n, dtype=torch.long), rng)
    assert int(after.reseeded.sum()) <= max(1, n // 20)
    assert torch.equal(after.versions > 0, after.reseeded)
    torch.testing.assert_close(after.v.norm(dim=-1), torch.ones(n))
    lost = float(usage[after.reseeded].sum())
    assert float(after.usage.sum()) == pytest.approx(float(usage.sum()) - lost, abs=1e-6)


@pytest.mark.slow
@settings(quick, max_examples=15)
@given(seeds, st.integers(1, 20))
def test_the_geometric_median_moves_with_its_points(seed, n):
    z, shift, nobody = (
        drawn(seed, n, 3, dtype=torch.float64),
        drawn(seed + 1, 1, 3, dtype=torch.float64),
        torch.zeros(1, 3),
    )
    zero = torch.zeros(n, dtype=torch.long)
    moved = geometric_median(2 * z + shift, zero, nobody.double())
    still = geometric_median(z, zero, nobody.double())
    objective = [(x - m).norm(dim=-1).sum() for x, m in ((2 * z + shift, moved), (2 * z + shift, 2 * still + shift))]
    torch.testing.assert_close(objective[0], objective[1], atol=1e-6, rtol=1e-6)
