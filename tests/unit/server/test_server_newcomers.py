"""Rows from noised introductions: sums by a loop, noise everywhere, a regression that an obvious one confirms."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

from protofed.client.introductions import Introductions, ItemUpload, clip_introductions, make_item_upload
from protofed.privacy.draws import SeededDraws
from protofed.privacy.mechanism import os_noise, seeded_noise
from protofed.server.accept import accept_items
from protofed.server.newcomers import DOUBT, RIDGE, fit_map, predict_rows, row_features, sum_introductions

RNG = Generator().manual_seed(0)


def said(n: int = 40, items: int = 12, width: int = 4) -> Introductions:
    return Introductions(
        torch.arange(n), torch.randint(items, (n,), generator=RNG), torch.randn(n, width, generator=RNG)
    )


def test_without_noise_the_sums_are_those_of_a_loop_and_only_wanted_items_have_any():
    told, wanted = said(), torch.arange(12) % 3 == 0
    told = Introductions(told.users, told.items // 3 * 3, told.values)
    sums = sum_introductions(told, wanted, 0.0, seeded_noise(RNG))
    by_hand = torch.zeros(12, 4, dtype=torch.float64)
    for item, value in zip(told.items.tolist(), told.values, strict=True):
        by_hand[item] += value.double()
    assert torch.allclose(sums, by_hand.float(), atol=1e-5)
    assert (sums[~wanted] == 0).all()


def test_the_noise_lies_on_every_wanted_item_met_or_not():
    nobody = Introductions(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 17))
    wanted = torch.arange(6_000) % 2 == 0
    sums = sum_introductions(nobody, wanted, 4.0, seeded_noise(Generator().manual_seed(1)))
    assert float(sums[wanted].std()) == pytest.approx(4.0, rel=0.02)  # 51,000 draws: a standard error of 0.3 %
    assert float(sums[wanted].std(0).min()) > 3.7
    assert (sums[~wanted] == 0).all()


def test_a_deployment_may_take_its_noise_from_the_operating_system():
    told, wanted = said(), torch.ones(12, dtype=torch.bool)
    noise = sum_introductions(told, wanted, 1e-3, os_noise) - sum_introductions(told, wanted, 0.0, os_noise)
    assert 0.5e-3 < float(noise.std()) < 2e-3


def test_what_is_seen_of_an_item_is_doubted_by_its_count():
    seen = row_features(torch.tensor([[5.0, 10.0, -20.0], [-3.0, 5.0, 0.0]]))
    assert torch.allclose(seen[0], torch.tensor([1.0, -2.0, float(np.log(6.0)), 1.0]))
    assert torch.allclose(seen[1], torch.tensor([1.0, 0.0, 0.0, 1.0]))  # a count below zero is noise


def test_the_map_is_the_weighted_ridge_regression():
    seen, rows = torch.randn(200, 5, generator=RNG), torch.randn(200, 3, generator=RNG)
    weights = torch.rand(200, generator=RNG) + 0.1
    root = weights.sqrt().double().numpy()[:, None]
    x, y = seen.double().numpy() * root, rows.double().numpy() * root
    strength = RIDGE * np.trace(x.T @ x) / 5
    augmented = np.concatenate([x, np.sqrt(strength) * np.eye(5)])
    solved = np.linalg.lstsq(augmented, np.concatenate([y, np.zeros((5, 3))]), rcond=None)[0]
    assert np.allclose(fit_map(seen, rows, weights).numpy(), solved, atol=1e-5)


def test_each_item_is_told_by_the_map_for_its_number_of_sums():
    maps, mean = torch.randn(3, 4, 2, generator=RNG), torch.tensor([10.0, -10.0])
    sums, exposures = torch.randn(5, 3, generator=RNG), torch.tensor([1, 2, 3, 3, 7])
    rows = predict_rows(sums, exposures, maps, mean)
    for row, seen, times in zip(
        rows, row_features(sums), (0, 1, 2, 2, 2), strict=True
    ):  # more sums than maps: the last one
        assert torch.allclose(row, mean + seen @ maps[times], atol=1e-5)


KEYS = torch.arange(40) * 977 + 5
WIDTH = 4


def told_by(users: list[int], seed: int = 0) -> Introductions:
    """Each of these users speaks of three items, within the radius."""
    rng = Generator().manual_seed(seed)
    whose = torch.tensor(users).repeat_interleave(3)
    items = torch.cat([torch.randperm(12, generator=rng)[:3].sort().values for _ in users])
    values = clip_introductions(whose, torch.randn(len(whose), WIDTH, generator=rng), 1.0)
    return Introductions(whose, items, values)


def arrive(*uploads: ItemUpload) -> tuple[Introductions, dict[str, int]]:
    accepted, refused = accept_items(uploads, slice_index=2, n_items=12, width=WIDTH)
    return accepted, dict(refused)


def test_what_honest_devices_say_arrives_as_it_was_and_without_names():
    said = told_by([3, 7, 8, 30])
    upload, users = make_item_upload(said, KEYS, SeededDraws(1), 2)
    assert users.tolist() == [3, 7, 8, 30]
    assert upload.counts.tolist() == [3] * 4
    accepted, refused = arrive(upload)
    assert refused == {}
    assert accepted.users.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert torch.equal(accepted.items, said.items)
    assert torch.equal(accepted.values, said.values)
    in_two, _ = arrive(*(make_item_upload(told, KEYS, SeededDraws(1), 2)[0] for told in split(said, 7)))
    assert all(torch.equal(getattr(in_two, name), getattr(accepted, name)) for name in ("users", "items", "values"))


def split(said: Introductions, user: int) -> list[Introductions]:
    first = said.users <= user
    return [Introductions(said.users[at], said.items[at], said.values[at]) for at in (first, ~first)]


def test_tokens_of_new_items_are_those_of_no_round_of_the_prototypes():
    upload, users = make_item_upload(told_by([3, 7]), KEYS, SeededDraws(1), 2)
    rounds = [SeededDraws(1).tokens(KEYS[users], round_) for round_ in range(200)]
    assert not torch.isin(upload.tokens, torch.cat(rounds)).any()


def test_a_second_copy_counts_once_and_one_that_is_too_long_is_clipped_again():
    upload, _ = make_item_upload(told_by([3, 7]), KEYS, SeededDraws(1), 2)
    accepted, refused = arrive(upload, upload)
    assert refused == {"sent twice": 2}
    assert len(accepted.items) == 6
    accepted, refused = arrive(replace(upload, values=100 * upload.values))
    lengths = torch.zeros(2).index_add(0, accepted.users, accepted.values.square().sum(1)).sqrt()
    assert refused == {}
    assert (lengths <= 1).all()
    assert (lengths > 0.999).all()


def lone(items: list[int], values: torch.Tensor) -> ItemUpload:
    """What a device that follows no protocol sends."""
    return ItemUpload(2, torch.tensor([99]), torch.tensor([len(items)]), torch.tensor(items), values)


def added_by(cheat: ItemUpload) -> torch.Tensor:
    """By how much one more upload moves the exact sums of three honest devices."""
    wanted, honest = torch.ones(12, dtype=torch.bool), make_item_upload(told_by([3, 7, 8]), KEYS, SeededDraws(1), 2)[0]
    with_it, without = (
        sum_introductions(arrive(*some)[0], wanted, 0.0, seeded_noise(RNG)) for some in ([honest, cheat], [honest])
    )
    return with_it - without


def test_a_cheating_device_moves_all_sums_together_by_no_more_than_one():
    loud = lone(list(range(12)), torch.full((12, WIDTH), 1e6))
    assert 0.999 < float(added_by(loud).norm()) <= 1 + 1e-6
    often = lone([5] * 10_000, torch.full((10_000, WIDTH), 1e-2))  # of length 2 as it is counted, 200 as it adds up
    assert arrive(often)[1] == {"an item named twice by a device": 1}
    assert not added_by(often).any()


@pytest.mark.parametrize("honest", [0, 1, 3, 10, 100])
def test_one_device_moves_a_new_items_place_the_less_the_more_speak_of_it(honest):
    """By 1 / (n + 5) of a typical row's length in a slice, and a little more where it lies about its count, too."""
    rng = Generator().manual_seed(honest)
    place = torch.nn.functional.normalize(torch.randn(WIDTH - 1, generator=rng), dim=0)
    sums = honest * torch.cat([torch.ones(1), 0.9 * place])
    before = row_features(sums[None])[0, : WIDTH - 1]
    lies = torch.nn.functional.normalize(torch.randn(2_000, WIDTH, generator=rng), dim=1)
    moved = (row_features(sums + lies)[:, : WIDTH - 1] - before).norm(dim=1)
    straight = torch.cat([torch.zeros(1), -place])
    assert float((row_features((sums + straight)[None])[0, : WIDTH - 1] - before).norm()) == pytest.approx(
        1 / (honest + DOUBT), abs=1e-6
    )
    assert float(moved.max()) <= 2**0.5 / (max(honest - 1, 0) + DOUBT)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_number_that_is_none_silences_its_device_alone(value):
    upload, _ = make_item_upload(told_by([3, 7, 9]), KEYS, SeededDraws(1), 2)
    values = upload.values.clone()
    values[4, 1] = value
    accepted, refused = arrive(replace(upload, values=values))
    assert refused == {"numbers that are not finite": 1}
    assert accepted.users.tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.equal(accepted.items, upload.items[[0, 1, 2, 6, 7, 8]])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda u: {"slice_index": 1}, "of a slice that is over"),
        (lambda u: {"slice_index": 3}, "of a slice that has not begun"),
        (lambda u: {"values": u.values[:, :2]}, "values are not 4 numbers of 32 bits for each item"),
        (lambda u: {"values": u.values.double()}, "values are not 4 numbers of 32 bits for each item"),
        (lambda u: {"items": u.items + 12}, "an item outside 0..11"),
        (lambda u: {"items": -u.items - 1}, "an item outside 0..11"),
        (lambda u: {"counts": u.counts + 1}, "counts that do not add up to the items"),
        (lambda u: {"counts": u.counts * torch.tensor([-1, 3])}, "counts that do not add up to the items"),
        (lambda u: {"tokens": u.tokens.float()}, "tokens, counts and items are not whole numbers"),
        (lambda u: {"tokens": u.tokens[:1]}, "tokens, counts and items are not whole numbers"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_reason_and_the_rest_is_heard(change, why):
    upload, _ = make_item_upload(told_by([3, 7]), KEYS, SeededDraws(1), 2)
    other, _ = make_item_upload(told_by([9], seed=4), KEYS, SeededDraws(1), 2)
    accepted, refused = arrive(replace(upload, **change(upload)), other)
    ((reason, n),) = refused.items()
    assert reason.startswith(why)
    assert n >= 1
    assert torch.equal(accepted.values, other.values)


ODD = st.sampled_from([0, 1, 3, -1, 12, 2**31, 2**62, -(2**63), 2**63 - 1])


@st.composite
def any_uploads(draw: st.DrawFn) -> ItemUpload:
    """Anything that could stand in a message: wrong shapes and types, counts and items of any size, odd numbers."""
    n = draw(st.integers(0, 4))
    said = draw(st.integers(0, 6))
    tokens, counts, items = (
        torch.tensor(draw(st.lists(ODD | st.integers(0, 11), min_size=size, max_size=size)), dtype=torch.int64)
        for size in (n, n, said)
    )
    if draw(st.booleans()):
        counts = torch.bincount(torch.randint(max(n, 1), (said,), generator=RNG), minlength=n)
    values = torch.full((said, WIDTH), draw(st.sampled_from([0.3, -1e38, 3e38, 0.0, float("nan"), float("inf")])))
    kinds = draw(st.sampled_from([{}, {"counts": counts.float()}, {"items": items[None]}, {"tokens": tokens.sum()}]))
    wrapped = draw(st.sampled_from([counts, torch.tensor([2**62] * 4 + [said])]))
    return replace(ItemUpload(2, tokens, wrapped, items, values), **kinds)


@given(any_uploads())
@settings(max_examples=300)
def test_whatever_arrives_stops_nothing_and_says_no_more_than_its_devices_may(upload):
    honest = make_item_upload(told_by([3]), KEYS, SeededDraws(1), 2)[0]
    accepted, refused = arrive(honest, upload)
    heard = len(accepted.users.unique())
    assert 1 <= heard <= 1 + len(upload)
    assert accepted.values.isfinite().all()
    assert float(accepted.values.double().square().sum()) <= heard * (1 + 1e-6)
    assert torch.equal(accepted.values[:3], honest.values)
    assert heard == 1 + len(upload) or refused or not len(upload.items) or not upload.counts.all()


def test_counts_that_wrap_around_to_the_right_sum_are_refused():
    upload = ItemUpload(2, torch.arange(5), torch.tensor([2**62] * 4 + [3]), torch.arange(3), torch.ones(3, WIDTH))
    assert arrive(upload)[1] == {"counts that do not add up to the items": 5}


def test_nobody_says_nothing():
    accepted, refused = arrive()
    assert (len(accepted.users), accepted.values.shape, refused) == (0, (0, WIDTH), {})
