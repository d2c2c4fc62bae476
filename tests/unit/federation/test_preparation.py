"""What the base block teaches: one first prompt for all, the codec by the number of users, the gate by their drifts."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Generator, Tensor
from worlds import LENGTH, tiny_config, tiny_stream, warmed_up

from protofed.client.codec import CodecFit, CodecTraining, LinearCodec, MlpCodec, unit
from protofed.client.own_rows import no_rows
from protofed.config import RunConfig
from protofed.errors import ConfigError
from protofed.federation import preparation
from protofed.federation.acceptance import variant_losses
from protofed.federation.lessons import ClientData
from protofed.federation.preparation import (
    STRENGTHS,
    Prepared,
    base_data,
    base_devices,
    everybody_uses,
    first_library,
    fitted_codec,
    prepare,
)
from protofed.federation.simulator import broadcast
from protofed.federation.table import new_table
from protofed.inference.online import forced, online_inference
from protofed.methods.protofed_rules import local_rule
from protofed.privacy.draws import normal
from protofed.progress import silent
from protofed.slices.histories import queries_at


def settings(**changes: object) -> RunConfig:
    return tiny_config(privacy__sampling_rate=0.5, **changes)


@cache
def prepared(**changes: object) -> Prepared:
    """`prepare` with a query encoder trained for 5 steps instead of 500."""
    config = settings(**changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "CodecTraining", lambda: CodecTraining(steps=5))
        return prepare(config, tiny_stream().slice_(0), warmed_up()[0], local_rule(config), silent)


def devices_after(steps: int, **changes: object) -> tuple:
    config = settings(protofed__base_steps=steps, **changes)
    base = tiny_stream().slice_(0)
    data = base_data(config, base)
    return base, data, *base_devices(config, base, warmed_up()[0], data, local_rule(config), silent)


def test_base_users_share_one_first_prompt_and_nobody_else_has_one():
    base, data, table, _, _ = devices_after(0)
    users = np.unique(base.past.users[base.train_positions])
    assert data.users.tolist() == users.tolist()
    first = 0.02 * normal(0, "first prompt", torch.zeros(1, dtype=torch.int64), 0, (2, 16))[0].float()
    assert torch.equal(table.long[data.users], first.expand(len(users), -1, -1))
    others = torch.ones(len(table), dtype=torch.bool).index_fill(0, data.users, False)
    assert table.met.tolist() == (~others).tolist()
    assert not table.long[others].any()
    assert not table.short.any()


def test_from_that_one_prompt_every_base_user_goes_its_own_way():
    _, data, table, _, _ = devices_after(4)
    first = devices_after(0)[2].long[data.users]
    prompts = table.long[data.users]
    assert float((prompts - first).flatten(1).norm(dim=1).min()) > 0
    assert float((prompts - first).abs().max()) <= 4 * 5e-3 * 1.01  # a step of AdamW is hardly longer than its rate
    assert len(torch.unique(prompts.flatten(1), dim=0)) == len(data)


def test_own_rows_are_of_items_met_in_the_train_part_and_start_at_the_public_ones():
    base, _, _, rows, boost = devices_after(4, protofed__row_rate=0.0)
    items = base.past.items[base.past.place[base.train_positions]]
    met = sorted(set(zip(base.past.users[base.train_positions].tolist(), items.tolist(), strict=True)))
    assert list(zip(rows.clients.tolist(), rows.items.tolist(), strict=True)) == met
    assert torch.equal(rows.rows, warmed_up()[0].embed(rows.items))
    assert boost == 0


def test_base_devices_do_not_depend_on_the_chunk():
    whole, small = devices_after(3), devices_after(3, protofed__chunk=7)
    torch.testing.assert_close(whole[2].long, small[2].long, atol=1e-5, rtol=0)
    torch.testing.assert_close(whole[3].rows, small[3].rows, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("n", "kind", "expected"),
    [(1_999, "auto", LinearCodec), (2_000, "auto", MlpCodec), (2_000, "linear", LinearCodec), (50, "mlp", MlpCodec)],
)
def test_the_codec_is_linear_below_2000_base_users_unless_told(monkeypatch, n, kind, expected):
    monkeypatch.setattr(preparation, "train_codec", lambda codec, *_, **__: (codec, CodecFit((), 0.0, 0.0)))
    table = new_table(n, 2, 16, 16)
    table.long.copy_(torch.randn(n, 2, 16, generator=Generator().manual_seed(0)))
    windows = base_data(settings(), tiny_stream().slice_(0)).windows
    data = ClientData(torch.arange(n), windows, torch.arange(n + 1))
    assert type(fitted_codec(settings(protofed__codec=kind), warmed_up()[0], table, data)) is expected


def test_the_linear_codec_explains_as_much_of_the_prompts_as_principal_components_can():
    made = prepared()
    prompts = made.table.long[made.table.met].flatten(1).double().numpy()
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
        assert made.table.periods[user] == count
        assert float(made.table.total[user]) == pytest.approx(sum(steps.get(user, [])), rel=1e-3, abs=1e-6)


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
    shared = broadcast(backbone, made.encoders.codec, made.library.v)
    devices = everybody_uses(made.table, made.rows, backbone.items.device, 0.0)
    losses, users = variant_losses(
        shared, made.encoders.g, made.encoders.gate, local_rule(config), devices, base, LENGTH
    )
    gains = (losses - losses[:, :1]).double()
    assert made.prior.tolist() == pytest.approx([5 * float(gain) for gain in gains.mean(0)], rel=1e-4)
    for user in range(len(made.table)):
        mine = gains[users == user].sum(0)
        assert made.table.losses[user].tolist() == pytest.approx(mine.tolist(), rel=1e-4, abs=1e-5)


def test_the_strength_of_what_was_just_met_has_the_best_validation_ndcg_of_all_that_are_tried():
    made, config = prepared(protofed__at_once=True), settings()
    base, backbone = tiny_stream().slice_(0), warmed_up()[0]
    shared = broadcast(backbone, made.encoders.codec, made.library.v)
    asked, rule = base.validation, local_rule(config)
    answers = asked.positives.tolist()

    def rank(row: Tensor, item: int) -> int:
        return sum(score >= row[item] for score in row.tolist())

    queries = base.queries(np.arange(len(asked)), LENGTH)
    tried = {}
    for strength in STRENGTHS:  # all questions at once, among all items, by the function that ranks
        devices = everybody_uses(made.table, no_rows(16), backbone.items.device, strength)
        bare = forced(devices, prompt=False, rows=True)
        scores = online_inference(shared, made.encoders.g, made.encoders.gate, rule, bare, queries)
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
    assert not made.table.losses.any()


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
    assert bool(made.table.met[user])
    assert made.table.periods[user] == 1
    assert float(made.table.total[user]) == 0
    assert made.table.long[user].isfinite().all()
    assert made.rows.items[made.rows.clients == user].tolist() == [int(base.past.items[base.past.place[first]])]


def test_a_short_context_is_read_at_the_same_targets():
    base = tiny_stream().slice_(0)
    whole, short = (
        base_data(settings(protofed__base_windows=10_000, protofed__base_history=tokens), base) for tokens in (0, 3)
    )
    assert (whole.windows.tokens.shape[1], short.windows.tokens.shape[1]) == (LENGTH, 3)
    assert torch.equal(whole.users, short.users)
    for data in (whole, short):
        targets = data.windows.targets[data.windows.targets >= 0]
        items = base.past.items[base.past.place[base.train_positions]]
        assert torch.equal(targets.sort().values, torch.from_numpy(items).sort().values)
