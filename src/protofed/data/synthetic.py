"""A drifting toy world whose right answers are known; used by tests, docs and `make run`.

Users belong to clusters and some move slowly to another one; sessions have interests of their own; items and users
arrive; people repeat themselves and follow item-to-item paths; popularity shifts. docs/synthetic.md has the formulas.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from math import log
from typing import TypeVar

import pyarrow as pa
import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from protofed.data.interactions import first_appearance, from_codes
from protofed.data.synthetic_truth import (
    START,
    DriftingWorld,
    EventKind,
    ItemTruth,
    Truth,
    UserTruth,
    WorldConfig,
    alive_logits,
    cluster_at,
    drift_progress,
    follow_logits,
    interest_logits,
    interest_probabilities,
    oracle_scores,
    taste_at,
    taste_logits,
)
from protofed.errors import ConfigError
from protofed.seeds import stream

__all__ = [
    "PRESETS",
    "DriftingWorld",
    "EventKind",
    "WorldConfig",
    "cluster_at",
    "drift_progress",
    "drifting_world",
    "oracle_scores",
    "preset",
    "taste_at",
]

PRESETS: Mapping[str, WorldConfig] = {
    "default": WorldConfig(),
    "tiny": WorldConfig(
        n_users=80, n_items=120, n_clusters=4, latent_dim=8, span_days=60.0, events_per_user=44.0, burst_niches=3
    ),
    "no-drift": WorldConfig(drift_share=0.0),
    "bursty": WorldConfig(burst_share=0.6, session_length=8.0),
}
LATEST_BIRTH = 0.8  # as a share of the span: the last to arrive still have a fifth of it to live in
CELLS_AT_ONCE = 1 << 17  # a draw stays in the processor's cache, three times faster than with 1 << 22
Records = TypeVar("Records", UserTruth, ItemTruth)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Who acts when: events grouped by user, in time order."""

    users: Int[Tensor, " N"]
    order: Int[Tensor, " N"]  # 0 for a user's first event, then 1, 2, ...
    times: Int[Tensor, " N"]  # unix seconds, strictly increasing within a user
    sessions: Int[Tensor, " N"]  # numbered through all users
    opens: Bool[Tensor, " N"]  # the event is the first of its session


def preset(name: str) -> WorldConfig:
    """The parameters of a named world."""
    if name not in PRESETS:
        nearest = get_close_matches(name, PRESETS, n=1, cutoff=0)[0]
        raise ConfigError(f"no synthetic world {name!r}; did you mean {nearest!r}? there are: {', '.join(PRESETS)}")
    return PRESETS[name]


def drifting_world(config: WorldConfig, rng: Generator) -> DriftingWorld:
    """A log named "synthetic" and the truth behind it.

    Each phenomenon draws from its own stream, so changing one parameter leaves the draws of the others in place.
    """
    seed = int(torch.randint(2**62, (), generator=rng))
    centres = torch.linalg.qr(_normal(stream(seed, "centres"), config.latent_dim, config.n_clusters))[0].T
    truth = Truth(config, centres, _draw_users(config, seed), _draw_items(config, centres, seed))
    timeline = _draw_timeline(truth, seed)
    interests = _draw_interests(truth, timeline, seed)
    kinds = _draw_kinds(config, timeline, interests, seed)
    items = _walk(truth, timeline, kinds, _draw_items_without_memory(truth, timeline, kinds, interests, seed), seed)
    return _as_world(truth, timeline, items, kinds, interests)


def _uniform(rng: Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=rng, dtype=torch.float64)


def _normal(rng: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng, dtype=torch.float64)


def _exact_share(share: float, n: int, rng: Generator) -> Bool[Tensor, " n"]:
    """A random choice of round(share * n) out of n."""
    return torch.randperm(n, generator=rng) < round(share * n)


def _draw_births(span: int, newcomers: Bool[Tensor, " n"], rng: Generator) -> Int[Tensor, " n"]:
    """The start of the world, or for newcomers an instant spread evenly over the time up to the latest birth."""
    late = 1 + (LATEST_BIRTH * span * _uniform(rng, len(newcomers))).long()
    return START + late * newcomers


def _draw_users(config: WorldConfig, seed: int) -> UserTruth:
    """Clusters, moves, arrivals and personal offsets."""
    n, k = config.n_users, config.n_clusters
    first = torch.randint(k, (n,), generator=stream(seed, "clusters"))
    drifting = _exact_share(config.drift_share if config.drift_size else 0.0, n, stream(seed, "drifting"))
    move = 1 + torch.randint(max(k - 1, 1), (n,), generator=stream(seed, "moves"))
    newcomers = _exact_share(config.new_user_share, n, stream(seed, "new-users"))
    latest_onset = 1 - config.drift_duration
    onset = config.drift_onset + (latest_onset - config.drift_onset) * _uniform(stream(seed, "onsets"), n)
    personal = config.user_spread * _normal(stream(seed, "personal"), n, config.latent_dim) / config.latent_dim**0.5
    births = _draw_births(config.span, newcomers, stream(seed, "user-births"))
    return UserTruth(first, (first + move * drifting) % k, drifting, births, onset, personal)


def _draw_items(config: WorldConfig, centres: Float[Tensor, "K d"], seed: int) -> ItemTruth:
    """Categories of equal size, each a ring, with vectors, births and two popularity rankings."""
    n, k = config.n_items, config.n_clusters
    codes = torch.arange(n)
    category = codes % k
    always = config.n_niches  # one item of each niche is there from the start, so that every niche can be chosen
    late_share = min(1.0, config.new_item_share * n / max(n - always, 1))
    newcomers = torch.zeros(n, dtype=torch.bool)
    newcomers[always:] = _exact_share(late_share, n - always, stream(seed, "new-items"))
    offsets = config.item_spread * _normal(stream(seed, "items"), n, config.latent_dim) / config.latent_dim**0.5
    ranks = (1 + torch.randperm(n, generator=stream(seed, "ranks", when)).double() for when in ("start", "end"))
    return ItemTruth(
        category,
        codes % config.n_niches,
        _draw_births(config.span, newcomers, stream(seed, "item-births")),
        centres[category] + offsets,
        codes // k,
        torch.bincount(category, minlength=k)[category],
        *(rank.log() for rank in ranks),
    )


def _draw_timeline(truth: Truth, seed: int) -> Timeline:
    """Sessions spread evenly over each user's time in the world, further apart than any pause inside one."""
    config, life = truth.config, START + truth.config.span - truth.users.births
    counts = _draw_counts(config, life, stream(seed, "activity"))
    users = torch.arange(config.n_users).repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    order = torch.arange(len(users)) - first[users]
    opens = (order == 0) | (_uniform(stream(seed, "sessions"), len(users)) < 1 / config.session_length)
    pauses = (-config.event_gap_seconds * (1 - _uniform(stream(seed, "pauses"), len(users))).log()).long() + 1
    steps = torch.where(opens, config.session_gap + 1, pauses.clamp(max=config.session_gap)) * (order > 0)
    busy = torch.zeros_like(life).index_add_(0, users, steps)  # the least time the user's events can take
    if bool((busy >= life).any()):
        raise ConfigError(
            f"synthetic.span_days = {config.span_days:g} is too short for {config.events_per_user:g} events per user; "
            "raise it, or lower events_per_user or session_gap_minutes"
        )
    idle = _draw_sorted(users[opens], stream(seed, "starts")) * (life - busy)[users[opens]]  # before each session
    sessions = opens.cumsum(0) - 1
    elapsed = steps.cumsum(0)
    times = truth.users.births[users] + idle.long()[sessions] + elapsed - elapsed[first][users]
    return Timeline(users, order, times, sessions, opens)


def _draw_counts(config: WorldConfig, life: Int[Tensor, " U"], rng: Generator) -> Int[Tensor, " U"]:
    """How many events each user has: in proportion to the time in the world, log-normal between users, at least 1."""
    spread = config.activity_spread
    activity = (spread * _normal(rng, len(life)) - spread**2 / 2).exp()
    return (config.events_per_user * activity * life / config.span).round().long().clamp(min=1)


def _draw_sorted(groups: Int[Tensor, " S"], rng: Generator) -> Float[Tensor, " S"]:
    """Uniform numbers, ascending within each group; groups must ascend."""
    return (groups + _uniform(rng, len(groups))).sort().values - groups


def _draw_interests(truth: Truth, timeline: Timeline, seed: int) -> Int[Tensor, " N"]:
    """The interest of each event's session, a niche outside the user's cluster; -1 where the session has none."""
    opening = timeline.opens.nonzero()[:, 0]
    probabilities = interest_probabilities(truth, timeline.users[opening], timeline.times[opening])
    interests = _pick(probabilities, _uniform(stream(seed, "interests"), len(opening)))
    burst = _uniform(stream(seed, "bursts"), len(opening)) < truth.config.burst_share
    return torch.where(burst, interests, -1)[timeline.sessions]


def _draw_kinds(config: WorldConfig, timeline: Timeline, interests: Int[Tensor, " N"], seed: int) -> Int[Tensor, " N"]:
    """Why each event happens; where nothing can be repeated or followed, taste or the interest decides instead."""
    n = len(interests)
    gives_way = (interests >= 0) & (_uniform(stream(seed, "burst-events"), n) < config.burst_strength)
    kinds = torch.where(gives_way, EventKind.BURST, EventKind.TASTE)
    draw = _uniform(stream(seed, "kinds"), n)
    edges = (config.noise, config.noise + config.repeat, config.noise + config.repeat + config.transition)
    kinds[(draw >= edges[1]) & (draw < edges[2]) & ~timeline.opens] = EventKind.FOLLOW
    kinds[(draw >= edges[0]) & (draw < edges[1]) & (timeline.order > 0)] = EventKind.REPEAT
    kinds[draw < edges[0]] = EventKind.NOISE
    return kinds


def _pick(weights: Float[Tensor, "B I"], uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """One column per row with probability in proportion to its weight, by inverting the cumulative sum."""
    cumulative = weights.cumsum(-1)
    return torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]


def _pick_in_chunks(
    logits_of: Callable[[Tensor], Tensor], rows: Int[Tensor, " B"], uniform: Float[Tensor, " N"], n_items: int
) -> Int[Tensor, " B"]:
    """One item for each row, drawn with the weights exp(logits_of(rows))."""
    chunks = torch.split(rows, max(1, CELLS_AT_ONCE // n_items))
    return torch.cat([_pick(logits_of(chunk).softmax(-1), uniform[chunk]) for chunk in chunks])


def _draw_items_without_memory(
    truth: Truth, timeline: Timeline, kinds: Int[Tensor, " N"], interests: Int[Tensor, " N"], seed: int
) -> Int[Tensor, " N"]:
    """The items of taste, burst and noise events, which do not depend on earlier ones; -1 for the others."""
    users, times = timeline.users, timeline.times
    logits: Mapping[EventKind, Callable[[Tensor], Tensor]] = {
        EventKind.TASTE: lambda rows: taste_logits(truth, users[rows], times[rows]),
        EventKind.BURST: lambda rows: interest_logits(truth, interests[rows], times[rows]),
        EventKind.NOISE: lambda rows: alive_logits(truth.items, times[rows]),
    }
    uniform = _uniform(stream(seed, "choices"), len(kinds))
    items = torch.full_like(kinds, -1)
    for kind, logits_of in logits.items():
        rows = (kinds == kind).nonzero()[:, 0]
        items[rows] = _pick_in_chunks(logits_of, rows, uniform, truth.config.n_items)
    return items


def _walk(
    truth: Truth, timeline: Timeline, kinds: Int[Tensor, " N"], items: Int[Tensor, " N"], seed: int
) -> Int[Tensor, " N"]:
    """All items: repeats and follow-ups filled in for all users at once, one step of their histories at a time."""
    items = items.clone()
    uniform = _uniform(stream(seed, "walk"), len(items))
    lags = _lags(uniform, timeline.order, truth.config.repeat_decay)
    waiting = (items < 0).nonzero()[:, 0]
    waiting = waiting[timeline.order[waiting].argsort(stable=True)]
    per_step = torch.bincount(timeline.order[waiting])
    for rows in torch.split(waiting, per_step.tolist()):
        repeats, follows = rows[kinds[rows] == EventKind.REPEAT], rows[kinds[rows] == EventKind.FOLLOW]
        items[repeats] = items[repeats - lags[repeats]]
        if len(follows):
            items[follows] = _pick_in_chunks(
                lambda chunk: follow_logits(truth, items[chunk - 1], timeline.times[chunk]),
                follows,
                uniform,
                truth.config.n_items,
            )
    return items


def _lags(uniform: Float[Tensor, " N"], order: Int[Tensor, " N"], decay: float) -> Int[Tensor, " N"]:
    """How many events back each repeat reaches: geometric, cut off at the user's first event."""
    mass = 1 - decay ** order.double()  # of the lags 1..order
    lags = 1 + ((1 - uniform * mass).log() / log(decay)).long()
    return lags.minimum(order.clamp(min=1))  # rounding must not reach before the first event


def _as_world(
    truth: Truth, timeline: Timeline, items: Int[Tensor, " N"], kinds: Int[Tensor, " N"], interests: Int[Tensor, " N"]
) -> DriftingWorld:
    """Events in time order, and the truth in the numbering that the log gives to users and items."""
    config, rows = truth.config, timeline.times.argsort(stable=True)
    users, items = timeline.users[rows], items[rows]
    events = from_codes(
        "synthetic",
        users.numpy(),
        items.numpy(),
        timeline.times[rows].numpy(),
        pa.array([f"user-{code}" for code in range(config.n_users)]),
        pa.array([f"item-{code}" for code in range(config.n_items)]),
        sessions=timeline.sessions[rows].numpy(),
    )
    numbered = replace(
        truth,
        users=_renumbered(truth.users, users, config.n_users),
        items=_renumbered(truth.items, items, config.n_items),
    )
    return DriftingWorld(events, numbered, kinds[rows], interests[rows])


def _renumbered(records: Records, codes: Int[Tensor, " N"], n_codes: int) -> Records:
    """The records in the order of their codes' first appearance, those that never appear last."""
    met = torch.from_numpy(first_appearance(codes.numpy(), n_codes)[1])
    never = torch.ones(n_codes, dtype=torch.bool).index_fill_(0, met, False).nonzero()[:, 0]
    order = torch.cat([met, never])
    return replace(records, **{field.name: getattr(records, field.name)[order] for field in fields(records)})
