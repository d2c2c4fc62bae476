"""Small files in the official formats, invented row by row, and the ways in which files get broken."""

import gzip
import io
import json
import random
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

BOM = b"\xef\xbb\xbf"
START = 1_511_600_000
Mutation = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True, slots=True)
class Case:
    """One file to read: the data set it is meant to be, its name and its bytes."""

    number: int
    dataset: str
    file: str
    content: bytes


def _events(rng: random.Random, n: int) -> Iterator[tuple[int, int, int, float]]:
    """Users, items, seconds and stars."""
    for place in range(n):
        yield (
            rng.randrange(1, 9),
            rng.randrange(1, 12),
            START + 60 * place + rng.randrange(60),
            rng.randrange(1, 11) / 2,
        )


def _day(seconds: int, form: str = "%Y-%m-%d") -> str:
    return time.strftime(form, time.gmtime(seconds))


def quoted(item: int) -> str:
    return f'"0{item:09}"'


ISO, PLAIN = "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S"
Line = Callable[[int, int, int, float], str]
SAMPLES: tuple[tuple[str, str, str, Line], ...] = (  # data set, file, header, one row
    ("amazon-books", "ratings_Books.csv", "", lambda u, i, t, r: f"A{u:04},00{i:08},{r},{t}"),
    ("amazon-electronics", "Electronics.csv", "", lambda u, i, t, r: f"B00{i:07},A{u:04},{r},{t}"),
    (
        "amazon-books",
        "Books.csv",
        "user_id,parent_asin,rating,timestamp",
        lambda u, i, t, r: f"AE{u:04},00{i:08},{r},{t * 1000 + 7}",
    ),
    (
        "amazon-books",
        "reviews_Books_5.json",
        "",
        lambda u, i, t, r: json.dumps(
            {"reviewerID": f"A{u}", "asin": f"00{i}", "overall": r, "unixReviewTime": t, "reviewText": 'gut\n"ä"'}
        ),
    ),
    ("movielens-20m", "ratings.csv", "userId,movieId,rating,timestamp", lambda u, i, t, r: f"{u},{i},{r},{t}"),
    (
        "movielens-20m",
        "rating.csv",
        '"userId","movieId","rating","timestamp"',
        lambda u, i, t, r: f'{u},{i},{r},"{_day(t, PLAIN)}"',
    ),
    ("movielens-20m", "ratings.dat", "", lambda u, i, t, r: f"{u}::{i}::{r}::{t}"),
    ("movielens-20m", "u.data", "", lambda u, i, t, r: f"{u}\t{i}\t{r}\t{t}"),
    (
        "yelp",
        "yelp_academic_dataset_review.json",
        "",
        lambda u, i, t, r: json.dumps(
            {"user_id": f"ü{u}", "business_id": f"b{i}", "stars": r, "date": _day(t, PLAIN), "text": "gut\n"},
            ensure_ascii=bool(u % 2),
        ),
    ),
    (
        "gowalla",
        "loc-gowalla_totalCheckins.txt",
        "",
        lambda u, i, t, r: f"{u}\t{_day(t, ISO)}\t40.{i}\t-73.{u}\t{i}",
    ),
    (
        "lastfm-1k",
        "userid-timestamp-artid-artname-traid-traname.tsv",
        "",
        lambda u, i, t, r: f'user_{u:06}\t{_day(t, ISO)}\t\tBjörk "{i}\t{"id" + str(i) if i % 2 else ""}\tJóga {i}',
    ),
    (
        "retailrocket",
        "events.csv",
        "timestamp,visitorid,event,itemid,transactionid",
        lambda u, i, t, r: f"{t * 1000 + 3},{u},{('view', 'addtocart')[u % 2]},{i},",
    ),
    ("taobao", "UserBehavior.csv", "", lambda u, i, t, r: f"{u},{i},{i % 3},{('pv', 'buy')[u % 2]},{t}"),
    (
        "hm",
        "transactions_train.csv",
        "t_dat,customer_id,article_id,price,sales_channel_id",
        lambda u, i, t, r: f"{_day(t)},{u:064x},{quoted(i) if u % 2 else i},0.0{i},2",
    ),
    (
        "recbole",
        "toy.inter",
        "user_id:token\titem_id:token\trating:float\ttimestamp:float",
        lambda u, i, t, r: f"u{u}\ti{i}\t{r}\t{t}",
    ),
)
OWN: tuple[tuple[str, str, Line], ...] = (  # file, header, one row
    ("log.csv", "userId,productId,ts,stars", lambda u, i, t, r: f"{u},{i},{t},{r}"),
    ("log.csv", "user,sku,created_at,event", lambda u, i, t, r: f'"u{u}",00{i},{_day(t, ISO)},"view, or not"'),
    ("log.tsv", "customer_id\titem\tdate", lambda u, i, t, r: f"{u}.0\tü{i}\t{_day(t)}"),
    ("log.txt", "visitorid;article_id;time", lambda u, i, t, r: f"{u};{i};{t * 1000 + 7}"),
    ("log.csv", "user_id|movieId|timestamp|rating", lambda u, i, t, r: f"{u}|{i}|{t + r}|{'' if u % 3 else r}"),
    (
        "log.jsonl",
        "",
        lambda u, i, t, r: json.dumps({"user": u, "item": f"i{i}", "time": _day(t, PLAIN) + "+02:00", "action": "ä"}),
    ),
    ("log.ndjson", "", lambda u, i, t, r: json.dumps({"user": u, "item": i + 0.0, "time": t, "note": {"a": [1]}})),
)
ABOUT: tuple[tuple[str, str, Line], ...] = (
    ("items.csv", "id,title,description,lat,lon", lambda u, i, t, r: f'{i},"T, ""{u}""","two\nlines",{r},{10 * u}'),
    ("items.tsv", "item_id\tname\tgenres", lambda u, i, t, r: f'{i}\tsix " wide\ta|b'),
    ("items.jsonl", "", lambda u, i, t, r: json.dumps({"item": i, "title": "t", "categories": ["a", i], "lat": r})),
)
VALUES = (
    *(
        "",
        '""',
        '"',
        "nan",
        "NaN",
        "inf",
        "-inf",
        "-1",
        "0",
        "1e400",
        "1.5",
        "99999999999999999999",
        "-9223372036854775808",
    ),
    *(
        " ",
        "null",
        "true",
        "[]",
        "{}",
        '{"a":1}',
        '"\\ud800"',
        '"\\u0000"',
        "\\n",
        "0x10",
        "٣",
        "\u2028",
        "é",
        "a\rb",
        "\0",
    ),
    *(
        "A1",
        "pv",
        "2017-11-25",
        "2017-13-45",
        "9999-12-31 23:59:59",
        "0000-00-00",
        "x" * 3000,
        "::",
        ",",
        "\t",
        "\r",
        "=1+1",
    ),
)


def sample(place: int, rng: random.Random, rows: int = 30) -> bytes:
    """A small whole file."""
    _, _, header, line = SAMPLES[place]
    return lines_of(header, line, rng, rows)


def lines_of(header: str, line: Line, rng: random.Random, rows: int = 30) -> bytes:
    """A small whole file of such rows."""
    lines = [header] if header else []
    return "".join(f"{text}\n" for text in [*lines, *(line(*event) for event in _events(rng, rows))]).encode()


def _spans(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.choice((1, 2, 8, 60, 400)))


def change_byte(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(max(1, len(data)))
    return (
        data[:place] + rng.choice((rng.randbytes(1), b'"', b"\r", b"\n", b"\0", b"\xe9", b"\xff")) + data[place + 1 :]
    )


def cut_out(data: bytes, rng: random.Random) -> bytes:
    start, end = _spans(data, rng)
    return data[:start] + data[end:]


def repeat_a_part(data: bytes, rng: random.Random) -> bytes:
    start, end = _spans(data, rng)
    return data[:end] + data[start:end] * rng.choice((1, 1, 3)) + data[end:]


def cut_short(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def insert(data: bytes, rng: random.Random) -> bytes:
    place = rng.choice((0, len(data), rng.randrange(len(data) + 1)))
    what = rng.choice(
        (BOM, b"\r", b"\n", b'"', b"\0", b"\xe9", b"\xff\xfe", b"PK\x05\x06", b"\x1f\x8b", rng.randbytes(9))
    )
    return data[:place] + what + data[place:]


def exchange_line_ends(data: bytes, rng: random.Random) -> bytes:
    return data.replace(b"\n", rng.choice((b"\r", b"\r\n", b"\n\n", b"\n\r", b"\x0b", b" ", b"\x85", b"")))


def mix_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    place = rng.randrange(len(lines))
    kept = {
        "drop": lines[:place] + lines[place + 1 :],
        "first alone": lines[:1],
        "without the first": lines[1:],
        "shuffle": rng.sample(lines, len(lines)),
        "blank": [*lines[:place], b"", *lines[place:]],
        "join": [*lines[:place], b"".join(lines[place : place + 2]), *lines[place + 2 :]],
    }
    return b"\n".join(kept[rng.choice(list(kept))])


def exchange_value(data: bytes, rng: random.Random) -> bytes:
    """One field, or the same field of every line, with another value."""
    new = rng.choice(VALUES).encode()
    separator = next((mark for mark in (b"\t", b"::", b'": ', b",") if mark in data), b",")
    lines, column = data.split(b"\n"), rng.randrange(6)
    chosen = range(len(lines)) if rng.random() < 0.2 else [rng.randrange(len(lines))]
    for place in chosen:
        fields = lines[place].split(separator)
        fields[column % len(fields)] = new + (
            fields[column % len(fields)].partition(b",")[2] if separator == b'": ' else b""
        )
        lines[place] = separator.join(fields)
    return b"\n".join(lines)


def exchange_separator(data: bytes, rng: random.Random) -> bytes:
    return data.replace(*rng.sample((b",", b"\t", b";", b"::", b'"', b" ", b"{"), 2))


def reencode(data: bytes, rng: random.Random) -> bytes:
    return data.decode("utf-8", "replace").encode(rng.choice(("latin-1", "utf-16", "utf-8-sig", "cp1252")), "replace")


def empty_out(data: bytes, rng: random.Random) -> bytes:
    return rng.choice(
        (b"", BOM, b"\n", b" ", b"\r\n", data.split(b"\n")[0], BOM + b"\n", b"\0" * 9, b"{}", b"{}\n", b"[]\n")
    )


MUTATIONS: tuple[Mutation, ...] = (
    *(change_byte, cut_out, repeat_a_part, cut_short, insert, exchange_line_ends, mix_lines),
    *(exchange_value, exchange_value, exchange_value, exchange_separator, reencode),
)


def packed(data: bytes, rng: random.Random, name: str) -> tuple[str, bytes]:
    """The file as a gzip or zip archive, half of them damaged."""
    if rng.random() < 0.5:
        name, data = f"{name}.gz", gzip.compress(data, mtime=0)
    else:
        memory = io.BytesIO()
        with zipfile.ZipFile(
            memory, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
        ) as archive:
            archive.writestr(zipfile.ZipInfo(name), data)
        name, data = f"{name}.zip", memory.getvalue()
    for _ in range(rng.randrange(3)):
        data = rng.choice((change_byte, change_byte, cut_out, cut_short))(data, rng)
    return name, data


def broken_file(number: int) -> Case:
    """The case of that number: always the same bytes."""
    rng = random.Random(number)
    place = number % len(SAMPLES)
    dataset, name, _, _ = SAMPLES[place]
    data = sample(place, rng)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        data = rng.choice(MUTATIONS)(data, rng)
    if rng.random() < 0.03:
        data = empty_out(data, rng)
    if rng.random() < 0.15:
        name, data = packed(data, rng, name)
    return Case(number, dataset, name, data)


def broken_table(number: int, kinds: tuple[tuple[str, str, Line], ...]) -> tuple[str, bytes]:
    """The name and bytes of a log of one's own, or of an item table: always the same for that number."""
    rng = random.Random(number)
    name, header, line = kinds[number % len(kinds)]
    data = lines_of(header, line, rng)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        data = rng.choice(MUTATIONS)(data, rng)
    if rng.random() < 0.03:
        data = empty_out(data, rng)
    return packed(data, rng, name) if rng.random() < 0.15 else (name, data)


COLUMNS: Mapping[str, Callable[[random.Random, int], pa.Array]] = {
    "integers": lambda rng, n: pa.array(
        [rng.randrange(9) for _ in range(n)], rng.choice((pa.int8(), pa.int64(), pa.uint64()))
    ),
    "large": lambda rng, n: pa.array([rng.choice((2**63 - 1, 2**63 - 2, -(2**63), 0)) for _ in range(n)], pa.int64()),
    "seconds": lambda rng, n: pa.array([START + rng.randrange(9999) for _ in range(n)]),
    "floats": lambda rng, n: pa.array([rng.choice((1.0, 2.5, float("nan"), float("inf"), 1e300)) for _ in range(n)]),
    "halves": lambda rng, n: pa.array([1.0] * n, pa.float16()),
    "strings": lambda rng, n: pa.array(
        [rng.choice("abc") for _ in range(n)], rng.choice((pa.string(), pa.large_string()))
    ),
    "views": lambda rng, n: pa.array([rng.choice("abc") for _ in range(n)], pa.string_view()),
    "odd strings": lambda rng, n: pa.array([rng.choice(("", "a\nb", "\0", "ä", "5")) for _ in range(n)]),
    "categories": lambda rng, n: pa.array([rng.choice("abc") for _ in range(n)]).dictionary_encode(),
    "coded numbers": lambda rng, n: pa.array([rng.randrange(3) for _ in range(n)]).dictionary_encode(),
    "bytes": lambda rng, n: pa.array([b"\xff"] * n, pa.binary()),
    "no strings": lambda rng, n: pa.array([b"\xff\xfe"] * n, pa.binary()).view(pa.string()),
    "nulls": lambda rng, n: pa.nulls(n),
    "some nulls": lambda rng, n: pa.array([rng.choice((None, 1)) for _ in range(n)], pa.int64()),
    "lists": lambda rng, n: pa.array([[1]] * n, pa.list_(pa.int64())),
    "structs": lambda rng, n: pa.array([{"a": 1}] * n, pa.struct({"a": pa.int64()})),
    "truths": lambda rng, n: pa.array([True] * n),
    "dates": lambda rng, n: pa.array([START] * n, pa.timestamp("s")),
}
PROPER = {
    "user": "integers",
    "item": "strings",
    "timestamp": "seconds",
    "rating": "integers",
    "event": "strings",
    "session": "integers",
}


def broken_prepared(number: int) -> bytes:
    """An interactions.parquet with odd columns, or damaged bytes."""
    rng = random.Random(-1 - number)
    n = rng.choice((0, 1, 2, 20))
    names = list(PROPER)[: rng.randrange(2, 7)]
    if rng.random() < 0.2:
        names[rng.randrange(len(names))] = rng.choice(("user", "item", "timestamp", "other"))
    kinds = [PROPER.get(name, "integers") if rng.random() < 0.7 else rng.choice(list(COLUMNS)) for name in names]
    memory = io.BytesIO()
    table = pa.Table.from_arrays([COLUMNS[kind](rng, n) for kind in kinds], names=names)
    pq.write_table(table, memory, compression=rng.choice(("none", "snappy", "zstd")))
    data = memory.getvalue()
    if rng.random() < 0.4:
        for _ in range(rng.randrange(1, 4)):
            data = rng.choice((change_byte, change_byte, cut_out, cut_short, repeat_a_part))(data, rng)
    return data
