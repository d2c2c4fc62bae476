"""The popularity prior and the personal memory against their formulas, one event at a time."""

import math

import numpy as np
import pytest
import torch
from worlds import LENGTH, learned, questions, tiny_config, tiny_stream

from protofed.config import RunConfig, ScoringConfig, override
from protofed.experiments.evaluate import switched
from protofed.methods.protocol import World
from protofed.methods.scoring import personal_memory, popularity_prior
from protofed.slices.histories import Queries

DAY = 86_400


def hand_made() -> Queries:
    return Queries(
        users=torch.tensor([0, 1, 2]),
        times=torch.tensor([100 * DAY, 100 * DAY, 7]),
        tokens=torch.full((3, 2), -1),
        offsets=torch.tensor([0, 3, 4, 4]),
        past_items=torch.tensor([2, 0, 2, 1]),
        past_times=torch.tensor([40 * DAY, 70 * DAY, 100 * DAY, 99 * DAY + DAY // 2]),
        slice_index=1,
        n_items=4,
    )


def test_the_memory_by_hand():
    scores = personal_memory(hand_made(), weight=2.0, half_life_days=30.0)
    recent = 2 * math.log(1 + 10 * (0.25 + 1))  # two half-lives ago, and just now
    first, second = [2 * math.log(1 + 5), 0, recent, 0], [0, 2 * math.log(1 + 10 * 0.5 ** (0.5 / 30)), 0, 0]
    assert scores.tolist() == [pytest.approx(first), pytest.approx(second), [0.0] * 4]


def test_the_memory_is_the_formula_over_each_users_strictly_earlier_events():
    data, (asked, queries) = tiny_stream(), questions()
    scores = personal_memory(queries, weight=1.5, half_life_days=10.0)
    users, items, times = (column.tolist() for column in (data.log.users, data.log.items, data.log.times))
    for row, position in enumerate(asked.positions.tolist()[:40]):
        total = [0.0] * asked.n_items
        for user, item, time in zip(users[:position], items[:position], times[:position], strict=True):
            if user == users[position] and time < times[position]:
                total[item] += 0.5 ** ((times[position] - time) / DAY / 10)
        expected = [1.5 * math.log(1 + 10 * value) for value in total]
        assert scores[row].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_prior_is_the_logarithm_of_the_train_count():
    counts = torch.tensor([0, 1, 9])
    expected = [0.0, 0.5 * math.log(2), 0.5 * math.log(10), 0.0, 0.0]
    assert popularity_prior(counts, 5, 0.5).tolist() == pytest.approx(expected)
    assert popularity_prior(counts, 2, 0.5).tolist() == pytest.approx(expected[:2])


def test_both_switches_are_off_by_default():
    assert (ScoringConfig().popularity_prior, ScoringConfig().personal_memory) == (0.0, 0.0)
    queries = hand_made()
    scores = torch.randn(3, 4)
    assert switched(scores, world(RunConfig()), queries, torch.tensor([5, 0, 1])) is scores


def world(config: RunConfig) -> World:
    run = learned("popularity")
    return World(config, run.world.base, run.world.backbone)


def test_a_switch_that_is_on_adds_to_the_scores():
    queries, counts, scores = hand_made(), torch.tensor([5, 0, 1]), torch.randn(3, 4)
    settings = {"scoring.popularity_prior": 0.5, "scoring.personal_memory": 2.0, "scoring.memory_half_life_days": 15.0}
    found = switched(scores, world(override(tiny_config(), settings)), queries, counts)
    memory = personal_memory(queries, weight=2.0, half_life_days=15.0)
    assert torch.allclose(found, scores + popularity_prior(counts, 4, 0.5) + memory)


def test_the_personal_memory_method_is_the_frozen_one_with_the_memory_on_top():
    _, queries = questions()
    frozen, remembering = learned("frozen"), learned("personal-memory")
    memory = personal_memory(queries, weight=2.0, half_life_days=30.0)
    assert torch.allclose(remembering.scores(queries), frozen.scores(queries) + memory)
    assert remembering.world.config.scoring.personal_memory == 2.0


def test_queries_are_answered_alone_as_they_are_together():
    data, (asked, queries) = tiny_stream(), questions()
    together = personal_memory(queries, weight=2.0, half_life_days=30.0)
    for row in (0, len(asked) // 2, len(asked) - 1):
        alone = personal_memory(data.queries(asked, np.array([row]), LENGTH), weight=2.0, half_life_days=30.0)
        assert torch.equal(alone[0], together[row])
