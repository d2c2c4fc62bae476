"""Algorithm 3 against one query at a time, written out; users without a memory; forced variants; own rows."""

import itertools
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Generator, Tensor
from worlds import random_model

from protofed.backbone.sasrec import SASRec
from protofed.client.codec import QueryEncoder, random_linear_codec, unit
from protofed.client.drift import Gate
from protofed.client.model import VARIANTS, Encoders, LocalRule, Model
from protofed.client.own_rows import OwnRows, no_rows
from protofed.client.prompts import PromptState
from protofed.client.state import DeviceState, new_devices
from protofed.inference.online import memory_places, online_inference
from protofed.slices.histories import BOS, PAD, Queries

N, K, D, D_Z, L_P, L, ROWS, ITEMS = 6, 5, 8, 4, 2, 6, 12, 15
RULE = LocalRule(top_m=3, temperature=0.2)
GATE = Gate(torch.tensor(0.3), torch.tensor(0.2), torch.tensor(1.5), torch.tensor(-0.5))
UNMET, BEYOND = 4, 9
OLDER = (3, 5, 2, 7, 13)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed))


@cache
def encoders() -> Encoders:
    codec = random_linear_codec(L_P, D, Generator().manual_seed(1), d_z=D_Z)
    g = QueryEncoder(D, Generator().manual_seed(3), d_z=D_Z, width=8).requires_grad_(False)
    return Encoders(codec, g, GATE, 1.0)


def a_model(
    rule: LocalRule = RULE, *, prompt: bool = True, rows: bool = True, just_met: float = 0.0, n_items: int = ITEMS
) -> Model:
    """What all devices hold; base users' verdict: whether those who were never met use a prompt, and rows."""
    backbone, v = random_model(ROWS).requires_grad_(False), unit(drawn(K, D_Z, seed=2))
    prior = torch.tensor([float(variant != (prompt, rows)) for variant in VARIANTS])
    return Model(backbone, encoders(), v, encoders().codec.decode(v), rule, n_items, prior, just_met=just_met)


def devices(**changes: object) -> DeviceState:
    """Six users, one of whom was never met; users 0, 2, 3 and 4 have rows of their own, one of an item without any."""
    pairs = [(0, 1), (0, 7), (2, 3), (2, 13), (3, 5), (4, 2)]
    rows = OwnRows(torch.tensor([c for c, _ in pairs]), torch.tensor([i for _, i in pairs]), drawn(6, D, seed=4))
    blank = new_devices(torch.arange(100, 100 + N), L_P, D, D_Z)
    known = {
        "prompts": PromptState(drawn(N, L_P, D, seed=5), drawn(N, L_P, D, seed=6)),
        "drift": replace(blank.drift, step=0.6 * drawn(N, D_Z, seed=7)),
        "met": torch.tensor([True] * 4 + [False, True]),
        "rows": rows,
        "use_prompt": torch.tensor([True, True, False, True, True, False]),
        "use_rows": torch.tensor([True, True, True, False, True, True]),
    }
    return replace(blank, **{**known, **changes})


def queries(users: list[int], seed: int = 8) -> Queries:
    """Histories of different lengths, some of them with the user's own items and with items that have no row.

    Older events, beyond the tokens, hold OLDER; item 1 is user 0's own and for later.
    """
    n, whose = len(users), torch.tensor(users, dtype=torch.int64)
    items = torch.randint(ITEMS, (n, L), generator=Generator().manual_seed(seed))
    items[:, -1] = torch.tensor([7, 3, 13, 5, 2, 1])[whose % 6]
    lengths = 1 + 3 * torch.arange(n) % L
    place = torch.arange(L)
    tokens = torch.where(place >= L - lengths[:, None], items, PAD)
    tokens = torch.where(place == L - lengths[:, None] - 1, BOS, tokens)
    pasts = [[*OLDER, *(item for item in row if item >= 0 and item != 1)] for row in tokens.tolist()]
    past = torch.tensor([item for row in pasts for item in row], dtype=torch.int64)
    return Queries(
        users=whose,
        times=torch.zeros(n, dtype=torch.int64),
        tokens=tokens,
        offsets=torch.tensor([0, *itertools.accumulate(map(len, pasts))]),
        past_items=past,
        past_times=torch.zeros_like(past),
        slice_index=1,
        n_items=ITEMS,
    )


def past_of(asked: Queries, b: int) -> set[int]:
    return set(asked.past_items[asked.offsets[b] : asked.offsets[b + 1]].tolist())


def row_of(model: SASRec, item: int) -> Tensor:
    return model.items[item] if 0 <= item < ROWS else model.mean_row


def verdict(model: Model) -> tuple[bool, bool]:
    """What base users' events advise: the allowed variant with the least loss."""
    losses = {v: float(x) for v, x, may in zip(VARIANTS, model.prior, model.rule.allowed, strict=True) if may}
    return min(losses, key=lambda variant: losses[variant])


def one_query(model: Model, memory: DeviceState, user: int, tokens: Tensor, past: set[int]) -> Tensor:
    """Algorithm 3 for one query, line by line, in loops."""
    backbone, rule, codec = model.backbone, model.rule, model.encoders.codec
    remembered = user < len(memory.met) and bool(memory.met[user])
    pairs = zip(memory.rows.clients.tolist(), memory.rows.items.tolist(), memory.rows.rows, strict=True)
    kept = {item: row for client, item, row in pairs if client == user}
    own = kept if user < len(memory.met) and bool(memory.use_rows[user]) else {}
    with_prompt, counts = verdict(model)
    if remembered:
        with_prompt, counts = bool(memory.use_prompt[user]), bool(memory.use_rows[user])

    def embed(items: Tensor) -> Tensor:
        return torch.stack([own.get(int(i), row_of(backbone, int(i))) for i in items.flatten()]).reshape(
            *items.shape, D
        )

    hidden = backbone.hidden(tokens[None], None, embed)[0, -1]
    if with_prompt:
        h = model.encoders.g(hidden[None])[0]
        cosines = {k: float(h @ model.v[k]) for k in range(K)}
        top = sorted(cosines, key=lambda k: -cosines[k])[: rule.top_m]
        weights = {k: math.exp(cosines[k] / rule.temperature) for k in top}
        total = sum(weights.values())
        routed = sum(weights[k] / total * codec.decode(model.v[k : k + 1])[0] for k in top)
        mixed = sum(weights[k] / total * model.v[k] for k in top)
        long, short, drift = codec.decode((mixed / mixed.norm())[None])[0], torch.zeros(L_P, D), 0.0
        if remembered:
            long, short, drift = memory.prompts.long[user], memory.prompts.short[user], length(memory.drift.step[user])
        alpha = 1 / (1 + math.exp(-(1.5 * (drift - 0.3) / 0.2 - 0.5)))
        prompt = (long if rule.use_long else 0) + (alpha * short if rule.use_short else 0)
        prompt = prompt + (routed if rule.use_prototypes else 0)
        prompt = prompt / prompt.norm(dim=-1, keepdim=True) * backbone.items.norm(dim=-1).mean() * math.sqrt(D)
        hidden = backbone.hidden(tokens[None], prompt[None], embed)[0, -1]
    rows = [own[i] if i in own and i in past else row_of(backbone, i) for i in range(ITEMS)]
    met = [model.just_met if counts and i in past and i not in kept else 0.0 for i in range(ITEMS)]
    return torch.stack([hidden @ (row + more * hidden / hidden.norm()) for row, more in zip(rows, met, strict=True)])


def length(vector: Tensor) -> float:
    return math.sqrt(sum(float(x) ** 2 for x in vector))


def all_by_hand(model: Model, memory: DeviceState, asked: Queries) -> Tensor:
    each = enumerate(asked.users.tolist())
    return torch.stack([one_query(model, memory, u, asked.tokens[b], past_of(asked, b)) for b, u in each])


EVERYBODY = [0, 1, 2, 3, UNMET, 5, BEYOND, 0, 2]


@pytest.mark.parametrize("newcomers", [True, False])
@pytest.mark.parametrize(
    "rule",
    [RULE, replace(RULE, use_short=False), replace(RULE, use_prototypes=False), replace(RULE, top_m=1)],
    ids=["all", "no short", "no prototypes", "one prototype"],
)
def test_a_batch_is_ranked_as_each_query_alone_by_algorithm_3(rule, newcomers):
    model, memory, asked = a_model(rule, prompt=newcomers), devices(), queries(EVERYBODY)
    assert 1 not in past_of(asked, 0)
    scores = online_inference(model, memory, asked)
    torch.testing.assert_close(scores, all_by_hand(model, memory, asked), atol=1e-4, rtol=1e-4)


def ranked(memory: DeviceState, asked: Queries, model: Model | None = None, **how: object) -> Tensor:
    return online_inference(model or a_model(n_items=asked.n_items), memory, asked, **how)


@pytest.mark.parametrize("barred", range(len(VARIANTS)))
def test_users_without_a_memory_do_what_base_users_advise_among_what_is_allowed(barred):
    """Their order of advice is both, prompt, rows, nothing; what may not be used is not."""
    allowed = tuple(n != barred for n in range(len(VARIANTS)))
    model, asked = a_model(replace(RULE, allowed=allowed), just_met=0.7), queries([UNMET, BEYOND])
    model = replace(model, prior=torch.tensor([0.0, -1.0, -2.0, -3.0]))
    advised = (True, False) if barred == 3 else (True, True)
    assert verdict(model) == advised
    scores = ranked(devices(), asked, model)
    torch.testing.assert_close(scores, all_by_hand(model, devices(), asked), atol=1e-4, rtol=1e-4)
    beyond = slice(1, 2)  # who has no rows of its own to override
    assert torch.equal(scores[beyond], ranked(devices(), asked, model, variant=advised)[beyond])


def same_history(users: list[int]) -> Queries:
    asked = queries(users)
    return replace(asked, tokens=asked.tokens[:1].expand(len(users), -1).contiguous())


@pytest.mark.parametrize("newcomers", [True, False])
def test_what_was_just_met_counts_as_a_row_that_starts_with_a_boost_towards_the_question(newcomers):
    model, memory, asked = a_model(rows=newcomers, just_met=0.7), devices(), queries(EVERYBODY)
    scores = online_inference(model, memory, asked)
    torch.testing.assert_close(scores, all_by_hand(model, memory, asked), atol=1e-4, rtol=1e-4)
    gained = scores - online_inference(replace(model, just_met=0.0), memory, asked) > 1e-6
    for b, user in enumerate(EVERYBODY):
        own = set(memory.rows.items[memory.rows.clients == user].tolist())
        counts = memory.use_rows[user] if user not in (UNMET, BEYOND) else newcomers
        assert gained[b].nonzero()[:, 0].tolist() == (sorted(past_of(asked, b) - own) if counts else [])


def test_users_beyond_the_stack_and_unmet_users_get_the_same_routed_prototypes():
    memory = devices(rows=no_rows(D))
    unmet, beyond, far = ranked(memory, same_history([UNMET, BEYOND, 10**6]))
    torch.testing.assert_close(unmet, beyond)
    torch.testing.assert_close(beyond, far)
    known = ranked(memory, same_history([0]))[0]
    assert (known - beyond).abs().max() > 0.1


def test_what_the_stack_holds_of_an_unmet_user_is_not_read():
    asked, memory = queries([UNMET, BEYOND]), devices()
    long, short, step = memory.prompts.long.clone(), memory.prompts.short.clone(), memory.drift.step.clone()
    for column in (long, short, step):
        column[[0, UNMET]] = 50.0  # 0: where a user beyond is looked up
    changed = replace(memory, prompts=PromptState(long, short), drift=replace(memory.drift, step=step))
    changed = replace(changed, use_prompt=~memory.use_prompt)
    assert torch.equal(ranked(changed, asked), ranked(memory, asked))


def test_newcomers_without_a_prompt_are_ranked_by_the_bare_backbone():
    asked, model = queries([BEYOND, 1]), a_model(prompt=False)
    scores = ranked(devices(), asked, model)
    bare = model.backbone.scores(model.backbone.last_hidden(asked.tokens), ITEMS)
    torch.testing.assert_close(scores[0], bare[0])
    assert (scores[1] - bare[1]).abs().max() > 0.1


def test_who_has_a_memory_is_told_by_stack_and_first_contact():
    known, at = memory_places(devices(), torch.tensor([0, UNMET, 5, N, BEYOND]))
    assert known.tolist() == [True, False, True, False, False]
    assert at.tolist() == [0, UNMET, 5, 0, 0]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("just_met", [0.0, 0.7])
def test_a_variant_overrides_every_choice(prompt, rows, just_met):
    memory, asked = devices(), queries(EVERYBODY)
    scores = ranked(memory, asked, a_model(prompt=not prompt, rows=not rows, just_met=just_met), variant=(prompt, rows))
    by_hand = devices(use_prompt=torch.full((N,), prompt), use_rows=torch.full((N,), rows))
    advised = a_model(prompt=prompt, rows=rows, just_met=just_met)
    assert torch.equal(scores, ranked(by_hand, asked, advised))
    torch.testing.assert_close(scores, all_by_hand(advised, by_hand, asked), atol=1e-4, rtol=1e-4)
    other = ranked(by_hand, asked, advised, variant=(True, False))
    assert torch.equal(other, scores) == (prompt and not rows)


def test_using_nothing_is_the_frozen_backbone():
    asked, backbone = queries(EVERYBODY), a_model().backbone
    scores = ranked(devices(), asked, variant=(False, False))
    torch.testing.assert_close(scores, backbone.scores(backbone.last_hidden(asked.tokens), ITEMS))


def test_own_rows_change_the_scores_of_own_items_alone_where_the_history_has_none_of_them():
    asked = queries([0, 2, 4])
    tokens = torch.where(asked.tokens >= 0, 10, asked.tokens)  # nobody's own item: the hidden state stays
    asked = replace(asked, tokens=tokens)
    with_rows, without = (ranked(devices(), asked, variant=(True, rows)) for rows in (True, False))
    for scores, plain, own in zip(with_rows, without, ([7], [3, 13], [2]), strict=True):  # 1 is for later
        differs = (scores - plain).abs() > 1e-5
        assert differs.nonzero()[:, 0].tolist() == own


def test_own_rows_in_the_history_change_the_other_scores_too():
    asked = queries([0])  # its last item is 7, of which it has a row of its own
    with_rows, without = (ranked(devices(), asked, variant=(False, rows)) for rows in (True, False))
    assert ((with_rows - without).abs() > 1e-5).all()


def test_rows_of_one_client_are_nothing_to_another():
    asked = queries([1, 5, BEYOND])
    one, other = (ranked(memory, asked, variant=(True, True)) for memory in (devices(), devices(rows=no_rows(D))))
    assert torch.equal(one, other)


def test_an_own_row_of_an_item_that_is_not_available_yet_is_no_score():
    asked = replace(queries([2]), n_items=13)  # item 13 is to come
    tokens = torch.where(asked.tokens >= 0, 10, asked.tokens)
    scores = ranked(devices(), replace(asked, tokens=tokens), variant=(False, True))
    everything = ranked(devices(), replace(asked, tokens=tokens, n_items=ITEMS), variant=(False, True))
    assert scores.shape == (1, 13)
    torch.testing.assert_close(scores, everything[:, :13])


def test_one_poisoned_device_spoils_no_other_users_ranking():
    asked, memory = queries(EVERYBODY), devices()
    long = memory.prompts.long.clone()
    long[0] = torch.nan  # also where a user beyond is looked up
    rows = replace(memory.rows, rows=torch.where((memory.rows.clients == 0)[:, None], torch.nan, memory.rows.rows))
    scores = ranked(replace(memory, prompts=replace(memory.prompts, long=long), rows=rows), asked)
    others = asked.users != 0
    assert torch.equal(scores[others], ranked(memory, asked)[others])
    assert scores[~others].isnan().all()


def test_no_query_gives_no_scores():
    assert ranked(devices(), queries([])).shape == (0, ITEMS)
