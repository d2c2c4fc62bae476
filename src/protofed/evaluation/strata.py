"""Who benefits: groups of users, a per-user test that fits a handful of queries, and corrections for many tests."""

from itertools import product

import numpy as np
from jaxtyping import Bool, Float, Int, Num

from protofed.seeds import seed_of

TERTILES = ("low", "middle", "high")
MIN_QUERIES = 6
EXACT_UP_TO = 12  # 4,096 sign patterns
CHUNK = 1 << 21  # signs held at once


def tertiles(values: Num[np.ndarray, " U"], eligible: Bool[np.ndarray, " U"] | None = None) -> Int[np.ndarray, " U"]:
    """0, 1 or 2 for the low, middle and high third of the eligible users; -1 for the others and for NaN.

    Equal values go by the order of the users, earlier ones lower, so sizes differ by at most one and never by chance.
    """
    takes_part = ~np.isnan(values) if eligible is None else eligible & ~np.isnan(values)
    members = np.flatnonzero(takes_part)
    order = members[np.argsort(values[members], kind="stable")]
    groups = np.full(len(values), -1)
    for group, users in enumerate(np.array_split(order, 3)):
        groups[users] = group
    return groups


def cold_start(first_slice: Int[np.ndarray, " U"], t: int) -> Bool[np.ndarray, " U"]:
    """Users without an interaction before slice t."""
    return first_slice >= t


def strata(
    *,
    drift: Float[np.ndarray, " U"],
    activity: Num[np.ndarray, " U"],
    first_slice: Int[np.ndarray, " U"],
    t: int,
    eligible: Bool[np.ndarray, " U"],
) -> dict[str, Bool[np.ndarray, " U"]]:
    """The users of each stratum of slice t, among the eligible ones (those with a query).

    `drift` comes from the frozen backbone, so that every method meets the same groups; `activity` counts slice t alone.
    """
    new = cold_start(first_slice, t)
    groups = {"new_user": new & eligible, "returning": ~new & eligible}
    for name, values in (("drift", drift), ("activity", activity)):
        third = tertiles(values, eligible)
        groups |= {f"{name}_{label}": third == code for code, label in enumerate(TERTILES)}
    return groups


def group_mean(sums: Float[np.ndarray, " U"], counts: Int[np.ndarray, " U"], members: Bool[np.ndarray, " U"]) -> float:
    """The mean over the queries of a group's users; NaN if they have none."""
    n = counts[members].sum()
    return float(sums[members].sum() / n) if n else float("nan")


def sign_flip_p(differences: Float[np.ndarray, " N"], rng: np.random.Generator, *, draws: int = 9_999) -> float:
    """The two-sided p-value of "the paired differences are symmetric about 0".

    Up to 12 differences all sign patterns are counted; beyond, `draws` random ones plus the observed one.
    """
    n = len(differences)
    # Sums of the same numbers in another order differ in their last digits: those count as equal.
    bar = abs(differences.sum()) - 1e-9 * np.abs(differences).sum()
    if n <= EXACT_UP_TO:
        signs = np.array(list(product((-1.0, 1.0), repeat=n)))  # (2^n, n)
        return float((np.abs(signs @ differences) >= bar).mean())
    as_extreme, left, rows = 1, draws, max(1, CHUNK // n)
    while left > 0:
        signs = rng.integers(0, 2, size=(min(rows, left), n)) * 2.0 - 1.0
        as_extreme += int((np.abs(signs @ differences) >= bar).sum())
        left -= len(signs)
    return as_extreme / (draws + 1)


def per_user_p(
    differences: Float[np.ndarray, " N"],
    users: Int[np.ndarray, " N"],
    *,
    seed: int,
    min_queries: int = MIN_QUERIES,
    draws: int = 9_999,
) -> tuple[Int[np.ndarray, " U"], Float[np.ndarray, " U"], Float[np.ndarray, " U"]]:
    """Each user, ascending: its number, the mean difference, and the sign-flip p-value (NaN below `min_queries`).

    One difference per query, all slices together, seeds averaged first: the same query under another seed is no new
    evidence. Every user draws from a stream of its own, so who else is tested changes nothing.
    """
    order = np.argsort(users, kind="stable")
    ids, starts = np.unique(users[order], return_index=True)
    groups = np.split(differences[order], starts[1:]) if len(ids) else []
    p = np.full(len(ids), np.nan)
    for place, (user, group) in enumerate(zip(ids, groups, strict=True)):
        if len(group) >= min_queries:
            p[place] = sign_flip_p(group, np.random.default_rng(seed_of(seed, "sign-flip", int(user))), draws=draws)
    return ids, np.array([group.mean() for group in groups]), p


def benjamini_hochberg(p: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Adjusted p-values: rejecting those at most q keeps the expected share of false rejections at most q.

    NaN is a test that was not made: it stays NaN and does not count.
    """
    made, order, m = _ascending(p)
    scaled = p[order] * m / np.arange(1, m + 1)
    return _put_back(p, made, order, np.minimum.accumulate(scaled[::-1])[::-1])


def holm(p: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Adjusted p-values: rejecting those at most q keeps the chance of any false rejection at most q. NaN as above."""
    made, order, m = _ascending(p)
    return _put_back(p, made, order, np.maximum.accumulate(p[order] * np.arange(m, 0, -1)))


def _ascending(p: Float[np.ndarray, " N"]) -> tuple[Bool[np.ndarray, " N"], Int[np.ndarray, " M"], int]:
    made = ~np.isnan(p)
    members = np.flatnonzero(made)
    return made, members[np.argsort(p[members], kind="stable")], len(members)


def _put_back(
    p: Float[np.ndarray, " N"],
    made: Bool[np.ndarray, " N"],
    order: Int[np.ndarray, " M"],
    adjusted: Float[np.ndarray, " M"],
) -> Float[np.ndarray, " N"]:
    result = np.where(made, 1.0, np.nan)
    result[order] = np.minimum(adjusted, 1.0)
    return result
