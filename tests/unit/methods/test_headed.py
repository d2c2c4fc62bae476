"""Methods under a head: what it is fitted on, which counts it reads, what leaves a device for it, what does not."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from worlds import LENGTH, another_future, every_value, questions, tiny_config, tiny_log, tiny_stream, warmed_up_on

from protofed.backbone.training import PlainDescent
from protofed.client.model import VARIANTS
from protofed.errors import LeakError
from protofed.experiments.publish import published
from protofed.federation.popularity import base_votes
from protofed.inference import end, fit_head
from protofed.inference.head import FittedHead, scores_under, with_head
from protofed.inference.item_side import count_items
from protofed.inference.online import online_inference
from protofed.methods import headed
from protofed.methods.catalogue import METHODS, method_named, only_noised
from protofed.methods.headed import AGES, Headed, HeadedState, examples_at, forget_items, later_half, under_head
from protofed.methods.protocol import World
from protofed.methods.protofed import ProtoFed
from protofed.privacy.accountant import epsilon
from protofed.privacy.ledger import write_ledger
from protofed.privacy.promise import promised
from protofed.slices.candidates import NO_CANDIDATE
from protofed.slices.leaks import check_evidence
from protofed.slices.stream import TimeSlice, halves
from protofed.snapshot import restore, take_snapshot

NOTHING = {"method": "protofed", "protofed__mode": "nothing"}
PRIVATE = {"method": "protofed", "protofed__mode": "private", "privacy__newcomer_noise": 1.0}


def world_of(data=None, **settings) -> World:
    config = tiny_config(**{"scoring__head": True} | settings)
    data = data or tiny_stream()
    return World(config, data.slice_(0), warmed_up_on(config, data)[0])


def headed_in(world: World) -> Headed:
    method = under_head(method_named(world.config.method).method, world.config)
    assert isinstance(method, Headed)
    return method


def test_the_warm_up_under_a_head_stops_on_the_earlier_half_and_the_head_learns_from_the_later():
    world = world_of(method="frozen")
    earlier, later = halves(world.base.validation)
    assert (len(earlier), len(later)) == (len(world.base.validation) // 2, len(world.base.validation) - len(earlier))
    assert earlier.positions[-1] < later.positions[0]
    assert np.array_equal(later_half(world.base), later.positions)
    assert headed_in(world).start(world).newest_answer == later.positions[-1]
    plain = warmed_up_on(tiny_config(method="frozen"), tiny_stream())[1]
    halved = warmed_up_on(tiny_config(method="frozen", scoring__head=True), tiny_stream())[1]
    assert plain.trace[0] != halved.trace[0]  # other questions, before the first epoch too


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({"method": "frozen"}, "fresh"),
        ({"method": "finetune-last", "privacy__wrap": True}, "base"),
        ({"method": "frozen-no-new-rows"}, "base"),
        ({"method": "protofed-sp"}, "base"),
        ({"method": "protofed-sp", "protofed__mode": "nodp"}, "fresh"),
        (NOTHING, "base"),
        (PRIVATE, "released"),
    ],
)
def test_a_head_reads_fresh_counts_only_where_the_method_reads_raw_events_itself(settings, counts):
    config = tiny_config(scoring__head=True, **settings)
    assert under_head(method_named(config.method).method, config).counts == counts


def test_a_config_without_a_head_is_the_method_itself():
    method = METHODS["frozen"].method
    assert under_head(method, tiny_config(method="frozen")) is method


def test_parts_of_the_head_are_left_out_by_name():
    for out, parts in (("own-past", (False, True)), ("item-counts", (True, False))):
        config = tiny_config(scoring__head=True, protofed__ablate=out, **NOTHING)
        method = under_head(METHODS["protofed"].method, config)
        assert (method.own, method.items) == parts
        head = method.start(World(config, tiny_stream().slice_(0), warmed_up_on(config, tiny_stream())[0])).fitted.head
        assert (head.own is None or method.own, head.items is None or method.items) == (True, True)


@cache
def whole_answers(ablate: str) -> torch.Tensor:
    """Answers of slice 1 at `nothing`, with every part of the head that is allowed worn."""
    world = world_of(protofed__ablate=ablate, **NOTHING)
    method = headed_in(world)
    state, _ = method.learn(world, method.start(world), tiny_stream().slice_(1), PlainDescent())
    return method.score(world, state, questions(1)[1])


@pytest.mark.parametrize("part", ["own-past", "query-time", "item-counts", "prompts", "prototypes", "own-rows"])
def test_each_part_of_protofed_is_off_by_one_flag(part, monkeypatch):
    monkeypatch.setattr(fit_head, "pays", lambda *_: True)
    without = whole_answers(part)
    assert without.isfinite().all()
    assert without.shape == whole_answers("").shape
    assert not torch.equal(without, whole_answers(""))


def test_without_query_time_the_same_past_is_answered_alike_whenever_it_is_asked(monkeypatch):
    monkeypatch.setattr(fit_head, "pays", lambda *_: True)
    answers = {}
    for ablate in ("", "query-time"):
        world = world_of(protofed__ablate=ablate, **NOTHING)
        method, queries = headed_in(world), questions(0)[1]
        state = method.start(world)
        assert state.fitted.head.own is not None
        times = (queries.times, queries.times + 5 * 3600)
        answers[ablate] = [method.score(world, state, replace(queries, times=each)) for each in times]
    assert torch.equal(*answers["query-time"])
    assert not torch.equal(*answers[""])


def test_old_questions_are_asked_with_old_counts_and_without_rows_of_later_items():
    world = world_of(method="frozen-no-new-rows")
    inner = METHODS["frozen-no-new-rows"].method
    state = inner.start(world)
    examples = examples_at(inner, world, state, AGES, 0.0, "base")
    asked = later_half(world.base)
    order = np.concatenate([np.arange(len(asked))[k :: len(AGES)] for k in range(len(AGES))])
    assert (
        examples.positives.tolist()
        == world.base.validation.positives[len(world.base.validation) - len(asked) :][torch.from_numpy(order)].tolist()
    )
    for age, group in enumerate(AGES):
        mine = examples.ages == age
        counts = base_votes(world.base, group)
        total = torch.nn.functional.pad(counts.total, (0, world.base.validation.n_items - len(counts.total)))
        assert torch.allclose(examples.y[age, :, 1], total.log1p())
        unknown = examples.scores[mine][:, counts.known :]
        assert torch.equal(unknown, unknown[:, :1].expand_as(unknown))  # the mean row's, all of them
    known = base_votes(world.base, 6).known
    assert 0 < known < state.backbone.n_rows
    assert int(forget_items(state, known).backbone.has_row.sum()) == known
    assert bool(state.backbone.has_row.all())  # the state itself stays


def test_the_base_blocks_own_votes_add_up_to_a_slow_loop():
    base = tiny_stream().slice_(0)
    users, items = base.past.users[base.train_positions], base.past.items[base.past.place[base.train_positions]]
    parts = np.array_split(np.arange(len(users)), 8)
    for age in (0, 3):
        expected = np.zeros(base.n_train_items)
        for part in parts[: 8 - age]:
            recent = np.zeros(base.n_train_items)
            for user in np.unique(users[part]):
                met = np.unique(items[part][users[part] == user])
                recent[met] += 1 / np.sqrt(len(met))
            expected += recent
        counts = base_votes(base, age)
        assert counts.total.numpy() == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert counts.recent.numpy() == pytest.approx(recent, rel=1e-5, abs=1e-5)
        assert counts.known == items[: parts[7 - age][-1] + 1].max() + 1


@pytest.mark.parametrize("settings", [{"method": "frozen"}, NOTHING, PRIVATE], ids=["frozen", "nothing", "private"])
def test_the_head_knows_nothing_after_the_base_block_and_survives_packing(settings):
    world, other = world_of(**settings), world_of(another_future(0), **settings)
    method = headed_in(world)
    one, two = method.start(world), method.start(other)
    assert all(torch.equal(v, every_value(two.fitted)[k]) for k, v in every_value(one.fitted).items())
    state, told = method.learn(world, one, tiny_stream().slice_(1), PlainDescent())
    assert told["head_beta"] == pytest.approx(float(one.fitted.head.log_beta.exp()))
    check_evidence(tiny_stream(), 1, method.evidence(state))
    _, queries = questions(1)
    back = restore(take_snapshot(state))
    assert torch.equal(method.score(world, back, queries), method.score(world, state, queries))
    inner = method.inner.score(method.inside(world, state), state.inner, queries)
    assert torch.equal(method.score(world, state, queries), with_head(state.fitted, inner, queries))


def test_fresh_counts_are_those_of_the_slices_train_part_and_of_all_before():
    world, slice_ = world_of(method="frozen"), tiny_stream().slice_(2)
    method = headed_in(world)
    state, _ = method.learn(world, method.start(world), slice_, PlainDescent())
    start, end = slice_.bounds[-1].part("train")
    log = tiny_log()
    assert torch.equal(
        state.fitted.counts.recent, torch.bincount(log.items[start:end].long(), minlength=slice_.n_train_items).float()
    )
    assert torch.equal(
        state.fitted.counts.total, torch.bincount(log.items[:end].long(), minlength=slice_.n_train_items).float()
    )
    assert torch.equal(
        count_items(slice_.past, (start, end), end, slice_.n_train_items).total, state.fitted.counts.total
    )
    later = replace(state, counts_until=end + 1)
    with pytest.raises(LeakError, match=r"^counts of later events under a head: they end at log position"):
        check_evidence(tiny_stream(), 2, method.evidence(later))


def test_a_head_that_has_seen_later_events_is_told():
    world = world_of(method="frozen")
    method = headed_in(world)
    state = replace(method.start(world), newest_answer=tiny_stream().bounds[0].val_end)
    with pytest.raises(LeakError, match=r"^a head fitted after the base block: on an event at log position"):
        check_evidence(tiny_stream(), 2, method.evidence(state))


def test_popularity_is_released_with_its_noise_and_written_into_the_ledger(monkeypatch):
    monkeypatch.setattr(headed, "gain_of", lambda *_: True)  # as if the rehearsal had said yes
    world = world_of(**PRIVATE)
    method = headed_in(world)
    state = method.start(world)
    assert state.noise == 1.0
    inside = method.inner.releases(replace(world, config=world.config), state.inner, 1)
    (release,) = [one for one in method.releases(world, state, 1) if one not in inside]
    assert (release.stream, release.count, release.sampling_rate, release.noise_multiplier) == (
        "popularity",
        1,
        1.0,
        1.0,
    )
    slice_ = tiny_stream().slice_(1)
    after, told = method.learn(world, state, slice_, PlainDescent())
    users, items = (
        slice_.past.users[slice_.train_positions],
        slice_.past.items[slice_.past.place[slice_.train_positions]],
    )
    exact = torch.zeros(slice_.n_train_items)
    for user in np.unique(users):
        met = torch.from_numpy(np.unique(items[users == user]))
        exact[met] += 1 / np.sqrt(len(met))
    error = after.fitted.counts.recent - exact
    assert told["popularity_clients"] == len(np.unique(users))
    assert 0.85 < float(error.std()) < 1.15
    assert abs(float(error.mean())) < 4 / np.sqrt(len(error))
    n = len(state.fitted.counts.total)
    added = after.fitted.counts.total[:n] - state.fitted.counts.total
    assert torch.allclose(added, after.fitted.counts.recent[:n], atol=1e-4)
    ledger = method.releases(world, after)
    assert [one.count for one in ledger if one.stream == "popularity"] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("newcomers", ["noised", "mean-row"])
def test_all_releases_together_spend_the_budget_and_no_more(newcomers, monkeypatch):
    monkeypatch.setattr(headed, "gain_of", lambda *_: True)
    budget = {"privacy__target_epsilon": 3.4, "privacy__noise_multiplier": 0.0, "protofed__newcomers": newcomers}
    world = world_of(method="protofed", protofed__mode="private", **budget)
    method = headed_in(world)
    ledger = method.releases(world, method.start(world), world.config.stream.n_slices)
    streams = {one.stream: one.count for one in ledger}
    rows = {"new items": 2} if newcomers == "noised" else {}
    assert streams == {"prototypes": 2 * world.config.privacy.rounds_per_slice, "popularity": 2, **rows}
    assert 3.3 < epsilon(ledger, 1e-5, trust="central") <= 3.4


def prompts_pay(monkeypatch: pytest.MonkeyPatch, pay: bool) -> None:
    """As if base users' prompts paid, or not."""
    choose = ProtoFed.choose_under
    monkeypatch.setattr(ProtoFed, "choose_under", lambda self, world, state: (choose(self, world, state)[0], pay))


def test_the_flagships_head_is_that_of_the_bare_backbone():
    world, frozen = world_of(**NOTHING), world_of(method="frozen-no-new-rows")
    ours, bare = headed_in(world).start(world), headed_in(frozen).start(frozen)
    assert ours.fitted.head.worn
    assert all(torch.equal(value, every_value(bare.fitted)[name]) for name, value in every_value(ours.fitted).items())


def chosen_one_by_one(
    world: World, state: HeadedState, slice_: TimeSlice, head: FittedHead, before: torch.Tensor
) -> dict[int, tuple[bool, bool]]:
    """What each user with validation events should use, question by question, from answers under the head alone."""
    model = published(headed_in(world), world, state, slice_.validation.n_items).model
    model = replace(model, n_items=slice_.n_train_items)
    sums = before.clone()
    asked = slice_.validation
    for place in range(len(asked)):
        queries, user = slice_.queries(np.array([place]), LENGTH), int(asked.users[place])
        losses = []
        for variant in VARIANTS:
            inner = online_inference(model, state.inner.devices, queries, variant=variant)
            scores = with_head(head, inner, queries)[0]
            rivals = asked.negatives[place][asked.negatives[place] != NO_CANDIDATE]
            positive = scores[asked.positives[place]]
            losses.append(float(torch.cat([positive[None], scores[rivals]]).logsumexp(0) - positive))
        sums[user] += torch.tensor(losses) - losses[0]
    best = (sums + model.prior).argmin(1).tolist()
    return {int(user): VARIANTS[best[int(user)]] for user in asked.users.unique()}


def test_devices_choose_under_the_head_by_their_own_validation_events():
    world = world_of(**NOTHING)
    method = headed_in(world)
    state = method.start(world)
    devices = state.inner.devices
    expected = chosen_one_by_one(world, state, world.base, state.fitted, torch.zeros_like(devices.losses))
    assert {user: (bool(devices.use_prompt[user]), bool(devices.use_rows[user])) for user in expected} == expected
    assert len(set(expected.values())) > 1
    plain = replace(world, config=replace(world.config, scoring=replace(world.config.scoring, head=False)))
    alone = method.inner.start(plain).devices
    assert not torch.equal(alone.losses, devices.losses)


def test_in_a_slice_devices_choose_under_the_head_too(monkeypatch):
    world, heads = world_of(**NOTHING), []
    real = end.variant_losses
    monkeypatch.setattr(end, "variant_losses", lambda *asked: heads.append(asked[3]) or real(*asked))
    method = headed_in(world)
    state, _ = method.learn(world, method.start(world), tiny_stream().slice_(1), PlainDescent())
    assert [every_value(head).keys() for head in heads] == [every_value(state.fitted).keys()]
    assert all(torch.equal(v, every_value(heads[0])[k]) for k, v in every_value(state.fitted).items())


def test_a_head_adds_the_same_to_every_answer_to_a_question():
    world = world_of(**NOTHING)
    fitted, (_, queries) = headed_in(world).start(world).fitted, questions(0)
    answers = [torch.randn(len(queries), queries.n_items, generator=torch.manual_seed(n)) for n in range(3)]
    for final, inner in zip(scores_under(fitted, answers, queries), answers, strict=True):
        assert torch.allclose(final, with_head(fitted, inner, queries), atol=1e-5)


@pytest.mark.parametrize("settings", [NOTHING, PRIVATE], ids=["nothing", "private"])
def test_prompts_that_do_not_pay_are_not_uploaded_and_devices_answer_all_the_same(settings, monkeypatch):
    monkeypatch.setattr(headed, "gain_of", lambda *_: False)  # nor does popularity pay
    prompts_pay(monkeypatch, False)
    world = world_of(protofed__newcomers="mean-row", **settings)
    method = headed_in(world)
    state = method.start(world)
    nothing = world_of(**NOTHING)
    expected = headed_in(nothing).start(nothing)
    assert state.uploads_out
    for index in (1, 2):
        state, told = method.learn(world, state, tiny_stream().slice_(index), PlainDescent())
        expected, _ = headed_in(nothing).learn(nothing, expected, tiny_stream().slice_(index), PlainDescent())
        _, queries = questions(index)
        assert torch.equal(method.score(world, state, queries), headed_in(nothing).score(nothing, expected, queries))
    assert (told["uploads_out"], told["rounds"], told["bytes_up"]) == (1, 0, 0)
    assert told["own_rows"] > 0
    assert method.releases(world, state, 1) == ()
    assert restore(take_snapshot(state)).uploads_out
    assert published(method, world, state, tiny_log().n_items).rule is None  # no device makes an upload


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (NOTHING, True),
        (PRIVATE, True),
        ({"method": "protofed-sp"}, True),
        ({"method": "frozen-no-new-rows"}, True),
        ({"method": "protofed-sp", "protofed__mode": "nodp"}, False),
        ({"method": "frozen"}, False),
    ],
)
def test_an_empty_ledger_means_zero_only_where_all_that_is_shared_is_in_it(settings, expected, tmp_path):
    assert only_noised(tiny_config(**settings)) is expected
    write_ledger(tmp_path / "ledger.json", ())
    said = promised(tmp_path / "ledger.json", 1e-5, nothing=expected)
    assert (said and said["epsilon_release"]) == (0.0 if expected else None)


@pytest.mark.slow
@pytest.mark.parametrize("newcomers", ["noised", "mean-row"])
def test_without_prototypes_popularity_has_the_rest_of_the_budget(newcomers, monkeypatch):
    budget = {"privacy__target_epsilon": 3.4, "privacy__noise_multiplier": 0.0, "protofed__newcomers": newcomers}
    noise = {}
    for uploads in (True, False):
        monkeypatch.undo()
        monkeypatch.setattr(headed, "gain_of", lambda *_: True)
        prompts_pay(monkeypatch, uploads)
        world = world_of(method="protofed", protofed__mode="private", **budget)
        method = headed_in(world)
        state = method.start(world)
        ledger = method.releases(world, state, world.config.stream.n_slices)
        assert {one.stream for one in ledger} == {
            "popularity",
            *(["prototypes"] if uploads else []),
            *(["new items"] if newcomers == "noised" else []),
        }
        assert 3.3 < epsilon(ledger, 1e-5, trust="central") <= 3.4
        noise[uploads] = state.noise
    assert noise[False] < noise[True]


def test_nothing_is_released_where_nothing_may_be():
    world = world_of(**NOTHING)
    method = headed_in(world)
    state, told = method.learn(world, method.start(world), tiny_stream().slice_(1), PlainDescent())
    assert method.releases(world, state, 1) == ()
    assert told["rounds"] == 0
    assert "popularity_clients" not in told


@pytest.mark.parametrize(
    "settings",
    [{"method": "frozen-no-new-rows"}, NOTHING],
    ids=["frozen", "nothing"],
)
def test_other_users_later_events_change_no_answer_where_nothing_is_shared(settings):
    """Later items of all other users are exchanged; times, users and every item's first position stay."""
    log, data = tiny_log(), tiny_stream()
    me, start = int(torch.bincount(data.query_set(2, "test").users).argmax()), data.bounds[0].end
    items = log.items.numpy().copy()
    first = {int(item): int(np.flatnonzero(items == item)[0]) for item in np.unique(items)}
    known = [item for item, place in first.items() if place < start]
    rng = np.random.default_rng(3)
    for place in range(start, len(items)):
        if int(log.users[place]) != me and first[int(items[place])] != place:
            items[place] = rng.choice(known)
    assert (items != log.items.numpy()).sum() > 100
    other = type(data)(replace(log, items=torch.from_numpy(items)), tiny_config().stream)
    answers = []
    for stream in (data, other):
        world = world_of(stream, **settings)
        method = headed_in(world)
        state = method.start(world)
        for index in (1, 2):
            state, _ = method.learn(world, state, stream.slice_(index), PlainDescent())
        asked = stream.query_set(2, "test")
        mine = np.flatnonzero(asked.users.numpy() == me)
        answers.append(method.score(world, state, stream.queries(asked, mine, LENGTH)))
    assert len(answers[0]) > 0
    assert torch.equal(*answers)
