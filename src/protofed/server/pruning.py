"""Prototypes that nobody uses, put to use again by splitting the one that is used most.

Counts are the noised ones that were already released, and the new place comes from the library itself, so pruning
costs no privacy. (The paper re-seeds from recent uploads, which would be another look at private data.)
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from protofed.client.codec import unit


@dataclass(frozen=True, slots=True)
class Pruned:
    """The library after pruning, and which prototypes were re-seeded."""

    v: Float[Tensor, "K d_z"]
    usage: Float[Tensor, " K"]
    versions: Int[Tensor, " K"]
    reseeded: Bool[Tensor, " K"]


def shares(counts: Float[Tensor, " K"]) -> Float[Tensor, " K"]:
    """Each prototype's share of the assignments; a noised count below zero is none, and no count at all gives zeros."""
    mass = counts.nan_to_num(0, 0, 0).clamp(min=0)
    return mass / mass.sum().clamp(min=1e-12)


def update_usage(
    usage: Float[Tensor, " K"], counts: Float[Tensor, " K"], *, decay: float = 0.95
) -> Float[Tensor, " K"]:
    """The rolling share of each prototype after one more round; 0.95 looks back over about 20 rounds.

    A round without any mass changes nothing.
    """
    now = shares(counts)
    return torch.where(now.sum() > 0, decay * usage + (1 - decay) * now, usage)


def unused(usage: Float[Tensor, " K"], threshold: float | None = None) -> Bool[Tensor, " K"]:
    """Which prototypes have less than the threshold of all use: a tenth of an equal share unless told.

    The printed 0.01 lies above an equal share of 1/128 and would prune a perfectly balanced library whole.
    """
    return usage < (0.1 / len(usage) if threshold is None else threshold)


def most_reseeded(n_prototypes: int, share: float = 0.05) -> int:
    """How many prototypes may be re-seeded at a slice's end."""
    return max(1, int(share * n_prototypes))


def prune_or_reinit(
    v: Float[Tensor, "K d_z"],
    usage: Float[Tensor, " K"],
    versions: Int[Tensor, " K"],
    rng: Generator,
    *,
    threshold: float | None = None,
    spread: float = 0.3,
    share: float = 0.05,
) -> Pruned:
    """The library with its least used prototypes moved next to its most used ones: PruneOrReinit of Algorithm 2.

    A moved prototype starts at normalise(v_heaviest + spread * a random direction), takes half of that one's use, and
    gets a new version, so that clients know that it means something else now. `usage` may be rolling counts or shares.
    """
    idle = unused(shares(usage), threshold).nonzero()[:, 0]
    idle = idle[usage[idle].argsort(stable=True)][: most_reseeded(len(v), share)]
    v, usage, versions, reseeded = v.clone(), usage.clone(), versions.clone(), torch.zeros_like(usage, dtype=torch.bool)
    for k in idle.tolist():
        heaviest = int(usage.argmax())
        direction = unit(torch.randn(v.shape[1], generator=rng)).to(v)
        if heaviest == k:  # everything is idle: there is nothing to split
            break
        v[k] = unit(v[heaviest] + spread * direction)
        usage[[k, heaviest]] = usage[heaviest] / 2
        versions[k] += 1
        reseeded[k] = True
    return Pruned(v, usage, versions, reseeded)
