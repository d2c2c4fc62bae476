"""One device: what it recommends, what it learns from an answer, and in which order."""

from dataclasses import replace

import pytest
import torch
from worlds import random_model

from protofed.client.codec import QueryEncoder, random_linear_codec, unit
from protofed.client.drift import Gate
from protofed.client.own_rows import no_rows
from protofed.client.update import Broadcast, LocalRule, composed
from protofed.errors import DataError
from protofed.inference.device import Device, Model, feedback, new_device, recommend

N_ITEMS, HOUR = 12, 3600
RULE = LocalRule(top_m=2, eta_s=0.5, lambda_p=0.2)


def a_model(rule: LocalRule = RULE, n_items: int = N_ITEMS) -> Model:
    rng = torch.Generator().manual_seed(3)
    backbone = random_model(10, seed=4)  # items 10 and 11 have no public row
    codec = random_linear_codec(3, 8, rng, d_z=5)
    v = unit(torch.randn(4, 5, generator=rng))
    gate = Gate(*(torch.tensor(x) for x in (0.0, 1.0, 1.0, 0.5)))
    shared = Broadcast(backbone, codec, v, codec.decode(v))
    return Model(shared, QueryEncoder(8, rng, d_z=5).requires_grad_(False), gate, rule, n_items, negatives=6)


def after(model: Model, events: list[tuple[int, int]], device: Device | None = None) -> Device:
    device = device or new_device(model)
    for item, time in events:
        device = feedback(model, device, item, time)
    return device


def test_a_recommendation_is_the_frozen_backbone_with_the_composed_prompt_by_hand():
    model = a_model()
    device = replace(after(model, [(1, 0), (4, 60), (2, 120)]), use_rows=False)
    tokens = torch.tensor([[-2, -2, -1, 1, 4, 2]])  # padding, start, history
    h = model.g(model.shared.backbone.last_hidden(tokens))
    alpha = (device.drift.drift + 0.5).sigmoid()
    prompt = composed(model.shared, device.prompts, h, alpha, RULE)
    hidden = model.shared.backbone.last_hidden(tokens, prompt)[0]
    scores = model.shared.backbone.rows(N_ITEMS) @ hidden
    ranking = recommend(model, device, n=N_ITEMS)
    assert torch.allclose(ranking.scores, scores[ranking.items], atol=1e-5)
    assert torch.equal(ranking.scores, ranking.scores.sort(descending=True).values)
    assert sorted(ranking.items.tolist()) == list(range(N_ITEMS))


def test_asking_changes_nothing_and_candidates_only_leave_items_out():
    model = a_model()
    device = after(model, [(1, 0), (4, 60)])
    everything = recommend(model, device, n=N_ITEMS)
    some = recommend(model, device, n=2, candidates=torch.tensor([7, 3, 9]))
    by_item = dict(zip(everything.items.tolist(), everything.scores.tolist(), strict=True))
    best = sorted((7, 3, 9), key=lambda item: -by_item[item])[:2]
    assert some.items.tolist() == best
    assert some.scores.tolist() == pytest.approx([by_item[item] for item in best])
    assert torch.equal(recommend(model, device, n=N_ITEMS).scores, everything.scores)


def test_an_answer_moves_the_short_prompt_alone_and_raises_what_was_chosen():
    model = a_model()
    before = after(model, [(1, 0), (4, 60)])
    learned = feedback(model, before, 5, 120)
    assert torch.equal(learned.prompts.long, before.prompts.long)
    assert not torch.equal(learned.prompts.short, before.prompts.short)
    assert learned.items.tolist() == [1, 4, 5]
    assert learned.times.tolist() == [0, 60, 120]
    # The same question with the new short prompt: history is held at what it was when the question was asked.
    same_question = replace(before, prompts=learned.prompts)
    rank_before = recommend(model, before, n=N_ITEMS).items.tolist().index(5)
    rank_after = recommend(model, same_question, n=N_ITEMS).items.tolist().index(5)
    assert rank_after <= rank_before


def test_without_a_short_prompt_an_answer_is_only_remembered():
    model = a_model(replace(RULE, use_short=False))
    before = after(model, [(1, 0), (4, 60)])
    learned = feedback(model, before, 5, 120)
    assert torch.equal(learned.prompts.short, before.prompts.short)


def test_a_long_pause_begins_a_session_a_short_one_does_not():
    model = a_model(replace(RULE, eta_s=0.0, lambda_p=0.0))
    device = after(model, [(1, 0), (4, 60)])
    short = torch.ones_like(device.prompts.short)
    device = replace(device, prompts=replace(device.prompts, short=short))
    soon, late = (feedback(model, device, 5, 60 + pause * HOUR) for pause in (8, 9))
    assert torch.equal(soon.prompts.short, short)
    assert torch.equal(late.prompts.short, 0.5 * short)
    assert int(soon.drift.periods) == int(device.drift.periods) == 1
    assert int(late.drift.periods) == 2
    assert float(late.drift.drift) > 0


def test_an_item_met_gets_a_row_of_the_devices_own_at_its_public_place_or_among_its_neighbours():
    model = a_model()
    backbone = model.shared.backbone
    device = after(model, [(6, 0), (1, 60), (11, 120), (6, 180)])
    assert device.rows.items.tolist() == [1, 6, 11]
    assert torch.equal(device.rows.rows[:2], backbone.items.detach()[[1, 6]])
    assert torch.allclose(device.rows.rows[2], backbone.items.detach()[[6, 1]].mean(0))
    first = after(model, [(10, 0)])
    assert torch.equal(first.rows.rows[0], backbone.mean_row)


def test_where_items_count_as_met_at_once_an_answer_raises_its_item_and_starts_no_row():
    model = replace(a_model(replace(RULE, use_short=False)), just_met=0.5)
    before = after(model, [(6, 0)])
    device = after(model, [(3, 60)], before)
    assert len(device.rows) == 0

    def scores(of: Model) -> dict[int, float]:
        ranking = recommend(of, device, n=N_ITEMS)
        return dict(zip(ranking.items.tolist(), ranking.scores.tolist(), strict=True))

    counted, bare = scores(model), scores(replace(model, just_met=0.0))
    gains = {item: counted[item] - bare[item] for item in counted}
    assert gains[3] == pytest.approx(gains[6], abs=1e-5)
    assert gains[3] > 0
    assert all(gains[item] == pytest.approx(0.0, abs=1e-6) for item in gains if item not in (3, 6))


def test_own_rows_decide_about_own_items():
    model = a_model()
    device = after(model, [(6, 0), (11, 60)])
    scores = dict(
        zip(*(x.tolist() for x in (lambda r: (r.items, r.scores))(recommend(model, device, n=N_ITEMS))), strict=True)
    )
    assert scores[11] != pytest.approx(scores[10])  # 10 has the mean row, 11 its own
    bare = recommend(model, replace(device, rows=no_rows(8)), n=N_ITEMS)
    bare_scores = dict(zip(bare.items.tolist(), bare.scores.tolist(), strict=True))
    assert bare_scores[11] == pytest.approx(bare_scores[10])


def test_a_device_that_has_seen_nothing_recommends_from_its_routed_prototypes():
    model = a_model()
    ranking = recommend(model, new_device(model), n=3)
    assert len(ranking.items) == 3
    assert bool(ranking.scores.isfinite().all())


@pytest.mark.parametrize(
    ("item", "time", "message"),
    [
        (12, 200, r"^item must be one of 0 \.\. 11, got 12$"),
        (-1, 200, r"^item must be one of 0 \.\. 11, got -1$"),
        (3, 59, r"^feedback comes in time order: got time 59 after 60$"),
    ],
)
def test_an_impossible_answer_is_refused_in_one_line(item, time, message):
    model = a_model()
    with pytest.raises(DataError, match=message):
        feedback(model, after(model, [(1, 0), (4, 60)]), item, time)


def test_a_candidate_outside_the_catalogue_is_refused_in_one_line():
    model = a_model()
    with pytest.raises(DataError, match=r"^candidates must be items 0 \.\. 11, got 3 \.\. 12$"):
        recommend(model, new_device(model), candidates=torch.tensor([3, 12]))
