"""Algorithm 1 against a transcription with loops, each client alone, and torch.optim.AdamW; poisoned clients stay."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import random_model

from protofed.backbone.sasrec import at_rest
from protofed.client.codec import QueryEncoder, random_linear_codec, unit
from protofed.client.drift import literal_gate
from protofed.client.lessons import Lesson
from protofed.client.model import VARIANTS, Encoders, LocalRule, Model
from protofed.client.own_rows import OwnRows, no_rows, subset, with_met_items
from protofed.client.prompts import PromptState
from protofed.client.state import DeviceState, Moments, columns, new_devices, select, with_fresh_moments
from protofed.client.steps import AdamWState
from protofed.client.update import client_losses, client_update, decay_rates, learn_from_feedback
from protofed.slices.histories import Histories, histories
from protofed.slices.windows import NO_TARGET, Windows, take, training_windows, trimmed

N_ROWS, N_ITEMS = 14, 18  # items 14 .. 17 have no public row
LENGTH, STRIDE = 6, 3
L_P, WIDTH, D_Z, K = 2, 8, 5, 6
NAN, INF = float("nan"), float("inf")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed))


@cache
def a_model() -> Model:
    codec, v = random_linear_codec(L_P, WIDTH, Generator().manual_seed(1), d_z=D_Z), unit(drawn(K, D_Z, seed=2))
    encoders = Encoders(codec, QueryEncoder(WIDTH, Generator().manual_seed(3), d_z=D_Z), literal_gate(), 1.0)
    backbone, prior = at_rest(random_model(N_ROWS, seed=4)), torch.zeros(len(VARIANTS))
    return Model(backbone, encoders, v, codec.decode(v), LocalRule(), N_ITEMS, prior)


def a_log(n_users: int) -> Histories:
    rng = np.random.default_rng(n_users)
    users = np.concatenate([np.full(3 + 2 * (u % 5), u) for u in range(n_users)])  # 3 to 11 events each
    users = rng.permutation(users)
    return histories(users, rng.integers(0, N_ITEMS, len(users)), np.arange(len(users)), n_users)


@cache
def a_lesson(n: int) -> tuple[Lesson, Tensor]:
    """What n clients learn from, and their negatives."""
    past = a_log(n)
    rng = np.random.default_rng(7)
    windows = training_windows(past, np.arange(len(past)), length=LENGTH, stride=STRIDE, rng=rng)
    windows = trimmed(take(windows, windows.users.argsort(stable=True)))
    gate, lambda_s = drawn(n, seed=5).sigmoid(), drawn(n, seed=6).sigmoid()
    points = unit(drawn(n, 3, D_Z, seed=10))
    lesson = Lesson(windows, unit(drawn(n, D_Z, seed=8)), gate, lambda_s, points)
    negatives = torch.randint(N_ITEMS, (len(windows), 5), generator=Generator().manual_seed(9))
    return lesson, negatives


def begun(prompts: PromptState, rows: OwnRows) -> DeviceState:
    """Devices at the start of a slice in which all of them take part; their keys are far apart."""
    n = len(prompts.long)
    state = new_devices(1000 * torch.arange(n) + 17, L_P, WIDTH, D_Z)
    everybody = torch.ones(n, dtype=torch.bool)
    state = replace(state, met=everybody, active=everybody, contributes=everybody)
    return with_fresh_moments(replace(state, prompts=prompts, rows=rows))


@cache
def a_start(n: int) -> DeviceState:
    rows = with_met_items(no_rows(WIDTH), a_model().backbone, a_log(n), len(a_log(n)), torch.arange(n))
    rows = replace(rows, rows=rows.rows + 0.1 * drawn(*rows.rows.shape, seed=11))
    return begun(PromptState(drawn(n, L_P, WIDTH, seed=12), 0.5 * drawn(n, L_P, WIDTH, seed=13)), rows)


def windows_of(windows: Windows, u: int) -> tuple[Windows, Tensor]:
    mine = (windows.users == u).nonzero()[:, 0]
    return trimmed(replace(take(windows, mine), users=torch.zeros(len(mine), dtype=torch.int64))), mine


def one_client(state: DeviceState, u: int) -> DeviceState:
    """Client u of a stack as a stack of its own."""
    _, place = subset(state.rows, torch.tensor([u]))

    def moments(kept: AdamWState, at: Tensor) -> AdamWState:
        return AdamWState(kept.first[at], kept.second[at], kept.steps[at])

    me = torch.tensor([u])
    return replace(
        select(state, me), moments=Moments(moments(state.moments.long, me), moments(state.moments.rows, place))
    )


@cache
def one_lesson(n: int, u: int) -> tuple[Lesson, Tensor]:
    lesson, negatives = a_lesson(n)
    windows, mine = windows_of(lesson.windows, u)
    me = slice(u, u + 1)
    return Lesson(windows, lesson.h[me], lesson.gate[me], lesson.lambda_s[me], lesson.points[me]), negatives[mine]


def learned(state: DeviceState) -> dict[str, Tensor]:
    """Everything that a local step may change."""
    parts = {"long": state.prompts.long, "short": state.prompts.short, "rows": state.rows.rows}
    for name, kept in (("moments", state.moments.long), ("row moments", state.moments.rows)):
        parts |= {f"{name} {field}": getattr(kept, field) for field in ("first", "second", "steps")}
    return parts


def everything(state: DeviceState) -> dict[str, Tensor]:
    """What a local step may change, and all that it must not."""
    rows, memory = state.rows, state.memory
    fixed = (*columns(state), rows.clients, rows.items, memory.offsets, memory.items, memory.times)
    return learned(state) | {f"column {n}": column for n, column in enumerate(fixed)}


def check_close(one: DeviceState, other: DeviceState, *, atol: float = 2e-5, rtol: float = 1e-4) -> None:
    for name, column in everything(one).items():
        torch.testing.assert_close(column, everything(other)[name], atol=atol, rtol=rtol, equal_nan=True, msg=name)


def taught(state: DeviceState, rule: LocalRule, n: int = 6, steps: int = 3) -> DeviceState:
    lesson, negatives = a_lesson(n)
    for _ in range(steps):
        state, _ = client_update(a_model(), state, lesson, negatives, rule)
    return state


RULES = {
    "reference": LocalRule(),
    "printed": LocalRule(as_printed=True, lambda_p=0.3),
    "bce": LocalRule(loss="bce"),
    "bpr": LocalRule(loss="bpr"),
    "no alignment": LocalRule(align=False),
    "entropy": LocalRule(alignment="entropy"),
    "wasserstein": LocalRule(alignment="wasserstein"),
    "proximal": LocalRule(inner_prox_steps=3),
    "whole tokens": LocalRule(by_row=True),
    "no long": LocalRule(use_long=False),
    "no short": LocalRule(use_short=False),
    "no prototypes": LocalRule(use_prototypes=False),
    "fixed rows": LocalRule(eta_r=0.0),
    "weight decay": LocalRule(weight_decay=0.1),
}


@pytest.mark.parametrize("name", RULES)
def test_a_stack_learns_as_each_client_would_alone(name):
    together = taught(a_start(6), RULES[name], steps=2)
    for u in range(6):
        alone, (lesson, negatives) = one_client(a_start(6), u), one_lesson(6, u)
        for _ in range(2):
            alone, _ = client_update(a_model(), alone, lesson, negatives, RULES[name])
        check_close(one_client(together, u), alone)


def test_the_report_of_a_stack_is_that_of_each_client_alone():
    lesson, negatives = a_lesson(6)
    _, report = client_update(a_model(), a_start(6), lesson, negatives, LocalRule())
    for u in range(6):
        _, alone = client_update(a_model(), one_client(a_start(6), u), *one_lesson(6, u), LocalRule())
        torch.testing.assert_close(report.loss[u : u + 1], alone.loss)
        assert report.sparsity[u] == alone.sparsity[0]
    assert report.moved.all()


def softplus(x: Tensor) -> Tensor:
    return (1 + x.exp()).log()


def slow_losses(positive: Tensor, against: list[Tensor], kind: str) -> Tensor:
    """RecLoss of one target, from its score and those of its negatives."""
    if kind == "softmax":
        return -(positive.exp() / (positive.exp() + sum(x.exp() for x in against))).log()
    if kind == "bce":
        return softplus(-positive) + (sum(softplus(x) for x in against) / len(against) if against else 0)
    return sum(softplus(x - positive) for x in against) / max(len(against), 1)


def slow_rec_loss(prompt: Tensor, rows: dict[int, Tensor], lesson: Lesson, negatives: Tensor, kind: str) -> Tensor:
    """Lines 5 and 6 for one client: window by window and target by target."""
    backbone = a_model().backbone

    def row(item: int) -> Tensor:
        return rows[item] if item in rows else backbone.embed(torch.tensor(item))

    def embed(items: Tensor) -> Tensor:
        return torch.stack([torch.stack([row(i) for i in line]) for line in items.tolist()])

    losses = []
    for w in range(len(lesson.windows)):
        hidden = backbone.hidden(lesson.windows.tokens[w : w + 1], prompt[None], embed)[0]
        pairs = zip(lesson.windows.sources[w].tolist(), lesson.windows.targets[w].tolist(), strict=True)
        for source, target in pairs:
            if target == NO_TARGET:
                continue
            against = [hidden[source] @ row(i) for i in negatives[w].tolist() if i != target]
            losses.append(slow_losses(hidden[source] @ row(target), against, kind))
    return sum(losses) / len(losses)


def slow_prompt(h: Tensor, long: Tensor, short: Tensor, gate: float, rule: LocalRule) -> Tensor:
    """Lines 2 to 4 for one client."""
    model = a_model()
    s = [float(h @ v) / rule.temperature for v in model.v]
    top = sorted(range(K), key=lambda k: -s[k])[: rule.top_m]
    total = sum(math.exp(s[k]) for k in top)
    prompt = long + gate * short + sum(math.exp(s[k]) / total * model.prompts[k] for k in top)
    if rule.as_printed:
        return prompt
    length = model.backbone.items.norm(dim=-1).mean() * math.sqrt(WIDTH)
    return torch.stack([token / token.norm() * length for token in prompt])


def slow_alignment(long: Tensor, rule: LocalRule) -> Tensor:
    """Lines 9 to 11 for one client, squared Euclidean."""
    model = a_model()
    z = model.encoders.codec.encode(long[None])[0]
    pulls = [(z - v).square().sum() / 2 for v in model.v]
    star = min(range(K), key=lambda k: float(pulls[k].detach()))
    logits = [z @ v / rule.tau_a for v in model.v]
    return pulls[star] + rule.gamma * -(logits[star].exp() / sum(x.exp() for x in logits)).log()


def shortened(grad: Tensor, longest: float) -> Tensor:
    return grad * min(1.0, longest / max(float(grad.norm()), 1e-12))


def algorithm_1(state: DeviceState, lesson: Lesson, negatives: Tensor, rule: LocalRule) -> tuple[Tensor, ...]:
    """One client's loss, and its long prompt, short prompt and rows after one plain step, line by line."""
    long, short = (x[0].clone().requires_grad_(True) for x in (state.prompts.long, state.prompts.short))
    rows = state.rows.rows.clone().requires_grad_(True)
    own = dict(zip(state.rows.items.tolist(), rows.unbind(), strict=True))
    prompt = slow_prompt(lesson.h[0], long, short, float(lesson.gate[0]), rule)
    rec = slow_rec_loss(prompt, own, lesson, negatives, rule.loss)
    by_short, by_rows = torch.autograd.grad(rec, (short, rows), retain_graph=True)
    whole = rec + float(lesson.lambda_s[0]) * slow_alignment(long, rule)
    by_long = torch.autograd.grad(whole, long)[0]
    g_s = shortened(by_short, rule.max_grad_norm)
    middle = 1.0 if rule.as_printed else float(g_s.abs().flatten().sort().values[(g_s.numel() - 1) // 2])
    moved = short.detach() - rule.eta_s * g_s
    new_short = moved.sign() * (moved.abs() - rule.eta_s * rule.lambda_p * middle).clamp(min=0)
    new_long = long.detach() - rule.eta_l * shortened(by_long, rule.max_grad_norm)
    return rec.detach(), new_long, new_short, by_long, by_rows


@pytest.mark.parametrize("loss", ["softmax", "bce", "bpr"])
@pytest.mark.parametrize("lambda_p", [0.0, 0.2])
def test_the_printed_step_is_algorithm_1_line_by_line(loss, lambda_p):
    rule = LocalRule(loss=loss, as_printed=True, eta_l=0.05, eta_s=0.2, lambda_p=lambda_p, eta_r=0.0)
    lesson, negatives = a_lesson(6)
    after, report = client_update(a_model(), a_start(6), lesson, negatives, rule)
    for u in range(6):
        rec, long, short, *_ = algorithm_1(one_client(a_start(6), u), *one_lesson(6, u), rule)
        torch.testing.assert_close(report.loss[u], rec, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(after.prompts.long[u], long, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(after.prompts.short[u], short, atol=2e-6, rtol=1e-5)
        assert float(report.sparsity[u]) == pytest.approx(float((short == 0).float().mean()))
    assert not torch.equal(after.prompts.long, a_start(6).prompts.long)
    assert torch.equal(after.rows.rows, a_start(6).rows.rows)


def test_the_reference_step_is_algorithm_1_with_adamw_and_a_relative_threshold():
    rule = LocalRule(eta_l=0.05, eta_s=0.2, eta_r=0.02)
    lesson, negatives = a_lesson(6)
    after, _ = client_update(a_model(), a_start(6), lesson, negatives, rule)
    for u in range(6):
        before = one_client(a_start(6), u)
        _, _, short, by_long, by_rows = algorithm_1(before, *one_lesson(6, u), rule)
        torch.testing.assert_close(after.prompts.short[u], short, atol=2e-6, rtol=1e-5)
        # AdamW's first step is the sign of the gradient but for its epsilon.
        first = before.prompts.long[0] - 0.05 * by_long / (by_long.abs() + 1e-8)
        torch.testing.assert_close(after.prompts.long[u], first, atol=1e-5, rtol=1e-5)
        rows = before.rows.rows - 0.02 * by_rows / (by_rows.abs() + 1e-8)
        used = by_rows.abs() > 1e-5  # below it the sign is a matter of rounding
        torch.testing.assert_close(one_client(after, u).rows.rows[used], rows[used], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("loss", ["softmax", "bpr"])
def test_without_alignment_every_client_follows_torch_adamw_on_its_own_loss(loss):
    rule = LocalRule(loss=loss, align=False, use_short=False, eta_l=0.03, eta_r=0.01, weight_decay=0.1)
    after = taught(a_start(6), rule, steps=5)
    for u in range(6):
        state, (lesson, negatives) = one_client(a_start(6), u), one_lesson(6, u)
        long, rows = (torch.nn.Parameter(x.clone()) for x in (state.prompts.long, state.rows.rows))
        groups = [
            {"params": [long], "lr": 0.03, "weight_decay": 0.1},
            {"params": [rows], "lr": 0.01, "weight_decay": 0},
        ]
        optimiser = torch.optim.AdamW(groups)
        for _ in range(5):
            own = dict(zip(state.rows.items.tolist(), rows.unbind(), strict=True))
            nothing = torch.zeros(L_P, WIDTH)
            prompt = slow_prompt(lesson.h[0], long[0], nothing, 0.0, rule)
            optimiser.zero_grad()
            slow_rec_loss(prompt, own, lesson, negatives, loss).backward()
            optimiser.step()
        torch.testing.assert_close(one_client(after, u).prompts.long, long.detach(), atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(one_client(after, u).rows.rows, rows.detach(), atol=1e-4, rtol=1e-3)


def test_the_proximal_form_solves_its_optimality_condition():
    rule = LocalRule(inner_prox_steps=60, eta_l=0.02, use_short=False, eta_r=0.0)
    after = taught(a_start(6), rule, steps=1).prompts.long
    for u in range(6):
        state, (lesson, negatives) = one_client(a_start(6), u), one_lesson(6, u)
        without = replace(lesson, lambda_s=torch.zeros(1), gate=torch.zeros(1))  # no pull, no short prompt
        *_, rec, _ = algorithm_1(state, without, negatives, rule)
        at = after[u].clone().requires_grad_(True)
        pull = torch.autograd.grad(slow_alignment(at, rule), at)[0]
        expected = state.prompts.long[0] - 0.02 * (rec + float(lesson.lambda_s[0]) * pull)
        torch.testing.assert_close(after[u], expected, atol=1e-5, rtol=1e-5)


def test_local_steps_lower_every_clients_loss():
    lesson, negatives = a_lesson(6)
    before, after = (
        client_losses(a_model(), state, lesson, negatives, LocalRule())
        for state in (a_start(6), taught(a_start(6), LocalRule(), steps=20))
    )
    assert (after < before).all()


def test_what_is_switched_off_stays_as_it_was_and_the_rest_moves():
    start = a_start(6)
    for rule, kept in (
        (LocalRule(use_long=False), "long"),
        (LocalRule(use_short=False), "short"),
        (LocalRule(eta_r=0.0), "rows"),
    ):
        after = learned(taught(start, rule, steps=1))
        for name in ("long", "short", "rows"):
            assert torch.equal(after[name], learned(start)[name]) == (name == kept)


def test_neither_the_state_nor_the_model_that_came_in_is_written_to():
    model, state = a_model(), a_start(6)
    frozen = [p.clone() for p in (*model.backbone.state_dict().values(), model.v, model.prompts)]
    before = {name: column.clone() for name, column in everything(state).items()}
    taught(state, LocalRule())
    assert all(torch.equal(before[name], column) for name, column in everything(state).items())
    now = (*model.backbone.state_dict().values(), model.v, model.prompts)
    assert all(torch.equal(p, q) for p, q in zip(frozen, now, strict=True))
    assert not any(p.grad is not None for p in model.backbone.parameters())


def test_a_client_without_rows_of_its_own_learns_with_public_ones():
    start = a_start(6)
    bare = begun(start.prompts, no_rows(WIDTH))
    lesson, negatives = a_lesson(6)
    after, report = client_update(a_model(), bare, lesson, negatives, LocalRule())
    assert len(after.rows) == 0
    for u in range(6):
        mine, (one, drawn_negatives) = one_client(bare, u), one_lesson(6, u)
        prompt = slow_prompt(one.h[0], mine.prompts.long[0], mine.prompts.short[0], float(one.gate[0]), LocalRule())
        torch.testing.assert_close(report.loss[u], slow_rec_loss(prompt, {}, one, drawn_negatives, "softmax"))


POISONED = 2
OTHERS = [0, 1, 3, 4, 5]
POISONS = ["long", "short", "all rows", "infinite rows", "overflowing rows", "query", "gate"]


def poisoned(kind: str) -> tuple[DeviceState, Lesson]:
    """The start and lesson of six clients, one of whom has something in it that is not a number."""
    state, lesson = a_start(6), a_lesson(6)[0]
    if kind in ("long", "short"):
        broken = getattr(state.prompts, kind).clone()
        broken[POISONED, 1, 3] = NAN
        return replace(state, prompts=replace(state.prompts, **{kind: broken})), lesson
    if "rows" in kind:
        rows = state.rows.rows.clone()
        rows[state.rows.clients == POISONED] = {"all": NAN, "infinite": INF, "overflowing": 3e38}[kind.split()[0]]
        return replace(state, rows=replace(state.rows, rows=rows)), lesson
    name = {"query": "h", "gate": "gate", "pull": "lambda_s"}[kind]
    broken = getattr(lesson, name).clone()
    broken[POISONED] = NAN
    return state, replace(lesson, **{name: broken})


def check_one_is_stuck(kind: str, rule: LocalRule) -> None:
    """The poisoned client is bit for bit as it was, moments included, and the others are as in a clean run."""
    (state, lesson), (fine, negatives) = poisoned(kind), a_lesson(6)
    clean, clean_report = client_update(a_model(), a_start(6), fine, negatives, rule)
    after, report = client_update(a_model(), state, lesson, negatives, rule)
    assert report.moved.tolist() == [u != POISONED for u in range(6)]
    assert clean_report.moved.all()
    for u in OTHERS:
        check_close(one_client(after, u), one_client(clean, u), atol=0, rtol=0)
        assert report.loss[u] == clean_report.loss[u]
    check_close(one_client(after, POISONED), one_client(state, POISONED), atol=0, rtol=0)


@pytest.mark.parametrize("name", ["reference", "printed", "proximal", "wasserstein", "bpr"])
@pytest.mark.parametrize("kind", ["long", "query"])
def test_a_client_whose_loss_is_not_a_number_stays_and_changes_nobody_else(kind, name):
    # Rows have their own test: here they stand still.
    check_one_is_stuck(kind, replace(RULES[name], eta_r=0.0))


@pytest.mark.parametrize("kind", POISONS)
def test_a_client_with_anything_broken_in_it_stays_and_changes_nobody_else(kind):
    check_one_is_stuck(kind, replace(LocalRule(), eta_r=0.0))


@pytest.mark.parametrize("kind", POISONS)
def test_the_rows_of_a_broken_client_stay_as_well(kind):
    check_one_is_stuck(kind, LocalRule())


def test_one_broken_row_stops_all_of_its_clients_memory():
    u = 4  # eleven events in several windows: some do not contain the broken row
    state, (lesson, negatives) = a_start(6), a_lesson(6)
    mine = (state.rows.clients == u).nonzero()[:, 0]
    rows = state.rows.rows.clone()
    rows[mine[-1]] = NAN
    state = replace(state, rows=replace(state.rows, rows=rows))
    after, report = client_update(a_model(), state, lesson, negatives, LocalRule())
    assert report.moved.tolist() == [n != u for n in range(6)]
    check_close(one_client(after, u), one_client(state, u), atol=0, rtol=0)


def test_a_client_whose_pull_is_not_a_number_stays_as_a_whole():
    check_one_is_stuck("pull", replace(LocalRule(), eta_r=0.0))


def test_a_client_recovers_when_its_poison_is_gone():
    state, lesson = poisoned("query")
    negatives = a_lesson(6)[1]
    rule = replace(LocalRule(), eta_r=0.0)
    stuck, _ = client_update(a_model(), state, lesson, negatives, rule)
    later = one_client(taught(stuck, rule, steps=1), POISONED)
    fresh = one_client(taught(a_start(6), rule, steps=1), POISONED)
    check_close(later, fresh, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["reference", "printed", "proximal", "no long", "no short"])
def test_a_client_that_takes_no_part_stays_bit_for_bit_and_changes_nobody_else(name):
    (lesson, negatives), rule = a_lesson(6), RULES[name]
    state = replace(a_start(6), active=torch.tensor([True, False, True, True, False, True]))
    after, report = client_update(a_model(), state, lesson, negatives, rule)
    clean, _ = client_update(a_model(), a_start(6), lesson, negatives, rule)
    assert report.moved.tolist() == state.active.tolist()
    for u in range(6):
        expected = one_client(clean if state.active[u] else state, u)
        for column, value in learned(one_client(after, u)).items():
            assert torch.equal(value, learned(expected)[column]), column


def test_a_local_step_changes_prompts_rows_and_moments_and_nothing_else():
    before = everything(a_start(6))
    after = everything(taught(a_start(6), LocalRule(), steps=1))
    prompts = ("column 1", "column 2")  # long and short once more
    for name, column in after.items():
        changed = name in learned(a_start(6)) or name in prompts
        assert torch.equal(column, before[name]) != changed, name


def test_feedback_moves_the_short_prompt_as_a_local_step_does_and_nothing_else():
    (lesson, negatives), rule = a_lesson(6), LocalRule()
    state = replace(a_start(6), active=torch.zeros(6, dtype=torch.bool))  # outside of a slice
    after, moved = learn_from_feedback(a_model(), state, lesson, negatives, rule)
    assert moved.all()
    for u in range(6):
        _, _, short, *_ = algorithm_1(one_client(state, u), *one_lesson(6, u), rule)
        torch.testing.assert_close(after.prompts.short[u], short, atol=2e-6, rtol=1e-5)
    kept = replace(after, prompts=replace(after.prompts, short=state.prompts.short))
    check_close(kept, state, atol=0, rtol=0)


def test_rates_fall_along_a_cosine_to_near_zero_but_not_those_of_the_short_prompt_nor_printed_ones():
    rule = LocalRule(eta_l=0.4, eta_r=0.2, eta_s=0.1, steps=20)
    for step in range(20):
        share = (1 + math.cos(math.pi * step / 20)) / 2
        expected = replace(rule, eta_l=0.4 * share, eta_r=0.2 * share)
        assert decay_rates(rule, step) == expected
    assert decay_rates(rule, 0) == rule
    assert decay_rates(rule, 19).eta_l < 0.01 * rule.eta_l
    printed = replace(rule, as_printed=True)
    assert decay_rates(printed, 19) == printed


class Counting(TorchDispatchMode):
    """Counts the tensor operations that are dispatched."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def a_brief(n: int) -> tuple[Windows, Tensor]:
    """The same clients' events beside at most two tokens, and their negatives."""
    past = a_log(n)
    windows = training_windows(past, np.arange(len(past)), length=2, stride=1, rng=np.random.default_rng(17))
    windows = trimmed(take(windows, windows.users.argsort(stable=True)))
    return windows, torch.randint(N_ITEMS, (len(windows), 5), generator=Generator().manual_seed(18))


def test_with_a_brief_prompts_learn_from_it_without_rows_and_rows_from_the_lesson():
    state, (lesson, negatives), (brief, by_brief) = a_start(6), a_lesson(6), a_brief(6)
    both, _ = client_update(a_model(), state, replace(lesson, brief=brief), negatives, LocalRule(), by_brief)
    whole, _ = client_update(a_model(), state, lesson, negatives, LocalRule())
    bare = begun(state.prompts, no_rows(WIDTH))
    short, _ = client_update(a_model(), bare, replace(lesson, windows=brief), by_brief, LocalRule())
    assert torch.equal(both.rows.rows, whole.rows.rows)
    assert torch.equal(both.prompts.long, short.prompts.long)
    assert torch.equal(both.prompts.short, short.prompts.short)
    assert not torch.allclose(both.prompts.long, whole.prompts.long, atol=1e-3)


def test_a_client_whose_brief_is_broken_stays_as_a_whole_and_changes_nobody_else():
    state, (plain, negatives), (brief, by_brief) = a_start(6), a_lesson(6), a_brief(6)
    lesson = replace(plain, brief=brief)
    broken = replace(state.prompts, long=state.prompts.long.index_fill(0, torch.tensor([2]), torch.nan))
    after, report = client_update(a_model(), replace(state, prompts=broken), lesson, negatives, LocalRule(), by_brief)
    fine, _ = client_update(a_model(), state, lesson, negatives, LocalRule(), by_brief)
    assert report.moved.tolist() == [True, True, False, True, True, True]
    others = torch.tensor([0, 1, 3, 4, 5])
    torch.testing.assert_close(after.prompts.long[others], fine.prompts.long[others])
    own = state.rows.clients == 2
    assert torch.equal(after.rows.rows[own], state.rows.rows[own])


def operations(n: int, rule: LocalRule, brief: bool = False) -> int:
    state, (lesson, negatives), (short, by_short) = a_start(n), a_lesson(n), a_brief(n)
    if brief:
        lesson = replace(lesson, brief=short)
    with Counting() as count:
        client_update(a_model(), state, lesson, negatives, rule, by_short if brief else None)
    return count.calls


def test_eight_clients_with_a_brief_take_as_many_tensor_operations_as_sixty_four():
    assert (
        operations(8, LocalRule(), brief=True) == operations(64, LocalRule(), brief=True) > operations(8, LocalRule())
    )


@pytest.mark.parametrize("name", ["reference", "printed", "bpr", "wasserstein", "proximal", "whole tokens"])
def test_eight_clients_take_as_many_tensor_operations_as_sixty_four(name):
    assert len(a_lesson(64)[0].windows) > 6 * len(a_lesson(8)[0].windows)
    assert operations(8, RULES[name]) == operations(64, RULES[name]) > 100


def test_bfloat16_is_for_a_gpu_and_changes_nothing_here():
    plain, half = (learned(taught(a_start(6), LocalRule(bf16=bf16))) for bf16 in (False, True))
    assert all(torch.equal(column, half[name]) for name, column in plain.items())
