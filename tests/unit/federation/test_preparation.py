"""What the base block teaches: one first prompt for all, the codec by the number of users, the gate by their drifts."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Generator, Tensor
from worlds import LENGTH, tiny_config, tiny_log, tiny_stream, warmed_up

from protofed.backbone.losses import hidden_at
from protofed.client.codec import CodecFit, CodecTraining, LinearCodec, MlpCodec, unit
from protofed.client.lessons import Lesson
from protofed.client.own_rows import met_boost, no_rows, own_embed, subset
from protofed.client.state import DeviceState, choose_variants, select, with_fresh_moments
from protofed.client.update import client_update
from protofed.config import RunConfig
from protofed.errors import ConfigError
from protofed.federation import preparation
from protofed.federation.preparation import (
    STRENGTHS,
    Prepared,
    base_devices,
    base_windows,
    brief_base_windows,
    first_library,
    fit_codec,
    nobody_yet,
    prepare,
    teach_base_devices,
)
from protofed.inference.end import validation_questions, variant_losses
from protofed.inference.online import online_inference
from protofed.methods.protofed_rules import local_rule
from protofed.privacy.draws import event_keys, normal, uniform
from protofed.progress import silent
from protofed.seeds import user_keys
from protofed.slices.histories import queries_at
from protofed.slices.windows import NO_TARGET, Windows, take, trimmed

CPU = torch.device("cpu")


def settings(**changes: object) -> RunConfig:
    return tiny_config(privacy__sampling_rate=0.5, **changes)


@cache
def prepared(**changes: object) -> Prepared:
    """`prepare` with a query encoder trained for 5 steps instead of 500."""
    config = settings(**changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "CodecTraining", lambda: CodecTraining(steps=5))
        return prepare(config, tiny_stream().slice_(0), warmed_up()[0], local_rule(config), silent)


def devices_after(steps: int, **changes: object) -> tuple[DeviceState, float]:
    config = settings(protofed__base_steps=steps, **changes)
    return teach_base_devices(config, tiny_stream().slice_(0), warmed_up()[0], local_rule(config), silent)


def base_users() -> np.ndarray:
    base = tiny_stream().slice_(0)
    return np.unique(base.past.users[base.train_positions])


def test_base_users_share_one_first_prompt_and_nobody_else_has_one():
    state, _ = devices_after(0)
    users = torch.from_numpy(base_users().astype(np.int64))
    first = (0.02 * normal(0, "first prompt", torch.zeros(1, dtype=torch.int64), 0, (2, 16))[0]).float()
    assert torch.equal(state.prompts.long[users], first.expand(len(users), -1, -1))
    others = torch.ones(len(state), dtype=torch.bool).index_fill(0, users, False)
    assert len(state) == tiny_stream().slice_(0).past.n_users
    assert state.met.tolist() == (~others).tolist()
    assert not state.prompts.long[others].any()
    assert not state.prompts.short.any()


def test_base_devices_are_keyed_by_their_users_ids():
    ids = tiny_log().user_ids.to_pylist()
    state, _ = devices_after(0)
    assert state.users.tolist() == user_keys(ids)[: len(state)].tolist()


def test_base_devices_remember_their_train_part_and_have_nothing_to_upload_yet():
    base = tiny_stream().slice_(0)
    state = prepared().devices
    for u in range(len(state)):
        mine = [int(p) for p in base.train_positions if base.past.users[p] == u]
        memory = select(state, torch.tensor([u])).memory
        assert memory.items.tolist() == base.past.items[base.past.place[mine]].tolist()
        assert memory.times.tolist() == base.times[mine].tolist()
    assert not state.contributes.any()
    assert not state.active.any()
    assert state.moments is None


def test_from_that_one_prompt_every_base_user_goes_its_own_way():
    users = base_users()
    prompts, first = (devices_after(steps)[0].prompts.long[users] for steps in (4, 0))
    assert float((prompts - first).flatten(1).norm(dim=1).min()) > 0
    assert float((prompts - first).abs().max()) <= 4 * 5e-3 * 1.01  # a step of AdamW is hardly longer than its rate
    assert len(torch.unique(prompts.flatten(1), dim=0)) == len(users)


def test_own_rows_are_of_items_met_in_the_train_part_and_start_at_the_public_ones():
    base, (state, boost) = tiny_stream().slice_(0), devices_after(4, protofed__row_rate=0.0)
    items = base.past.items[base.past.place[base.train_positions]]
    met = sorted(set(zip(base.past.users[base.train_positions].tolist(), items.tolist(), strict=True)))
    assert list(zip(state.rows.clients.tolist(), state.rows.items.tolist(), strict=True)) == met
    assert torch.equal(state.rows.rows, warmed_up()[0].embed(state.rows.items))
    assert boost == 0


@pytest.mark.parametrize("prompt_history", [0, 4])
def test_base_devices_do_not_depend_on_the_chunk(prompt_history):
    whole, small = (
        devices_after(3, protofed__chunk=chunk, protofed__prompt_history=prompt_history) for chunk in (1_000, 7)
    )
    for name in ("long", "short"):
        torch.testing.assert_close(getattr(whole[0].prompts, name), getattr(small[0].prompts, name), atol=1e-5, rtol=0)
    torch.testing.assert_close(whole[0].rows.rows, small[0].rows.rows, atol=1e-5, rtol=0)
    torch.testing.assert_close(whole[0].taste, small[0].taste, atol=1e-5, rtol=0)
    assert whole[1] == pytest.approx(small[1], abs=1e-6)


def slow_windows(u: int, key: Tensor, *, purpose: str, length: int, stride: int, newest: int) -> list[tuple[int, list]]:
    """One base user's newest windows: each ends with the user's event of that number, with these targets."""
    base = tiny_stream().slice_(0)
    mine = [int(p) for p in base.train_positions if base.past.users[p] == u]
    shift = int(uniform(0, purpose, key[None], 0).item() * stride)
    groups: dict[int, list[int]] = {}
    for n in range(len(mine)):
        groups.setdefault((n + shift) // stride, []).append(n)
    items = base.past.items[base.past.place[mine]].tolist()
    return [(group[-1], [items[n] for n in group]) for group in groups.values()][-newest:]


def told(windows: Windows, u: int) -> list[tuple[int, list[int]]]:
    mine = (windows.users == u).nonzero()[:, 0].tolist()
    real = [[target for target in windows.targets[w].tolist() if target != NO_TARGET] for w in mine]
    return list(zip(windows.newest[mine].tolist(), real, strict=True))


@pytest.mark.parametrize("prompt_history", [0, 5])
def test_base_users_learn_from_their_newest_windows_cut_by_their_keys(prompt_history):
    config = settings(protofed__prompt_history=prompt_history, protofed__base_windows=2)
    state = base_devices(config, tiny_stream().slice_(0), CPU)
    windows, brief = base_windows(config, state), brief_base_windows(config, state)
    assert (brief is None) == (prompt_history == 0)
    for u in range(len(state)):
        key, whole = state.users[u], {"purpose": "base windows", "length": LENGTH, "stride": 6, "newest": 2}
        assert told(windows, u) == slow_windows(u, key, **whole)
        if brief is not None:  # two windows of 6 targets are three of 4
            short = {"purpose": "brief base windows", "length": 5, "stride": 4, "newest": 3}
            assert told(brief, u) == slow_windows(u, key, **short)
    assert windows.tokens.shape[1] == LENGTH
    assert brief is None or brief.tokens.shape[1] == 5


def test_a_base_user_learns_what_it_would_alone():
    """Two users' own steps, one after the other, with negatives of their own events and rates that fall."""
    config, backbone, steps = settings(protofed__base_steps=3), warmed_up()[0], 3
    base, (taught, _) = tiny_stream().slice_(0), devices_after(3)
    model = nobody_yet(config, backbone, local_rule(config), base.n_train_items)
    start, whole = base_devices(config, base, CPU), devices_after(0)[0]
    windows = base_windows(config, start)
    for u in (int(base_users()[0]), int(base_users()[-1])):
        me = torch.tensor([u])
        state = with_fresh_moments(replace(select(whole, me), active=torch.ones(1, dtype=torch.bool)))
        mine = trimmed(take(windows, (windows.users == u).nonzero()[:, 0]))
        mine = replace(mine, users=torch.zeros_like(mine.users))
        lesson = Lesson(mine, model.v, torch.zeros(1), torch.zeros(1))
        for step in range(steps):
            falling = 0.5 * (1 + math.cos(math.pi * step / steps))
            rule = replace(model.rule, eta_l=falling * model.rule.eta_l, eta_r=falling * model.rule.eta_r)
            keys = [event_keys(start.users[me], number[None]) for number in mine.newest]
            numbers = torch.cat([uniform(0, "client negatives", key, step, (rule.negatives,)) for key in keys])
            state, _ = client_update(model, state, lesson, (numbers * base.n_train_items).long(), rule)
        learned = select(taught, me)
        torch.testing.assert_close(learned.prompts.long, state.prompts.long, atol=1e-5, rtol=0)
        torch.testing.assert_close(learned.rows.rows, state.rows.rows, atol=1e-5, rtol=0)
        assert not torch.equal(learned.rows.rows, select(whole, me).rows.rows)


def test_a_base_users_taste_is_the_direction_of_what_its_windows_ask_with_the_rows_it_starts_with():
    config, backbone = settings(), warmed_up()[0]
    state, boost = devices_after(4)
    start = devices_after(0)[0]
    windows = base_windows(config, start)
    for u in base_users()[::9].tolist():
        mine = take(windows, (windows.users == u).nonzero()[:, 0])
        rows = subset(start.rows, torch.tensor([u]))[0]
        total = torch.zeros(16)
        for w in range(len(mine)):
            one = take(mine, torch.tensor([w]))
            embed = own_embed(rows, torch.zeros(1, dtype=torch.int64), backbone.embed)
            with torch.no_grad():
                hidden = hidden_at(backbone.hidden(one.tokens, None, embed), one.sources)[0]
            total += hidden[one.targets[0] != NO_TARGET].sum(0)
        torch.testing.assert_close(state.taste[u], total / total.norm(), atol=1e-5, rtol=0)
    assert boost == pytest.approx(config.protofed.met_boost * met_boost(start.rows, state.rows, state.taste))
    assert boost != 0


@pytest.mark.parametrize(
    ("n", "kind", "expected"),
    [(1_999, "auto", LinearCodec), (2_000, "auto", MlpCodec), (2_000, "linear", LinearCodec), (50, "mlp", MlpCodec)],
)
def test_the_codec_is_linear_below_2000_base_users_unless_told(monkeypatch, n, kind, expected):
    monkeypatch.setattr(preparation, "train_codec", lambda codec, *_, **__: (codec, CodecFit((), 0.0, 0.0)))
    prompts = torch.randn(n, 2, 16, generator=Generator().manual_seed(0))
    windows = base_windows(settings(), base_devices(settings(), tiny_stream().slice_(0), CPU))
    assert type(fit_codec(settings(protofed__codec=kind), warmed_up()[0], prompts, windows)) is expected


def test_the_linear_codec_explains_as_much_of_the_prompts_as_principal_components_can():
    made = prepared()
    prompts = made.devices.prompts.long[made.devices.met].flatten(1).double().numpy()
    centred = prompts - prompts.mean(0)
    best = np.linalg.svd(centred, compute_uv=False)[:16] ** 2
    codec = made.encoders.codec
    assert isinstance(codec, LinearCodec)
    seen = (centred @ codec.rows.double().numpy().T) ** 2
    assert seen.sum() == pytest.approx(best.sum(), rel=1e-4)


def slow_drifts(made: Prepared) -> tuple[dict[int, list[float]], dict[int, int]]:
    """Each base user's movements between the eight parts of the block, from one query per event."""
    base, backbone = tiny_stream().slice_(0), warmed_up()[0]
    mean: dict[int, Tensor] = {}
    steps: dict[int, list[float]] = {}
    periods: dict[int, int] = {}
    for part in np.array_split(base.train_positions, 8):
        asked = queries_at(base.past, part, length=LENGTH, slice_index=0, n_items=1, times=base.times)
        h = made.encoders.g(backbone.last_hidden(asked.tokens))
        for user in sorted(set(asked.users.tolist())):
            now = unit(h[asked.users == user].sum(0))
            after = now if user not in mean else 0.9 * mean[user] + 0.1 * now
            if user in mean:
                steps.setdefault(user, []).append(float((after - mean[user]).norm()))
            mean[user], periods[user] = after, periods.get(user, 0) + 1
    return steps, periods


def test_gate_and_kappa_are_fitted_to_the_drifts_of_base_users():
    changes = {"training__stride": 1, "protofed__ablate": "own-rows"}  # one target a window, public rows only
    made = prepared(**changes)
    steps, periods = slow_drifts(made)
    last = np.array([moves[-1] for moves in steps.values()])
    centre = np.median(last)
    gate = made.encoders.gate
    assert float(gate.centre) == pytest.approx(centre, rel=1e-4)
    assert float(gate.spread) == pytest.approx(np.median(np.abs(last - centre)), rel=1e-3)
    assert (float(gate.slope), float(gate.bias)) == (1.0, -1.0)
    means = sorted(sum(moves) / len(moves) for moves in steps.values())
    assert made.encoders.kappa == pytest.approx(math.log(10) / means[int(0.9 * len(means))], rel=1e-4)
    for user, count in periods.items():
        assert made.devices.drift.periods[user] == count
        assert float(made.devices.drift.total[user]) == pytest.approx(sum(steps.get(user, [])), rel=1e-3, abs=1e-6)


def test_the_literal_gate_is_not_fitted():
    gate = prepared(protofed__mode="literal", protofed__prototypes=8).encoders.gate
    assert [float(x) for x in (gate.centre, gate.spread, gate.slope, gate.bias)] == [0.0, 1.0, 1.0, 0.0]


def apart(v: Tensor) -> float:
    return min(float((v[i] - v[j]).norm()) for i in range(len(v)) for j in range(i))


def test_prototypes_start_at_least_the_margin_apart_and_as_many_as_the_cohort_feeds():
    library = prepared().library
    assert library.n_prototypes == 8  # half of 64 clients upload: 16 prototypes would get two uploads each
    assert apart(library.v) >= 0.5 - 1e-3
    torch.testing.assert_close(library.v.norm(dim=1), torch.ones(8))
    assert library.ema_counts.tolist() == [4.0] * 8
    torch.testing.assert_close(library.ema_sums, 4 * library.v)
    assert library.version == 0


def test_prototypes_of_equal_users_are_kept_apart_and_a_margin_of_0_leaves_them():
    z = unit(torch.ones(1, 16)) + 0.01 * torch.randn(64, 16, generator=Generator().manual_seed(0))
    assert apart(first_library(settings(), 64, unit(z)).v) >= 0.5 - 1e-3
    assert apart(first_library(settings(protofed__margin=0.0), 64, unit(z)).v) < 0.2


def test_more_prototypes_than_uploads_are_one_clear_line_in_the_reference_mode():
    z = unit(torch.randn(64, 16, generator=Generator().manual_seed(0)))
    line = r"^33 prototypes are more than the 32 uploads a round expects \(rate 0.5 of 64 clients\); take K = 8 or .*$"
    with pytest.raises(ConfigError, match=line):
        first_library(settings(protofed__prototypes=33), 64, z)
    assert first_library(settings(protofed__prototypes=32), 64, z).n_prototypes == 32
    assert first_library(settings(protofed__prototypes=33, protofed__mode="nodp"), 64, z).n_prototypes == 33


def test_the_prior_is_the_mean_gain_of_the_base_blocks_validation_events_and_users_keep_their_own():
    made, config = prepared(), settings()
    base, backbone = tiny_stream().slice_(0), warmed_up()[0]
    model = made.model(backbone, local_rule(config), base.n_train_items)
    losses, users = variant_losses(model, made.devices, validation_questions(base, LENGTH, CPU))
    gains = (losses - losses[:, :1]).double()
    assert made.prior.tolist() == pytest.approx([5 * float(gain) for gain in gains.mean(0)], rel=1e-4)
    for user in range(len(made.devices)):
        mine = gains[users == user].sum(0)
        assert made.devices.losses[user].tolist() == pytest.approx(mine.tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("ablate", ["", "own-rows"])
def test_base_users_use_what_their_own_evidence_and_the_prior_say(ablate):
    changes = {"protofed__ablate": ablate} if ablate else {}
    made, rule = prepared(**changes), local_rule(settings(**changes))
    use_prompt, use_rows = choose_variants(made.devices.losses, made.prior, rule.allowed)
    assert torch.equal(made.devices.use_prompt, use_prompt)
    assert torch.equal(made.devices.use_rows, use_rows)
    assert bool(use_rows.any()) != bool(ablate)


def test_the_strength_of_what_was_just_met_has_the_best_validation_ndcg_of_all_that_are_tried():
    made, config = prepared(protofed__at_once=True), settings()
    base, backbone = tiny_stream().slice_(0), warmed_up()[0]
    model = made.model(backbone, local_rule(config), base.n_train_items)
    asked = base.validation
    answers = asked.positives.tolist()

    def rank(row: Tensor, item: int) -> int:
        return sum(score >= row[item] for score in row.tolist())

    queries = base.queries(np.arange(len(asked)), LENGTH)
    bare = replace(made.devices, rows=no_rows(16))
    tried = {}
    for strength in STRENGTHS:  # all questions at once, among all items, by the function that ranks
        scores = online_inference(replace(model, just_met=strength), bare, queries, variant=(False, True))
        gains = [
            1 / math.log2(r + 1) if (r := rank(row, i)) <= 10 else 0.0 for row, i in zip(scores, answers, strict=True)
        ]
        tried[strength] = math.fsum(gains)
    best = max(tried.values())
    assert made.just_met == min(strength for strength, worth in tried.items() if worth > best - 1e-9)
    assert made.just_met > 0
    assert len(set(tried.values())) > 3
    assert prepared().just_met == 0.0
    assert prepared(protofed__at_once=True, protofed__ablate="own-rows").just_met == 0.0


def test_without_acceptance_there_is_no_verdict():
    made = prepared(protofed__ablate="acceptance")
    assert not made.prior.any()
    assert not made.devices.losses.any()


def test_a_base_user_with_one_event_has_a_prompt_and_no_drift():
    base = tiny_stream().slice_(0)
    counts = np.bincount(base.past.users[base.train_positions], minlength=base.past.n_users)
    user = int(counts.argmax())
    first = int(np.flatnonzero(base.past.users == user)[0])
    cut = replace(base, bounds=(replace(base.bounds[0], train_end=first + 1),))  # ends with the user's first event
    config = settings(protofed__ablate="acceptance", protofed__mode="nodp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "CodecTraining", lambda: CodecTraining(steps=3))
        made = prepare(config, cut, warmed_up()[0], local_rule(config), silent)
    assert bool(made.devices.met[user])
    assert made.devices.drift.periods[user] == 1
    assert float(made.devices.drift.total[user]) == 0
    assert made.devices.prompts.long[user].isfinite().all()
    rows = made.devices.rows
    assert rows.items[rows.clients == user].tolist() == [int(base.past.items[base.past.place[first]])]


def test_a_short_context_is_read_at_the_same_targets():
    base = tiny_stream().slice_(0)
    configs = [settings(protofed__base_windows=10_000, protofed__base_history=tokens) for tokens in (0, 3)]
    whole, short = (base_windows(config, base_devices(config, base, CPU)) for config in configs)
    assert (whole.tokens.shape[1], short.tokens.shape[1]) == (LENGTH, 3)
    assert torch.equal(whole.users.unique(), short.users.unique())
    for windows in (whole, short):
        targets = windows.targets[windows.targets >= 0]
        items = base.past.items[base.past.place[base.train_positions]]
        assert torch.equal(targets.sort().values, torch.from_numpy(items).sort().values)
