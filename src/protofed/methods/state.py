"""States to named tensors and back, so that any method survives a kill."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from protofed.backbone.sasrec import SASRec, grown


def pack(state: object, prefix: str = "state") -> dict[str, Tensor]:
    """Every tensor and number of a state (a dataclass of tensors, numbers, backbones, dictionaries), by dotted name."""
    if isinstance(state, Tensor):
        return {prefix: state.detach().cpu().clone(memory_format=torch.contiguous_format)}
    if isinstance(state, bool | int | float):
        return {prefix: torch.tensor(state, dtype=torch.float64 if isinstance(state, float) else torch.int64)}
    packed: dict[str, Tensor] = {}
    for name, part in _parts(state):
        packed |= pack(part, f"{prefix}.{name}") if part is not None else {}
    return packed


def unpack(template: Any, tensors: Mapping[str, Tensor], prefix: str = "state") -> Any:
    """A state like `template` (the one `start` gives) with the packed values in place of its own."""
    if isinstance(template, Tensor):
        return tensors[prefix].to(template.device)
    if isinstance(template, bool | int | float):
        return type(template)(tensors[prefix].item())
    inside = {key[len(prefix) + 1 :]: value for key, value in tensors.items() if key.startswith(f"{prefix}.")}
    if isinstance(template, SASRec):
        return _unpack_backbone(template, inside)
    if isinstance(template, nn.Module):
        module = copy.deepcopy(template)
        module.load_state_dict(inside)
        return module
    if isinstance(template, Mapping):
        return inside
    parts = {name: unpack(part, tensors, f"{prefix}.{name}") for name, part in _parts(template) if part is not None}
    return dataclasses.replace(template, **parts)


def _unpack_backbone(template: SASRec, weights: Mapping[str, Tensor]) -> SASRec:
    model = grown(template, len(weights["items"]))
    model.load_state_dict(weights)
    return model.eval()


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        return list(value.state_dict().items())
    if isinstance(value, Mapping):
        return list(value.items())
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
