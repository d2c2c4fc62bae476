"""Wrapped methods: what a user's later events can move is a clipped, noised, ledgered sum, and nothing besides."""

import json
import math
import sys
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow_private import apart, slow_sums
from worlds import every_value, questions, tiny_config, tiny_log, tiny_stream, warmed_up

from protofed.backbone.extras import Notes
from protofed.backbone.small_modules import small_parameters
from protofed.backbone.training import PlainDescent
from protofed.cli.run import settle
from protofed.data.interactions import InteractionLog, from_codes
from protofed.errors import ConfigError
from protofed.experiments.run import Experiment
from protofed.methods.catalogue import METHODS
from protofed.methods.frozen import rows_for
from protofed.methods.labels import method_label
from protofed.methods.noised_popularity import NoisedPopularity
from protofed.methods.private import WRAPPED, Private, PrivateState, Trainings, as_asked, with_dp
from protofed.methods.protocol import Releasing, World
from protofed.privacy.accountant import noise_for
from protofed.privacy.descent import PrivateDescent
from protofed.privacy.ledger import SHARE, Release, read_ledger
from protofed.privacy.promise import promised
from protofed.slices.leaks import check_evidence
from protofed.slices.stream import SliceStream
from protofed.slices.windows import take
from protofed.snapshot import restore, take_snapshot

PRIVATE = [name for name, entry in METHODS.items() if type(entry.method) in WRAPPED]
CASES = [(name, variant) for name in PRIVATE for variant in METHODS[name].variants]
LEARNING = [(name, variant) for name, variant in CASES if WRAPPED[type(METHODS[name].method)].later]
FIRST = [(name, variant) for name, variant in LEARNING if variant == METHODS[name].variants[0]]  # one variant of each
LITTLE = {"privacy__noise_multiplier": 0.0199}
SETTINGS = {
    "privacy__wrap": True,
    "privacy__rounds_per_slice": 2,
    "privacy__sampling_rate": 0.2,
    "training__base_epochs": 1,
}
FEW = {"examples": 24, "targets": 200, "epochs": 1}  # of the methods' own settings, to save time


def method_of(name: str) -> Private:
    """The private method, with few examples to estimate anything on."""
    method: Any = METHODS[name].method
    few = {key: value for key, value in FEW.items() if key in {field.name for field in fields(method)}}
    return with_dp(replace(method, **few))


def world_of(data: SliceStream, variant: str = "standard", **changes: object) -> World:
    config = tiny_config(0, **{**SETTINGS, "variant": variant, **changes})
    return World(config, data.slice_(0), warmed_up()[0])


def after(name: str, variant: str, data: SliceStream, until: int = 1, **changes: object) -> PrivateState:
    """The private method after the slices of a stream."""
    world, method = world_of(data, variant, **changes), method_of(name)
    state = started_once(name, world)
    for index in range(1, until + 1):
        state, _ = method.learn(world, state, data.slice_(index), PlainDescent())
    return state


STARTED: dict[tuple[str, str], PrivateState] = {}


def started_once(name: str, world: World) -> PrivateState:
    """The base block is the same in all these worlds, and a start costs the most."""
    key = name, world.config.variant
    if key not in STARTED:
        STARTED[key] = method_of(name).start(replace(world, config=world_of(tiny_stream(), key[1]).config))
    return replace(STARTED[key], noise_multiplier=world.config.privacy.noise_multiplier, allowed_rounds=10**6)


def same(one: PrivateState, other: PrivateState) -> bool:
    a, b = every_value(one), every_value(other)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def rearranged(positions: list[np.ndarray], *, users: bool) -> SliceStream:
    """The tiny world with the items (and users) of the events in each group exchanged among one another."""
    log, rng = tiny_log(), np.random.default_rng(1)
    codes = [log.users.numpy().astype(np.int64).copy(), log.items.numpy().astype(np.int64).copy()]
    for group in positions:
        for column in codes if users else codes[1:]:
            column[group] = column[rng.permutation(group)]
    changed = from_codes(log.name, *codes, log.times.numpy(), log.user_ids, log.item_ids)
    return SliceStream(changed, tiny_config().stream)


@cache
def another_present(part: str) -> SliceStream:
    """Other events in the parts of slices 1 and 2 (all parts, or the one named), as many users and items as before."""
    parts = ("train", "val", "test") if part == "all" else (part,)
    return rearranged([np.arange(*b.part(p)) for b in tiny_stream().bounds[1:] for p in parts], users=True)


@cache
def somebody() -> tuple[int, SliceStream]:
    """A user with many train events in slice 1, and the world in which that user met these items in another order.

    Items that are new in the slice stay: a log numbers them by first appearance, and the catalogue is public.
    """
    slice_, log = tiny_stream().slice_(1), tiny_log()
    known = slice_.train_positions[log.items.numpy()[slice_.train_positions] < tiny_stream().n_available(0)]
    users = slice_.past.users[known]
    user = int(np.bincount(users).argmax())
    return user, rearranged([known[users == user]], users=False)


def forced(user: int, coin: bool, original: Any = PrivateDescent.sampled) -> Any:
    """Coins as they fall, but for one user's."""

    def sampled(self: PrivateDescent, round_: int) -> np.ndarray:
        coins = original(self, round_).copy()
        coins[user] = coin
        return coins

    return sampled


def test_the_rearranged_worlds_differ_where_they_should_and_nowhere_else():
    base, changed = tiny_stream(), another_present("all")
    end = base.bounds[0].end
    assert changed.bounds == base.bounds
    assert torch.equal(changed.log.items[:end], base.log.items[:end])
    assert not torch.equal(changed.log.items[end:], base.log.items[end:])
    assert [changed.n_train_items(t) for t in (1, 2)] == [base.n_train_items(t) for t in (1, 2)]
    assert [changed.slice_(t).past.n_users for t in (1, 2)] == [base.slice_(t).past.n_users for t in (1, 2)]


@pytest.mark.parametrize(("name", "variant"), LEARNING)
def test_leaving_any_one_user_out_moves_each_sum_before_noise_by_at_most_the_radius(name, variant, monkeypatch):
    original, moves = PrivateDescent.sums, []

    def watched(self: PrivateDescent, loss: Any, batch: Any, weights: Any) -> Any:
        whole = original(self, loss, batch, weights)
        for user in batch.users.unique().tolist()[:3]:
            rest = take(batch, (batch.users != user).nonzero()[:, 0])
            less = original(self, loss, rest, weights)
            moves.append(math.sqrt(sum(float((whole[name] - less[name]).square().sum()) for name in whole)))
        return whole

    monkeypatch.setattr(PrivateDescent, "sums", watched)
    after(name, variant, tiny_stream(), privacy__rounds_per_slice=1, privacy__clip_radius=0.25)
    assert max(moves) <= 0.25 * (1 + 1e-5)  # the others sit elsewhere in their chunks, and products round there
    assert min(moves) > 0


LOOPED = ("finetune-last", "ewc", "lwf", "er-random", "reloop", "ccd", "prefix-tuning", "adapters", "dual-lora", "pcl")


@pytest.mark.parametrize(("name", "variant"), [(name, variant) for name, variant in FIRST if name in LOOPED])
def test_sums_of_every_kind_of_loss_and_what_it_tells_equal_those_of_a_slow_loop(name, variant, monkeypatch):
    original, checked, state = PrivateDescent.sums, [], started_once(name, world_of(tiny_stream(), variant))

    def watched(self: PrivateDescent, loss: Any, batch: Any, weights: Any) -> Any:
        told, slowly = Notes(), Notes()
        noted = replace(loss, extra=loss.extra and replace(loss.extra, notes=told))
        fast, slow = original(self, noted, batch, weights), slow_sums(self, loss, batch, weights, slowly)
        checked.append(apart(fast, slow))
        assert told.counts == slowly.counts
        assert told.means() == pytest.approx(slowly.means(), rel=1e-5, abs=1e-7)
        return fast

    monkeypatch.setattr(PrivateDescent, "sums", watched)
    few = {"privacy__rounds_per_slice": 1, "privacy__sampling_rate": 0.1}
    method_of(name).learn(world_of(tiny_stream(), variant, **few), state, tiny_stream().slice_(1), PlainDescent())
    assert len(checked) == method_of(name).trainings.first
    assert max(checked) < 1e-5 * tiny_config().privacy.clip_radius  # of some ten users, in single precision


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_where_nobody_is_sampled_the_state_knows_nothing_of_events_after_the_base_block(name, variant):
    nobody = {"privacy__sampling_rate": 1e-9}
    here, there = (after(name, variant, data, 2, **nobody) for data in (tiny_stream(), another_present("all")))
    assert same(here, there)


@pytest.mark.parametrize(("name", "variant"), FIRST)
def test_the_validation_part_never_matters(name, variant):
    assert same(after(name, variant, tiny_stream()), after(name, variant, another_present("val")))


def test_the_train_part_does_matter():
    here, there = (after("finetune-last", "standard", data) for data in (tiny_stream(), another_present("train")))
    assert not same(here, there)


@pytest.mark.parametrize(("name", "variant"), FIRST)
def test_a_user_matters_if_and_only_if_its_coin_says_so(name, variant, monkeypatch):
    user, changed = somebody()
    for coin in (False, True):
        monkeypatch.setattr(PrivateDescent, "sampled", forced(user, coin))
        quiet = {"privacy__noise_multiplier": 0.0}
        here, there = (after(name, variant, data, **quiet) for data in (tiny_stream(), changed))
        assert same(here, there) == (not coin)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_a_resumed_private_run_goes_on_as_if_it_had_not_stopped(name, variant):
    data = tiny_stream()
    world, method = world_of(data, variant), method_of(name)
    one = after(name, variant, data)
    back = restore(take_snapshot(one))
    two, again = (method.learn(world, state, data.slice_(2), PlainDescent())[0] for state in (one, back))
    assert same(two, again)
    assert two.rounds == method.trainings.until(2) * 2
    check_evidence(data, 2, method.evidence(two))
    _, queries = questions()
    assert method.score(world, back, queries).isfinite().all()


def test_what_is_declared_ahead_is_what_is_made():
    data = tiny_stream()
    for name, per_slice in (("finetune-last", (2, 4)), ("ccd", (4, 10)), ("frozen", (0, 0))):
        world, method = world_of(data), method_of(name)
        state = started_once(name, world)
        for index, total in enumerate(per_slice, start=1):
            ahead = method.releases(world, state, 1)
            state, told = method.learn(world, state, data.slice_(index), PlainDescent())
            assert ahead == method.releases(world, state)
            assert ahead == ((Release(1.0, 0.2, total, "gradients"),) if total else ())
            assert state.rounds == total
            assert told["private_rounds"] == (total - per_slice[0] if index == 2 else total)


def test_a_method_that_trains_more_often_than_declared_is_caught():
    ccd = replace(method_of("ccd"), trainings=Trainings(1, 1))
    world = world_of(tiny_stream())
    with pytest.raises(AssertionError, match="2 private rounds were declared, 4 asked for, 2 made"):
        ccd.learn(world, started_once("ccd", world), tiny_stream().slice_(1), PlainDescent())


def test_the_noise_is_solved_for_all_rounds_of_all_trainings():
    budget = {"privacy__target_epsilon": 3.4, "privacy__noise_multiplier": 0.0, "privacy__sampling_rate": 0.05}
    world = world_of(tiny_stream(), **budget, privacy__rounds_per_slice=4)
    state = method_of("ccd").start(world)
    assert state.allowed_rounds == 4 * (2 + 3)
    assert state.noise_multiplier == noise_for(3.4, 1e-5, 0.05, 20)


def test_steps_stop_where_the_budget_ends():
    data, name = tiny_stream(), "finetune-last"
    world, method = world_of(data), method_of(name)
    state = replace(started_once(name, world), allowed_rounds=3)
    assert method.releases(world, state, 2)[0].count == 3
    for index in (1, 2):
        state, told = method.learn(world, state, data.slice_(index), PlainDescent())
    assert state.rounds == 3
    assert told["private_rounds"] == 1


def test_new_items_start_at_the_mean_row_and_every_row_of_the_catalogue_may_move():
    world, slice_ = world_of(tiny_stream()), tiny_stream().slice_(1)
    model, new = rows_for(world, world.backbone, slice_)
    old = torch.nn.functional.pad(world.backbone.has_row, (0, model.n_rows - world.backbone.n_rows))
    assert model.n_rows == slice_.n_train_items > world.backbone.n_rows
    assert not new.any()
    assert model.has_row.all()
    assert torch.equal(model.items[~old], world.backbone.mean_row.expand(int((~old).sum()), -1))
    assert torch.equal(model.items[old], world.backbone.items[world.backbone.has_row])


def test_every_method_is_wrapped_refused_with_one_line_or_has_a_mechanism_of_its_own():
    config, refused = tiny_config(0, **SETTINGS, method="any"), []
    for name, entry in METHODS.items():
        if isinstance(entry.method, Releasing):
            assert as_asked(entry.method, config) is entry.method
        elif name == "popularity":
            assert as_asked(entry.method, config) == NoisedPopularity()
        elif name in PRIVATE:
            assert isinstance(as_asked(entry.method, config), Private)
        else:
            with pytest.raises(ConfigError, match=r"^[^\n]+ cannot be made private: [^\n]+$"):
                as_asked(entry.method, config)
            refused.append(name)
    assert refused == ["sail-piw", "reloop2"]


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("popularity", {"privacy__trust": "local"}, "private steps need privacy.trust = central, got local"),
        ("sail-piw", {}, "SailPIW cannot be made private: its weights are scaled to mean 1 over a batch of users"),
        ("reloop2", {}, "its memory holds errors of single raw events"),
        ("protofed-sp", {"method": "protofed-sp"}, "private in --mode reference"),
        ("ewc", {"privacy__trust": "local"}, "private steps need privacy.trust = central, got local"),
        ("ewc", {"scoring__popularity_prior": 0.5}, "must be 0 in a private run, got 0.5"),
    ],
)
def test_what_cannot_be_promised_is_refused_with_the_reason(name, changes, said):
    with pytest.raises(ConfigError, match=said):
        as_asked(METHODS[name].method, tiny_config(0, **{**SETTINGS, **changes}))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ewc", {}),
        ("fedavg", {}),
        ("protofed-sp", {"privacy__wrap": False}),
        ("protofed-sp", {"privacy__wrap": False, "privacy__trust": "secure-aggregation"}),
    ],
)
def test_a_noise_whose_epsilon_cannot_be_computed_is_refused_before_any_work(tmp_path, name, changes, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)  # not needed for it
    config = tiny_config(0, method=name, **{**SETTINGS, "privacy__noise_multiplier": 0.0199, **changes})
    with pytest.raises(ConfigError, match=r"noise multipliers of 0\.02 and more, got 0\.0199"):
        Experiment(config, tiny_log(), tmp_path / "cache").run(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [{"privacy__noise_multiplier": 0.02}, {"privacy__sampling_rate": 1.0}, {"privacy__wrap": False}],
)
def test_a_noise_that_can_be_priced_or_is_not_used_is_let_through(changes):
    as_asked(METHODS["ewc"].method, tiny_config(0, method="ewc", **{**SETTINGS, **LITTLE, **changes}))
    nodp = {"privacy__wrap": False, "protofed__mode": "nodp"}
    as_asked(METHODS["protofed-sp"].method, tiny_config(0, method="protofed-sp", **{**SETTINGS, **LITTLE, **nodp}))


def test_without_trained_weights_new_items_have_no_row_and_no_old_row_moves():
    world, slice_ = world_of(tiny_stream(), "peft"), tiny_stream().slice_(1)
    model, new = rows_for(world, world.backbone, slice_)
    assert not new.any()
    assert int(model.has_row.sum()) == int(world.backbone.has_row.sum())
    learned = after("finetune-last", "peft", tiny_stream()).inner.backbone
    assert torch.equal(learned.items[: world.backbone.n_rows], world.backbone.items)
    before = started_once("finetune-last", world).inner.backbone
    assert any(not torch.equal(small_parameters(learned)[name], old) for name, old in small_parameters(before).items())


def test_a_private_run_needs_noise():
    world = world_of(tiny_stream(), privacy__noise_multiplier=0.0)
    with pytest.raises(ConfigError, match="needs --target-epsilon or --noise-multiplier"):
        with_dp(METHODS["finetune-last"].method).start(world)


def test_a_budget_on_the_command_line_wraps_every_method_but_protofed_sp(tmp_path: Path):
    asked = {"privacy.target_epsilon": 3.4}
    assert settle({"method": "ewc", **asked}).privacy.wrap
    assert settle({"method": "ewc", "privacy.noise_multiplier": 1.0}).privacy.wrap
    assert not settle({"method": "ewc"}).privacy.wrap
    assert not settle({"method": "protofed-sp", **asked}).privacy.wrap
    (tmp_path / "old.toml").write_text('method = "ewc"\n[privacy]\nwrap = false\n')
    assert settle(asked, tmp_path / "old.toml").privacy.wrap  # what is asked for now counts
    assert not settle(asked, tmp_path / "old.toml", ["privacy.wrap=false"]).privacy.wrap


def test_private_rows_have_a_label_of_their_own():
    assert method_label("ewc", "reference", "", private=True) == "ewc (private)"
    assert method_label("ewc", "reference", "") == "ewc"


def test_a_run_writes_its_ledger_ahead_and_states_its_epsilon(tmp_path: Path):
    config = tiny_config(0, method="finetune-last", **SETTINGS)
    log: InteractionLog = tiny_log()
    folder = Experiment(config, log, tmp_path / "cache").run(tmp_path / "run")
    ledger, trust = read_ledger(folder.path / "ledger.json")
    assert (ledger, trust) == ((Release(1.0, 0.2, 4, "gradients"),), "central")
    said = promised(folder.path / "ledger.json", config.privacy.delta)
    assert said is not None
    assert 0 < said["epsilon_release"] < 10  # type: ignore[operator]
    assert said["epsilon_server"] is None
    share = said[SHARE]
    end = tiny_stream().bounds[0].end
    later, before = set(log.users[end:].tolist()), set(log.users[:end].tolist())
    assert share == len(later & before) / len(later) < 1
    assert json.loads((folder.path / "environment.json").read_text())[SHARE] == share
    assert f"({100 * share:.3g} % of later users have some)" in said["claim"]  # type: ignore[operator, str-format]
