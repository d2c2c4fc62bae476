"""The head: numbers of one's own past against slow loops, a fit that finds what was planted, nothing that leaks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import LENGTH, another_future, every_value, questions, tiny_config, tiny_log, tiny_stream, warmed_up_on

from protofed.backbone.training import PlainDescent
from protofed.errors import LeakError
from protofed.inference.head import Examples, Head, examples_of, fit_head, fit_scale, join, mean_loss, take, with_head
from protofed.inference.own_past import DAY, NUMBERS, near, own_past
from protofed.methods.catalogue import METHODS, method_named
from protofed.methods.headed import Headed, under_head
from protofed.methods.protocol import World
from protofed.slices.histories import Queries
from protofed.slices.leaks import check_evidence
from protofed.slices.stream import halves
from protofed.snapshot import restore, take_snapshot

PAST = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 90 * 24 * 3600)), max_size=9)


def queries_of(pasts: list[list[tuple[int, int]]], now: int, n_items: int = 6) -> Queries:
    pasts = [sorted(past, key=lambda event: event[1]) for past in pasts]
    items = [item for past in pasts for item, _ in past]
    times = [time for past in pasts for _, time in past]
    return Queries(
        users=torch.arange(len(pasts)),
        times=torch.full((len(pasts),), now),
        tokens=torch.zeros(len(pasts), 1, dtype=torch.int64),
        offsets=torch.tensor([0, *np.cumsum([len(past) for past in pasts])]),
        past_items=torch.tensor(items, dtype=torch.int64),
        past_times=torch.tensor(times, dtype=torch.int64),
        slice_index=0,
        n_items=n_items,
    )


def by_hand(past: list[tuple[int, int]], item: int, now: int) -> list[float]:
    """The numbers of one item of one past, one at a time."""
    past = sorted(past, key=lambda event: event[1])
    items = [i for i, _ in past]
    ages = [(now - t) / DAY for i, t in past if i == item]
    follow = [(now - t) / DAY for n, (i, t) in enumerate(past) if n and i == item and items[n - 1] == items[-1]]
    since = len(items) - 1 - max(n for n, i in enumerate(items) if i == item)

    def bump(period: float, width: float) -> float:
        angles = [2 * math.pi * 24 * age / period for age in ages]
        return sum(math.exp((math.cos(a) - 1) / (2 * math.pi * width / period) ** 2) for a in angles)

    return [
        math.log1p(len(ages)),
        *(math.log1p(10 * sum(0.5 ** (age / h) for age in ages)) for h in (0.25, 2, 14, 90)),
        math.log1p(since),
        float(items[-1] == item),
        math.log1p(len(follow)),
        math.log1p(sum(0.5 ** (age / 30) for age in follow)),
        math.log1p(bump(24, 1.5)),
        math.log1p(bump(168, 3.0)),
        len(ages) / len(items),
        math.log1p(len(items)),
        1 - len(set(items)) / len(items),
        math.log1p(min(ages)),
        math.log1p(min(ages)) ** 2 / 10,
        float(len(ages) == 1),
        1.0,
    ]


@settings(deadline=None, max_examples=60)
@given(st.lists(PAST, min_size=1, max_size=4))
def test_the_numbers_are_those_of_a_slow_loop(pasts):
    now = 100 * 24 * 3600
    which, items, x = own_past(queries_of(pasts, now))
    expected = [(q, item) for q, past in enumerate(pasts) for item in sorted({i for i, _ in past})]
    assert list(zip(which.tolist(), items.tolist(), strict=True)) == expected
    assert x.shape == (len(expected), len(NUMBERS))
    for row, (q, item) in zip(x, expected, strict=True):
        assert row.tolist() == pytest.approx(by_hand(pasts[q], item, now), rel=1e-4, abs=1e-5)


def test_two_instants_are_near_in_the_day_whatever_the_day():
    hours = torch.tensor([0.0, 24.0, 1.5, 22.5, 12.0], dtype=torch.float64)
    found = near(hours, 24.0, 1.5)
    assert found[:2].tolist() == pytest.approx([1.0, 1.0])
    assert found[2] == pytest.approx(found[3])
    assert found[2] == pytest.approx(math.exp(-0.5), abs=0.01)
    assert found[4] < 1e-4


def planted(n: int = 400, repeats: float = 0.8, seed: int = 0) -> tuple[Examples, Queries]:
    """People who mostly choose again what they chose last, under scores that know nothing of it."""
    rng = np.random.default_rng(seed)
    pasts = [[(int(i), 3600 * k) for k, i in enumerate(rng.permutation(20)[:5])] for _ in range(n)]
    answers = [past[-1][0] if rng.random() < repeats else int(rng.integers(20)) for past in pasts]
    queries = queries_of(pasts, 10 * 3600, 20)
    scores = torch.from_numpy(rng.normal(size=(n, 20))).float()
    return examples_of(scores, torch.tensor(answers), queries), queries


def test_a_fitted_head_ranks_what_people_choose_again_first():
    examples, queries = planted()
    head, worn = fit_head(examples, seed=0)
    assert worn
    first = with_head(head, examples.scores, queries).argmax(1)
    last = queries.past_items[queries.offsets[1:] - 1]
    assert (first == last).float().mean() > 0.9
    assert mean_loss(head, examples) < mean_loss(Head(), examples) - 1.0
    assert float(head.log_beta.detach().exp()) < 0.7  # scores that know nothing are trusted less


def test_where_nothing_repeats_the_head_gives_way_or_stays_off():
    examples, _ = planted(repeats=0.0)
    head, worn = fit_head(examples, seed=0)
    assert not worn or mean_loss(head, examples) < mean_loss(Head(), examples)
    scaled = replace(examples, scores=100 * examples.scores)  # the scale alone could be worth much, and ranks nothing
    assert fit_head(scaled, seed=0)[1] == worn


def test_the_scale_of_the_scores_alone_is_found():
    examples, _ = planted(400)
    truth = torch.randn(400, 20, generator=torch.Generator().manual_seed(1))
    answers = torch.multinomial(truth.softmax(-1), 1, generator=torch.Generator().manual_seed(2))[:, 0]
    for factor in (0.5, 1.0, 4.0):  # scores that are so many times too large
        found = fit_scale(replace(examples, scores=factor * truth, positives=answers))
        assert float(found) == pytest.approx(-math.log(factor), abs=0.35)
    nobody = examples_of(torch.zeros(3, 4), torch.tensor([0, 1, 2]), queries_of([[], [], []], 5, 4))
    assert fit_head(nobody, seed=0)[1] is False


def test_a_head_as_made_changes_no_ranking_and_items_outside_the_past_keep_their_order():
    examples, queries = planted(50)
    assert torch.equal(with_head(Head(), examples.scores, queries), examples.scores)
    head, _ = fit_head(planted()[0], seed=0)
    found = with_head(head, examples.scores, queries)
    for row in range(len(examples)):
        past = set(queries.past_items[queries.offsets[row] : queries.offsets[row + 1]].tolist())
        others = torch.tensor([item for item in range(20) if item not in past])
        beta = head.log_beta.exp()
        assert torch.allclose(found[row, others], beta * examples.scores[row, others])


def test_some_questions_of_several_sets_are_those_questions():
    one, other = planted(12)[0], planted(9, seed=4)[0]
    both = join([one, replace(other, scores=other.scores[:, :15].clone())])
    assert both.scores.shape == (21, 20)
    assert torch.isinf(both.scores[12:, 15:]).all()
    chosen = torch.tensor([20, 3, 12])
    some = take(both, chosen)
    for place, q in enumerate(chosen.tolist()):
        mine, source = some.which == place, both.which == q
        assert torch.equal(some.items[mine], both.items[source])
        assert torch.equal(some.x[mine], both.x[source])
    assert torch.equal(some.positives, both.positives[chosen])


def world_of(name: str, data=None) -> World:
    config = tiny_config(method=name, scoring__head=True)
    data = data or tiny_stream()
    return World(config, data.slice_(0), warmed_up_on(config, data)[0])


def test_the_warm_up_under_a_head_stops_on_the_earlier_half_and_the_head_learns_from_the_later():
    world = world_of("frozen")
    earlier, later = halves(world.base.validation)
    assert (len(earlier), len(later)) == (len(world.base.validation) // 2, len(world.base.validation) - len(earlier))
    assert earlier.positions[-1] < later.positions[0]
    state = Headed(METHODS["frozen"].method).start(world)
    assert state.newest_answer == later.positions[-1]
    plain = warmed_up_on(tiny_config(method="frozen"), tiny_stream())[1]
    halved = warmed_up_on(tiny_config(method="frozen", scoring__head=True), tiny_stream())[1]
    assert plain.trace[0] != halved.trace[0]  # other questions, before the first epoch too


@pytest.mark.parametrize("name", ["frozen", "protofed-sp"])
def test_the_head_knows_nothing_after_the_base_block_and_survives_packing(name):
    method = Headed(method_named(name).method)
    world, other = world_of(name), world_of(name, another_future(0))
    one, two = method.start(world), method.start(other)
    assert all(torch.equal(v, every_value(two.head)[k]) for k, v in every_value(one.head).items())
    state, told = method.learn(world, one, tiny_stream().slice_(1), PlainDescent())
    assert told["head_beta"] == pytest.approx(float(one.head.log_beta.exp()))
    check_evidence(tiny_stream(), 1, method.evidence(state))
    _, queries = questions(1)
    back = restore(take_snapshot(state))
    assert torch.equal(method.score(world, back, queries), method.score(world, state, queries))
    inner = method.inner.score(world, state.inner, queries)
    expected = with_head(state.head, inner, queries) if state.worn else inner
    assert torch.equal(method.score(world, state, queries), expected)


def test_a_head_that_has_seen_later_events_is_told():
    method = Headed(METHODS["frozen"].method)
    state = replace(method.start(world_of("frozen")), newest_answer=tiny_stream().bounds[0].val_end)
    with pytest.raises(LeakError, match=r"^a head fitted after the base block: on an event at log position"):
        check_evidence(tiny_stream(), 2, method.evidence(state))


def test_other_users_later_events_change_no_answer_under_a_head():
    """Later items of all other users are exchanged; times, users and every item's first position stay."""
    method = Headed(METHODS["frozen-no-new-rows"].method)
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
        world = world_of("frozen-no-new-rows", stream)
        state = method.start(world)
        for index in (1, 2):
            state, _ = method.learn(world, state, stream.slice_(index), PlainDescent())
        asked = stream.query_set(2, "test")
        mine = np.flatnonzero(asked.users.numpy() == me)
        answers.append(method.score(world, state, stream.queries(asked, mine, LENGTH)))
    assert len(answers[0]) > 0
    assert torch.equal(*answers)


def test_a_config_without_a_head_is_the_method_itself():
    method = METHODS["frozen"].method
    assert under_head(method, tiny_config(method="frozen")) is method
    assert isinstance(under_head(method, tiny_config(method="frozen", scoring__head=True)), Headed)
