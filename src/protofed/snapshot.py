"""States as named tensors and an outline that says what they are parts of; reading one back takes nothing else."""

import dataclasses
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

OWN = ("protofed", "torch.nn")  # packages whose classes an outline may name
Node = list[Any]  # a kind, and what this kind needs to be made again


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Every tensor of a state by its dotted name, and its outline as JSON: classes, fields, numbers."""

    tensors: dict[str, Tensor]
    outline: str


def take_snapshot(state: object) -> Snapshot:
    """A state (a dataclass of tensors, numbers, modules, mappings, tuples) as it is now; later changes do not show."""
    tensors: dict[str, Tensor] = {}
    return Snapshot(tensors, json.dumps(_outline(state, "state", tensors)))


def restore(snapshot: Snapshot, device: torch.device | str = "cpu", *, trusted: tuple[str, ...] = ()) -> Any:
    """The state; what lay on a GPU goes to `device`.

    Classes come from this package, PyTorch's modules and the packages in `trusted`: a file names them, and it may be
    anybody's. A ValueError or KeyError says what does not fit.
    """
    return _Reader(snapshot.tensors, torch.device(device), (*OWN, *trusted)).read(json.loads(snapshot.outline), "state")


def _outline(value: Any, name: str, tensors: dict[str, Tensor]) -> Node:
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return ["tensor", value.device.type, value.requires_grad]
    if value is None or isinstance(value, bool | int | float | str):
        return ["plain", value]
    if isinstance(value, tuple):
        return ["tuple", [_outline(part, f"{name}.{place}", tensors) for place, part in enumerate(value)]]
    if isinstance(value, Mapping):
        return ["mapping", _outlines(value, name, tensors)]
    if isinstance(value, nn.Module):
        return ["module", _class_name(value), *(_outlines(part, name, tensors) for part in _parts(value))]
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return ["dataclass", _class_name(value), _outlines(fields, name, tensors)]
    raise TypeError(f"{name} cannot be kept: it is of type {type(value).__name__}")


def _outlines(values: Mapping[str, Any], name: str, tensors: dict[str, Tensor]) -> dict[str, Node]:
    return {key: _outline(part, f"{name}.{key}", tensors) for key, part in values.items()}


def _parts(module: nn.Module) -> tuple[Mapping[str, Any], ...]:
    """A module's public attributes, its own parameters and buffers, and the modules in it."""
    return (
        {key: value for key, value in vars(module).items() if not key.startswith("_")},
        module._parameters,
        module._buffers,
        module._modules,
    )


def _class_name(value: object) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


@dataclass(frozen=True, slots=True)
class _Reader:
    """Makes again what an outline says."""

    tensors: Mapping[str, Tensor]
    device: torch.device
    trusted: tuple[str, ...]

    def read(self, node: Node, name: str) -> Any:
        kind, *rest = node
        if kind == "tensor":
            where, learns = rest
            at = self.device if where != "cpu" else "cpu"
            # A copy: a file's tensors may lie at any byte, and products of unaligned rows round differently.
            return self.tensors[name].to(at, copy=True).requires_grad_(learns)
        if kind == "plain":
            return rest[0]
        if kind == "tuple":
            return tuple(self.read(part, f"{name}.{place}") for place, part in enumerate(rest[0]))
        if kind == "mapping":
            return self._read_all(rest[0], name)
        if kind == "module":
            return self._module(name, *rest)
        if kind == "dataclass":
            return self._class(rest[0])(**self._read_all(rest[1], name))
        raise ValueError(f"{name} is of an unknown kind {kind!r}")

    def _read_all(self, nodes: Mapping[str, Node], name: str) -> dict[str, Any]:
        return {key: self.read(part, f"{name}.{key}") for key, part in nodes.items()}

    def _module(self, name: str, kind: str, plain: Any, parameters: Any, buffers: Any, modules: Any) -> nn.Module:
        found = self._class(kind)
        module: nn.Module = found.__new__(found)
        nn.Module.__init__(module)
        for key, value in self._read_all(plain, name).items():
            setattr(module, key, value)
        for key, tensor in self._read_all(parameters, name).items():
            learned = None if tensor is None else nn.Parameter(tensor.detach(), tensor.requires_grad)
            module.register_parameter(key, learned)
        for key, tensor in self._read_all(buffers, name).items():
            module.register_buffer(key, tensor)
        for key, inner in self._read_all(modules, name).items():
            module.register_module(key, inner)
        return module

    def _class(self, name: str) -> Any:
        module, _, path = name.partition(":")
        if not any(module == package or module.startswith(f"{package}.") for package in self.trusted):
            raise ValueError(f"it holds a {name}, which is no part of protofed")
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        if not (isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, nn.Module))):
            raise ValueError(f"it holds a {name}, which is no state")
        return found
