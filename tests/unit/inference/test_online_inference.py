"""Algorithm 3 against one query at a time, written out; users without a memory; forced variants; own rows."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor
from worlds import random_model

from protofed.backbone.sasrec import SASRec
from protofed.client.codec import QueryEncoder, random_linear_codec, unit
from protofed.client.drift import Gate
from protofed.client.own_rows import OwnRows, no_rows
from protofed.client.prompts import PromptState
from protofed.client.update import Broadcast, LocalRule
from protofed.inference.online import Devices, forced, online_inference, places
from protofed.slices.histories import BOS, PAD, Queries

N, K, D, D_Z, L_P, L, ROWS, ITEMS = 6, 5, 8, 4, 2, 6, 12, 15
RULE = LocalRule(top_m=3, temperature=0.2)
GATE = Gate(torch.tensor(0.3), torch.tensor(0.2), torch.tensor(1.5), torch.tensor(-0.5))
UNMET, BEYOND = 4, 9
OLDER = (3, 5, 2, 7, 13)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed))


def broadcast() -> Broadcast:
    codec = random_linear_codec(L_P, D, Generator().manual_seed(1), d_z=D_Z)
    v = unit(drawn(K, D_Z, seed=2))
    return Broadcast(random_model(ROWS).requires_grad_(False), codec, v, codec.decode(v))


def query_encoder() -> QueryEncoder:
    return QueryEncoder(D, Generator().manual_seed(3), d_z=D_Z, width=8).requires_grad_(False)


def devices(**changes: object) -> Devices:
    """Six users, one of whom was never met; users 0, 2, 3 and 4 have rows of their own, one of an item without any."""
    pairs = [(0, 1), (0, 7), (2, 3), (2, 13), (3, 5), (4, 2)]
    rows = OwnRows(torch.tensor([c for c, _ in pairs]), torch.tensor([i for _, i in pairs]), drawn(6, D, seed=4))
    met = torch.tensor([True] * 4 + [False, True])
    prompts = PromptState(drawn(N, L_P, D, seed=5), drawn(N, L_P, D, seed=6))
    use_prompt = torch.tensor([True, True, False, True, True, False])
    use_rows = torch.tensor([True, True, True, False, True, True])
    return replace(Devices(prompts, drawn(N, seed=7).abs(), met, rows, use_prompt, use_rows, True), **changes)


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


def one_query(
    shared: Broadcast, g: QueryEncoder, rule: LocalRule, memory: Devices, user: int, tokens: Tensor, past: set[int]
) -> Tensor:
    """Algorithm 3 for one query, line by line, in loops."""
    model = shared.backbone
    remembered = user < len(memory.met) and bool(memory.met[user])
    pairs = zip(memory.rows.clients.tolist(), memory.rows.items.tolist(), memory.rows.rows, strict=True)
    kept = {item: row for client, item, row in pairs if client == user}
    own = kept if user < len(memory.met) and bool(memory.use_rows[user]) else {}
    counts = bool(memory.use_rows[user]) if remembered else memory.newcomers_use_rows

    def embed(items: Tensor) -> Tensor:
        return torch.stack([own.get(int(i), row_of(model, int(i))) for i in items.flatten()]).reshape(*items.shape, D)

    hidden = model.hidden(tokens[None], None, embed)[0, -1]
    if bool(memory.use_prompt[user]) if remembered else memory.newcomers_use_prompt:
        h = g(hidden[None])[0]
        cosines = {k: float(h @ shared.v[k]) for k in range(K)}
        top = sorted(cosines, key=lambda k: -cosines[k])[: rule.top_m]
        weights = {k: math.exp(cosines[k] / rule.temperature) for k in top}
        total = sum(weights.values())
        routed = sum(weights[k] / total * shared.codec.decode(shared.v[k : k + 1])[0] for k in top)
        mixed = sum(weights[k] / total * shared.v[k] for k in top)
        long, short, drift = shared.codec.decode((mixed / mixed.norm())[None])[0], torch.zeros(L_P, D), 0.0
        if remembered:
            long, short, drift = memory.prompts.long[user], memory.prompts.short[user], float(memory.drift[user])
        alpha = 1 / (1 + math.exp(-(1.5 * (drift - 0.3) / 0.2 - 0.5)))
        prompt = (long if rule.use_long else 0) + (alpha * short if rule.use_short else 0)
        prompt = prompt + (routed if rule.use_prototypes else 0)
        prompt = prompt / prompt.norm(dim=-1, keepdim=True) * model.items.norm(dim=-1).mean() * math.sqrt(D)
        hidden = model.hidden(tokens[None], prompt[None], embed)[0, -1]
    rows = [own[i] if i in own and i in past else row_of(model, i) for i in range(ITEMS)]
    met = [memory.just_met if counts and i in past and i not in kept else 0.0 for i in range(ITEMS)]
    return torch.stack([hidden @ (row + more * hidden / hidden.norm()) for row, more in zip(rows, met, strict=True)])


EVERYBODY = [0, 1, 2, 3, UNMET, 5, BEYOND, 0, 2]


@pytest.mark.parametrize("newcomers", [True, False])
@pytest.mark.parametrize(
    "rule",
    [RULE, replace(RULE, use_short=False), replace(RULE, use_prototypes=False), replace(RULE, top_m=1)],
    ids=["all", "no short", "no prototypes", "one prototype"],
)
def test_a_batch_is_ranked_as_each_query_alone_by_algorithm_3(rule, newcomers):
    shared, g, asked = broadcast(), query_encoder(), queries(EVERYBODY)
    memory = devices(newcomers_use_prompt=newcomers)
    scores = online_inference(shared, g, GATE, rule, memory, asked)
    by_hand = [
        one_query(shared, g, rule, memory, u, asked.tokens[b], past_of(asked, b)) for b, u in enumerate(EVERYBODY)
    ]
    assert 1 not in past_of(asked, 0)
    torch.testing.assert_close(scores, torch.stack(by_hand), atol=1e-4, rtol=1e-4)


def ranked(memory: Devices, asked: Queries, rule: LocalRule = RULE) -> Tensor:
    return online_inference(broadcast(), query_encoder(), GATE, rule, memory, asked)


def same_history(users: list[int]) -> Queries:
    asked = queries(users)
    return replace(asked, tokens=asked.tokens[:1].expand(len(users), -1).contiguous())


@pytest.mark.parametrize("newcomers", [True, False])
def test_what_was_just_met_counts_as_a_row_that_starts_with_a_boost_towards_the_question(newcomers):
    shared, g, asked = broadcast(), query_encoder(), queries(EVERYBODY)
    memory = devices(newcomers_use_rows=newcomers, just_met=0.7)
    scores = online_inference(shared, g, GATE, RULE, memory, asked)
    by_hand = [
        one_query(shared, g, RULE, memory, u, asked.tokens[b], past_of(asked, b)) for b, u in enumerate(EVERYBODY)
    ]
    torch.testing.assert_close(scores, torch.stack(by_hand), atol=1e-4, rtol=1e-4)
    gained = scores - online_inference(shared, g, GATE, RULE, replace(memory, just_met=0.0), asked) > 1e-6
    for b, user in enumerate(EVERYBODY):
        own = set(memory.rows.items[memory.rows.clients == user].tolist())
        counts = memory.use_rows[user] if user not in (UNMET, BEYOND) else newcomers
        assert gained[b].nonzero()[:, 0].tolist() == (sorted(past_of(asked, b) - own) if counts else [])


def test_users_beyond_the_table_and_unmet_users_get_the_same_routed_prototypes():
    memory = devices(rows=no_rows(D))
    unmet, beyond, far = ranked(memory, same_history([UNMET, BEYOND, 10**6]))
    torch.testing.assert_close(unmet, beyond)
    torch.testing.assert_close(beyond, far)
    known = ranked(memory, same_history([0]))[0]
    assert (known - beyond).abs().max() > 0.1


def test_what_the_table_holds_of_an_unmet_user_is_not_read():
    asked, memory = queries([UNMET, BEYOND]), devices()
    long, short, drift = memory.prompts.long.clone(), memory.prompts.short.clone(), memory.drift.clone()
    long[[0, UNMET]], short[[0, UNMET]], drift[[0, UNMET]] = 50.0, 50.0, 50.0  # 0: where an id beyond is looked up
    changed = replace(memory, prompts=PromptState(long, short), drift=drift)
    assert torch.equal(ranked(changed, asked), ranked(memory, asked))


def test_newcomers_without_a_prompt_are_ranked_by_the_bare_backbone():
    asked = queries([BEYOND, 1])
    model = broadcast().backbone
    scores = ranked(devices(newcomers_use_prompt=False), asked)
    bare = model.scores(model.last_hidden(asked.tokens), ITEMS)
    torch.testing.assert_close(scores[0], bare[0])
    assert (scores[1] - bare[1]).abs().max() > 0.1


def test_who_has_a_memory_is_told_by_table_and_first_contact():
    known, at = places(devices(), torch.tensor([0, UNMET, 5, N, BEYOND]))
    assert known.tolist() == [True, False, True, False, False]
    assert at.tolist() == [0, UNMET, 5, 0, 0]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_a_forced_variant_overrides_every_choice(prompt, rows):
    memory, asked = devices(), queries(EVERYBODY)
    chosen = forced(memory, prompt=prompt, rows=rows)
    by_hand = devices(use_prompt=torch.full((N,), prompt), use_rows=torch.full((N,), rows), newcomers_use_prompt=prompt)
    assert torch.equal(ranked(chosen, asked), ranked(by_hand, asked))
    assert torch.equal(ranked(forced(by_hand, prompt=True, rows=False), asked), ranked(by_hand, asked)) == (
        prompt and not rows
    )


def test_using_nothing_is_the_frozen_backbone():
    asked, model = queries(EVERYBODY), broadcast().backbone
    scores = ranked(forced(devices(), prompt=False, rows=False), asked)
    torch.testing.assert_close(scores, model.scores(model.last_hidden(asked.tokens), ITEMS))


def test_own_rows_change_the_scores_of_own_items_alone_where_the_history_has_none_of_them():
    asked = queries([0, 2, 4])
    tokens = torch.where(asked.tokens >= 0, 10, asked.tokens)  # nobody's own item: the hidden state stays
    asked = replace(asked, tokens=tokens)
    with_rows, without = (ranked(forced(devices(), prompt=True, rows=rows), asked) for rows in (True, False))
    for scores, plain, own in zip(with_rows, without, ([7], [3, 13], [2]), strict=True):  # 1 is for later
        differs = (scores - plain).abs() > 1e-5
        assert differs.nonzero()[:, 0].tolist() == own


def test_own_rows_in_the_history_change_the_other_scores_too():
    asked = queries([0])  # its last item is 7, of which it has a row of its own
    with_rows, without = (ranked(forced(devices(), prompt=False, rows=rows), asked) for rows in (True, False))
    assert ((with_rows - without).abs() > 1e-5).all()


def test_rows_of_one_client_are_nothing_to_another():
    asked, memory = queries([1, 5, BEYOND]), forced(devices(), prompt=True, rows=True)
    assert torch.equal(ranked(memory, asked), ranked(replace(memory, rows=no_rows(D)), asked))


def test_an_own_row_of_an_item_that_is_not_available_yet_is_no_score():
    asked = replace(queries([2]), n_items=13)  # item 13 is to come
    tokens = torch.where(asked.tokens >= 0, 10, asked.tokens)
    scores = ranked(forced(devices(), prompt=False, rows=True), replace(asked, tokens=tokens))
    everything = ranked(forced(devices(), prompt=False, rows=True), replace(asked, tokens=tokens, n_items=ITEMS))
    assert scores.shape == (1, 13)
    torch.testing.assert_close(scores, everything[:, :13])


def test_no_query_gives_no_scores():
    assert ranked(devices(), queries([])).shape == (0, ITEMS)
