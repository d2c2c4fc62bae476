"""The head: a fit that finds what was planted, parts that are worn only where they pay, scores against slow loops."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pasts import queries_of
from torch import Tensor

from protofed.inference.fit_head import (
    Examples,
    all_losses,
    examples_of,
    final_scores,
    fit_head,
    fit_scale,
    gain_of,
    join,
    pays,
    take,
)
from protofed.inference.head import FittedHead, Head, Part, with_head
from protofed.inference.item_side import Covisits, ItemCounts, covisit_numbers, popularity_numbers
from protofed.inference.own_past import NUMBERS, own_past
from protofed.slices.histories import Queries

N = 20


def counted(popular: Tensor | None = None) -> ItemCounts:
    """How often items were met; each item was met with the next one."""
    total = torch.ones(N) if popular is None else popular
    near = Covisits(torch.arange(N + 1), (torch.arange(N) + 1) % N, torch.full((N,), 5.0))
    return ItemCounts(total, total, near, N)


def planted(
    n: int = 400, *, repeats: float = 0.8, follows: float = 0.0, popular: float = 0.0, seed: int = 0
) -> tuple[Examples, Queries, ItemCounts]:
    """People who choose what they chose last, what follows it, or what is popular; the scores know none of it."""
    rng = np.random.default_rng(seed)
    pasts = [[(int(i), 3600 * k) for k, i in enumerate(rng.permutation(N)[:5])] for _ in range(n)]
    counts = counted(torch.tensor([100.0] * 2 + [1.0] * (N - 2)) if popular else None)

    def answer(last: int) -> int:
        draw = rng.random()
        if draw < repeats:
            return last
        if draw < repeats + follows:
            return (last + 1) % N
        return int(rng.integers(2)) if draw < repeats + follows + popular else int(rng.integers(N))

    answers = torch.tensor([answer(past[-1][0]) for past in pasts])
    queries = queries_of(pasts, 10 * 3600, N)
    scores = torch.from_numpy(rng.normal(size=(n, N))).float()
    return examples_of(scores, answers, queries, counts), queries, counts


def loss_of(head: Head, examples: Examples) -> float:
    return float(all_losses(head, examples).mean())


def test_a_fitted_head_ranks_what_people_choose_again_first():
    examples, queries, counts = planted()
    head = fit_head(examples, seed=0)
    assert head.own is not None
    first = with_head(FittedHead(head, counts), examples.scores, queries).argmax(1)
    last = queries.past_items[queries.offsets[1:] - 1]
    assert (first == last).float().mean() > 0.9
    assert loss_of(head, examples) < loss_of(Head(own=False, items=False), examples) - 1.0
    assert float(head.log_beta.detach().exp()) < 0.7  # scores that know nothing are trusted less


@pytest.mark.parametrize("planted_as", ["follows", "popular"])
def test_counts_are_worn_where_they_tell_something(planted_as):
    examples, queries, counts = planted(800, repeats=0.0, **{planted_as: 0.8})
    head = fit_head(examples, seed=0)
    assert head.items is not None
    first = with_head(FittedHead(head, counts), examples.scores, queries).argmax(1)
    last = queries.past_items[queries.offsets[1:] - 1]
    hits = (first == (last + 1) % N) if planted_as == "follows" else first < 2
    assert hits.float().mean() > 0.7
    assert fit_head(examples, seed=0, items=False).items is None


def test_where_nothing_can_be_told_nothing_is_worn():
    worn = []
    for seed in range(6):
        examples, queries, counts = planted(repeats=0.0, seed=seed)
        head = fit_head(examples, seed=seed)
        worn += [head.worn]
        if not head.worn:
            assert torch.equal(with_head(FittedHead(head, counts), examples.scores, queries), examples.scores)
        scaled = replace(examples, scores=100 * examples.scores)  # the scale alone is worth much, and ranks nothing
        assert fit_head(scaled, seed=seed).worn == head.worn
    assert sum(worn) <= 1  # a gain of one standard error by luck: one in six, and two tries


def test_a_part_pays_when_its_gain_is_more_than_luck_over_users():
    gains = torch.tensor([1.0, 1.0, 1.0, -1.0, 0.5, 0.5])
    users = torch.tensor([0, 0, 0, 1, 2, 3])
    mean = float(gains.mean())
    sums = {user: float((gains[users == user] - mean).sum()) for user in range(4)}
    error = math.sqrt(sum(value**2 for value in sums.values())) / len(gains)
    assert pays(gains, users, mean / error - 1e-3)
    assert not pays(gains, users, mean / error + 1e-3)
    assert not pays(torch.zeros(6), users, 1.0)


def test_one_head_is_worth_more_than_another_when_its_answers_are():
    examples, _, _ = planted(800)
    nothing, head = Head(own=False, items=False), fit_head(examples, seed=0)
    assert gain_of(examples, head, examples, nothing, 0)
    assert not gain_of(examples, nothing, examples, head, 0)


def test_the_scale_of_the_scores_alone_is_found():
    examples, _, _ = planted(400)
    truth = torch.randn(400, N, generator=torch.Generator().manual_seed(1))
    answers = torch.multinomial(truth.softmax(-1), 1, generator=torch.Generator().manual_seed(2))[:, 0]
    for factor in (0.5, 1.0, 4.0):  # scores that are so many times too large
        found = fit_scale(replace(examples, scores=factor * truth, positives=answers))
        assert float(found) == pytest.approx(-math.log(factor), abs=0.35)


def test_the_final_scores_are_those_of_a_slow_loop():
    examples, queries, counts = planted(30)
    head = Head()
    rng = torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        parameter.data.normal_(0, 0.5, generator=rng)
    head.requires_grad_(False)
    found = with_head(FittedHead(head, counts), examples.scores, queries)
    assert torch.allclose(found, final_scores(head, examples), atol=1e-6)
    assert isinstance(head.own, Part)
    assert isinstance(head.items, Part)
    y = popularity_numbers(counts, N)
    own = {(int(q), int(i)): x for q, i, x in zip(*own_past(queries), strict=True)}
    near = {(int(q), int(i)): z for q, i, z in zip(*covisit_numbers(counts, queries), strict=True)}
    for q in range(30):
        for i in range(N):
            z = near.get((q, i), torch.zeros(2))
            expected = head.log_beta.exp() * examples.scores[q, i] + head.items(torch.cat([y[i], z])[None])[0]
            expected += head.own(own[q, i][None])[0] if (q, i) in own else 0.0
            assert float(found[q, i]) == pytest.approx(float(expected), abs=1e-4)


def test_a_part_is_not_asked_beyond_what_it_was_fitted_on():
    part = Part(len(NUMBERS), 3)
    for parameter in part.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn(50, len(NUMBERS), generator=torch.Generator().manual_seed(1))
    part.standardise(x)
    assert torch.equal(part(x.amax(0, keepdim=True)), part(x.amax(0, keepdim=True) + 7))
    assert torch.equal(part(x.amin(0, keepdim=True)), part(x.amin(0, keepdim=True) - 7))


def test_a_number_that_is_left_out_changes_nothing():
    examples, _, _ = planted()
    which = NUMBERS.index("events since")
    head = fit_head(examples, seed=0, unread=(which,))
    assert isinstance(head.own, Part)
    other = examples.own.x.clone()
    other[:, which] += torch.rand(len(other))
    assert torch.equal(head.own(other), head.own(examples.own.x))
    other[:, NUMBERS.index("last event")] += 1
    assert not torch.equal(head.own(other), head.own(examples.own.x))


def test_a_head_as_made_changes_no_ranking():
    examples, queries, counts = planted(50)
    assert torch.equal(with_head(FittedHead(Head(), counts), examples.scores, queries), examples.scores)


def test_some_questions_of_several_sets_are_those_questions():
    one, other = planted(12)[0], planted(9, popular=0.5, seed=4)[0]
    both = join([one, other, planted(3, seed=5)[0]])
    assert both.scores.shape == (24, N)
    assert both.ages.tolist() == [0] * 12 + [1] * 9 + [0] * 3  # two tables of counts, one of them shared
    chosen = torch.tensor([20, 3, 12])
    some = take(both, chosen)
    for name in ("own", "near"):
        mine, source = getattr(some, name), getattr(both, name)
        for place, q in enumerate(chosen.tolist()):
            assert torch.equal(mine.items[mine.which == place], source.items[source.which == q])
            assert torch.equal(mine.x[mine.which == place], source.x[source.which == q])
    assert torch.equal(some.positives, both.positives[chosen])
    head = fit_head(one, seed=0)
    assert torch.allclose(final_scores(head, both)[chosen], final_scores(head, some), atol=1e-6)
