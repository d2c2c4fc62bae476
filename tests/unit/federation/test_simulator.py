"""A whole slice against every client played alone, in chunks of any size, on every kind of table, with poison."""

import math
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import random_model

from protofed.backbone.sasrec import SASRec, at_rest
from protofed.client.codec import QueryEncoder, random_linear_codec, unit
from protofed.client.drift import Gate, adaptive_stability, drift_gate, observe
from protofed.client.own_rows import OwnRows, no_rows, own_embed, subset, with_met_items
from protofed.client.prompts import PromptState, first_contact
from protofed.client.router import route
from protofed.client.steps import AdamWState
from protofed.client.update import ClientState, Lesson, LocalRule, client_update, fresh_state
from protofed.federation import simulator
from protofed.federation.lessons import ClientData, brief_data, chunks, client_data, negatives_of, session_starts
from protofed.federation.simulator import (
    Encoders,
    Schedule,
    broadcast,
    client_stack,
    fresh_moments,
    keep_stack,
    query_means,
    rows_of_stack,
    simulate_slice,
    tastes,
    timetable,
)
from protofed.federation.table import ClientTable, drift_of, new_table
from protofed.privacy.draws import bernoulli, normal
from protofed.privacy.mechanism import seeded_noise
from protofed.privacy.upload import UploadRule
from protofed.seeds import stream
from protofed.server.aggregate import ServerRule, server_aggregate
from protofed.server.library import PrototypeLibrary, new_library
from protofed.slices.histories import Histories, histories
from protofed.slices.windows import NO_TARGET

CPU = torch.device("cpu")
L_P, WIDTH, D_Z, K = 2, 8, 6, 4
LENGTH, STRIDE = 6, 3
N_ITEMS, N_ROWS = 24, 16
NAN = float("nan")
EVERYBODY = 10_000  # a chunk that no test fills


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed))


@dataclass(frozen=True)
class Town:
    """Everything a slice starts with. The first events are the base; some users and items come after them."""

    past: Histories
    cut: int
    backbone: SASRec
    encoders: Encoders
    library: PrototypeLibrary
    own: OwnRows
    data: ClientData
    sessions: Tensor

    @property
    def n_users(self) -> int:
        return self.past.n_users


@cache
def a_town(n_users: int = 10) -> Town:
    rng = np.random.default_rng(n_users)
    n, cut = 16 * n_users, 9 * n_users
    users = rng.integers(0, n_users, n)
    users[:cut] = users[:cut] % (n_users - 2)  # the last two are newcomers
    users[cut:][users[cut:] % 5 == 3] += 1  # every fifth is away
    items = (rng.random(n) * N_ITEMS * (0.5 + 0.5 * np.arange(n) / n)).astype(np.int64)
    past = histories(users % n_users, items, np.arange(n) * 5000, n_users)
    backbone = at_rest(random_model(N_ROWS, seed=4))
    codec = random_linear_codec(L_P, WIDTH, Generator().manual_seed(1), d_z=D_Z)
    g = QueryEncoder(WIDTH, Generator().manual_seed(2), d_z=D_Z).requires_grad_(False)
    gate = Gate(torch.tensor(0.1), torch.tensor(0.2), torch.tensor(1.0), torch.tensor(-1.0))
    library = new_library(torch.linalg.qr(drawn(D_Z, D_Z, seed=3)).Q[:K].contiguous(), 5.0)
    early = with_met_items(no_rows(WIDTH), backbone, past, cut, torch.arange(n_users))
    early = replace(early, rows=early.rows + 0.1 * drawn(*early.rows.shape, seed=5))
    own = with_met_items(early, backbone, past, n, torch.arange(n_users))
    sessions = session_starts(past, np.arange(cut, n), 20_000.0)
    return Town(past, cut, backbone, Encoders(codec, g, gate, 2.0), library, own, data_of(past, cut), sessions)


def data_of(past: Histories, cut: int, without: int | None = None) -> ClientData:
    positions = np.arange(cut, len(past))
    positions = positions[past.users[positions] != without]
    return client_data(past, positions, length=LENGTH, stride=STRIDE, rng=np.random.default_rng(8))


def a_table(town: Town, folder=None) -> ClientTable:
    """Base users have prompts and a past; newcomers have not been met."""
    table = new_table(town.n_users, L_P, WIDTH, D_Z, folder=folder)
    old = torch.tensor(sorted(set(town.past.users[: town.cut].tolist())))
    table.long[old], table.short[old] = drawn(len(old), L_P, WIDTH, seed=11), 0.5 * drawn(len(old), L_P, WIDTH, seed=12)
    table.mean[old], table.step[old] = unit(drawn(len(old), D_Z, seed=13)), 0.1 * drawn(len(old), D_Z, seed=14)
    table.total[old], table.periods[old], table.met[old] = 0.4, 3, True
    return table


SCHEDULE = Schedule(
    local_steps=4,
    rounds=3,
    first_round=5,
    sampling_rate=0.6,
    negatives=6,
    n_items=N_ITEMS,
    chunk=EVERYBODY,
    lambda_max=1.0,
    carry=0.5,
    seed=3,
    slice_index=2,
)
SERVER = ServerRule(UploadRule(K, D_Z), 1.0, margin=0.3)
RULE = LocalRule(eta_l=0.02, eta_s=0.1, eta_r=0.01)


def simulated(
    town: Town,
    schedule: Schedule = SCHEDULE,
    *,
    table: ClientTable | None = None,
    own: OwnRows | None = None,
    data: ClientData | None = None,
    server: ServerRule = SERVER,
    rule: LocalRule = RULE,
    brief: ClientData | None = None,
) -> tuple[ClientTable, PrototypeLibrary, OwnRows, dict[str, float]]:
    table = a_table(town) if table is None else table
    own, data = town.own if own is None else own, town.data if data is None else data
    library, own, told = simulate_slice(
        town.backbone, town.encoders, town.library, table, own, data, town.sessions, rule, server, schedule, brief
    )
    return table, library, own, told


def brief_of(town: Town) -> ClientData:
    """The town's active clients and their events, each beside at most two tokens."""
    positions = np.arange(town.cut, len(town.past))
    brief = brief_data(town.data, town.past, positions, length=2, rng=np.random.default_rng(9))
    assert brief is not None
    return brief


def active_and_away(town: Town) -> tuple[list[int], list[int]]:
    active = town.data.users.tolist()
    return active, [u for u in range(town.n_users) if u not in active]


def test_the_town_has_active_and_absent_clients_newcomers_and_new_items():
    town = a_town()
    active, away = active_and_away(town)
    table = a_table(town)
    assert len(active) > 4
    assert any(bool(table.met[u]) for u in away)
    assert any(not bool(table.met[u]) for u in active)
    assert int(town.own.items.max()) >= N_ROWS
    assert len(set(town.sessions[town.data.users].tolist())) > 1


def columns(table: ClientTable) -> dict[str, Tensor]:
    return {f.name: getattr(table, f.name) for f in fields(table)}


def check_tables(one: ClientTable, other: ClientTable, users: list[int], *, atol: float) -> None:
    for name, column in columns(one).items():
        torch.testing.assert_close(column[users], columns(other)[name][users], atol=atol, rtol=0, equal_nan=True)


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


def slow_query_mean(town: Town, rows: OwnRows, windows) -> Tensor:
    """One client's summed query embeddings as a unit vector, target by target."""
    total = torch.zeros(D_Z)
    for w in range(len(windows)):
        embed = own_embed(rows, torch.zeros(1, dtype=torch.int64), town.backbone.embed)
        hidden = town.backbone.hidden(windows.tokens[w : w + 1], None, embed)[0]
        for source, target in zip(windows.sources[w].tolist(), windows.targets[w].tolist(), strict=True):
            if target != NO_TARGET:
                total = total + town.encoders.g(hidden[source : source + 1])[0]
    return total / total.norm()


@pytest.mark.parametrize("size", [1, 3, EVERYBODY])
def test_a_clients_query_is_the_mean_over_its_targets(size):
    town = a_town()
    active, _ = subset(town.own, town.data.users)
    alone = [slow_query_mean(town, subset(active, torch.tensor([n]))[0], w) for n, w in _one_by_one(town)]
    for where, windows in chunks(town.data, size, CPU):
        rows, part = rows_of_stack(active, where)
        assert torch.equal(rows.rows, active.rows[part])
        h = query_means(town.backbone, town.encoders.g, rows, windows, where.stop - where.start)
        torch.testing.assert_close(h, torch.stack(alone[where]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [3, EVERYBODY])
def test_a_clients_taste_is_the_direction_of_its_summed_hidden_states(size):
    town = a_town()
    found = tastes(town.backbone, town.own, town.data, size)
    for n, windows in _one_by_one(town):
        rows, _ = subset(town.own, town.data.users[n : n + 1])
        total = torch.zeros(WIDTH)
        for w in range(len(windows)):
            embed = own_embed(rows, torch.zeros(1, dtype=torch.int64), town.backbone.embed)
            hidden = town.backbone.hidden(windows.tokens[w : w + 1], None, embed)[0]
            pairs = zip(windows.sources[w].tolist(), windows.targets[w].tolist(), strict=True)
            total = total + sum(hidden[source] for source, target in pairs if target != NO_TARGET)
        torch.testing.assert_close(found[n], total / total.norm(), atol=1e-5, rtol=0)


def _one_by_one(town: Town):
    return [(where.start, windows) for where, windows in chunks(town.data, 1, CPU)]


def test_the_rows_of_a_stack_are_the_subset_of_its_clients():
    town = a_town()
    active, _ = subset(town.own, town.data.users)
    for where in (slice(0, 3), slice(2, 5), slice(0, len(town.data)), slice(4, 4)):
        rows, _ = rows_of_stack(active, where)
        expected, _ = subset(town.own, town.data.users[where])
        assert all(torch.equal(getattr(rows, name), getattr(expected, name)) for name in ("clients", "items", "rows"))


def test_a_stack_that_was_kept_comes_back_as_it_was():
    town, where = a_town(), slice(1, 4)
    table, (active, _) = a_table(town), subset(town.own, town.data.users)
    moments = fresh_moments(table, town.data, active)
    before = client_stack(table, town.data, active, moments, where, CPU)

    def other(x: Tensor, seed: int) -> Tensor:
        return drawn(*x.shape, seed=seed) if x.is_floating_point() else x + seed

    def stepped(kept: AdamWState, seed: int) -> AdamWState:
        return AdamWState(other(kept.first, seed), other(kept.second, seed + 1), other(kept.steps, seed + 2))

    prompts = PromptState(other(before.prompts.long, 1), other(before.prompts.short, 2))
    rows = replace(before.rows, rows=other(before.rows.rows, 3))
    state = ClientState(prompts, stepped(before.moments, 4), rows, stepped(before.row_moments, 7))
    keep_stack(table, town.data, active, moments, where, state)
    back = client_stack(table, town.data, active, moments, where, CPU)
    for part in ("prompts", "rows", "moments", "row_moments"):
        for f in fields(getattr(state, part)):
            assert torch.equal(getattr(getattr(back, part), f.name), getattr(getattr(state, part), f.name)), part


def slow_meeting(town: Town, table: ClientTable, u: int, windows, rows: OwnRows) -> tuple[PromptState, Lesson]:
    """What the beginning of a slice is for one client; its drift goes to the table."""
    me = torch.tensor([u])
    h = slow_query_mean(town, rows, windows)[None]
    drift = observe(drift_of(table, me, CPU), h)
    for name in ("mean", "step", "total", "periods"):
        getattr(table, name)[u] = getattr(drift, name)[0]
    prompts = PromptState(table.long[me], table.short[me])
    if not table.met[u]:
        noise = normal(SCHEDULE.seed, "first contact", me, 0, (L_P, WIDTH)).float()
        routed = route(h, town.library.v, top_m=RULE.top_m, temperature=RULE.temperature)
        prompts = first_contact(town.encoders.codec, town.library.v, *routed, noise)
    table.met[u] = True
    prompts = replace(prompts, short=prompts.short * SCHEDULE.carry ** int(town.sessions[u]))
    lambda_s = adaptive_stability(drift.mean_drift, kappa=town.encoders.kappa, lambda_max=SCHEDULE.lambda_max)
    points = torch.stack([h[0], drift.mean[0] / drift.mean[0].norm()])[None]
    return prompts, Lesson(windows, h, drift_gate(drift.drift, town.encoders.gate), lambda_s, points)


def slow_round(town: Town, library: PrototypeLibrary, table: ClientTable, number: int, rate: float):
    users = [
        u
        for u in range(town.n_users)
        if bool(table.met[u]) and bool(bernoulli(SCHEDULE.seed, "coin", torch.tensor([u]), number, rate))
    ]
    z = torch.stack([town.encoders.codec.encode(table.long[u : u + 1]) for u in users])
    noise, parting = (stream(SCHEDULE.seed, name, number) for name in ("server noise", "separation"))
    numbers = {"seed": SCHEDULE.seed, "round_": number, "noise": seeded_noise(noise), "rng": parting}
    return server_aggregate(library, torch.tensor(users), z, SERVER, **numbers)[0]


def slow_slice(
    town: Town, schedule: Schedule, rule: LocalRule = RULE
) -> tuple[ClientTable, PrototypeLibrary, dict[int, OwnRows]]:
    """The whole slice, one client after the other, each with its own optimiser."""
    table, library = a_table(town), town.library
    states, lessons = {}, {}
    for n, windows in _one_by_one(town):
        u = int(town.data.users[n])
        rows, _ = subset(town.own, torch.tensor([u]))
        prompts, lessons[u] = slow_meeting(town, table, u, windows, rows)
        states[u] = fresh_state(prompts, rows)
        table.long[u], table.short[u] = prompts.long[0], prompts.short[0]
    for what, number in timetable(schedule.local_steps, schedule.rounds):
        if what == "round":
            library = slow_round(town, library, table, schedule.first_round + number, schedule.sampling_rate)
            continue
        shared = broadcast(town.backbone, town.encoders.codec, library.v)
        falling = 0.5 * (1 + math.cos(math.pi * number / schedule.local_steps))
        now = replace(rule, eta_l=falling * rule.eta_l, eta_r=falling * rule.eta_r)
        for u, lesson in lessons.items():
            key = schedule.slice_index * 100_000 + number
            negatives = negatives_of(lesson.windows, schedule.negatives, schedule.n_items, seed=schedule.seed, step=key)
            states[u], _ = client_update(shared, states[u], lesson, negatives, now)
            table.long[u], table.short[u] = states[u].prompts.long[0], states[u].prompts.short[0]
    return table, library, {u: state.rows for u, state in states.items()}


@pytest.mark.parametrize(
    ("steps", "rounds"),
    [
        (0, 0),
        (0, 3),
        (1, 0),
        (1, 2),
        (2, 0),
        (4, 3),
    ],
)
def test_a_slice_is_what_every_client_and_the_server_would_do_one_by_one(steps, rounds):
    check_against_slow_slice(replace(SCHEDULE, local_steps=steps, rounds=rounds), RULE)


@pytest.mark.parametrize(
    "rule",
    [
        replace(RULE, alignment="wasserstein"),
        replace(RULE, as_printed=True, lambda_p=1e-3),
        replace(RULE, use_prototypes=False, loss="bce"),
    ],
    ids=["wasserstein", "printed", "no prototypes"],
)
def test_a_slice_of_another_rule_is_that_of_every_client_alone_too(rule):
    check_against_slow_slice(replace(SCHEDULE, local_steps=1, rounds=1), rule)


def check_against_slow_slice(schedule: Schedule, rule: LocalRule) -> None:
    town = a_town()
    table, library, own, _ = simulated(town, schedule, rule=rule)
    slow_table, slow_library, slow_rows = slow_slice(town, schedule, rule)
    check_tables(table, slow_table, list(range(town.n_users)), atol=5e-5)
    check_libraries(library, slow_library, atol=1e-5)
    for u, rows in slow_rows.items():
        mine, _ = subset(own, torch.tensor([u]))
        assert torch.equal(mine.items, rows.items)
        torch.testing.assert_close(mine.rows, rows.rows, atol=5e-5, rtol=0)


def test_prompts_that_learn_in_brief_get_the_same_rows_and_other_prompts():
    town = a_town()
    plain, _, rows, _ = simulated(town, replace(SCHEDULE, local_steps=1, rounds=0))
    brief, _, rows_too, _ = simulated(town, replace(SCHEDULE, local_steps=1, rounds=0), brief=brief_of(town))
    assert torch.equal(rows.rows, rows_too.rows)
    active = town.data.users
    assert (plain.long[active] - brief.long[active]).abs().amax((1, 2)).min() > 1e-4


@pytest.mark.parametrize("in_brief", [False, True])
@pytest.mark.parametrize("size", [1, 7])
def test_results_do_not_depend_on_the_size_of_a_chunk(size, in_brief):
    town = a_town(14)
    everybody, brief = list(range(town.n_users)), brief_of(town) if in_brief else None
    table, library, own, told = simulated(town, brief=brief)
    in_parts, library_too, own_too, told_too = simulated(town, replace(SCHEDULE, chunk=size), brief=brief)
    assert len(list(chunks(town.data, size, CPU))) > 1
    check_tables(table, in_parts, everybody, atol=1e-5)
    check_libraries(library, library_too, atol=1e-5)
    torch.testing.assert_close(own.rows, own_too.rows, atol=1e-5, rtol=0)
    assert torch.equal(own.clients, own_too.clients)
    assert torch.equal(own.items, own_too.items)
    assert told == pytest.approx(told_too, abs=1e-4)


def draws_of(town: Town, size: int, monkeypatch) -> dict[tuple, list]:
    """Every number that is drawn in a slice, by whose it is."""
    seen: dict[tuple, list] = {}

    def negatives(windows, n, n_items, *, seed, step):
        result = negatives_of(windows, n, n_items, seed=seed, step=step)
        for newest, row in zip(windows.newest.tolist(), result.tolist(), strict=True):
            assert ("negatives", newest, step) not in seen
            seen["negatives", newest, step] = row
        return result

    def by_user(draw):
        def recorded(seed, purpose, users, round_, *rest):
            result = draw(seed, purpose, users, round_, *rest)
            for user, row in zip(users.tolist(), result.tolist(), strict=True):
                assert (purpose, user, round_) not in seen
                seen[purpose, user, round_] = row
            return result

        return recorded

    with monkeypatch.context() as patch:
        patch.setattr(simulator, "negatives_of", negatives)
        patch.setattr(simulator, "normal", by_user(normal))
        patch.setattr(simulator, "bernoulli", by_user(bernoulli))
        simulated(town, replace(SCHEDULE, chunk=size))
    return seen


def test_every_draw_is_bit_equal_whatever_the_size_of_a_chunk(monkeypatch):
    town = a_town(14)
    at_once = draws_of(town, EVERYBODY, monkeypatch)
    assert {key[0] for key in at_once} == {"negatives", "first contact", "coin"}
    for size in (1, 7):
        assert draws_of(town, size, monkeypatch) == at_once


def test_a_mapped_table_learns_what_a_table_in_memory_learns_bit_for_bit(tmp_path):
    town = a_town()
    table, library, own, told = simulated(town)
    mapped, library_too, own_too, told_too = simulated(town, table=a_table(town, tmp_path / "mapped"))
    check_tables(table, mapped, list(range(town.n_users)), atol=0)
    check_libraries(library, library_too, atol=0)
    assert torch.equal(own.rows, own_too.rows)
    assert told == told_too
    on_disk = np.fromfile(tmp_path / "mapped" / "long.bin", dtype=np.float32).reshape(table.long.shape)
    assert np.array_equal(on_disk, table.long.numpy())


def test_the_same_seed_gives_the_same_bits_and_another_seed_others():
    town = a_town()
    (one, library, *_), (again, library_too, *_) = simulated(town), simulated(town)
    other, *_ = simulated(town, replace(SCHEDULE, seed=4))
    check_tables(one, again, list(range(town.n_users)), atol=0)
    check_libraries(library, library_too, atol=0)
    assert not torch.equal(one.long, other.long)


def test_a_client_without_events_in_the_slice_keeps_everything_exactly():
    town = a_town()
    active, away = active_and_away(town)
    table, _, own, told = simulated(town)
    check_tables(table, a_table(town), away, atol=0)
    absent = torch.isin(town.own.clients, torch.tensor(away))
    assert int(absent.sum()) > 0
    assert torch.equal(own.rows[absent], town.own.rows[absent])
    assert told["active_clients"] == len(active)
    for u in active:
        assert not torch.equal(table.long[u], a_table(town).long[u])
        assert int(table.periods[u]) == int(a_table(town).periods[u]) + 1
        assert not torch.equal(subset(own, torch.tensor([u]))[0].rows, subset(town.own, torch.tensor([u]))[0].rows)


def test_own_rows_and_library_that_came_in_are_not_written_to():
    town = a_town()
    rows, v = town.own.rows.clone(), town.library.v.clone()
    simulated(town)
    assert torch.equal(town.own.rows, rows)
    assert torch.equal(town.library.v, v)


def test_a_slice_in_which_nobody_is_active_still_has_its_rounds():
    town = a_town()
    nobody = client_data(town.past, np.arange(0), length=LENGTH, stride=STRIDE, rng=np.random.default_rng(0))
    table, library, own, told = simulated(town, data=nobody)
    check_tables(table, a_table(town), list(range(town.n_users)), atol=0)
    assert torch.equal(own.rows, town.own.rows)
    assert library.version == town.library.version + SCHEDULE.rounds
    assert (told["active_clients"], told["rounds"]) == (0, SCHEDULE.rounds)


def test_without_rounds_the_library_stays_and_with_them_it_counts_one_version_each():
    town = a_town()
    _, library, *_ = simulated(town, replace(SCHEDULE, rounds=0))
    check_libraries(library, town.library, atol=0)
    _, library, *_ = simulated(town)
    assert library.version == town.library.version + SCHEDULE.rounds


@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
def test_those_upload_who_were_met_and_whose_coin_says_so(rate):
    town = a_town()
    table, _, _, told = simulated(town, replace(SCHEDULE, sampling_rate=rate))
    met = set(active_and_away(town)[0]) | set(a_table(town).met.nonzero()[:, 0].tolist())
    coins = [
        bool(bernoulli(SCHEDULE.seed, "coin", torch.tensor([u]), SCHEDULE.first_round + r, rate))
        for u in sorted(met)
        for r in range(SCHEDULE.rounds)
    ]
    assert sorted(met) == table.met.nonzero()[:, 0].tolist()
    assert told["uploads_per_round"] == pytest.approx(sum(coins) / SCHEDULE.rounds)


def test_neither_short_prompts_nor_own_rows_reach_the_server():
    town, schedule = a_town(), replace(SCHEDULE, local_steps=0, sampling_rate=1.0)
    table = a_table(town)
    table.met[:] = True  # a newcomer's first prompt follows its query, and that its rows
    other = a_table(town)
    other.met[:] = True
    other.short.add_(1)
    changed = replace(town.own, rows=town.own.rows + 1)
    _, library, *_ = simulated(town, schedule, table=table)
    _, library_too, *_ = simulated(town, schedule, table=other, own=changed)
    check_libraries(library, library_too, atol=0)
    other.long.add_(drawn(*other.long.shape))
    _, moved, *_ = simulated(town, schedule, table=other, own=changed)
    assert not torch.equal(moved.v, library.v)


def poisoned_table(town: Town, u: int) -> ClientTable:
    table = a_table(town)
    table.long[u, 0, 1] = NAN
    return table


def test_a_client_with_a_broken_prompt_is_counted_and_changes_no_other_client():
    town, schedule = a_town(), replace(SCHEDULE, rounds=0)
    u = active_and_away(town)[0][0]
    others = [n for n in range(town.n_users) if n != u]
    table, _, own, _ = simulated(town, schedule)
    sick, _, own_too, told = simulated(town, schedule, table=poisoned_table(town, u))
    check_tables(sick, table, others, atol=1e-6)
    theirs = town.own.clients != u
    torch.testing.assert_close(own_too.rows[theirs], own.rows[theirs], atol=1e-6, rtol=0)
    assert torch.equal(own_too.rows[~theirs], town.own.rows[~theirs])
    assert torch.equal(sick.long[u].isnan(), poisoned_table(town, u).long[u].isnan())
    torch.testing.assert_close(sick.long[u], poisoned_table(town, u).long[u], atol=0, rtol=0, equal_nan=True)
    assert told["stuck_clients"] == 1
    assert np.isfinite(told["client_loss"])


def test_a_client_with_a_broken_row_keeps_its_drift_and_changes_no_other_client():
    town, schedule = a_town(), replace(SCHEDULE, rounds=0)
    u = active_and_away(town)[0][1]
    theirs = town.own.clients != u
    broken = replace(town.own, rows=torch.where(theirs[:, None], town.own.rows, torch.tensor(NAN)))
    table, *_ = simulated(town, schedule)
    sick, _, own, told = simulated(town, schedule, own=broken)
    check_tables(sick, table, [n for n in range(town.n_users) if n != u], atol=1e-6)
    for name in ("long", "mean", "step", "total", "periods"):
        assert torch.equal(getattr(sick, name)[u], getattr(a_table(town), name)[u])
    assert own.rows[theirs].isfinite().all()
    assert told["stuck_clients"] == 1


def test_an_active_client_that_is_broken_leaves_the_same_library_as_one_that_is_not_there():
    town = a_town()
    u = active_and_away(town)[0][0]
    gone = a_table(town)
    gone.met[u] = False
    sick, library, own, _ = simulated(town, table=poisoned_table(town, u))
    table, library_too, own_too, _ = simulated(town, table=gone, data=data_of(town.past, town.cut, without=u))
    check_libraries(library, library_too, atol=1e-5)
    check_tables(sick, table, [n for n in range(town.n_users) if n != u], atol=1e-5)
    theirs = town.own.clients != u
    torch.testing.assert_close(own.rows[theirs], own_too.rows[theirs], atol=1e-5, rtol=0)
    assert library.v.isfinite().all()


SERVERS = {
    "central": SERVER,
    "no noise": replace(SERVER, noise_multiplier=0.0),
    "local": replace(SERVER, trust="local"),
    "secure": replace(SERVER, trust="secure-aggregation"),
    "median": replace(SERVER, noise_multiplier=0.0, aggregator="geometric-median"),
    "barycenter": replace(SERVER, noise_multiplier=0.0, aggregator="barycenter"),
}


@pytest.mark.parametrize(
    "name",
    [
        "central",
        "no noise",
        "median",
        "barycenter",
    ],
)
def test_a_broken_upload_counts_as_none(name):
    town = a_town()
    u = next(n for n in active_and_away(town)[1] if bool(a_table(town).met[n]))
    gone, schedule = a_table(town), replace(SCHEDULE, local_steps=1, rounds=1, sampling_rate=1.0)
    gone.met[u] = False
    _, library, *_ = simulated(town, schedule, table=poisoned_table(town, u), server=SERVERS[name])
    _, library_too, *_ = simulated(town, schedule, table=gone, server=SERVERS[name])
    check_libraries(library, library_too, atol=1e-6)


@pytest.mark.parametrize("name", ["local", "secure"])
def test_a_broken_upload_never_breaks_a_round_whose_noise_is_made_on_the_devices(name):
    town = a_town()
    table, library, *_ = simulated(town, table=poisoned_table(town, 0), server=SERVERS[name])
    others = [n for n in range(town.n_users) if n != 0]
    assert library.v.isfinite().all()
    torch.testing.assert_close(library.v.norm(dim=-1), torch.ones(K))
    assert table.long[others].isfinite().all()


class Counting(TorchDispatchMode):
    """Counts the tensor operations that are dispatched."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def operations(n: int, steps: int, rounds: int) -> int:
    town = a_town(n)
    table = a_table(town)
    with Counting() as count:
        simulated(town, replace(SCHEDULE, local_steps=steps, rounds=rounds), table=table)
    return count.calls


@pytest.mark.parametrize(("steps", "rounds"), [(1, 1), (2, 1)])
def test_a_round_of_eight_clients_takes_as_many_tensor_operations_as_one_of_sixty_four(steps, rounds):
    few, many = a_town(8), a_town(64)
    assert len(many.data) > 5 * len(few.data)
    assert many.data.windows.tokens.shape[0] > 5 * few.data.windows.tokens.shape[0]
    assert operations(8, steps, rounds) == operations(64, steps, rounds) > 200


def test_bfloat16_changes_nothing_on_a_processor():
    town = a_town()
    (plain, library, *_), (half, library_too, *_) = simulated(town), simulated(town, rule=replace(RULE, bf16=True))
    check_tables(plain, half, list(range(town.n_users)), atol=0)
    check_libraries(library, library_too, atol=0)
