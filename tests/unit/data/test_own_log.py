"""A log of one's own, in every form it may have, against the same rows read by hand."""

import csv
import gzip
import io
import json
from datetime import UTC, date, datetime
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofed.data.own_log import Asked, identifiers, read_log
from protofed.data.reading import Pieces
from protofed.data.tables import starts_oddly
from protofed.errors import ConfigError, DataError, DatasetNotFound

START = 1_700_000_000
ROWS = [(f"u{n % 7}", n % 5, START + 977 * (n * 37 % 50), n % 9 / 2) for n in range(50)]
IN_ORDER = [(user, item, time) for user, item, time, _ in sorted(ROWS, key=lambda row: row[2])]


def iso(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def written(folder: Path, content: bytes | str, name: str = "log.csv") -> Path:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def as_csv(separator: str = ",", rows=ROWS, header: str = "user,item,time,rating") -> str:
    memory = io.StringIO()
    csv.writer(memory, delimiter=separator, lineterminator="\n").writerows([header.split(","), *rows])
    return memory.getvalue()


def as_parquet(folder: Path, columns: dict[str, object]) -> Path:
    pq.write_table(pa.table(columns), folder / "log.parquet")
    return folder / "log.parquet"


def events_of(own) -> list[tuple[object, object, int]]:
    log = own.log
    users, items = log.user_ids.to_pylist(), log.item_ids.to_pylist()
    return [(users[u], items[i], t) for u, i, t in zip(log.users, log.items, log.times.tolist(), strict=True)]


@pytest.mark.parametrize("separator", [",", "\t", ";", "|"])
@pytest.mark.parametrize("packed", [False, True])
def test_delimited_texts_of_any_separator_are_read_packed_or_not(tmp_path, separator, packed):
    content = as_csv(separator).encode()
    name = "log.csv.gz" if packed else "log.txt"
    own = read_log("toy", written(tmp_path, gzip.compress(content) if packed else content, name))
    assert events_of(own) == IN_ORDER
    assert own.log.ratings.tolist() == [row[3] for row in sorted(ROWS, key=lambda row: row[2])]
    assert (own.time, own.read, own.malformed, own.remarks) == ("unix seconds", 50, 0, ())


@pytest.mark.parametrize(
    "write", [int, iso, lambda t: t * 1000 + 7, lambda t: t + 0.25], ids=["s", "iso", "ms", "float"]
)
@pytest.mark.parametrize("packed", [False, True])
def test_json_lines_are_read_with_times_of_any_kind(tmp_path, write, packed):
    lines = [json.dumps({"extra": {"a": [u]}, "userId": u, "item_id": i, "ts": write(t)}) for u, i, t, _ in ROWS]
    content = "\n".join(lines).encode()
    own = read_log("toy", written(tmp_path, gzip.compress(content) if packed else content, "log.jsonl"))
    assert events_of(own) == IN_ORDER
    assert own.columns == {"user": "userId", "item": "item_id", "time": "ts"}


PARQUET_TIMES = {
    "seconds": lambda times: pa.array(times),
    "floats": lambda times: pa.array([time + 0.5 for time in times]),
    "texts": lambda times: pa.array([iso(time) for time in times]),
    "milliseconds": lambda times: pa.array([time * 1000 + 1 for time in times], pa.int64()),
    **{
        f"{unit} {zone}": lambda times, unit=unit, zone=zone: (
            pa.array(times, pa.timestamp("s")).cast(pa.timestamp(unit)).cast(pa.timestamp(unit, zone))
        )
        for unit in ("s", "ms", "us", "ns")
        for zone in (None, "UTC", "Asia/Tokyo")
    },
}


@pytest.mark.parametrize("times", PARQUET_TIMES.values(), ids=PARQUET_TIMES)
def test_parquet_is_read_with_times_of_any_type(tmp_path, times):
    users, items, seconds, _ = zip(*ROWS, strict=True)
    columns = {"user": pa.array(users).dictionary_encode(), "item": pa.array(items, pa.int16())}
    assert events_of(read_log("toy", as_parquet(tmp_path, columns | {"time": times(seconds)}))) == IN_ORDER


def test_dates_of_parquet_are_midnights(tmp_path):
    days = pa.array([date(2024, 1, 2), date(2024, 1, 1)])
    log = read_log("toy", as_parquet(tmp_path, {"user": [1, 2], "item": [1.0, 2.0], "day": days})).log
    assert log.times.tolist() == [1_704_067_200, 1_704_153_600]
    assert (log.user_ids.to_pylist(), log.item_ids.to_pylist()) == ([2, 1], [2, 1])


def test_whole_numbers_are_one_identifier_however_the_blocks_fall_and_007_is_not_7(tmp_path, monkeypatch):
    names = [*map(str, range(40)), "007", "7", "+7", "-0", "0", "A1", *map(str, range(3)), str(2**70), str(2**63 - 1)]
    content = as_csv(rows=[(name, name, START + place, "") for place, name in enumerate(names)])
    for size in (40, 200, 10_000):
        monkeypatch.setattr(
            "protofed.data.reading.blocks.__kwdefaults__", {"member": (), "encoding": "utf-8", "block_bytes": size}
        )
        own = read_log("toy", written(tmp_path, content))
        assert events_of(own) == [(name, name, START + place) for place, name in enumerate(names)]
    whole = read_log("toy", written(tmp_path, as_csv(rows=[(n, n, START + n, "") for n in range(-5, 5)])))
    assert whole.log.user_ids.to_pylist() == list(range(-5, 5))


def test_integers_gathered_before_a_text_comes_become_the_same_texts():
    pieces = Pieces()
    for block in ([1, 2, 2**40], ["2", "x"], [1]):
        pieces.add(pl.DataFrame({"user": block}))
    codes, names = pieces.codes("user", pieces.taken("user"))
    assert names.take(pa.array(codes)).to_pylist() == ["1", "2", str(2**40), "2", "x", "1"]


RESEMBLING = ("7", "07", "007x", "+7", "-0", "-7", "0", "0.5", " 7", " 07", "", "x-0", "2024-01-01")


@given(
    st.lists(st.tuples(*[st.sampled_from(RESEMBLING)] * 3), max_size=9),
    st.sampled_from([",", "\t", ";", "|"]),
    st.booleans(),
)
def test_a_value_that_only_resembles_an_integer_is_never_overlooked(rows, separator, quoted):
    values = [f'"{value}"' if quoted else value for row in rows for value in row]
    lines = [separator.join(values[start : start + 3]) + "\n" for start in range(0, len(values), 3)]
    odd = any(value.strip()[:1] == "+" or value.strip()[:2] in ("-0", "07", "00") for row in rows for value in row)
    assert starts_oddly("".join(lines).encode(), separator) == odd


def test_identifiers_written_as_floats_are_whole_numbers(tmp_path):
    own = read_log("toy", written(tmp_path, "user,item,time\n1.0,12.0,5\n2.0,,6\n1,12,7\n"))
    assert events_of(own) == [(1, 12, 5), (1, 12, 7)]
    assert own.remarks == ("each item and user written as 12.0 is read as 12",)
    mixed = read_log("toy", written(tmp_path, "user,item,time\n1.0,12.0,5\nversion,12,6\n"))
    assert events_of(mixed) == [("1.0", 12, 5), ("version", 12, 6)]
    assert identifiers(pl.Series([1.0, 2.5, float("nan"), 1e300, None])).to_list() == [1, None, None, None, None]


def test_rows_without_a_rating_stay_and_one_that_is_no_number_is_malformed(tmp_path):
    own = read_log("toy", written(tmp_path, "user,item,time,stars\n1,1,1,\n1,1,2,4\n1,1,3,good\n1,1,4,inf\n"))
    assert np.array_equal(own.log.ratings.numpy(), [np.nan, 4.0], equal_nan=True)
    assert (own.malformed, own.first_malformed, own.example) == (2, 3, "stars is 'good'")


def test_events_are_read_and_an_empty_one_stays(tmp_path):
    own = read_log("toy", written(tmp_path, "user,item,time,action\n1,1,1,view\n1,1,2,\n"))
    assert own.log.events.to_pylist() == ["view", ""]
    many = "user,item,time,action\n" + "".join(f"1,1,{n},event {n}\n" for n in range(200))
    with pytest.raises(DataError, match=r"at most 100 different events .* or none by --event ''"):
        read_log("toy", written(tmp_path, many))
    assert read_log("toy", written(tmp_path, many), Asked(event="")).log.events is None


BROKEN = {
    ("", "i", "2024-01-01"): "nothing in user",
    ("u", "", "2024-01-01"): "nothing in item",
    ("u", "i", ""): "nothing in time",
    ("u", "i", "31.12.2024"): "time is '31.12.2024', read as ISO dates, UTC",
    ("u", "i", "2024-01-01", "5"): "'5' beyond the last column",
    ("u",): "nothing in item",
}


@pytest.mark.parametrize(("row", "what"), BROKEN.items(), ids=BROKEN.values())
def test_a_malformed_row_is_counted_with_its_number_and_what_is_wrong(tmp_path, monkeypatch, row, what):
    monkeypatch.setattr(
        "protofed.data.reading.blocks.__kwdefaults__", {"member": (), "encoding": "utf-8", "block_bytes": 50}
    )
    good = "u,i,2024-01-01\n"
    text = "user,item,time\n" + good * 20 + ",".join(row) + "\n" + good * 3 + ",".join(row) + "\n"
    own = read_log("toy", written(tmp_path, text))
    assert (own.read, len(own.log), own.malformed, own.first_malformed, own.example) == (25, 23, 2, 21, what)


def test_more_malformed_rows_than_allowed_are_refused_with_an_example_and_kept_out_when_told(tmp_path):
    rows = ["u,i,2024-01-01\n"] * 900 + ["u,i,01/02/2024\n"] * 100
    file = written(tmp_path, "user,item,time\n" + "".join(rows))
    with pytest.raises(DataError) as caught:
        read_log("toy", file)
    assert (
        "at most 1 % of the rows may be malformed, found 100 of 1,000 (the first is row 901: time is '01/02/2024', "
        in (str(caught.value))
    )
    assert str(caught.value).endswith("allow more by --malformed SHARE")
    own = read_log("toy", file, malformed_share=0.1)
    assert (len(own.log), own.malformed) == (900, 100)
    with pytest.raises(DataError, match=r"at most 9.9 % of the rows"):
        read_log("toy", file, malformed_share=0.099)
    with pytest.raises(ConfigError, match="--malformed must be a share from 0 to 1, got 2"):
        read_log("toy", file, malformed_share=2.0)
    with pytest.raises(DataError, match=r"at most 0 % .* found 1 of 2"):
        read_log("toy", written(tmp_path, "user,item,time\nu,i,1\nu,,1\n"), malformed_share=0.0)


REFUSED = {
    "an empty file": (b"", "found an empty file"),
    "a header alone": (b"user,item,time\n", "a log needs at least one row, found none below the header"),
    "no header": (b"1,2,1500000000\n", "the first line must name the columns, found '1' in it; .*--no-header"),
    "a column twice": (b"user,item,time,user\n1,2,3,4\n", "the header must name each column once"),
    "a JSON array": (b'[{"user": 1}]\n', "found a JSON array; convert it by `jq"),
    "nested values": (b'{"user":{"id":1},"item":2,"time":3}\n', r"the first is row 1: user is '\{\"id\": ?1\}'"),
    "no JSON objects": (b"{}\n", "one JSON object per line belongs here"),
    "half of a parquet": (b"PAR1....", "must be a whole parquet file"),
    "latin-1": (b"user,item,time\nRen\xe9,1,1\n", "line 2: the text must be utf-8, found the byte 0xe9"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_log_is_refused_in_one_line(tmp_path, content, words):
    with pytest.raises(DataError, match=words) as caught:
        read_log("toy", written(tmp_path, content))
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_no_file_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "interactions.parquet").write_bytes(b"PAR1")
    for path, words in (
        (tmp_path / "shop", "is a prepared log already; use it by --dataset shop --root"),
        (tmp_path, "found a folder; name a file in it"),
        (Path("/dev/null"), "found a pipe or device; write it to a file first"),
        (written(tmp_path, "hello", "x.parquet"), "must be a whole parquet file, found other data"),
    ):
        with pytest.raises(DataError, match=words):
            read_log("toy", path)
    for missing in (tmp_path / "none", tmp_path / ("x" * 5000)):
        with pytest.raises(DatasetNotFound):
            read_log("toy", missing)


def test_columns_of_parquet_that_hold_no_values_are_refused_by_their_type(tmp_path):
    for odd in (pa.array([[1]]), pa.array([{"a": 1}]), pa.array([b"x"]), pa.array([True])):
        with pytest.raises(DataError, match=r"user must hold numbers, texts or times, found the type"):
            read_log("toy", as_parquet(tmp_path, {"user": odd, "item": [1], "time": [1]}))
    with pytest.raises(DataError, match="identifiers are numbers or texts"):
        read_log("toy", as_parquet(tmp_path, {"user": [date(2024, 1, 1)], "item": [1], "time": [1]}))


def test_large_unsigned_identifiers_stay_apart(tmp_path):
    users = pa.array([2**64 - 1, 2**64 - 2, 5], pa.uint64())
    log = read_log("toy", as_parquet(tmp_path, {"user": users, "item": [1, 2, 3], "time": [1, 2, 3]})).log
    assert log.user_ids.to_pylist() == [str(2**64 - 1), str(2**64 - 2), "5"]


def test_a_file_without_a_header_has_numbered_columns(tmp_path):
    own = read_log("toy", written(tmp_path, "5;x;1700000000\n6;y;1700000001\n"), Asked("1", "2", "3"), header=False)
    assert events_of(own) == [(5, "x", START), (6, "y", START + 1)]


def test_quotes_spaces_byte_order_marks_and_windows_line_ends_are_no_part_of_values(tmp_path):
    plain = "user,item,time,note\n" + "".join(f'"u {n}", i{n} ,{n},"a ""b"", c"\n' for n in range(30))
    for content in (
        plain,
        "\ufeff" + plain,
        plain.replace("\n", "\r\n"),
        plain.removesuffix("\n"),
        plain + 'x,"y,1,1\n',
    ):
        own = read_log("toy", written(tmp_path, content))
        assert events_of(own) == [(f"u {n}", f"i{n}", n) for n in range(30)]
        assert own.malformed == content.count('x,"y')


def test_a_stray_quote_spares_the_lines_whose_quotes_are_doubled_or_end_in_a_carriage_return(tmp_path):
    lines = ["user,item,time,note\r\n", *(f'u,i,{n},"a ""b"""\r\n' for n in range(20)), 'u,"i,1,x\r\n']
    own = read_log("toy", written(tmp_path, "".join(lines)))
    assert (len(own.log), own.malformed, own.first_malformed) == (20, 1, 21)


def test_tabs_need_no_quotes_and_a_stray_one_is_a_mark_like_any_other(tmp_path):
    text = "user\titem\ttime\n" + "".join(f'u{n}\tsix " wide\t{n}\n' for n in range(30))
    assert read_log("toy", written(tmp_path, text, "log.tsv")).log.item_ids.to_pylist() == ['six " wide']


def test_duplicates_stay_and_one_user_is_a_log(tmp_path):
    own = read_log("toy", written(tmp_path, "user,item,time\n" + "u,i,2024-01-01\n" * 9))
    assert (len(own.log), own.log.n_users) == (9, 1)


def test_a_line_without_end_is_refused_within_bounded_memory(tmp_path):
    bomb = gzip.compress(b"user,item,time\nu,i,1\n") + gzip.compress(b"x" * (64 << 20), 1)
    with pytest.raises(DataError, match="line 3: a line must be shorter than 1,048,576 bytes"):
        read_log("toy", written(tmp_path, bomb, "log.csv.gz"))
