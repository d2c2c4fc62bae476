"""What leaves a device, against sums by hand for every form; alone or in a stack it is the same to the bit."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cohorts import D, K, cohort, devices_with, drawn, model_with
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Generator, Tensor

from protofed.client.codec import unit
from protofed.client.state import DeviceState, select
from protofed.client.upload import Upload, embed_prompts, make_upload
from protofed.privacy.draws import SeededDraws, SystemDraws, normal, uniform
from protofed.privacy.mechanism import discrete_gaussian
from protofed.privacy.upload import NOTHING, RoundRule, UploadRule

SEED, ROUND, VERSION = 9, 5, 3
UPLOAD = UploadRule(K, D, clip_radius=0.8, count_weight=0.25)
CENTRAL = RoundRule(UPLOAD, 1.0)
SECURE = RoundRule(UPLOAD, 1.3, "secure-aggregation", least=5)
LOCAL = RoundRule(UPLOAD, 1.3, "local")
COMPACT = RoundRule(UPLOAD, 1.3, "local", "geometric-median")
COMPACT_PAIR = RoundRule(UPLOAD, 1.3, "local", "barycenter")
PAIR = RoundRule(UPLOAD, 0.0, aggregator="barycenter")
RULES = {
    "central": CENTRAL,
    "central pair": PAIR,
    "integers": SECURE,
    "noised rows": LOCAL,
    "noised point": COMPACT,
    "noised pair": COMPACT_PAIR,
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
V = unit(drawn(K, D, seed=4))


def devices(n: int, rule: RoundRule, *, silent: tuple[int, ...] = (), seed: int = 0) -> DeviceState:
    """Embeddings of lengths between a half and two; the silent ones have learned from nothing."""
    users, z = cohort(n, seed, points=rule.points)
    contributes = torch.ones(n, dtype=torch.bool)
    contributes[list(silent)] = False
    return devices_with(users, z * torch.linspace(0.5, 2.0, n)[:, None, None], contributes)


def sent_by(state: DeviceState, rule: RoundRule, round_: int = ROUND) -> Upload:
    return make_upload(model_with(V, VERSION), state, rule, SeededDraws(SEED), round_)


def points_of(state: DeviceState, rule: RoundRule) -> list[list[Tensor]]:
    """phi of each device's long prompt, and of long and short together: here the prompts themselves."""
    prompts = state.prompts
    both = [prompts.long[:, 0].double(), (prompts.long + prompts.short)[:, 0].double()]
    return [[point[u] for point in both[: rule.points]] for u in range(len(state))]


def clipped(z: Tensor) -> Tensor:
    return z * min(1.0, 0.8 / float(z.norm()))


def nearest_by_hand(z: Tensor) -> int:
    return min(range(K), key=lambda k: float((z - V[k].double()).norm()))


def rounded(x: Tensor, reach: float, up: Tensor) -> Tensor:
    """Up or down to a 127th of the reach, by a draw."""
    return (x / reach * 127 + up).floor().clamp(-127, 127)


@pytest.mark.parametrize("rule", [CENTRAL, PAIR], ids=["central", "central pair"])
def test_a_central_upload_is_clipped_rounded_and_named_by_its_clean_embedding(rule):
    state = devices(12, rule)
    upload = sent_by(state, rule)
    up = uniform(SEED, "quantise", state.users, ROUND, (rule.points, D))
    for u, points in enumerate(points_of(state, rule)):
        assert int(upload.block[u]) == nearest_by_hand(points[0])
        for p, z in enumerate(points):
            assert (upload.codes[u, p].double() - rounded(clipped(z), 0.8, up[u, p])).abs().max() <= 1e-6
    assert upload.codes.dtype == torch.int8
    assert (upload.round_, upload.version, len(upload)) == (ROUND, VERSION, 12)


def one_row(z: Tensor) -> Tensor:
    """one-hot(prototype) x [clip(z); c]."""
    whole = torch.zeros(K, D + 1, dtype=torch.float64)
    whole[nearest_by_hand(z)] = torch.cat([clipped(z), torch.tensor([0.25], dtype=torch.float64)])
    return whole


def shares(users: Tensor, rule: RoundRule, round_: int = ROUND) -> Tensor:
    """A device's part of the noise: 4 devices together reach multiplier times sensitivity, in steps of 2^-16."""
    std = rule.noise_multiplier * math.hypot(0.8, 0.25) * 65_536 / math.sqrt(rule.least - 1)
    return discrete_gaussian(uniform(SEED, "noise share", users, round_, (K, D + 1)), std)


def test_a_secure_upload_is_the_row_in_integers_plus_a_share_of_noise_modulo_two_to_the_32():
    state = devices(12, SECURE)
    upload = sent_by(state, SECURE)
    noise = shares(state.users, SECURE)
    for u, (z,) in enumerate(points_of(state, SECURE)):
        by_hand = (one_row(z) * 65_536).trunc().long() + noise[u]
        apart = (upload.codes[u] - by_hand) % 2**32
        assert torch.minimum(apart, 2**32 - apart).max() <= 1  # a length on the edge of a step
        assert (by_hand < 0).any()
    assert upload.codes.dtype == torch.int64
    assert 0 <= int(upload.codes.min()) <= int(upload.codes.max()) < 2**32
    assert upload.block.tolist() == [NOTHING] * 12  # the index would tell too much


LOCAL_STD = 1.3 * max(2 * 0.8, math.sqrt(2) * math.hypot(0.8, 0.25))


def test_a_local_upload_is_the_row_and_noise_in_every_row_and_then_rounded():
    state = devices(12, LOCAL)
    upload = sent_by(state, LOCAL)
    noise = normal(SEED, "local noise", state.users, ROUND, (K, D + 1))
    up = uniform(SEED, "quantise", state.users, ROUND, (K, D + 1))
    for u, (z,) in enumerate(points_of(state, LOCAL)):
        by_hand = rounded(one_row(z) + LOCAL_STD * noise[u], 0.8 + 4 * LOCAL_STD, up[u])
        assert (upload.codes[u].double() - by_hand).abs().max() <= 1e-6
    assert upload.codes.dtype == torch.int8
    assert upload.block.tolist() == [NOTHING] * 12


@pytest.mark.parametrize("rule", [COMPACT, COMPACT_PAIR], ids=["one point", "two points"])
def test_a_compact_upload_is_each_point_with_noise_as_if_it_cost_the_whole_budget_of_its_share(rule):
    state = devices(12, rule)
    upload = sent_by(state, rule)
    n = rule.points
    noise = normal(SEED, "local noise", state.users, ROUND, (n, D))
    up = uniform(SEED, "quantise", state.users, ROUND, (n, D))
    std = LOCAL_STD * math.sqrt(n)
    for u, points in enumerate(points_of(state, rule)):
        for p, z in enumerate(points):
            by_hand = rounded(clipped(z) + std * noise[u, p], 0.8 + 4 * std, up[u, p])
            apart = (upload.codes[u, p].double() - by_hand).abs()
            assert apart.max() <= 1  # the noised number is a float32: it may fall on the other side of a step
            assert (apart > 0).sum() <= 1
    assert upload.block.tolist() == [NOTHING] * 12


def same(one: Upload, other: Upload) -> bool:
    columns = ("tokens", "block", "codes")
    head = (one.round_, one.version) == (other.round_, other.version)
    return head and all(torch.equal(getattr(one, c), getattr(other, c)) for c in columns)


def part_of(upload: Upload, places: Tensor) -> Upload:
    return replace(upload, tokens=upload.tokens[places], block=upload.block[places], codes=upload.codes[places])


@every_rule
def test_a_device_alone_sends_what_it_sends_in_a_stack_to_the_bit(rule):
    state = devices(9, rule, silent=(2, 7))
    together = sent_by(state, rule)
    for u in range(9):
        assert same(sent_by(select(state, torch.tensor([u])), rule), part_of(together, torch.tensor([u])))


@settings(max_examples=10)
@given(st.integers(1, 20), st.integers(0, 2**32 - 1), st.sampled_from(list(RULES)))
def test_who_else_is_asked_changes_no_bit_of_an_upload(n, seed, name):
    rule = RULES[name]
    state = devices(n, rule, seed=seed)
    some = (torch.rand(n, generator=Generator().manual_seed(seed)) < 0.5).nonzero()[:, 0]
    assert same(sent_by(select(state, some), rule), part_of(sent_by(state, rule), some))


@pytest.mark.parametrize("rule", [CENTRAL, PAIR], ids=["central", "central pair"])
def test_a_device_that_has_learned_from_nothing_names_no_prototype_where_the_server_adds_the_noise(rule):
    state = devices(6, rule, silent=(1, 4))
    upload, everybody = sent_by(state, rule), sent_by(devices(6, rule), rule)
    speaks = torch.tensor([0, 2, 3, 5])
    assert upload.block[[1, 4]].tolist() == [NOTHING, NOTHING]
    assert same(part_of(upload, speaks), part_of(everybody, speaks))


def test_a_device_that_has_learned_from_nothing_still_sends_exactly_its_share_of_noise():
    quiet, loud = sent_by(devices(6, SECURE, silent=(1, 4)), SECURE), sent_by(devices(6, SECURE), SECURE)
    noise = shares(devices(6, SECURE).users, SECURE)
    others = quiet.codes.sum(0) - quiet.codes[[0, 2, 3, 5]].sum(0)
    assert torch.equal(others % 2**32, noise[[1, 4]].sum(0) % 2**32)
    assert torch.equal(quiet.codes[[1, 4]], noise[[1, 4]] % 2**32)
    assert torch.equal(quiet.codes[[0, 2, 3, 5]], loud.codes[[0, 2, 3, 5]])
    assert not torch.equal(quiet.codes[1], loud.codes[1])


def test_a_device_that_has_learned_from_nothing_sends_nothing_but_noise_under_local_trust():
    for rule in (LOCAL, COMPACT, COMPACT_PAIR):
        state = devices(6, rule, silent=(1, 4))
        shape = (K, D + 1) if rule is LOCAL else (rule.points, D)
        std = LOCAL_STD * (1 if rule is LOCAL else math.sqrt(rule.points))
        noise = normal(SEED, "local noise", state.users, ROUND, shape)
        up = uniform(SEED, "quantise", state.users, ROUND, shape)
        by_hand = rounded(std * noise, 0.8 + 4 * std, up)
        apart = (sent_by(state, rule).codes[[1, 4]].double() - by_hand[[1, 4]]).abs()
        assert apart.max() <= (0 if rule is LOCAL else 1)  # compact uploads noise in float32
        assert (apart > 0).sum() <= 1


@every_rule
def test_what_a_silent_device_holds_cannot_be_told_from_its_upload(rule):
    state = devices(6, rule, silent=(1, 4))
    other = replace(state.prompts, long=state.prompts.long.index_fill(0, torch.tensor([1, 4]), 0.3))
    one, two = sent_by(state, rule), sent_by(replace(state, prompts=other), rule)
    if rule.form != "points":
        assert same(one, two)
    assert torch.equal(one.block, two.block)


@every_rule
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_a_broken_embedding_says_nothing_and_disturbs_nobody(rule, bad):
    state = devices(6, rule)
    long = state.prompts.long.clone()
    long[2, 0, 3] = bad
    upload, fine = sent_by(replace(state, prompts=replace(state.prompts, long=long)), rule), sent_by(state, rule)
    others = torch.tensor([0, 1, 3, 4, 5])
    assert same(part_of(upload, others), part_of(fine, others))
    silent = sent_by(devices(6, rule, silent=(2,)), rule)
    if math.isfinite(bad):  # huge but a number: clipped like any other
        return
    assert torch.equal(upload.block, silent.block)
    if rule.form != "points":
        assert torch.equal(upload.codes[2], silent.codes[2])


def test_a_second_point_that_is_broken_silences_the_first_as_well():
    state = devices(6, PAIR)
    short = state.prompts.short.clone()
    short[3, 0, 1] = math.nan
    upload = sent_by(replace(state, prompts=replace(state.prompts, short=short)), PAIR)
    assert (upload.block == NOTHING).tolist() == [False, False, False, True, False, False]


def test_the_barycenter_takes_the_long_prompt_and_long_and_short_together_and_all_others_the_long_one():
    state = devices(5, PAIR)
    z = embed_prompts(model_with(V), state, PAIR)
    assert torch.equal(z[:, 0], state.prompts.long[:, 0])
    assert torch.equal(z[:, 1], (state.prompts.long + state.prompts.short)[:, 0])
    assert torch.equal(embed_prompts(model_with(V), state, CENTRAL), z[:, :1])


def test_nobody_asked_is_an_empty_upload():
    for rule in RULES.values():
        upload = sent_by(select(devices(3, rule), torch.zeros(0, dtype=torch.int64)), rule)
        assert len(upload) == len(upload.block) == len(upload.codes) == 0


def test_making_an_upload_changes_nothing_on_the_device():
    for rule in RULES.values():
        state = devices(4, rule)
        before = [x.clone() for x in (state.users, state.prompts.long, state.prompts.short, state.contributes)]
        sent_by(state, rule)
        now = (state.users, state.prompts.long, state.prompts.short, state.contributes)
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


USERS = cohort(400)[0]


def test_tokens_differ_by_user_by_round_and_by_seed():
    tokens = [SeededDraws(seed).tokens(USERS, round_) for seed in (0, 1) for round_ in range(25)]
    assert len(torch.cat(tokens).unique()) == 50 * 400
    assert torch.equal(tokens[3], SeededDraws(0).tokens(USERS, 3))


def bits(words: Tensor) -> np.ndarray:
    """(n, 64) of int64 words."""
    return (words.numpy()[:, None] >> np.arange(64)) & 1


def test_tokens_do_not_reveal_the_user_key_nor_which_tokens_are_of_one_user():
    draws = SeededDraws(SEED)
    tokens, later = draws.tokens(USERS, ROUND), draws.tokens(USERS, ROUND + 1)
    assert not set(tokens.tolist()) & set(USERS.tolist())
    for other in (USERS, later):
        assert abs(stats.spearmanr(tokens.numpy(), other.numpy()).statistic) < 4 / math.sqrt(400)
        agreement = (bits(tokens) == bits(other)).mean()
        assert abs(agreement - 0.5) < 4 * 0.5 / math.sqrt(400 * 64)
    for bit in (0, 17, 31, 32, 45, 61):  # neighbouring keys have tokens that have nothing in common
        flipped = draws.tokens(USERS ^ (1 << bit), ROUND)
        changed = (bits(tokens) != bits(flipped)).mean()
        assert abs(changed - 0.5) < 4 * 0.5 / math.sqrt(400 * 64)


def test_a_devices_secret_makes_its_tokens_and_nothing_else_does():
    one, same_secret, other = SystemDraws(b"one secret"), SystemDraws(b"one secret"), SystemDraws(b"another")
    users = USERS[:50]
    assert torch.equal(one.tokens(users, ROUND), same_secret.tokens(users, ROUND))
    every = [draws.tokens(users, round_) for draws in (one, other) for round_ in range(10)]
    assert len(torch.cat(every).unique()) == 20 * 50
    assert torch.equal(one.tokens(users.flip(0), ROUND), one.tokens(users, ROUND).flip(0))
    assert not set(torch.cat(every).tolist()) & set(USERS.tolist())
    assert abs((bits(one.tokens(USERS, 0)) == bits(USERS)).mean() - 0.5) < 4 * 0.5 / math.sqrt(400 * 64)


def test_a_token_is_written_down_so_that_devices_of_all_runtimes_agree():
    users = torch.tensor([1, 2**62 + 5])
    assert SeededDraws(0).tokens(users, 7).tolist() == [7491456880963909506, -2923651050868446728]
    assert SystemDraws(b"secret").tokens(users, 7).tolist() == [5838609759733698439, -20300697140520406]


@every_rule
def test_a_device_with_draws_of_its_own_sends_the_same_form_and_never_the_same_noise(rule):
    state, model = devices(3, replace(rule)), model_with(V, VERSION)
    first, second = (make_upload(model, state, rule, SystemDraws(b"secret"), ROUND) for _ in range(2))
    seeded = sent_by(state, rule)
    for upload in (first, second):
        assert upload.codes.dtype == seeded.codes.dtype
        assert upload.codes.shape == seeded.codes.shape
        assert torch.equal(upload.block, seeded.block)
    assert torch.equal(first.tokens, second.tokens)
    assert not torch.equal(first.codes, second.codes)
    if rule.form == "points":
        assert (first.codes.int() - seeded.codes.int()).abs().max() <= 1  # rounding alone is drawn
