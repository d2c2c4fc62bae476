"""Rows for items that nobody has learned yet, from what is publicly known of them: their nearest known items' rows.

Near is a matter of kilometres for places, of the cosine for vectors that were whitened on the items of the base block.
It takes no training and reads no event after the base block, so it costs no ε.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.backbone.sasrec import CONTENT, ContentRows, SASRec
from protofed.features.content import PLACE, Content, Modality

EARTH_KM = 6371.0088
NEAR_KM = 0.2  # two places this close are one neighbourhood: the weight is 1 / (km + 0.2)
WIDEST = 64  # directions kept of a vector
FLOOR = 1e-3  # of the largest variance: directions with less are noise and are left out
AT_ONCE = 1 << 22  # distances in memory


class Nearest(ContentRows):
    """The weighted mean of the rows of the `neighbours` nearest items that have one; follows them as they train.

    With several modalities an item's row is the mean over those that it has.
    """

    places: tuple[str, ...]  # the modalities, in the order of `spots`

    def __init__(self, content: Content, known: Bool[Tensor, " R"], width: int, neighbours: int) -> None:
        n = content.n_items
        super().__init__(torch.zeros(n, width), torch.zeros(n, dtype=torch.bool))
        self.neighbours = neighbours
        self.names = tuple(m.name for m in content.modalities)
        for m in content.modalities:
            self.register_buffer(f"spots_{m.name}", spots(m, known))
            self.register_buffer(f"present_{m.name}", m.present.clone())
        self._found: tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]] | None = None

    def refresh(self, items: Float[Tensor, "R d"], has_row: Bool[Tensor, " R"]) -> None:
        """Make the rows anew from the trained ones, in place."""
        n, found = len(self.rows), self._neighbours(has_row)
        total, parts = torch.zeros(n, items.shape[1], device=items.device), torch.zeros(n, device=items.device)
        for wanted, near, weight in found:
            total[wanted] += (items[near] * weight[..., None]).sum(1)
            parts[wanted] += 1
        self.rows = total / parts.clamp(min=1)[:, None]
        self.described = parts > 0

    def _neighbours(self, has_row: Bool[Tensor, " R"]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Per modality: the items without a row, their nearest ones with a row, and the weights of these."""
        before = self.__dict__.get("_found")
        if before is not None and torch.equal(before[0], has_row):
            return before[1]  # type: ignore[no-any-return]
        known = torch.zeros(len(self.rows), dtype=torch.bool, device=has_row.device)
        known[: len(has_row)] = has_row[: len(known)]
        found = []
        for name in self.names:
            where: Tensor = getattr(self, f"spots_{name}")
            present: Tensor = getattr(self, f"present_{name}")
            wanted, sources = (present & ~known).nonzero()[:, 0], (present & known).nonzero()[:, 0]
            if len(wanted) and len(sources):
                near, weight = nearest(where[wanted], where[sources], self.neighbours, by_distance=name == PLACE)
                found.append((wanted, sources[near], weight))
        self._found = (has_row.clone(), found)
        return found

    def __deepcopy__(self, memo: dict[Any, Any]) -> "Nearest":
        """A copy that shares what never changes."""
        other = copy.copy(self)
        other._buffers = {name: t if name.startswith(("spots", "present")) else copy.deepcopy(t, memo)
                          for name, t in self._buffers.items()}  # fmt: skip
        return other


def spots(m: Modality, known: Bool[Tensor, " R"]) -> Tensor:
    """Where each item is: a point on the globe, in kilometres from its middle; else a whitened vector of length 1."""
    if m.name == PLACE:
        return EARTH_KM * on_sphere(m.vectors)
    fitted = m.present.clone()
    fitted[: len(known)] &= known[: len(fitted)].cpu()
    fitted[len(known) :] = False
    return F.normalize(whitened(m.vectors.float(), fitted), dim=-1)


def on_sphere(degrees: Float[Tensor, "n 2"]) -> Float[Tensor, "n 3"]:
    """Points on the unit sphere, of latitudes and longitudes."""
    lat, lon = degrees.double().deg2rad().unbind(-1)
    return torch.stack([lat.cos() * lon.cos(), lat.cos() * lon.sin(), lat.sin()], dim=-1)


def kilometres(a: Float[Tensor, "n 3"], b: Float[Tensor, "m 3"]) -> Float[Tensor, "n m"]:
    """Great-circle distances between points in kilometres from the globe's middle."""
    straight = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")  # products would round metres away
    return (straight / (2 * EARTH_KM)).clamp(max=1).asin() * (2 * EARTH_KM)


def whitened(vectors: Float[Tensor, "I w"], fitted: Bool[Tensor, " I"]) -> Float[Tensor, "I w2"]:
    """Vectors less the mean, along at most 64 principal directions, each of variance 1 among the `fitted` items."""
    if int(fitted.sum()) < 2:
        return torch.zeros(len(vectors), 1)
    chosen = vectors[fitted].double()
    mean = chosen.mean(0)
    variance, directions = torch.linalg.eigh((chosen - mean).T @ (chosen - mean) / len(chosen))
    variance, directions = variance.flip(0)[:WIDEST], directions.flip(1)[:, :WIDEST]
    keep = variance > FLOOR * variance[0]
    scaled = directions[:, keep] / variance[keep].sqrt()
    scaled *= torch.where(scaled[scaled.abs().argmax(0), torch.arange(scaled.shape[1])] < 0, -1.0, 1.0)
    white: Tensor = ((vectors.double() - mean) @ scaled).float()
    return white


def nearest(
    wanted: Float[Tensor, "n w"], sources: Float[Tensor, "m w"], k: int, *, by_distance: bool
) -> tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]:
    """For each wanted spot the nearest sources and their weights, which add up to 1.

    By distance a source weighs 1 / (km + 0.2); else as much as its cosine, and nothing where that is negative.
    """
    near, weights = [], []
    for part in wanted.split(max(1, AT_ONCE // len(sources))):
        close = -kilometres(part, sources) if by_distance else part @ sources.T
        best, at = close.topk(min(k, len(sources)), dim=-1)
        weight = 1 / (NEAR_KM - best) if by_distance else best.clamp(min=1e-6)
        near.append(at)
        weights.append((weight / weight.sum(-1, keepdim=True)).float())
    return torch.cat(near), torch.cat(weights)


def with_nearest(model: SASRec, content: Content, neighbours: int) -> SASRec:
    """A copy that reads and scores items without a trained row by those of their nearest known items."""
    model = copy.deepcopy(model)
    rows = Nearest(content, model.has_row, model.items.shape[1], neighbours)
    model.register_module(CONTENT, rows.to(model.items.device))
    model.refresh_mean_row()
    return model.eval()


def like_content_of(model: SASRec, other: SASRec) -> SASRec:
    """The model itself, with content rows as the other has them where they follow the trained ones, not elsewhere."""
    if isinstance(other.content, Nearest):
        model.register_module(CONTENT, copy.deepcopy(other.content).to(model.items.device))
        model.refresh_mean_row()
    return model
