"""Which of its parts a client uses: losses of validation events, evidence over slices and the choice, by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor
from worlds import LENGTH, random_model, tiny_stream

from protofed.client.codec import QueryEncoder, random_linear_codec, unit
from protofed.client.drift import Gate
from protofed.client.own_rows import no_rows, with_met_items
from protofed.client.prompts import PromptState
from protofed.client.update import Broadcast, LocalRule
from protofed.federation.acceptance import VARIANTS, accepted, candidate_loss, remembered, variant_losses
from protofed.inference.online import Devices, online_inference
from protofed.slices.candidates import NO_CANDIDATE


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
    after = remembered(losses, events, torch.tensor([0, 2, 0]))
    assert after.tolist() == [
        [0.0, 1.0 - 1.0 - 2.0, -2.0 + 1.0 + 0.0, 0.5 + 0.5 - 1.0],
        [0.0, 0.5, 0.5, 0.5],
        [0.0, 4.0 + 0.0, 4.0 - 1.0, 4.0 + 1.0],
    ]


def test_a_slice_without_events_only_fades():
    losses = drawn(5, 4)
    assert torch.equal(remembered(losses, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)), losses / 2)


def test_an_event_whose_loss_is_not_a_number_is_no_evidence():
    events = torch.tensor([[1.0, math.nan, 0.5, math.nan], [math.nan, 1.0, 1.0, 1.0]])
    after = remembered(torch.zeros(1, 4), events, torch.tensor([0, 0]))
    assert after.tolist() == [[0.0, 0.0, -0.5, 0.0]]


def test_evidence_of_one_client_reaches_nobody_else():
    losses, events = drawn(6, 4), drawn(9, 4, seed=1)
    users = torch.tensor([0, 0, 2, 2, 2, 3, 5, 5, 0])
    after = remembered(losses, events, users)
    assert torch.equal(after[[1, 4]], losses[[1, 4]] / 2)
    poisoned = torch.where((users == 2)[:, None], 1e6, events)
    assert torch.equal(remembered(losses, poisoned, users)[[0, 1, 3, 4, 5]], after[[0, 1, 3, 4, 5]])


def test_each_client_takes_the_variant_with_the_least_loss_prior_included():
    losses = torch.tensor([[0.0, -1.0, -2.0, -1.5], [0.0, -1.0, 0.5, 0.9], [0.0, 0.1, 0.1, 0.1], [0.0, 0.0, 0.0, -0.1]])
    use_prompt, use_rows = accepted(losses, torch.zeros(4))
    assert use_prompt.tolist() == [True, False, False, True]
    assert use_rows.tolist() == [False, True, False, True]
    use_prompt, use_rows = accepted(losses, torch.tensor([0.0, 0.0, 0.0, -1.0]))
    assert use_prompt.tolist() == [True, False, True, True]
    assert use_rows.tolist() == [True, True, True, True]


def test_equal_evidence_is_settled_by_the_prior_and_then_in_favour_of_less():
    nobody = torch.zeros(1, 4)
    assert [bool(x) for x in accepted(nobody, torch.zeros(4))] == [False, False]
    assert [bool(x) for x in accepted(nobody, torch.tensor([0.0, 0.0, -0.1, 0.0]))] == [True, False]


@pytest.mark.parametrize(
    "allowed", [(True, True, False, False), (True, False, True, False), (False, False, False, True)]
)
def test_a_variant_that_is_not_allowed_is_never_taken(allowed):
    losses, prior = 3 * drawn(50, 4), drawn(4, seed=1)
    use_prompt, use_rows = accepted(losses, prior, allowed)
    for row, prompt, rows in zip((losses + prior).tolist(), use_prompt.tolist(), use_rows.tolist(), strict=True):
        best = min((loss, v) for v, loss in enumerate(row) if allowed[v])[1]
        assert (prompt, rows) == VARIANTS[best]


def everything() -> tuple[Broadcast, QueryEncoder, Gate, LocalRule, Devices]:
    """A small random federation on the tiny stream: nothing in it is zero, equal or trained."""
    data = tiny_stream().slice_(1)
    n, model = data.past.n_users, random_model(100, history_length=LENGTH).requires_grad_(False)
    codec = random_linear_codec(2, 8, Generator().manual_seed(1), d_z=4)
    v = unit(drawn(3, 4, seed=2))
    own = with_met_items(no_rows(8), model, data.past, data.bounds[-1].train_end, torch.arange(n))
    own = replace(own, rows=own.rows + 0.3 * drawn(*own.rows.shape, seed=3))
    met = torch.arange(n) % 5 != 0
    prompts = PromptState(drawn(n, 2, 8, seed=4), drawn(n, 2, 8, seed=5))
    devices = Devices(prompts, drawn(n, seed=6).abs(), met, own, met, met, True)
    gate = Gate(*(torch.tensor(x) for x in (0.5, 0.5, 1.0, -1.0)))
    g = QueryEncoder(8, Generator().manual_seed(7), d_z=4, width=8).requires_grad_(False)
    return Broadcast(model, codec, v, codec.decode(v)), g, gate, LocalRule(top_m=2), devices


def test_variant_losses_are_those_of_single_queries_with_each_choice_made_by_hand():
    shared, g, gate, rule, devices = everything()
    data = tiny_stream().slice_(1)
    losses, users = variant_losses(shared, g, gate, rule, devices, data, LENGTH)
    asked = data.validation
    assert losses.shape == (len(asked), 4)
    assert sorted(users.tolist()) == sorted(asked.users.tolist())
    order = sorted(range(len(asked)), key=lambda b: (data.past.before[asked.positions[b]], b))
    assert users.tolist() == asked.users[order].tolist()
    n = len(devices.met)
    for place in range(0, len(order), 9):
        b = order[place]
        candidates = [c for c in asked.negatives[b].tolist() if c != NO_CANDIDATE]
        query = data.queries(torch.tensor([b]).numpy(), LENGTH)
        for v, (prompt, rows) in enumerate(VARIANTS):
            chosen = replace(
                devices,
                use_prompt=torch.full((n,), prompt),
                use_rows=torch.full((n,), rows),
                newcomers_use_prompt=prompt,
            )
            scores = online_inference(shared, g, gate, rule, chosen, query)[0].double()
            positive = scores[asked.positives[b]]
            by_hand = sum(math.exp(float(scores[c] - positive)) for c in candidates)
            assert losses[place, v].item() == pytest.approx(math.log1p(by_hand), rel=1e-3, abs=1e-3)


def test_the_variants_of_an_event_differ():
    losses, _ = variant_losses(*everything(), tiny_stream().slice_(1), LENGTH)
    for one in range(4):
        for other in range(one):
            assert (losses[:, one] != losses[:, other]).float().mean() > 0.5


def test_a_slice_without_validation_events_has_no_losses():
    data = tiny_stream().slice_(1)
    asked = data.validation
    nothing = replace(
        asked,
        positions=asked.positions[:0],
        positives=asked.positives[:0],
        users=asked.users[:0],
        negatives=asked.negatives[:0],
        hard=asked.hard[:0],
    )
    losses, users = variant_losses(*everything(), replace(data, validation=nothing), LENGTH)
    assert losses.shape == (0, 4)
    assert users.shape == (0,)
