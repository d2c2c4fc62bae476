"""The claim, release by release: without one user's events after the base block, only that user's part is missing.

For every private method and every release: the user of the shorter log adds nothing, everybody else adds what they
added before, and the sums are no further apart than the sensitivity that the ledger prices. A new release needs a
`watch_...` in `neighbours.py` and a case here.
"""

import math
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from neighbours import Capture, Without, assert_neighbouring, capture_run, somebody
from worlds import every_value, tiny_config, tiny_stream, warmed_up

from protofed.backbone.training import PlainDescent
from protofed.federation import newcomers, popularity, simulator
from protofed.methods import headed
from protofed.methods.baselines import federated, full_retrain
from protofed.methods.baselines.ditto import Ditto
from protofed.methods.baselines.fedavg import FedAvg
from protofed.methods.baselines.fedprox import FedProx
from protofed.methods.baselines.fedrap import FedRAP
from protofed.methods.catalogue import METHODS
from protofed.methods.noised_popularity import NoisedPopularity
from protofed.methods.private import REFUSED, WRAPPED, with_dp
from protofed.methods.protocol import Releasing, World
from protofed.methods.protofed import ProtoFed
from protofed.methods.protofed_sp import ProtoFedSP
from protofed.privacy import descent
from protofed.privacy.descent import PrivateDescent
from protofed.privacy.ledger import Release
from protofed.slices.stream import SliceStream

SETTINGS = {
    "privacy__wrap": True,
    "privacy__rounds_per_slice": 1,
    "privacy__sampling_rate": 1.0,  # everybody's coin falls, so that everybody is looked at
    "privacy__clip_radius": 0.25,
    "training__base_epochs": 1,
    "training__slice_epochs": 1,
    "protofed__local_steps": 1,
}
FEW = {"examples": 24, "targets": 200, "epochs": 1, "ft_steps": 0}  # of the methods' own settings, to save time
CASES = [
    (name, variant)
    for name, entry in METHODS.items()
    for variant in entry.variants
    if type(entry.method) in WRAPPED and WRAPPED[type(entry.method)].later
]
CHEAP = ("finetune-last", "full-retrain", "dual-lora", "er-random", "infer", "prefix-tuning")
FEDERATED: dict[str, Any] = {
    "fedavg": FedAvg(ft_steps=0),
    "fedprox": FedProx(),
    "ditto": Ditto(local_steps=1),
    "fedrap": FedRAP(local_steps=1),
}
Learned = tuple[Capture, Any, World]


@cache
def shorter() -> Without:
    return Without(tiny_stream(), somebody(tiny_stream()))


def method_of(name: str) -> Any:
    method: Any = METHODS[name].method
    few = {key: value for key, value in FEW.items() if key in {field.name for field in fields(method)}}
    return with_dp(replace(method, **few))


def learned(method: Any, data: SliceStream, settings: dict[str, Any], script: list[torch.Tensor] | None) -> Learned:
    """All releases of the method on slices 1 and 2 of a stream."""
    world = World(tiny_config(0, **settings), data.slice_(0), warmed_up()[0])
    first = method.start(world)

    def run() -> Any:
        state = first
        for index in (1, 2):
            state, _ = method.learn(world, state, data.slice_(index), PlainDescent())
        return state

    capture, state = capture_run(run, data, script)
    return capture, state, world


def both(method: Any, **settings: Any) -> tuple[Learned, Learned]:
    """The method on the whole log and on the shorter one, which is handed what the first released."""
    whole = learned(method, tiny_stream(), SETTINGS | settings, None)
    return whole, learned(method, shorter(), SETTINGS | settings, whole[0].noised)


def priced(method: Any, learned_: Learned) -> float:
    """The sensitivity that the ledger's noise multiplier stands for, which must be the same in all releases."""
    capture, state, world = learned_
    (release,) = method.releases(world, state)
    assert release.count == len(capture.releases)
    (std,) = {one.std for one in capture.releases}
    return std / release.noise_multiplier


def check(method: Any, **settings: Any) -> tuple[Learned, Learned]:
    whole, without = both(method, **settings)
    bound = priced(method, whole)
    assert bound == pytest.approx(0.25)
    assert_neighbouring(whole[0], without[0], somebody(tiny_stream()), bound)
    return whole, without


def test_the_shorter_log_lacks_one_users_later_events_and_nothing_else():
    whole, short, user = tiny_stream(), shorter(), somebody(tiny_stream())
    assert 0 < len(whole.log) - len(short.log) < 100
    assert (whole.log.users[: whole.bounds[0].end] == user).any()
    for index in range(3):
        one, other = whole.slice_(index), short.slice_(index)
        kept = one.train_positions[(one.past.users[one.train_positions] != user) | (index == 0)]
        assert np.array_equal(short.kept[other.train_positions], kept)
        assert (other.past.n_users, other.n_train_items) == (one.past.n_users, one.n_train_items)
        assert short.n_available(index) == whole.n_available(index)
    assert torch.equal(whole.slice_(0).validation.negatives, short.slice_(0).validation.negatives)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        pytest.param(name, variant, marks=() if name in CHEAP else pytest.mark.slow, id=f"{name}-{variant}")
        for name, variant in CASES
    ],
)
def test_private_steps_lack_the_missing_users_gradient_alone(name, variant):
    (_, one, _), (_, other, _) = check(method_of(name), variant=variant)
    weights, others = every_value(one), every_value(other)
    for key in weights:  # beside its releases a method keeps nothing of anybody's later events
        if weights[key].is_floating_point():
            torch.testing.assert_close(others[key], weights[key], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", FEDERATED)
@pytest.mark.parametrize("variant", ["standard", "peft"])
def test_federated_rounds_lack_the_missing_users_upload_alone(name, variant):
    check(FEDERATED[name], variant=variant)


def test_introductions_of_new_items_lack_what_the_missing_user_said_alone():
    settings = {
        "privacy__wrap": False,
        "protofed__ablate": "static-prototypes",
        "protofed__newcomers": "noised",
        "privacy__newcomer_noise": 1.5,
    }
    (whole, state, world), (without, _, _) = both(ProtoFedSP(), **settings)
    (release,) = [entry for entry in ProtoFedSP().releases(world, state) if entry.stream == "new items"]
    assert release.count == len(whole.releases) == 2
    assert {one.std for one in whole.releases} == {release.noise_multiplier}  # the sensitivity is 1
    assert_neighbouring(whole, without, somebody(tiny_stream()), 1.0)


PROTOTYPES = {
    "privacy__wrap": False,
    "privacy__rounds_per_slice": 2,
    "privacy__clip_radius": 1.0,
    "protofed__newcomers": "mean-row",
    "protofed__local_steps": 2,
    "protofed__base_steps": 2,
}


POPULARITY = {
    "scoring__head": True,
    "protofed__mode": "private",
    "protofed__ablate": "static-prototypes",
    "protofed__newcomers": "mean-row",
    "privacy__wrap": False,
    "privacy__newcomer_noise": 1.5,
}


def check_popularity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headed, "gain_of", lambda *_: True)  # the rehearsal says yes, whatever it heard
    method = headed.Headed(ProtoFedSP(), "released")
    (whole, state, world), (without, _, _) = both(method, **POPULARITY)
    (release,) = method.releases(world, state)
    assert (release.stream, release.count, release.sampling_rate) == ("popularity", 2, 1.0)
    assert len(whole.releases) == 2
    assert {one.std for one in whole.releases} == {release.noise_multiplier} == {1.5}  # the sensitivity is 1
    assert_neighbouring(whole, without, somebody(tiny_stream()), 1.0)


def test_popularity_lacks_what_the_missing_user_said_alone(monkeypatch):
    check_popularity(monkeypatch)


FLAGSHIP = {
    "scoring__head": True,
    "protofed__mode": "private",
    "protofed__newcomers": "noised",
    "protofed__local_steps": 2,
    "protofed__base_steps": 2,
    "privacy__wrap": False,
    "privacy__rounds_per_slice": 2,
    "privacy__clip_radius": 1.0,
    "privacy__newcomer_noise": 1.5,
}


def check_flagship(monkeypatch: pytest.MonkeyPatch) -> None:
    """All releases of the flagship in one run: each stream alone, and what the server is left with."""
    monkeypatch.setattr(headed, "gain_of", lambda *_: True)
    method, user = headed.Headed(ProtoFed(), "released"), somebody(tiny_stream())
    (whole, state, world), (without, other, _) = both(method, **FLAGSHIP)
    ledger = method.releases(world, state)
    assert {one.stream for one in ledger} == {one.stream for one in whole.releases} == set(BOUNDS)
    for release in ledger:
        mine, bound = whole.of(release.stream), BOUNDS[release.stream]
        assert release.count == len(mine.releases)
        assert [one.std / release.noise_multiplier for one in mine.releases] == pytest.approx([bound] * release.count)
        assert_neighbouring(mine, without.of(release.stream), user, bound)
    values, others = every_value(state), every_value(other)
    for name in values:  # beside its releases the server keeps nothing of anybody's later events
        if ".devices." not in name and values[name].is_floating_point():
            torch.testing.assert_close(others[name], values[name], atol=1e-6, rtol=1e-5)


BOUNDS = {"prototypes": math.hypot(1.0, 0.25), "new items": 1.0, "popularity": 1.0}


@pytest.mark.slow
def test_all_releases_of_the_flagship_lack_what_the_missing_user_said_alone(monkeypatch):
    check_flagship(monkeypatch)


@pytest.mark.slow
def test_a_flagship_that_keeps_exact_counts_beside_its_release_is_caught(monkeypatch):
    def kept(counts: Any, recent: torch.Tensor) -> Any:
        return add_recent(counts, recent + 0.01 * torch.from_numpy(said[-1]))

    def heard(past: Any, positions: np.ndarray, n_items: int) -> Any:
        said.append(np.bincount(past.items[past.place[positions]], minlength=n_items)[:n_items].astype(np.float32))
        return votes(past, positions, n_items)

    said: list[np.ndarray] = []
    votes, add_recent = popularity.votes, popularity.add_recent
    monkeypatch.setattr(popularity, "votes", heard)
    monkeypatch.setattr(popularity, "add_recent", kept)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_flagship(monkeypatch)


def check_popularity_alone() -> None:
    method = NoisedPopularity()
    (whole, state, world), (without, _, _) = both(method, privacy__noise_multiplier=1.5)
    assert method.releases(world, state) == (Release(1.5, 1.0, 2, "popularity"),)
    assert [one.std for one in whole.releases] == [1.5, 1.5]  # the sensitivity is 1
    assert_neighbouring(whole, without, somebody(tiny_stream()), 1.0)


def test_popularity_alone_lacks_what_the_missing_user_said_alone():
    check_popularity_alone()


def test_raw_counts_in_place_of_clipped_votes_are_caught(monkeypatch):
    monkeypatch.setattr(popularity, "clip_introductions", lambda whose, values, radius: values)
    for check_it in (lambda: check_popularity(monkeypatch), check_popularity_alone):
        with pytest.raises(AssertionError, match="1 is priced"):
            check_it()


SENSITIVITY = {"central": math.hypot(1.0, 0.25), "secure-aggregation": math.hypot(1.0, 0.25), "local": 2.0}
every_trust = pytest.mark.parametrize("trust", SENSITIVITY)


def check_prototypes(trust: str) -> Capture:
    (whole, state, world), (without, _, _) = both(ProtoFedSP(), **PROTOTYPES, privacy__trust=trust)
    (release,) = ProtoFedSP().releases(world, state)
    assert release.count == len(whole.releases) == 4
    (std,) = {one.std for one in whole.releases}
    bound = std / release.noise_multiplier
    assert bound == pytest.approx(SENSITIVITY[trust])
    assert_neighbouring(whole, without, somebody(tiny_stream()), bound)
    return whole


@every_trust
def test_prototypes_lack_the_missing_users_upload_alone(trust):
    first = check_prototypes(trust).releases[0].by_user
    contributing = {user for user, found in first.items() if found["sums"].any()}
    later = set(tiny_stream()._users[slice(*tiny_stream().bounds[1].part("train"))].tolist())
    assert contributing == later  # nobody is heard who has done nothing since the base block
    everybody = range(tiny_stream().slice_(1).past.n_users)
    assert set(first) == (later if trust == "central" else set(everybody))  # who adds the noise sends it, come what may


@pytest.mark.parametrize("name", ["frozen", "recicl"])
def test_methods_that_learn_nothing_later_release_nothing_and_know_nothing(name):
    (capture, one, world), (_, other, _) = both(method_of(name))
    assert capture.releases == []
    assert method_of(name).releases(world, one) == ()
    weights, others = every_value(one), every_value(other)
    assert all(torch.equal(tensor, others[key]) for key, tensor in weights.items())


def test_every_private_method_is_looked_at():
    here = {type(METHODS[name].method) for name, _ in CASES} | {type(method) for method in FEDERATED.values()}
    steps = {kind for kind, trainings in WRAPPED.items() if trainings.later}
    mechanisms = {type(entry.method) for entry in METHODS.values() if isinstance(entry.method, Releasing)}
    assert here == (steps | mechanisms) - {ProtoFedSP, ProtoFed}
    assert not here & REFUSED.keys()


def with_base_events(self: PrivateDescent, past: Any, positions: np.ndarray, *rest: Any, **more: Any) -> Any:
    """A private step that also learns the base block."""
    base = np.arange(*tiny_stream().bounds[0].part("train"))
    return COHORT(self, past, np.union1d(base, positions), *rest, **more)


def with_all_events(slice_: Any) -> np.ndarray:
    """What full retraining learned privately before 0.2.0."""
    return slice_.all_train_positions


def scaled_by_the_cohort(loss: Any, weights: Any, chunk: Any, numbers: torch.Tensor) -> Any:
    """Gradients of a mean over everybody who takes part."""
    found = GRADIENTS_OF(loss, weights, chunk, numbers)
    return replace(found, dense={name: each / chunk.n_users for name, each in found.dense.items()})


def without_clipping(contributions: Any, radius: float, rows: Any = None) -> Any:
    return CLIPPED_SUM(contributions, 1e9, rows)


COHORT, GRADIENTS_OF, CLIPPED_SUM = PrivateDescent.cohort, descent.gradients_of, descent.clipped_sum
BROKEN = [
    (PrivateDescent, "cohort", with_base_events, "still adds"),
    (full_retrain, "after_base_block", with_all_events, "still adds"),
    (descent, "gradients_of", scaled_by_the_cohort, "being another one"),
    (descent, "clipped_sum", without_clipping, r"0\.25 is priced"),
]


@pytest.mark.parametrize(
    ("where", "name", "broken", "said"), BROKEN, ids=[broken.__name__ for _, _, broken, _ in BROKEN]
)
def test_a_planted_violation_is_caught(where, name, broken, said, monkeypatch):
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(AssertionError, match=said):
        check(method_of("full-retrain"))


@every_trust
def test_base_users_who_upload_without_later_events_are_caught(trust, monkeypatch):
    """What versions before 0.2.0 did: a base user's prompt stayed in the sums when the later events were gone."""

    def as_before(stack: Any, coins: torch.Tensor, rule: Any) -> Any:
        return chosen_of(replace(stack, contributes=stack.met), coins, rule)

    chosen_of = simulator.chosen_of
    monkeypatch.setattr(simulator, "chosen_of", as_before)
    with pytest.raises(AssertionError, match="still adds"):
        check_prototypes(trust)


def test_a_server_that_hears_base_events_in_federated_rounds_is_caught(monkeypatch):
    def broken(past: Any, positions: np.ndarray, **more: Any) -> Any:
        return client_data(past, np.union1d(np.arange(*tiny_stream().bounds[0].part("train")), positions), **more)

    client_data = federated.client_data
    monkeypatch.setattr(federated, "client_data", broken)
    with pytest.raises(AssertionError, match="still adds"):
        check(FEDERATED["fedavg"], variant="peft")


def test_introductions_by_base_events_are_caught(monkeypatch):
    def broken(past: Any, positions: np.ndarray, until: int, public: Any, on: Any, wanted: torch.Tensor) -> Any:
        """As if base events introduced base items as well."""
        base = np.arange(*tiny_stream().bounds[0].part("train"))
        return introductions(past, np.union1d(base, positions), until, public, on, torch.ones_like(wanted))

    introductions = newcomers.introductions
    monkeypatch.setattr(newcomers, "introductions", broken)
    with pytest.raises(AssertionError, match="still adds"):
        test_introductions_of_new_items_lack_what_the_missing_user_said_alone()
