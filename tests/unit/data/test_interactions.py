import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofed.data import interactions
from protofed.data.interactions import check_seconds, chronological, first_appearance, integer_codes
from protofed.errors import DataError


@given(st.lists(st.integers(-(2**62), 2**62) | st.integers(0, 5), min_size=1, max_size=60))
def test_rows_are_ordered_by_time_and_ties_keep_their_order(times):
    order, in_order = chronological(np.array(times, dtype=np.int64))
    expected = sorted(range(len(times)), key=lambda row: times[row])
    assert (list(range(len(times))) if order is None else order.tolist()) == expected
    assert in_order.tolist() == sorted(times)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=80), st.integers(1, 7))
def test_codes_are_renumbered_by_first_appearance_whatever_the_step(codes, step):
    whole, interactions.STEP = interactions.STEP, step
    try:
        new, old_of_new = first_appearance(np.array(codes), 12)
    finally:
        interactions.STEP = whole
    assert old_of_new.tolist() == list(dict.fromkeys(codes))
    assert old_of_new[new].tolist() == codes


@given(st.lists(st.integers(-(10**15), 10**15) | st.integers(0, 20), min_size=1, max_size=50))
def test_integer_codes_lead_back_to_the_identifiers(values):
    codes, ids = integer_codes(np.array(values, dtype=np.int64))
    assert ids.take(codes.tolist()).to_pylist() == values


@pytest.mark.parametrize(("time", "words"), [(-5, "negative -5"), (1_433_221_332_117, "look like milliseconds")])
def test_times_that_cannot_be_seconds_are_refused(time, words):
    with pytest.raises(DataError, match=words):
        check_seconds(np.array([1_433_221_332, time]), "a log")
