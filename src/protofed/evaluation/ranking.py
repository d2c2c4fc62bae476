"""Where the positive lands among its candidates, and what that is worth: HR, NDCG and MRR at 5, 10 and 20."""

from collections.abc import Callable, Mapping
from math import inf, log2
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

Ties = Literal["pessimistic", "half"]
PerQuery = Callable[[Tensor, int], Tensor]


def rank_of_positive(
    scores: Float[Tensor, "B I"],
    positive: Int[Tensor, " B"],
    mask: Bool[Tensor, "B I"] | None = None,
    *,
    ties: Ties = "pessimistic",
) -> Num[Tensor, " B"]:
    """The rank, from 1, of the candidate in column `positive` of each row, higher scores first.

    A tie puts the positive last among its equals; `ties="half"` gives the expected rank under a random order instead, a
    fraction. Candidates where `mask` is false do not exist; the positive itself always does. A positive scored NaN
    takes the last place; a negative scored NaN stands above nobody.
    """
    column = positive.long().unsqueeze(1)  # (B, 1)
    score = scores.gather(1, column)  # (B, 1)
    valid = None if mask is None else mask.scatter(1, column, True)

    def count(hits: Bool[Tensor, "B I"]) -> Int[Tensor, " B"]:
        # 32 bits: summing booleans into 64 takes seven times as long, and full rankings spend their time here.
        return hits.sum(1, dtype=torch.int32).long()

    def above(hits: Bool[Tensor, "B I"]) -> Int[Tensor, " B"]:
        return count(hits if valid is None else hits & valid)

    rank = above(scores >= score)  # the positive itself is the 1
    if ties == "half":
        rank = (1 + above(scores > score) + rank) / 2
    last = scores.shape[1] if valid is None else count(valid)
    return torch.where(score.isnan().squeeze(1), last, rank)


def rank_among(
    scores: Float[Tensor, "B I"], positive: Int[Tensor, " B"], negatives: Int[Tensor, "B n"]
) -> Int[Tensor, " B"]:
    """The rank of column `positive` among itself and the columns `negatives`; a negative below 0 does not exist."""
    columns = torch.cat([positive[:, None], negatives], dim=1)
    first = torch.zeros_like(positive)
    return rank_of_positive(scores.gather(1, columns.clamp(min=0)), first, columns >= 0)


def hit_rate(ranks: Num[Tensor, " B"], k: int) -> Float[Tensor, " B"]:
    """1 for each query whose positive is among the first k, else 0."""
    return (ranks <= k).double()


def ndcg(ranks: Num[Tensor, " B"], k: int) -> Float[Tensor, " B"]:
    """1 / log2(rank + 1) for each query whose positive is among the first k, else 0."""
    return hit_rate(ranks, k) / torch.log2(ranks.double() + 1)


def mrr(ranks: Num[Tensor, " B"], k: int) -> Float[Tensor, " B"]:
    """1 / rank for each query whose positive is among the first k, else 0."""
    return hit_rate(ranks, k) / ranks.double()


METRICS: Mapping[str, tuple[PerQuery, int]] = {
    "hr@5": (hit_rate, 5),
    "hr@10": (hit_rate, 10),
    "hr@20": (hit_rate, 20),
    "ndcg@5": (ndcg, 5),
    "ndcg@10": (ndcg, 10),
    "ndcg@20": (ndcg, 20),
    "mrr@5": (mrr, 5),
    "mrr@10": (mrr, 10),
    "mrr@20": (mrr, 20),
}


def per_query(ranks: Num[Tensor, " B"]) -> dict[str, Float[Tensor, " B"]]:
    """Every metric's value for every query."""
    return {name: metric(ranks, k) for name, (metric, k) in METRICS.items()}


def summarise(ranks: Num[Tensor, " B"]) -> dict[str, float]:
    """Every metric's mean over queries (micro); NaN where there are no queries, never 0."""
    return {name: float(values.mean()) for name, values in per_query(ranks).items()}


def summarise_by_user(ranks: Num[Tensor, " B"], users: Int[Tensor, " B"]) -> dict[str, float]:
    """Every metric's mean over users of the user's own mean (macro); users without a query are absent."""
    means = {}
    for name, values in per_query(ranks).items():
        _, counts, sums = user_totals(values, users)
        means[name] = float((sums / counts).mean())
    return means


def user_totals(
    values: Float[Tensor, " B"], users: Int[Tensor, " B"]
) -> tuple[Int[Tensor, " U"], Int[Tensor, " U"], Float[Tensor, " U"]]:
    """Each user that has a query, ascending: its number, how many queries it has, and the sum of their values."""
    ids, place, counts = torch.unique(users.cpu(), return_inverse=True, return_counts=True)
    # On the CPU: the order of atomic additions on an accelerator would move the last digits from run to run.
    sums = torch.bincount(place, weights=values.detach().cpu().double(), minlength=len(ids))
    return ids, counts, sums.double()  # without queries bincount forgets the type of the weights


def uniform_reference(n_candidates: int) -> dict[str, float]:
    """What a ranker that shuffles `n_candidates` candidates scores on average."""
    return summarise(torch.arange(1, n_candidates + 1))


GAINS = tuple(1 / log2(rank + 1) for rank in range(1, 11))  # what a hit at each of the ten ranks adds to NDCG@10
LEAST_NDCG_PER_HIT = sum(GAINS) / 10
SPREAD = (sum(gain**2 for gain in GAINS) / 10 - LEAST_NDCG_PER_HIT**2) ** 0.5  # of one hit at any of the ten ranks
BY_CHANCE = 3  # standard deviations that few hits may be below
PILED_UP = (
    "hits pile up low in the list, as no working ranker's do; look for tied scores, few queries or a metric computed "
    "another way"
)


def check_ndcg_hr_ratio(ndcg10: float, hr10: float, queries: int | float = inf) -> str | None:
    """A warning if NDCG@10 / HR@10 is below 0.4544 by more than chance, else None.

    A ranker whose positives land on rank 1 at least as often as on 2, on 2 as often as on 3, and so on to 10, cannot be
    below, but for the luck of few hits. Without a hit there is nothing to judge.
    """
    if not hr10 > 0:
        return None
    luck = BY_CHANCE * SPREAD / (hr10 * queries) ** 0.5
    if not ndcg10 / hr10 < LEAST_NDCG_PER_HIT - luck - 1e-9:  # the slack is for rounding alone
        return None
    return f"NDCG@10 / HR@10 is {ndcg10 / hr10:.4f}, below {LEAST_NDCG_PER_HIT:.4f}: {PILED_UP}"
