"""Negatives are distinct, allowed, uniform, and fixed by a hash of the query's original identifiers alone."""

import hashlib

import numpy as np
import pytest
from scipy.stats import chi2

from protofed.slices.candidates import (
    NO_CANDIDATE,
    counter_draws,
    first_distinct,
    hard_negatives,
    query_key,
    sample_negatives,
)


def keys_of(n: int, slice_index: int = 1, dataset: str = "toy") -> list[bytes]:
    return [query_key(dataset, slice_index, f"user-{row}", f"item-{row % 7}", 1000 + row) for row in range(n)]


def codes(forbidden: dict[int, set[int]], n_available: int) -> np.ndarray:
    return np.array(sorted(user * n_available + item for user in forbidden for item in forbidden[user]), dtype=np.int64)


def drawn_number(key: bytes, place: int) -> int:
    """The place-th 64-bit number of a key: four to a SHA-256 block of the key and an 8-byte counter."""
    block = hashlib.sha256(key + (place // 4).to_bytes(8, "big")).digest()
    return int.from_bytes(block[8 * (place % 4) : 8 * (place % 4) + 8], "big")


def sampled_by_hand(key: bytes, n_available: int, forbidden: set[int], n: int) -> list[int]:
    """Number after number until n distinct allowed items are found."""
    found: list[int] = []
    place = 0
    while len(found) < n:
        item = drawn_number(key, place) % n_available
        if item not in forbidden and item not in found:
            found.append(item)
        place += 1
    return found


def unevenness(counts: np.ndarray, n_queries: int, n: int) -> float:
    """Pearson's statistic, scaled for drawing without replacement: chi-square with len(counts) - 1 degrees."""
    size = len(counts)
    expected = n_queries * n / size
    return float((size - 1) / size * ((counts - expected) ** 2).sum() / (expected * (1 - n / size)))


def test_the_key_is_the_hash_of_the_original_identifiers():
    by_hand = hashlib.sha256(b"('gowalla', 3, '17', 'cafe', 1234567890)").digest()
    assert query_key("gowalla", 3, "17", "cafe", 1234567890) == by_hand
    assert query_key("gowalla", 3, 17, "cafe", 1234567890) == by_hand  # integer ids are read as text


def test_each_part_of_the_key_changes_it():
    queries = [
        ("toy", 1, "u", "i", 5),
        ("other", 1, "u", "i", 5),
        ("toy", 2, "u", "i", 5),
        ("toy", 1, "v", "i", 5),
        ("toy", 1, "u", "j", 5),
        ("toy", 1, "u", "i", 6),
        ("toy", 1, "u', 'i", "", 5),
    ]
    assert len({query_key(*query) for query in queries}) == len(queries)


def test_counter_draws_are_sha256_of_the_key_and_the_counter():
    keys = keys_of(3)
    draws = counter_draws(keys, 6)
    assert draws.shape == (3, 8)  # whole blocks of four
    assert draws.tolist() == [[drawn_number(key, place) for place in range(8)] for key in keys]
    assert counter_draws(keys, 4, first_block=1).tolist() == draws[:, 4:].tolist()
    assert counter_draws([], 6).shape == (0, 8)


def test_the_numbers_of_one_key_are_frozen():
    frozen = "36b1e6f5da1138ef f03121a6e0fd5459 ecd0dea49cc7d0d9 3a13c3b477ff48b8"
    draws = counter_draws([query_key("toy", 1, "ann", "tea", 100)], 4)
    assert draws.tolist() == [[int(word, 16) for word in frozen.split()]]


def test_the_first_distinct_allowed_draws_are_kept_in_their_order():
    draws = np.array([[5, 3, 5, 9, 3, 1], [2, 2, 2, 2, 2, 2]])
    allowed = draws != 9
    assert first_distinct(draws, allowed, 3).tolist() == [[5, 3, 1], [2, NO_CANDIDATE, NO_CANDIDATE]]
    assert first_distinct(draws[:, :2], allowed[:, :2], 4).tolist() == [[5, 3, -1, -1], [2, -1, -1, -1]]


@pytest.mark.parametrize(("n_available", "n"), [(1000, 99), (300, 99), (60, 20), (40, 4), (500, 1)])
def test_negatives_are_the_first_distinct_allowed_numbers_of_each_query(n_available, n):
    rng = np.random.default_rng(0)
    users = rng.integers(0, 5, 40)
    forbidden = {user: set(rng.integers(0, n_available, n_available // 5).tolist()) for user in range(5)}
    found = sample_negatives(keys_of(40), n_available, users, codes(forbidden, n_available), n)
    by_hand = [
        sampled_by_hand(key, n_available, forbidden[user], n)
        for key, user in zip(keys_of(40), users.tolist(), strict=True)
    ]
    assert found.tolist() == by_hand


@pytest.mark.parametrize("n_allowed", [0, 1, 8, 19, 20, 21, 30, 39, 40, 41, 100])
@pytest.mark.parametrize("n_available", [120, 4000])
def test_however_few_items_are_allowed_as_many_as_possible_are_taken_once_each(n_available, n_allowed):
    n = 20
    allowed = set(np.random.default_rng(n_allowed).permutation(n_available)[:n_allowed].tolist())
    forbidden = codes({0: set(range(n_available)) - allowed, 1: set()}, n_available)
    users = np.zeros(6, dtype=np.int64)
    found = sample_negatives(keys_of(6), n_available, users, forbidden, n)
    for row in found.tolist():
        real = [item for item in row if item != NO_CANDIDATE]
        assert row == real + [NO_CANDIDATE] * (n - len(real))
        assert len(real) == len(set(real)) == min(n, n_allowed)
        assert set(real) <= allowed
    assert np.array_equal(found, sample_negatives(keys_of(6), n_available, users, forbidden, n))
    if n <= n_allowed - 5:
        assert len({tuple(sorted(row)) for row in found.tolist()}) == 6  # each key its own draw


def test_nothing_forbidden_is_allowed():
    found = sample_negatives(keys_of(2), 3, np.array([0, 1]), np.zeros(0, dtype=np.int64), 5)
    assert [sorted(row) for row in found.tolist()] == [[-1, -1, 0, 1, 2]] * 2


def test_no_query_has_no_negatives():
    assert sample_negatives([], 50, np.zeros(0, dtype=np.int64), np.array([3]), 10).shape == (0, 10)


def test_a_query_is_drawn_alike_alone_and_among_others():
    keys, users = keys_of(30), np.arange(30) % 4
    forbidden = codes({0: {1, 2}, 1: set(range(0, 90)), 2: set(range(70)), 3: set()}, 100)
    together = sample_negatives(keys, 100, users, forbidden, 12)
    alone = [sample_negatives([keys[row]], 100, users[row : row + 1], forbidden, 12)[0] for row in range(30)]
    assert np.array_equal(together, np.stack(alone))


@pytest.mark.parametrize("change", [{"slice_index": 2}, {"dataset": "other"}])
def test_another_slice_or_data_set_draws_other_negatives(change):
    nothing, users = np.zeros(0, dtype=np.int64), np.zeros(20, dtype=np.int64)
    one, other = (sample_negatives(keys, 500, users, nothing, 20) for keys in (keys_of(20), keys_of(20, **change)))
    assert all(set(left) != set(right) for left, right in zip(one.tolist(), other.tolist(), strict=True))


# Nothing here is random: the keys are fixed. The bound is the 99.9 % quantile, so one honest choice of keys in a
# thousand would fail, and a preference of 20 % for half of the items does.
@pytest.mark.parametrize(
    ("n_available", "n_allowed", "n"),
    [
        (50, 50, 10),  # a single pass
        (200, 50, 10),  # mostly forbidden: further passes
        (60, 50, 32),  # fewer than 2n allowed: some queries by passes, some by a hashed permutation
        (2000, 50, 40),  # a hashed permutation
    ],
)
def test_every_allowed_item_is_drawn_equally_often(n_available, n_allowed, n):
    n_queries = 2000
    allowed = np.sort(np.random.default_rng(3).permutation(n_available)[:n_allowed])
    forbidden = codes({0: set(range(n_available)) - set(allowed.tolist())}, n_available)
    found = sample_negatives(keys_of(n_queries), n_available, np.zeros(n_queries, dtype=np.int64), forbidden, n)
    counts = np.bincount(found.ravel(), minlength=n_available)[allowed]
    assert counts.sum() == n_queries * n
    assert unevenness(counts, n_queries, n) < chi2.ppf(0.999, n_allowed - 1)
    first = np.bincount(found[:, 0], minlength=n_available)[allowed]
    assert unevenness(first, n_queries, 1) < chi2.ppf(0.999, n_allowed - 1)


def test_hard_negatives_are_own_past_items_first_then_the_sampled_ones():
    others = np.arange(100, 110)[None].repeat(4, 0)
    own = [np.arange(20), np.array([7, 8]), np.zeros(0, dtype=np.int64), np.arange(5)]
    found = hard_negatives(keys_of(4), own, others, 5)
    for row, past in zip(found.tolist(), own, strict=True):
        n_own = min(5, len(past))
        assert len(set(row[:n_own])) == n_own
        assert set(row[:n_own]) <= set(past.tolist())
        assert row[n_own:] == list(range(100, 110 - n_own))


def test_which_own_items_are_hard_negatives_is_hashed_and_uniform():
    n_queries, keys = 3000, keys_of(3000)
    own = [np.arange(40)] * n_queries
    found = hard_negatives(keys, own, np.full((n_queries, 20), 99), 10)[:, :10]
    assert np.array_equal(found, hard_negatives(keys, own, np.full((n_queries, 20), 99), 10)[:, :10])
    assert unevenness(np.bincount(found.ravel(), minlength=40), n_queries, 10) < chi2.ppf(0.999, 39)
    by_hash = sorted(range(40), key=lambda place: drawn_number(b"own" + keys[0], place))
    assert found[0].tolist() == by_hash[:10]


def test_padding_stays_at_the_end_of_hard_negatives():
    found = hard_negatives(keys_of(1), [np.array([4, 5])], np.array([[8, 9, NO_CANDIDATE, NO_CANDIDATE]]), 2)
    assert sorted(found[0, :2].tolist()) == [4, 5]
    assert found[0, 2:].tolist() == [8, 9]
