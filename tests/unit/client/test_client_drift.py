"""Drift against one loop per client, and the gate and the stability that follow from it."""

import math

import pytest
import torch
from torch import Generator

from protofed.client.drift import (
    Gate,
    adaptive_stability,
    drift_gate,
    fit_gate,
    fit_kappa,
    literal_gate,
    no_drift,
    observe,
)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed))


def test_the_rolling_mean_and_its_movements_written_out():
    state, queries = no_drift(3, 4), drawn(5, 3, 4)
    for h in queries:
        state = observe(state, h)
    for u in range(3):
        mean, lengths = queries[0, u], []
        for h in queries[1:, u]:
            new = 0.9 * mean + 0.1 * h
            lengths.append(float((new - mean).norm()))
            mean = new
        torch.testing.assert_close(state.mean[u], mean)
        assert float(state.drift[u]) == pytest.approx(lengths[-1], rel=1e-5)
        assert float(state.mean_drift[u]) == pytest.approx(sum(lengths) / 4, rel=1e-5)
    assert state.periods.tolist() == [5, 5, 5]


def test_a_client_in_its_first_period_has_not_drifted():
    state = observe(no_drift(2, 4), drawn(2, 4))
    assert state.drift.tolist() == [0, 0]
    assert state.mean_drift.tolist() == [0, 0]
    assert no_drift(2, 4).mean_drift.tolist() == [0, 0]


def test_inactive_clients_and_broken_queries_change_nothing():
    before = observe(observe(no_drift(3, 4), drawn(3, 4)), drawn(3, 4, seed=1))
    h = drawn(3, 4, seed=2)
    h[1, 0] = float("nan")
    after = observe(before, h, torch.tensor([False, True, True]))
    for name in ("mean", "step", "total", "periods"):
        old, new = getattr(before, name), getattr(after, name)
        assert torch.equal(old[:2], new[:2])
        assert not torch.equal(old[2], new[2])


def test_a_stack_of_clients_drifts_as_each_alone_to_the_bit():
    first, second = drawn(6, 4), drawn(6, 4, seed=1)
    together = observe(observe(no_drift(6, 4), first), second)
    for u in range(6):
        alone = observe(observe(no_drift(1, 4), first[u : u + 1]), second[u : u + 1])
        assert torch.equal(alone.mean[0], together.mean[u])
        assert torch.equal(alone.step[0], together.step[u])


def test_median_and_mad_of_the_base_users_centre_the_gate():
    gate = fit_gate(torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0, float("nan")]))
    assert float(gate.centre) == 3
    assert float(gate.spread) == 1  # distances from 3 are 2, 1, 0, 1, 97
    alpha = drift_gate(torch.tensor([0.0, 3.0, 5.0]), gate)
    assert alpha.tolist() == pytest.approx([1 / (1 + math.exp(4)), 1 / (1 + math.e), 1 / (1 + math.exp(-1))])


def test_the_gate_opens_with_drift_and_is_nearly_shut_without():
    drifts = drawn(500).abs() + 1
    alpha = drift_gate(torch.tensor([0.0, 1.0, 1.5, 2.0, 4.0]), fit_gate(drifts))
    assert (alpha.diff() > 0).all()
    assert alpha[0] < 0.1
    assert alpha[-1] > 0.9


def test_the_printed_gate_never_falls_below_one_half():
    assert drift_gate(drawn(100).abs(), literal_gate()).min() >= 0.5


def test_equal_drifts_do_not_divide_by_zero():
    assert float(fit_gate(torch.full((5,), 2.0)).spread) == 1
    mostly = fit_gate(torch.tensor([2.0, 2.0, 2.0, 2.0, 7.0]))
    assert float(mostly.spread) == pytest.approx(2.0)  # the standard deviation
    assert drift_gate(torch.tensor([2.0]), fit_gate(torch.zeros(0))).isfinite().all()


def test_the_vector_gate_adds_up_its_coordinates():
    drifts = drawn(200, 3).abs()
    gate = fit_gate(drifts, slope=2.0)
    alpha = drift_gate(drifts[:4], gate)
    for u in range(4):
        score = sum(2.0 / 3 * float((drifts[u, i] - gate.centre[i]) / gate.spread[i]) for i in range(3)) - 1
        assert float(alpha[u]) == pytest.approx(1 / (1 + math.exp(-score)), abs=1e-6)


def test_a_vector_gate_of_one_coordinate_is_the_scalar_gate():
    drifts = drawn(50).abs()
    vector, scalar = fit_gate(drifts[:, None]), fit_gate(drifts)
    assert isinstance(vector, Gate)
    torch.testing.assert_close(drift_gate(drifts[:, None], vector), drift_gate(drifts, scalar))


def test_stability_falls_from_one_to_a_tenth_at_the_ninetieth_percentile():
    drifts = torch.arange(101) / 100
    kappa = fit_kappa(drifts)
    stability = adaptive_stability(torch.tensor([0.0, 0.45, 0.9, 5.0]), kappa=kappa)
    assert stability.tolist() == pytest.approx([1, 10**-0.5, 0.1, 0.1], rel=1e-5)


def test_users_who_do_not_drift_at_all_keep_the_full_pull():
    assert fit_kappa(torch.zeros(10)) == 0
    assert adaptive_stability(torch.tensor([0.0, 3.0]), kappa=0.0, lambda_max=0.8).tolist() == pytest.approx([0.8, 0.8])
