"""The prompts of all users in one table: on the compute device, in host memory, or in files that are mapped to memory.

A million users at the small preset are 4.1 GB of prompts (2 · 8 · 64 numbers of 4 bytes each). The table is the one
value of the simulator that is written in place; a method copies it before it learns.
"""

from dataclasses import dataclass, fields
from math import prod
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.client.drift import DriftState
from protofed.client.prompts import PromptState
from protofed.errors import ConfigError

VARIANTS = 4  # what a client may use: nothing, own rows, prompt, both


@dataclass(frozen=True, slots=True)
class ClientTable:
    """What every device remembers between slices, one row for each user seen so far."""

    long: Float[Tensor, "N L_p d"]
    short: Float[Tensor, "N L_p d"]
    mean: Float[Tensor, "N d_z"]  # of DriftState, as the three after it
    step: Float[Tensor, "N d_z"]
    total: Float[Tensor, " N"]
    periods: Int[Tensor, " N"]
    met: Bool[Tensor, " N"]  # first contact has happened
    losses: Float[Tensor, "N V"]  # what each variant's loss on the client's own validation events adds up to

    def __len__(self) -> int:
        return len(self.long)

    @property
    def device(self) -> torch.device:
        return self.long.device


def new_table(
    n: int,
    prompt_length: int,
    d: int,
    d_z: int,
    *,
    device: torch.device | str = "cpu",
    folder: Path | None = None,
) -> ClientTable:
    """A table of users nobody has met; with a folder its columns are files there, mapped to memory."""
    shapes = {
        "long": (n, prompt_length, d),
        "short": (n, prompt_length, d),
        "mean": (n, d_z),
        "step": (n, d_z),
        "total": (n,),
        "periods": (n,),
        "met": (n,),
        "losses": (n, VARIANTS),
    }
    kinds = {"periods": torch.int64, "met": torch.bool}
    there = [folder / f"{name}.bin" for name in shapes if (folder / f"{name}.bin").exists()] if folder else []
    if there:
        raise ConfigError(f"{there[0]} is there already; a mapped table wants a folder of its own")
    return ClientTable(
        **{name: _column(name, shape, kinds.get(name, torch.float32), device, folder) for name, shape in shapes.items()}
    )


def _column(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, folder: Path | None
) -> Tensor:
    if folder is None or not prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    folder.mkdir(parents=True, exist_ok=True)
    return torch.from_file(str(folder / f"{name}.bin"), shared=True, size=prod(shape), dtype=dtype).reshape(shape)


def grown(table: ClientTable, n: int) -> ClientTable:
    """A copy with rows for users 0 .. n - 1; the added ones have not been met."""
    if n < len(table):
        raise ConfigError(f"a table of {len(table)} users cannot shrink to {n}")
    _, prompt_length, d = table.long.shape
    bigger = new_table(n, prompt_length, d, table.mean.shape[1], device=table.device)
    for field in fields(table):
        getattr(bigger, field.name)[: len(table)] = getattr(table, field.name)
    return bigger


def prompts_of(table: ClientTable, users: Int[Tensor, " U"], device: torch.device) -> PromptState:
    """The prompts of a stack of users, on the compute device."""
    at = users.to(table.device)
    return PromptState(table.long[at].to(device), table.short[at].to(device))


def keep_prompts(table: ClientTable, users: Int[Tensor, " U"], prompts: PromptState) -> None:
    """Write the prompts of a stack of users into the table."""
    at = users.to(table.device)
    table.long[at] = prompts.long.to(table.long)
    table.short[at] = prompts.short.to(table.short)


def drift_of(table: ClientTable, users: Int[Tensor, " U"], device: torch.device) -> DriftState:
    """What a stack of users remembers of its queries."""
    at = users.to(table.device)
    return DriftState(*(getattr(table, name)[at].to(device) for name in ("mean", "step", "total", "periods")))


def keep_drift(table: ClientTable, users: Int[Tensor, " U"], drift: DriftState) -> None:
    """Write it into the table."""
    at = users.to(table.device)
    for name in ("mean", "step", "total", "periods"):
        column = getattr(table, name)
        column[at] = getattr(drift, name).to(column)
