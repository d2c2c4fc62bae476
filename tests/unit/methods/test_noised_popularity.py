"""Popularity under a budget: what is released against a slow loop, its price, and how it is asked for."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from worlds import learned, questions, tiny_config, tiny_stream

from protofed.backbone.training import PlainDescent
from protofed.federation.popularity import base_votes
from protofed.methods.labels import run_label
from protofed.methods.noised_popularity import NoisedPopularity
from protofed.methods.private import as_asked
from protofed.methods.protocol import World
from protofed.privacy.accountant import epsilon
from protofed.privacy.ledger import Release
from protofed.slices.leaks import check_evidence
from protofed.slices.stream import SliceStream

NOISE, METHOD = 0.5, NoisedPopularity()


def world_of(data=None, **settings) -> World:
    config = tiny_config(method="popularity", privacy__wrap=True, **{"privacy__noise_multiplier": NOISE} | settings)
    return World(config, (data or tiny_stream()).slice_(0), learned("popularity").world.backbone)


def votes_by_hand(data: SliceStream, index: int) -> torch.Tensor:
    slice_ = data.slice_(index)
    start, end = slice_.bounds[-1].part("train")
    users, items = data.log.users[start:end].numpy(), data.log.items[start:end].numpy()
    said = torch.zeros(slice_.n_train_items)
    for user in np.unique(users):
        met = np.unique(items[users == user])
        said[torch.from_numpy(met).long()] += 1 / np.sqrt(len(met))
    return said


def test_everybody_is_scored_with_the_base_blocks_sums_and_the_noised_ones():
    data, world = tiny_stream(), world_of()
    start = METHOD.start(world)
    state, told = METHOD.learn(world, start, data.slice_(1), PlainDescent())
    heard = np.unique(data.slice_(1).past.users[data.slice_(1).train_positions])
    assert told == {"popularity_clients": len(heard), "popularity_noise": NOISE}
    _, queries = questions(1)
    scores = METHOD.score(world, state, queries)
    assert torch.equal(scores[0], scores[-1])
    base = base_votes(data.slice_(0)).total
    error = scores[0] - torch.nn.functional.pad(base, (0, queries.n_items - len(base)))
    exact = votes_by_hand(data, 1)
    error[: len(exact)] -= exact
    assert 0.85 * NOISE < float(error[: len(exact)].std()) < 1.15 * NOISE
    assert not error[len(exact) :].any()  # items that came after the train part
    check_evidence(data, 1, METHOD.evidence(state))


def test_the_whole_budget_buys_one_release_a_slice():
    slices = 8
    world = world_of(privacy__target_epsilon=3.4, privacy__noise_multiplier=0.0, stream__n_slices=slices)
    state = METHOD.start(world)
    assert state.noise_multiplier == pytest.approx(3.524, abs=2e-3)
    assert METHOD.releases(world, state) == ()
    ledger = METHOD.releases(world, state, slices)
    assert ledger == (Release(state.noise_multiplier, 1.0, slices, "popularity"),)
    assert 3.39 < epsilon(ledger, 1e-5, trust="central") <= 3.4


def test_a_budget_beside_a_given_noise_ends_the_releases():
    world = world_of(privacy__target_epsilon=3.4, privacy__noise_multiplier=2.0, stream__n_slices=8)
    state = METHOD.start(world)
    assert 1 <= state.allowed < 8
    ended = replace(state, allowed=0)
    after, told = METHOD.learn(world, ended, tiny_stream().slice_(1), PlainDescent())
    assert told["popularity_clients"] == 0
    assert torch.equal(after.counts.total, state.counts.total)
    assert METHOD.releases(world, after) == ()


def test_a_budget_makes_popularity_the_noised_one_and_tables_say_so():
    config = world_of().config
    assert as_asked(learned("popularity").method, config) == METHOD
    assert run_label(config) == "popularity (private)"
