"""Switches that can be put on top of any method's scores: a popularity prior and a personal memory."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.config import RunConfig
from protofed.errors import ConfigError
from protofed.methods.popularity import counts_for
from protofed.slices.histories import Queries, past_counts

SECONDS_PER_DAY = 86_400


def popularity_prior(counts: Int[Tensor, " n"], n_items: int, weight: float) -> Float[Tensor, " I"]:
    """w * log(1 + train count of the slice)."""
    return weight * torch.log1p(counts_for(counts, n_items))


def refuse_prior(config: RunConfig, instead: str = "leave it out, or run without a budget") -> None:
    """Refuse a popularity prior in a private run: it counts raw events, and no ε could be stated."""
    if config.scoring.popularity_prior:
        raise ConfigError(
            "scoring.popularity_prior counts raw events and must be 0 in a private run, "
            f"got {config.scoring.popularity_prior:g}; {instead}"
        )


def personal_memory(queries: Queries, *, weight: float, half_life_days: float) -> Float[Tensor, "B I"]:
    """w * log(1 + 10 * sum of 0.5^(age / half-life)) over the user's own earlier events on the item.

    It stays on the device and costs no ε.
    """
    asked = torch.repeat_interleave(queries.times, queries.offsets.diff())
    age_days = (asked - queries.past_times).float() / SECONDS_PER_DAY
    return weight * torch.log1p(10 * past_counts(queries, 0.5 ** (age_days / half_life_days)))
