"""What a method costs: parameters, bytes sent, memory on the device, seconds."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor, nn

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The costs of one method: traffic per client and round, memory on one device, wall-clock seconds per slice."""

    shared_parameters: int  # trainable, one copy for everybody
    per_user_parameters: int  # trainable, one copy per user
    bytes_up: int
    bytes_down: int
    device_memory_bytes: int
    seconds: float


def in_table_units(cost: Efficiency) -> dict[str, float]:
    """Millions of parameters, MB up and down, GB on the device, minutes per slice (decimal: 1 MB is 10^6 bytes)."""
    return {
        "shared_parameters_m": cost.shared_parameters / 1e6,
        "per_user_parameters_m": cost.per_user_parameters / 1e6,
        "up_mb": cost.bytes_up / 1e6,
        "down_mb": cost.bytes_down / 1e6,
        "device_memory_gb": cost.device_memory_bytes / 1e9,
        "minutes": cost.seconds / 60,
    }


def count_parameters(module: nn.Module, *, trainable_only: bool = True) -> int:
    """How many numbers a module holds in parameters; a tied parameter counts once."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trainable_only)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


def module_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return tensor_bytes([*module.parameters(), *module.buffers()])


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of what an optimiser remembers (Adam: two numbers per parameter); 0 before its first step."""
    remembered = (value for state in optimizer.state.values() for value in state.values())
    return tensor_bytes(value for value in remembered if isinstance(value, Tensor))


def peak_activation_bytes(work: Callable[[], object], *, resident: Iterable[Tensor] = ()) -> int:
    """The most bytes that `work` holds at once in tensors kept for a backward pass.

    Tensors that share memory count once; `resident` ones (weights, inputs), counted elsewhere, do not count at all.
    Without gradients nothing is kept, and the answer is 0.
    """
    meter = _Meter(resident)
    with torch.autograd.graph.saved_tensors_hooks(meter.pack, _Kept.unpack):
        work()
    return meter.peak


def device_memory_bytes(*, weights: int, optimizer_state: int, activations: int) -> int:
    """What a device must hold: weights and prompts and item rows it needs, optimiser state, peak activations."""
    return weights + optimizer_state + activations


def prompt_bytes(prompt_length: int, d: int, *, copies: int = 2) -> int:
    """Bytes of one user's soft prompts: L_p · d floats, long and short."""
    return copies * prompt_length * d * FLOAT_BYTES


def broadcast_bytes(n_prototypes: int, prompt_length: int, d: int) -> int:
    """Bytes down if the prototypes themselves are sent: K · L_p · d floats."""
    return n_prototypes * prompt_length * d * FLOAT_BYTES


def compact_broadcast_bytes(n_prototypes: int, d_z: int) -> int:
    """Bytes down if only the representations v_k are sent and decoded on the device: K · d_z floats."""
    return n_prototypes * d_z * FLOAT_BYTES


def upload_bytes(d_z: int, *, bits: int = 32, n_prototypes: int = 1) -> int:
    """Bytes up for one representation of d_z numbers, plus the whole bytes that tell one of `n_prototypes` apart."""
    return ceil(d_z * bits / 8) + ceil((n_prototypes - 1).bit_length() / 8)


def secure_aggregation_bytes(n_prototypes: int, d_z: int, *, bits: int = 32) -> int:
    """Bytes up under secure aggregation: a sum and a count for every prototype, K · (d_z + 1) integers."""
    return ceil(n_prototypes * (d_z + 1) * bits / 8)


class _Kept:
    """A tensor kept for the backward pass; autograd drops it when the graph goes."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def unpack(self) -> Tensor:
        return self.tensor


class _Meter:
    """Counts the memory of the tensors that are kept, from the moment they are packed until they are dropped."""

    def __init__(self, resident: Iterable[Tensor]) -> None:
        self.resident = {tensor.untyped_storage().data_ptr() for tensor in resident}
        self.holders: Counter[int] = Counter()
        self.live = self.peak = 0

    def pack(self, tensor: Tensor) -> _Kept:
        kept, storage = _Kept(tensor), tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self.resident:
            self.live += size if self.holders[place] == 0 else 0
            self.holders[place] += 1
            self.peak = max(self.peak, self.live)
            weakref.finalize(kept, self.drop, place, size)
        return kept

    def drop(self, place: int, size: int) -> None:
        self.holders[place] -= 1
        self.live -= size if self.holders[place] == 0 else 0
