"""Which items compete with the positive: drawn once per query by a counter hash, the same for every method and time."""

import hashlib
from collections.abc import Sequence

import numpy as np

NO_CANDIDATE = -1
DRAWS_PER_BLOCK = 4  # a SHA-256 block holds four 64-bit numbers


def query_key(dataset: str, slice_index: int, user_id: object, item_id: object, time: int) -> bytes:
    """The 32 bytes that fix a query's candidates, from original identifiers only."""
    return hashlib.sha256(repr((dataset, slice_index, str(user_id), str(item_id), int(time))).encode()).digest()


def counter_draws(keys: Sequence[bytes], n_draws: int, first_block: int = 0) -> np.ndarray:
    """64-bit draws, (len(keys), n_draws rounded up to whole blocks): SHA-256 of key and counter."""
    n_blocks = -(-n_draws // DRAWS_PER_BLOCK)
    counters = [block.to_bytes(8, "big") for block in range(first_block, first_block + n_blocks)]
    digests = b"".join(hashlib.sha256(key + counter).digest() for key in keys for counter in counters)
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64).reshape(len(keys), n_blocks * DRAWS_PER_BLOCK)


def first_distinct(draws: np.ndarray, allowed: np.ndarray, n: int) -> np.ndarray:
    """Each row's first `n` distinct allowed draws in order, padded with NO_CANDIDATE, (B, n)."""
    by_value = np.argsort(draws, axis=1, kind="stable")
    sorted_draws = np.take_along_axis(draws, by_value, axis=1)
    is_first = np.ones_like(allowed)
    is_first[:, 1:] = sorted_draws[:, 1:] != sorted_draws[:, :-1]
    good = np.zeros_like(allowed)
    np.put_along_axis(good, by_value, is_first, axis=1)
    good &= allowed
    order = np.argsort(~good, axis=1, kind="stable")[:, :n]
    chosen = np.where(np.take_along_axis(good, order, axis=1), np.take_along_axis(draws, order, axis=1), NO_CANDIDATE)
    return np.pad(chosen, ((0, 0), (0, n - chosen.shape[1])), constant_values=NO_CANDIDATE)


def sample_negatives(
    keys: Sequence[bytes], n_available: int, users: np.ndarray, forbidden: np.ndarray, n: int
) -> np.ndarray:
    """`n` distinct items per query, uniform over 0 .. n_available - 1 without the user's forbidden ones, (B, n).

    `forbidden` holds sorted codes user * n_available + item. Where fewer than `n` items are allowed, all of them are
    taken and the rest is NO_CANDIDATE.
    """
    draws = (counter_draws(keys, n + n // 2 + 8) % np.uint64(n_available)).astype(np.int64)
    chosen = first_distinct(draws, ~_is_forbidden(draws, users, n_available, forbidden), n)
    for row in np.flatnonzero(chosen[:, -1] == NO_CANDIDATE).tolist():
        chosen[row] = _patiently(keys[row], n_available, int(users[row]), forbidden, n)
    return chosen.astype(np.int32)


def _is_forbidden(items: np.ndarray, users: np.ndarray, n_available: int, forbidden: np.ndarray) -> np.ndarray:
    codes = users[:, None].astype(np.int64) * n_available + items
    place = np.searchsorted(forbidden, codes)
    return forbidden[np.minimum(place, len(forbidden) - 1)] == codes if len(forbidden) else np.zeros_like(codes, bool)


def _patiently(key: bytes, n_available: int, user: int, forbidden: np.ndarray, n: int) -> np.ndarray:
    """The same draw for one query with few allowed items: a hashed permutation once drawing would be slow."""
    everything = np.arange(n_available)[None]
    allowed = everything[0][~_is_forbidden(everything, np.array([user]), n_available, forbidden)[0]]
    n_draws, blocks = n, 0
    found = np.zeros((1, 0), dtype=np.int64)
    while len(allowed) >= 2 * n and blocks < 4096:
        n_draws *= 2
        draws = (counter_draws([key], n_draws) % np.uint64(n_available)).astype(np.int64)
        found = first_distinct(draws, np.isin(draws, allowed), n)
        if found[0, -1] != NO_CANDIDATE:
            return np.asarray(found[0])
        blocks = n_draws // DRAWS_PER_BLOCK
    order = np.argsort(counter_draws([key], len(allowed))[0, : len(allowed)], kind="stable")[:n]
    return np.pad(allowed[order], (0, n - len(order)), constant_values=NO_CANDIDATE)


def hard_negatives(keys: Sequence[bytes], own_past: Sequence[np.ndarray], others: np.ndarray, n_own: int) -> np.ndarray:
    """At most `n_own` of the user's own other past items, then sampled ones, as many in all as `others` has columns.

    `own_past[b]` holds query b's distinct past items without the positive; which of them are taken is hashed too.
    """
    chosen = np.full_like(others, NO_CANDIDATE)
    for row, (key, own) in enumerate(zip(keys, own_past, strict=True)):
        order = np.argsort(counter_draws([b"own" + key], max(len(own), 1))[0, : len(own)], kind="stable")[:n_own]
        kept = np.concatenate([own[order], others[row, : others.shape[1] - len(order)]])
        chosen[row, : len(kept)] = kept
    return chosen
