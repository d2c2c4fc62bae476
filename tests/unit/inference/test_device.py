"""One device: what it recommends, what it learns from an answer, and in which order; the same as in a stack."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from worlds import random_model

from protofed.client import update
from protofed.client.begin import begin_slice
from protofed.client.codec import QueryEncoder, random_linear_codec, unit
from protofed.client.drift import DriftState, Gate
from protofed.client.lessons import Lesson
from protofed.client.memory import Memory, NewEvents
from protofed.client.model import Encoders, LocalRule, Model
from protofed.client.own_rows import no_rows
from protofed.client.prompts import PromptState
from protofed.client.state import DeviceState, columns, new_device, new_devices, select, with_fresh_moments
from protofed.client.update import compose_prompt, learn_from_feedback, route_queries
from protofed.errors import DataError
from protofed.inference.device import feedback, recommend
from protofed.privacy.draws import SeededDraws, event_keys
from protofed.slices.windows import Windows

N_ITEMS, HOUR, USER = 12, 3600, 77
RULE = LocalRule(top_m=2, eta_s=0.5, lambda_p=0.2, negatives=6)
DRAWS = SeededDraws(11)
BOTH, NOTHING = (0.0, 0.0, 0.0, -1.0), (0.0, 1.0, 1.0, 1.0)  # what base users' events say a new device should use


def a_model(rule: LocalRule = RULE, n_items: int = N_ITEMS, prior: tuple[float, ...] = BOTH) -> Model:
    rng = torch.Generator().manual_seed(3)
    backbone = random_model(10, seed=4)  # items 10 and 11 have no public row
    codec = random_linear_codec(3, 8, rng, d_z=5)
    v = unit(torch.randn(4, 5, generator=rng))
    gate = Gate(*(torch.tensor(x) for x in (0.0, 1.0, 1.0, 0.5)))
    encoders = Encoders(codec, QueryEncoder(8, rng, d_z=5).requires_grad_(False), gate, 1.0)
    return Model(backbone, encoders, v, codec.decode(v), rule, n_items, torch.tensor(prior))


def after(model: Model, events: list[tuple[int, int]], device: DeviceState | None = None) -> DeviceState:
    device = device or new_device(model, USER)
    for item, time in events:
        device = feedback(model, device, item, time, DRAWS)
    return device


def by_item(model: Model, device: DeviceState) -> dict[int, float]:
    ranking = recommend(model, device, n=N_ITEMS)
    return dict(zip(ranking.items.tolist(), ranking.scores.tolist(), strict=True))


def ranked_by_hand(model: Model, tokens: Tensor, prompts: PromptState, drift: float) -> Tensor:
    """Scores without own rows, from a history that is written out."""
    h = model.encoders.g(model.backbone.last_hidden(tokens))
    alpha = torch.tensor([drift + 0.5]).sigmoid()
    prompt = compose_prompt(model, prompts, route_queries(model, h, model.rule), alpha, model.rule)
    return model.backbone.rows(N_ITEMS) @ model.backbone.last_hidden(tokens, prompt)[0]


def test_a_recommendation_is_the_frozen_backbone_with_the_composed_prompt_by_hand():
    model = a_model()
    device = replace(after(model, [(1, 0), (4, 60), (2, 120)]), use_rows=torch.tensor([False]))
    step = torch.tensor([[0.0, 0.6, 0.0, -0.8, 0.0]])  # of length 1
    device = replace(device, drift=replace(device.drift, step=step))
    scores = ranked_by_hand(model, torch.tensor([[-2, -2, -1, 1, 4, 2]]), device.prompts, 1.0)  # padding, start, items
    ranking = recommend(model, device, n=N_ITEMS)
    assert torch.allclose(ranking.scores, scores[ranking.items], atol=1e-5)
    assert torch.equal(ranking.scores, ranking.scores.sort(descending=True).values)
    assert sorted(ranking.items.tolist()) == list(range(N_ITEMS))


def test_a_recommendation_routes_its_query_once(monkeypatch):
    model, routed = a_model(), []
    device = after(model, [(1, 0), (4, 60)])
    route = update.route
    monkeypatch.setattr(update, "route", lambda h, *rest, **more: routed.append(h) or route(h, *rest, **more))
    recommend(model, device)
    assert [tuple(h.shape) for h in routed] == [(1, 5)]


def test_asking_changes_nothing_and_candidates_only_leave_items_out():
    model = a_model()
    device = after(model, [(1, 0), (4, 60)])
    everything = recommend(model, device, n=N_ITEMS)
    some = recommend(model, device, n=2, candidates=torch.tensor([7, 3, 9]))
    scores = by_item(model, device)
    best = sorted((7, 3, 9), key=lambda item: -scores[item])[:2]
    assert some.items.tolist() == best
    assert some.scores.tolist() == pytest.approx([scores[item] for item in best])
    assert torch.equal(recommend(model, device, n=N_ITEMS).scores, everything.scores)


def test_an_answer_moves_the_short_prompt_alone_and_raises_what_was_chosen():
    model = a_model()
    before = after(model, [(1, 0), (4, 60)])
    learned = feedback(model, before, 5, 120, DRAWS)
    assert not torch.equal(learned.prompts.short, before.prompts.short)
    rest = replace(learned, prompts=replace(learned.prompts, short=before.prompts.short))
    assert all(torch.equal(one, other) for one, other in zip(columns(rest), columns(before), strict=True))
    assert learned.memory.items.tolist() == [1, 4, 5]
    assert learned.memory.times.tolist() == [0, 60, 120]
    assert learned.memory.offsets.tolist() == [0, 3]
    # The same question with the new short prompt: history is held at what it was when the question was asked.
    same_question = replace(before, prompts=learned.prompts)
    rank_before = recommend(model, before, n=N_ITEMS).items.tolist().index(5)
    rank_after = recommend(model, same_question, n=N_ITEMS).items.tolist().index(5)
    assert rank_after <= rank_before


def test_an_answer_is_one_short_step_against_items_drawn_for_this_user_and_this_event():
    """The step of `learn_from_feedback` on a lesson written by hand; draws of other keys move it elsewhere."""
    model = a_model()
    before = after(model, [(1, 0), (4, 60)])
    learned = feedback(model, before, 5, 120, DRAWS)

    def by_hand(key: int, number: int) -> Tensor:
        drawn = DRAWS.uniform("client negatives", event_keys(torch.tensor([key]), torch.tensor([number])), 0, (6,))
        tokens = torch.tensor([[-2, -2, -2, -1, 1, 4]])
        windows = Windows(
            torch.tensor([0]), tokens, torch.tensor([[5]]), torch.tensor([[5]]), newest=torch.tensor([number])
        )
        own = {int(item): row for item, row in zip(before.rows.items, before.rows.rows, strict=True)}

        def embed(items: Tensor) -> Tensor:
            rows = model.backbone.embed(items).clone()
            for place, item in enumerate(items[0].tolist()):
                rows[0, place] = own.get(item, rows[0, place])
            return rows

        h = model.encoders.g(model.backbone.last_hidden(tokens, None, embed))
        lesson = Lesson(windows, h, torch.tensor([0.5]).sigmoid(), torch.zeros(1))
        state, moved = learn_from_feedback(model, before, lesson, (drawn * N_ITEMS).long(), RULE)
        assert moved.all()
        return state.prompts.short

    assert torch.allclose(learned.prompts.short, by_hand(USER, 2), atol=1e-6)
    assert not torch.allclose(learned.prompts.short, by_hand(USER + 1, 2), atol=1e-3)
    assert not torch.allclose(learned.prompts.short, by_hand(USER, 1), atol=1e-3)


def test_without_a_short_prompt_an_answer_is_only_remembered():
    model = a_model(replace(RULE, use_short=False))
    before = after(model, [(1, 0), (4, 60)])
    learned = feedback(model, before, 5, 120, DRAWS)
    assert torch.equal(learned.prompts.short, before.prompts.short)
    assert learned.memory.items.tolist() == [1, 4, 5]


def test_a_long_pause_begins_a_session_a_short_one_does_not_and_neither_is_a_period_of_drift():
    model = a_model(replace(RULE, eta_s=0.0, lambda_p=0.0))
    device = after(model, [(1, 0), (4, 60)])
    short = torch.ones_like(device.prompts.short)
    drift = DriftState(unit(torch.ones(1, 5)), torch.full((1, 5), 0.1), torch.tensor([0.7]), torch.tensor([3]))
    device = replace(device, prompts=replace(device.prompts, short=short), drift=drift)
    soon, late = (feedback(model, device, 5, 60 + pause * HOUR, DRAWS) for pause in (8, 9))
    assert torch.equal(soon.prompts.short, short)
    assert torch.equal(late.prompts.short, 0.5 * short)
    for learned in (soon, late):
        assert all(torch.equal(getattr(learned.drift, name), getattr(drift, name)) for name in DriftState.__slots__)


def test_how_long_a_pause_begins_a_session_and_what_survives_it_are_public_settings():
    model = a_model(replace(RULE, eta_s=0.0, lambda_p=0.0, session_gap_hours=1.0, carry=0.25))
    device = after(model, [(1, 0), (4, 60)])
    device = replace(device, prompts=replace(device.prompts, short=torch.ones_like(device.prompts.short)))
    soon, late = (feedback(model, device, 5, 60 + pause, DRAWS) for pause in (HOUR, HOUR + 1))
    assert (soon.prompts.short == 1).all()
    assert (late.prompts.short == 0.25).all()


def test_an_item_met_gets_a_row_of_the_devices_own_at_its_public_place_or_among_its_neighbours():
    model = a_model()
    backbone = model.backbone
    device = after(model, [(6, 0), (1, 60), (11, 120), (6, 180)])
    assert device.rows.items.tolist() == [1, 6, 11]
    assert torch.equal(device.rows.rows[:2], backbone.items.detach()[[1, 6]])
    assert torch.allclose(device.rows.rows[2], backbone.items.detach()[[6, 1]].mean(0))
    first = after(model, [(10, 0)])
    assert torch.equal(first.rows.rows[0], backbone.mean_row)


def test_a_row_begins_with_the_head_start_of_met_items_towards_the_users_first_query():
    model = replace(a_model(), met_boost=0.3)
    public, boosted = after(a_model(), [(6, 0), (11, 60)]), after(model, [(6, 0), (11, 60)])
    taste = unit(model.backbone.last_hidden(torch.tensor([[-2, -2, -2, -2, -2, -1]])))  # who meets its first item
    assert torch.allclose(boosted.taste, taste, atol=1e-6)
    assert torch.allclose(boosted.rows.rows, public.rows.rows + 0.3 * taste, atol=1e-6)


def test_a_row_begins_at_the_public_rows_that_devices_are_told_to_start_from():
    other = random_model(10, seed=9)
    device = after(replace(a_model(), first_rows=other), [(6, 0), (11, 60)])
    assert torch.equal(device.rows.rows[0], other.items.detach()[6])
    assert torch.allclose(device.rows.rows[1], other.items.detach()[6])  # 11 has none: its only neighbour's


def test_what_a_row_has_learned_stays_when_its_item_is_met_again():
    model = replace(a_model(), met_boost=0.3)
    device = after(model, [(6, 0)])
    device = replace(device, rows=replace(device.rows, rows=torch.full((1, 8), 0.5)))
    assert (after(model, [(6, 60)], device).rows.rows == 0.5).all()


def test_without_own_rows_an_answer_starts_none():
    assert len(after(a_model(replace(RULE, use_rows=False)), [(6, 0), (11, 60)]).rows) == 0


def test_where_items_count_as_met_at_once_an_answer_raises_its_item_and_starts_no_row():
    model = replace(a_model(replace(RULE, use_short=False)), just_met=0.5)
    before = after(model, [(6, 0)])
    device = after(model, [(3, 60)], before)
    assert len(device.rows) == 0
    counted, bare = by_item(model, device), by_item(replace(model, just_met=0.0), device)
    gains = {item: counted[item] - bare[item] for item in counted}
    assert gains[3] == pytest.approx(gains[6], abs=1e-5)
    assert gains[3] > 0
    assert all(gains[item] == pytest.approx(0.0, abs=1e-6) for item in gains if item not in (3, 6))


def test_own_rows_decide_about_own_items():
    model = a_model()
    device = after(model, [(6, 0), (11, 60)])
    scores = by_item(model, device)
    assert scores[11] != pytest.approx(scores[10])  # 10 has the mean row, 11 its own
    bare = by_item(model, replace(device, rows=no_rows(8)))
    assert bare[11] == pytest.approx(bare[10])


def stack_of(model: Model, keys: list[int], firsts: list[int]) -> DeviceState:
    """Devices at the beginning of a slice in which each user meets its first item."""
    n, (_, length, d) = len(keys), model.prompts.shape
    devices = new_devices(torch.tensor(keys), length, d, model.v.shape[1])
    memory = Memory(torch.arange(n + 1), torch.tensor(firsts), torch.zeros(n, dtype=torch.int64))
    return begin_slice(model, devices, NewEvents(memory, torch.zeros(n, dtype=torch.int64)), DRAWS, period=1)[0]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_first_contact_on_a_device_is_that_of_a_stack_of_devices(place):
    """The same noise, the same start near the routed prototypes, the same taste, the same first row."""
    model = replace(a_model(), met_boost=0.3)
    keys, firsts = [5, USER, 2**61], [6, 11, 10]
    stack = select(stack_of(model, keys, firsts), torch.tensor([place]))
    alone = feedback(model, new_device(model, keys[place]), firsts[place], 0, DRAWS)
    for one, other in (
        (alone.prompts.long, stack.prompts.long),
        (alone.taste, stack.taste),
        (alone.rows.rows, stack.rows.rows),
    ):
        assert torch.allclose(one, other, atol=1e-6)
    assert torch.equal(alone.rows.items, stack.rows.items)
    assert torch.equal(alone.memory.items, stack.memory.items)
    assert alone.met.all()
    assert stack.met.all()
    elsewhere = feedback(model, new_device(model, keys[place] + 1), firsts[place], 0, DRAWS)
    assert not torch.allclose(elsewhere.prompts.long, alone.prompts.long, atol=1e-3)


def test_the_first_long_prompt_is_decoded_from_the_routed_mixture_with_the_users_own_noise():
    model = a_model()
    device = after(model, [(6, 0)])
    h = model.encoders.g(model.backbone.last_hidden(torch.tensor([[-2, -2, -2, -2, -2, -1]])))[0].detach()
    cosines = [float(h @ row) for row in model.v]
    top = sorted(range(4), key=lambda k: -cosines[k])[:2]
    weights = torch.tensor([cosines[k] / 0.07 for k in top]).softmax(0)
    mixed = sum(weight * model.v[k] for weight, k in zip(weights, top, strict=True))
    noise = DRAWS.normal("first contact", torch.tensor([USER]), 0, (3, 8)).float()
    expected = model.encoders.codec.decode((mixed / mixed.norm())[None]) + 0.02 * noise
    assert torch.allclose(device.prompts.long, expected, atol=1e-5)


def test_an_answer_gives_a_device_nothing_to_upload():
    """Only a slice's local steps move the long prompt, and only they make a device contribute."""
    model = a_model()
    device = after(model, [(6, 0), (11, 60)])
    assert not device.contributes.any()
    assert not device.active.any()
    taking_part = with_fresh_moments(replace(device, contributes=torch.tensor([True]), active=torch.tensor([True])))
    later = feedback(model, taking_part, 3, 120, DRAWS)
    assert later.contributes.all()
    assert later.active.all()


def test_a_device_that_has_seen_nothing_recommends_from_its_routed_prototypes():
    model = a_model()
    tokens = torch.tensor([[-2, -2, -2, -2, -2, -1]])
    h = model.encoders.g(model.backbone.last_hidden(tokens))
    routing = route_queries(model, h, RULE)
    mixed = (routing.weights[0][:, None] * model.v[routing.chosen[0]]).sum(0, keepdim=True)
    first = model.encoders.codec.decode(unit(mixed))
    scores = ranked_by_hand(model, tokens, PromptState(first, torch.zeros_like(first)), 0.0)
    ranking = recommend(model, new_device(model, USER), n=3)
    assert ranking.items.tolist() == scores.topk(3).indices.tolist()
    assert torch.allclose(ranking.scores, scores[ranking.items], atol=1e-5)


def test_a_new_device_uses_nothing_where_base_users_were_better_off_so():
    model = a_model(prior=NOTHING)
    device = new_device(model, USER)
    assert not device.use_prompt.any()
    assert not device.use_rows.any()
    bare = model.backbone.scores(model.backbone.last_hidden(torch.tensor([[-2, -2, -2, -2, -2, -1]])), N_ITEMS)[0]
    ranking = recommend(model, device, n=N_ITEMS)
    assert torch.allclose(ranking.scores, bare[ranking.items], atol=1e-6)


def test_a_device_without_its_rows_learns_beside_a_history_of_public_rows_and_keeps_its_own():
    model = a_model()
    before = after(model, [(1, 0), (4, 60)])
    away = replace(before, rows=replace(before.rows, rows=-before.rows.rows))
    used, unused = (
        [feedback(model, replace(device, use_rows=torch.tensor([uses])), 5, 120, DRAWS) for device in (before, away)]
        for uses in (True, False)
    )
    assert not torch.allclose(used[0].prompts.short, used[1].prompts.short, atol=1e-3)
    assert torch.equal(unused[0].prompts.short, unused[1].prompts.short)
    assert torch.equal(unused[1].rows.rows[:2], away.rows.rows)
    assert unused[1].rows.items.tolist() == [1, 4, 5]


def test_a_poisoned_short_prompt_breaks_no_answer_and_is_not_healed_by_one():
    model = a_model()
    before = after(model, [(1, 0), (4, 60)])
    poisoned = replace(before, prompts=replace(before.prompts, short=torch.full_like(before.prompts.short, torch.nan)))
    learned = feedback(model, poisoned, 5, 120, DRAWS)
    assert torch.equal(learned.prompts.long, before.prompts.long)
    assert learned.prompts.short.isnan().all()
    assert learned.memory.items.tolist() == [1, 4, 5]
    assert learned.rows.rows.isfinite().all()


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
        feedback(model, after(model, [(1, 0), (4, 60)]), item, time, DRAWS)


def test_a_candidate_outside_the_catalogue_is_refused_in_one_line():
    model = a_model()
    with pytest.raises(DataError, match=r"^candidates must be items 0 \.\. 11, got 3 \.\. 12$"):
        recommend(model, new_device(model, USER), candidates=torch.tensor([3, 12]))
