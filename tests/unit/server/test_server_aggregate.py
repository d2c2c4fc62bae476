"""A whole round against sums written by hand, in every trust model; re-seeding; Algorithm 2 as printed."""

import math
from dataclasses import replace

import pytest
import torch
from cohorts import D, K, cohort, devices_with, drawn, model_with
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from protofed.client.codec import unit
from protofed.client.upload import make_upload, nearest
from protofed.errors import ConfigError
from protofed.federation.simulator import clipped_share
from protofed.privacy.draws import SeededDraws, normal, uniform
from protofed.privacy.mechanism import discrete_gaussian, seeded_noise
from protofed.privacy.upload import SECURE_SCALE, RoundRule, UploadRule, local_reach, secure_std
from protofed.seeds import stream
from protofed.server.accept import Accepted, accept
from protofed.server.aggregate import (
    RoundReport,
    release_sums,
    server_aggregate,
    server_aggregate_as_printed,
    slice_end,
)
from protofed.server.fedkmeans import exact_sums, fedkmeans
from protofed.server.library import PrototypeLibrary, new_library
from protofed.server.separation import enforce_separation, literal_separation

SEED, ROUND = 9, 5
UPLOAD = UploadRule(K, D)


def rule(**changes: object) -> RoundRule:
    return replace(RoundRule(UPLOAD, 1.0), **changes)


def library() -> PrototypeLibrary:
    """Four prototypes, the last two closer to each other than the margin."""
    v = torch.eye(K, D)
    v[3] = unit(v[2] + 0.3 * torch.eye(D)[5])
    return new_library(v)


def sent(users: Tensor, z: Tensor, how: RoundRule, round_: int = ROUND) -> Accepted:
    """What the server has of a round in which these users' devices upload."""
    upload = make_upload(model_with(library().v), devices_with(users, z), how, SeededDraws(SEED), round_)
    return accept([upload], how, round_=round_, version=0)


def one_round(users: Tensor, z: Tensor, how: RoundRule, round_: int = ROUND) -> tuple[PrototypeLibrary, RoundReport]:
    noise, parting = seeded_noise(stream(1, "noise", round_)), stream(1, "parting", round_)
    return server_aggregate(library(), sent(users, z, how, round_), how, noise, parting)


def sums_of(users: Tensor, z: Tensor, how: RoundRule, round_: int = ROUND) -> Tensor:
    released = release_sums(sent(users, z, how, round_), how, seeded_noise(stream(1, "noise", round_)))
    assert released is not None
    return released


def same(one: PrototypeLibrary, other: PrototypeLibrary) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("v", "ema_sums", "ema_counts"))


def quantised_by_hand(users: Tensor, z: Tensor) -> list[list[float]]:
    """Every client clips, rounds up or down to a 127th by its own draw, and is clipped again."""
    up = uniform(SEED, "quantise", users, ROUND, (D,)).tolist()
    arrived = []
    for z_u, up_u in zip(z[:, 0].double().tolist(), up, strict=True):
        shrink = max(1.0, math.sqrt(sum(x * x for x in z_u)))
        codes = [math.floor(x / shrink * 127 + u) / 127 for x, u in zip(z_u, up_u, strict=True)]
        again = max(1.0, math.sqrt(sum(x * x for x in codes)))
        arrived.append([x / again for x in codes])
    return arrived


def test_a_central_round_is_sums_noise_running_average_and_separation_written_by_hand():
    users, z = cohort(30)
    z = z * torch.linspace(0.5, 2.0, 30)[:, None, None]
    start = library()
    sums = [[0.0] * (D + 1) for _ in range(K)]
    for z_u, arrived in zip(z[:, 0].double(), quantised_by_hand(users, z), strict=True):
        k = min(range(K), key=lambda k: (z_u - start.v[k]).norm().item())
        for j, x in enumerate([*arrived, 0.25]):
            sums[k][j] += x
    noise = torch.randn(K, D + 1, generator=stream(1, "noise", ROUND), dtype=torch.float64)
    released = (torch.tensor(sums, dtype=torch.float64) + math.hypot(1, 0.25) * noise).float()
    ema_sums = 0.9 * start.ema_sums + 0.1 * released[:, :-1]
    ema_counts = 0.9 * start.ema_counts + 0.1 * released[:, -1] / 0.25
    moves = (ema_counts >= 1)[:, None]
    expected = enforce_separation(torch.where(moves, unit(ema_sums), start.v), 0.5, stream(1, "parting", ROUND))
    after, report = one_round(users, z, rule())
    torch.testing.assert_close(after.ema_sums, ema_sums, atol=1e-5, rtol=0)
    torch.testing.assert_close(after.ema_counts, ema_counts, atol=1e-5, rtol=0)
    torch.testing.assert_close(after.v, expected, atol=1e-5, rtol=0)
    assert after.version == 1
    assert moves.all()
    assert torch.pdist(start.v).min() < 0.31
    assert report.smallest_distance == pytest.approx(torch.pdist(after.v).min().item(), abs=1e-5)
    assert report.smallest_distance >= 0.499


def test_a_round_reports_uploads_signal_to_noise_and_how_many_were_refused():
    users, z = cohort(10)
    z[:4] *= 1.5
    how = rule(noise_multiplier=2.0)
    _, report = one_round(users, z, how)
    assert (report.uploads, report.refused) == (10, 0)
    arrived = torch.tensor(quantised_by_hand(users, z))
    length = exact_sums(arrived, nearest(z[:, 0], library().v), UPLOAD).norm().item()
    noise_length = 2 * math.hypot(1, 0.25) * math.sqrt(K * 9)
    assert report.signal_to_noise == pytest.approx(length / noise_length, rel=1e-5)
    assert one_round(users, z, rule(noise_multiplier=0.0))[1].signal_to_noise == math.inf
    accepted = replace(sent(users, z, how), refused={"sent twice": 3, "made for other prototypes": 2})
    args = (how, seeded_noise(stream(1, "noise", ROUND)), stream(1, "parting", ROUND))
    assert server_aggregate(library(), accepted, *args)[1].refused == 5


def test_the_clipped_share_counts_embeddings_longer_than_the_radius():
    users, z = cohort(10)
    z[:4] *= 1.5
    stacks = [devices_with(users[at], z[at]) for at in (slice(0, 3), slice(3, 10), slice(10, 10))]
    assert clipped_share(model_with(library().v), stacks, rule()) == pytest.approx(0.4)
    assert clipped_share(model_with(library().v), stacks[2:], rule()) == 0.0


@settings(max_examples=10)
@given(st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_the_order_of_clients_changes_no_bit_of_a_central_round(n, seed):
    users, z = cohort(n, seed)
    order = torch.randperm(n, generator=Generator().manual_seed(seed))
    assert same(one_round(users, z, rule())[0], one_round(users[order], z[order], rule())[0])


@pytest.mark.parametrize("trust", ["secure-aggregation", "local"])
def test_the_order_of_clients_is_irrelevant_where_devices_add_the_noise(trust):
    users, z = cohort(20)
    how, order = rule(trust=trust), torch.arange(19, -1, -1)
    torch.testing.assert_close(sums_of(users, z, how), sums_of(users[order], z[order], how), rtol=0, atol=1e-9)


@settings(max_examples=10)
@given(st.integers(2, 40), st.integers(0, 2**32 - 1), st.data())
def test_exact_sums_of_chunks_add_up_to_those_of_the_whole_cohort(n, seed, data):
    users, z = cohort(n, seed)
    cut, how = data.draw(st.integers(1, n - 1)), rule(noise_multiplier=0.0)
    parts = sums_of(users[:cut], z[:cut], how) + sums_of(users[cut:], z[cut:], how)
    assert torch.equal(parts, sums_of(users, z, how))


@settings(max_examples=12)
@given(st.integers(1, 8), st.integers(0, 2**32 - 1), st.floats(1e-6, 1e30))
def test_removing_any_client_moves_the_quantised_sums_by_at_most_the_sensitivity(n, seed, size):
    users, z = cohort(n, seed)
    z[0] *= size
    how = rule(noise_multiplier=0.0)
    whole = sums_of(users, z, how)
    for u in range(n):
        kept = torch.arange(n) != u
        assert (whole - sums_of(users[kept], z[kept], how)).norm().item() <= UPLOAD.sensitivity


def device_noise(users: Tensor, how: RoundRule) -> Tensor:
    """The integers that all devices together add under secure aggregation."""
    std = secure_std(UPLOAD, how.noise_multiplier, SECURE_SCALE, least=how.least, clients=max(len(users), how.least))
    return discrete_gaussian(uniform(SEED, "noise share", users, ROUND, (K, D + 1)), std).sum(0)


@settings(max_examples=10)
@given(st.integers(3, 8), st.integers(0, 2**32 - 1), st.floats(1e-6, 1e30))
def test_removing_any_client_moves_the_secure_integers_by_at_most_the_sensitivity(n, seed, size):
    users, z = cohort(n, seed)
    z[0] *= size
    how = rule(trust="secure-aggregation", noise_multiplier=0.01)

    def without_noise(kept: Tensor) -> Tensor:
        return sums_of(users[kept], z[kept], how) - device_noise(users[kept], how).double() / SECURE_SCALE

    whole = without_noise(torch.ones(n, dtype=torch.bool))
    for u in range(n):
        assert (whole - without_noise(torch.arange(n) != u)).norm().item() <= UPLOAD.sensitivity + 1e-9


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_upload_that_is_not_finite_contributes_nothing_to_a_central_round(bad):
    users, z = cohort(12)
    z[5, 0, 2] = bad
    fine = torch.arange(12) != 5
    assert same(one_round(users, z, rule())[0], one_round(users[fine], z[fine], rule())[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_device_with_a_broken_embedding_adds_its_noise_and_nothing_else(bad):
    users, z = cohort(12)
    broken, zero = z.clone(), z.clone()
    broken[5, 0, 2] = bad
    fine = torch.arange(12) != 5
    how = rule(trust="secure-aggregation", least=6)
    left = sums_of(users, broken, how) - device_noise(users, how) / SECURE_SCALE
    assert torch.equal(left, sums_of(users[fine], z[fine], how) - device_noise(users[fine], how) / SECURE_SCALE)
    zero[5] = 0.0
    noise = UPLOAD.noise_std(1.0, "local") * normal(SEED, "local noise", users[5:6], ROUND, (K, D + 1))[0]
    added = sums_of(users, broken, rule(trust="local")) - sums_of(users[fine], z[fine], rule(trust="local"))
    assert (added - noise).abs().max() <= local_reach(UPLOAD, UPLOAD.noise_std(1.0, "local")) / 127


@pytest.mark.parametrize(
    "how",
    [
        rule(),
        rule(noise_multiplier=0.0),
        rule(trust="secure-aggregation"),
        rule(trust="local"),
        rule(as_printed=True),
        rule(noise_multiplier=0.0, aggregator="geometric-median"),
        rule(noise_multiplier=0.0, aggregator="barycenter"),
        rule(trust="local", aggregator="geometric-median"),
    ],
    ids=lambda how: f"{how.trust} {how.aggregator} {how.noise_multiplier} {how.as_printed}",
)
@pytest.mark.parametrize("broken", [1, 9])
def test_broken_uploads_never_break_a_round(how, broken):
    users, z = cohort(9, points=2)
    z[:broken] = torch.tensor([math.nan, math.inf]).repeat(D // 2)
    after, report = one_round(users, z, how)
    assert all(x.isfinite().all() for x in (after.v, after.ema_sums, after.ema_counts))
    assert report.uploads == 9
    if not how.as_printed:
        torch.testing.assert_close(after.v.norm(dim=1), torch.ones(K))


@pytest.mark.parametrize("aggregator", ["geometric-median", "barycenter"])
def test_an_upload_that_is_not_finite_contributes_nothing_to_a_robust_round(aggregator):
    users, z = cohort(12, points=2)
    broken = z.clone()
    broken[5, :, 2] = math.nan
    fine, how = torch.arange(12) != 5, rule(noise_multiplier=0.0, aggregator=aggregator)
    expected, got = one_round(users[fine], z[fine], how)[0], one_round(users, broken, how)[0]
    torch.testing.assert_close(got.ema_counts, expected.ema_counts)
    torch.testing.assert_close(got.v, expected.v)


def test_the_secure_total_is_the_sum_of_integers_by_hand_whatever_wraps_on_the_way():
    users, z = cohort(50)
    block, how = nearest(z[:, 0], library().v), rule(trust="secure-aggregation", least=10)
    total = [[0] * (D + 1) for _ in range(K)]
    for z_u, k in zip(z[:, 0].double(), block.tolist(), strict=True):
        z_u = z_u / max(1.0, z_u.norm().item())
        for j, x in enumerate([*z_u.tolist(), 0.25]):
            total[k][j] += math.trunc(x * 65_536)
    by_hand = torch.tensor(total) + device_noise(users, how)
    released = sums_of(users, z, how)
    assert torch.equal(released * 65_536, by_hand.double())
    assert (by_hand < 0).any()  # such an entry has wrapped around 2^32


def test_a_secure_round_is_a_central_one_in_expectation_with_noise_scaled_to_the_least_others():
    users, z = cohort(40)
    z = z / 2  # far from the radius, where clipping again after rounding would bias the central sums
    secure, central = rule(trust="secure-aggregation", least=21), rule()
    exact = exact_sums(z[:, 0], nearest(z[:, 0], library().v), UPLOAD)
    rounds = 40
    off = {
        how.trust: torch.stack([sums_of(users, z, how, round_) - exact for round_ in range(rounds)])
        for how in (secure, central)
    }
    for trust, std in (("secure-aggregation", UPLOAD.sensitivity * math.sqrt(40 / 20)), ("central", 1.031)):
        assert off[trust].std().item() == pytest.approx(std, rel=0.05)
        standardised = off[trust].mean(0) / (std / math.sqrt(rounds))
        assert standardised.abs().max() < 4
        assert standardised.square().mean().sqrt() < 1.4


def test_the_server_draws_no_noise_where_the_devices_do():
    def refused(shape: tuple[int, ...]) -> Tensor:
        raise AssertionError(shape)

    users, z = cohort(8)
    for trust in ("secure-aggregation", "local"):
        how = rule(trust=trust)
        assert torch.equal(release_sums(sent(users, z, how), how, refused), sums_of(users, z, how))


def test_local_uploads_add_up_to_exact_sums_and_every_devices_own_noise():
    users, z = cohort(6)
    how, std = rule(trust="local"), 2 * 1.0  # replace-one: twice the radius
    noise = normal(SEED, "local noise", users, ROUND, (K, D + 1)).sum(0)
    exact = exact_sums(z[:, 0], nearest(z[:, 0], library().v), UPLOAD)
    rounding = 6 * (1 + 4 * std) / 127
    assert (sums_of(users, z, how) - exact - std * noise).abs().max() <= rounding


@pytest.mark.parametrize("n", [0, 3, 9])
def test_a_secure_round_of_too_few_uploads_releases_nothing_and_only_counts_a_version(n):
    users, z = cohort(n)
    how = rule(trust="secure-aggregation", least=10, margin=0.0)
    assert release_sums(sent(users, z, how), how, seeded_noise(stream(1, "noise", ROUND))) is None
    after, report = one_round(users, z, how)
    assert same(after, library())
    assert (after.version, report.uploads) == (1, n)


def test_a_secure_round_of_just_enough_uploads_releases_its_sums():
    users, z = cohort(10)
    how = rule(trust="secure-aggregation", least=10, margin=0.0)
    assert sums_of(users, z, how).isfinite().all()
    assert not same(one_round(users, z, how)[0], library())


def test_a_secure_round_whose_sum_might_not_fit_the_field_is_refused_in_one_line():
    """Each stack alone would fit; what counts is how many uploads the total holds."""
    users, z = cohort(10)
    how = rule(trust="secure-aggregation", least=10)
    accepted = sent(users, z, how)
    largest = 2**31 / 65_536 - 100  # embeddings of length 1 in one row, less what the noise may add
    fitting = release_sums(replace(accepted, n=int(largest) - 1_000), how, seeded_noise(stream(1, "noise", ROUND)))
    assert torch.equal(fitting, sums_of(users, z, how))
    with pytest.raises(ConfigError, match=r"^the sum of 40000 uploads .* beyond the field's 2147483648; lower the"):
        release_sums(replace(accepted, n=40_000), how, seeded_noise(stream(1, "noise", ROUND)))


def test_a_local_round_without_any_upload_keeps_the_library():
    """There is nobody's noise in it: zeros would count as news."""
    how = rule(trust="local", margin=0.0)
    nobody = accept([], how, round_=ROUND, version=0)
    noise, parting = seeded_noise(stream(1, "noise", ROUND)), stream(1, "parting", ROUND)
    after, report = server_aggregate(library(), nobody, how, noise, parting)
    assert same(after, library())
    assert (after.version, report.uploads) == (1, 0)


def test_local_trust_without_noise_is_refused_in_one_line():
    users, z = cohort(5)
    with pytest.raises(ConfigError, match=r"^local trust needs noise on the device.*got 0.0$"):
        one_round(users, z, rule(trust="local", noise_multiplier=0.0))


def test_an_upload_under_local_trust_without_noise_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^local trust needs noise on the device.*got 0.0$"):
        UPLOAD.noise_std(0.0, "local")


@pytest.mark.parametrize("aggregator", ["geometric-median", "barycenter"])
@pytest.mark.parametrize("trust", ["central", "secure-aggregation"])
def test_a_robust_aggregator_that_cannot_be_noised_is_refused_in_one_line(aggregator, trust):
    with pytest.raises(ConfigError, match=rf"^the {aggregator} aggregator .* {trust} trust; use fedkmeans, .*nodp$"):
        rule(aggregator=aggregator, trust=trust)
    assert rule(aggregator=aggregator, trust="local").aggregator == aggregator
    assert rule(aggregator=aggregator, noise_multiplier=0.0).aggregator == aggregator


def test_a_robust_round_moves_a_tenth_of_the_way_to_a_lone_upload_and_leaves_empty_clusters():
    z = unit(torch.tensor([[[0.8, 0.0, 0.0, 0.0, 0.6, 0.0, 0.0, 0.0]]]))
    how = rule(noise_multiplier=0.0, aggregator="geometric-median", margin=0.0)
    after, _ = one_round(torch.tensor([3]), z, how)
    expected = torch.zeros(D)
    expected[0], expected[4] = 0.9 + 0.08, 0.06
    torch.testing.assert_close(after.v[0], unit(expected), atol=1e-3, rtol=0)  # 8 bits
    assert torch.equal(after.v[1:], library().v[1:])


def test_an_empty_cohort_leaves_the_prototypes_where_they_are():
    users, z = cohort(0)
    after, report = one_round(users, z, rule(noise_multiplier=0.0, margin=0.0))
    torch.testing.assert_close(after.v, library().v)
    assert report.uploads == 0


def test_an_empty_cohort_releases_noise_alone():
    users, z = cohort(0)
    noise = torch.randn(K, D + 1, generator=stream(1, "noise", ROUND), dtype=torch.float64)
    released = sums_of(users, z, rule(noise_multiplier=1.5))
    torch.testing.assert_close(released, 1.5 * UPLOAD.sensitivity * noise, atol=1e-9, rtol=0)
    after, _ = one_round(users, z, rule(noise_multiplier=1.5, margin=0.0))
    assert same(after, fedkmeans(library(), released))


def idle_library(k: int, n_idle: int) -> PrototypeLibrary:
    """Prototypes of which the last ones have been fed next to nothing."""
    v = unit(drawn(k, 16, seed=3))
    counts = torch.linspace(4.0, 8.0, k)
    counts[k - n_idle :] = 0.01
    return PrototypeLibrary(v, counts[:, None] * v, counts, 7)


@pytest.mark.parametrize(("k", "n_idle", "moved"), [(4, 2, 1), (40, 10, 2), (40, 1, 1), (128, 60, 6), (16, 0, 0)])
def test_a_slice_ends_with_at_most_five_percent_and_at_least_one_reseeded(k, n_idle, moved):
    before = idle_library(k, n_idle)
    how = RoundRule(UploadRule(k, 16), 1.0, margin=0.0)
    after, n = slice_end(before, how, stream(0, "pruning"))
    changed = (after.v != before.v).any(1)
    assert n == moved == int(changed.sum())
    assert changed[: k - n_idle].sum() == 0
    assert after.version == (8 if moved else 7)


def test_reseeding_keeps_averages_and_prototypes_consistent():
    before = idle_library(40, 10)
    how = RoundRule(UploadRule(40, 16), 1.0)
    after, _ = slice_end(before, how, stream(0, "pruning"))
    assert float(after.ema_counts.sum()) == pytest.approx(float(before.ema_counts.sum()) - 0.02, abs=1e-4)
    touched = after.ema_counts != before.ema_counts
    assert int(touched.sum()) == 4  # two that were idle, two that were split
    torch.testing.assert_close(after.ema_sums[touched], after.ema_counts[touched, None] * after.v[touched])
    assert torch.equal(after.ema_sums[~touched], before.ema_sums[~touched])
    halves = [(4 + 4 * 28 / 39) / 2, (4 + 4 * 29 / 39) / 2]
    assert after.ema_counts[touched].tolist() == pytest.approx([*halves, *halves[::-1]])
    assert torch.pdist(after.v).min() >= 0.499


def test_reseeding_leaves_the_averages_of_bystanders_alone():
    before = idle_library(40, 10)
    counts = before.ema_counts.clone()
    counts[30:32] = torch.tensor([-0.5, -0.5])  # re-seeded, as the least used
    counts[32] = -0.2  # idle too, but only two may be re-seeded
    before = replace(before, ema_counts=counts)
    after, n = slice_end(before, RoundRule(UploadRule(40, 16), 1.0, margin=0.0), stream(0, "pruning"))
    assert n == 2
    assert torch.equal(after.v[32], before.v[32])
    assert torch.equal(after.ema_sums[32], before.ema_sums[32])


def test_reseeding_depends_on_the_library_alone():
    """What was released already, and a stream: there is no upload it could look at, so it costs no ε."""
    before = idle_library(40, 10)
    one = slice_end(before, RoundRule(UploadRule(40, 16), 1.0), stream(0, "pruning"))
    other = slice_end(before, RoundRule(UploadRule(40, 16), 2.0, "secure-aggregation", least=20), stream(0, "pruning"))
    assert same(one[0], other[0])


def printed(v: Tensor, z: Tensor, **changes: object) -> tuple[Tensor, Tensor, float]:
    noise = seeded_noise(stream(2, "noise"))
    return server_aggregate_as_printed(v, z, UploadRule(*v.shape), noise=noise, rng=stream(2, "seeds"), **changes)


def test_the_printed_threshold_reseeds_most_of_128_prototypes_every_round():
    v = unit(drawn(128, 64))
    for round_ in range(2):
        z = unit(drawn(50, 64, seed=10 + round_))
        before = v
        v, block, share = printed(before, z)
        fed = {min(range(128), key=lambda k: (z_u - before[k]).norm().item()) for z_u in z}
        assert set(block.tolist()) == fed
        assert share == pytest.approx(1 - len(fed) / 128)  # one of 50 uploads is 0.02: whoever is fed stays
        assert share >= 0.6


def test_a_reseeded_prototype_is_somebodys_upload_as_printed():
    v, z = unit(drawn(128, 64)), unit(drawn(50, 64, seed=1))
    after, block, _ = printed(v, z)
    idle = torch.bincount(block, minlength=128) == 0
    copies = (after[idle][:, None] == z).all(-1).any(1)
    assert int(copies.sum()) == 50  # all fifty uploads, published without noise


def test_identical_prototypes_stay_identical_under_the_printed_separation():
    v = unit(torch.ones(1, 64)).expand(128, -1).contiguous()
    assert torch.equal(literal_separation(v, 0.5), v)
    assert torch.equal(printed(v, torch.zeros(0, 64))[0], v)
    assert torch.pdist(enforce_separation(v, 0.5, stream(0, "apart"))).min() >= 0.499


def test_a_printed_round_keeps_the_averages_and_counts_a_version():
    users, z = cohort(20)
    before, how = library(), rule(as_printed=True)
    after, report = one_round(users, z, how)
    arrived = sent(users, z, how).points[:, 0]
    by_hand = torch.tensor(quantised_by_hand(users, z))
    torch.testing.assert_close(arrived[arrived[:, 0].argsort()], by_hand[by_hand[:, 0].argsort()])
    noise = seeded_noise(stream(1, "noise", ROUND))
    expected = server_aggregate_as_printed(before.v, arrived, UPLOAD, noise=noise, rng=stream(1, "parting", ROUND))
    assert torch.equal(after.v, expected[0])
    assert torch.equal(after.ema_sums, before.ema_sums)
    assert (after.version, report.uploads) == (1, 20)


def turned(one: Tensor, other: Tensor) -> float:
    """The largest angle between a prototype and the same one before, in degrees."""
    return math.degrees(2 * math.asin(min(1.0, float((one - other).double().norm(dim=-1).max()) / 2)))


def arrived(points: Tensor, block: Tensor) -> Accepted:
    """Uploads as they are after checking and clipping, whoever made them up."""
    return Accepted(len(points), points / points.norm(dim=-1, keepdim=True).clamp(min=1.0), block)


@settings(max_examples=6)
@given(st.integers(1, 8), st.integers(0, 2**32 - 1), st.sampled_from([1e-3, 1.0, 1e6]), st.booleans())
@pytest.mark.parametrize("aggregator", ["geometric-median", "barycenter"])
def test_no_number_of_clients_turns_a_prototype_further_than_momentum_allows_in_a_robust_round(
    aggregator, n, seed, size, together
):
    """v' lies along 0.9 v + 0.1 c with c no longer than the radius, so the angle is at most asin(1/9)."""
    how, rng = rule(aggregator=aggregator, noise_multiplier=0.0, margin=0.0), Generator().manual_seed(seed)
    points = size * torch.randn(1 if together else n, 1, D, generator=rng).expand(n, 1, D)
    uploads = arrived(points, torch.zeros(n, dtype=torch.int64))
    after, _ = server_aggregate(library(), uploads, how, seeded_noise(rng), rng)
    assert turned(after.v, library().v) <= math.degrees(math.asin(1 / 9)) + 0.01


@settings(max_examples=25)
@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_clients_that_collude_on_a_prototype_turn_it_by_no_more_than_their_share_of_its_running_sum(n, seed):
    """Its sum of length 3 fades to 2.7 and n uploads add 0.1 n, at best at right angles to where it ends."""
    how, rng = rule(noise_multiplier=0.0, margin=0.0), Generator().manual_seed(seed)
    wanted = torch.randn(1, 1, D, generator=rng)
    uploads = arrived(1e6 * wanted.expand(n, 1, D), torch.zeros(n, dtype=torch.int64))
    after, _ = server_aggregate(library(), uploads, how, seeded_noise(rng), rng)
    assert turned(after.v, library().v) <= math.degrees(math.asin(min(1.0, 0.1 * n / 2.7))) + 0.01
    assert turned(after.v[1:], library().v[1:]) < 0.1  # nobody else's
