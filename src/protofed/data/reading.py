"""Raw files of any size, block by block, to one InteractionLog; nothing larger than its columns is ever in memory."""

import gzip
import io
import json
import logging
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from protofed.data.catalog import ENCODINGS, UTF8
from protofed.data.interactions import (
    InteractionLog,
    check_seconds,
    chronological,
    from_codes,
    integer_codes,
)
from protofed.errors import DataError, DatasetNotFound, MissingExtra
from protofed.progress import Progress, silent

try:
    import polars as pl
except ImportError as missing:
    raise MissingExtra("polars") from missing

logger = logging.getLogger(__name__)

BLOCK_BYTES = 16 << 20
HEAD_BYTES = 1 << 20
LONGEST_LINE = 1 << 20  # bytes; no line of any format is this long
EARLIEST_MILLISECONDS = 10**11  # 1973; as seconds it would be the year 5138
MOST_EVENTS = 100  # their codes have one byte
HOPELESS = 1_000_000  # so many malformed rows, and more than half: the rest of the file is not read
PACKED = ("", ".gz", ".zip")
BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # the others unpack a whole block at once, however large it gets
BOM = b"\xef\xbb\xbf"
NOT_IN_IDS = ["\n", "\r", "\0"]  # polars reads half a surrogate pair of JSON as \0, whichever half it was
BROKEN_ARCHIVE = (
    EOFError, RuntimeError, ValueError, struct.error, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile
)  # fmt: skip
EXTRA = "beyond the last column"
SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars", " ": "spaces"}
Shape = Callable[[pl.DataFrame], pl.DataFrame]
Kind = Any  # a polars data type; their metaclass is one that run-time checkers of annotations refuse


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a delimited file: in file order where it has no header, else found by name."""

    columns: Mapping[str, Kind]
    header: bool
    separator: str = ","
    quote: str | None = None
    numeric: str = ""  # a column whose first value must be a number (or a date): a header there is noticed
    required: tuple[str, ...] = ()  # without these a row is malformed
    unread: tuple[str, ...] = ()  # columns of the file that no log holds, stepped over unparsed


@dataclass(slots=True)
class Tally:
    """What became of the rows of one file."""

    rows: int = 0
    malformed: int = 0
    first_malformed: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    example: str = ""  # what is wrong with the first malformed row
    share: float = 0.01  # of the rows may be malformed
    advice: str = "see docs/datasets.md for the format"
    logs: bool = True  # whether `gather` logs what became of the rows

    def drop(self, frame: pl.DataFrame, keep: pl.Expr, why: str) -> pl.DataFrame:
        """The rows to keep; the others are counted under `why`."""
        kept = frame.filter(keep)
        self.dropped[why] = self.dropped.get(why, 0) + len(frame) - len(kept)
        return kept

    def malform(self, frame: pl.DataFrame, good: pl.Series | None = None) -> pl.DataFrame:
        """The good rows (those without a null); the others, of a block already counted, turn out to be malformed."""
        kept = frame.drop_nulls() if good is None else frame.filter(good)
        if len(kept) < len(frame):
            self.first_malformed = self.first_malformed or self.rows - len(frame) + 1
            self.malformed += len(frame) - len(kept)
        return kept


def locate(source: Path, names: Sequence[str], what: str) -> Path:
    """The official file: `source` itself, or the first of `names` (packed or not) in the folder `source`."""
    try:
        if source.is_file():
            return source
        if not source.is_dir():
            raise DatasetNotFound(
                f"no {what} at {source}: no such file or folder; see docs/datasets.md for how to get it"
            )
        for name in names:
            for ending in PACKED:
                if (source / f"{name}{ending}").is_file():
                    return source / f"{name}{ending}"
    except OSError as closed:
        raise DatasetNotFound(f"no {what} at {source}: {closed.strerror}; name the file or folder") from closed
    wanted = ", ".join(names)
    raise DatasetNotFound(f"no {what} in the folder {source}: it holds none of {wanted}; see docs/datasets.md")


@contextmanager
def opened(path: Path, member: Sequence[str] = ()) -> Iterator[tuple[IO[bytes], Callable[[], int], int]]:
    """The unpacked bytes of a file, a function that says how many are done, and their total."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                info = _only_member(archive, path, member)
                with archive.open(info) as stream:
                    yield stream, stream.tell, info.file_size
            return
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if packed else raw
            yield stream, raw.tell, path.stat().st_size
    except BROKEN_ARCHIVE as broken:
        raise DataError(f"{path}: the archive must be whole, found {broken}; download it again") from broken
    except OSError as broken:
        raise DataError(f"{path}: cannot be read: {broken.strerror or broken}") from broken


def _only_member(archive: zipfile.ZipFile, path: Path, wanted: Sequence[str]) -> zipfile.ZipInfo:
    files = [info for info in archive.infolist() if not info.is_dir()]
    named = [info for info in files if Path(info.filename).name in wanted]
    if named or len(files) == 1:
        info = (named or files)[0]
        if info.compress_type in BOUNDED:
            return info
        raise DataError(f"{path}: a zip archive must be deflated, found method {info.compress_type}; unpack it first")
    raise DataError(f"{path}: the archive holds {len(files)} files, none of them {', '.join(wanted)}; unpack it first")


def head(path: Path, member: Sequence[str] = (), encoding: str = UTF8) -> list[str]:
    """The first whole lines of a file, without their line ends."""
    with opened(path, member) as (stream, _, _):
        start = stream.read(HEAD_BYTES)
    cut = len(start) == HEAD_BYTES
    start = start.removeprefix(BOM)
    if not start.strip():
        raise DataError(f"{path}: a log needs at least one row, found an empty file")
    if start[257:262] == b"ustar":
        raise DataError(f"{path}: found a tar archive where the file itself belongs; run `tar xf {path}` first")
    if b"\0" in start or (cut and b"\n" not in start):
        raise DataError(f"{path}: lines of text belong here, found binary data; see docs/datasets.md for the format")
    if b"\r" in start and b"\n" not in start:
        raise DataError(
            f"{path}: lines must end in a line feed, found carriage returns alone; "
            "convert it by `tr '\\r' '\\n' < FILE > NEW`"
        )
    lines = [line.removesuffix("\r") for line in start.decode(encoding, "replace").split("\n")]
    return lines[:-1] if cut or not lines[-1] else lines


def blocks(
    path: Path,
    progress: Progress = silent,
    *,
    member: Sequence[str] = (),
    encoding: str = UTF8,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[bytes]:
    """The file in order as UTF-8, in pieces that end where a line ends."""
    start = 0
    with opened(path, member) as (stream, done, total):
        while block := stream.read(block_bytes):
            rest = stream.readline(LONGEST_LINE)
            block += rest
            if len(rest) == LONGEST_LINE and not rest.endswith(b"\n"):
                line = _line_at(path, member, start, block[: block.rfind(b"\n") + 1])
                raise DataError(
                    f"{path}, line {line:,}: a line must be shorter than {LONGEST_LINE:,} bytes, found a longer one; "
                    "is it the official file?"
                )
            yield _as_utf8(block if start else block.removeprefix(BOM), encoding, path, member, start)
            start += len(block)
            progress(f"reading {path.name}", float(done()), float(total))


def _as_utf8(block: bytes, encoding: str, path: Path, member: Sequence[str], start: int) -> bytes:
    """The block as UTF-8, or an error that names the line; a byte guessed could make two users one."""
    if block.isascii():
        return block
    try:
        text = block.decode(encoding)
        return block if encoding == UTF8 else text.encode()
    except UnicodeDecodeError as broken:
        line = _line_at(path, member, start, block[: broken.start])
        found = block[broken.start :][:1].hex()
        others = " or ".join(name for name in ENCODINGS if name != encoding)
        raise DataError(
            f"{path}, line {line:,}: the text must be {encoding}, found the byte 0x{found}; "
            f"repair the line, or name the encoding the file has by --encoding ({others})"
        ) from broken


def _line_at(path: Path, member: Sequence[str], start: int, then: bytes) -> int:
    """The number of the line that follows the first `start` bytes of the file and the bytes `then`."""
    line = 1 + then.count(b"\n")
    with opened(path, member) as (stream, _, _):
        while start and (block := stream.read(min(start, BLOCK_BYTES))):
            line += block.count(b"\n")
            start -= len(block)
    return line


def check_first_lines(path: Path, lines: Sequence[str], layout: Layout) -> list[str]:
    """The columns of the file in its own order, or an error that says how the file differs from its format."""
    names, first = list(layout.columns), fields(lines[0], layout)
    if len(first) < len(layout.required or names):
        raise DataError(
            f"{path}: {len(names)} columns separated by {_word(layout.separator)} belong here ({', '.join(names)}), "
            f"found {_found_separator(lines[0], layout.separator)}; convert it or get the official file"
        )
    if not layout.header:
        place = names.index(layout.numeric)
        if place < len(first) and not first[place].lstrip("-")[:1].isdigit():
            raise DataError(
                f"{path}: this format has no header, found {first[place]!r} where the first {layout.numeric} belongs; "
                "remove the first line"
            )
        return names
    if len(set(first)) < len(first):
        raise DataError(
            f"{path}: the header must name each column once, found {lines[0][:80]!r}; rename one of the equal columns"
        )
    absent = [name for name in layout.required or names if name not in first]
    if absent:
        raise DataError(
            f"{path}: the first line must be the header {layout.separator.join(names)!r}, found no {_listed(absent)} "
            f"in {lines[0][:80]!r}; put the header back or get the official file"
        )
    return first


def _listed(names: Iterable[str]) -> str:
    """The names on one line, whatever they hold."""
    return ", ".join(name if name.isprintable() else repr(name) for name in names)


def fields(line: str, layout: Layout) -> list[str]:
    """The values of one line, without quotes."""
    return [value.strip().strip('"') for value in line.split(layout.separator)]


def _word(separator: str) -> str:
    return SEPARATORS.get(separator, repr(separator))


def _found_separator(line: str, wanted: str) -> str:
    others = [other for other in SEPARATORS if other != wanted and line.count(other) >= 2]
    return f"{_word(max(others, key=line.count))} in the first line" if others else f"{line[:80]!r} as the first line"


def table(
    path: Path,
    layout: Layout,
    tally: Tally,
    progress: Progress = silent,
    *,
    member: Sequence[str] = (),
    encoding: str = UTF8,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[pl.DataFrame]:
    """The well-formed rows of a delimited file, block by block; the others are counted."""
    names = check_first_lines(path, head(path, member, encoding), layout)
    schema = {name: layout.columns.get(name, pl.String) for name in names} | {EXTRA: pl.String}
    wanted = tuple(name for name in layout.columns if name in names and name not in layout.unread)
    read = blocks(path, progress, member=member, encoding=encoding, block_bytes=block_bytes)
    for frame in parsed_blocks(read, layout, lambda rows: parse_rows(rows, layout, schema, wanted)):
        yield well_formed(frame, layout.required or wanted, tally)


def parsed_blocks(
    read: Iterable[bytes], layout: Layout, parse: Callable[[bytes], pl.DataFrame]
) -> Iterator[pl.DataFrame]:
    """The frame of each block, the header left out; a block is parsed while the caller works on the one before."""

    def call(block: bytes, skip: bool) -> pl.DataFrame:
        return parse(block.partition(b"\n")[2] if skip else block)

    yield from one_ahead(partial(call, block, layout.header and place == 0) for place, block in enumerate(read))


def parse_rows(
    rows: bytes, layout: Layout, schema: Mapping[str, Kind], wanted: Sequence[str], *, line_breaks: bool = False
) -> pl.DataFrame:
    """The wanted columns, and what lies beyond the last one; a line with a stray quote is all null.

    So is one that breaks between quotes, unless `line_breaks` allows it.
    """
    if layout.quote and not line_breaks and b'"' in rows and _breaks_a_quote(rows):
        rows = _without_misquoted(rows, layout.separator)
    try:
        return _parsed(rows, layout, schema).select(*wanted, EXTRA).collect()
    except pl.exceptions.PolarsError:  # a quote inside a field
        rows = _without_misquoted(rows, layout.separator)
        return _parsed(rows, layout, schema).select(*wanted, EXTRA).collect()


def _parsed(rows: bytes, layout: Layout, schema: Mapping[str, Kind]) -> pl.LazyFrame:
    """The rows of whole lines without a header; a value of the wrong kind is null."""
    return pl.scan_csv(
        rows,
        schema=dict(schema),
        has_header=False,
        separator=layout.separator,
        quote_char=layout.quote,
        encoding="utf8-lossy",
        ignore_errors=True,
        truncate_ragged_lines=True,
        missing_columns="insert",
        extra_columns="ignore",
    )


def _breaks_a_quote(rows: bytes) -> bool:
    """Whether a line ends between two quotes: a stray one would swallow the lines up to the next."""
    marks = np.frombuffer(rows, np.uint8)
    quotes_before = np.searchsorted(np.flatnonzero(marks == ord('"')), np.flatnonzero(marks == ord("\n")))
    return bool((quotes_before % 2).any()) or rows.count(b'"') % 2 == 1


def _without_misquoted(rows: bytes, separator: str) -> bytes:
    """The rows with an empty line, which is malformed, in place of each with a quote elsewhere than around a value."""
    mark = re.escape(separator)
    value = rf'(?:[^"{mark}]*|"(?:[^"]|"")*")'
    proper = re.compile(rf"{value}(?:{mark}{value})*\r?".encode())
    return b"\n".join(line if b'"' not in line or proper.fullmatch(line) else b"" for line in rows.split(b"\n"))


def one_ahead(calls: Iterable[Callable[[], pl.DataFrame]]) -> Iterator[pl.DataFrame]:
    """What the calls return, in order; the next one runs while the caller works on what it got."""
    with ThreadPoolExecutor(1) as worker:
        running = None
        for call in calls:
            started = worker.submit(call)
            if running is not None:
                yield running.result()
            running = started
        if running is not None:
            yield running.result()


def json_lines(
    path: Path, schema: Mapping[str, Kind], tally: Tally, progress: Progress = silent, *, encoding: str = UTF8
) -> Iterator[pl.DataFrame]:
    """The well-formed objects of a JSON-lines file, block by block; the others are counted."""
    first = head(path, encoding=encoding)[0]
    if not first.lstrip().startswith("{"):
        raise DataError(f"{path}: one JSON object per line belongs here, found {first[:80]!r}; get the official file")
    for block in blocks(path, progress, encoding=encoding):
        yield well_formed(parse_objects(block, schema), tuple(schema), tally)


def parse_objects(lines: bytes, schema: Mapping[str, Kind]) -> pl.DataFrame:
    """The columns of `schema` from one JSON object a line; a line that is none is all null."""
    try:
        frame = pl.read_ndjson(lines, schema=dict(schema), ignore_errors=True)
    except pl.exceptions.PolarsError:
        frame = pl.read_ndjson(_mended(lines, schema), schema=dict(schema), ignore_errors=True)
    return frame.select(list(schema))


def _mended(block: bytes, wanted: Iterable[str]) -> bytes:
    """The wanted plain values of every object, and an empty object in place of every line that is none."""

    def mended(line: bytes) -> bytes:
        try:
            found = json.loads(line)
            plain = {name: found[name] for name in wanted if isinstance(found.get(name), str | int | float)}
            text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
            return text.encode()  # not for half a surrogate pair
        except (ValueError, AttributeError, RecursionError):
            return b"{}"

    return b"\n".join(mended(line) for line in block.splitlines() if line.strip())


def well_formed(frame: pl.DataFrame, required: Sequence[str], tally: Tally) -> pl.DataFrame:
    """The rows that have every required value and nothing beyond the last column."""
    surplus = EXTRA in frame.columns and frame[EXTRA].null_count() < len(frame)
    if not surplus and not any(frame[name].null_count() for name in required):  # nearly every block
        tally.rows += len(frame)
        return frame.drop(EXTRA, strict=False)
    good = pl.all_horizontal(*(pl.col(name).is_not_null() for name in required))
    if EXTRA in frame.columns:
        good &= pl.col(EXTRA).is_null()
    mask = frame.select(good.alias("good"))["good"]
    bad = len(mask) - int(mask.sum())
    if not tally.malformed:
        tally.first_malformed = tally.rows + int((~mask).arg_max() or 0) + 1
    tally.rows += len(frame)
    tally.malformed += bad
    return frame.filter(mask).drop(EXTRA, strict=False)


def utc_seconds(column: str) -> pl.Expr:
    """Unix seconds of `2010-10-12T00:21:28Z`, null where it is something else."""
    return pl.col(column).str.to_datetime("%Y-%m-%dT%H:%M:%SZ", strict=False).dt.epoch("s")


def milliseconds(frame: pl.DataFrame, file: Path) -> pl.DataFrame:
    """The frame with its milliseconds `time` in seconds; refuses seconds where milliseconds belong."""
    lowest = frame["time"].min()
    if isinstance(lowest, int) and lowest < EARLIEST_MILLISECONDS:
        raise DataError(
            f"{file}: timestamps must be unix milliseconds after 1973, found {lowest}; "
            "the official file has 13 digits: get it, or drop the broken rows"
        )
    return frame.with_columns(pl.col("time") // 1000)


@dataclass(slots=True)
class Pieces:
    """The columns of a log while its blocks arrive, identifiers already small."""

    strings: dict[str, pl.Series] = field(default_factory=dict)  # empty; polars forgets categories that no series has
    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)

    def add(self, frame: pl.DataFrame) -> None:
        for name in frame.columns:
            self.columns.setdefault(name, []).append(self._compact(name, frame[name]))

    def _compact(self, name: str, column: pl.Series) -> np.ndarray:
        if name == "event":
            return self._event_codes(column)
        if column.dtype == pl.String or name in self.strings:
            if name not in self.strings:
                self.strings[name] = pl.Series([], dtype=pl.Categorical(pl.Categories.random()))
                pieces = self.columns.get(name, [])  # of whole numbers so far
                pieces[:] = [self._text_codes(name, pl.Series(piece)) for piece in pieces]
            return self._text_codes(name, column)
        values = column.to_numpy()
        if name in ("user", "item") and values.min() >= -(2**31) and values.max() < 2**31:
            return values.astype(np.int32)
        return values.copy()  # the frame behind a view would live on

    def _text_codes(self, name: str, column: pl.Series) -> np.ndarray:
        return column.cast(pl.String).cast(self.strings[name].dtype).to_physical().to_numpy()

    def _event_codes(self, column: pl.Series) -> np.ndarray:
        coded = column.cast(pl.Enum(self.events), strict=False)
        if coded.null_count():
            self.events += [event for event in column.unique(maintain_order=True) if event not in self.events]
            if len(self.events) > MOST_EVENTS:
                raise DataError(
                    f"at most {MOST_EVENTS} different events belong in a log, found {self.events[:3]} and more; "
                    "choose another column by --event, or none by --event ''"
                )
            coded = column.cast(pl.Enum(self.events))
        return coded.to_physical().to_numpy().astype(np.int8)

    def taken(self, name: str) -> np.ndarray | None:
        """The whole column; its pieces are let go, since both together would not fit."""
        pieces = self.columns.pop(name, None)
        return None if pieces is None else np.concatenate(pieces)

    def codes(self, name: str, values: np.ndarray) -> tuple[np.ndarray, pa.Array]:
        if name in self.strings:
            known: Kind = self.strings[name].dtype
            return values, known.categories.to_series().to_arrow().cast(pa.large_string())
        return integer_codes(values)


def gather(name: str, frames: Iterator[pl.DataFrame], shape: Shape, tally: Tally, path: Path) -> InteractionLog:
    """The log of all frames, each brought to columns user, item, time (and rating, event) by `shape`."""
    pieces = Pieces()
    for frame in frames:
        if len(usable := _usable(shape(frame), tally)):
            pieces.add(usable)
        if tally.malformed > HOPELESS and tally.malformed > max(0.5, tally.share) * tally.rows:
            break  # `check_share` refuses the file
    check_share(path, tally)
    if tally.logs:
        report(name, tally)
    times = pieces.taken("time")
    if times is None:
        raise DataError(f"{path}: a log needs at least one usable row, found none; see docs/datasets.md for the format")
    check_seconds(times, str(path))
    order, times = chronological(times)

    def sorted_(column: str) -> np.ndarray | None:
        values = pieces.taken(column)
        return values if values is None or order is None else np.take(values, order, mode="clip")  # unchecked: faster

    with ThreadPoolExecutor(2) as both:
        users, items, ratings, events = both.map(sorted_, ("user", "item", "rating", "event"))
    assert users is not None
    assert items is not None
    order = None
    users, user_ids = pieces.codes("user", users)
    items, item_ids = pieces.codes("item", items)
    coded = None if events is None else pa.DictionaryArray.from_arrays(pa.array(events), pa.array(pieces.events))
    return from_codes(name, users, items, times, user_ids, item_ids, ratings=ratings, events=coded)


def _usable(frame: pl.DataFrame, tally: Tally) -> pl.DataFrame:
    """The rows whose identifiers are one line of text and whose rating is a number; the others are malformed."""
    texts = [pl.col(name) for name in ("user", "item") if frame.schema[name] == pl.String]
    good = [(text.str.len_bytes() > 0) & ~text.str.contains_any(NOT_IN_IDS) for text in texts]
    good += [pl.col("rating").is_finite().fill_null(True)] if "rating" in frame.columns else []
    if not good:
        return frame
    mask = frame.select(pl.all_horizontal(good).alias("good"))["good"]
    return frame if mask.all() else tally.malform(frame, mask)


def check_share(path: Path, tally: Tally) -> None:
    """Refuse a file that is mostly something else."""
    allowed = max(10 if tally.share else 0, tally.share * tally.rows)  # a few in a short file
    if tally.malformed > min(allowed, max(0.5, tally.share) * tally.rows):
        example = f": {tally.example}" if tally.example else ""
        raise DataError(
            f"{path}: at most {100 * tally.share:g} % of the rows may be malformed, found {tally.malformed:,} of "
            f"{tally.rows:,} (the first is row {tally.first_malformed:,}{example}); {tally.advice}"
        )


def report(name: str, tally: Tally) -> None:
    """Log what became of the rows."""
    lost = {"malformed": tally.malformed} | tally.dropped
    notes = [f"{count:,} dropped ({why})" for why, count in lost.items() if count]
    level = logging.WARNING if notes else logging.INFO
    logger.log(level, "%s: %s", name, ", ".join([f"{tally.rows:,} rows read", *notes]))
