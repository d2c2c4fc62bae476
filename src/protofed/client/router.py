"""Which prototypes a query is routed to, and with which weights."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.errors import ConfigError, MissingExtra

Search = Callable[
    [Tensor, Tensor, int], tuple[Tensor, Tensor]
]  # queries, keys, m -> inner products, indices; best first


def exact_search(
    queries: Float[Tensor, "U d_z"], keys: Float[Tensor, "K d_z"], m: int
) -> tuple[Float[Tensor, "U M"], Int[Tensor, "U M"]]:
    """The m largest inner products of each query, and whose they are."""
    scores, chosen = (queries @ keys.T).topk(m, dim=-1)
    return scores, chosen


def faiss_search(
    queries: Float[Tensor, "U d_z"], keys: Float[Tensor, "K d_z"], m: int
) -> tuple[Float[Tensor, "U M"], Int[Tensor, "U M"]]:
    """The same from a FAISS inner-product index; products are taken again, so that gradients reach the query."""
    index = _faiss().IndexFlatIP(keys.shape[1])
    index.add(keys.detach().float().cpu().contiguous().numpy())
    _, found = index.search(queries.detach().float().cpu().contiguous().numpy(), m)
    chosen = torch.from_numpy(found).to(keys.device)
    return (queries[:, None] * keys[chosen]).sum(-1), chosen


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise MissingExtra("faiss", "ann") from None
    return faiss


def route(
    queries: Float[Tensor, "U d_z"],
    keys: Float[Tensor, "K d_z"],
    *,
    top_m: int,
    temperature: float,
    search: Search = exact_search,
) -> tuple[Int[Tensor, "U M"], Float[Tensor, "U M"]]:
    """Choose each query's Top-M prototypes and weigh them; all others weigh zero. Eq. (4), eq:router.

    Queries and keys are unit vectors (the paper leaves their scale open), so scores are cosines; with fewer than M
    prototypes all are chosen.
    """
    if not temperature > 0:
        raise ConfigError(f"the router's temperature must be greater than 0, got {temperature}; the paper uses 0.07")
    if top_m < 1 or len(keys) == 0:
        raise ConfigError(f"routing needs top_m >= 1 and a prototype, got top_m = {top_m} and {len(keys)} prototypes")
    scores, chosen = search(queries, keys, min(top_m, len(keys)))
    return chosen, (scores / temperature).softmax(dim=-1)
