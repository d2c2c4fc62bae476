"""The synthetic world does what its parameters say, and its oracle is the true distribution."""

import re
from collections import defaultdict
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from math import exp, log
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protofed.data import synthetic
from protofed.data.synthetic import (
    PRESETS,
    DriftingWorld,
    EventKind,
    WorldConfig,
    cluster_at,
    drift_progress,
    drifting_world,
    oracle_scores,
    preset,
    taste_at,
)
from protofed.data.synthetic_truth import START
from protofed.errors import ConfigError
from protofed.seeds import stream
from protofed.slices.partition import partition

DOCS = Path(__file__).parents[3] / "docs" / "synthetic.md"
ONLY_TASTE = {
    "drift_share": 0.0,
    "burst_share": 0.0,
    "new_item_share": 0.0,
    "new_user_share": 0.0,
    "repeat": 0.0,
    "popularity_shift": 0.0,
    "transition": 0.0,
    "noise": 0.0,
}


@cache
def _made(config: WorldConfig, seed: int) -> DriftingWorld:
    return drifting_world(config, stream(seed, "world"))


def make(seed: int = 0, base: str = "tiny", **changes: float) -> DriftingWorld:
    return _made(replace(preset(base), **changes), seed)


def who(world: DriftingWorld) -> Tensor:
    return world.log.users.long()


def what(world: DriftingWorld) -> Tensor:
    return world.log.items.long()


def categories(world: DriftingWorld) -> Tensor:
    return world.items.category[what(world)]


def grouped(world: DriftingWorld) -> Tensor:
    """Rows by user, in time order."""
    return who(world).argsort(stable=True)


def pairs_within_sessions(world: DriftingWorld) -> tuple[Tensor, Tensor]:
    """Rows of consecutive events of the same session."""
    rows = grouped(world)
    sessions = world.log.sessions[rows]
    same = sessions[1:] == sessions[:-1]
    return rows[:-1][same], rows[1:][same]


def met_before(world: DriftingWorld) -> Tensor:
    """Whether each event's item is one that its user had met."""
    met: set[tuple[int, int]] = set()
    flags = []
    for pair in zip(world.log.users.tolist(), world.log.items.tolist(), strict=True):
        flags.append(pair in met)
        met.add(pair)
    return torch.tensor(flags)


def share(flags: Tensor) -> float:
    return flags.double().mean().item()


def ranks(values: Tensor) -> Tensor:
    return values.argsort().argsort().double()


def test_the_same_generator_seed_gives_the_same_world() -> None:
    one, two = (drifting_world(preset("tiny"), stream(3, "world")) for _ in range(2))
    for name in ("users", "items", "times", "sessions"):
        assert torch.equal(getattr(one.log, name), getattr(two.log, name))
    assert torch.equal(one.kinds, two.kinds)
    assert torch.equal(one.users.cluster_end, two.users.cluster_end)


def test_another_generator_seed_gives_another_world() -> None:
    one, two = make(0), make(1)
    assert one.log.times[:100].tolist() != two.log.times[:100].tolist()
    assert one.log.item_ids[:20].to_pylist() != two.log.item_ids[:20].to_pylist()


def test_successive_worlds_of_one_generator_differ() -> None:
    rng = stream(0, "world")
    one, two = drifting_world(preset("tiny"), rng), drifting_world(preset("tiny"), rng)
    assert one.log.times[:100].tolist() != two.log.times[:100].tolist()


def test_changing_one_phenomenon_leaves_the_draws_of_the_others_in_place() -> None:
    plain, repeating = make(repeat=0.0), make(repeat=0.4)
    assert torch.equal(plain.log.times, repeating.log.times)
    assert torch.equal(plain.log.users, repeating.log.users)
    assert torch.equal(plain.interests, repeating.interests)


def test_items_drawn_in_small_chunks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make()
    monkeypatch.setattr(synthetic, "CELLS_AT_ONCE", 1_000)
    assert torch.equal(drifting_world(preset("tiny"), stream(0, "world")).log.items, whole.log.items)


@pytest.mark.parametrize(
    ("name", "n_users", "n_items", "n_events"), [("default", 400, 600, 30_000), ("tiny", 80, 120, 3_000)]
)
def test_the_presets_have_their_promised_sizes(name: str, n_users: int, n_items: int, n_events: int) -> None:
    world = make(base=name)
    assert world.log.name == "synthetic"
    assert (world.log.n_users, len(world.truth.items.births)) == (n_users, n_items)
    assert 0.98 * n_items <= world.log.n_items <= n_items
    assert len(world.log) == pytest.approx(n_events, rel=0.15)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_cut_into_eight_slices_of_nearly_distinct_instants(name: str) -> None:
    world = make(base=name)
    assert len(partition(world.log, n_slices=8)) == 9
    assert world.log.n_instants > 0.99 * len(world.log)


def test_about_half_the_events_after_the_base_block_are_not_plain_taste() -> None:
    world = make(base="default")
    after = world.kinds[partition(world.log)[1].start :]
    assert 0.4 < share(after != EventKind.TASTE) < 0.6


def test_an_unknown_preset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="no synthetic world 'burst'; did you mean 'bursty'"):
        preset("burst")


def test_the_truth_is_numbered_as_the_log_is() -> None:
    world = make()
    codes = torch.tensor([int(name.removeprefix("item-")) for name in world.log.item_ids.to_pylist()])
    assert torch.equal(world.items.category, codes % world.truth.config.n_clusters)
    assert torch.equal(world.items.niche % world.truth.config.n_clusters, world.items.category)
    assert torch.equal(world.items.place, codes // world.truth.config.n_clusters)
    assert len(world.kinds) == len(world.interests) == len(world.log)
    assert len(world.users.drifting) == world.log.n_users
    taste = world.kinds == EventKind.TASTE
    own = categories(world) == cluster_at(world.truth, who(world), world.log.times)
    assert share(own[taste]) > 0.8


def test_items_that_nobody_met_come_after_those_of_the_log() -> None:
    world = make(n_items=2_000)
    met = world.log.n_items
    assert met < 2_000 == len(world.truth.items.births)
    assert torch.equal(world.items.category, world.truth.items.category[:met])
    codes = torch.tensor([int(name.removeprefix("item-")) for name in world.log.item_ids.to_pylist()])
    rest = world.truth.items.category[met:] + 4 * world.truth.items.place[met:]
    assert sorted(codes.tolist() + rest.tolist()) == list(range(2_000))


def test_items_and_users_never_appear_before_their_birth() -> None:
    world = make(new_item_share=0.8, new_user_share=0.8)
    assert (world.log.times >= world.items.births[what(world)]).all()
    assert (world.log.times >= world.users.births[who(world)]).all()
    assert world.log.times.max() < START + world.truth.config.span


@pytest.mark.parametrize("wanted", [0.0, 0.25, 0.75])
def test_the_share_of_newcomers_is_exact(wanted: float) -> None:
    world = make(new_item_share=wanted, new_user_share=wanted)
    assert share(world.truth.items.births > START) == wanted
    assert share(world.users.births > START) == wanted


def test_newcomers_have_fewer_events_in_proportion_to_their_time() -> None:
    world = make(base="default", activity_spread=0.0)
    counts = torch.bincount(who(world))
    expected = 85 * (START + world.truth.config.span - world.users.births) / world.truth.config.span
    assert (counts - expected).abs().max() <= 0.5


def test_activity_spread_makes_users_unequal() -> None:
    spreads = [torch.bincount(who(make(activity_spread=s, new_user_share=0.0))).double().std() for s in (0.0, 0.4, 0.8)]
    assert spreads[0] == 0
    assert spreads[0] < spreads[1] < spreads[2]


def test_drifting_users_start_in_one_cluster_and_end_in_another() -> None:
    world = make(base="default")
    drifting, taste = world.users.drifting[who(world)], world.kinds == EventKind.TASTE
    assert share(world.users.drifting) == 0.4
    assert (world.users.cluster_start != world.users.cluster_end)[world.users.drifting].all()
    assert torch.equal(world.users.cluster_start[~world.users.drifting], world.users.cluster_end[~world.users.drifting])
    progress = drift_progress(world.truth, who(world), world.log.times)
    early, late = (drifting & taste & flags for flags in (progress == 0, progress == 1))
    start, end = world.users.cluster_start[who(world)], world.users.cluster_end[who(world)]
    assert share((categories(world) == start)[early]) > 0.85
    assert share((categories(world) == end)[late]) > 0.85
    assert share((categories(world) == start)[late]) < 0.05


def test_the_move_is_gradual() -> None:
    world = make(base="default")
    taste = (world.kinds == EventKind.TASTE) & world.users.drifting[who(world)]
    progress = drift_progress(world.truth, who(world), world.log.times)
    arrived = categories(world) == world.users.cluster_end[who(world)]
    edges = (0.0, 0.3, 0.45, 0.55, 0.7, 1.0)
    shares = [share(arrived[taste & (progress > lo) & (progress <= hi)]) for lo, hi in pairwise(edges)]
    assert shares == sorted(shares)
    assert 0.3 < shares[2] < 0.6


@pytest.mark.parametrize("nothing", [{"drift_share": 0.0}, {"drift_size": 0.0}])
def test_without_drift_late_events_come_from_the_first_cluster(nothing: dict[str, float]) -> None:
    world = make(base="default", **nothing)
    assert not world.users.drifting.any()
    assert torch.equal(world.users.cluster_start, world.users.cluster_end)
    taste = world.kinds == EventKind.TASTE
    late = torch.arange(len(world.log)) > 0.75 * len(world.log)
    assert share((categories(world) == world.users.cluster_start[who(world)])[taste & late]) > 0.85


def test_drift_progress_is_a_ramp_over_the_users_own_time() -> None:
    world = make(drift_size=0.8, drift_onset=0.3, drift_duration=0.5)
    end = START + world.truth.config.span
    user = int(world.users.drifting.nonzero()[0])
    born, onset = int(world.users.births[user]), float(world.users.onset[user])
    assert 0.3 <= onset <= 0.5
    instants = [born + round((end - born) * lived) for lived in (0, onset, onset + 0.25, onset + 0.5, 1.0)]
    users = torch.full((5,), user)
    progress = drift_progress(world.truth, users, torch.tensor(instants))
    assert progress.tolist() == pytest.approx([0, 0, 0.4, 0.8, 0.8], abs=1e-5)
    tastes = taste_at(world.truth, users, torch.tensor(instants))
    here, there = (world.truth.centres[c[user]] for c in (world.users.cluster_start, world.users.cluster_end))
    torch.testing.assert_close(tastes[2], 0.6 * here + 0.4 * there + world.users.personal[user], atol=1e-5, rtol=0)


def test_taste_strength_zero_makes_the_category_independent_of_the_cluster() -> None:
    world = make(**ONLY_TASTE, taste_strength=0.0, zipf=0.0)
    own = share(categories(world) == world.users.cluster_start[who(world)])
    assert own == pytest.approx(1 / 4, abs=4 * (0.25 * 0.75 / len(world.log)) ** 0.5)


def test_personal_tastes_differ_inside_a_cluster_only_with_a_user_spread() -> None:
    for spread, differ in ((0.0, False), (0.6, True)):
        world = make(**ONLY_TASTE, user_spread=spread)
        cluster = (world.users.cluster_start == 0).nonzero()[:, 0]
        tastes = taste_at(world.truth, cluster, torch.full_like(cluster, START))
        assert bool((tastes - tastes[0]).abs().max() > 1e-9) is differ


def test_without_an_item_spread_all_items_of_a_category_are_alike() -> None:
    world = make(**ONLY_TASTE, item_spread=0.0)
    torch.testing.assert_close(world.items.vectors, world.truth.centres[world.items.category])


def test_sessions_are_exactly_the_runs_without_a_pause_over_thirty_minutes() -> None:
    world = make(base="bursty")
    rows = grouped(world)
    pauses, same_user = world.log.times[rows].diff(), who(world)[rows].diff() == 0
    same_session = world.log.sessions[rows].diff() == 0
    assert (pauses[same_user] >= 1).all()
    assert torch.equal(same_session, same_user & (pauses <= 30 * 60))
    assert (pauses[same_user & ~same_session] > 30 * 60).all()


@pytest.mark.parametrize("length", [1.0, 3.0, 8.0])
def test_the_mean_session_length_is_the_parameter(length: float) -> None:
    world = make(session_length=length, events_per_user=200.0, activity_spread=0.0, new_user_share=0.0)
    # a user's last session is cut short, which takes off a few per cent
    assert len(world.log) / len(world.log.sessions.unique()) == pytest.approx(length, rel=0.08)


def test_a_span_too_short_for_the_events_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"synthetic.span_days = 0.1 is too short for 44 events per user; raise it"):
        make(span_days=0.1)


def test_bursts_have_one_interest_a_session_outside_the_users_cluster() -> None:
    world = make(base="bursty")
    before, after = pairs_within_sessions(world)
    assert torch.equal(world.interests[before], world.interests[after])
    rows = grouped(world)
    opening = rows[torch.cat([torch.ones(1, dtype=torch.bool), world.log.sessions[rows].diff() != 0])]
    has_interest = world.interests[opening] >= 0
    assert share(has_interest) == pytest.approx(0.6, abs=0.03)
    own = cluster_at(world.truth, who(world)[opening], world.log.times[opening])
    assert (own != world.interests[opening] % world.truth.config.n_clusters)[has_interest].all()


def test_burst_events_are_in_the_interest_and_dominate_their_session() -> None:
    world = make(base="bursty")
    burst, inside = world.kinds == EventKind.BURST, world.interests >= 0
    niches = world.items.niche[what(world)]
    assert torch.equal(niches[burst], world.interests[burst])
    free = inside & ((world.kinds == EventKind.TASTE) | burst)
    assert share(burst[free]) == pytest.approx(0.9, abs=0.01)
    before, after = pairs_within_sessions(world)
    both = burst[before] & burst[after]
    assert both.sum() > 1_000
    assert torch.equal(niches[before[both]], niches[after[both]])
    assert share((niches == world.interests)[inside]) > 0.55
    assert share((categories(world) == world.interests % 6)[inside]) > 0.7


def test_with_one_niche_the_interest_is_a_whole_category() -> None:
    world = make(burst_niches=1)
    assert torch.equal(world.items.niche, world.items.category)
    assert world.interests.max() < world.truth.config.n_clusters


@pytest.mark.parametrize("nothing", [{"burst_share": 0.0}, {"burst_strength": 0.0}])
def test_without_bursts_there_are_none(nothing: dict[str, float]) -> None:
    world = make(**nothing)
    assert not (world.kinds == EventKind.BURST).any()
    if "burst_share" in nothing:
        assert (world.interests == -1).all()


def test_repeats_grow_with_their_parameter() -> None:
    worlds = [make(n_users=200, n_items=600, repeat=repeat) for repeat in (0.0, 0.2, 0.5)]
    shares = [share(met_before(world)) for world in worlds]
    assert shares[0] + 0.08 < shares[1]
    assert shares[1] + 0.15 < shares[2]
    for world, repeat in zip(worlds, (0.0, 0.2, 0.5), strict=True):
        assert share(world.kinds == EventKind.REPEAT) == pytest.approx(repeat, abs=0.02)
        assert met_before(world)[world.kinds == EventKind.REPEAT].all()


def lags_of_repeats(world: DriftingWorld) -> Tensor:
    """How many events ago each repeated item was last met; histories under 15 events, which cut lags off, left out."""
    histories: dict[int, list[int]] = defaultdict(list)
    lags = []
    for user, item, kind in zip(who(world).tolist(), what(world).tolist(), world.kinds.tolist(), strict=True):
        if kind == EventKind.REPEAT and len(histories[user]) >= 15:
            lags.append(1 + histories[user][::-1].index(item))
        histories[user].append(item)
    return torch.tensor(lags)


def test_repeats_prefer_recent_items_the_more_the_faster_the_decay() -> None:
    calm = ONLY_TASTE | {"repeat": 0.05, "taste_strength": 0.0, "zipf": 0.0}
    for decay in (0.3, 0.7):
        lags = lags_of_repeats(make(n_users=300, n_items=600, events_per_user=80.0, **calm | {"repeat_decay": decay}))
        # P(lag = 1) = 1 - decay, a little more where the same item also lies further back
        assert share(lags == 1) == pytest.approx(1 - decay, abs=0.06)
        assert share(lags <= 2) == pytest.approx(1 - decay**2, abs=0.06)


def popularity_correlation(world: DriftingWorld) -> float:
    """Rank correlation of item counts between the first and the last quarter of the log."""
    quarter = len(world.log) // 4
    counts = [
        torch.bincount(part, minlength=world.log.n_items) for part in (what(world)[:quarter], what(world)[-quarter:])
    ]
    noise = torch.linspace(0, 0.5, world.log.n_items)[torch.randperm(world.log.n_items, generator=stream(0, "ties"))]
    return float(torch.corrcoef(torch.stack([ranks(count + noise) for count in counts]))[0, 1])


def test_a_larger_popularity_shift_makes_early_and_late_rankings_less_alike() -> None:
    calm = ONLY_TASTE | {"zipf": 1.0, "taste_strength": 0.0, "n_items": 100}
    correlations = [
        popularity_correlation(make(base="default", **calm | {"popularity_shift": s})) for s in (0.0, 0.5, 1.0)
    ]
    assert correlations[0] > 0.8
    assert correlations[0] > correlations[1] + 0.1
    assert correlations[1] > correlations[2] + 0.1


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.2])
def test_popularity_follows_zipfs_law(exponent: float) -> None:
    world = make(base="default", **ONLY_TASTE, zipf=exponent, taste_strength=0.0)
    top10 = world.items.log_rank_start < log(10.5)
    weights = [rank**-exponent for rank in range(1, 601)]
    expected = sum(weights[:10]) / sum(weights)
    sigma = (expected * (1 - expected) / len(world.log)) ** 0.5
    assert share(top10[what(world)]) == pytest.approx(expected, abs=4 * sigma)


def direct_successors(world: DriftingWorld) -> Tensor:
    before, after = pairs_within_sessions(world)
    items, now, then = world.items, what(world)[after], what(world)[before]
    same = items.category[now] == items.category[then]
    return same & ((items.place[now] - items.place[then] - 1) % items.ring[now] == 0)


def test_transitions_lead_to_the_direct_successor_as_often_as_promised() -> None:
    calm = ONLY_TASTE | {"taste_strength": 0.0, "zipf": 0.0}
    assert share(direct_successors(make(base="default", **calm))) < 0.01
    followed = direct_successors(make(base="default", **calm | {"transition": 0.5, "transition_decay": 0.4}))
    expected = 0.5 * 0.6 + 0.5 / 600
    assert share(followed) == pytest.approx(expected, abs=4 * (expected * (1 - expected) / len(followed)) ** 0.5)


def distance_from_the_marginal(world: DriftingWorld) -> float:
    """Mean total variation between the next item given the previous one of the session, and the next item as such."""
    before, after = (what(world)[rows] for rows in pairs_within_sessions(world))
    n = world.log.n_items
    joint = torch.zeros(n, n).index_put_((before, after), torch.tensor(1.0), accumulate=True)
    conditional, marginal = joint / joint.sum(1, keepdim=True), joint.sum(0) / joint.sum()
    return float((conditional - marginal).clamp(min=0).sum(1).mean())


def test_given_the_previous_item_the_next_one_is_far_from_the_marginal() -> None:
    calm = ONLY_TASTE | {"n_items": 60, "taste_strength": 0.0, "zipf": 0.0}
    assert distance_from_the_marginal(make(base="default", **calm)) < 0.2  # what is left is sampling error
    assert distance_from_the_marginal(make(base="default", **calm | {"transition": 0.5})) > 0.4


def test_follow_ups_stay_in_the_category_and_the_session() -> None:
    world = make()
    before, after = pairs_within_sessions(world)
    follows = world.kinds[after] == EventKind.FOLLOW
    assert follows.sum() == (world.kinds == EventKind.FOLLOW).sum()
    assert torch.equal(categories(world)[before[follows]], categories(world)[after[follows]])


def test_pure_noise_is_uniform_over_all_items() -> None:
    world = make(**ONLY_TASTE | {"noise": 1.0})
    assert (world.kinds == EventKind.NOISE).all()
    counts = torch.bincount(what(world), minlength=120).double()
    expected = len(world.log) / 120
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - 119) < 4 * (2 * 119) ** 0.5
    assert not (make(noise=0.0).kinds == EventKind.NOISE).any()


def test_the_first_cluster_is_the_commonest_category_of_a_user_in_the_base_block() -> None:
    world = make(base="default")
    base = partition(world.log)[1].start
    counts = torch.zeros(400, 6).index_put_(
        (who(world)[:base], categories(world)[:base]), torch.tensor(1.0), accumulate=True
    )
    active = counts.sum(1) >= 10
    assert share(counts.argmax(1)[active] == world.users.cluster_start[active]) > 0.9


def slow_oracle(world: DriftingWorld, user: int, time: int) -> list[float]:
    """The probability of each item, written out one item and one past event at a time."""
    c, users, items = world.truth.config, world.users, world.truth.items
    everything = range(c.n_items)
    alive = [int(items.births[i]) <= time for i in everything]
    past = [n for n in range(len(world.log)) if int(world.log.users[n]) == user and int(world.log.times[n]) < time]

    def normalised(weights: list[float]) -> list[float]:
        total = sum(w for w, a in zip(weights, alive, strict=True) if a)
        return [w / total if a else 0.0 for w, a in zip(weights, alive, strict=True)]

    x = c.popularity_shift * (time - START) / (c.span_days * 86_400)
    popularity = [
        exp(-c.zipf * ((1 - x) * float(items.log_rank_start[i]) + x * float(items.log_rank_end[i]))) for i in everything
    ]
    born, end = int(users.births[user]), START + c.span_days * 86_400
    moved = ((time - born) / (end - born) - float(users.onset[user])) / c.drift_duration
    s = c.drift_size * min(max(moved, 0.0), 1.0) if users.drifting[user] else 0.0
    first, second = int(users.cluster_start[user]), int(users.cluster_end[user])
    taste = (1 - s) * world.truth.centres[first] + s * world.truth.centres[second] + users.personal[user]
    by_taste = normalised([exp(c.taste_strength * float(taste @ items.vectors[i])) * popularity[i] for i in everything])
    going_on = bool(past) and time - int(world.log.times[past[-1]]) <= 1_800
    if going_on:
        interests = {int(world.interests[past[-1]]): 1.0}
    else:
        others = [k for k in range(c.n_clusters * c.burst_niches) if k % c.n_clusters != (second if s > 0.5 else first)]
        interests = {-1: 1 - c.burst_share} | {k: c.burst_share / len(others) for k in others}
    p_repeat, p_follow = c.repeat * bool(past), c.transition * going_on
    answer = [c.noise * p for p in normalised([1.0 for _ in everything])]
    for interest, likelihood in interests.items():
        mass = (1 - c.noise - p_repeat - p_follow) * likelihood
        strength = c.burst_strength if interest >= 0 else 0.0
        burst = (
            normalised([p * (int(items.niche[i]) == interest) for i, p in enumerate(popularity)])
            if strength
            else by_taste
        )
        answer = [
            a + mass * ((1 - strength) * t + strength * b) for a, t, b in zip(answer, by_taste, burst, strict=True)
        ]
    total = sum(c.repeat_decay**back for back in range(len(past)))
    for back, row in enumerate(reversed(past)):
        answer[int(world.log.items[row])] += p_repeat * c.repeat_decay**back / total
    if going_on:
        last = int(world.log.items[past[-1]])
        hops = [(int(items.place[i]) - int(items.place[last]) - 1) % int(items.ring[i]) for i in everything]
        same = [items.category[i] == items.category[last] for i in everything]
        followed = normalised(
            [c.transition_decay**hop * bool(is_same) for hop, is_same in zip(hops, same, strict=True)]
        )
        answer = [a + p_follow * f for a, f in zip(answer, followed, strict=True)]
    return answer[: world.log.n_items]


def test_the_oracle_equals_a_slow_obvious_one() -> None:
    world = make()
    rows = torch.randperm(len(world.log), generator=stream(0, "queries"))[:25]
    moments = world.log.times[rows] + torch.arange(25) % 3 * 600  # at events, and between them
    moments[0] = START + 1  # before anything has happened
    fast = oracle_scores(world, who(world)[rows], moments)
    slow = [slow_oracle(world, int(user), int(time)) for user, time in zip(who(world)[rows], moments, strict=True)]
    torch.testing.assert_close(fast, torch.tensor(slow, dtype=torch.float64), atol=1e-10, rtol=1e-8)


@cache
def everything_scored(world_seed: int) -> tuple[DriftingWorld, Tensor]:
    world = make(world_seed)
    return world, oracle_scores(world, world.log.users, world.log.times)


def test_oracle_scores_are_probabilities_of_born_items() -> None:
    world, scores = everything_scored(0)
    assert (scores.sum(1) <= 1 + 1e-9).all()
    unborn = world.items.births > world.log.times[:, None]
    assert (scores[unborn] == 0).all()
    assert (scores.gather(1, what(world)[:, None]) > 0).all()


def test_oracle_scores_sum_to_one_where_every_item_was_met() -> None:
    world = make(noise=0.4)
    assert world.log.n_items == 120
    sums = oracle_scores(world, world.log.users, world.log.times).sum(1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


def assert_calibrated(expected: Tensor, happened: Tensor) -> None:
    sigma = (expected * (1 - expected)).sum().sqrt()
    assert abs(float(happened.sum() - expected.sum())) < 4 * float(sigma)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_the_oracle_expects_happens_as_often_as_it_says(seed: int) -> None:
    world, scores = everything_scored(seed)
    chosen = torch.nn.functional.one_hot(what(world), world.log.n_items).bool()
    drifting = world.users.drifting[who(world)]
    for category in range(4):
        inside = scores[:, world.items.category == category].sum(1)
        assert_calibrated(inside, categories(world) == category)
        assert_calibrated(inside[drifting], (categories(world) == category)[drifting])
    for low, high in ((0.0, 0.002), (0.002, 0.01), (0.01, 0.05), (0.05, 0.2), (0.2, 1.0)):
        band = (scores > low) & (scores <= high)
        assert_calibrated(scores[band], chosen[band])


@pytest.mark.parametrize(
    "wrong",
    [
        {"drift_size": 0.0},
        {"burst_share": 0.0},
        {"burst_strength": 0.0},
        {"repeat": 0.0},
        {"repeat_decay": 0.3},
        {"popularity_shift": 0.0},
        {"zipf": 0.0},
        {"transition": 0.0},
        {"taste_strength": 0.0},
        {"noise": 0.3},
    ],
    ids=str,
)
def test_an_oracle_that_is_blind_to_one_phenomenon_predicts_worse(wrong: dict[str, float]) -> None:
    world, scores = everything_scored(0)
    blind = replace(world, truth=replace(world.truth, config=replace(world.truth.config, **wrong)))
    likelihoods = [
        s.gather(1, what(world)[:, None]).log().mean()
        for s in (scores, oracle_scores(blind, world.log.users, world.log.times))
    ]
    assert likelihoods[0] > likelihoods[1] + 1e-4


def ndcg_at_10(scores: Tensor, positives: Tensor) -> float:
    rank = (scores >= scores.gather(1, positives[:, None])).sum(1)
    return float(((rank <= 10) / (1.0 + rank).log2()).mean())


def test_popularity_lies_between_chance_and_the_oracle() -> None:
    world, scores = everything_scored(0)
    late = torch.arange(len(world.log)) >= len(world.log) // 2
    counts = torch.bincount(what(world)[~late], minlength=world.log.n_items).double().expand(len(scores), -1)
    chance = torch.rand(scores.shape, generator=stream(0, "chance"))
    figures = [ndcg_at_10(s[late], what(world)[late]) for s in (chance, counts, scores)]
    assert figures[0] * 1.5 < figures[1]
    assert figures[1] * 1.5 < figures[2]


def test_the_oracle_reads_nothing_of_the_present_or_the_future() -> None:
    world, scores = everything_scored(0)
    now = len(world.log) // 2
    time = world.log.times[now]
    rewritten = torch.where(world.log.times >= time, world.log.items.flip(0), world.log.items)
    other = replace(
        world,
        log=replace(world.log, items=rewritten),
        interests=torch.where(world.log.times >= time, 0, world.interests),
    )
    everyone = torch.arange(world.log.n_users)
    times = time.expand(len(everyone))
    assert torch.equal(oracle_scores(other, everyone, times), oracle_scores(world, everyone, times))
    torch.testing.assert_close(oracle_scores(world, everyone, times)[who(world)[now]], scores[now])


def test_the_oracle_answers_no_queries_with_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert oracle_scores(make(), none, none).shape == (0, make().log.n_items)


@settings(max_examples=15, deadline=None)
@given(
    config=st.builds(
        WorldConfig,
        n_users=st.integers(1, 12),
        n_items=st.integers(8, 30),
        burst_niches=st.integers(1, 2),
        n_clusters=st.integers(2, 4),
        latent_dim=st.integers(4, 8),
        events_per_user=st.floats(0.5, 30),
        drift_share=st.floats(0, 1),
        drift_size=st.floats(0, 1),
        drift_onset=st.floats(0, 0.5),
        drift_duration=st.floats(0, 0.5),
        burst_share=st.floats(0, 1),
        session_length=st.floats(1, 20),
        new_item_share=st.floats(0, 1),
        new_user_share=st.floats(0, 1),
        repeat=st.floats(0, 0.4),
        repeat_decay=st.floats(0.01, 0.99),
        transition=st.floats(0, 0.4),
        transition_decay=st.floats(0.01, 0.99),
        noise=st.floats(0, 0.2),
    ),
    seed=st.integers(0, 2**32),
)
def test_every_world_keeps_the_rules_of_births_histories_and_probabilities(config: WorldConfig, seed: int) -> None:
    world = drifting_world(config, stream(seed, "world"))
    assert world.log.n_users == config.n_users
    assert (world.log.times >= world.items.births[what(world)]).all()
    assert (world.log.times >= world.users.births[who(world)]).all()
    assert met_before(world)[world.kinds == EventKind.REPEAT].all()
    scores = oracle_scores(world, world.log.users, world.log.times)
    assert (scores.gather(1, what(world)[:, None]) > 0).all()
    assert (scores.sum(1) <= 1 + 1e-9).all()
    if world.log.n_items == config.n_items:
        assert (scores.sum(1) >= 1 - 1e-9).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"repeat": 1.5}, r"synthetic.repeat must lie between 0 and 1, got 1.5; the default is 0.15"),
        ({"drift_share": -0.1}, r"synthetic.drift_share must lie between 0 and 1, got -0.1"),
        ({"repeat_decay": 1.0}, r"synthetic.repeat_decay must lie strictly between 0 and 1, got 1.0"),
        ({"zipf": -1.0}, r"synthetic.zipf must not be negative, got -1.0"),
        ({"zipf": float("nan")}, r"synthetic.zipf must not be negative, got nan"),
        ({"n_users": 0}, r"synthetic.n_users must be positive, got 0"),
        ({"session_length": 0.5}, r"synthetic.session_length must be at least 1, got 0.5"),
        ({"latent_dim": 3}, r"synthetic.latent_dim must be at least n_clusters = 6, got 3"),
        ({"n_items": 5}, r"synthetic.n_items must be at least n_clusters \* burst_niches = 30, got 5"),
        ({"n_clusters": 1}, r"drift and bursts need n_clusters of at least 2, got 1; set their shares to 0"),
        ({"repeat": 0.6, "noise": 0.6}, r"repeat \+ transition \+ noise must not exceed 1, got 1.4; lower one"),
        ({"drift_onset": 0.7}, r"drift_onset \+ drift_duration must not exceed 1, got 1.1; lower one"),
    ],
)
def test_a_parameter_outside_its_range_is_refused_by_name(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(WorldConfig(), **wrong)


def test_one_cluster_without_drift_and_bursts_is_a_world_too() -> None:
    world = make(n_clusters=1, drift_share=0.0, burst_share=0.0, noise=0.4)
    assert (world.users.cluster_end == 0).all()
    assert world.log.n_items == 120
    sums = oracle_scores(world, world.log.users, world.log.times).sum(1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


def test_the_docs_list_every_parameter_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", DOCS.read_text(), flags=re.MULTILINE)
    assert {name: float(value) for name, value in rows} == {
        f.name: float(getattr(WorldConfig(), f.name)) for f in fields(WorldConfig)
    }


def test_the_docs_name_every_preset() -> None:
    assert set(re.findall(r"^\| `([\w-]+)` \| (?:no change|`)", DOCS.read_text(), flags=re.MULTILINE)) == set(PRESETS)
