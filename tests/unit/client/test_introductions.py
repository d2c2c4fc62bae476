"""What clients say about new items: hand-computed places, bounded per client, nobody else in it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import random_model

from protofed.client.introductions import clip_introductions, coordinates, introductions, map_of
from protofed.slices.histories import histories

PUBLIC = random_model(6)  # items 0 .. 5 have rows; 6, 7 are newcomers
ON = map_of(PUBLIC.items.detach(), 3)
WANTED = torch.tensor([False] * 6 + [True, True])


def past_of(events: list[tuple[int, int]]):
    """A log of (user, item), one a second."""
    users, items = (np.array(column) for column in zip(*events, strict=True))
    return histories(users, items, np.arange(len(events)), int(users.max()) + 1)


def said_of(events: list[tuple[int, int]], *, until: int | None = None, radius: float = 1e6, wanted=WANTED):
    past = past_of(events)
    end = len(events) if until is None else until
    return introductions(past, np.arange(end), end, PUBLIC, ON, wanted, radius=radius)


def test_the_map_keeps_the_main_directions_and_scales_rows_to_length_one_on_average():
    rows = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) * torch.linspace(3, 0.1, 8)
    on = map_of(rows, 3)
    assert torch.allclose(on.directions.T @ on.directions, torch.eye(3), atol=1e-5)
    assert float(coordinates(on, rows).square().sum(-1).mean()) == pytest.approx(1, abs=1e-5)
    values, vectors = np.linalg.eigh(np.cov(rows.numpy().T))
    main = torch.from_numpy(vectors[:, np.argsort(-values)[:3]]).float()
    assert torch.allclose(on.directions @ on.directions.T, main @ main.T, atol=1e-4)


def test_a_newcomer_is_placed_at_the_mean_of_its_own_clients_public_neighbours():
    said = said_of([(0, 1), (0, 6), (0, 2), (1, 5)])
    assert said.users.tolist() == [0]
    assert said.items.tolist() == [6]
    where = coordinates(ON, PUBLIC.items.detach())
    assert torch.allclose(said.values[0], torch.cat([torch.ones(1), (where[1] + where[2]) / 2]), atol=1e-5)


def test_newcomers_place_nobody_and_events_after_the_cut_are_not_seen():
    alone = said_of([(0, 7), (0, 6), (0, 3)], until=2)
    assert alone.items.tolist() == [6, 7]
    assert torch.allclose(alone.values, torch.tensor([[1.0, 0, 0, 0]] * 2), atol=1e-5)


def test_two_meetings_count_twice_and_add_up_their_places():
    said = said_of([(0, 1), (0, 6), (0, 6)])
    where = coordinates(ON, PUBLIC.items.detach())[1]
    assert torch.allclose(said.values[0], torch.cat([torch.full((1,), 2.0), 2 * where]), atol=1e-5)


def test_only_neighbours_within_five_events_count():
    said = said_of([(0, 1)] + [(0, 7)] * 6 + [(0, 6)])
    assert torch.allclose(said.values[said.items == 6][0], torch.tensor([1.0, 0, 0, 0]), atol=1e-5)


EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(events=EVENTS, radius=st.sampled_from([0.1, 1.0, 5.0]))
def test_nobody_says_more_than_the_radius_and_leaving_changes_nobody_else(events, radius):
    everybody = said_of(events, radius=radius)
    for user in range(4):
        mine = everybody.users == user
        assert float(everybody.values[mine].double().norm()) <= radius
        rest = [(u, i) if u != user else (u, 0) for u, i in events]  # the user met nothing new
        others = said_of(rest, radius=radius)
        assert torch.equal(others.users, everybody.users[~mine])
        assert torch.equal(others.items, everybody.items[~mine])
        assert torch.equal(others.values, everybody.values[~mine])


def test_short_contributions_are_left_as_they_are_and_broken_ones_are_dropped():
    whose = torch.tensor([0, 0, 1, 2])
    values = torch.tensor([[0.3, 0.0], [0.0, 0.4], [torch.nan, 1.0], [30.0, 40.0]])
    kept = clip_introductions(whose, values, 1.0)
    assert torch.allclose(kept, torch.tensor([[0.3, 0.0], [0.0, 0.4], [0.0, 0.0], [0.6, 0.8]]), atol=1e-5)


def test_without_newcomers_nothing_is_said():
    said = said_of([(0, 1), (0, 2)])
    assert len(said.users) == len(said.items) == len(said.values) == 0
