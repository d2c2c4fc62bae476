"""A content tower: maps from what is known of items to rows, learned in the warm-up beside the items' own rows.

While it learns, an item's row is its own row plus the tower's, and a share of the look-ups leaves the own row out
(ID-dropout), so that content alone learns to rank. Afterwards both are added up once and for all: a trained item keeps
the sum, any other item has the tower's row, and the tower itself is not needed any more.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

from protofed.backbone.content import EARTH_KM, on_sphere, whitened
from protofed.backbone.sasrec import CONTENT, ROW_SCALE, ContentRows, SASRec, at_rest
from protofed.config import BackboneConfig
from protofed.features.content import PLACE, Content, Modality
from protofed.seeds import seeded

WAVES = 64  # directions of a place's Fourier features
SHORTEST, LONGEST = 0.3, 3_000.0  # kilometres that they swing in as they start


class Tower(nn.Module):
    """One linear map for each modality, and a softmax gate over those that an item has."""

    described: Tensor  # which items have any modality

    def __init__(self, content: Content, known: Bool[Tensor, " R"], width: int, rng: Generator) -> None:
        super().__init__()
        self.names = tuple(m.name for m in content.modalities)
        maps, gates = {}, {}
        with seeded(0, "overwritten below"):
            for m in content.modalities:
                inputs = inputs_of(m, known)
                self.register_buffer(f"inputs_{m.name}", inputs, persistent=False)
                self.register_buffer(f"present_{m.name}", m.present.clone(), persistent=False)
                n = 2 * WAVES if m.name == PLACE else inputs.shape[1]
                maps[m.name], gates[m.name] = nn.Linear(n, width), nn.Linear(width, 1)
        self.maps, self.gates = nn.ModuleDict(maps), nn.ModuleDict(gates)
        self.waves = nn.Parameter(torch.zeros(3, WAVES if PLACE in self.names else 0))
        described = torch.stack([m.present for m in content.modalities]).any(0)
        self.register_buffer("described", described, persistent=False)
        self._draw(rng, width)

    def _draw(self, rng: Generator, width: int) -> None:
        """Initial weights from the given stream alone; rows start as long as items' own ones do."""
        with torch.no_grad():
            maps: Any
            gate: Any
            for maps, gate in zip(self.maps.values(), self.gates.values(), strict=True):
                maps.weight.normal_(0, ROW_SCALE / math.sqrt(width * maps.weight.shape[1]), generator=rng)
                for zero in (maps.bias, gate.weight, gate.bias):
                    zero.zero_()
            waves = self.waves.shape[1]
            if waves:
                directions = F.normalize(torch.randn(3, waves, generator=rng), dim=0)
                span = torch.linspace(math.log(SHORTEST), math.log(LONGEST), waves)
                self.waves.copy_(directions * 2 * math.pi / span.exp())

    def forward(self, items: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape d"]:
        """The rows of items; zeros for those of which nothing is known."""
        rows, gates = [], []
        for name in self.names:
            present: Tensor = getattr(self, f"present_{name}")
            inputs: Tensor = getattr(self, f"inputs_{name}")
            inside = items.clamp(0, len(present) - 1)
            there = present[inside] & (items >= 0) & (items < len(present))
            x = F.embedding(inside, inputs)
            if name == PLACE:
                phase = x @ self.waves
                x = torch.cat([phase.sin(), phase.cos()], dim=-1)
            row = self.maps[name](x)
            rows.append(row)
            gates.append(self.gates[name](row)[..., 0].masked_fill(~there, -torch.inf))
        gate = torch.stack(gates, dim=-1)  # (*shape, M)
        weight = torch.where(gate.isfinite().any(-1, keepdim=True), gate, 0.0).softmax(-1) * gate.isfinite()
        return (torch.stack(rows, dim=-2) * weight[..., None]).sum(-2)


def inputs_of(m: Modality, known: Bool[Tensor, " R"]) -> Float[Tensor, "I w"]:
    """Kilometres from the middle of the base block's places, or vectors whitened on the items of the base block."""
    fitted = torch.zeros_like(m.present)
    fitted[: len(known)] = m.present[: len(known)] & known.cpu()
    if m.name == PLACE:
        points = EARTH_KM * on_sphere(m.vectors)
        return (points - points[fitted].mean(0).nan_to_num()).float() * m.present[:, None]
    return whitened(m.vectors.float(), fitted) * m.present[:, None]


class Towered(SASRec):
    """The backbone in its warm-up with a tower; `settled` makes a plain one of it."""

    typical_length: Tensor

    def __init__(self, config: BackboneConfig, n_rows: int, rng: Generator, tower: Tower, id_dropout: float) -> None:
        super().__init__(config, n_rows, rng)
        self.tower, self.id_dropout = tower, id_dropout
        self.register_buffer("typical_length", torch.zeros(()))
        self.refresh_mean_row()

    @property
    def reads_lines(self) -> bool:
        return self.prompt is None

    def embed(self, items: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape d"]:
        """Own row plus the tower's; in training some own rows are left out where content can stand in."""
        n = max(len(self.tower.described), self.n_rows)
        each, place = uncounted(items, n) if items.is_cuda else distinct(items, n)  # (m,), (*shape)
        known, told, content = self.knows(each)[place], self._told(each)[place], self.tower(each)
        if self.training and self.id_dropout:
            known = known & ~(told & (torch.rand(items.shape, device=items.device) < self.id_dropout))
        own = F.embedding(each.clamp(0, self.n_rows - 1), self.items)
        rows, m = torch.cat([content + own, content, self.mean_row[None]]), len(each)  # (2 m + 1, d)
        return F.embedding(torch.where(known, place, torch.where(told, place + m, 2 * m)), rows)

    def tells_apart(self, items: Int[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        return self.knows(items) | self._told(items)

    @torch.no_grad()
    def laid_out(self) -> SASRec:
        """A plain backbone that scores as this one does now, with one table for all items that content tells of."""
        every = torch.arange(max(len(self.tower.described), self.n_rows), device=self.items.device)
        return at_rest(plain_of(self, self.embed(every), self.tells_apart(every)))

    @torch.no_grad()
    def refresh_mean_row(self) -> None:
        if "tower" not in self._modules:
            super().refresh_mean_row()
            return
        known = self.has_row.nonzero()[:, 0]
        rows = self.items[known] + self.tower(known)
        self.mean_row.copy_(rows.mean(0))
        self.typical_length.copy_(rows.norm(dim=-1).mean() * math.sqrt(self.config.width))

    def input_norm(self, known: Int[Tensor, " R"] | None = None) -> Float[Tensor, ""]:
        """As it was after the last epoch: rows of all items at every batch would take long."""
        return self.typical_length

    def _told(self, items: Int[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        described = self.tower.described
        return described[items.clamp(0, len(described) - 1)] & (items >= 0) & (items < len(described))


def distinct(items: Int[Tensor, "*shape"], n: int) -> tuple[Int[Tensor, " m"], Int[Tensor, "*shape"]]:
    """The items asked for, each once in ascending order, and where among them each stands.

    Numbers below 0 count as one item, and so do those of `n` and beyond: neither are in any table.
    """
    number = items.clamp(-1, n) + 1
    asked = torch.zeros(n + 2, dtype=torch.bool, device=items.device)
    asked[number] = True
    return asked.nonzero()[:, 0] - 1, (asked.cumsum(0) - 1)[number]


def uncounted(items: Int[Tensor, "*shape"], n: int) -> tuple[Int[Tensor, " m"], Int[Tensor, "*shape"]]:
    """The same, but all items where they are fewer than look-ups, else the look-ups themselves.

    How many items are distinct would have to come from the GPU first, and a step that waits for it cannot be recorded.
    """
    if items.numel() < n:
        return items.flatten(), torch.arange(items.numel(), device=items.device).view(items.shape)
    return torch.arange(-1, n + 1, device=items.device), items.clamp(-1, n) + 1


@torch.no_grad()
def settled(model: Towered) -> SASRec:
    """The plain backbone that ranks as this one does."""
    described, n = model.tower.described, model.n_rows
    rows = model.tower(torch.arange(max(len(described), n), device=model.items.device))
    plain = plain_of(model, model.items + rows[:n], model.has_row)
    plain.register_module(CONTENT, ContentRows(rows[: len(described)].clone(), described.clone()))
    plain.refresh_mean_row()
    return at_rest(plain)


def plain_of(model: Towered, items: Float[Tensor, "R d"], has_row: Bool[Tensor, " R"]) -> SASRec:
    """A plain backbone with these rows of items, and all else as this one has it."""
    with seeded(0, "overwritten below"):
        plain = SASRec(model.config, len(items), Generator().manual_seed(0)).to(items.device)
    weights = model.state_dict() | {"items": items, "has_row": has_row}
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    return plain
