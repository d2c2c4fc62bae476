"""What is true in the synthetic world: who likes what when, and how likely each next item therefore is.

The generator (`protofed.data.synthetic`) draws from these distributions and the oracle scores with them, so the two
cannot disagree. The formulas are in docs/synthetic.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from math import inf, log

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.data.interactions import InteractionLog
from protofed.errors import ConfigError

START = 1_577_836_800  # 2020-01-01 00:00 UTC, in unix seconds
DAY = 86_400
RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("be positive", lambda x: 0 < x < inf, "n_users n_items n_clusters span_days events_per_user"),
    ("be positive", lambda x: 0 < x < inf, "burst_niches session_gap_minutes event_gap_seconds"),
    ("not be negative", lambda x: 0 <= x < inf, "activity_spread taste_strength user_spread item_spread zipf"),
    ("be at least 1", lambda x: x >= 1, "session_length"),
    ("lie between 0 and 1", lambda x: 0 <= x <= 1, "drift_share drift_size drift_onset drift_duration"),
    ("lie between 0 and 1", lambda x: 0 <= x <= 1, "burst_share burst_strength new_item_share new_user_share"),
    ("lie between 0 and 1", lambda x: 0 <= x <= 1, "repeat transition noise popularity_shift"),
    ("lie strictly between 0 and 1", lambda x: 0 < x < 1, "repeat_decay transition_decay"),
)


class EventKind(IntEnum):
    """Why an event happened."""

    TASTE = 0  # the user's long-term preference
    FOLLOW = 1  # the successor of the previous item of the session
    REPEAT = 2  # one of the user's own past items
    BURST = 3  # the short-lived interest of the session
    NOISE = 4  # any item


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """One parameter per phenomenon; a share, strength or exponent of 0 removes it. Lengths are shares of the span."""

    n_users: int = 400
    n_items: int = 600
    n_clusters: int = 6  # of users; there is one item category for each
    latent_dim: int = 16  # width of taste and item vectors, at least n_clusters
    span_days: float = 180.0  # length of the timeline
    events_per_user: float = 85.0  # mean of users present from the start; newcomers have fewer, in proportion
    activity_spread: float = 0.5  # log-normal spread of activity between users; 0: all alike
    taste_strength: float = 5.0  # how much taste decides; 0: popularity alone
    user_spread: float = 0.6  # distance of a user from the cluster's centre
    item_spread: float = 1.0  # distance of an item from its category's centre
    drift_share: float = 0.4  # share of users who move to another cluster
    drift_size: float = 1.0  # how far they move: 1 is all the way
    drift_onset: float = 0.3  # earliest start of a move, as a share of the user's time in the world
    drift_duration: float = 0.4  # how long a move takes, as a share of the user's time in the world
    burst_share: float = 0.25  # share of sessions with an interest of their own: one niche outside the user's cluster
    burst_niches: int = 5  # how many niches each category falls into; 1: the whole category is the interest
    burst_strength: float = 0.9  # how often taste gives way to the interest in such a session
    session_length: float = 5.0  # mean number of events, geometric
    session_gap_minutes: float = 30.0  # longest pause inside a session; pauses between sessions are longer
    event_gap_seconds: float = 90.0  # mean pause inside a session
    new_item_share: float = 0.3  # share of items born after the start
    new_user_share: float = 0.3  # share of users who arrive after the start
    repeat: float = 0.15  # probability that an event repeats one of the user's past items
    repeat_decay: float = 0.8  # weight of the item one event further back, strictly between 0 and 1
    zipf: float = 0.7  # popularity exponent: weight rank^-zipf; 0: all items equal
    popularity_shift: float = 0.8  # how far popularity has moved to an unrelated ranking by the end
    transition: float = 0.2  # probability that an event follows on from the previous item of its session
    transition_decay: float = 0.4  # weight of the successor one place further on, strictly between 0 and 1
    noise: float = 0.06  # probability of an item drawn at random

    def __post_init__(self) -> None:
        for rule, holds, names in RULES:
            for name in names.split():
                _require(self, name, holds(getattr(self, name)), rule)
        _require(self, "latent_dim", self.latent_dim >= self.n_clusters, f"be at least n_clusters = {self.n_clusters}")
        enough = self.n_items >= self.n_niches
        _require(self, "n_items", enough, f"be at least n_clusters * burst_niches = {self.n_niches}")
        _require_at_most_1(self, "repeat", "transition", "noise")
        _require_at_most_1(self, "drift_onset", "drift_duration")
        if self.n_clusters == 1 and (self.drift_share or self.burst_share):
            raise ConfigError("synthetic: drift and bursts need n_clusters of at least 2, got 1; set their shares to 0")

    @property
    def n_niches(self) -> int:
        """How many interests a session can have; niche j lies in category j % n_clusters."""
        return self.n_clusters * self.burst_niches

    @property
    def span(self) -> int:
        """Seconds from the first possible event to the last."""
        return round(self.span_days * DAY)

    @property
    def session_gap(self) -> int:
        """Seconds; a longer pause begins a new session."""
        return round(self.session_gap_minutes * 60)


def _require(config: WorldConfig, name: str, holds: bool, rule: str) -> None:
    if not holds:
        default = WorldConfig.__dataclass_fields__[name].default
        raise ConfigError(f"synthetic.{name} must {rule}, got {getattr(config, name)}; the default is {default}")


def _require_at_most_1(config: WorldConfig, *names: str) -> None:
    total = sum(getattr(config, name) for name in names)
    if total > 1 + 1e-12:
        raise ConfigError(f"synthetic: {' + '.join(names)} must not exceed 1, got {total:g}; lower one of them")


@dataclass(frozen=True, slots=True)
class UserTruth:
    """What is true of each user, in the numbering of the log."""

    cluster_start: Int[Tensor, " U"]
    cluster_end: Int[Tensor, " U"]  # where a whole move leads; equals cluster_start for users who stay
    drifting: Bool[Tensor, " U"]
    births: Int[Tensor, " U"]  # unix seconds
    onset: Float[Tensor, " U"]  # when the move begins, as a share of the user's time in the world
    personal: Float[Tensor, "U d"]  # constant offset from the cluster's centre


@dataclass(frozen=True, slots=True)
class ItemTruth:
    """What is true of each item, in the numbering of the log; items that nobody ever met come last."""

    category: Int[Tensor, " I"]
    niche: Int[Tensor, " I"]  # a part of the category
    births: Int[Tensor, " I"]  # unix seconds
    vectors: Float[Tensor, "I d"]
    place: Int[Tensor, " I"]  # position in the ring of its category: successors sit one place further on
    ring: Int[Tensor, " I"]  # length of that ring
    log_rank_start: Float[Tensor, " I"]  # log of the popularity rank, 1 being the most popular
    log_rank_end: Float[Tensor, " I"]


@dataclass(frozen=True, slots=True)
class Truth:
    """Everything hidden that does not change from event to event."""

    config: WorldConfig
    centres: Float[Tensor, "K d"]  # orthonormal; cluster k likes category k
    users: UserTruth
    items: ItemTruth


@dataclass(frozen=True, slots=True)
class DriftingWorld:
    """A log and the truth behind it; users, items and events are numbered as in the log.

    `truth.items` also holds the items that nobody met, after those of the log; `items` leaves them out.
    """

    log: InteractionLog
    truth: Truth
    kinds: Int[Tensor, " N"]  # EventKind of each event
    interests: Int[Tensor, " N"]  # niche that the event's session is after, -1 where it has no interest of its own

    @property
    def users(self) -> UserTruth:
        return self.truth.users

    @property
    def items(self) -> ItemTruth:
        met = self.log.n_items
        return ItemTruth(*(getattr(self.truth.items, field.name)[:met] for field in fields(ItemTruth)))


def drift_progress(truth: Truth, users: Int[Tensor, " B"], times: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """How far each user has moved from the first cluster to the second: 0 before the move, drift_size after it."""
    births = truth.users.births[users]
    lived = (times - births).double() / (START + truth.config.span - births)
    moved = (lived - truth.users.onset[users]) / max(truth.config.drift_duration, 1e-9)  # 0: a sudden move
    return truth.config.drift_size * moved.clamp(0, 1) * truth.users.drifting[users]


def cluster_at(truth: Truth, users: Int[Tensor, " B"], times: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """The cluster each user is nearest to at that time."""
    arrived = drift_progress(truth, users, times) > 0.5
    return torch.where(arrived, truth.users.cluster_end[users], truth.users.cluster_start[users])


def taste_at(truth: Truth, users: Int[Tensor, " B"], times: Int[Tensor, " B"]) -> Float[Tensor, "B d"]:
    """The long-term taste vector: a point between two cluster centres plus the user's own offset."""
    progress = drift_progress(truth, users, times)[:, None]
    here, there = (truth.centres[c[users]] for c in (truth.users.cluster_start, truth.users.cluster_end))
    return (1 - progress) * here + progress * there + truth.users.personal[users]


def alive_logits(items: ItemTruth, times: Int[Tensor, " B"]) -> Float[Tensor, "B I"]:
    """0 for items already born, minus infinity for the others."""
    return torch.zeros(len(times), len(items.births), dtype=torch.float64).masked_fill_(
        items.births > times[:, None], -torch.inf
    )


def popularity_logits(truth: Truth, times: Int[Tensor, " B"]) -> Float[Tensor, "B I"]:
    """Log popularity of the items born by then: Zipf's law over a ranking that moves from one to another."""
    moved = truth.config.popularity_shift * (times - START).double() / truth.config.span
    mixture = torch.stack([1 - moved, moved], dim=-1)  # (B, 2)
    log_rank = mixture @ torch.stack([truth.items.log_rank_start, truth.items.log_rank_end])  # (B, I)
    return alive_logits(truth.items, times) - truth.config.zipf * log_rank


def taste_logits(truth: Truth, users: Int[Tensor, " B"], times: Int[Tensor, " B"]) -> Float[Tensor, "B I"]:
    """Log weights of the user's long-term choice: taste plus popularity."""
    utility = taste_at(truth, users, times) @ truth.items.vectors.T
    return truth.config.taste_strength * utility + popularity_logits(truth, times)


def interest_logits(truth: Truth, interests: Int[Tensor, " B"], times: Int[Tensor, " B"]) -> Float[Tensor, "B I"]:
    """Log weights of a burst: popularity inside one niche."""
    return popularity_logits(truth, times).masked_fill_(truth.items.niche != interests[:, None], -torch.inf)


def follow_logits(truth: Truth, previous: Int[Tensor, " B"], times: Int[Tensor, " B"]) -> Float[Tensor, "B I"]:
    """Log weights of what follows an item: its successors in the ring of its category, nearest first."""
    items = truth.items
    hops = (items.place - items.place[previous][:, None] - 1) % items.ring  # 0 is the direct successor
    logits = alive_logits(items, times) + hops.double() * log(truth.config.transition_decay)
    return logits.masked_fill_(items.category != items.category[previous][:, None], -torch.inf)


def interest_probabilities(truth: Truth, users: Int[Tensor, " B"], times: Int[Tensor, " B"]) -> Float[Tensor, "B J"]:
    """The probabilities of a burst's interest: equal over all niches outside the user's present cluster."""
    config = truth.config
    foreign = torch.arange(config.n_niches) % config.n_clusters != cluster_at(truth, users, times)[:, None]
    return foreign.double() / max(config.n_niches - config.burst_niches, 1)


def oracle_scores(
    world: DriftingWorld, users: Int[Tensor, " B"], times: Int[Tensor, " B"]
) -> Float[Tensor, "B {world.log.n_items}"]:
    """The true probability that an event of this user at this time is about each item of the log.

    The oracle knows the truth and all events strictly before the time, but of a session that has not begun it knows
    only how interests are drawn. No model can rank better on average. Unborn items have probability 0; rows sum to 1,
    less what goes to items that nobody ever met.
    """
    users, config = users.long(), world.truth.config
    rows, seen = _past(world, users, times)  # a past is rows[starts : starts + counts]
    last = rows[(seen.starts + seen.counts - 1).clamp(min=0)]
    going_on = (seen.counts > 0) & (times - world.log.times[last] <= config.session_gap)
    noise = alive_logits(world.truth.items, times).softmax(-1)
    follow = follow_logits(world.truth, world.log.items[last].long(), times).softmax(-1)
    repeat = _repeat_probabilities(world, rows, seen)
    p_repeat = config.repeat * (seen.counts > 0).double()[:, None]
    p_follow = config.transition * going_on.double()[:, None]
    choice = _choice_probabilities(world, users, times, going_on, world.interests[last])
    p_choice = 1 - config.noise - p_repeat - p_follow
    whole = config.noise * noise + p_repeat * repeat + p_follow * follow + p_choice * choice
    return whole[:, : world.log.n_items]


@dataclass(frozen=True, slots=True)
class _Past:
    """Where the events of each query's user begin in the rows grouped by user, and how many lie before its time."""

    starts: Int[Tensor, " B"]
    counts: Int[Tensor, " B"]


def _past(world: DriftingWorld, users: Int[Tensor, " B"], times: Int[Tensor, " B"]) -> tuple[Int[Tensor, " N"], _Past]:
    """The rows of the log grouped by user, in time order, and what each query may see of them."""
    log, stride = world.log, world.truth.config.span + 2
    keys = log.users.long() * stride + (log.times - START)
    keys, rows = keys.sort(stable=True)
    starts = torch.searchsorted(keys, users * stride)
    ends = torch.searchsorted(keys, users * stride + (times - START).clamp(0, stride - 1))
    return rows, _Past(starts, ends - starts)


def _repeat_probabilities(world: DriftingWorld, rows: Int[Tensor, " N"], seen: _Past) -> Float[Tensor, "B I"]:
    """Each past item's share of the recency weights decay^0, decay^1, ... counted back from the last event."""
    weights = torch.zeros(len(seen.counts), len(world.truth.items.births), dtype=torch.float64)
    for back in range(int(seen.counts.amax()) if len(seen.counts) else 0):
        queries = (seen.counts > back).nonzero()[:, 0]
        items = world.log.items[rows[(seen.starts + seen.counts - 1 - back)[queries]]].long()
        weights[queries, items] += world.truth.config.repeat_decay**back
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)


def _choice_probabilities(
    world: DriftingWorld,
    users: Int[Tensor, " B"],
    times: Int[Tensor, " B"],
    going_on: Bool[Tensor, " B"],
    interests: Int[Tensor, " B"],
) -> Float[Tensor, "B I"]:
    """Long-term taste, mixed with the session's interest: the known one, or all possible ones before it begins."""
    truth, niche = world.truth, world.truth.items.niche
    known = torch.nn.functional.one_hot(interests + 1, truth.config.n_niches + 1)[:, 1:].double()  # -1: all zero
    possible = truth.config.burst_share * interest_probabilities(truth, users, times)
    p_interest = truth.config.burst_strength * torch.where(going_on[:, None], known, possible)  # (B, J)
    weights = popularity_logits(truth, times).exp()
    totals = torch.zeros_like(p_interest).index_add_(1, niche, weights)
    within = weights / totals[:, niche]  # popularity inside each item's own niche
    taste = taste_logits(truth, users, times).softmax(-1)
    return (1 - p_interest.sum(-1, keepdim=True)) * taste + p_interest[:, niche] * within
