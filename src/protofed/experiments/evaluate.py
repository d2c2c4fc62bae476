"""One state of one method against the queries of one slice: ranks, then tidy rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.evaluation.drift import user_drift
from protofed.evaluation.exposure import EVENTS, GROUPS, PLACES, popularity_groups, shares, top_places
from protofed.evaluation.ranking import hit_rate, ndcg, per_query, rank_among, rank_of_positive, user_totals
from protofed.methods.protocol import Method, World
from protofed.methods.scoring import personal_memory, popularity_prior
from protofed.slices.histories import Queries, moved, past_counts, trimmed
from protofed.slices.stream import SUBSETS, QuerySet, SliceStream, TimeSlice

CANDIDATES = ("sampled", "sampled_hard", "full", "full_unseen")
CELLS_PER_CHUNK = 8_000_000  # scores held at once
LARGEST_CHUNK = 512
LAST_RANK = 21  # stands for every rank that no metric tells from it: they end at 20

METRICS_SCHEMA = pa.schema(
    [
        ("slice_trained", pa.int32()),
        ("slice_tested", pa.int32()),
        ("split", pa.string()),
        ("candidates", pa.string()),
        ("subset", pa.string()),
        ("metric", pa.string()),
        ("value", pa.float64()),
        ("n_queries", pa.int64()),
        ("n_users", pa.int64()),
    ]
)
PER_USER_SCHEMA = pa.schema(
    [
        ("user", pa.string()),
        ("slice_trained", pa.int32()),
        ("slice_tested", pa.int32()),
        ("candidates", pa.string()),
        ("subset", pa.string()),
        ("n", pa.int64()),
        ("ndcg10_sum", pa.float64()),
        ("hr10_sum", pa.float64()),
        ("drift", pa.float64()),  # of A[t, t] alone, and null where it is not known
    ]
)
RANKS_SCHEMA = pa.schema(
    [
        ("slice", pa.int32()),
        ("user", pa.string()),
        *((kind, pa.uint8()) for kind in CANDIDATES),
        *((subset, pa.bool_()) for subset in SUBSETS),
    ]
)


@dataclass(frozen=True, slots=True)
class Answered:
    """The rank of every query's positive, per kind of candidates (0 where the kind does not apply)."""

    asked: QuerySet
    slice_trained: int
    ranks: dict[str, Int[Tensor, " B"]]
    places: Float[np.ndarray, " G"] | None = None  # of all Top-10 of the full ranking, by popularity of their items


@torch.no_grad()
def answer(
    method: Method[object],
    world: World,
    state: object,
    counts: Tensor,
    data: SliceStream,
    asked: QuerySet,
    trained: int,
    groups: Int[Tensor, " I"] | None = None,
) -> Answered:
    """Rank every query of the set with the state after slice `trained`; `counts` feed the popularity prior.

    With `groups` of items, the places each of them gets are counted, too.
    """
    device = world.backbone.items.device
    parts: dict[str, list[Tensor]] = {name: [] for name in CANDIDATES}
    places = np.zeros(len(GROUPS))
    by_length = np.argsort(data.past.before[asked.positions], kind="stable")  # short histories need short inputs
    size = min(max(1, CELLS_PER_CHUNK // max(asked.n_items, 1)), LARGEST_CHUNK)
    for chunk in (by_length[start : start + size] for start in range(0, len(by_length), size)):
        queries = moved(trimmed(data.queries(asked, chunk, world.config.backbone.history_length)), device)
        scores = switched(method.score(world, state, queries), world, queries, counts)
        for name, ranks in rank_all(scores, queries, asked, chunk).items():
            parts[name].append(ranks.cpu())
        if groups is not None:
            places += top_places(scores, groups).cpu().double().sum(0).numpy()
    empty = torch.zeros(0, dtype=torch.int64)
    unsorted = torch.from_numpy(np.argsort(by_length))
    found = {name: torch.cat([empty, *ranks])[unsorted] for name, ranks in parts.items()}
    return Answered(asked, trained, found, places if groups is not None else None)


def switched(scores: Float[Tensor, "B I"], world: World, queries: Queries, counts: Tensor) -> Float[Tensor, "B I"]:
    """Scores with the prior and the memory of the config on top, where those are on."""
    settings = world.config.scoring
    if settings.popularity_prior:
        scores = scores + popularity_prior(counts, queries.n_items, settings.popularity_prior).to(scores.device)
    if settings.personal_memory:
        weight, half_life = settings.personal_memory, settings.memory_half_life_days
        scores = scores + personal_memory(queries, weight=weight, half_life_days=half_life)
    return scores


def rank_all(
    scores: Float[Tensor, "B I"], queries: Queries, asked: QuerySet, chunk: np.ndarray
) -> dict[str, Int[Tensor, " B"]]:
    """The positive's rank among sampled, hard, all, and all not yet seen items."""
    device = scores.device
    positive = asked.positives[chunk].to(device)
    unseen = (past_counts(queries) == 0).scatter(1, positive[:, None], True)
    hard = rank_among(scores, positive, asked.hard[chunk].to(device))
    repeat = torch.from_numpy(asked.subsets["repeat"][chunk]).to(device)
    return {
        "sampled": rank_among(scores, positive, asked.negatives[chunk].to(device)),
        "sampled_hard": torch.where(repeat, hard, 0),
        "full": rank_of_positive(scores, positive),
        "full_unseen": rank_of_positive(scores, positive, unseen),
    }


def applies(kind: str, subset: str) -> bool:
    """Whether the queries of a subset have this kind of candidates; hard ones exist for repeats alone."""
    return kind != "sampled_hard" or subset == "repeat"


def members(answered: Answered, kind: str) -> Iterator[tuple[str, np.ndarray]]:
    """Each subset's queries that have this kind of candidates, where there are any."""
    for name, chosen in answered.asked.subsets.items():
        if applies(kind, name) and chosen.any():
            yield name, np.flatnonzero(chosen)


def metric_rows(answered: Answered) -> list[dict[str, Any]]:
    """One row per kind of candidates, subset and metric; a subset without queries has no row."""
    rows: list[dict[str, Any]] = []
    for kind in CANDIDATES:
        values = per_query(answered.ranks[kind])
        for subset, chosen in members(answered, kind):
            about = about_cell(answered, kind, subset, chosen)
            rows += [about | {"metric": name, "value": float(value[chosen].mean())} for name, value in values.items()]
    return rows


def about_cell(answered: Answered, kind: str, subset: str, chosen: Int[np.ndarray, " n"]) -> dict[str, Any]:
    """What the rows of some queries say besides metric and value."""
    asked = answered.asked
    return {
        "slice_trained": answered.slice_trained,
        "slice_tested": asked.slice_index,
        "split": asked.part,
        "candidates": kind,
        "subset": subset,
        "n_queries": len(chosen),
        "n_users": int(np.count_nonzero(np.bincount(asked.users.numpy()[chosen]))),  # faster than sorting
    }


def item_groups(data: SliceStream, asked: QuerySet) -> Int[Tensor, " I"]:
    """The popularity of every available item: by train events up to the slice, as a fifth, three fifths, a fifth."""
    ends = [data.bounds[index].part("train") for index in range(asked.slice_index + 1)]
    items = torch.cat([data.log.items[start:end] for start, end in ends])
    return popularity_groups(torch.bincount(items.long(), minlength=asked.n_items))


def exposure_rows(answered: Answered, groups: Int[Tensor, " I"]) -> list[dict[str, Any]]:
    """Each group's share of all Top-10 places, and of the test events; nothing without queries."""
    asked = answered.asked
    if answered.places is None or not len(asked):
        return []
    events = torch.bincount(groups[asked.positives], minlength=len(GROUPS)).numpy()
    about = about_cell(answered, "full", "all", np.arange(len(asked)))
    told = ((PLACES, shares(answered.places)), (EVENTS, shares(events)))
    named = [(names[group], part) for names, found in told for group, part in zip(GROUPS, found, strict=True)]
    return [about | {"metric": name, "value": float(part)} for name, part in named]


def drift_of(data: SliceStream, asked: QuerySet) -> Float[np.ndarray, " U"]:
    """How far every user of the log who asks moved in the slice; NaN for the others, and where it is not known."""
    bounds, who = data.bounds[asked.slice_index], np.unique(asked.users.numpy())
    users, items = (column[: bounds.end].numpy().astype(np.int64) for column in (data.log.users, data.log.items))
    drift = np.full(data.log.n_users, np.nan)
    drift[who] = user_drift(users, items, bounds.start, who)
    return drift


def per_user_rows(answered: Answered, user_ids: pa.Array, drift: Float[np.ndarray, " U"] | None = None) -> pa.Table:
    """Per user, kind of candidates and subset: queries, summed NDCG@10, summed HR@10, and the user's drift."""
    tables = []
    for kind in CANDIDATES:
        ranks = answered.ranks[kind]
        for subset, chosen in members(answered, kind):
            users = answered.asked.users[chosen]
            ids, counts, ndcg_sums = user_totals(ndcg(ranks[chosen], 10), users)
            hr_sums = user_totals(hit_rate(ranks[chosen], 10), users)[2]
            n = len(ids)
            columns = [
                user_ids.take(pa.array(ids.numpy())).cast(pa.string()),
                pa.array(np.full(n, answered.slice_trained, dtype=np.int32)),
                pa.array(np.full(n, answered.asked.slice_index, dtype=np.int32)),
                pa.array([kind] * n, pa.string()),
                pa.array([subset] * n, pa.string()),
                pa.array(counts.numpy().astype(np.int64)),
                pa.array(ndcg_sums.numpy().astype(np.float64)),
                pa.array(hr_sums.numpy().astype(np.float64)),
                pa.array(np.full(n, np.nan) if drift is None else drift[ids.numpy()], pa.float64(), from_pandas=True),
            ]
            tables.append(pa.table(columns, schema=PER_USER_SCHEMA))
    return pa.concat_tables(tables) if tables else PER_USER_SCHEMA.empty_table()


def rank_rows(answered: Answered, user_ids: pa.Array) -> pa.Table:
    """Per query, in the set's own order: its user, its ranks up to LAST_RANK, and the subsets it is in."""
    asked = answered.asked
    columns = [
        pa.array(np.full(len(asked), asked.slice_index, dtype=np.int32)),
        user_ids.take(pa.array(asked.users.numpy())).cast(pa.string()),
        *(pa.array(answered.ranks[kind].clamp(max=LAST_RANK).numpy().astype(np.uint8)) for kind in CANDIDATES),
        *(pa.array(asked.subsets[subset]) for subset in SUBSETS),
    ]
    return pa.table(columns, schema=RANKS_SCHEMA)


def evaluate(
    method: Method[Any], world: World, state: Any, slice_: TimeSlice, data: SliceStream, *, diagonal: bool = False
) -> dict[str, pa.Table]:
    """Column t of A[s, t] and the validation part of slice t; per user where intervals need it (s = t, and t = T).

    The ranks behind A[t, t] go with them, query by query. `diagonal`: A[t, t] and nothing else.
    """
    counts, trained = slice_.train_counts(), slice_.index
    rows: list[dict[str, Any]] = []
    users, ranks = [], []
    for tested in [trained] if diagonal else range(data.n_slices + 1):
        for part in ("val", "test") if tested == trained and not diagonal else ("test",):
            asked = data.query_set(tested, part)
            now = part == "test" and tested == trained
            groups = item_groups(data, asked) if now else None
            answered = answer(method, world, state, counts, data, asked, trained, groups)
            rows += metric_rows(answered)
            if part == "test" and (tested == trained or trained == data.n_slices):
                drift = drift_of(data, asked) if now else None
                users.append(per_user_rows(answered, data.log.user_ids, drift))
            if groups is not None:
                rows += exposure_rows(answered, groups)
                ranks.append(rank_rows(answered, data.log.user_ids))
        world.progress(f"slice {tested}", tested + 1, data.n_slices + 1, f"questions of slice {tested}")
    metrics = pa.Table.from_pylist(rows, schema=METRICS_SCHEMA)
    return {"metrics": metrics, "per_user": pa.concat_tables(users), "ranks": pa.concat_tables(ranks)}
