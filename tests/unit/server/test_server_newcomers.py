"""Rows from noised introductions: sums by a loop, noise everywhere, a regression that an obvious one confirms."""

import numpy as np
import pytest
import torch
from torch import Generator

from protofed.client.introductions import Introductions
from protofed.privacy.mechanism import os_noise, seeded_noise
from protofed.server.newcomers import RIDGE, fit_map, predict_rows, row_features, sum_introductions

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
