"""The code of a run's ranks: small, and beside another run's smaller still, as methods on one backbone rank alike."""

import lzma
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, UInt8
from scipy.special import xlogy

from protofed.experiments.evaluate import CANDIDATES, LAST_RANK

Ranks = UInt8[np.ndarray, "kinds N"]
Repeat = Bool[np.ndarray, " N"]
# Neighbouring bytes tell nothing of each other; a large dictionary would only cost time.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 20, "lc": 0, "lp": 0, "pb": 0}]


def unlikeness(ranks: Ranks, other: Ranks) -> float:
    """How many bits another run's ranks leave open, about: those of sampled candidates and of the full ranking."""
    bits = 0.0
    for kind in (CANDIDATES.index("sampled"), CANDIDATES.index("full")):
        pairs = np.bincount(
            other[kind].astype(np.int64) * (LAST_RANK + 1) + ranks[kind], minlength=(LAST_RANK + 1) ** 2
        )
        table = pairs.reshape(LAST_RANK + 1, LAST_RANK + 1)
        bits += float(xlogy(table.sum(1), table.sum(1)).sum() - xlogy(table, table).sum())
    return bits


def encoded(ranks: Ranks, repeat: Repeat, beside: Sequence[Ranks] = ()) -> bytes:
    """The ranks, compressed: each kind in the order of what is known, which puts queries alike together."""
    parts = [column[np.lexsort(keys(ranks[:kind], repeat, beside))].tobytes() for kind, column in enumerate(ranks)]
    return lzma.compress(b"".join(parts), check=lzma.CHECK_CRC32, filters=FILTERS)


def decoded(code: bytes, repeat: Repeat, beside: Sequence[Ranks] = ()) -> Ranks:
    """The ranks that `encoded` was given."""
    parts = np.frombuffer(lzma.decompress(code), dtype=np.uint8).reshape(len(CANDIDATES), len(repeat))
    ranks = np.empty_like(parts)
    for kind, part in enumerate(parts):
        ranks[kind, np.lexsort(keys(ranks[:kind], repeat, beside))] = part
    return ranks


def keys(before: UInt8[np.ndarray, "known N"], repeat: Repeat, beside: Sequence[Ranks]) -> list[np.ndarray]:
    """What is known of each query before the next kind of ranks, the most telling last: the first other run's rank."""
    others = beside[::-1]
    return [repeat, *(kind for other in others for kind in other[::-1]), *before, *(o[len(before)] for o in others)]
