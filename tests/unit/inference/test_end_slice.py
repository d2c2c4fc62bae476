"""A slice ends: losses of validation events, evidence over slices, the choice and what is remembered, by hand."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Generator, Tensor
from worlds import LENGTH, random_model, tiny_stream

from protofed.client.codec import QueryEncoder, random_linear_codec, unit
from protofed.client.drift import Gate
from protofed.client.memory import Memory, as_histories, events_between, events_until, no_memory
from protofed.client.model import VARIANTS, Encoders, LocalRule, Model
from protofed.client.own_rows import no_rows, subset, with_met_items
from protofed.client.prompts import PromptState
from protofed.client.state import DeviceState, columns, new_devices, with_fresh_moments
from protofed.inference.end import (
    Question,
    candidate_loss,
    end_slice,
    record_losses,
    validation_questions,
    variant_losses,
)
from protofed.inference.online import online_inference
from protofed.slices.candidates import NO_CANDIDATE
from protofed.slices.stream import TimeSlice

CPU = torch.device("cpu")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed))


def test_the_variants_are_nothing_rows_prompt_both():
    assert VARIANTS == ((False, False), (False, True), (True, False), (True, True))


def test_the_loss_of_a_candidate_list_is_computed_by_hand():
    scores = torch.tensor([[1.0, 2.0, 3.0, -1.0], [0.5, 9.0, 0.0, 4.0]])
    negatives = torch.tensor([[0, 3, 1], [2, NO_CANDIDATE, NO_CANDIDATE]])
    by_hand = [
        -math.log(math.exp(3) / (math.exp(3) + math.exp(1) + math.exp(-1) + math.exp(2))),
        -math.log(math.exp(4) / (math.exp(4) + math.exp(0))),
    ]
    assert candidate_loss(scores, torch.tensor([2, 3]), negatives).tolist() == pytest.approx(by_hand, rel=1e-5)


def test_a_missing_candidate_is_no_candidate_whatever_item_0_scores():
    negatives = torch.tensor([[1, NO_CANDIDATE]])
    low, high = (torch.tensor([[s, 1.0, 2.0]]) for s in (-50.0, 50.0))
    positive = torch.tensor([2])
    assert torch.equal(candidate_loss(low, positive, negatives), candidate_loss(high, positive, negatives))


def test_without_any_candidate_the_loss_is_zero():
    assert candidate_loss(torch.tensor([[5.0, 7.0]]), torch.tensor([1]), torch.tensor([[NO_CANDIDATE] * 3])).item() == 0


def test_evidence_fades_by_half_and_adds_losses_relative_to_using_nothing():
    losses = torch.tensor([[0.0, 2.0, -4.0, 1.0], [0.0, 1.0, 1.0, 1.0], [0.0, 8.0, 8.0, 8.0]])
    events = torch.tensor([[3.0, 2.0, 4.0, 3.5], [1.0, 1.0, 0.0, 2.0], [2.0, 0.0, 2.0, 1.0]])
    after = record_losses(losses, events, torch.tensor([0, 2, 0]))
    assert after.tolist() == [
        [0.0, 1.0 - 1.0 - 2.0, -2.0 + 1.0 + 0.0, 0.5 + 0.5 - 1.0],
        [0.0, 0.5, 0.5, 0.5],
        [0.0, 4.0 + 0.0, 4.0 - 1.0, 4.0 + 1.0],
    ]


def test_a_slice_without_events_only_fades():
    losses = drawn(5, 4)
    assert torch.equal(record_losses(losses, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)), losses / 2)


def test_an_event_whose_loss_is_not_a_number_is_no_evidence():
    events = torch.tensor([[1.0, math.nan, 0.5, math.nan], [math.nan, 1.0, 1.0, 1.0]])
    after = record_losses(torch.zeros(1, 4), events, torch.tensor([0, 0]))
    assert after.tolist() == [[0.0, 0.0, -0.5, 0.0]]


def test_evidence_of_one_client_reaches_nobody_else():
    losses, events = drawn(6, 4), drawn(9, 4, seed=1)
    users = torch.tensor([0, 0, 2, 2, 2, 3, 5, 5, 0])
    after = record_losses(losses, events, users)
    assert torch.equal(after[[1, 4]], losses[[1, 4]] / 2)
    poisoned = torch.where((users == 2)[:, None], 1e6, events)
    assert torch.equal(record_losses(losses, poisoned, users)[[0, 1, 3, 4, 5]], after[[0, 1, 3, 4, 5]])


def the_slice() -> TimeSlice:
    return tiny_stream().slice_(1)


@cache
def a_model() -> Model:
    backbone = random_model(100, history_length=LENGTH).requires_grad_(False)
    codec = random_linear_codec(2, 8, Generator().manual_seed(1), d_z=4)
    g = QueryEncoder(8, Generator().manual_seed(7), d_z=4, width=8).requires_grad_(False)
    gate = Gate(*(torch.tensor(x) for x in (0.5, 0.5, 1.0, -1.0)))
    v, prior = unit(drawn(3, 4, seed=2)), torch.tensor([0.0, 0.3, -0.2, 0.1])
    rule, n_items = LocalRule(top_m=2), the_slice().n_train_items
    return Model(backbone, Encoders(codec, g, gate, 1.0), v, codec.decode(v), rule, n_items, prior, met_boost=0.4)


@cache
def devices() -> DeviceState:
    """A small random federation on the tiny stream, in the midst of a slice: nothing is zero, equal or trained.

    Every fifth has not been met, every third takes no part; those who do remember all before the validation part.
    """
    data, model = the_slice(), a_model()
    n = data.past.n_users
    everybody, train_end = torch.arange(n), data.bounds[-1].train_end
    met, active = everybody % 5 != 0, everybody % 3 != 0
    known = torch.where(active, events_until(data.past, train_end), events_until(data.past, train_end) // 2)
    state = new_devices(1000 + everybody, 2, 8, 4)
    memory = events_between(data.past, everybody, torch.zeros_like(known), known)
    own = with_met_items(no_rows(8), model.backbone, as_histories(memory), len(memory.items), everybody)
    return replace(
        state,
        prompts=PromptState(drawn(n, 2, 8, seed=4), drawn(n, 2, 8, seed=5)),
        rows=replace(own, rows=own.rows + 0.3 * drawn(*own.rows.shape, seed=3)),
        drift=replace(state.drift, step=drawn(n, 4, seed=6)),
        taste=unit(drawn(n, 8, seed=8)),
        met=met,
        active=active,
        losses=drawn(n, 4, seed=9),
        use_prompt=met,
        use_rows=met,
        memory=memory,
    )


def the_questions() -> list[Question]:
    return list(validation_questions(the_slice(), LENGTH, CPU))


def asking_order() -> list[int]:
    """Places in the validation part, short histories first."""
    asked, past = the_slice().validation, the_slice().past
    return sorted(range(len(asked)), key=lambda b: (past.before[asked.positions[b]], b))


def test_questions_are_the_validation_events_with_their_answers_and_candidates_short_histories_first():
    asked, order, at = the_slice().validation, asking_order(), 0
    for question in the_questions():
        some = order[at : at + len(question.positives)]
        at += len(some)
        assert torch.equal(question.queries.users, asked.users[some])
        assert torch.equal(question.positives, asked.positives[some])
        assert torch.equal(question.negatives, asked.negatives[some])
        whole = the_slice().queries(torch.tensor(some).numpy(), LENGTH)
        width = question.queries.tokens.shape[1]
        assert torch.equal(question.queries.tokens, whole.tokens[:, LENGTH - width :])
        assert torch.equal(question.queries.past_items, whole.past_items)
        assert (whole.tokens[:, : LENGTH - width] == -2).all()
    assert at == len(asked) > 0


def test_variant_losses_are_those_of_single_queries_with_each_choice_made_by_hand():
    losses, users = variant_losses(a_model(), devices(), the_questions())
    asked, order, n = the_slice().validation, asking_order(), len(devices())
    assert losses.shape == (len(asked), 4)
    assert users.tolist() == asked.users[order].tolist()
    for place in range(0, len(order), 9):
        b = order[place]
        candidates = [c for c in asked.negatives[b].tolist() if c != NO_CANDIDATE]
        query = the_slice().queries(torch.tensor([b]).numpy(), LENGTH)
        for v, (prompt, rows) in enumerate(VARIANTS):
            use_prompt, use_rows = torch.full((n,), prompt), torch.full((n,), rows)
            state = replace(devices(), use_prompt=use_prompt, use_rows=use_rows)
            only = tuple(variant == (prompt, rows) for variant in VARIANTS)
            model = replace(a_model(), rule=replace(a_model().rule, allowed=only))  # for those who were not met
            scores = online_inference(model, state, query)[0].double()
            positive = scores[asked.positives[b]]
            by_hand = sum(math.exp(float(scores[c] - positive)) for c in candidates)
            assert losses[place, v].item() == pytest.approx(math.log1p(by_hand), rel=1e-3, abs=1e-3)


def test_the_variants_of_an_event_differ():
    losses, _ = variant_losses(a_model(), devices(), the_questions())
    for one in range(4):
        for other in range(one):
            assert (losses[:, one] != losses[:, other]).float().mean() > 0.5


def test_a_slice_without_validation_events_has_no_losses():
    losses, users = variant_losses(a_model(), devices(), [])
    assert losses.shape == (0, 4)
    assert users.shape == (0,)


def validation_events(state: DeviceState) -> Memory:
    """What each device that took part did in the validation part; nothing for the others."""
    past, known = the_slice().past, state.memory.counts
    until = torch.where(state.active, events_until(past, len(past)), known)
    return events_between(past, torch.arange(len(state)), known, until)


def ended(state: DeviceState | None = None, model: Model | None = None) -> DeviceState:
    state = devices() if state is None else state
    return end_slice(model or a_model(), state, the_questions(), validation_events(state))


def diary(memory: Memory, u: int) -> list[tuple[int, int]]:
    mine = slice(int(memory.offsets[u]), int(memory.offsets[u + 1]))
    return list(zip(memory.items[mine].tolist(), memory.times[mine].tolist(), strict=True))


def test_only_devices_that_took_part_remember_the_validation_events():
    before, after, past = devices(), ended(), the_slice().past
    for u in range(len(before)):
        own = slice(int(past.start[u]), int(past.start[u + 1]))
        everything = list(zip(past.items[own].tolist(), past.times[own].tolist(), strict=True))
        assert diary(after.memory, u) == (everything if before.active[u] else diary(before.memory, u))
    assert int(after.memory.counts.sum()) > int(before.memory.counts.sum())


def test_whoever_took_part_gets_rows_for_what_it_met_in_the_validation_part_and_the_others_none():
    before, after, model, past = devices(), ended(), a_model(), the_slice().past
    fresh = 0
    for u in range(len(before)):
        me = torch.tensor([u])
        mine, _ = subset(after.rows, me)
        old, _ = subset(before.rows, me)
        if not before.active[u]:
            expected = old
        else:  # as if the device were alone, from the whole log
            there = replace(old, clients=old.clients + u)
            boost = model.met_boost * before.taste[me]
            all_rows = with_met_items(there, model.backbone, past, len(past), me, boost)
            expected, _ = subset(all_rows, me)
            fresh += len(expected) - len(old)
        assert torch.equal(mine.items, expected.items)
        torch.testing.assert_close(mine.rows, expected.rows, atol=1e-6, rtol=0)
    assert fresh > 5


def test_each_device_decides_by_its_faded_evidence_its_validation_losses_and_the_prior():
    before, after, prior = devices(), ended(), a_model().prior.tolist()
    losses, users = variant_losses(a_model(), before, the_questions())
    for u in range(len(before)):
        mine = (losses[users == u] - losses[users == u][:, :1]).sum(0)
        evidence = [old / 2 + new for old, new in zip(before.losses[u].tolist(), mine.tolist(), strict=True)]
        assert after.losses[u].tolist() == pytest.approx(evidence, abs=1e-4)
        total = [e + p for e, p in zip(after.losses[u].tolist(), prior, strict=True)]
        prompt, rows = VARIANTS[total.index(min(total))]
        assert (bool(after.use_prompt[u]), bool(after.use_rows[u])) == (prompt, rows)
    chosen = set(zip(after.use_prompt.tolist(), after.use_rows.tolist(), strict=True))
    assert chosen == set(VARIANTS)


def test_the_choice_is_not_made_on_rows_that_its_own_questions_gave_rise_to():
    """Whether and where such rows start changes nobody's evidence."""
    here = ended()
    far = ended(model=replace(a_model(), met_boost=50.0))
    none = ended(model=replace(a_model(), rule=replace(a_model().rule, use_rows=False)))
    assert not torch.equal(far.rows.rows, here.rows.rows)
    assert torch.equal(none.rows.rows, devices().rows.rows)
    for other in (far, none):
        for name in ("losses", "use_prompt", "use_rows"):
            assert torch.equal(getattr(other, name), getattr(here, name))


def test_where_one_variant_alone_is_allowed_everybody_takes_it_and_nothing_is_asked():
    only = replace(a_model(), rule=replace(a_model().rule, allowed=(False, False, True, False)))

    def questions():
        raise AssertionError("a question was asked")
        yield

    after = end_slice(only, devices(), questions(), validation_events(devices()))
    assert torch.equal(after.losses, devices().losses)
    assert after.use_prompt.all()
    assert not after.use_rows.any()
    assert torch.equal(after.memory.items, ended().memory.items)


def test_nothing_else_about_a_device_changes_and_nobody_is_active_any_more():
    before = with_fresh_moments(devices())
    after = ended(before)
    assert after.moments is None
    assert not after.active.any()
    for name in ("users", "prompts", "drift", "taste", "met", "contributes"):
        assert getattr(after, name) is getattr(before, name)


def test_a_slice_without_validation_events_fades_the_evidence_and_adds_nothing():
    after = end_slice(a_model(), devices(), [], no_memory(len(devices())))
    assert torch.equal(after.losses, devices().losses / 2)
    assert torch.equal(after.memory.items, devices().memory.items)


def test_the_devices_that_come_in_are_not_written_to():
    before = [column.clone() for column in columns(devices())]
    rows, items = devices().rows.rows.clone(), devices().memory.items.clone()
    ended()
    assert all(torch.equal(old, now) for old, now in zip(before, columns(devices()), strict=True))
    assert torch.equal(rows, devices().rows.rows)
    assert torch.equal(items, devices().memory.items)
