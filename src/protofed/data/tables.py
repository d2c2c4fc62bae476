"""Tables of any origin, told apart by their content: delimited text, JSON lines, parquet."""

import contextlib
import csv
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from protofed.data.catalog import UTF8
from protofed.data.columns import listed
from protofed.data.prepared import LOG_FILE
from protofed.data.reading import (
    EXTRA,
    SEPARATORS,
    Layout,
    blocks,
    head,
    one_ahead,
    parse_objects,
    parse_rows,
    parsed_blocks,
)
from protofed.errors import DataError, DatasetNotFound
from protofed.progress import Progress, silent

FIRST_ROWS = 1000
BATCH = 1 << 19  # rows of parquet at once
STEP = 1 << 17
MAGIC = b"PAR1"


@runtime_checkable
class Table(Protocol):
    """A file of rows with named columns."""

    @property
    def path(self) -> Path: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    def sample(self, wanted: Sequence[str]) -> pl.DataFrame:
        """The wanted columns of the first rows."""

    def frames(self, wanted: Sequence[str], whole: Collection[str], progress: Progress) -> Iterator[pl.DataFrame]:
        """The wanted columns block by block; those of `whole` as integers where every value of the block is one."""


def open_table(path: Path, *, encoding: str = UTF8, header: bool = True) -> Table:
    """The table in a file, whatever its format; an error says how to go on where it is none."""
    check_file(path)
    if _starts_with(path, MAGIC):
        return open_parquet(path)
    if path.suffix.lower() in (".parquet", ".pq"):
        raise DataError(f"{path}: must be a whole parquet file, found other data; export it again, or rename it")
    lines = head(path, encoding=encoding)
    if lines[0].lstrip().startswith("{"):
        return open_json_lines(path, lines, encoding)
    if lines[0].strip() in ("[", "[]") or lines[0].lstrip().startswith(("[{", "[ {")):
        raise DataError(
            f"{path}: one JSON object per line belongs here, found a JSON array; convert it by `jq -c '.[]' FILE > NEW`"
        )
    return open_delimited(path, lines, encoding, header)


def check_file(path: Path) -> None:
    """Refuse what is no file."""
    try:
        if (path / LOG_FILE).is_file():
            raise DataError(
                f"{path}: is a prepared log already; use it by --dataset {path.name} --root {path.parent}, "
                f"or import {path / LOG_FILE}"
            )
        if not path.exists():
            raise DatasetNotFound(f"{path}: no such file; name a csv, tsv, jsonl or parquet file")
        if not path.is_file():
            found = "a folder; name a file in it" if path.is_dir() else "a pipe or device; write it to a file first"
            raise DataError(f"{path}: one file belongs here, found {found}")
    except (OSError, ValueError) as closed:
        raise DatasetNotFound(f"{str(path)[:200]!r}: cannot be read: {closed}; name another file") from closed


def _starts_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError as closed:
        raise DataError(f"{path}: cannot be read: {closed.strerror or closed}; name another file") from closed


@dataclass(frozen=True, slots=True)
class Delimited:
    """A csv file, or one with tabs, semicolons or bars."""

    path: Path
    columns: tuple[str, ...]
    layout: Layout
    first_lines: tuple[str, ...]  # of rows
    encoding: str

    def sample(self, wanted: Sequence[str]) -> pl.DataFrame:
        rows = "".join(f"{line}\n" for line in self.first_lines).encode()
        return self._texts(rows, wanted).select(wanted)

    def frames(
        self, wanted: Sequence[str], whole: Collection[str] = (), progress: Progress = silent
    ) -> Iterator[pl.DataFrame]:
        read = blocks(self.path, progress, encoding=self.encoding)
        yield from parsed_blocks(read, self.layout, partial(self._parse, wanted=wanted, whole=whole))

    def whole(self, wanted: Sequence[str], content: bytes) -> pl.DataFrame:
        """The wanted columns of the whole content, where a text between quotes may hold line breaks."""
        rows = content.partition(b"\n")[2] if self.layout.header else content
        paired = rows.count(b'"') % 2 == 0  # a stray quote would swallow rows
        return self._texts(rows, wanted, line_breaks=paired).select(wanted)

    def _parse(self, rows: bytes, wanted: Sequence[str], whole: Collection[str]) -> pl.DataFrame:
        """Integers read at once where no value looks like a text that only resembles one, as 007 does."""
        if whole and not starts_oddly(rows, self.layout.separator):
            schema = {name: pl.Int64 if name in whole else pl.String for name in self.columns} | {EXTRA: pl.String}
            frame = parse_rows(rows, self.layout, schema, wanted)
            if not any(frame[name].null_count() for name in whole):
                return frame
        return self._texts(rows, wanted)

    def _texts(self, rows: bytes, wanted: Sequence[str], line_breaks: bool = False) -> pl.DataFrame:
        schema = dict.fromkeys((*self.columns, EXTRA), pl.String)
        return parse_rows(rows, self.layout, schema, wanted, line_breaks=line_breaks)


def starts_oddly(rows: bytes, separator: str) -> bool:
    """Whether any value starts like 007, +7 or -0: a reader of integers would make two identifiers one."""
    marks = np.frombuffer(b"\n\n" + rows + b"\n", np.uint8)
    comma, line, quote, space, zero, plus, minus = map(ord, (separator, "\n", '"', " ", "0", "+", "-"))
    for start in range(0, len(marks), STEP):  # a piece stays in the processor's cache
        piece = marks[start : start + STEP + 3]
        starts = piece[1:-2] <= max(ord(","), quote, space)  # no digit and no letter
        if comma > ord(","):
            starts |= piece[1:-2] == comma
        starts &= piece[2:-1] - np.uint8(plus) <= zero - plus  # one of + , - . / 0
        places = np.flatnonzero(starts)
        if not len(places):
            continue
        behind, before, mark, after = (piece[places + shift] for shift in range(4))
        odd = (mark == zero) & (after - np.uint8(zero) < 10) | (mark == plus) | (mark == minus) & (after == zero)
        at_start = (before == comma) | (before == line) | (before == quote)
        after_space = (behind == comma) | (behind == line) | (behind == quote) | (behind == space)
        if (odd & (at_start | (before == space) & after_space)).any():
            return True
    return False


def open_delimited(path: Path, lines: Sequence[str], encoding: str, header: bool) -> Delimited:
    """The table of a text file whose first line names its columns (1, 2, 3 and so on where it has no header)."""
    separator = separator_of(lines[0])
    first = fields_of(lines[0], separator, path)
    if not header:
        first = [str(place + 1) for place in range(len(first))]
    elif values := [name for name in first if looks_like_a_value(name)]:
        raise DataError(
            f"{path}: the first line must name the columns, found {values[0]!r} in it; add a line of names, "
            "or pass --no-header and number the columns: --user 1 --item 2 --time 3"
        )
    if len(set(first)) < len(first):
        raise DataError(
            f"{path}: the header must name each column once, found {lines[0][:80]!r}; rename one of the equal columns"
        )
    rows = tuple(lines[header : FIRST_ROWS + header])
    quoted = separator != "\t" or any(line.startswith('"') or '\t"' in line for line in lines[:FIRST_ROWS])
    layout = Layout(dict.fromkeys(first, pl.String), header, separator, '"' if quoted else None)
    return Delimited(path, tuple(first), layout, rows, encoding)


def separator_of(line: str) -> str:
    """The separator that cuts the line into most values."""
    return max((mark for mark in SEPARATORS if mark != " "), key=lambda mark: len(fields_of(line, mark)))


def fields_of(line: str, separator: str, path: Path | None = None) -> list[str]:
    """The values of a line, without the quotes and spaces around them."""
    try:
        return [value.strip() for value in next(csv.reader([line], delimiter=separator, skipinitialspace=True), [""])]
    except csv.Error as broken:
        if path is None:
            return []
        raise DataError(f"{path}: the first line must name the columns, found {line[:80]!r}: {broken}") from broken


def looks_like_a_value(name: str) -> bool:
    """Whether a name in the header is rather a number or a date."""
    return name[:1].isdigit() and all(mark in "0123456789.:-/ TZ+" for mark in name)


@dataclass(frozen=True, slots=True)
class JsonLines:
    """One JSON object a line."""

    path: Path
    columns: tuple[str, ...]
    first_lines: tuple[str, ...]
    encoding: str

    def sample(self, wanted: Sequence[str]) -> pl.DataFrame:
        return parse_objects("\n".join(self.first_lines).encode(), dict.fromkeys(wanted, pl.String))

    def frames(
        self, wanted: Sequence[str], whole: Collection[str] = (), progress: Progress = silent
    ) -> Iterator[pl.DataFrame]:
        read = blocks(self.path, progress, encoding=self.encoding)
        schema = dict.fromkeys(wanted, pl.String)
        yield from one_ahead(partial(parse_objects, block, schema) for block in read if block.strip())


def open_json_lines(path: Path, lines: Sequence[str], encoding: str) -> JsonLines:
    """The table of a file of JSON objects; its columns are the keys of the first ones."""
    names: dict[str, None] = {}
    first_lines = tuple(line for line in lines[:FIRST_ROWS] if line.strip())
    for line in first_lines:
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(line)
            names |= dict.fromkeys(found) if isinstance(found, dict) else {}
    if not names:
        raise DataError(f"{path}: one JSON object per line belongs here, found {lines[0][:80]!r}; convert it")
    return JsonLines(path, tuple(names), first_lines, encoding)


@dataclass(frozen=True, slots=True)
class Parquet:
    """A parquet file."""

    path: Path
    columns: tuple[str, ...]
    rows: int

    def sample(self, wanted: Sequence[str]) -> pl.DataFrame:
        return next(self._batches(wanted, FIRST_ROWS), pl.DataFrame(schema=dict.fromkeys(wanted, pl.String)))

    def frames(
        self, wanted: Sequence[str], whole: Collection[str] = (), progress: Progress = silent
    ) -> Iterator[pl.DataFrame]:
        done = 0
        for frame in self._batches(wanted, BATCH):
            done += len(frame)
            yield frame
            progress(f"reading {self.path.name}", float(done), float(self.rows))

    def _batches(self, wanted: Sequence[str], size: int) -> Iterator[pl.DataFrame]:
        try:
            with pq.ParquetFile(self.path) as file:
                for batch in file.iter_batches(size, columns=list(wanted)):
                    batch.validate(full=True)
                    yield pl.DataFrame({name: plain_series(batch[name], f"{self.path}: {name}") for name in wanted})
        except (pa.ArrowException, OSError, ValueError, KeyError) as broken:
            raise not_parquet(self.path, broken) from broken


def open_parquet(path: Path) -> Parquet:
    """The table of a parquet file."""
    try:
        with pq.ParquetFile(path) as file:
            names, rows = file.schema_arrow.names, file.metadata.num_rows
    except (pa.ArrowException, OSError, ValueError) as broken:
        raise not_parquet(path, broken) from broken
    if len(set(names)) < len(names):
        raise DataError(f"{path}: each column must be there once, found {listed(names)}; rename one of the equal ones")
    return Parquet(path, tuple(names), rows)


def not_parquet(path: Path, broken: Exception) -> DataError:
    """The error of a damaged file."""
    return DataError(
        f"{path}: must be a whole parquet file, found {' '.join(str(broken).split())[:200]}; export it again"
    )


def plain_series(values: pa.Array, where: str) -> pl.Series:
    """A column of numbers, texts or times; other types are refused."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        return plain_series(values.dictionary_decode(), where)
    if pa.types.is_null(kind) or pa.types.is_string_view(kind):
        values = values.cast(pa.large_string())
    elif pa.types.is_float16(kind) or pa.types.is_decimal(kind):
        values = values.cast(pa.int64() if pa.types.is_decimal(kind) and kind.scale == 0 else pa.float64())
    elif not (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_date(kind)
    ):
        raise DataError(f"{where} must hold numbers, texts or times, found the type {kind}; convert it")
    series = pl.from_arrow(values)
    assert isinstance(series, pl.Series)
    return series
