"""Every loader against files written here by hand, and against the official samples read slowly."""

import calendar
import csv
import gzip
import json
import logging
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protofed.data.datasets import amazon, gowalla, hm, lastfm, movielens, recbole, retailrocket, taobao, yelp
from protofed.data.interactions import InteractionLog
from protofed.data.reading import Tally, gather, table
from protofed.errors import DataError, DatasetNotFound

SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "data" / "official_samples"
Row = tuple[object, object, int]


def rows_of(log: InteractionLog) -> list[Row]:
    users, items = log.user_ids.to_pylist(), log.item_ids.to_pylist()
    triples = zip(log.users.tolist(), log.items.tolist(), log.times.tolist(), strict=True)
    return [(users[u], items[i], t) for u, i, t in triples]


def by_time(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row[2])


def seconds(text: str, layout: str = "%Y-%m-%dT%H:%M:%SZ") -> int:
    return calendar.timegm(time.strptime(text, layout))


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def cells(file: Path, separator: str = ",") -> Iterator[list[str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        yield from csv.reader(lines, delimiter=separator, quoting=csv.QUOTE_NONE)


def slow_amazon(file: Path) -> list[Row]:
    return by_time(list(dict.fromkeys((r[0], r[1], int(r[3])) for r in cells(file))))


def slow_movielens(file: Path) -> list[Row]:
    return by_time([(int(r[0]), int(r[1]), int(r[3])) for r in list(cells(file))[1:]])


def slow_yelp(file: Path) -> list[Row]:
    reviews = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return by_time([(r["user_id"], r["business_id"], seconds(r["date"], "%Y-%m-%d %H:%M:%S")) for r in reviews])


def slow_gowalla(file: Path) -> list[Row]:
    return by_time([(int(r[0]), int(r[4]), seconds(r[1])) for r in cells(file, "\t")])


def slow_lastfm(file: Path) -> list[Row]:
    return by_time([(r[0], r[4] or f"{r[3]}\t{r[5]}", seconds(r[1])) for r in cells(file, "\t")])


def slow_retailrocket(file: Path) -> list[Row]:
    return by_time([(int(r[1]), int(r[3]), int(r[0]) // 1000) for r in list(cells(file))[1:]])


def slow_taobao(file: Path) -> list[Row]:
    rows = [(int(r[0]), int(r[1]), int(r[4])) for r in cells(file)]
    return by_time([row for row in rows if 1511539200 <= row[2] <= 1512316799])


def slow_hm(file: Path) -> list[Row]:
    return by_time([(r[1], r[2], seconds(r[0], "%Y-%m-%d")) for r in list(cells(file))[1:]])


SAMPLED: list[tuple[Callable[..., InteractionLog], Callable[[Path], list[Row]], str]] = [
    (amazon.load_electronics, slow_amazon, "ratings_Electronics.csv"),
    (movielens.load, slow_movielens, "ratings.csv"),
    (yelp.load, slow_yelp, "yelp_academic_dataset_review.json"),
    (gowalla.load, slow_gowalla, "loc-gowalla_totalCheckins.txt"),
    (lastfm.load, slow_lastfm, "userid-timestamp-artid-artname-traid-traname.tsv"),
    (retailrocket.load, slow_retailrocket, "events.csv"),
    (taobao.load, slow_taobao, "UserBehavior.csv"),
    (hm.load, slow_hm, "transactions_train.csv"),
]


@pytest.mark.shared
@pytest.mark.parametrize(("load", "slow", "name"), SAMPLED, ids=[name for _, _, name in SAMPLED])
def test_each_row_of_an_official_sample_is_read_as_a_slow_reader_reads_it(load, slow, name):
    if not (SAMPLES / name).is_file():
        pytest.skip(f"the official sample {name} is not at {SAMPLES}")
    expected = slow(SAMPLES / name)
    assert rows_of(load(SAMPLES / name)) == expected
    assert rows_of(load(SAMPLES)) == expected


def test_amazon_2014_and_2018_files_with_swapped_columns_give_the_same_log(tmp_path):
    old = "A2CX7LUOHB2NDG,0321732944,5.0,1341100800\nA1GI0U4ZRJA8WN,043988634X,1.0,1334707200\n"
    new = "0321732944,A2CX7LUOHB2NDG,5.0,1341100800\n043988634X,A1GI0U4ZRJA8WN,1.0,1334707200\n"
    logs = [amazon.load(written(tmp_path, f"{n}.csv", text)) for n, text in enumerate((old, new))]
    expected = [("A1GI0U4ZRJA8WN", "043988634X", 1334707200), ("A2CX7LUOHB2NDG", "0321732944", 1341100800)]
    assert [rows_of(log) for log in logs] == [expected, expected]
    assert logs[0].ratings.tolist() == [1.0, 5.0]


def test_amazon_2023_milliseconds_become_seconds(tmp_path):
    text = "user_id,parent_asin,rating,timestamp\nAFKZ,0060,4.0,1591238400123\n"
    assert rows_of(amazon.load(written(tmp_path, "Books.csv", text))) == [("AFKZ", "0060", 1591238400)]


def test_an_amazon_2023_file_without_its_header_is_refused(tmp_path):
    file = written(tmp_path, "Books.csv", "AFKZ,B000,4.0,1591238400123\n")
    with pytest.raises(DataError, match="put its header"):
        amazon.load(file)


def test_amazon_review_files_are_read_from_gzipped_json_lines(tmp_path):
    review = {"reviewerID": "A1", "asin": "0001", "overall": 5.0, "unixReviewTime": 1341100800, "helpful": [0, 1]}
    with gzip.open(tmp_path / "reviews_Books_5.json.gz", "wt") as file:
        file.write(json.dumps(review) + "\n")
    assert rows_of(amazon.load_books(tmp_path)) == [("A1", "0001", 1341100800)]


def test_exact_amazon_duplicates_are_dropped(tmp_path):
    text = "A1,B1,5.0,1341100800\n" * 3 + "A1,B1,5.0,1341187200\n"
    assert len(amazon.load(written(tmp_path, "ratings_Books.csv", text))) == 2


def test_all_movielens_layouts_give_the_same_log(tmp_path):
    rows = [(1, 2, 3.5, 1112486027), (1, 29, 4.0, 1112484676)]
    header = "userId,movieId,rating,timestamp\n"
    dates = {1112486027: "2005-04-02 23:53:47", 1112484676: "2005-04-02 23:31:16"}
    texts = {
        "ratings.csv": header + "".join(f"{u},{i},{r},{t}\n" for u, i, r, t in rows),
        "rating.csv": '"userId","movieId","rating","timestamp"\n'
        + "".join(f'{u},{i},{r},"{dates[t]}"\n' for u, i, r, t in rows),
        "ratings.dat": "".join(f"{u}::{i}::{r}::{t}\n" for u, i, r, t in rows),
        "u.data": "".join(f"{u}\t{i}\t{r}\t{t}\n" for u, i, r, t in rows),
    }
    for name, text in texts.items():
        log = movielens.load(written(tmp_path, name, text))
        assert rows_of(log) == [(1, 29, 1112484676), (1, 2, 1112486027)], name
        assert log.ratings.tolist() == [4.0, 3.5]


def test_yelp_reads_days_without_hours_and_survives_a_broken_line(tmp_path, caplog):
    good = [{"user_id": "u", "business_id": f"b{n}", "stars": 4.0, "date": "2010-01-01"} for n in range(3)]
    lines = [json.dumps(review) for review in good]
    file = written(tmp_path, "review.json", "\n".join([lines[0], '{"user_id": "u", bro', *lines[1:]]) + "\n")
    with caplog.at_level(logging.WARNING):
        log = yelp.load(file)
    assert rows_of(log) == [("u", f"b{n}", 1262304000) for n in range(3)]
    assert "4 rows read, 1 dropped (malformed)" in caplog.text


def test_lastfm_takes_quotes_literally_and_names_tracks_without_an_id(tmp_path):
    text = 'user_000001\t2009-05-04T23:08:57Z\t\t"Deep\t\tOne "Two\n'
    text += "user_000001\t2009-05-04T23:08:56Z\ta\tArtist\tid-1\tX\n"
    log = lastfm.load(written(tmp_path, lastfm.NAMES[0], text))
    assert [item for _, item, _ in rows_of(log)] == ["id-1", '"Deep\tOne "Two']


def test_retailrocket_keeps_the_event_and_divides_the_time(tmp_path):
    text = "timestamp,visitorid,event,itemid,transactionid\n1433221332117,257597,view,355908,\n"
    text += "1433221332999,257597,transaction,355908,4\n"
    log = retailrocket.load(written(tmp_path, "events.csv", text))
    assert rows_of(log) == [(257597, 355908, 1433221332)] * 2
    assert log.events.to_pylist() == ["view", "transaction"]


def test_hm_restores_leading_zeros_and_keeps_equal_rows(tmp_path):
    row = "2018-09-20,000058a1,663713001,0.05,2\n"
    log = hm.load(written(tmp_path, "t.csv", "t_dat,customer_id,article_id,price,sales_channel_id\n" + row * 2))
    assert rows_of(log) == [("000058a1", "0663713001", 1537401600)] * 2


def test_taobao_drops_rows_outside_the_official_window_and_says_how_many(tmp_path, caplog):
    times = [1511539199, 1511539200, 1512316799, 1512316800, -1, 1511600000, 1511600001]
    text = "".join(f"{n},{n},1,pv,{t}\n" for n, t in enumerate(times))
    with caplog.at_level(logging.WARNING):
        log = taobao.load(written(tmp_path, "UserBehavior.csv", text))
    assert sorted(log.times.tolist()) == [1511539200, 1511600000, 1511600001, 1512316799]
    assert "3 dropped (outside" in caplog.text


def test_taobao_reports_progress_in_bytes(tmp_path):
    file = written(tmp_path, "UserBehavior.csv", "1,2,3,pv,1511600000\n" * 5)
    seen = []
    taobao.load(file, lambda task, done, total, note="": seen.append((done, total)))
    assert seen[-1] == (100, 100)


def test_recbole_files_are_read_by_their_typed_header(tmp_path):
    text = "item_id:token\tuser_id:token\ttimestamp:float\trating:float\n007\tu1\t1112486027.9\t4.5\n"
    log = recbole.load(written(tmp_path, "ml-x.inter", text))
    assert log.name == "ml-x"
    assert rows_of(log) == [("u1", "007", 1112486027)]
    assert log.ratings.tolist() == [4.5]


def test_recbole_refuses_an_untyped_header_and_a_file_without_times(tmp_path):
    with pytest.raises(DataError, match="typed header"):
        recbole.load(written(tmp_path, "a.inter", "user_id\titem_id\ttimestamp\n1\t2\t3\n"))
    with pytest.raises(DataError, match="cannot be sliced by time"):
        recbole.load(written(tmp_path, "b.inter", "user_id:token\titem_id:token\n1\t2\n"))


def test_a_gzip_or_zip_archive_is_read_as_the_file_in_it(tmp_path):
    text = "".join(f"{n},{n},1,pv,{1511600000 + n}\n" for n in range(20))
    expected = rows_of(taobao.load(written(tmp_path, "UserBehavior.csv", text)))
    with gzip.open(tmp_path / "packed.gz", "wt") as file:
        file.write(text)
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.writestr("UserBehavior.csv", text)
        archive.writestr("notes.txt", "nothing")
    assert rows_of(taobao.load(tmp_path / "packed.gz")) == expected
    assert rows_of(taobao.load(tmp_path / "packed.zip")) == expected


@pytest.mark.parametrize("block_bytes", [1, 20, 37, 1 << 20])
def test_where_blocks_end_changes_nothing(tmp_path, block_bytes):
    file = written(tmp_path, "UserBehavior.csv", "".join(f"{n},{n * 7},1,pv,{1511600000 + n}\n" for n in range(50)))
    tally = Tally()
    frames = list(table(file, taobao.LAYOUT, tally, block_bytes=block_bytes))
    assert [row for frame in frames for row in frame.select("user", "item", "time").rows()] == [
        (n, n * 7, 1511600000 + n) for n in range(50)
    ]
    assert (tally.rows, tally.malformed) == (50, 0)


@pytest.mark.parametrize("block_bytes", [1, 30, 1 << 20])
def test_string_identifiers_keep_their_codes_from_block_to_block(tmp_path, block_bytes):
    rows = [(f"A{n % 3}", f"0{n % 5}", 1341100800 + 86400 * (n // 2)) for n in range(40)]
    file = written(tmp_path, "ratings_Books.csv", "".join(f"{u},{i},5.0,{t}\n" for u, i, t in rows))
    tally = Tally()
    frames = table(file, amazon.LAYOUTS[2014], tally, block_bytes=block_bytes)
    assert rows_of(gather("toy", frames, lambda frame: frame, tally, file)) == rows


def test_rows_with_missing_or_surplus_fields_are_counted_and_dropped(tmp_path, caplog):
    good = "".join(f"{n},{n},1,pv,{1511600000 + n}\n" for n in range(8))
    file = written(tmp_path, "UserBehavior.csv", good + "1,2\n1,2,3,pv,1511600000,9\nx,2,3,pv,1511600000\n")
    with caplog.at_level(logging.WARNING):
        assert len(taobao.load(file)) == 8
    assert "11 rows read, 3 dropped (malformed)" in caplog.text


def gzip_cut_short(folder: Path) -> Path:
    file = folder / "UserBehavior.csv.gz"
    with gzip.open(file, "wt") as packed:
        packed.write("".join(f"{n},{n * n},1,pv,{1511600000 + n}\n" for n in range(3000)))
    file.write_bytes(file.read_bytes()[:-2000])
    return file


GOWALLA = "0\t2010-10-12T00:21:28Z\t40.6\t-73.7\t23261\n"
RETAIL = "timestamp,visitorid,event,itemid,transactionid\n"
RATINGS = "userId,movieId,rating,timestamp\n"
BAD = {
    "commas where tabs belong": (gowalla.load, GOWALLA.replace("\t", ","), "separated by tabs.*found commas"),
    "tabs where commas belong": (taobao.load, "1\t2\t3\tpv\t1511600000\n", "separated by commas.*found tabs"),
    "semicolons with a header": (retailrocket.load, RETAIL.replace(",", ";"), "separated by commas.*found semicolons"),
    "a header where none belongs": (taobao.load, "user,item,cat,type,ts\n1,2,3,pv,1511600000\n", "has no header"),
    "a header before Gowalla": (gowalla.load, "user\ttime\tlat\tlon\tloc\n" + GOWALLA, "remove the first line"),
    "no header where one belongs": (retailrocket.load, "1433221332117,257597,view,355908,\n", "put the header back"),
    "no header before H&M": (hm.load, "2018-09-20,0000,0663713001,0.05,2\n", "put the header back"),
    "negative times": (movielens.load, RATINGS + "1,2,3.5,-5\n", "found the negative -5"),
    "milliseconds for seconds": (movielens.load, RATINGS + "1,2,3.5,1112486027000\n", "divide them by 1000"),
    "milliseconds in Taobao": (taobao.load, "1,2,3,pv,1511600000000\n", "look like milliseconds"),
    "seconds for milliseconds": (retailrocket.load, RETAIL + "1433221332,1,view,2,\n", "must be unix milliseconds"),
    "an empty file": (taobao.load, "", "found an empty file"),
    "a header and nothing else": (movielens.load, RATINGS, "at least one usable row"),
    "mostly malformed rows": (taobao.load, "1,2,3,pv,1511600000\n" + "x,2,3,pv,1511600000\n" * 5, "found 5 of 6"),
    "text where JSON belongs": (yelp.load, "user_id,business_id\n", "one JSON object per line"),
}


@pytest.mark.parametrize(("load", "text", "words"), BAD.values(), ids=BAD)
def test_a_bad_file_is_refused_in_one_line_that_names_it(tmp_path, load, text, words):
    file = written(tmp_path, "some-file", text)
    with pytest.raises(DataError, match=words) as caught:
        load(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_gzip_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"the archive must be whole.*download it again"):
        taobao.load(gzip_cut_short(tmp_path))


def test_a_tar_archive_says_to_unpack_it(tmp_path):
    file = tmp_path / "lastfm.tar"
    file.write_bytes(b"x" * 257 + b"ustar" + b"\0" * 250)
    with pytest.raises(DataError, match=r"tar archive.*tar xf"):
        lastfm.load(file)


def test_missing_files_and_folders_without_the_official_file_are_refused(tmp_path):
    with pytest.raises(DatasetNotFound, match="no such file or folder"):
        taobao.load(tmp_path / "nowhere.csv")
    with pytest.raises(DatasetNotFound, match=r"holds none of UserBehavior\.csv"):
        taobao.load(tmp_path)
