from datetime import UTC, date, datetime, timedelta, timezone

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofed.data.clock import clock_of, iso_seconds
from protofed.errors import DataError

MOMENT = 1_706_695_200  # 2024-01-31 10:00:00 UTC
WRITTEN = {
    "2024-01-31": MOMENT - 36_000,
    "2024/01/31": MOMENT - 36_000,
    "2024-01-31T10:00:00Z": MOMENT,
    "2024-01-31 10:00:00": MOMENT,
    "2024-01-31T10:00:00": MOMENT,
    "2024-01-31T10:00": MOMENT,
    "2024-01-31T10:00:00.987654Z": MOMENT,
    "2024-01-31 10:00:00,9": MOMENT,
    "2024-01-31T10:00:00+05:30": MOMENT - 19_800,
    "2024-01-31 10:00:00-0800": MOMENT + 28_800,
    "2024-01-31 10:00:00+00": MOMENT,
    "2024-01-31 10:00:00 UTC": MOMENT,
    " 2024-01-31 ": MOMENT - 36_000,
    "2024-02-30": None,
    "2024-01-31T25:00:00": None,
    "2024-01-31T10:60": None,
    "31.01.2024": None,
    "1969-12-31": None,
    "2101-01-01": None,
    "٢٠٢٤-01-31": None,
    "": None,
}


@pytest.mark.parametrize("first", ["2024-01-31", "2024-01-31T10:00:00Z", "2024-01-31 10:00:00", "x"])
def test_iso_times_of_all_forms_are_read_whatever_form_the_block_begins_with(first):
    texts = [first, *WRITTEN, None]
    assert iso_seconds(pl.Series(texts)).to_list() == [WRITTEN.get(first), *WRITTEN.values(), None]


@given(
    st.lists(
        st.tuples(
            st.datetimes(datetime(1970, 1, 3), datetime(2100, 1, 1)),
            st.integers(-14 * 60, 14 * 60),
            st.sampled_from(("T", " ")),
            st.sampled_from(("seconds", "milliseconds", "minutes", "microseconds")),
            st.booleans(),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_iso_datetimes_give_the_seconds_that_the_standard_library_gives(moments):
    texts, right = [], []
    for moment, minutes, mark, precision, zoned in moments:
        zone = timezone(timedelta(minutes=minutes)) if zoned else None
        text = moment.replace(tzinfo=zone).isoformat(mark, precision)
        texts.append(text)
        known = datetime.fromisoformat(text)
        right.append(int((known if zoned else known.replace(tzinfo=UTC)).timestamp() // 1))
    assert iso_seconds(pl.Series(texts)).to_list() == right


@pytest.mark.parametrize(
    ("values", "words", "seconds"),
    [
        (["1706695200", "x", "-5", "1706695200000"], "unix seconds", [MOMENT, None, None, None]),
        (["1706695200.9", "1.7066952e9"], "unix seconds", [MOMENT, MOMENT]),
        (["1706695200123", "1706695200", "nan"], "unix milliseconds", [MOMENT, None, None]),
        (["1706695200123456"], "unix microseconds", [MOMENT]),
        (["1706695200123456789"], "unix nanoseconds", [MOMENT]),
        ([MOMENT * 1000 + 999, 5], "unix milliseconds", [MOMENT, None]),
        ([MOMENT + 0.5, MOMENT, float("nan"), float("inf"), 1e300], "unix seconds", [MOMENT] * 2 + [None] * 3),
        (["20240131", "20240231", "20240131"], "dates such as 20240131, UTC", [MOMENT - 36_000, None, MOMENT - 36_000]),
        (["2024-01-31", "tomorrow", None], "ISO dates, UTC", [MOMENT - 36_000, None, None]),
        (["2024-01-31 10:00"], "ISO datetimes without a zone, taken as UTC", [MOMENT]),
        (["2024-01-31 10:00Z"], "ISO datetimes", [MOMENT]),
        ([date(2024, 1, 31), date(1950, 1, 1)], "dates, UTC", [MOMENT - 36_000, None]),
        ([datetime(2024, 1, 31, 10, 0, 0, 999_999)], "datetimes without a zone, taken as UTC", [MOMENT]),
        ([datetime(2024, 1, 31, 10, tzinfo=UTC)], "datetimes", [MOMENT]),
        ([3, 1, 2], "unix seconds", [3, 1, 2]),
    ],
)
def test_a_clock_is_told_by_the_values_and_reads_only_what_fits_it(values, words, seconds):
    column = pl.Series(values)
    clock = clock_of(column, "log.csv: time")
    assert (clock.words, clock.seconds(column).to_list()) == (words, seconds)


def test_times_of_another_format_are_read_by_a_given_one():
    texts = pl.Series(["31.01.2024 10:00", "2024-01-31"])
    clock = clock_of(texts, "log.csv: time", "%d.%m.%Y %H:%M")
    assert (clock.words, clock.seconds(texts).to_list()) == ("'%d.%m.%Y %H:%M', taken as UTC", [MOMENT, None])
    zoned = clock_of(pl.Series(["31 Jan 2024 12:00 +0200"]), "log.csv: time", "%d %b %Y %H:%M %z")
    assert zoned.seconds(pl.Series(["31 Jan 2024 12:00 +0200"])).to_list() == [MOMENT]


@pytest.mark.parametrize(
    ("values", "time_format", "words"),
    [
        (["01/31/2024"], None, "found '01/31/2024'; say how it is written by --time-format"),
        (["01/31/2024"], "%d/%m/%Y", "read as '%d/%m/%Y', taken as UTC, found '01/31/2024'; give its format"),
        (["x"], "%Q", "read as '%Q'"),
        (["", None], None, "is empty in the first rows; name another column by --time"),
        ([True], None, "must hold times, found the type boolean"),
        ([-5, -7], None, "none of the first times is one of 1970 to 2100, read as unix seconds, found -5"),
        ([date(1950, 1, 1)], None, "found 1950-01-01; name another column by --time"),
    ],
)
def test_a_column_that_tells_no_time_is_refused_with_a_value_and_the_way_out(values, time_format, words):
    with pytest.raises(DataError) as caught:
        clock_of(pl.Series(values), "log.csv: time", time_format)
    assert words in str(caught.value)
    assert str(caught.value).startswith("log.csv: time")
