"""Costs that can be counted on paper."""

import pytest
import torch
from torch import Tensor, nn

from protofed.evaluation.efficiency import (
    Efficiency,
    broadcast_bytes,
    compact_broadcast_bytes,
    count_parameters,
    device_memory_bytes,
    in_table_units,
    module_bytes,
    optimizer_state_bytes,
    peak_activation_bytes,
    prompt_bytes,
    secure_aggregation_bytes,
    tensor_bytes,
    upload_bytes,
)


class Tied(nn.Module):
    """A table used twice, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.output = nn.Linear(4, 10)
        self.output.weight = self.table.weight
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.register_buffer("positions", torch.arange(6))


def test_tied_parameters_count_once_and_frozen_ones_on_request():
    assert count_parameters(Tied()) == 40 + 10
    assert count_parameters(Tied(), trainable_only=False) == 40 + 10 + 16


def test_bytes_follow_the_element_type():
    assert tensor_bytes([torch.zeros(3, 4), torch.zeros(5, dtype=torch.int8)]) == 48 + 5
    assert module_bytes(Tied()) == 4 * 66 + 8 * 6


def test_adam_remembers_two_numbers_per_parameter_after_its_first_step():
    layer = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    assert optimizer_state_bytes(optimizer) == 0
    layer(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert optimizer_state_bytes(optimizer) == 2 * 64 * 4 + 4  # and one step counter


def test_activations_are_the_tensors_kept_for_the_backward_pass():
    x = torch.randn(32, 8)
    w1, w2 = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    peak = peak_activation_bytes(lambda: (x @ w1).exp() @ w2, resident=[x, w1, w2])
    assert peak == 32 * 8 * 4  # exp keeps its result, and the second product keeps the same memory


def test_activations_grow_with_the_batch():
    layer = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def step(batch: Tensor) -> int:
        return peak_activation_bytes(lambda: layer(batch).sum().backward(), resident=[batch, *layer.parameters()])

    assert step(torch.randn(64, 8)) == 64 * step(torch.randn(1, 8)) == 64 * 16 * 4


def test_the_peak_of_two_steps_in_a_row_is_that_of_one():
    x, w = torch.randn(16, 8), torch.randn(8, 8, requires_grad=True)

    def steps(n: int) -> None:
        for _ in range(n):
            (x @ w).exp().sum().backward()

    one = peak_activation_bytes(lambda: steps(1), resident=[x, w])
    assert peak_activation_bytes(lambda: steps(5), resident=[x, w]) == one == 16 * 8 * 4


def test_measuring_leaves_the_gradient_as_it_was():
    x, w = torch.randn(16, 8), torch.randn(8, 8, requires_grad=True)
    (expected,) = torch.autograd.grad((x @ w).sigmoid().square().sum(), w)
    peak_activation_bytes(lambda: (x @ w).sigmoid().square().sum().backward())
    assert torch.equal(w.grad, expected)


def test_inference_without_gradients_keeps_nothing():
    x, w = torch.randn(16, 8), torch.randn(8, 8, requires_grad=True)
    with torch.no_grad():
        assert peak_activation_bytes(lambda: (x @ w).exp()) == 0


def test_device_memory_adds_its_three_parts():
    assert device_memory_bytes(weights=100, optimizer_state=20, activations=3) == 123


def test_traffic_of_the_paper_is_a_megabyte_down_and_a_few_bytes_up():
    assert broadcast_bytes(n_prototypes=128, prompt_length=8, d=256) == 1_048_576
    assert compact_broadcast_bytes(n_prototypes=128, d_z=64) == 32_768
    assert upload_bytes(64) == 256
    assert upload_bytes(64, bits=8) == 64
    assert upload_bytes(64, bits=8, n_prototypes=128) == 65
    assert upload_bytes(64, bits=8, n_prototypes=257) == 66
    assert secure_aggregation_bytes(n_prototypes=128, d_z=64) == 128 * 65 * 4
    assert prompt_bytes(prompt_length=8, d=256) == 16_384


def test_table_units_are_decimal():
    cost = Efficiency(262_144, 2_048, 256, 1_048_576, 50_000_000, 90.0)
    assert in_table_units(cost) == pytest.approx(
        {
            "shared_parameters_m": 0.262144,
            "per_user_parameters_m": 0.002048,
            "up_mb": 0.000256,
            "down_mb": 1.048576,
            "device_memory_gb": 0.05,
            "minutes": 1.5,
        }
    )
