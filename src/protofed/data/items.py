"""What is known of items: a table beside the log, with their titles, texts, categories, places and images."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pyarrow as pa

from protofed.data.catalog import UTF8
from protofed.data.columns import ABOUT_ITEMS, ID, best, listed, matching, plain, shown
from protofed.data.interactions import InteractionLog
from protofed.data.own_log import identifiers, written_as_floats
from protofed.data.prepared import ITEMS_FILE, check_name
from protofed.data.reading import blocks
from protofed.data.tables import Delimited, JsonLines, Table, open_table
from protofed.errors import DataError, DatasetNotFound
from protofed.progress import silent

MOST_BYTES = 2 << 30  # of an item table, unpacked
RANGES = {"lat": 90.0, "lon": 180.0}  # degrees


@dataclass(frozen=True, slots=True)
class Items:
    """An item table and what became of its rows."""

    table: pa.Table  # item, and those of title, text, category, lat, lon, image that were found
    columns: Mapping[str, str]
    dropped: tuple[str, ...]  # columns
    rows: int
    malformed: int  # without an identifier, or none of the log's type
    duplicates: int
    misplaced: int  # with a latitude or longitude that does not exist


def load_items(name: str, root: Path | str = "data") -> pa.Table | None:
    """The item table beside the prepared log NAME; None where there is none.

    Column `item` (int64 or large_string) has each item once; of title, text, category, image (large_string), lat and
    lon (float64) there are those that the file has, under these or other usual names.
    """
    file = Path(root) / check_name(name) / ITEMS_FILE
    try:
        if not file.is_file():
            return None
    except OSError as closed:
        raise DatasetNotFound(f"no items of {name!r} under {root}: {closed.strerror}; give --root") from closed
    return read_items(file).table


def read_items(file: Path, *, log_column: str = "item", texts: bool | None = None, encoding: str = UTF8) -> Items:
    """The items of a csv, tsv, jsonl or parquet file, each once.

    `log_column` is what the log calls its items. `texts` says whether its identifiers are texts; None keeps the file's.
    """
    table = open_table(file, encoding=encoding)
    columns = item_columns(table, log_column)
    frame = _whole(table, tuple(columns.values()), encoding)
    frame = frame.select(**{role: pl.col(column) for role, column in columns.items()})
    ids = _identifiers(frame["item"], table, texts)
    found = frame.with_columns(ids.alias("item"), *(_column(role) for role in columns if role != "item"))
    usable = found.filter(pl.col("item").is_not_null())
    if not len(usable):
        kind = {True: "texts", False: "integers", None: "integers or texts"}[texts]
        seen = f"found {str(frame['item'][0])[:60]!r}" if len(frame) else "found no row"
        raise DataError(
            f"{file}: {shown(columns['item'])} must identify the items of the log ({kind}), {seen}; "
            "call the right column `item`"
        )
    once = usable.unique("item", keep="first", maintain_order=True)
    usable_places, misplaced = placed(once)
    return Items(
        as_arrow(usable_places),
        columns,
        tuple(column for column in table.columns if column not in columns.values()),
        rows=len(found),
        malformed=len(found) - len(usable),
        duplicates=len(usable) - len(once),
        misplaced=misplaced,
    )


def item_columns(table: Table, log_column: str = "item") -> dict[str, str]:
    """The column of the identifiers and those of what is known of the items."""
    same = [column for column in table.columns if plain(column) == plain(log_column)]
    found = same or matching(table.columns, ID)
    if len(found) != 1:
        which = f"{' or '.join(map(shown, found))} could be the item" if found else "no column is named like an item"
        raise DataError(
            f"{table.path}: {which}; call it {shown(log_column)}, as the log does: "
            f"the columns are {listed(table.columns)}"
        )
    columns = {"item": found[0]}
    for role, names in ABOUT_ITEMS.items():
        column = best((column for column in table.columns if column not in columns.values()), names)
        columns |= {} if column is None else {role: column}
    return columns


def _whole(table: Table, wanted: Sequence[str], encoding: str) -> pl.DataFrame:
    """The wanted columns of all rows."""
    if isinstance(table, Delimited):
        return table.whole(wanted, _bytes(table.path, encoding))
    if isinstance(table, JsonLines):
        rows = [_plain_values(line, wanted) for line in _bytes(table.path, encoding).split(b"\n") if line.strip()]
        return pl.DataFrame(rows, schema=dict.fromkeys(wanted, pl.String), orient="row")
    frames = list(table.frames(wanted, (), silent))
    return pl.concat(frames) if frames else table.sample(wanted)


def _bytes(path: Path, encoding: str) -> bytes:
    """The whole file, unpacked."""
    pieces: list[bytes] = []
    size = 0
    for block in blocks(path, encoding=encoding):
        pieces.append(block)
        size += len(block)
        if size > MOST_BYTES:
            raise DataError(f"{path}: an item table must be smaller than 2 GB unpacked, found more; drop some columns")
    return b"".join(pieces)


def _plain_values(line: bytes, wanted: Sequence[str]) -> list[str | None]:
    """The wanted values of one JSON object as texts, lists joined by bars; None for what is nested deeper."""
    try:
        found = json.loads(line)
        return [_plain_value(found.get(name)) for name in wanted]
    except (ValueError, AttributeError, RecursionError):
        return [None] * len(wanted)


def _plain_value(value: object) -> str | None:
    if isinstance(value, list):
        parts = [_plain_value(part) for part in value if not isinstance(part, list)]
        return "|".join(part for part in parts if part is not None)
    if not isinstance(value, str | int | float):
        return None
    return str(value).encode("utf-8", "replace").decode()  # half a surrogate pair is no text


def _identifiers(values: pl.Series, table: Table, texts: bool | None) -> pl.Series:
    """Identifiers of the log's type, null where a value is none."""
    written = values if values.dtype != pl.String else values.str.strip_chars()
    ids = identifiers(written, floats=written_as_floats(written), nested=isinstance(table, JsonLines))
    keep = values.dtype == pl.String if texts is None else texts
    return ids.cast(pl.String if keep else pl.Int64, strict=False)


def _column(role: str) -> pl.Expr:
    """The values of a role: numbers of places, else texts that are not empty."""
    if role in RANGES:
        return pl.col(role).cast(pl.Float64, strict=False)
    text = pl.col(role).cast(pl.String).str.strip_chars()
    return pl.when(text != "").then(text).alias(role)


def placed(items: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """The items, those at a place that does not exist without one, and how many these are."""
    present = [role for role in RANGES if role in items.columns]
    if not present:
        return items, 0
    nowhere = items.select(
        pl.any_horizontal(
            (pl.col(role).is_nan() | (pl.col(role).abs() > RANGES[role])).fill_null(False) for role in present
        )
    ).to_series()
    return items.with_columns(pl.when(~nowhere).then(pl.col(role)).alias(role) for role in present), int(nowhere.sum())


def as_arrow(items: pl.DataFrame) -> pa.Table:
    """Numbers as they are, all else as large strings."""
    table = items.to_arrow()
    numbers = [pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in table.schema.types]
    kinds = zip(table.column_names, table.schema.types, numbers, strict=True)
    return table.cast(pa.schema([(name, kind if number else pa.large_string()) for name, kind, number in kinds]))


def without_row(log: InteractionLog, items: pa.Table) -> int:
    """How many items of the log have no row in the table."""
    known = pl.Series(items["item"].to_pylist(), dtype=pl.String, strict=False)
    return int((~pl.Series(log.item_ids).cast(pl.String).is_in(known.implode())).sum())
