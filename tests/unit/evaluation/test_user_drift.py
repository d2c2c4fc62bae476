"""Drift between a user's items before and in a slice: against a slow reference, and where the answer is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofed.evaluation.drift import WIDTH, item_vectors, user_drift


def slow_drift(users, items, start, user):
    vectors = item_vectors(users[:start], items[:start], int(items.max()) + 1)
    sides = []
    for events in (range(start), range(start, len(users))):
        total = np.zeros(WIDTH)
        for event in events:
            if users[event] == user:
                total += vectors[items[event]]
        sides.append(total)
    lengths = [np.linalg.norm(side) for side in sides]
    return 1 - sides[0] @ sides[1] / np.prod(lengths) if min(lengths) > 1e-12 else np.nan


@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.floats(0, 1))
def test_drift_equals_one_minus_the_cosine_of_the_summed_vectors(seed, n, cut):
    rng = np.random.default_rng(seed)
    users, items, start = rng.integers(0, 5, n), rng.integers(0, 12, n), int(cut * n)
    asked = rng.permutation(5)[:3]
    found = user_drift(users, items, start, asked)
    slow = [slow_drift(users, items, start, user) for user in asked]
    np.testing.assert_allclose(found, slow, atol=1e-9)


def test_whoever_goes_on_as_before_does_not_drift_and_whoever_joins_strangers_does():
    crowd = [(user, item) for user in range(2, 12) for item in (0, 1)]  # items 0 and 1 belong together
    crowd += [(user, item) for user in range(12, 22) for item in (2, 3)]
    before, after = [*crowd, (0, 0), (1, 0)], [(0, 1), (1, 2)]
    users, items = np.array([*before, *after]).T
    calm, restless = user_drift(users, items, len(before), np.array([0, 1]))
    assert calm < 0.2
    assert restless > 0.6


def test_the_same_items_in_both_parts_are_no_drift():
    users, items = np.array([0, 0, 1, 0, 0]), np.array([0, 1, 2, 1, 0])
    assert user_drift(users, items, 3, np.array([0])) == pytest.approx([0.0])


def test_drift_is_unknown_without_a_past_without_a_present_and_for_items_that_nobody_met_before():
    users, items = np.array([0, 1, 1, 2, 0]), np.array([0, 1, 0, 0, 2])
    found = user_drift(users, items, 3, np.array([0, 1, 2, 7]))
    assert np.isnan(found).all()


def test_a_log_of_which_nothing_lies_before_tells_no_drift():
    assert np.isnan(user_drift(np.array([0, 1]), np.array([0, 1]), 0, np.array([0, 1]))).all()
    assert len(user_drift(np.array([0]), np.array([0]), 1, np.array([], dtype=np.int64))) == 0


def test_item_vectors_have_length_one_and_repeats_change_nothing():
    users, items = np.array([0, 0, 1, 2]), np.array([0, 1, 1, 3])
    vectors = item_vectors(users, items, 5)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1, 0, 1, 0])
    np.testing.assert_array_equal(item_vectors(np.append(users, 0), np.append(items, 0), 5), vectors)


def test_a_later_user_does_not_move_the_vectors_of_items_it_did_not_meet():
    users, items = np.array([0, 1, 1]), np.array([0, 0, 1])
    with_another = item_vectors(np.append(users, 900), np.append(items, 2), 3)
    np.testing.assert_array_equal(with_another[:2], item_vectors(users, items, 3)[:2])
