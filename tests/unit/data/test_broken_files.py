"""Whatever is in a file, it is read or refused in one line: thousands of broken files, and some known ones."""

import gzip
import json
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import broken_files
import pytest
from typer.testing import CliRunner

from protofed.cli.data import app
from protofed.data import catalog
from protofed.data.datasets import amazon, hm, lastfm, movielens, recbole, taobao, yelp
from protofed.data.interactions import InteractionLog
from protofed.data.items import load_items
from protofed.data.own_import import import_log
from protofed.data.prepared import load_log
from protofed.data.stats import stats
from protofed.errors import ConfigError, DataError, DatasetNotFound, ProtoFedError

PART, PARTS, LONG_PARTS = 250, 8, 120  # cases in a part; parts of every day, and all of them
RAW_OF_PART = 200  # the others are prepared logs


def written(folder: Path, content: bytes, name: str = "some.csv") -> Path:
    file = folder / name
    file.write_bytes(content)
    return file


def outcome(read: Callable[[], object]) -> str:
    """Empty where the call returns or refuses in one line; else what it did."""
    try:
        read()
    except ProtoFedError as refusal:
        return f"several lines: {refusal}" if len(str(refusal).splitlines()) > 1 else ""
    except (KeyboardInterrupt, AssertionError):
        raise
    except BaseException as traceback:  # a panic of polars is no Exception
        return f"{type(traceback).__name__}: {traceback}"
    return ""


def check_log(log: InteractionLog, *, unrated: bool = False) -> None:
    """What every log promises, whatever file it came from."""
    for ids, codes in ((log.user_ids, log.users), (log.item_ids, log.items)):
        names = ids.to_pylist()
        assert len(set(names)) == len(names) == int(codes.max()) + 1
        assert all(name != "" and not set("\n\r\0") & set(str(name)) for name in names)
    if log.ratings is not None:
        assert bool((log.ratings.isfinite() | (log.ratings.isnan() & unrated)).all())
    assert bool((log.times[1:] >= log.times[:-1]).all())


def prepare(file: Path, dataset: str, *flags: str) -> ProtoFedError | None:
    """The command's refusal, if it refuses; then nothing is left behind."""
    root = file.parent / "logs"
    done = CliRunner().invoke(app, ["prepare", dataset, "--source", str(file), "--root", str(root), *flags])
    if done.exception is None:
        return None
    assert not root.exists()
    assert isinstance(done.exception, ProtoFedError), repr(done.exception)
    return done.exception


def failures(numbers: range, folder: Path) -> list[str]:
    """The cases that end in something else than a log or a refusal in one line."""
    found = []
    for number in numbers:
        if number % PART < RAW_OF_PART:
            case = broken_files.broken_file(number)
            file = folder / case.file
            file.write_bytes(case.content)
            load = catalog.loader(catalog.dataset(case.dataset))
            problem = outcome(lambda load=load, file=file: check_log(load(file)))
            file.unlink()
        else:
            (folder / "toy").mkdir(exist_ok=True)
            (folder / "toy" / "interactions.parquet").write_bytes(broken_files.broken_prepared(number))
            problem = outcome(lambda: stats("toy", folder))
        found += [f"case {number}: {problem}"] if problem else []
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_a_broken_file_is_read_or_refused_in_one_line(part, tmp_path):
    assert failures(range(PART * part, PART * (part + 1)), tmp_path) == []


def import_failures(numbers: range, folder: Path) -> list[str]:
    """The imports that end in something else than a log, or a refusal in one line that leaves nothing behind."""
    found = []
    for number in numbers:
        name, content = broken_files.broken_table(number, broken_files.OWN)
        about, described = broken_files.broken_table(number // 2, broken_files.ABOUT)
        if number % 5 == 0:
            name, content = "log.parquet", broken_files.broken_prepared(number)
        if number % 13 == 0:
            about, described = "items.parquet", broken_files.broken_prepared(-number)
        file, items = written(folder, content, name), written(folder, described, about)
        root = folder / str(number)
        share = 0.01 if number % 3 else 0.9

        def read(file=file, items=items, root=root, share=share, number=number) -> None:
            import_log(file, "toy", root, items=items if number % 2 else None, malformed_share=share)
            check_log(load_log("toy", root, canonical=False), unrated=True)
            load_items("toy", root)

        problem = outcome(read)
        if not problem and root.exists() and not (root / "toy" / "interactions.parquet").is_file():
            problem = "left a folder without a log"
        found += [f"case {number}: {problem}"] if problem else []
        file.unlink()
        items.unlink()
        shutil.rmtree(root, ignore_errors=True)
    return found


@pytest.mark.parametrize("part", range(PARTS // 2))
def test_a_broken_log_of_ones_own_is_imported_or_refused_in_one_line(part, tmp_path):
    assert import_failures(range(PART * part, PART * (part + 1)), tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS // 2, LONG_PARTS // 4))
def test_thousands_of_broken_logs_of_ones_own_are_imported_or_refused_in_one_line(part, tmp_path):
    assert import_failures(range(PART * part, PART * (part + 1)), tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS, LONG_PARTS))
def test_thirty_thousand_broken_files_are_read_or_refused_in_one_line(part, tmp_path):
    assert failures(range(PART * part, PART * (part + 1)), tmp_path) == []


def test_a_broken_file_that_is_refused_leaves_nothing_half_written(tmp_path):
    for number in range(100):
        case = broken_files.broken_file(number)
        folder = tmp_path / str(number)
        folder.mkdir()
        prepare(written(folder, case.content, case.file), case.dataset)


TAOBAO = b"".join(b"%d,%d,1,pv,%d\n" % (n % 6, n % 5, 1_511_600_000 + n) for n in range(30))
RATINGS = b"userId,movieId,rating,timestamp\n"
RATED = b"".join(b"%d,%d,3.5,%d\n" % (n % 6, n % 5, 1_112_486_027 + n) for n in range(30))
BOOKS = "".join(f"A{n},00{n},5.0,{1_341_200_000 + n}\n" for n in range(30))


REFUSED = {
    "a header without a line end": (movielens.load, RATINGS.strip(), "at least one usable row, found none"),
    "carriage returns for line ends": (taobao.load, TAOBAO.replace(b"\n", b"\r"), "found carriage returns alone"),
    "a byte order mark alone": (taobao.load, broken_files.BOM, "found an empty file"),
    "a byte order mark and an empty line": (yelp.load, broken_files.BOM + b"\r\n", "found an empty file"),
    "deep JSON": (amazon.load, b'{"a":' + b"[" * 100_000 + b"\n", "one JSON object per line"),
    "a column named twice": (
        movielens.load,
        b"x,x,userId,movieId,rating,timestamp\n1,2,3,4,5,6\n",
        "the header must name each column once",
    ),
    "one column for users and items": (
        recbole.load,
        b"item_id:token\ttimestamp:float\nb\t5\n",
        "user_id, item_id and timestamp columns are needed",
    ),
}


@pytest.mark.parametrize(("load", "content", "words"), REFUSED.values(), ids=REFUSED)
def test_what_once_ended_in_a_traceback_or_a_wrong_log_is_refused(tmp_path, load, content, words):
    file = written(tmp_path, content)
    with pytest.raises(DataError, match=words) as caught:
        load(file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path):
    review = {"user_id": "u", "business_id": "b", "stars": 4.0, "date": "2010-01-01"}
    line = json.dumps(review).encode() + b"\n"
    for load, content in ((taobao.load, TAOBAO), (movielens.load, RATINGS + RATED), (yelp.load, line)):
        plain = load(written(tmp_path, content))
        for other in (broken_files.BOM + content, content.replace(b"\n", b"\r\n"), content.removesuffix(b"\n")):
            again = load(written(tmp_path, other))
            assert again.user_ids.to_pylist() == plain.user_ids.to_pylist()
            assert again.times.tolist() == plain.times.tolist()


def test_two_users_whose_names_differ_in_one_undecodable_byte_never_become_one(tmp_path):
    rows = [b"Ren\xe9,001,5.0,1341100800\n", b"Ren\xe8,001,5.0,1341100801\n"]
    file = written(tmp_path, BOOKS.encode() + b"".join(rows))
    with pytest.raises(DataError, match=r"some\.csv, line 31: the text must be utf-8, found the byte 0xe9.*--encoding"):
        amazon.load(file)
    assert amazon.load(file, encoding="latin-1").user_ids.to_pylist()[:2] == ["René", "Renè"]


def test_the_line_of_an_undecodable_byte_is_counted_over_all_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("protofed.data.reading.BLOCK_BYTES", 100)
    file = written(tmp_path, gzip.compress(BOOKS.encode() + b"A\xff,1,5.0,1341100800\n"), "ratings_Books.csv.gz")
    with pytest.raises(DataError, match="line 31: the text must be utf-8, found the byte 0xff"):
        amazon.load(file)


def test_the_encoding_is_an_option_of_the_command_and_noted_beside_the_log(tmp_path):
    header = "user_id:token\titem_id:token\ttimestamp:float\n"
    file = written(tmp_path, (header + "Ren\xe9\tb\t5\nRen\xe8\tb\t6\n").encode("latin-1"), "recbole.inter")
    assert "line 2: the text must be utf-8" in str(prepare(file, "recbole"))
    unknown = prepare(file, "recbole", "--encoding", "utf-7")
    assert isinstance(unknown, ConfigError)
    assert "--encoding must be one of utf-8, latin-1, cp1252, got 'utf-7'" in str(unknown)
    assert prepare(file, "recbole", "--encoding", "latin-1") is None
    assert load_log("recbole", tmp_path / "logs", canonical=False).n_users == 2
    assert json.loads((tmp_path / "logs" / "recbole" / "source.json").read_text())["encoding"] == "latin-1"


def test_a_stray_quote_costs_its_own_line_alone(tmp_path, caplog):
    for stray in (b'1,"2,3.5,1112486100\n', b'1,2,3.5,"11"12486100\n', b'"\n'):
        caplog.clear()
        assert len(movielens.load(written(tmp_path, RATINGS + RATED[:100] + b"\n" + stray + RATED))) >= 34
        assert "dropped (malformed)" in caplog.text


def test_ratings_that_are_no_numbers_are_malformed(tmp_path, caplog):
    odd = b"1,2,nan,1112486027\n1,2,inf,1112486027\n1,2,-inf,1112486027\n"
    log = movielens.load(written(tmp_path, RATINGS + RATED + odd))
    assert bool(log.ratings.isfinite().all())
    assert "33 rows read, 3 dropped (malformed)" in caplog.text


def test_identifiers_that_are_empty_or_hold_a_line_break_are_malformed(tmp_path, caplog):
    good = [{"user_id": f"u{n}", "business_id": "b", "stars": 4.0, "date": "2010-01-01"} for n in range(20)]
    bad = [good[0] | {"user_id": name} for name in ("", "a\nb", "a\rb", "a\0b", "a\ud800b", "a\ud801b")]
    file = written(tmp_path, "".join(json.dumps(review) + "\n" for review in good + bad).encode())
    assert yelp.load(file).n_users == 20
    assert "26 rows read, 6 dropped (malformed)" in caplog.text


def test_an_empty_article_of_hm_is_not_article_zero(tmp_path):
    header, row = "t_dat,customer_id,article_id\n", '2018-09-20,0000,"0663713001"\n'
    file = written(tmp_path, (header + row * 5 + row.replace("0663713001", "")).encode())
    assert hm.load(file).item_ids.to_pylist() == ["0663713001"]


def test_a_recbole_file_without_user_id_does_not_take_the_items_for_users(tmp_path):
    text = "item_id:token\tsession_id:token\ttimestamp:float\ni1\ts1\t5\n"
    log = recbole.load(written(tmp_path, text.encode()))
    assert (log.user_ids.to_pylist(), log.item_ids.to_pylist()) == (["s1"], ["i1"])


def test_json_with_numbers_that_json_does_not_know_loses_those_lines_alone(tmp_path, caplog):
    good = json.dumps({"user_id": "u", "business_id": "b", "stars": 4.0, "date": "2010-01-01"}) + "\n"
    odd = good.replace("4.0", "NaN") + good.replace('"u"', '"\\ud801\\u0041"') + "{}" * 3 + "\n"
    assert len(yelp.load(written(tmp_path, (good * 9 + odd).encode()))) == 9
    assert "12 rows read, 3 dropped (malformed)" in caplog.text


def endless_line(folder: Path, members: int) -> Path:
    """A gzip of 64 KB a member, each of which is 64 MB of one line."""
    member = gzip.compress(b"x" * (64 << 20), 1)
    return written(folder, gzip.compress(TAOBAO) + member * members, "UserBehavior.csv.gz")


def test_a_small_archive_of_one_endless_line_is_refused_within_bounded_memory(tmp_path):
    file = endless_line(tmp_path, 6)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="line 31: a line must be shorter than 1,048,576 bytes, found a longer one"):
            taobao.load(file)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_an_archive_of_empty_lines_is_not_read_to_its_end(tmp_path):
    blank = gzip.compress(b"\n" * (20 << 20), 1)
    file = written(tmp_path, gzip.compress(TAOBAO) + blank, "UserBehavior.csv.gz")
    with pytest.raises(DataError, match=r"at most 1 % of the rows may be malformed, found 16,776,617 of 16,776,647"):
        taobao.load(file)


def test_a_zip_that_unpacks_without_bound_or_needs_a_password_is_refused(tmp_path):
    file = tmp_path / "UserBehavior.csv.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("UserBehavior.csv", TAOBAO)
    with pytest.raises(DataError, match="a zip archive must be deflated, found method 12; unpack it first"):
        taobao.load(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("UserBehavior.csv", TAOBAO)
    locked = bytearray(file.read_bytes())
    locked[6] |= 1  # the flag of the file's own header
    locked[locked.index(b"PK\x01\x02") + 8] |= 1
    file.write_bytes(locked)
    with pytest.raises(DataError, match=r"the archive must be whole, found .*encrypted"):
        taobao.load(file)


def test_a_name_too_long_for_the_disk_is_not_found(tmp_path):
    with pytest.raises(DatasetNotFound, match="name the file or folder"):
        taobao.load(tmp_path / ("x" * 5000))
    with pytest.raises(DatasetNotFound, match="give --root"):
        load_log("x" * 5000, tmp_path)


def test_a_track_with_a_carriage_return_in_its_name_is_malformed(tmp_path):
    row = "user_000001\t2009-05-04T23:08:57Z\t\tArtist\t\t{}\n"
    text = "".join(row.format(name) for name in ("One", "Two", "Th\rree"))
    assert lastfm.load(written(tmp_path, text.encode())).n_items == 2


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\nb"])
def test_a_log_is_named_by_one_plain_folder(tmp_path, name):
    refusal = prepare(written(tmp_path, TAOBAO, "UserBehavior.csv"), "taobao", "--as", name)
    assert isinstance(refusal, DatasetNotFound) or name == ""  # an empty --as is the default
