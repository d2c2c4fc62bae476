from pathlib import Path

import pytest

from protofed.data.columns import choose
from protofed.errors import DataError

FILE = Path("log.csv")
NOTHING = dict.fromkeys(("user", "item", "time", "rating", "event"))


@pytest.mark.parametrize(
    ("columns", "chosen"),
    [
        (["userId", "movieId", "rating", "timestamp"], ["userId", "movieId", "timestamp", "rating", None]),
        (["timestamp", "visitorid", "event", "itemid"], ["visitorid", "itemid", "timestamp", None, "event"]),
        (["t_dat", "customer_id", "article_id", "price"], ["customer_id", "article_id", "t_dat", None, None]),
        (["User ID", "SKU", "Created At"], ["User ID", "SKU", "Created At", None, None]),
        (["user_id", "username", "asin", "ts"], ["user_id", "asin", "ts", None, None]),
        (["uid", "productId", "eventTime", "event_type"], ["uid", "productId", "eventTime", None, "event_type"]),
    ],
)
def test_usual_names_are_told_whatever_their_case_and_marks(columns, chosen):
    right = {role: name for role, name in zip(NOTHING, chosen, strict=True) if name}
    assert choose(NOTHING, columns, FILE) == (right, [])


def test_a_name_given_is_taken_and_leaves_the_others_to_be_told():
    columns = ["who", "item", "sku", "time", "action", "event"]
    chosen, remarks = choose(NOTHING | {"user": "WHO", "item": "sku"}, columns, FILE)
    assert chosen == {"user": "who", "item": "sku", "time": "time"}
    assert remarks == ["no event is read: action and event could both be it, name one by --event"]
    assert choose(NOTHING | {"user": "who", "item": "sku", "event": ""}, columns, FILE) == (chosen, [])


@pytest.mark.parametrize(
    ("asked", "columns", "words"),
    [
        ({}, ["user", "a", "time"], "no column is named like an item; name it by --item: "),
        ({}, ["a", "item", "time"], "no column is named like a user; name it by --user: the columns are a, item, time"),
        ({}, ["user", "item", "ts", "date"], "which column is the time, ts or date? Name it by --time"),
        ({"user": "usr"}, ["user", "item"], "--user 'usr' is none of its columns (did you mean user?); they are user"),
        ({"user": "a", "item": "a"}, ["a", "time"], "found a for user and item; name another by --item"),
        ({"user": ""}, ["user", "item", "time"], "--user '' is none of its columns"),
        ({}, ["x\ny", ""], r"the columns are 'x\ny', ''"),
    ],
)
def test_missing_and_ambiguous_columns_are_refused_in_one_line_with_the_flag_to_give(asked, columns, words):
    with pytest.raises(DataError) as caught:
        choose(NOTHING | asked, columns, FILE)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
