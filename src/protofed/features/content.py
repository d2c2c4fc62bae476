"""What is publicly known of a log's items, as vectors: one modality beside the other, each with who lacks it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

PLACE = "place"  # latitude and longitude: the one modality whose distances are kilometres


@dataclass(frozen=True, slots=True)
class Modality:
    """Vectors of one kind for items 0, 1, 2, ...; zeros where an item has none."""

    name: str
    vectors: Float[Tensor, "I w"]  # of `place`: latitude and longitude in degrees, float64
    present: Bool[Tensor, " I"]


@dataclass(frozen=True, slots=True)
class Content:
    """All that is known of a log's items, in the log's numbering."""

    modalities: tuple[Modality, ...]

    @property
    def n_items(self) -> int:
        return len(self.modalities[0].present)

    def key(self) -> str:
        """A name that changes with anything in it."""
        digest = hashlib.sha256()
        for modality in self.modalities:
            digest.update(repr((modality.name, modality.vectors.shape, modality.vectors.dtype)).encode())
            for part in (modality.vectors, modality.present):
                digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:32]


def modality(name: str, vectors: Float[Tensor, "I w"], present: Bool[Tensor, " I"]) -> Modality:
    """A modality in which what is not there is zero."""
    return Modality(name, torch.where(present[:, None], vectors, 0.0).to(vectors.dtype), present)


def coverage(content: Content) -> Sequence[str]:
    """How many items have each modality, in words."""
    counts = ((m.name, int(m.present.sum()), len(m.present)) for m in content.modalities)
    return [f"{name}: {found:,} of {all_:,} items" for name, found, all_ in counts]
