"""What a shop of the synthetic world would write about its items: drawn from what they are, not from who met them."""

import pyarrow as pa
import torch
from torch import Generator

from protofed.data.synthetic_truth import DriftingWorld

COLOURS = ("amber", "coral", "indigo", "jade", "olive", "pearl", "ruby", "slate", "teal", "umber")
WORDS = (
    ("bright", "dark"), ("soft", "rough"), ("small", "large"), ("round", "square"), ("old", "new"), ("warm", "cool"),
    ("light", "heavy"), ("quiet", "loud"), ("plain", "ornate"), ("wet", "dry"), ("slow", "quick"), ("thin", "thick"),
    ("sweet", "salty"), ("smooth", "grainy"), ("narrow", "wide"), ("low", "high"),
)  # fmt: skip
SAID = 6  # words about an item: where it differs most from its category
WRONG = 0.1  # share of categories and of words that are
DEGREES = 0.05  # an item lies so far from the middle of town, per unit of its vector
BLUR = 0.3  # of places, in the same units
TOWN = (48.2, 16.4)


def describe_items(world: DriftingWorld, rng: Generator) -> pa.Table:
    """The item table of the world's log: title, category, text, latitude and longitude, each of them noisy."""
    truth, n = world.truth, world.log.n_items
    vectors, category = truth.items.vectors[:n], truth.items.category[:n]
    width, k = vectors.shape[1], truth.config.n_clusters

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=rng, dtype=torch.float64)

    shown = torch.where(draw(n) < WRONG, (draw(n) * k).long(), category)
    names = [f"{COLOURS[c % len(COLOURS)]}{c // len(COLOURS) or ''}" for c in shown.tolist()]
    apart = vectors - truth.centres[category]
    strongest = apart.abs().topk(min(SAID, width), dim=1).indices
    high = (apart.gather(1, strongest) > 0) ^ (draw(*strongest.shape) < WRONG)
    words = [
        " ".join(_word(dim, up) for dim, up in zip(dims, ups, strict=True))
        for dims, ups in zip(strongest.tolist(), high.tolist(), strict=True)
    ]
    flat = torch.linalg.qr(torch.randn(width, 2, generator=rng, dtype=torch.float64))[0]
    place = vectors @ flat + BLUR * torch.randn(n, 2, generator=rng, dtype=torch.float64)
    lat, lon = (torch.tensor(TOWN) + DEGREES * place).T
    ids = world.log.item_ids.to_pylist()
    return pa.table({
        "item": world.log.item_ids,
        "title": pa.array([f"{name} {str(item).rpartition('-')[2]}" for name, item in zip(names, ids, strict=True)]),
        "category": pa.array(names),
        "text": pa.array(words),
        "lat": pa.array(lat.numpy()),
        "lon": pa.array(lon.numpy()),
    })  # fmt: skip


def _word(dimension: int, up: bool) -> str:
    """One end of a dimension of the item vectors."""
    pair = WORDS[dimension % len(WORDS)]
    return f"{pair[int(up)]}{dimension // len(WORDS) or ''}"
