"""What a method adds to the loss of a training: penalties, distillation, replay.

An extra loss draws through `Lots` and tells through `Notes`, both given to it, and does nothing else on the side. The
same function therefore runs step by step, recorded once and replayed by the device, and for many users at once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from protofed.backbone.sasrec import SASRec
from protofed.slices.windows import Windows


@runtime_checkable
class Lots(Protocol):
    """Where an extra loss gets its random numbers from."""

    @property
    def device(self) -> torch.device: ...

    def uniform(self, shape: tuple[int, ...]) -> Float[Tensor, "..."]:
        """Numbers in [0, 1)."""
        ...

    def integers(self, n: int, shape: tuple[int, ...]) -> Int[Tensor, "..."]:
        """Uniform among 0 .. n - 1."""
        ...

    def distinct(self, n: int, k: int) -> Int[Tensor, " k"]:
        """k different numbers of 0 .. n - 1, in an order of their own; all n where k is more."""
        ...


@dataclass(frozen=True, slots=True)
class Streamed:
    """One draw after the other, on the generator's device."""

    rng: Generator

    @property
    def device(self) -> torch.device:
        return self.rng.device

    def uniform(self, shape: tuple[int, ...]) -> Float[Tensor, "..."]:
        return torch.rand(shape, generator=self.rng, device=self.device)

    def integers(self, n: int, shape: tuple[int, ...]) -> Int[Tensor, "..."]:
        return torch.randint(n, shape, generator=self.rng, device=self.device)

    def distinct(self, n: int, k: int) -> Int[Tensor, " k"]:
        if self.device.type == "cpu":
            return torch.randperm(n, generator=self.rng)[:k]
        return self.uniform((n,)).topk(min(n, k)).indices  # `randperm` cannot be recorded


@dataclass(slots=True)
class Dealt:
    """Numbers in [0, 1) that were drawn before, handed out in order."""

    numbers: Float[Tensor, " n"]
    used: int = 0

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def uniform(self, shape: tuple[int, ...]) -> Float[Tensor, "..."]:
        n = math.prod(shape)
        self.used += n
        return self.numbers[self.used - n : self.used].reshape(shape).float()

    def integers(self, n: int, shape: tuple[int, ...]) -> Int[Tensor, "..."]:
        k = math.prod(shape)
        self.used += k
        return (self.numbers[self.used - k : self.used] * n).long().clamp(max=n - 1).reshape(shape)

    def distinct(self, n: int, k: int) -> Int[Tensor, " k"]:
        """One of each of k equal parts of 0 .. n - 1: each number is as likely as any other, and no sorting needed."""
        k = min(n, k)
        self.used += k
        places = torch.arange(k, device=self.numbers.device) + self.numbers[self.used - k : self.used]
        return (places * n / k).long().clamp(max=n - 1)


def uniform_items(lots: Lots, n_windows: int, n: int, n_items: int) -> Int[Tensor, "W n"]:
    """Uniform items among 0 .. n_items - 1 for each window; all of them, once, where that many are asked for."""
    if n >= n_items:
        return torch.arange(n_items, device=lots.device).expand(n_windows, -1)
    return lots.integers(n_items, (n_windows, n))


@dataclass(slots=True)
class Notes:
    """Running means of what happened inside a training, for its diagnostics; they stay on the device until read."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, total: Tensor, count: Tensor | int = 1) -> None:
        """In place from the second time on: a recorded step adds to what the first ones made."""
        total = total.detach().double()
        if isinstance(count, int):
            count = torch.full_like(total, count)  # filled on the device: a copy from here could not be recorded
        count = count.double()
        if name in self.sums:
            self.sums[name] += total
            self.counts[name] += count
        else:
            self.sums[name], self.counts[name] = total.clone(), count.clone()

    def means(self) -> dict[str, float]:
        return {name: float(total / self.counts[name].clamp(min=1)) for name, total in self.sums.items()}

    def mean(self, name: str) -> float:
        """0 where nothing was noted."""
        return self.means().get(name, 0.0)


ExtraLosses = Callable[[SASRec, Windows, Lots, Notes], Float[Tensor, " W"]]


@dataclass(frozen=True, slots=True)
class Extra:
    """What is added to each window's summed loss, what it draws from, and what it has told."""

    losses: ExtraLosses
    notes: Notes
    rng: Generator = field(default_factory=Generator)

    def __call__(self, model: SASRec, batch: Windows) -> Float[Tensor, " W"]:
        return self.losses(model, batch, Streamed(self.rng), self.notes)
