"""Draws and notes of extra losses."""

import pytest
import torch
from torch import Generator

from protofed.backbone.extras import Dealt, Notes, Streamed, uniform_items


def streamed(seed: int = 0) -> Streamed:
    return Streamed(Generator().manual_seed(seed))


def dealt(n: int = 50_000) -> Dealt:
    return Dealt(torch.rand(n, generator=Generator().manual_seed(0), dtype=torch.float64))


@pytest.mark.parametrize("lots", [streamed(), dealt()])
def test_integers_are_uniform_and_below_their_bound(lots):
    drawn = lots.integers(7, (3, 5_000))
    assert drawn.shape == (3, 5_000)
    counts = torch.bincount(drawn.flatten(), minlength=7)
    assert len(counts) == 7
    assert (counts / 15_000).tolist() == pytest.approx([1 / 7] * 7, abs=0.01)


@pytest.mark.parametrize("lots", [streamed(), dealt()])
@pytest.mark.parametrize(("n", "k"), [(10, 4), (10, 10), (3, 8), (1, 1)])
def test_distinct_numbers_are_distinct_and_all_of_them_where_more_are_asked_for(lots, n, k):
    drawn = lots.distinct(n, k).tolist()
    assert len(drawn) == len(set(drawn)) == min(n, k)
    assert set(drawn) <= set(range(n))


@pytest.mark.parametrize("lots", [streamed(), dealt()])
def test_every_number_is_as_likely_to_be_among_the_distinct_ones(lots):
    counts = torch.bincount(torch.cat([lots.distinct(7, 3) for _ in range(7_000)]), minlength=7)
    assert (counts / 7_000).tolist() == pytest.approx([3 / 7] * 7, abs=0.03)


def test_dealt_numbers_are_handed_out_once_in_order():
    lots = Dealt(torch.arange(10) / 10)
    assert lots.uniform((2,)).tolist() == pytest.approx([0.0, 0.1])
    assert lots.integers(10, (1, 3)).tolist() == [[2, 3, 4]]
    assert lots.used == 5


def test_the_largest_number_below_1_stays_below_the_bound():
    lots = Dealt(torch.full((4,), 1 - 2.0**-53, dtype=torch.float64))
    assert lots.integers(3, (2,)).tolist() == [2, 2]
    assert lots.distinct(5, 2).tolist() == [2, 4]


def test_all_items_are_given_once_where_that_many_are_asked_for():
    assert uniform_items(streamed(), 2, 5, 4).tolist() == [[0, 1, 2, 3]] * 2
    assert uniform_items(streamed(), 2, 3, 4).shape == (2, 3)


def test_notes_are_means_weighted_by_their_counts():
    notes = Notes()
    notes.add("loss", torch.tensor(6.0), torch.tensor(3))
    notes.add("loss", torch.tensor(4.0), 1)
    notes.add("nothing", torch.tensor(0.0), torch.tensor(0))
    assert notes.means() == {"loss": 2.5, "nothing": 0.0}
    assert notes.mean("never noted") == 0


def test_notes_add_in_place_from_the_second_time_on():
    notes = Notes()
    notes.add("loss", torch.tensor(6.0), 3)
    kept = notes.sums["loss"], notes.counts["loss"]
    notes.add("loss", torch.tensor(1.0), 1)
    assert notes.sums["loss"] is kept[0]
    assert [float(tensor) for tensor in kept] == [7.0, 4.0]


def test_what_is_noted_holds_no_graph():
    weight = torch.ones((), requires_grad=True)
    notes = Notes()
    notes.add("loss", 2 * weight)
    assert not notes.sums["loss"].requires_grad
