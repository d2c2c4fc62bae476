"""ProtoFed-SP as a whole on the tiny world: modes, every ablation, the ledger, small and broken slices."""

import hashlib
import itertools
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import (
    LENGTH,
    every_value,
    questions,
    shuffled_after,
    tiny_config,
    tiny_log,
    tiny_stream,
    warmed_up_on,
)

from protofed.backbone.training import PlainDescent
from protofed.client.codec import CodecTraining
from protofed.client.memory import Memory
from protofed.client.model import VARIANTS
from protofed.client.own_rows import OwnRows
from protofed.client.state import DeviceState, columns, new_device, select
from protofed.config import ABLATIONS
from protofed.errors import ConfigError
from protofed.federation import preparation
from protofed.inference import end
from protofed.inference.device import recommend
from protofed.methods.protocol import World
from protofed.methods.protofed_rules import as_run
from protofed.methods.protofed_sp import ProtoFedSP, ProtoFedState, model_of, schedule_of
from protofed.privacy.accountant import epsilon
from protofed.privacy.draws import SeededDraws, toss_coins
from protofed.privacy.ledger import Release
from protofed.seeds import stream
from protofed.slices.histories import Queries
from protofed.slices.stream import SliceStream, TimeSlice
from protofed.snapshot import restore, take_snapshot

METHOD = ProtoFedSP()
DELTA = 1e-5
PART_OF = {
    "long": "prompts",
    "short": "prompts",
    "mean": "drift",
    "step": "drift",
    "total": "drift",
    "periods": "drift",
}


COLUMNS = (  # of a stack of devices, in their order
    *("users", "long", "short", "mean", "step", "total", "periods", "taste", "met", "active", "contributes"),
    *("losses", "use_prompt", "use_rows"),
)


@dataclass(frozen=True)
class Run:
    """A method that has learned slice 1: its states before and after, and what it told."""

    world: World
    before: ProtoFedState
    after: ProtoFedState
    told: dict

    def scores(self, state: ProtoFedState | None = None, asked: Queries | None = None) -> Tensor:
        return METHOD.score(self.world, state or self.after, questions()[1] if asked is None else asked)

    def learn(self, state: ProtoFedState, slice_: TimeSlice) -> tuple[ProtoFedState, dict]:
        after, told = METHOD.learn(self.world, state, slice_, PlainDescent())
        return after, dict(told)


def world_of(**settings: object) -> World:
    config = tiny_config(**{"privacy__sampling_rate": 0.5, "protofed__base_steps": 2, **settings})
    return World(config, tiny_stream().slice_(0), warmed_up_on(config, tiny_stream())[0])


def started(world: World) -> ProtoFedState:
    """`start` with a query encoder trained for 5 steps instead of 500."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "CodecTraining", lambda: CodecTraining(steps=5))
        return METHOD.start(world)


@cache
def run(**settings: object) -> Run:
    world = world_of(**settings)
    before = started(world)
    after, told = METHOD.learn(world, before, tiny_stream().slice_(1), PlainDescent())
    return Run(world, before, after, dict(told))


def ablated(name: str) -> Run:
    return run(protofed__ablate=name)


def same(one: object, other: object) -> bool:
    first, second = every_value(one), every_value(other)
    return first.keys() == second.keys() and all(torch.equal(tensor, second[key]) for key, tensor in first.items())


def by_name(devices: DeviceState) -> dict[str, Tensor]:
    return dict(zip(COLUMNS, columns(devices), strict=True))


def shaken(state: ProtoFedState, *columns: str) -> ProtoFedState:
    """The state whose devices have other numbers in some columns."""
    rng, devices = stream(0, "shaken"), state.devices
    for name in columns:
        part = PART_OF.get(name)
        owner = getattr(devices, part) if part else devices
        drawn = replace(owner, **{name: torch.randn(getattr(owner, name).shape, generator=rng)})
        devices = replace(devices, **{part: drawn}) if part else drawn
    return replace(state, devices=devices)


def moves_scores(of: Run, *columns: str) -> bool:
    return not torch.equal(of.scores(shaken(of.after, *columns)), of.scores())


def test_the_literal_mode_never_reaches_the_printed_upload_period():
    literal = run(protofed__mode="literal")
    assert literal.told["rounds"] == 0
    assert same(literal.after.library, literal.before.library)
    assert literal.before.library.n_prototypes == 128
    config, first = as_run(literal.world.config), tiny_stream().slice_(1)
    rounds = [schedule_of(config, literal.before, replace(first, index=t)).rounds for t in range(1, 168)]
    assert rounds[:166] == [0] * 166  # 498 local steps
    assert rounds[166] == 1


def test_the_printed_soft_threshold_leaves_the_short_prompt_dense_and_the_relative_one_does_not():
    assert run(protofed__mode="literal").told["short_sparsity"] < 0.05
    assert run().told["short_sparsity"] > 0.2


def test_the_literal_mode_keeps_no_own_rows_and_states_no_release():
    literal = run(protofed__mode="literal")
    assert len(literal.after.devices.rows) == 0
    assert literal.after.devices.use_prompt.all()
    assert METHOD.releases(literal.world, literal.after, 1) == ()


def test_without_alignment_clients_learn_as_with_a_pull_of_strength_0():
    assert same(ablated("alignment").after, run(protofed__lambda_max=0.0).after)
    assert not torch.equal(ablated("alignment").after.devices.prompts.long, run().after.devices.prompts.long)


def test_without_a_short_prompt_clients_learn_as_with_a_short_rate_of_0():
    out = ablated("short")
    assert same(out.after, run(protofed__short_rate=0.0).after)
    assert not out.after.devices.prompts.short.any()
    assert out.told["short_sparsity"] == 1
    assert not moves_scores(out, "short")
    assert moves_scores(run(), "short")


def test_without_a_long_prompt_nothing_is_uploaded_and_long_prompts_are_not_read():
    out = ablated("long")
    assert (out.told["rounds"], out.after.rounds) == (0, 0)
    assert METHOD.releases(out.world, out.after, 1) == ()
    assert same(out.after.library, out.before.library)
    assert torch.equal(*long_of_those_met_before(out))
    assert not moves_scores(out, "long")
    assert moves_scores(run(), "long")


def long_of_those_met_before(of: Run) -> tuple[Tensor, Tensor]:
    """The long prompts after and before of everybody who was met before."""
    met = of.before.devices.met
    return of.after.devices.prompts.long[: len(met)][met], of.before.devices.prompts.long[met]


def with_other_prototypes(state: ProtoFedState) -> ProtoFedState:
    return replace(state, library=replace(state.library, v=state.library.v.roll(1, 1).neg()))


def test_without_prototypes_in_the_prompt_those_who_have_a_memory_do_not_read_them():
    _, asked = questions()
    for of, reads in ((ablated("prototypes"), False), (run(), True)):
        memory = of.after.devices.met[asked.users.clamp(max=len(of.after.devices) - 1)]
        memory &= asked.users < len(of.after.devices)
        assert memory.sum() > 20
        scores, other = of.scores()[memory], of.scores(with_other_prototypes(of.after))[memory]
        assert torch.equal(scores, other) != reads


def test_static_prototypes_stay_as_the_base_block_left_them_and_cost_nothing():
    out = ablated("static-prototypes")
    assert same(out.after.library, out.before.library)
    assert out.told["rounds"] == 0
    assert METHOD.releases(out.world, out.after, 1) == ()
    assert not torch.equal(run().after.library.v, run().before.library.v)


def test_without_own_rows_nobody_has_or_uses_any():
    out = ablated("own-rows")
    assert len(out.before.devices.rows) == len(out.after.devices.rows) == out.told["own_rows"] == 0
    assert not out.after.devices.use_rows.any()
    assert len(run().after.devices.rows) > len(run().before.devices.rows) > 0


def test_without_acceptance_everybody_uses_prompt_and_rows():
    out = ablated("acceptance")
    assert out.after.devices.use_prompt.all()
    assert out.after.devices.use_rows.all()
    assert not run().after.devices.use_prompt.all() or not run().after.devices.use_rows.all()
    assert torch.equal(
        out.after.devices.prompts.long, run().after.devices.prompts.long
    )  # it changes who uses what, not what is learned


def test_without_prompts_nobody_uses_one():
    out = ablated("prompts")
    assert not out.after.devices.use_prompt.any()
    assert not moves_scores(out, "long", "short", "step")
    assert torch.equal(out.scores(), out.scores(with_other_prototypes(out.after)))
    assert out.after.devices.use_rows.any()


def test_without_anything_personal_scores_depend_on_the_history_and_not_on_the_user():
    out, (_, asked) = ablated("personal"), questions()
    assert not moves_scores(out, "long", "short", "step", "losses")
    assert torch.equal(out.scores(), out.scores(asked=replace(asked, users=asked.users.flip(0) + 5)))
    assert not torch.equal(run().scores(), run().scores(asked=replace(asked, users=asked.users.flip(0) + 5)))
    assert not torch.equal(out.scores(), out.scores(with_other_prototypes(out.after)))
    assert METHOD.releases(out.world, out.after, 1) == ()
    assert len(out.after.devices.rows) == 0
    assert torch.equal(*long_of_those_met_before(out))


def test_every_ablation_is_tested_here():
    tested = {"alignment", "short", "long", "prototypes", "static-prototypes", "own-rows"}
    of_the_head = {"own-past", "item-counts", "query-time", "popularity"}  # protofed's: test_headed.py
    assert tested | {"acceptance", "prompts", "personal"} | of_the_head == set(ABLATIONS)


def test_without_noise_nothing_is_in_the_ledger_and_new_items_get_public_rows():
    nodp, data = run(protofed__mode="nodp"), tiny_stream()
    assert METHOD.releases(nodp.world, nodp.after) == METHOD.releases(nodp.world, nodp.after, 5) == ()
    assert nodp.after.noise_multiplier == 0
    model = nodp.after.backbone
    assert model.n_rows == data.n_train_items(1) > data.n_train_items(0)
    new = (data.slice_(1).train_counts()[data.n_train_items(0) :] > 0).nonzero()[:, 0] + data.n_train_items(0)
    assert len(new) == nodp.told["new_rows"] > 0
    assert model.has_row[new].all()
    assert ((model.items[new] - model.mean_row).norm(dim=1) > 1e-3).all()


def test_the_reference_mode_has_no_public_row_beyond_the_base_block():
    reference = run()
    assert reference.after.backbone.n_rows == tiny_stream().n_train_items(0)
    assert same(reference.after.backbone, reference.world.backbone)
    second, _ = reference.learn(reference.after, tiny_stream().slice_(2))
    assert same(second.backbone, reference.world.backbone)


def test_what_was_written_ahead_is_what_is_then_spent():
    of = run()
    assert METHOD.releases(of.world, of.before) == ()
    ahead = METHOD.releases(of.world, of.before, 1)
    assert ahead == METHOD.releases(of.world, of.after) == (Release(1.0, 0.5, 4),)
    second, told = of.learn(of.after, tiny_stream().slice_(2))
    assert told["rounds"] == 4
    assert METHOD.releases(of.world, of.after, 1) == METHOD.releases(of.world, second) == (Release(1.0, 0.5, 8),)
    assert METHOD.releases(of.world, of.before, 2) == METHOD.releases(of.world, second)


def test_uploads_stop_when_the_budget_is_spent():
    budget = epsilon((Release(2.0, 1.0, 5),), DELTA) + 1e-6
    of = run(privacy__sampling_rate=1.0, privacy__noise_multiplier=2.0, privacy__target_epsilon=budget)
    assert (of.before.allowed_rounds, of.told["rounds"]) == (5, 4)
    ahead = METHOD.releases(of.world, of.after, 1)
    second, told = of.learn(of.after, tiny_stream().slice_(2))
    assert told["rounds"] == 1
    assert ahead == METHOD.releases(of.world, second) == METHOD.releases(of.world, second, 3) == (Release(2.0, 1.0, 5),)
    assert epsilon(ahead, DELTA) <= budget < epsilon((Release(2.0, 1.0, 6),), DELTA)
    third, told = of.learn(second, tiny_stream().slice_(2))
    assert (told["rounds"], told["reseeded"]) == (0, 0)
    assert same(third.library, second.library)
    assert not torch.equal(third.devices.prompts.long, second.devices.prompts.long)  # devices learn on


def test_reseeding_an_idle_prototype_spends_nothing():
    of = run()
    counts = of.before.library.ema_counts.clone()
    counts[3] = -100.0  # stays below zero through four rounds of noise
    idle = replace(of.before, library=replace(of.before.library, ema_counts=counts))
    after, told = of.learn(idle, tiny_stream().slice_(1))
    assert told["reseeded"] == 1
    assert METHOD.releases(of.world, after) == METHOD.releases(of.world, of.after)


@pytest.mark.parametrize("trust", ["central", "secure-aggregation", "local"])
def test_a_private_run_without_noise_or_target_is_refused_in_one_line(trust):
    world = world_of(privacy__noise_multiplier=0.0, privacy__trust=trust)
    with pytest.raises(ConfigError, match=r"^a private run needs --target-epsilon or --noise-multiplier, got 0 .*$"):
        METHOD.start(world)


@pytest.mark.slow
def test_the_log_counts_bytes_of_a_round_and_numbers_that_learn():
    world = world_of()
    before = METHOD.start(world)
    after, told = METHOD.learn(world, before, tiny_stream().slice_(1), PlainDescent())
    k = after.library.n_prototypes
    assert told["bytes_up"] == 16 + 2  # one byte an entry, two for the index
    assert told["bytes_down"] == k * 16 * 4
    assert told["trainable_parameters"] == k * 16
    own = len(after.devices.rows) * 16 / int(after.devices.met.sum())
    assert told["trainable_parameters_per_user"] == pytest.approx(2 * 2 * 16 + own)
    silent = world_of(protofed__ablate="prompts")
    _, nothing = METHOD.learn(silent, METHOD.start(silent), tiny_stream().slice_(1), PlainDescent())
    assert nothing["bytes_up"] == nothing["bytes_down"] == 0


def test_a_prior_of_raw_counts_is_refused_where_noise_is_promised_and_allowed_elsewhere():
    with pytest.raises(ConfigError, match=r"^scoring.popularity_prior counts raw events .*, got 0.5; use --mode nodp"):
        METHOD.start(world_of(scoring__popularity_prior=0.5))
    METHOD.start(world_of(scoring__popularity_prior=0.5, protofed__mode="nodp"))


def test_an_aggregator_that_cannot_be_noised_is_refused_before_slice_1():
    with pytest.raises(ConfigError, match=r"^the geometric-median aggregator .* central trust; use fedkmeans, .*$"):
        started(world_of(protofed__aggregator="geometric-median"))


def test_more_prototypes_than_the_cohort_feeds_are_refused_before_slice_1():
    with pytest.raises(ConfigError, match=r"^33 prototypes are more than the 32 uploads a round expects .*$"):
        started(world_of(protofed__prototypes=33))


@cache
def with_newcomers() -> SliceStream:
    """The tiny stream in which five users and five items occur in slice 1 for the first and only time."""
    return SliceStream(shuffled_after(tiny_log(), tiny_stream().bounds[1].start, newcomers=5), tiny_config().stream)


def test_a_user_with_one_event_gets_a_prompt_no_drift_and_one_row():
    data, of = with_newcomers(), run()
    slice_ = data.slice_(1)
    seen = np.bincount(slice_.past.users)
    first = slice_.train_positions[:5]
    users = slice_.past.users[first].tolist()
    once = [user for user in users if seen[user] == 1]
    assert once
    after, _ = of.learn(of.before, slice_)
    asked = data.queries(data.query_set(1, "test"), np.arange(len(once)), LENGTH)
    scores = of.scores(after, replace(asked, users=torch.tensor(once)))
    assert scores.isfinite().all()
    for user in once:
        devices = after.devices
        assert bool(devices.met[user])
        assert (int(devices.drift.periods[user]), float(devices.drift.total[user])) == (1, 0.0)
        assert devices.prompts.long[user].isfinite().all()
        assert devices.prompts.long[user].any()
        position = int(first[users.index(user)])
        assert devices.rows.items[devices.rows.clients == user].tolist() == [
            slice_.past.items[slice_.past.place[position]]
        ]


def cut_to(slice_: TimeSlice, n: int) -> TimeSlice:
    """The slice with a train part of n events."""
    last = slice_.bounds[-1]
    return replace(slice_, bounds=(*slice_.bounds[:-1], replace(last, train_end=last.start + n)))


@pytest.mark.parametrize("n", [0, 3])
def test_users_without_an_event_in_the_train_part_keep_all_they_have(n):
    of = run()
    slice_ = cut_to(tiny_stream().slice_(1), n)
    active = sorted(set(slice_.past.users[slice_.train_positions].tolist()))
    after, told = of.learn(of.before, slice_)
    assert told["active_clients"] == len(active) <= n
    assert told["rounds"] == 4  # the noise comes whether anybody uploads or not
    size = len(of.before.devices)
    inactive = torch.ones(len(after.devices), dtype=torch.bool).index_fill(0, torch.tensor(active).long(), False)
    now, then = (by_name(state.devices) for state in (after, of.before))
    for name in COLUMNS:
        if name in ("losses", "use_prompt", "use_rows"):
            continue  # evidence fades and validation events speak for everybody
        assert torch.equal(now[name][:size][inactive[:size]], then[name][inactive[:size]]), name
        if name != "users":
            assert not now[name][size:][inactive[size:]].any(), name
    for user in active:
        assert now["periods"][user] == (then["periods"][user] if user < size else 0) + 1
    rows, before = after.devices.rows, of.before.devices.rows
    mine, known = inactive[rows.clients], inactive[before.clients]
    assert torch.equal(rows.items[mine], before.items[known])
    assert torch.equal(rows.rows[mine], before.rows[known])


def test_a_slice_without_a_test_event_is_scored_to_nothing():
    of, data = run(), tiny_stream()
    asked = data.queries(data.query_set(1, "test"), np.arange(0), LENGTH)
    assert of.scores(asked=asked).shape == (0, asked.n_items)


def without_validation(slice_: TimeSlice) -> TimeSlice:
    asked, columns = slice_.validation, ("positions", "positives", "users", "negatives", "hard")
    return replace(slice_, validation=replace(asked, **{name: getattr(asked, name)[:0] for name in columns}))


def test_a_slice_without_a_validation_event_only_lets_evidence_fade():
    of = run()
    after, _ = of.learn(of.before, without_validation(tiny_stream().slice_(1)))
    n = len(of.before.devices)
    assert torch.equal(after.devices.losses[:n], of.before.devices.losses / 2)
    assert not after.devices.losses[n:].any()


def test_no_client_has_a_row_for_a_validation_item_when_that_item_decides_about_rows(monkeypatch):
    """A row that an event itself brought about makes rows look good on that event: selection on its own answer."""
    of, slice_ = run(), tiny_stream().slice_(1)
    used = []

    def spying(model, devices, validation, head):
        used.append(devices.rows)
        return real(model, devices, validation, head)

    real = end.variant_losses
    monkeypatch.setattr(end, "variant_losses", spying)
    of.learn(of.before, slice_)
    (rows,) = used
    pairs = set(zip(rows.clients.tolist(), rows.items.tolist(), strict=True))
    users, items = slice_.past.users, slice_.past.items[slice_.past.place]
    until = slice_.bounds[-1].train_end
    met = set(zip(users[:until].tolist(), items[:until].tolist(), strict=True))
    asked = slice_.validation
    novel = {pair for pair in zip(asked.users.tolist(), asked.positives.tolist(), strict=True) if pair not in met}
    assert len(novel) > 10
    assert not pairs & novel


def after_both_slices() -> tuple[World, ProtoFedState]:
    world = world_of()
    state = started(world)
    for index in (1, 2):
        state, _ = ProtoFedSP().learn(world, state, tiny_stream().slice_(index), PlainDescent())
    return world, state


def own_items(state: ProtoFedState, user: int) -> set[int]:
    rows = state.devices.rows
    return set(rows.items[rows.clients == user].tolist())


def pasts(queries: Queries) -> list[set[int]]:
    edges = queries.offsets.tolist()
    return [set(queries.past_items[a:b].tolist()) for a, b in itertools.pairwise(edges)]


def test_a_row_for_what_a_client_met_later_does_not_answer_an_earlier_question():
    world, state = after_both_slices()
    asked, queries = questions(1)
    told = ProtoFedSP().score(world, state, queries)
    given_away = 0
    for b, past in enumerate(pasts(queries)):
        user, positive = int(queries.users[b]), int(asked.positives[b])
        given_away += positive in own_items(state, user) - past
        rows = state.devices.rows
        known = (rows.clients == user) & torch.tensor([item in past for item in rows.items.tolist()])
        only_known = OwnRows(rows.clients[known], rows.items[known], rows.rows[known])
        before = replace(state, devices=replace(state.devices, rows=only_known))
        only = tiny_stream().queries(asked, np.array([b]), LENGTH)
        assert torch.allclose(ProtoFedSP().score(world, before, only)[0], told[b], atol=1e-5)
    assert given_away > len(queries) / 4  # clients do hold rows for many of these very answers


def test_when_a_slice_is_tested_every_own_row_is_about_the_past():
    _, state = after_both_slices()
    _, queries = questions(2)
    assert all(own_items(state, int(user)) <= past for user, past in zip(queries.users, pasts(queries), strict=True))


def test_a_state_comes_back_whole_and_learns_on_alike():
    of = run()
    back = restore(take_snapshot(of.after))
    assert same(back, of.after)
    second, again = (of.learn(state, tiny_stream().slice_(2))[0] for state in (of.after, back))
    assert same(second, again)


def poisoned(state: ProtoFedState, user: int) -> ProtoFedState:
    long = state.devices.prompts.long.clone()
    long[user] = torch.nan
    return replace(state, devices=replace(state.devices, prompts=replace(state.devices.prompts, long=long)))


def test_one_poisoned_client_changes_nobody_elses_device_and_breaks_no_round():
    of = run(privacy__rounds_per_slice=0)  # prototypes are what clients share: without rounds they stay apart
    slice_ = tiny_stream().slice_(1)
    user = int(slice_.past.users[slice_.train_positions[0]])
    assert bool(of.before.devices.met[user])
    after, told = of.learn(poisoned(of.before, user), slice_)
    others = torch.arange(len(after.devices)) != user
    for now, clean in zip(columns(after.devices), columns(of.after.devices), strict=True):
        assert torch.equal(now[others], clean[others])
    mine = after.devices.rows.clients == user
    assert torch.equal(after.devices.rows.rows[~mine], of.after.devices.rows.rows[~mine])
    assert told["stuck_clients"] == 1
    noisy, key = run(), torch.from_numpy(slice_.user_keys)[user : user + 1]
    assert any(
        bool(toss_coins(SeededDraws(noisy.world.config.seed), key, n, 0.5)) for n in range(4)
    )  # it is asked for an upload
    after, _ = noisy.learn(poisoned(noisy.before, user), slice_)
    assert all(x.isfinite().all() for x in (after.library.v, after.library.ema_sums, after.library.ema_counts))
    assert after.devices.prompts.long[others].isfinite().all()


def test_what_is_met_at_once_changes_no_learning_but_what_validation_events_say():
    plain, counted = run(), run(protofed__at_once=True)
    one, other = (by_name(of.after.devices) for of in (counted, plain))
    for column in COLUMNS:
        if column not in ("losses", "use_prompt", "use_rows"):
            assert torch.equal(one[column], other[column]), column
    assert same(counted.after.library, plain.after.library)
    assert same(counted.after.devices.rows, plain.after.devices.rows)
    assert counted.after.met_boost == plain.after.met_boost > 0
    assert not torch.equal(counted.scores(), plain.scores())
    assert METHOD.releases(counted.world, counted.after, 1) == METHOD.releases(plain.world, plain.after, 1)
    without = run(protofed__at_once=True, protofed__ablate="own-rows")
    assert torch.equal(without.scores(), ablated("own-rows").scores())


def of_one_user(of: Run, queries: Queries, row: int) -> DeviceState:
    """The user's device after slice 1, with everything that the question's own past holds."""
    user, past = int(queries.users[row]), slice(int(queries.offsets[row]), int(queries.offsets[row + 1]))
    model = model_of(of.world, of.after, queries.n_items)
    inside = user < len(of.after.devices)
    device = select(of.after.devices, torch.tensor([user])) if inside else new_device(model, 17)
    items, times = queries.past_items[past], queries.past_times[past]
    return replace(device, memory=Memory(torch.tensor([0, len(items)]), items, times))


@pytest.mark.parametrize("at_once", [False, True])
def test_one_users_device_recommends_what_the_stack_of_all_users_does(at_once):
    of = run(protofed__at_once=at_once)
    asked, queries = questions(1, "test")
    n_items = tiny_stream().query_set(1, "test").n_items
    together = METHOD.score(of.world, of.after, queries)
    model = model_of(of.world, of.after, n_items)
    strangers = (queries.users >= len(of.after.devices)).nonzero()[:, 0].tolist()
    assert strangers
    for row in {0, len(asked) // 2, len(asked) - 1, strangers[0]}:
        ranking = recommend(model, of_one_user(of, queries, row), n=n_items)
        assert torch.allclose(ranking.scores, together[row][ranking.items], atol=1e-4)
        assert torch.equal(ranking.scores, ranking.scores.sort(descending=True).values)


def test_a_device_remembers_its_users_own_events_in_order_and_no_others():
    """Who took part remembers the train and the validation part; who did not, what it knew before."""
    of, slice_ = run(), tiny_stream().slice_(1)
    past, devices = slice_.past, of.after.devices
    active = set(past.users[slice_.train_positions].tolist())
    base_end = tiny_stream().slice_(0).bounds[-1].train_end
    for user in range(len(devices)):
        until = len(past) if user in active else base_end
        positions = np.flatnonzero(past.users[:until] == user)
        memory = select(devices, torch.tensor([user])).memory
        assert memory.items.tolist() == past.items[past.place[positions]].tolist()
        assert memory.times.tolist() == slice_.times[positions].tolist()
    assert 0 < len(active) < len(devices)


def test_after_the_base_block_nobody_has_anything_to_upload_and_later_those_who_learned_do():
    of, slice_ = run(), tiny_stream().slice_(1)
    assert of.before.devices.met.any()
    assert not of.before.devices.contributes.any()
    active = sorted(set(slice_.past.users[slice_.train_positions].tolist()))
    assert of.after.devices.contributes.nonzero()[:, 0].tolist() == active
    _, told = of.learn(of.before, cut_to(slice_, 0))
    assert told["uploads_per_round"] == 0
    assert run().told["uploads_per_round"] > 5


def test_draws_belong_to_the_hashed_user_and_not_to_the_place_in_the_log():
    of, slice_ = run(), tiny_stream().slice_(1)
    keys = torch.from_numpy(slice_.user_keys)
    assert torch.equal(of.after.devices.users, keys)
    digests = [hashlib.sha256(str(user).encode()).digest() for user in tiny_log().user_ids.to_pylist()[: len(keys)]]
    assert keys.tolist() == [int.from_bytes(digest[:8], "big") // 2 for digest in digests]
    assert of.told["uploads_per_round"] == asked_per_round(of, of.after.devices.contributes)


def asked_per_round(of: Run, who: Tensor) -> float:
    """How many of these devices the coins of the four rounds of slice 1 choose, on average."""
    keys, seed = torch.from_numpy(tiny_stream().slice_(1).user_keys), of.world.config.seed
    return sum(int((toss_coins(SeededDraws(seed), keys, n, 0.5) & who).sum()) for n in range(4)) / 4


@pytest.mark.parametrize("trust", ["local", "secure-aggregation"])
def test_where_devices_add_the_noise_everybody_who_is_asked_sends_some(trust):
    """The noise of a round must not tell who had something to say."""
    of = run(privacy__trust=trust)
    everybody = torch.ones_like(of.after.devices.contributes)
    assert of.told["uploads_per_round"] == asked_per_round(of, everybody)
    assert asked_per_round(of, everybody) > asked_per_round(of, of.after.devices.contributes)
    _, told = of.learn(of.before, cut_to(tiny_stream().slice_(1), 0))
    assert told["uploads_per_round"] == of.told["uploads_per_round"]


def test_a_new_users_device_does_what_base_users_advise():
    of = run()
    model = model_of(of.world, of.after, 10)
    device = new_device(model, 42)
    assert device.users.tolist() == [42]
    assert not device.met.any()
    assert not len(device.memory.items)
    allowed = [float(x) if may else float("inf") for x, may in zip(model.prior, model.rule.allowed, strict=True)]
    best = allowed.index(min(allowed))
    assert (bool(device.use_prompt), bool(device.use_rows)) == VARIANTS[best]
