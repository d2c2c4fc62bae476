"""Stacked clients against whole copies of the model trained one after another; sums, clips and pulls by hand."""

import copy
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import random_model

from protofed.backbone.losses import LOSSES, window_losses
from protofed.backbone.sasrec import SASRec, at_rest
from protofed.client.lessons import ClientData, chunks, client_data
from protofed.federation.stacked import (
    PROMPT,
    ClientWeights,
    Deltas,
    Layout,
    LocalSteps,
    add_pull,
    clipped_sum,
    deltas_of,
    draw_negatives_of_steps,
    flatten,
    layout_of,
    pair_items,
    select_clients,
    squared_norms,
    stacked_last_hidden,
    stacked_losses,
    targets_of,
    train_stack,
    unflatten,
    weighted_sum,
)
from protofed.slices.histories import histories
from protofed.slices.windows import NO_TARGET, Windows

N_ITEMS, WIDTH, L_P = 15, 8, 2
NOBODY = torch.zeros(0, dtype=torch.int64)
CPU = torch.device("cpu")


@cache
def a_model() -> SASRec:
    """Items 3 and 11 have no row."""
    model = random_model(N_ITEMS, seed=3)
    model.has_row[[3, 11]] = False
    model.refresh_mean_row()
    return at_rest(model)


@cache
def some_clients(n: int) -> ClientData:
    rng = np.random.default_rng(n)
    users = rng.permutation(np.concatenate([np.full(3 + 2 * (u % 4), u) for u in range(n)]))
    past = histories(users, rng.integers(0, N_ITEMS, len(users)), np.arange(len(users)), n)
    return client_data(past, np.arange(len(users)), length=6, stride=3, rng=np.random.default_rng(1))


def stack_of(n: int) -> Windows:
    return next(windows for _, windows in chunks(some_clients(n), n, CPU))


SCOPES = {
    "everything": lambda name: name not in ("items", PROMPT),
    "last block and norm": lambda name: name.startswith(("blocks.1.", "norm.")),
    "prompt": lambda name: name == PROMPT,
    "nothing but rows": lambda name: False,
}


def weights_of(model: SASRec) -> dict[str, Tensor]:
    prompt = torch.randn(L_P, WIDTH, generator=Generator().manual_seed(5), dtype=model.items.dtype)
    return dict(model.named_parameters()) | {PROMPT: prompt}


def layout_for(model: SASRec, scope: str) -> Layout:
    return layout_of(weights_of(model), tuple(name for name in weights_of(model) if SCOPES[scope](name)))


def learned_together(
    model: SASRec, windows: Windows, n: int, scope: str, rule: LocalSteps, *, rows: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """Every client's weights and whole item table after its local steps, computed as one stack."""
    layout = layout_for(model, scope)
    lesson = pair_items(windows, draw_negatives_of_steps(windows, rule.steps, 4, N_ITEMS, seed=1, key=7), n)
    trains = model.has_row[lesson.items][:, None] & rows
    fixed = model.embed(lesson.items)

    def losses(at: ClientWeights, step: int) -> Tensor:
        table = torch.where(trains, at.rows, fixed)
        return stacked_losses(model, layout, at.dense, lesson.windows, lesson.negatives[step], LOSSES["softmax"], table)

    start = ClientWeights(flatten(weights_of(model), layout).repeat(n, 1), fixed)
    end, _ = train_stack(start, lesson.clients, losses, rule)
    table = model.items.expand(n, -1, -1).clone()
    table[lesson.clients[trains[:, 0]], lesson.items[trains[:, 0]]] = end.rows[trains[:, 0]]
    return unflatten(layout, end.dense), table


def learned_alone(
    model: SASRec, windows: Windows, u: int, scope: str, rule: LocalSteps, *, rows: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """One client with a copy of everything and one of PyTorch's optimisers."""
    negatives = draw_negatives_of_steps(windows, rule.steps, 4, N_ITEMS, seed=1, key=7)
    mine = windows.users == u
    own = Windows(*(getattr(windows, name)[mine] for name in ("users", "tokens", "sources", "targets", "newest")))
    model, start = copy.deepcopy(model), weights_of(model)
    prompt = start[PROMPT].clone() if scope == "prompt" else None
    names = [name for name in start if SCOPES[scope](name) and name != PROMPT]
    leaves = {name: dict(model.named_parameters())[name] for name in [*names, *(["items"] if rows else [])]}
    parameters = [*leaves.values(), *([prompt] if prompt is not None else [])]
    for parameter in parameters:
        parameter.requires_grad_(True)
    if rule.optimiser == "sgd":
        optimiser: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=rule.rate)
    else:
        optimiser = torch.optim.AdamW(parameters, lr=rule.rate, weight_decay=0.0)
    before = [p.detach().clone() for p in parameters]
    for step in range(rule.steps):
        prompts = None if prompt is None else prompt.expand(len(own), -1, -1)
        sums, counts = window_losses(model, own, negatives[step][mine], LOSSES["softmax"], prompts)
        optimiser.zero_grad()
        away = sum((p - b).square().sum() for p, b in zip(parameters, before, strict=True))
        (sums.sum() / counts.sum() + rule.pull / 2 * away).backward()
        nn.utils.clip_grad_norm_(parameters, rule.max_grad_norm)
        optimiser.step()
    found = {name: leaves[name].detach() for name in names}
    return found | ({PROMPT: prompt.detach()} if prompt is not None else {}), model.items.detach()


RULES = {
    "sgd": LocalSteps(3, 0.2, "sgd", max_grad_norm=1e9),
    "sgd, short gradients": LocalSteps(3, 0.5, "sgd", max_grad_norm=0.3),
    "sgd, pulled": LocalSteps(3, 0.2, "sgd", max_grad_norm=1e9, pull=0.5),
    "adamw": LocalSteps(3, 1e-2, "adamw"),
    "adamw, pulled": LocalSteps(3, 1e-2, "adamw", pull=0.5),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scope", SCOPES)
def test_a_stack_learns_what_each_client_would_with_a_model_of_its_own(scope, rule):
    rows = scope in ("everything", "nothing but rows")
    # No score depends on a key's bias: its gradient is rounding, which AdamW and a pull make a step of some size.
    model = copy.deepcopy(a_model()).double()
    windows = stack_of(6)
    weights, tables = learned_together(model, windows, 6, scope, RULES[rule], rows=rows)
    for u in range(6):
        alone, table = learned_alone(model, windows, u, scope, RULES[rule], rows=rows)
        for name, weight in alone.items():
            if not (RULES[rule].optimiser == "adamw" and name.endswith("key.bias")):
                torch.testing.assert_close(weights[name][u], weight, atol=1e-5, rtol=0)
        torch.testing.assert_close(tables[u], table, atol=1e-5, rtol=0)
        assert (table != model.items).any() == rows


def test_a_stack_of_ordinary_precision_does_too():
    windows = stack_of(6)
    weights, tables = learned_together(a_model(), windows, 6, "everything", RULES["sgd"], rows=True)
    for u in range(6):
        alone, table = learned_alone(a_model(), windows, u, "everything", RULES["sgd"], rows=True)
        for name, weight in alone.items():
            torch.testing.assert_close(weights[name][u], weight, atol=1e-5, rtol=0)
        torch.testing.assert_close(tables[u], table, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scope", ["everything", "prompt"])
def test_what_a_client_learns_does_not_depend_on_its_company(scope):
    model = copy.deepcopy(a_model()).double()
    together, tables = learned_together(model, stack_of(7), 7, scope, RULES["adamw"], rows=scope == "everything")
    for size in (1, 3):
        for where, windows in chunks(some_clients(7), size, CPU):
            n = where.stop - where.start
            part, table = learned_together(model, windows, n, scope, RULES["adamw"], rows=scope == "everything")
            for name, weight in part.items():
                torch.testing.assert_close(weight, together[name][where], atol=1e-9, rtol=0)
            torch.testing.assert_close(table, tables[where], atol=1e-9, rtol=0)


def test_a_history_is_read_with_the_weights_that_come_with_it():
    model, tokens = a_model(), stack_of(6).tokens
    for scope in ("everything", "last block and norm", "prompt"):
        layout = layout_for(model, scope)
        common = flatten(weights_of(model), layout)
        vectors = common + 0.1 * torch.randn(len(tokens), layout.size, generator=Generator().manual_seed(2))
        found = stacked_last_hidden(model, layout, vectors, tokens)
        for b in range(len(tokens)):
            own = unflatten(layout, vectors[b])
            prompt = own.pop(PROMPT)[None] if PROMPT in own else None
            alone = copy.deepcopy(model)
            alone.load_state_dict({**alone.state_dict(), **own})
            torch.testing.assert_close(found[b], alone.last_hidden(tokens[b : b + 1], prompt)[0], atol=1e-5, rtol=0)


def test_named_is_the_inverse_of_flat():
    model = a_model()
    layout = layout_for(model, "everything")
    vector = flatten(weights_of(model), layout)
    assert len(vector) == layout.size == sum(p.numel() for p in model.parameters()) - model.items.numel()
    back = unflatten(layout, vector)
    assert all(torch.equal(back[name], weights_of(model)[name]) for name in layout.names)


def test_every_item_of_a_lesson_is_the_pair_of_its_client_and_of_itself():
    windows = stack_of(5)
    negatives = draw_negatives_of_steps(windows, 2, 4, N_ITEMS, seed=1, key=0)
    lesson = pair_items(windows, negatives, 5)
    seen = set()
    columns = ((windows.tokens, lesson.windows.tokens), (windows.targets, lesson.windows.targets))
    for before, after in [*columns, (negatives[0], lesson.negatives[0]), (negatives[1], lesson.negatives[1])]:
        for user, items, places in zip(windows.users.tolist(), before.tolist(), after.tolist(), strict=True):
            for item, place in zip(items, places, strict=True):
                if item < 0:
                    assert place == item
                else:
                    assert (int(lesson.clients[place]), int(lesson.items[place])) == (user, item)
                    seen.add((user, item))
    assert list(zip(lesson.clients.tolist(), lesson.items.tolist(), strict=True)) == sorted(seen)


def test_chosen_clients_keep_their_windows():
    data = some_clients(6)
    who = torch.tensor([True, False, False, True, False, True])
    part = select_clients(data, who)
    assert part.users.tolist() == [0, 3, 5]
    for place, user in enumerate(part.users.tolist()):
        mine = part.windows.newest[part.starts[place] : part.starts[place + 1]]
        assert mine.tolist() == data.windows.newest[data.windows.users == user].tolist()
    assert len(select_clients(data, torch.zeros(6, dtype=torch.bool))) == 0


def test_targets_are_counted_for_each_client():
    windows = stack_of(6)
    by_hand = [int((windows.targets[windows.users == u] != NO_TARGET).sum()) for u in range(6)]
    assert targets_of(windows, 6).tolist() == by_hand == [3 + 2 * (u % 4) for u in range(6)]


CENTRES = torch.tensor([[1.0, 0.0], [0.0, 3.0]])


def quadratic(at: ClientWeights, step: int) -> Tensor:
    """Two clients with two parameters each: half the squared distance to a centre of their own."""
    return (at.dense - CENTRES).square().sum(-1) / 2


def two_clients(x: list[list[float]]) -> ClientWeights:
    return ClientWeights(torch.tensor(x), torch.zeros(0, 1))


def test_a_round_of_averaging_by_hand():
    start, rule = two_clients([[2.0, 1.0], [2.0, 1.0]]), LocalSteps(2, 0.5, "sgd", max_grad_norm=1e9)
    end, loss = train_stack(start, NOBODY, quadratic, rule)
    # each step halves the distance: (2, 1) -> (1.25, 0.25) for centre (1, 0), -> (0.5, 2.5) for centre (0, 3)
    assert torch.equal(end.dense, torch.tensor([[1.25, 0.25], [0.5, 2.5]]))
    assert loss.tolist() == [(0.5**2 + 0.5**2) / 2, (1 + 1) / 2]
    deltas = Deltas(ClientWeights(end.dense - start.dense, start.rows), NOBODY, NOBODY, 0)
    total, _ = weighted_sum(deltas, torch.tensor([3.0, 1.0]))
    assert (start.dense[0] + total / 4).tolist() == [(3 * 1.25 + 0.5) / 4, (3 * 0.25 + 2.5) / 4]


def test_the_proximal_gradient_by_hand():
    at, anchor = two_clients([[2.0, 1.0], [2.0, 1.0]]), two_clients([[0.0, 1.0], [1.0, 5.0]])
    slope = add_pull(two_clients([[1.0, 1.0], [2.0, -2.0]]), at, anchor, 0.5)
    assert slope.dense.tolist() == [[1 + 0.5 * 2, 1.0], [2 + 0.5 * 1, -2 - 0.5 * 4]]
    end, _ = train_stack(at, NOBODY, quadratic, LocalSteps(2, 0.5, "sgd", max_grad_norm=1e9, pull=1.0))
    # first coordinate of client 0: 2 -> 2 - 0.5 (1 + 0) = 1.5 -> 1.5 - 0.5 (0.5 - 0.5) = 1.5, half way to the centre
    assert end.dense[0, 0] == 1.5


def test_no_pull_leaves_the_gradient_as_it_is():
    slope = two_clients([[1.0, 1.0], [2.0, -2.0]])
    assert add_pull(slope, slope, two_clients([[math.nan] * 2] * 2), 0.0) is slope


def test_the_pull_is_to_the_anchor_and_not_to_where_the_client_starts():
    start, anchor = two_clients([[2.0, 1.0], [2.0, 1.0]]), two_clients([[5.0, 0.0], [0.0, 7.0]])
    rule = LocalSteps(200, 0.2, "sgd", max_grad_norm=1e9, pull=3.0)
    end, _ = train_stack(start, NOBODY, quadratic, rule, anchor)
    torch.testing.assert_close(end.dense, (CENTRES + 3 * anchor.dense) / 4)  # v minimises its loss + 3/2 ||v - w||^2


def test_a_client_whose_loss_is_not_finite_stays_and_harms_nobody():
    start = two_clients([[2.0, 1.0], [2.0, 1.0]])

    def losses(at: ClientWeights, step: int) -> Tensor:
        return quadratic(at, step) * torch.tensor([math.nan, 1.0])

    for optimiser in ("sgd", "adamw"):
        rule = LocalSteps(2, 0.5, optimiser, max_grad_norm=1e9)
        end, _ = train_stack(start, NOBODY, losses, rule)
        assert torch.equal(end.dense[0], start.dense[0])
        assert torch.equal(end.dense[1], train_stack(start, NOBODY, quadratic, rule)[0].dense[1])


class Counting(TorchDispatchMode):
    """Counts the tensor operations that are dispatched."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def operations(n: int, scope: str) -> int:
    windows = stack_of(n)
    with Counting() as count:
        learned_together(a_model(), windows, n, scope, RULES["adamw"], rows=scope == "everything")
    return count.calls


@pytest.mark.parametrize("scope", ["everything", "last block and norm", "prompt"])
def test_eight_clients_take_as_many_tensor_operations_as_sixty_four(scope):
    assert len(stack_of(64)) > 6 * len(stack_of(8))
    assert operations(8, scope) == operations(64, scope) > 100


def uploads(n: int, seed: int, scale: float) -> Deltas:
    """Some clients' movements: five numbers each, and rows of three items or fewer in a table of six."""
    rng = Generator().manual_seed(seed)
    clients = torch.arange(n).repeat_interleave(3)
    items = torch.cat([torch.randperm(6, generator=rng)[:3].sort().values for _ in range(n)])
    sizes = scale * torch.rand(n, generator=rng) ** 4
    dense = torch.randn(n, 5, generator=rng) * sizes[:, None]
    return Deltas(
        ClientWeights(dense, torch.randn(3 * n, 2, generator=rng) * sizes[clients][:, None]), clients, items, 6
    )


def without(deltas: Deltas, u: int) -> Deltas:
    stays = deltas.clients != u
    kept = torch.arange(len(deltas.stack.dense)) != u
    clients = deltas.clients[stays]
    stack = ClientWeights(deltas.stack.dense[kept], deltas.stack.rows[stays])
    return replace(deltas, stack=stack, clients=clients - (clients > u).long(), items=deltas.items[stays])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), st.integers(0, 2**31), st.sampled_from([1e-3, 1.0, 100.0, 1e20, 1e38]), st.floats(0.01, 50))
def test_removing_any_one_client_moves_the_clipped_sum_by_at_most_the_radius(n, seed, scale, radius):
    deltas = uploads(n, seed, scale)
    dense, rows, factors = clipped_sum(deltas, radius)
    assert dense.isfinite().all()
    assert rows.isfinite().all()
    for u in range(n):
        fewer, fewer_rows, _ = clipped_sum(without(deltas, u), radius)
        moved = float(((dense - fewer).square().sum() + (rows - fewer_rows).square().sum()).sqrt())
        assert moved <= radius * (1 + 1e-9)
        length = float(squared_norms(deltas.stack, deltas.clients)[u].sqrt())
        assert moved == pytest.approx(min(length, radius), rel=1e-6, abs=1e-12 * radius * n)
        assert (float(factors[u]) < 1) == (length > radius * (1 - 1e-12))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_an_upload_that_is_not_finite_counts_as_none(poison):
    deltas = uploads(4, 0, 1.0)
    rows = deltas.stack.rows.clone()
    rows[3, 0] = poison  # of client 1
    poisoned = replace(deltas, stack=replace(deltas.stack, rows=rows))
    for one, other in zip(clipped_sum(poisoned, 0.5)[:2], clipped_sum(without(deltas, 1), 0.5)[:2], strict=True):
        assert torch.equal(one, other)


def test_rows_are_summed_at_their_items_places():
    stack = ClientWeights(torch.zeros(2, 0), torch.tensor([[1.0, 0.0], [2.0, 2.0], [5.0, 0.0]]))
    deltas = Deltas(stack, torch.tensor([0, 0, 1]), torch.tensor([1, 3, 3]), 4)
    _, rows = weighted_sum(deltas, torch.tensor([10.0, 1.0]))
    assert rows.tolist() == [[0, 0], [10, 0], [0, 0], [25, 20]]


def test_what_did_not_train_is_no_movement():
    windows = stack_of(3)
    lesson = pair_items(windows, draw_negatives_of_steps(windows, 1, 4, N_ITEMS, seed=1, key=0), 3)
    start = ClientWeights(torch.zeros(3, 2), torch.ones(len(lesson.items), WIDTH))
    deltas = deltas_of(start, replace(start, dense=start.dense + 1), lesson, N_ITEMS)
    assert deltas.stack.dense.eq(1).all()
    assert not weighted_sum(deltas, torch.ones(3))[1].any()
