"""A whole slice against every client played alone, in stacks of any size, whatever the users' numbers, with poison."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import random_model

from protofed.backbone.sasrec import at_rest
from protofed.client.codec import QueryEncoder, random_linear_codec, unit
from protofed.client.drift import DriftState, Gate, adaptive_stability, drift_gate, observe
from protofed.client.lessons import Lesson
from protofed.client.memory import Memory, as_histories, events_between, events_until
from protofed.client.model import VARIANTS, Encoders, LocalRule, Model, receive
from protofed.client.own_rows import OwnRows, no_rows, own_embed, subset, with_met_items
from protofed.client.prompts import PromptState, first_contact
from protofed.client.router import route
from protofed.client.state import DeviceState, columns, join, new_devices, resize, select, with_fresh_moments
from protofed.client.update import client_update
from protofed.federation import simulator
from protofed.federation.rounds import summarise_rounds, timetable
from protofed.federation.simulator import Schedule, begin_stacks, finish_slice, put_stacks, simulate_slice
from protofed.inference.end import record_losses, validation_questions, variant_losses
from protofed.privacy.draws import SeededDraws, event_keys, normal, toss_coins, uniform
from protofed.privacy.mechanism import seeded_noise
from protofed.privacy.upload import (
    NOTHING,
    SECURE_SCALE,
    PointUploads,
    RoundRule,
    UploadRule,
    central_upload,
    compact_local_upload,
    decode_points,
    local_reach,
    local_sums,
    local_upload,
    secure_std,
    secure_upload,
)
from protofed.seeds import stream, user_keys
from protofed.server.accept import Accepted
from protofed.server.aggregate import RoundReport, server_aggregate
from protofed.server.library import PrototypeLibrary, new_library
from protofed.slices.candidates import NO_CANDIDATE
from protofed.slices.histories import Histories, histories
from protofed.slices.partition import SliceBounds
from protofed.slices.stream import QuerySet, TimeSlice
from protofed.slices.windows import NO_TARGET, Windows, take, training_windows, trimmed

L_P, WIDTH, D_Z, K = 2, 8, 6, 4
LENGTH, STRIDE = 6, 3
N_ITEMS, N_ROWS = 24, 16
NAN = float("nan")
EVERYBODY = 10_000  # a chunk that no test fills
SEED, RATE, FIRST_ROUND, PERIOD = 3, 0.6, 5, 2
RULE = LocalRule(
    eta_l=0.02,
    eta_s=0.1,
    eta_r=0.01,
    steps=4,
    negatives=6,
    stride=STRIDE,
    session_gap_hours=6.5,  # of pauses of whole multiples of 5,000 seconds
)
SCHEDULE = Schedule(PERIOD, 4, 3, FIRST_ROUND, RATE, EVERYBODY, SEED)
SERVER = RoundRule(UploadRule(K, D_Z), 1.0, margin=0.3)
SERVERS = {
    "central": SERVER,
    "no noise": replace(SERVER, noise_multiplier=0.0),
    "local": replace(SERVER, trust="local"),
    "local, points": replace(SERVER, trust="local", aggregator="geometric-median"),
    "local, two points": replace(SERVER, trust="local", aggregator="barycenter"),
    "secure": replace(SERVER, trust="secure-aggregation"),
    "median": replace(SERVER, noise_multiplier=0.0, aggregator="geometric-median"),
    "barycenter": replace(SERVER, noise_multiplier=0.0, aggregator="barycenter"),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed))


@dataclass(frozen=True)
class Town:
    """Everything a slice starts with: base events that devices remember, events they missed, train and validation.

    Some users and items come after the base events; some users are away in the train part.
    """

    slice_: TimeSlice
    model: Model
    library: PrototypeLibrary
    devices: DeviceState

    @property
    def past(self) -> Histories:
        return self.slice_.past

    @property
    def n_users(self) -> int:
        return self.past.n_users

    @property
    def train(self) -> range:
        return range(*self.slice_.bounds[-1].part("train"))


@cache
def a_town(n_users: int = 12) -> Town:
    rng = np.random.default_rng(n_users)
    base, start, end, val_end = 7 * n_users, 9 * n_users, 16 * n_users, 18 * n_users
    users = rng.integers(0, n_users, val_end)
    users[:start] = users[:start] % (n_users - 2)  # the last two are newcomers
    users[start:end][users[start:end] % 5 == 3] += 1  # every fifth is away, and back for validation
    items = (rng.random(val_end) * N_ITEMS * (0.5 + 0.5 * np.arange(val_end) / val_end)).astype(np.int64)
    slice_ = a_slice(users % n_users, items, SliceBounds(PERIOD, start, end, val_end, val_end), n_users)
    model, library = a_model()
    return Town(slice_, model, library, before_the_slice(slice_, model, base))


def a_slice(users: np.ndarray, items: np.ndarray, bounds: SliceBounds, n_users: int) -> TimeSlice:
    times, rng = np.arange(len(users)) * 5000, np.random.default_rng(1)
    past, asked = histories(users, items, times, n_users), np.arange(bounds.train_end, bounds.val_end)
    negatives = torch.from_numpy(rng.integers(0, N_ITEMS, (len(asked), 5)))
    negatives[::4, 3:] = NO_CANDIDATE
    validation = QuerySet(
        slice_index=bounds.index,
        part="val",
        positions=asked,
        positives=torch.from_numpy(items[asked]),
        users=torch.from_numpy(users[asked].astype(np.int64)),
        negatives=negatives,
        hard=torch.full_like(negatives, NO_CANDIDATE),
        n_items=N_ITEMS,
        subsets={},
    )
    keys = user_keys(f"user {u}" for u in range(n_users))
    return TimeSlice(bounds.index, (bounds,), past, times, N_ITEMS, validation, keys)


@cache
def a_model(rule: LocalRule = RULE) -> tuple[Model, PrototypeLibrary]:
    backbone = at_rest(random_model(N_ROWS, seed=4))
    codec = random_linear_codec(L_P, WIDTH, Generator().manual_seed(1), d_z=D_Z)
    g = QueryEncoder(WIDTH, Generator().manual_seed(2), d_z=D_Z).requires_grad_(False)
    gate = Gate(torch.tensor(0.1), torch.tensor(0.2), torch.tensor(1.0), torch.tensor(-1.0))
    library = new_library(torch.linalg.qr(drawn(D_Z, D_Z, seed=3)).Q[:K].contiguous(), 5.0)
    prior = torch.tensor([0.0, 0.2, -0.2, 0.1])
    encoders = Encoders(codec, g, gate, 2.0)
    model = Model(backbone, encoders, library.v, codec.decode(library.v), rule, N_ITEMS, prior, met_boost=0.3)
    return model, library


def before_the_slice(slice_: TimeSlice, model: Model, base: int) -> DeviceState:
    """Base users have prompts, rows and a past, and every other of them has learned since; newcomers have nothing."""
    n = slice_.past.n_users
    known, everybody = events_until(slice_.past, base), torch.arange(n)
    met = known > 0
    memory = events_between(slice_.past, everybody, torch.zeros_like(known), known)
    rows = with_met_items(no_rows(WIDTH), model.backbone, as_histories(memory), len(memory.items), everybody)
    state = new_devices(torch.from_numpy(slice_.user_keys), L_P, WIDTH, D_Z)

    def of_the_met(column: Tensor) -> Tensor:
        return torch.where(met.view(-1, *[1] * (column.dim() - 1)), column, torch.zeros_like(column))

    total, periods = torch.full((n,), 0.4), torch.full((n,), 3)
    drift = unit(drawn(n, D_Z, seed=13)), 0.1 * drawn(n, D_Z, seed=14), total, periods
    return replace(
        state,
        prompts=PromptState(of_the_met(drawn(n, L_P, WIDTH, seed=11)), of_the_met(0.5 * drawn(n, L_P, WIDTH, seed=12))),
        rows=replace(rows, rows=rows.rows + 0.1 * drawn(*rows.rows.shape, seed=5)),
        drift=DriftState(*(of_the_met(column) for column in drift)),
        taste=of_the_met(unit(drawn(n, WIDTH, seed=15))),
        met=met,
        contributes=met & (everybody % 2 == 0),
        losses=of_the_met(drawn(n, len(VARIANTS), seed=16)),
        use_prompt=met,
        use_rows=met & (everybody % 3 != 0),
        memory=memory,
    )


def simulated(
    town: Town,
    schedule: Schedule = SCHEDULE,
    *,
    devices: DeviceState | None = None,
    server: RoundRule = SERVER,
    rule: LocalRule = RULE,
    slice_: TimeSlice | None = None,
) -> tuple[DeviceState, PrototypeLibrary, dict[str, float]]:
    model = replace(town.model, rule=replace(rule, steps=schedule.steps))
    devices = town.devices if devices is None else devices
    library, after, told = simulate_slice(model, town.library, devices, slice_ or town.slice_, server, schedule)
    return after, library, told


def active_and_away(town: Town) -> tuple[list[int], list[int]]:
    active = sorted(set(town.past.users[town.train].tolist()))
    return active, [u for u in range(town.n_users) if u not in active]


def test_the_town_has_active_and_absent_clients_newcomers_and_new_items():
    town, devices = a_town(), a_town().devices
    active, away = active_and_away(town)
    assert len(active) > 4
    assert {bool(devices.contributes[u]) for u in away if devices.met[u]} == {False, True}
    assert {bool(devices.contributes[u]) for u in active if devices.met[u]} == {False, True}
    assert any(not bool(devices.met[u]) for u in active)
    assert max(town.past.items.tolist()) >= N_ROWS
    assert len({slow_sessions(town, u) for u in active}) > 2
    missed = events_until(town.past, town.train.start) - devices.memory.counts
    assert min(missed[u] for u in active if devices.met[u]) == 0 < max(missed[u] for u in active)
    assert set(town.slice_.validation.users.tolist()) & set(away)


def check_devices(one: DeviceState, other: DeviceState, users: list[int], *, atol: float) -> None:
    a, b = (select(state, torch.tensor(users, dtype=torch.int64)) for state in (one, other))
    for column, expected in zip(columns(a), columns(b), strict=True):
        torch.testing.assert_close(column, expected, atol=atol, rtol=0, equal_nan=True)
    for part in ("rows", "memory"):
        for f in fields(getattr(a, part)):
            columns_ = (getattr(getattr(each, part), f.name) for each in (a, b))
            torch.testing.assert_close(*columns_, atol=atol, rtol=0, equal_nan=True)


def everybody(town: Town) -> list[int]:
    return list(range(town.n_users))


def check_libraries(one: PrototypeLibrary, other: PrototypeLibrary, *, atol: float) -> None:
    for name in ("v", "ema_sums", "ema_counts"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), atol=atol, rtol=0)
    assert one.version == other.version


@pytest.mark.parametrize(
    ("steps", "rounds", "order"),
    [
        (4, 2, "s0 s1 r0 s2 s3 r1"),
        (3, 3, "s0 r0 s1 r1 s2 r2"),
        (2, 5, "r0 r1 s0 r2 r3 s1 r4"),
        (3, 6, "r0 s0 r1 r2 s1 r3 r4 s2 r5"),
        (3, 0, "s0 s1 s2"),
        (0, 2, "r0 r1"),
        (0, 0, ""),
    ],
)
def test_steps_and_rounds_are_spread_over_the_slice_a_step_before_a_round(steps, rounds, order):
    assert " ".join(f"{what[0]}{number}" for what, number in timetable(steps, rounds)) == order


@pytest.mark.parametrize(("steps", "rounds"), [(7, 3), (20, 20), (49, 7), (6, 49), (30, 11)])
def test_before_each_round_its_share_of_steps_has_been_made(steps, rounds):
    made = done = 0
    for what, number in timetable(steps, rounds):
        if what == "step":
            assert number == made
            made += 1
        else:
            assert number == done
            done += 1
            assert made == steps * done // rounds
    assert (made, done) == (steps, rounds)


class CutAt(np.random.Generator):
    """Every user's run of targets is cut at the same place."""

    def __init__(self, shift: int) -> None:
        super().__init__(np.random.PCG64(0))
        self.shift = shift

    def integers(self, low, high, size):
        return np.full(size, self.shift)


def slow_windows(town: Town, u: int, purpose: str, length: int, stride: int) -> Windows:
    """One client's windows over its train events, from the log."""
    mine = np.array([p for p in town.train if town.past.users[p] == u])
    cut = int(uniform(SEED, purpose, town.devices.users[u : u + 1], PERIOD).item() * stride)
    windows = training_windows(town.past, mine, length=length, stride=stride, rng=CutAt(cut))
    windows = trimmed(take(windows, windows.newest.argsort()))
    newest = torch.tensor([int((town.past.users[: int(p)] == u).sum()) for p in windows.newest])
    return replace(windows, users=torch.zeros_like(windows.users), newest=newest)


def hidden_at_each_target(town: Town, rows: OwnRows, windows: Windows) -> Iterator[Tensor]:
    """The backbone's hidden state before each of one client's targets, window by window."""
    embed = own_embed(rows, torch.zeros(1, dtype=torch.int64), town.model.backbone.embed)
    for w in range(len(windows)):
        hidden = town.model.backbone.hidden(windows.tokens[w : w + 1], None, embed)[0]
        for source, target in zip(windows.sources[w].tolist(), windows.targets[w].tolist(), strict=True):
            if target != NO_TARGET:
                yield hidden[source]


def slow_query_mean(town: Town, rows: OwnRows, windows: Windows) -> Tensor:
    """One client's summed query embeddings as a unit vector."""
    total = sum(town.model.encoders.g(hidden[None])[0] for hidden in hidden_at_each_target(town, rows, windows))
    return total / total.norm()


def slow_taste(town: Town, rows: OwnRows, windows: Windows) -> Tensor:
    """The direction of one client's summed hidden states."""
    total = sum(hidden_at_each_target(town, rows, windows))
    return total / total.norm()


def slow_sessions(town: Town, u: int) -> int:
    """How many sessions one client began with its train events."""
    starts, last = 0, None
    for position in range(town.train.stop):
        if town.past.users[position] != u:
            continue
        now = position * 5000
        if position in town.train and (last is None or now - last > 6.5 * 3600):
            starts += 1
        last = now
    return starts


def slow_memory(town: Town, u: int, until: int) -> Memory:
    positions = [p for p in range(until) if town.past.users[p] == u]
    items = [int(town.past.items[town.past.place[p]]) for p in positions]
    return Memory(
        torch.tensor([0, len(positions)]),
        torch.tensor(items, dtype=torch.int64),
        torch.tensor([p * 5000 for p in positions], dtype=torch.int64),
    )


def slow_rows(town: Town, u: int, rows: OwnRows, taste: Tensor) -> OwnRows:
    """One client's rows, with those of all it met until the end of the train part, from the log."""
    whose, end = torch.tensor([u]), town.train.stop
    boost = town.model.met_boost * taste[None]
    mine = replace(rows, clients=rows.clients + u)
    return subset(with_met_items(mine, town.model.backbone, town.past, end, whose, boost), whose)[0]


def slow_begin(town: Town, me: DeviceState, u: int, rule: LocalRule) -> tuple[DeviceState, Lesson]:
    """What the beginning of a slice is for one client with train events."""
    windows = slow_windows(town, u, "window cuts", LENGTH, rule.stride)
    brief = slow_windows(town, u, "brief cuts", rule.prompt_history, max(1, rule.prompt_history - 1)) if (
        rule.prompt_history
    ) else None  # fmt: skip
    taste = slow_taste(town, me.rows, windows)
    rows = slow_rows(town, u, me.rows, taste) if rule.use_rows else me.rows
    h = slow_query_mean(town, rows, windows)[None]
    drift, prompts = observe(me.drift, h), me.prompts
    if not me.met:
        noise = normal(SEED, "first contact", me.users, 0, (L_P, WIDTH)).float()
        routed = route(h, town.library.v, top_m=rule.top_m, temperature=rule.temperature)
        prompts = first_contact(town.model.encoders.codec, town.library.v, *routed, noise)
    prompts = replace(prompts, short=prompts.short * rule.carry ** slow_sessions(town, u))
    lambda_s = adaptive_stability(drift.mean_drift, kappa=town.model.encoders.kappa, lambda_max=rule.lambda_max)
    points = torch.stack([h[0], drift.mean[0] / drift.mean[0].norm()])[None]
    gate = drift_gate(drift.drift, town.model.encoders.gate)
    yes = torch.ones(1, dtype=torch.bool)
    memory = slow_memory(town, u, town.train.stop)
    changed = {"prompts": prompts, "rows": rows, "drift": drift, "taste": taste[None], "memory": memory}
    begun = replace(me, met=yes, active=yes, contributes=yes, **changed)
    return with_fresh_moments(begun), Lesson(windows, h, gate, lambda_s, points, brief)


def slow_negatives(key: Tensor, windows: Windows, step: int) -> Tensor:
    """The negatives of one client's windows, one event after the other."""
    numbers = [
        uniform(SEED, "client negatives", event_keys(key, newest[None]), PERIOD * 100_000 + step, (RULE.negatives,))[0]
        for newest in windows.newest
    ]
    return (torch.stack(numbers) * N_ITEMS).long()


def slow_upload(town: Town, v: Tensor, me: DeviceState, server: RoundRule, round_: int) -> tuple[Tensor, Tensor]:
    """What the server gets from one device: its points and their prototypes, or its share of the sum."""
    codec, upload, key, n = town.model.encoders.codec, server.upload, me.users, server.points
    z = [codec.encode(me.prompts.long), codec.encode(me.prompts.long + me.prompts.short)][:n]
    block = torch.stack([(z[0][0] - each).norm() for each in v]).argmin()[None]
    nothing = torch.full((1,), NOTHING)
    block = block if me.contributes else nothing
    if server.form == "points":
        rounding = uniform(SEED, "quantise", key, round_, (n, D_Z))
        sent = [central_upload(z[p], block, upload, rounding[:, p]) for p in range(n)]
        return torch.stack([decode_points(each, upload)[0] for each in sent], dim=1), sent[0].block
    shape = (n, D_Z) if server.form == "noised points" else (K, D_Z + 1)
    if server.form == "integers":
        std = secure_std(upload, server.noise_multiplier, SECURE_SCALE, least=server.least, clients=server.least)
        share = SeededDraws(SEED).discrete_gaussian("noise share", key, round_, shape, std)
        return secure_upload(z[0], block, upload, SECURE_SCALE, share)[0], nothing
    own, rounding = normal(SEED, "local noise", key, round_, shape), uniform(SEED, "quantise", key, round_, shape)
    std = upload.noise_std(server.noise_multiplier, "local") * n**0.5
    if server.form == "noised rows":
        return local_sums(local_upload(z[0], block, upload, std, own, rounding), upload, std), nothing
    z = z if me.contributes else [torch.zeros_like(each) for each in z]
    codes = [compact_local_upload(z[p], v, upload, std, own[:, p], rounding[:, p]).codes for p in range(n)]
    points = [decode_points(PointUploads(each, block), upload, local_reach(upload, std))[0] for each in codes]
    return torch.stack(points, dim=1), nothing


def slow_round(
    town: Town, library: PrototypeLibrary, states: list[DeviceState], server: RoundRule, round_: int, rate: float
) -> PrototypeLibrary:
    """A round, one device after the other; with central trust those that have not learned since the base are silent."""
    by_token = sorted(states, key=lambda me: int(SeededDraws(SEED).tokens(me.users, round_)))
    sent = [
        slow_upload(town, library.v, me, server, round_)
        for me in by_token  # the geometric median of two uploads may be either of them: the later one
        if bool(uniform(SEED, "coin", me.users, round_) < rate) and (bool(me.contributes) or server.form != "points")
    ]
    points, block = torch.zeros(0, server.points, D_Z), torch.zeros(0, dtype=torch.int64)
    total = None
    if server.form in ("noised rows", "integers"):
        total = sum(part for part, _ in sent) if sent else None
    elif sent:
        points, block = (torch.cat([each[n] for each in sent]) for n in (0, 1))
    accepted = Accepted(len(sent), points, block, total)
    noise, parting = (stream(SEED, name, round_) for name in ("server noise", "separation"))
    return server_aggregate(library, accepted, server, seeded_noise(noise), parting)[0]


def slow_slice(
    town: Town, schedule: Schedule, rule: LocalRule, server: RoundRule
) -> tuple[DeviceState, PrototypeLibrary]:
    """The whole slice, one client after the other, each with its own optimiser."""
    library, model = town.library, replace(town.model, rule=rule)
    states = [select(town.devices, torch.tensor([u])) for u in range(town.n_users)]
    lessons: dict[int, Lesson] = {}
    for u in active_and_away(town)[0]:
        states[u], lessons[u] = slow_begin(town, states[u], u, rule)
    for what, number in timetable(schedule.steps, schedule.rounds):
        if what == "round":
            round_ = schedule.first_round + number
            library = slow_round(town, library, states, server, round_, schedule.sampling_rate)
            model = receive(model, library.broadcast())
            continue
        falling = 1.0 if rule.as_printed else 0.5 * (1 + math.cos(math.pi * number / schedule.steps))
        now = replace(rule, eta_l=falling * rule.eta_l, eta_r=falling * rule.eta_r)
        for u, lesson in lessons.items():
            both = [lesson.windows, *([lesson.brief] if lesson.brief is not None else [])]
            negatives = [slow_negatives(states[u].users, each, number) for each in both]
            states[u], _ = client_update(model, states[u], lesson, negatives[0], now, *negatives[1:])
    return join(states), library


def check_against_slow_slice(schedule: Schedule, rule: LocalRule = RULE, server: RoundRule = SERVER) -> None:
    town = a_town()
    devices, library, _ = simulated(town, schedule, rule=rule, server=server)
    slow_devices, slow_library = slow_slice(town, schedule, replace(rule, steps=schedule.steps), server)
    check_devices(devices, slow_devices, everybody(town), atol=5e-5)
    check_libraries(library, slow_library, atol=1e-5)


@pytest.mark.parametrize(("steps", "rounds"), [(0, 0), (0, 3), (1, 0), (1, 2), (2, 0), (4, 3)])
def test_a_slice_is_what_every_client_and_the_server_would_do_one_by_one(steps, rounds):
    check_against_slow_slice(replace(SCHEDULE, steps=steps, rounds=rounds))


@pytest.mark.parametrize(
    "rule",
    [
        replace(RULE, alignment="wasserstein"),
        replace(RULE, as_printed=True, lambda_p=1e-3),
        replace(RULE, use_prototypes=False, loss="bce"),
        replace(RULE, prompt_history=2),
        replace(RULE, use_rows=False),
    ],
    ids=["wasserstein", "printed", "no prototypes", "prompts in brief", "no rows"],
)
def test_a_slice_of_another_rule_is_that_of_every_client_alone_too(rule):
    check_against_slow_slice(replace(SCHEDULE, steps=1, rounds=1), rule)


@pytest.mark.parametrize("name", SERVERS)
def test_a_slice_of_another_trust_or_aggregator_is_that_of_every_client_alone_too(name):
    check_against_slow_slice(replace(SCHEDULE, steps=1, rounds=2), server=SERVERS[name])


@pytest.mark.parametrize("size", [1, 3, EVERYBODY])
def test_a_slice_begins_for_a_stack_as_it_does_for_each_of_its_clients(size):
    town = a_town()
    model, asked = replace(town.model, rule=replace(RULE, alignment="wasserstein")), []
    for stack in begin_stacks(model, town.devices, town.slice_, replace(SCHEDULE, chunk=size)):
        asked += stack.places.tolist()
        assert len(stack.places) <= size
        for n, u in enumerate(stack.places.tolist()):
            state, lesson = slow_begin(town, select(town.devices, torch.tensor([u])), u, model.rule)
            check_devices(select(stack.state, torch.tensor([n])), state, [0], atol=1e-5)
            for name in ("h", "gate", "lambda_s", "points"):
                found, expected = getattr(stack.lesson, name)[n], getattr(lesson, name)[0]
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            mine = trimmed(take(stack.lesson.windows, (stack.lesson.windows.users == n).nonzero()[:, 0]))
            width = lesson.windows.targets.shape[1]
            for name in ("tokens", "newest"):
                assert torch.equal(getattr(mine, name), getattr(lesson.windows, name))
            assert torch.equal(mine.targets[:, :width], lesson.windows.targets)
            assert (mine.targets[:, width:] == NO_TARGET).all()
    assert asked == active_and_away(town)[0]


def test_prompts_that_learn_in_brief_get_the_same_rows_and_other_prompts():
    town, once = a_town(), replace(SCHEDULE, steps=1, rounds=0)
    plain, *_ = simulated(town, once)
    brief, *_ = simulated(town, once, rule=replace(RULE, prompt_history=2))
    assert torch.equal(plain.rows.rows, brief.rows.rows)
    active = active_and_away(town)[0]
    both = [torch.cat([state.prompts.long, state.prompts.short], dim=1)[active] for state in (plain, brief)]
    assert (both[0] - both[1]).abs().amax((1, 2)).min() > 1e-4


@pytest.mark.parametrize("in_brief", [False, True])
@pytest.mark.parametrize("size", [1, 7])
def test_results_do_not_depend_on_the_size_of_a_chunk(size, in_brief, monkeypatch):
    town, rule = a_town(14), replace(RULE, prompt_history=2 if in_brief else 0)
    devices, library, told = simulated(town, rule=rule)
    monkeypatch.setattr(simulator, "UPLOADS_AT_ONCE", size)
    in_parts, library_too, told_too = simulated(town, replace(SCHEDULE, chunk=size), rule=rule)
    assert len(active_and_away(town)[0]) > 7
    check_devices(devices, in_parts, everybody(town), atol=1e-5)
    check_libraries(library, library_too, atol=1e-5)
    assert told == pytest.approx(told_too, abs=1e-4)


def renumbered(town: Town, order: list[int]) -> Town:
    """The same town whose user `order[n]` has number n."""
    number, slice_ = np.argsort(order), town.slice_
    items = slice_.past.items[slice_.past.place]
    other = a_slice(number[slice_.past.users], items, slice_.bounds[-1], town.n_users)
    other = replace(other, user_keys=slice_.user_keys[order])
    return replace(town, slice_=other, devices=join([select(town.devices, torch.tensor([u])) for u in order]))


@pytest.mark.parametrize("name", ["central", "local", "secure"])
def test_how_users_are_numbered_does_not_matter(name):
    town = a_town()
    order = np.random.default_rng(0).permutation(town.n_users).tolist()
    devices, library, told = simulated(town, server=SERVERS[name])
    others, library_too, told_too = simulated(renumbered(town, order), server=SERVERS[name])
    in_order = join([select(devices, torch.tensor([u])) for u in order])
    check_devices(others, in_order, everybody(town), atol=1e-5)
    check_libraries(library, library_too, atol=1e-5)
    assert told == pytest.approx(told_too, abs=1e-4)


class RecordedDraws:
    """Seeded draws that remember each number by whose it is, and that none is drawn twice.

    Negatives alone are: a window and one with little context that end with the same event are learned against the same.
    """

    def __init__(self, seed: int, seen: dict[tuple, object]) -> None:
        self.draws, self.seen = SeededDraws(seed), seen

    def kept(self, purpose: str, users: Tensor, round_: int, result: Tensor) -> Tensor:
        for user, row in zip(users.tolist(), result.tolist(), strict=True):
            known = self.seen.setdefault((purpose, user, round_), row)
            assert known is row or (purpose == "client negatives" and known == row)
        return result

    def uniform(self, purpose, users, round_, shape=()):
        return self.kept(purpose, users, round_, self.draws.uniform(purpose, users, round_, shape))

    def normal(self, purpose, users, round_, shape=()):
        return self.kept(purpose, users, round_, self.draws.normal(purpose, users, round_, shape))

    def discrete_gaussian(self, purpose, users, round_, shape, std):
        numbers = self.draws.discrete_gaussian(purpose, users, round_, shape, std)
        return self.kept(purpose, users, round_, numbers)

    def tokens(self, users, round_):
        return self.kept("token", users, round_, self.draws.tokens(users, round_))


def draws_of(town: Town, size: int, server: RoundRule, monkeypatch) -> dict[tuple, object]:
    """Every number that is drawn in a slice, by whose it is."""
    seen: dict[tuple, object] = {}

    with monkeypatch.context() as patch:
        patch.setattr(simulator, "SeededDraws", lambda seed: RecordedDraws(seed, seen))
        patch.setattr(simulator, "UPLOADS_AT_ONCE", size)
        rule = replace(RULE, prompt_history=2)
        simulated(town, replace(SCHEDULE, chunk=size), server=server, rule=rule)
    return seen


PURPOSES = {"window cuts", "brief cuts", "client negatives", "first contact", "coin", "token"}


@pytest.mark.parametrize(
    ("name", "noise"),
    [("central", {"quantise"}), ("local", {"quantise", "local noise"}), ("secure", {"noise share"})],
)
def test_every_draw_is_bit_equal_whatever_the_size_of_a_chunk(name, noise, monkeypatch):
    town = a_town(14)
    at_once = draws_of(town, EVERYBODY, SERVERS[name], monkeypatch)
    assert {key[0] for key in at_once} == PURPOSES | noise
    for size in (1, 7):
        assert draws_of(town, size, SERVERS[name], monkeypatch) == at_once


def test_a_users_coin_is_that_of_its_key_and_of_no_place():
    town = a_town()
    keys = town.devices.users
    for round_ in range(20):
        coins = toss_coins(SeededDraws(SEED), keys, round_, RATE)
        assert coins.tolist() == [bool(uniform(SEED, "coin", key[None], round_) < RATE) for key in keys]
    by_key, by_place = (
        torch.stack([toss_coins(SeededDraws(SEED), users, round_, RATE) for round_ in range(20)])
        for users in (keys, torch.arange(len(keys)))
    )
    assert not torch.equal(by_key, by_place)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others():
    town = a_town()
    (one, library, _), (again, library_too, _) = simulated(town), simulated(town)
    other, *_ = simulated(town, replace(SCHEDULE, seed=4))
    check_devices(one, again, everybody(town), atol=0)
    check_libraries(library, library_too, atol=0)
    assert not torch.equal(one.prompts.long, other.prompts.long)


def test_a_client_without_events_in_the_slice_keeps_everything_exactly():
    town = a_town()
    active, away = active_and_away(town)
    devices, _, told = simulated(town)
    check_devices(devices, town.devices, away, atol=0)
    assert int(select(town.devices, torch.tensor(away)).memory.counts.sum()) > 0
    assert len(select(town.devices, torch.tensor(away)).rows) > 0
    assert told["active_clients"] == len(active)
    assert devices.active.nonzero()[:, 0].tolist() == active
    for u in active:
        assert not torch.equal(devices.prompts.long[u], town.devices.prompts.long[u])
        assert int(devices.drift.periods[u]) == int(town.devices.drift.periods[u]) + 1
        assert bool(devices.contributes[u])
        before, after = (subset(state.rows, torch.tensor([u]))[0] for state in (town.devices, devices))
        assert len(after) > 0
        assert not torch.equal(after.rows, before.rows)


def test_devices_and_library_that_came_in_are_not_written_to():
    town = a_town()
    state, whole = town.devices, columns(town.devices)
    kept = [*whole, state.rows.rows, state.memory.items, state.memory.offsets, town.library.v, town.library.ema_sums]
    before = [tensor.clone() for tensor in kept]
    finish_slice(town.model, simulated(town)[0], town.slice_)
    assert all(torch.equal(now, old) for now, old in zip(kept, before, strict=True))


def nobody_there(town: Town) -> TimeSlice:
    """The slice with its train part empty."""
    bounds = town.slice_.bounds[-1]
    return replace(town.slice_, bounds=(replace(bounds, start=bounds.train_end),))


def test_a_slice_in_which_nobody_is_active_still_has_its_rounds():
    town = a_town()
    devices, library, told = simulated(town, slice_=nobody_there(town))
    check_devices(devices, town.devices, everybody(town), atol=0)
    assert library.version == town.library.version + SCHEDULE.rounds
    assert (told["active_clients"], told["rounds"]) == (0, SCHEDULE.rounds)


def test_without_rounds_the_library_stays_and_with_them_it_counts_one_version_each():
    town = a_town()
    _, library, _ = simulated(town, replace(SCHEDULE, rounds=0))
    check_libraries(library, town.library, atol=0)
    _, library, _ = simulated(town)
    assert library.version == town.library.version + SCHEDULE.rounds


def coins_of(town: Town, users: list[int], rate: float) -> float:
    """How many of these users' coins ask for an upload, in the mean over rounds."""
    rounds = range(FIRST_ROUND, FIRST_ROUND + SCHEDULE.rounds)
    keys = [town.devices.users[u : u + 1] for u in users]
    return sum(bool(uniform(SEED, "coin", key, r) < rate) for key in keys for r in rounds) / SCHEDULE.rounds


@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
def test_those_upload_who_have_learned_since_the_base_block_and_whose_coin_says_so(rate):
    town = a_town()
    devices, _, told = simulated(town, replace(SCHEDULE, sampling_rate=rate))
    speak = set(active_and_away(town)[0]) | set(town.devices.contributes.nonzero()[:, 0].tolist())
    assert sorted(speak) == devices.contributes.nonzero()[:, 0].tolist()
    assert len(speak) < town.n_users
    assert told["uploads_per_round"] == pytest.approx(coins_of(town, sorted(speak), rate))


@pytest.mark.parametrize("name", ["local", "local, points", "secure"])
@pytest.mark.parametrize("rate", [0.4, 1.0])
def test_where_devices_add_the_noise_everybody_who_is_asked_sends_it(name, rate):
    town = a_town()
    _, _, told = simulated(town, replace(SCHEDULE, sampling_rate=rate), server=SERVERS[name])
    assert told["uploads_per_round"] == pytest.approx(coins_of(town, everybody(town), rate))


@pytest.mark.parametrize("name", SERVERS)
def test_what_a_device_learned_in_the_base_block_alone_reaches_no_server(name):
    town, schedule = a_town(), replace(SCHEDULE, steps=0, sampling_rate=1.0)
    silent = [u for u in active_and_away(town)[1] if not town.devices.contributes[u]]
    assert any(bool(town.devices.met[u]) for u in silent)
    long = town.devices.prompts.long.clone()
    long[silent] = 3 * drawn(len(silent), L_P, WIDTH, seed=20)
    other = replace(town.devices, prompts=replace(town.devices.prompts, long=long))
    _, library, _ = simulated(town, schedule, server=SERVERS[name])
    _, library_too, _ = simulated(town, schedule, server=SERVERS[name], devices=other)
    check_libraries(library, library_too, atol=0)
    speak = replace(other, contributes=torch.ones_like(other.contributes))
    _, moved, _ = simulated(town, schedule, server=SERVERS[name], devices=speak)
    assert not torch.equal(moved.v, library.v)


def test_neither_short_prompts_nor_own_rows_reach_the_server():
    town, schedule = a_town(), replace(SCHEDULE, steps=0, sampling_rate=1.0)
    met = torch.ones_like(town.devices.met)  # a newcomer's first prompt follows its query, and that its rows
    state, rows = replace(town.devices, met=met), town.devices.rows
    prompts = replace(state.prompts, short=state.prompts.short + 1)
    other = replace(state, prompts=prompts, rows=replace(rows, rows=rows.rows + 1))
    _, library, _ = simulated(town, schedule, devices=state)
    _, library_too, _ = simulated(town, schedule, devices=other)
    check_libraries(library, library_too, atol=0)
    prompts = replace(prompts, long=prompts.long + drawn(*prompts.long.shape))
    _, moved, _ = simulated(town, schedule, devices=replace(other, prompts=prompts))
    assert not torch.equal(moved.v, library.v)


def poisoned(town: Town, u: int) -> DeviceState:
    long = town.devices.prompts.long.clone()
    long[u, 0, 1] = NAN
    return replace(town.devices, prompts=replace(town.devices.prompts, long=long))


def rows_of(state: DeviceState, u: int) -> OwnRows:
    return subset(state.rows, torch.tensor([u]))[0]


def test_a_client_with_a_broken_prompt_is_counted_and_changes_no_other_client():
    town, schedule = a_town(), replace(SCHEDULE, rounds=0)
    u = active_and_away(town)[0][0]
    others = [n for n in everybody(town) if n != u]
    devices, *_ = simulated(town, schedule)
    sick, _, told = simulated(town, schedule, devices=poisoned(town, u))
    begun, _, _ = simulated(town, replace(SCHEDULE, steps=0, rounds=0))
    check_devices(sick, devices, others, atol=1e-6)
    assert torch.equal(rows_of(sick, u).rows, rows_of(begun, u).rows)  # as they start: no step was taken
    before = poisoned(town, u).prompts.long[u]
    assert torch.equal(sick.prompts.long[u].isnan(), before.isnan())
    torch.testing.assert_close(sick.prompts.long[u], before, atol=0, rtol=0, equal_nan=True)
    assert told["stuck_clients"] == 1
    assert np.isfinite(told["client_loss"])


def test_a_client_with_a_broken_row_keeps_its_drift_and_changes_no_other_client():
    town, schedule = a_town(), replace(SCHEDULE, rounds=0)
    u = active_and_away(town)[0][1]
    assert bool(town.devices.met[u])
    theirs = town.devices.rows.clients != u
    rows = torch.where(theirs[:, None], town.devices.rows.rows, torch.tensor(NAN))
    broken = replace(town.devices, rows=replace(town.devices.rows, rows=rows))
    devices, *_ = simulated(town, schedule)
    sick, _, told = simulated(town, schedule, devices=broken)
    check_devices(sick, devices, [n for n in everybody(town) if n != u], atol=1e-6)
    assert torch.equal(sick.prompts.long[u], town.devices.prompts.long[u])
    for name in ("mean", "step", "total", "periods"):
        assert torch.equal(getattr(sick.drift, name)[u], getattr(town.devices.drift, name)[u])
    assert sick.rows.rows[sick.rows.clients != u].isfinite().all()
    assert told["stuck_clients"] == 1


def without_user(town: Town, u: int) -> tuple[DeviceState, TimeSlice]:
    """The town where a user has nothing to say and nothing to learn: its train events are somebody else's, away."""
    slice_, flag = town.slice_, torch.arange(town.n_users) != u
    keep = np.ones(len(slice_.past), dtype=bool)
    keep[[p for p in town.train if slice_.past.users[p] == u]] = False
    past = slice_.past
    gone = int((~keep).sum())
    users, items = past.users[keep], past.items[past.place][keep]
    times = slice_.times[keep]
    bounds = slice_.bounds[-1]
    cut = replace(bounds, train_end=bounds.train_end - gone, val_end=bounds.val_end - gone, end=bounds.end - gone)
    other = replace(slice_, bounds=(cut,), past=histories(users, items, times, town.n_users), times=times)
    return replace(town.devices, contributes=town.devices.contributes & flag), other


def test_an_active_client_that_is_broken_leaves_the_same_library_as_one_that_is_not_there():
    town = a_town()
    u = active_and_away(town)[0][0]
    sick, library, _ = simulated(town, devices=poisoned(town, u))
    gone, slice_ = without_user(town, u)
    devices, library_too, _ = simulated(town, devices=gone, slice_=slice_)
    assert not devices.active[u]
    check_libraries(library, library_too, atol=1e-5)
    check_devices(sick, devices, [n for n in everybody(town) if n != u], atol=1e-5)
    assert library.v.isfinite().all()


@pytest.mark.parametrize("name", SERVERS)
def test_a_broken_upload_counts_as_none(name):
    town, schedule = a_town(), replace(SCHEDULE, steps=1, rounds=1, sampling_rate=1.0)
    u = next(n for n in active_and_away(town)[1] if bool(town.devices.contributes[n]))
    flag = torch.arange(town.n_users) != u
    gone = replace(town.devices, contributes=town.devices.contributes & flag)
    _, library, _ = simulated(town, schedule, devices=poisoned(town, u), server=SERVERS[name])
    _, library_too, _ = simulated(town, schedule, devices=gone, server=SERVERS[name])
    check_libraries(library, library_too, atol=1e-6)
    _, sound, _ = simulated(town, schedule, server=SERVERS[name])
    assert not torch.equal(sound.v, library.v)


@pytest.mark.parametrize("name", ["local", "local, points", "local, two points", "secure"])
def test_a_broken_upload_never_breaks_a_round_whose_noise_is_made_on_the_devices(name):
    town = a_town()
    devices, library, _ = simulated(town, devices=poisoned(town, 0), server=SERVERS[name])
    assert library.v.isfinite().all()
    torch.testing.assert_close(library.v.norm(dim=-1), torch.ones(K))
    assert devices.prompts.long[1:].isfinite().all()


def test_what_is_told_of_a_slice_is_counted_by_hand():
    town = a_town()
    _, _, told = simulated(town, replace(SCHEDULE, steps=1, rounds=1, sampling_rate=1.0))
    states, _ = slow_slice(town, replace(SCHEDULE, steps=1, rounds=0), replace(RULE, steps=1), SERVER)
    speak = states.contributes
    z = town.model.encoders.codec.encode(states.prompts.long[speak])
    assert told["clipped_share"] == pytest.approx(float((z.norm(dim=1) > 1.0).float().mean()))
    active = active_and_away(town)[0]
    zeros = [float((states.prompts.short[u] == 0).float().mean()) for u in active]
    assert told["short_sparsity"] == pytest.approx(sum(zeros) / len(zeros))
    assert told["stuck_clients"] == 0
    losses = []
    for u in active:
        state, lesson = slow_begin(town, select(town.devices, torch.tensor([u])), u, RULE)
        negatives = slow_negatives(state.users, lesson.windows, 0)
        losses.append(float(client_update(town.model, state, lesson, negatives, RULE)[1].loss))
    assert told["client_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_rounds_are_summed_up_by_their_means_and_what_nobody_measured_is_left_out():
    assert summarise_rounds([]) == {"rounds": 0}
    reports = [RoundReport(4, 1, clipped=0.5, smallest_distance=0.7), RoundReport(6, 2, clipped=0.0)]
    last = replace(reports[1], smallest_distance=0.4)
    expected = {"rounds": 2, "uploads_per_round": 5.0, "clipped_share": 0.25, "smallest_distance": 0.4, "refused": 3}
    assert summarise_rounds([reports[0], last]) == expected
    assert "refused" not in summarise_rounds([RoundReport(4)])


def test_after_the_slice_those_who_took_part_remember_its_validation_part_too():
    town = a_town()
    devices, library, _ = simulated(town)
    after = finish_slice(receive(town.model, library.broadcast()), devices, town.slice_)
    active, away = active_and_away(town)
    for u in everybody(town):
        mine = select(after, torch.tensor([u])).memory
        expected = slow_memory(town, u, len(town.past)) if u in active else select(devices, torch.tensor([u])).memory
        for f in fields(Memory):
            assert torch.equal(getattr(mine, f.name), getattr(expected, f.name))
    check_rows = select(after, torch.tensor(away)).rows
    assert torch.equal(check_rows.rows, select(town.devices, torch.tensor(away)).rows.rows)
    met = {(u, int(item)) for u in active for item in slow_memory(town, u, len(town.past)).items}
    found = set(zip(after.rows.clients.tolist(), after.rows.items.tolist(), strict=True))
    assert {pair for pair in found if pair[0] in active} == met
    assert not after.active.any()


def test_after_the_slice_its_validation_events_decide_with_the_newest_prototypes():
    town = a_town()
    devices, library, _ = simulated(town)
    model = receive(town.model, library.broadcast())
    after = finish_slice(model, devices, town.slice_)
    losses, users = variant_losses(model, devices, validation_questions(town.slice_, LENGTH, torch.device("cpu")))
    assert torch.equal(after.losses, record_losses(devices.losses, losses, users))
    best = (after.losses + model.prior).argmin(1).tolist()
    assert list(zip(after.use_prompt.tolist(), after.use_rows.tolist(), strict=True)) == [VARIANTS[v] for v in best]
    assert len(set(best)) > 1


def test_a_device_that_was_away_catches_up_with_all_it_missed_and_learns_only_from_the_new_slice():
    town = a_town()
    devices, _, _ = simulated(town)
    devices = finish_slice(town.model, devices, town.slice_)
    bounds, n = town.slice_.bounds[-1], len(town.past)
    items = town.past.items[town.past.place]
    extra = np.array([u for u in everybody(town) for _ in range(2)])
    users = np.concatenate([town.past.users, extra])
    later = SliceBounds(bounds.index + 1, n, len(users), len(users), len(users))
    slice_ = a_slice(users, np.concatenate([items, extra % N_ITEMS]), later, town.n_users)
    (stack,) = begin_stacks(town.model, devices, slice_, replace(SCHEDULE, slice_index=PERIOD + 1))
    assert stack.places.tolist() == everybody(town)
    for u in everybody(town):
        mine = select(stack.state, torch.tensor([u])).memory
        assert mine.items.tolist() == [*slow_memory(town, u, n).items.tolist(), u % N_ITEMS, u % N_ITEMS]
        windows = stack.lesson.windows
        targets = windows.targets[windows.users == u]
        assert targets[targets != NO_TARGET].tolist() == [u % N_ITEMS] * 2
        assert int(windows.newest[windows.users == u].max()) == len(mine.items) - 1


def test_users_who_come_with_the_slice_learn_on_new_devices_and_change_nobody_elses_start():
    town = a_town()
    older = select(town.devices, torch.arange(town.n_users - 2))
    grown = resize(older, torch.from_numpy(town.slice_.user_keys))
    devices, library, _ = simulated(town, devices=grown)
    expected, library_too, _ = simulated(town)
    check_devices(devices, expected, everybody(town), atol=0)
    check_libraries(library, library_too, atol=0)


def test_stacks_that_were_begun_and_put_back_hold_their_places():
    town = a_town()
    stacks = list(begin_stacks(town.model, town.devices, town.slice_, replace(SCHEDULE, chunk=3)))
    whole = put_stacks(town.devices, stacks)
    for stack in stacks:
        check_devices(select(whole, stack.places), stack.state, list(range(len(stack.places))), atol=0)
    check_devices(whole, town.devices, active_and_away(town)[1], atol=0)
    assert put_stacks(town.devices, []) is town.devices
    assert whole.moments is None


class Counting(TorchDispatchMode):
    """Counts the tensor operations that are dispatched."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


FEW, MANY = 10, 80  # users; one in five is away


def operations(n: int, steps: int, rounds: int, server: RoundRule = SERVER) -> int:
    town = a_town(n)
    with Counting() as count:
        simulated(town, replace(SCHEDULE, steps=steps, rounds=rounds), server=server)
    return count.calls


@pytest.mark.parametrize(("steps", "rounds"), [(0, 0), (1, 0), (1, 1), (2, 1)])
def test_a_round_of_eight_clients_takes_as_many_tensor_operations_as_one_of_sixty_four(steps, rounds):
    assert [len(active_and_away(a_town(n))[0]) for n in (FEW, MANY)] == [8, 64]
    assert len(a_town(MANY).train) == 8 * len(a_town(FEW).train)
    assert operations(FEW, steps, rounds) == operations(MANY, steps, rounds) > 200


@pytest.mark.parametrize("name", ["local", "secure", "median", "barycenter"])
def test_so_does_a_round_of_another_server(name):
    assert operations(FEW, 1, 1, SERVERS[name]) == operations(MANY, 1, 1, SERVERS[name]) > 200


def test_bfloat16_changes_nothing_on_a_processor():
    town = a_town()
    (plain, library, _), (half, library_too, _) = simulated(town), simulated(town, rule=replace(RULE, bf16=True))
    check_devices(plain, half, everybody(town), atol=0)
    check_libraries(library, library_too, atol=0)
