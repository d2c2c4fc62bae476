"""Whatever a client holds or sends, its contribution is bounded; the formats add up to the same sums."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed.config import RunConfig, override
from protofed.errors import ConfigError
from protofed.methods.protofed_rules import round_rule
from protofed.privacy.accountant import epsilon, noise_for
from protofed.privacy.draws import normal, uniform
from protofed.privacy.ledger import Release
from protofed.privacy.mechanism import discrete_gaussian
from protofed.privacy.upload import (
    NOTHING,
    SECURE_SCALE,
    PointUploads,
    RoundRule,
    UploadRule,
    central_upload,
    compact_local_sums,
    compact_local_upload,
    contributions,
    decode_points,
    local_reach,
    local_sums,
    local_upload,
    secure_std,
    secure_sums,
    secure_upload,
    upload_bytes,
    write_out,
)
from protofed.seeds import stream
from protofed.server.fedkmeans import exact_sums

RULE = UploadRule(n_prototypes=4, width=3)
anything = st.floats(allow_nan=True, allow_infinity=True, width=32)


def some_clients(n: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    rng = stream(0, "clients")
    return torch.nn.functional.normalize(torch.randn(n, 3, generator=rng), dim=1), torch.randint(4, (n,), generator=rng)


def test_the_default_sensitivities_are_1_031_and_2():
    assert UploadRule(16).sensitivity == pytest.approx(math.sqrt(1 + 1 / 16)) == pytest.approx(1.031, abs=5e-4)
    assert UploadRule(16).replace_sensitivity == 2.0


@given(st.lists(anything, min_size=3, max_size=3), st.integers(-3, 8), st.floats(0.1, 3), st.floats(0.01, 3))
def test_no_client_contributes_more_than_the_sensitivity(values, block, radius, weight):
    rule = UploadRule(4, 3, radius, weight)
    rows, at = contributions(torch.tensor([values]), torch.tensor([block]), rule)
    assert rows.norm().item() <= rule.sensitivity * (1 + 1e-15)
    assert 0 <= at.item() < 4


@settings(max_examples=50)
@given(st.lists(anything, min_size=6, max_size=6), st.integers(0, 3), st.integers(0, 3))
def test_exchanging_one_contribution_changes_at_most_the_replace_sensitivity(values, one, other):
    both = write_out(torch.tensor(values).reshape(2, 3), torch.tensor([one, other]), RULE)
    assert (both[0] - both[1]).norm().item() <= RULE.replace_sensitivity * (1 + 1e-12)


def test_a_contribution_written_out_is_the_one_hot_block_times_the_row():
    z, block = some_clients(6)
    by_hand = torch.zeros(6, 4, 4, dtype=torch.float64)
    for user in range(6):
        by_hand[user, block[user], :3] = z[user].double()
        by_hand[user, block[user], 3] = 0.25
    assert torch.allclose(write_out(z, block, RULE), by_hand, atol=1e-6)


def test_a_poisoned_client_contributes_nothing_and_the_others_as_before():
    z, block = some_clients(5)
    clean = exact_sums(z[1:], block[1:], RULE)
    for poison in (math.nan, math.inf, -math.inf):
        z[0] = torch.tensor([0.1, poison, 0.1])
        assert torch.equal(exact_sums(z, block, RULE), clean)
    z[0], block[0] = 1.0, 99
    assert torch.equal(exact_sums(z, block, RULE), clean)


def test_a_poisoned_central_upload_names_no_prototype():
    z, block = some_clients(3)
    z[1, 2] = math.nan
    sent = central_upload(z, block, RULE, torch.full((3, 3), 0.5))
    assert sent.block.tolist() == [block[0].item(), NOTHING, block[2].item()]
    assert sent.codes[1].tolist() == [0, 0, 0]


def test_a_central_upload_arrives_within_a_step_and_never_beyond_the_radius():
    z, block = some_clients(2_000)
    arrived, at = decode_points(
        central_upload(z, block, RULE, uniform(0, "rounding", torch.arange(2_000), 0, (3,))), RULE
    )
    assert torch.equal(at, block)
    assert (arrived - z).abs().max() <= 2.2 / 127
    assert (arrived.norm(dim=1) <= 1).all()


def test_codes_of_a_cheating_client_are_clipped_by_the_server():
    cheat = PointUploads(torch.full((1, 3), -128, dtype=torch.int8), torch.tensor([2]))
    assert decode_points(cheat, RULE)[0].norm().item() == pytest.approx(1.0, abs=1e-6)


def test_no_uploads_add_up_to_nothing():
    nobody = PointUploads(torch.zeros(0, 3, dtype=torch.int8), torch.zeros(0, dtype=torch.int64))
    assert torch.equal(exact_sums(*decode_points(nobody, RULE), RULE), torch.zeros(4, 4, dtype=torch.float64))


def test_local_uploads_noise_every_row_and_add_up_to_the_true_sums():
    z, block = some_clients(400)
    users, std = torch.arange(400), RULE.noise_std(0.5, "local")
    noise, rounding = normal(0, "n", users, 0, (4, 4)), uniform(0, "r", users, 0, (4, 4))
    sent = local_upload(z, block, RULE, std, noise, rounding)
    assert std == 1.0
    assert sent.dtype == torch.int8
    spread = (sent.double() * local_reach(RULE, std) / 127 - write_out(z, block, RULE)).flatten(1).std(dim=0)
    assert torch.allclose(spread, torch.full((16,), std, dtype=torch.float64), rtol=0.15)
    error = local_sums(sent, RULE, std) - exact_sums(z, block, RULE)
    assert error.abs().max() < 4.5 * std * math.sqrt(400)


def test_a_compact_local_upload_says_no_more_than_its_noised_embedding():
    z, _ = some_clients(200)
    v = torch.nn.functional.normalize(torch.randn(4, 3, generator=stream(1, "v")), dim=1)
    draws = normal(0, "n", torch.arange(200), 0, (3,)), uniform(0, "r", torch.arange(200), 0, (3,))
    sent = compact_local_upload(z, v, RULE, 2.0, *draws)
    arrived, at = decode_points(sent, RULE, local_reach(RULE, 2.0))
    assert torch.equal(torch.cdist(arrived, v).argmin(dim=1), at)
    by_hand = torch.zeros(4, 4, dtype=torch.float64)
    for z_u, k in zip(arrived.double(), at.tolist(), strict=True):
        by_hand[k] += torch.cat((z_u, torch.tensor([0.25], dtype=torch.float64)))
    assert torch.allclose(compact_local_sums(sent, RULE, 2.0), by_hand)


def test_a_broken_embedding_cannot_be_told_from_a_zero_one_under_local_noise():
    v = torch.nn.functional.normalize(torch.randn(4, 3, generator=stream(1, "v")), dim=1)
    draws = normal(0, "n", torch.arange(5), 0, (3,)), uniform(0, "r", torch.arange(5), 0, (3,))
    zero, broken = torch.zeros(5, 3), torch.full((5, 3), torch.nan)
    sent, same = (compact_local_upload(z, v, RULE, 2.0, *draws) for z in (broken, zero))
    assert torch.equal(sent.codes, same.codes)
    assert torch.equal(sent.block, same.block)


def test_a_compact_upload_that_names_nothing_adds_nothing():
    sent = PointUploads(torch.full((2, 3), 50, dtype=torch.int8), torch.tensor([NOTHING, 77]))
    assert torch.equal(compact_local_sums(sent, RULE, 2.0), torch.zeros(4, 4, dtype=torch.float64))


@pytest.mark.parametrize("multiplier", [0.0, -1.0])
def test_local_trust_without_noise_is_refused(multiplier):
    with pytest.raises(ConfigError, match="local trust needs noise on the device"):
        RULE.noise_std(multiplier, "local")
    with pytest.raises(ConfigError, match="local trust needs noise on the device"):
        local_upload(*some_clients(1), RULE, 0.0, torch.zeros(1, 4, 4), torch.zeros(1, 4, 4))


def test_secure_uploads_add_up_to_the_sums_with_the_noise_of_the_multiplier_for_all_but_one():
    z, block = some_clients(100)
    scale, multiplier = 2.0**12, 1.2
    std = secure_std(RULE, multiplier, scale, least=100, clients=100)
    everybodys, others = [], []
    for round_ in range(60):
        noise = discrete_gaussian(uniform(0, "share", torch.arange(100), round_, (4, 4)), std)
        sent = secure_upload(z, block, RULE, scale, noise)
        assert 0 <= sent.min() <= sent.max() < 2**32
        everybodys.append(secure_sums(sent.sum(dim=0), scale) - exact_sums(z, block, RULE))
        others.append(secure_sums(sent[1:].sum(dim=0), scale) - exact_sums(z[1:], block[1:], RULE))
    priced = multiplier * RULE.sensitivity
    assert torch.stack(others).std().item() == pytest.approx(priced, rel=0.1)
    assert torch.stack(everybodys).std().item() == pytest.approx(priced * math.sqrt(100 / 99), rel=0.1)


def test_without_noise_secure_sums_are_the_sums_to_a_step_per_client():
    z, block = some_clients(100)
    sent = secure_upload(z, block, RULE, 2.0**16, torch.zeros(100, 4, 4, dtype=torch.int64))
    exact = exact_sums(z, block, RULE)
    assert (secure_sums(sent.sum(dim=0), 2.0**16) - exact).abs().max() <= 100 / 2**16


@given(st.integers(2, 500), st.floats(0.05, 20), st.floats(0.1, 3), st.floats(0.01, 3))
def test_the_shares_of_all_but_one_of_the_least_devices_reach_the_priced_noise(least, multiplier, radius, weight):
    rule = UploadRule(4, 3, radius, weight)
    share = secure_std(rule, multiplier, 2.0**16, least=least, clients=least) / 2**16
    variance = sum(share**2 for _ in range(least - 1))
    priced = (multiplier * math.hypot(radius, weight)) ** 2
    assert variance >= priced * (1 - 1e-12)
    assert variance == pytest.approx(priced)  # and no more noise than is paid for


RATE, ROUNDS = 0.05, 160


def epsilon_of_the_others(fewest: int, share: float) -> float:
    """ε of 160 rounds for one of the `fewest` uploads a round is released with: the noise that stays is the others'."""
    left = math.sqrt(sum(share**2 for _ in range(fewest - 1)))
    return epsilon((Release(left / RULE.sensitivity, RATE, ROUNDS),), 1e-5)


def old_share(honest: int, multiplier: float) -> float:
    """As it was: `honest` shares together reach the multiplier, that of the protected client among them."""
    return multiplier * RULE.sensitivity / math.sqrt(honest)


@pytest.mark.parametrize(("n", "old"), [(60, math.inf), (80, 7.0), (120, 5.1), (200, 4.2)])
def test_a_removed_client_takes_its_noise_share_along_and_epsilon_still_holds(n, old):
    honest, multiplier = int(RATE * n / 2), noise_for(3.4, 1e-5, RATE, ROUNDS)
    assert epsilon_of_the_others(honest, old_share(honest, multiplier)) == pytest.approx(old, abs=0.05)
    rule = round_rule(override(RunConfig(), {"privacy.trust": "secure-aggregation"}), 4, multiplier, n)
    assert rule.least == max(2, honest)
    share = secure_std(RULE, multiplier, SECURE_SCALE, least=rule.least, clients=n) / SECURE_SCALE
    assert epsilon_of_the_others(rule.least, share) == pytest.approx(3.4, abs=1e-3)


def test_shares_too_coarse_too_fine_or_of_a_lone_device_are_refused_in_one_line():
    assert secure_std(RULE, 1.0, 1024.0, least=26, clients=50) == pytest.approx(1024 * RULE.sensitivity / 5)
    with pytest.raises(ConfigError, match="at least 4 steps wide"):
        secure_std(RULE, 1.0, 8.0, least=26, clients=50)
    with pytest.raises(ConfigError, match="beyond the field's 2147483648; lower the scale"):
        secure_std(RULE, 1.0, 2.0**26, least=26, clients=50)
    for least in (1, 0, -3):
        with pytest.raises(ConfigError, match=rf"^secure aggregation needs rounds of at least 2 uploads, got {least};"):
            secure_std(RULE, 1.0, 1024.0, least=least, clients=50)


def test_a_secure_rule_with_noise_for_rounds_of_one_upload_is_refused():
    for least in (1, 0):
        with pytest.raises(ConfigError, match=rf"^secure aggregation needs rounds of at least 2 uploads, got {least};"):
            RoundRule(RULE, 1.0, "secure-aggregation", least=least)
    assert RoundRule(RULE, 1.0, "secure-aggregation", least=2).form == "integers"
    assert RoundRule(RULE, 0.0, "secure-aggregation", least=1).form == "points"
    assert RoundRule(RULE, 1.0, least=1).form == "points"


@pytest.mark.parametrize(
    ("settings_", "form", "points"),
    [
        ({}, "points", 1),
        ({"noise_multiplier": 0.0}, "points", 1),
        ({"noise_multiplier": 0.0, "aggregator": "geometric-median"}, "points", 1),
        ({"noise_multiplier": 0.0, "aggregator": "barycenter"}, "points", 2),
        ({"noise_multiplier": 0.0, "trust": "secure-aggregation", "aggregator": "barycenter"}, "points", 2),
        ({"trust": "secure-aggregation"}, "integers", 1),
        ({"trust": "local"}, "noised rows", 1),
        ({"trust": "local", "aggregator": "geometric-median"}, "noised points", 1),
        ({"trust": "local", "aggregator": "barycenter"}, "noised points", 2),
    ],
)
def test_what_travels_follows_from_trust_noise_and_aggregator(settings_, form, points):
    rule = RoundRule(**{"upload": RULE, "noise_multiplier": 1.0, **settings_})
    assert (rule.form, rule.points) == (form, points)


def test_bytes_of_each_format():
    rule = UploadRule(16)
    assert upload_bytes(rule, "central") == 64 + 2
    assert upload_bytes(rule, "local", compact=True) == 64 + 2
    assert upload_bytes(rule, "local") == 16 * 65
    assert upload_bytes(rule, "secure-aggregation") == 16 * 65 * 4


@pytest.mark.parametrize("bad", [{"n_prototypes": 0}, {"width": 0}, {"clip_radius": 0.0}, {"count_weight": math.nan}])
def test_a_rule_that_bounds_nothing_is_refused(bad):
    with pytest.raises(ConfigError):
        UploadRule(**{"n_prototypes": 4, **bad})
