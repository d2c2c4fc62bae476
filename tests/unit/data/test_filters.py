import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofed.data import filters
from protofed.data.interactions import InteractionLog, from_codes, from_columns
from protofed.errors import DataError

ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=60)


def rows_of(log: InteractionLog) -> list[tuple[object, object, int]]:
    users, items = log.user_ids.to_pylist(), log.item_ids.to_pylist()
    triples = zip(log.users.tolist(), log.items.tolist(), log.times.tolist(), strict=True)
    return [(users[u], items[i], t) for u, i, t in triples]


def log_of(rows, name="toy", **columns) -> InteractionLog:
    users, items, times = (np.array(column) for column in zip(*rows, strict=True))
    ids = pa.array(range(10))
    return from_codes(name, users, items, times, ids, ids, **columns)


def slow_core(rows, k):
    while True:
        users, items = [u for u, _, _ in rows], [i for _, i, _ in rows]
        kept = [row for row in rows if users.count(row[0]) >= k and items.count(row[1]) >= k]
        if kept == rows:
            return rows
        rows = kept


@pytest.mark.slow
@given(ROWS, st.integers(1, 4))
def test_the_core_is_what_remains_when_rare_users_and_items_are_dropped_until_none_is_left(rows, k):
    expected = slow_core(sorted(rows, key=lambda row: row[2]), k)
    if expected:
        assert rows_of(filters.five_core(log_of(rows), k)) == expected
    else:
        with pytest.raises(DataError, match="no event is left"):
            filters.five_core(log_of(rows), k)


@given(ROWS)
def test_deduplication_keeps_the_first_of_equal_user_item_and_time(rows):
    expected = list(dict.fromkeys(sorted(rows, key=lambda row: row[2])))
    assert rows_of(filters.deduplicate(log_of(rows))) == expected


@given(ROWS)
def test_filtered_logs_number_users_and_items_by_first_appearance(rows):
    log = filters.deduplicate(log_of(rows))
    for codes, n in ((log.users, log.n_users), (log.items, log.n_items)):
        assert list(dict.fromkeys(codes.tolist())) == list(range(n))


def test_ratings_below_four_are_dropped_and_the_others_keep_theirs():
    log = log_of([(0, 0, 1), (0, 1, 2), (1, 0, 3)], ratings=np.array([4.0, 3.5, 5.0]))
    kept = filters.at_least_rating(log, 4.0)
    assert rows_of(kept) == [(0, 0, 1), (1, 0, 3)]
    assert kept.ratings.tolist() == [4.0, 5.0]


def test_the_rating_rule_refuses_a_log_without_ratings():
    with pytest.raises(DataError, match="needs ratings, found none"):
        filters.at_least_rating(log_of([(0, 0, 1)]))


def test_only_the_events_asked_for_are_kept():
    events = pa.array(["pv", "buy", "pv"]).dictionary_encode()
    kept = filters.keep_events(log_of([(0, 0, 1), (0, 1, 2), (1, 0, 3)], events=events), {"pv"})
    assert rows_of(kept) == [(0, 0, 1), (1, 0, 3)]
    assert kept.events.to_pylist() == ["pv", "pv"]


def test_asking_for_an_event_that_does_not_occur_names_those_that_do():
    log = log_of([(0, 0, 1)], events=pa.array(["buy"]).dictionary_encode())
    with pytest.raises(DataError, match="found only buy"):
        filters.keep_events(log, {"pv"})


def dense(n_users=6, n_items=5):
    return [(u, i, 10 * u + i) for u in range(n_users) for i in range(n_items)]


def test_movielens_is_canonical_by_rating_and_other_names_by_five_core_alone():
    rows = dense(6, 6)
    ratings = np.array([1.0 if item == 5 else 5.0 for _, item, _ in rows])
    assert len(filters.canonical(log_of(rows, "movielens-20m", ratings=ratings))) == 30
    assert len(filters.canonical(log_of(rows, "yelp", ratings=ratings))) == 36
    assert len(filters.canonical(log_of(rows, "yelp", ratings=ratings), "movielens")) == 30


def test_taobao_is_canonical_by_page_views_only_where_it_has_some():
    rows = dense(6, 6)
    mixed = pa.array(["buy" if item == 5 else "pv" for _, item, _ in rows]).dictionary_encode()
    no_views = pa.array(["buy" if item == 5 else "cart" for _, item, _ in rows]).dictionary_encode()
    assert len(filters.canonical(log_of(rows, "taobao", events=mixed))) == 30
    assert len(filters.canonical(log_of(rows, "taobao", events=no_views))) == 36
    assert len(filters.canonical(log_of(rows, "taobao"))) == 36


def test_a_larger_subsample_contains_the_smaller_one_and_does_not_depend_on_row_order():
    rows = [(f"user {n % 40}", n % 7, n) for n in range(200)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    log = from_columns("toy", *columns)
    backwards = from_columns("toy", columns[0][::-1], columns[1][::-1], columns[2])
    small, large = (set(filters.subsample_users(log, n, seed=3).user_ids.to_pylist()) for n in (5, 20))
    assert len(small) == 5
    assert len(large) == 20
    assert small < large
    assert set(filters.subsample_users(backwards, 5, seed=3).user_ids.to_pylist()) == small
    assert set(filters.subsample_users(log, 5, seed=4).user_ids.to_pylist()) != small


def test_a_subsample_larger_than_the_log_is_refused():
    with pytest.raises(DataError, match="takes 1 to 1 users, asked for 2"):
        filters.subsample_users(log_of([(0, 0, 1)]), 2, seed=0)
