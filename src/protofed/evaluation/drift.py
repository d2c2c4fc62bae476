"""How far a user's taste moved in a slice, told by the log alone: every method and seed meets the same groups."""

import numpy as np
from jaxtyping import Float, Int
from scipy.sparse import csr_matrix

from protofed.seeds import numpy_stream

WIDTH = 64


def item_vectors(
    users: Int[np.ndarray, " N"], items: Int[np.ndarray, " N"], n_items: int, *, width: int = WIDTH
) -> Float[np.ndarray, "I w"]:
    """Who met each item, as a vector of length 1: items met by the same users lie close. 0 for an item nobody met.

    The user-by-user vector is folded to `width` numbers with signs (a count sketch), which keeps angles on average.
    """
    met = np.unique(users * n_items + items)  # a user counts once for an item
    who, what = met // n_items, met % n_items
    codes = numpy_stream(0, "drift", width).integers(0, 2 * width, size=int(users.max(initial=-1)) + 1)[who]
    signs = np.where(codes % 2 == 0, 1.0, -1.0)
    folded = np.bincount(what * width + codes // 2, weights=signs, minlength=n_items * width)
    return _unit(folded.astype(np.float64).reshape(n_items, width))  # without events bincount forgets the weights' type


def user_drift(
    users: Int[np.ndarray, " N"], items: Int[np.ndarray, " N"], start: int, asked: Int[np.ndarray, " U"]
) -> Float[np.ndarray, " U"]:
    """1 - cos of the mean vectors of a user's items before event `start` of the log and from it on, between 0 and 2.

    Items are placed by who met them before `start`, so an item of the slice alone has no say. NaN for a user who has
    no placed item on one side. Few events make a mean restless: quiet users seem to drift more than busy ones.
    """
    n_items = int(items.max(initial=-1)) + 1
    vectors = item_vectors(users[:start], items[:start], n_items)
    sides = (slice(None, start), slice(start, None))
    before, after = (_unit(_sums(users[side], items[side], asked, vectors)) for side in sides)
    known = before.any(1) & after.any(1)
    return np.where(known, 1 - (before * after).sum(1), np.nan)


def _sums(users: np.ndarray, items: np.ndarray, asked: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """The summed vectors of each asked user's events."""
    n_users = int(max(users.max(initial=-1), asked.max(initial=-1))) + 1
    counts = csr_matrix((np.ones(len(users)), (users, items)), shape=(n_users, len(vectors)))
    return np.asarray(counts[asked] @ vectors)


def _unit(rows: Float[np.ndarray, "n w"]) -> Float[np.ndarray, "n w"]:
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.where(length > 1e-12, rows / np.where(length > 1e-12, length, 1.0), 0.0)
