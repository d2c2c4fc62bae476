"""What a model keeps, forgets and carries over, read off the matrix A of every slice tested after every slice trained.

`A[s, t]` is the metric (NDCG@10) on the queries of slice s with the model as it was after slice t; s and t run from 0,
the base block, to T. The row of a slice without queries is NaN: it is left out of every average, with a warning.
"""

import logging

import numpy as np
from jaxtyping import Float

logger = logging.getLogger(__name__)


def accuracy(a: Float[np.ndarray, "S S"]) -> float:
    """The headline: mean of A[t, t] over t = 1..T, each slice tested right after it was learned."""
    return _mean(np.diagonal(a)[1:], first=1, what="accuracy")


def final_accuracy(a: Float[np.ndarray, "S S"]) -> float:
    """Mean of A[s, T] over s = 0..T: the final model on every slice, the base block too."""
    return _mean(a[:, -1], first=0, what="final accuracy")


def af(a: Float[np.ndarray, "S S"]) -> float:
    """Average forgetting: mean over s = 0..T-1 of max A[s, t'] - A[s, T], where t' = s..T-1. It can be negative."""
    return _mean(_losses(a), first=0, what="AF") if len(a) > 1 else 0.0


def af_literal(a: Float[np.ndarray, "S S"]) -> float:
    """Average forgetting as printed: t' = 0..T-1, so the best value may predate the learning of slice s."""
    return _mean(_losses(a, since_learned=False), first=0, what="literal AF") if len(a) > 1 else 0.0


def af_over_time(a: Float[np.ndarray, "S S"]) -> Float[np.ndarray, " S"]:
    """AF(t) for t = 0..T, as if the stream had ended with slice t; AF(0) = 0 and AF(T) = `af`."""
    earlier = [_mean_of_known(_losses(a[: t + 1, : t + 1])) for t in range(1, len(a) - 1)]
    return np.array([0.0, *earlier, af(a)][: len(a)])  # only the last one warns


def bwt(a: Float[np.ndarray, "S S"]) -> float:
    """Backward transfer: mean over s = 0..T-1 of A[s, T] - A[s, s]. Never below -`af`."""
    return _mean(a[:-1, -1] - np.diagonal(a)[:-1], first=0, what="BWT")


def fwt(a: Float[np.ndarray, "S S"], scratch: Float[np.ndarray, " S"]) -> float:
    """Forward transfer: mean over s = 1..T of A[s, s-1] - scratch[s], slice s before it is learned.

    `scratch[s]` is what a model that starts from nothing scores on slice s: an untrained one (average its seeds first),
    or `base_scratch`. `scratch[0]` is not read.
    """
    return _mean(np.diagonal(a, offset=-1) - scratch[1:], first=1, what="FWT")


def base_scratch(a: Float[np.ndarray, "S S"]) -> Float[np.ndarray, " S"]:
    """The base model as the scratch of `fwt`, which then counts only what slices 1..s-1 added."""
    return a[:, 0]


def _losses(a: Float[np.ndarray, "S S"], *, since_learned: bool = True) -> Float[np.ndarray, " T"]:
    """How far each slice s = 0..T-1 has fallen from its best by the end."""
    end = len(a) - 1
    return np.array([a[s, (s if since_learned else 0) : end].max() - a[s, end] for s in range(end)])


def _mean(terms: Float[np.ndarray, " N"], *, first: int, what: str) -> float:
    """The mean of the known terms, with a warning that names the others; `first` is the slice of the first term."""
    if empty := [first + int(place) for place in np.flatnonzero(np.isnan(terms))]:
        logger.warning("%s leaves out slices without queries: %s", what, ", ".join(map(str, empty)))
    return _mean_of_known(terms)


def _mean_of_known(terms: Float[np.ndarray, " N"]) -> float:
    known = terms[~np.isnan(terms)]
    return float(known.mean()) if len(known) else float("nan")
