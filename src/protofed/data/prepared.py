"""Prepared logs: ROOT/NAME/interactions.parquet, read and written by pyarrow alone."""

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from protofed.data import filters
from protofed.data.catalog import nearest
from protofed.data.interactions import InteractionLog, check_seconds, from_codes, integer_codes
from protofed.errors import DataError, DatasetNotFound

LOG_FILE, SOURCE_FILE, ITEMS_FILE = "interactions.parquet", "source.json", "items.parquet"
IMPORT = "import the file by `protofed data import FILE --as NAME`"
NEEDED = ("user", "item", "timestamp")
OPTIONAL = ("rating", "event", "session")
ROWS_PER_GROUP = 1 << 20


def prepared_names(root: Path) -> tuple[str, ...]:
    """The prepared logs under `root`, sorted."""
    return tuple(sorted(file.parent.name for file in root.glob(f"*/{LOG_FILE}")))


def load_log(name: str, root: Path | str, canonical: bool = True) -> InteractionLog:
    """The prepared log NAME under `root`, filtered by its family's rule unless `canonical` is False."""
    file = _log_file(name, Path(root))
    log = _log_of(name, _read(file), file)
    return filters.canonical(log, family(name, root)) if canonical else log


def family(name: str, root: Path | str) -> str:
    """The family whose canonical rule a prepared log follows: of its source.json, else of its folder's name."""
    source = source_of(name, root).get("family")
    return source if isinstance(source, str) and source else filters.family_of(name)


def source_of(name: str, root: Path | str) -> dict[str, object]:
    """What `prepare` noted about the official file; empty where it was not ours."""
    file = Path(root) / name / SOURCE_FILE
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as broken:
        raise DataError(f"{file}: must be JSON, found {broken}; remove it or run `protofed data prepare`") from broken
    return found if isinstance(found, dict) else {}


def save_log(
    log: InteractionLog,
    root: Path | str,
    name: str,
    *,
    source: Mapping[str, object],
    items: pa.Table | None = None,
    overwrite: bool = False,
) -> Path:
    """The parquet file written: whole or not at all; a different log of that name stays unless `overwrite`.

    So does a different item table; where none is given, the one there is stays.
    """
    folder = Path(root) / check_name(name)
    file = folder / LOG_FILE
    note = json.dumps(dict(source), indent=2, sort_keys=True) + "\n"
    writers: dict[str, Callable[[Path], object]] = {
        SOURCE_FILE: lambda path: path.write_text(note, encoding="utf-8"),
        LOG_FILE: lambda path: _write(log, path),  # the log last: it makes the folder a prepared one
    }
    if items is not None:
        writers = {ITEMS_FILE: lambda path: pq.write_table(items, path, compression="zstd")} | writers
    try:
        if file.is_file() and not overwrite and not _holds(log, name, file):
            raise DataError(
                f"{file}: holds another log than the one to be written; pass --overwrite, or another name by --as"
            )
        if items is not None and not overwrite and not _holds_items(items, folder / ITEMS_FILE):
            raise DataError(f"{folder / ITEMS_FILE}: holds other items than those to be written; pass --overwrite")
        made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        _write_all(writers, folder, made)
    except OSError as closed:
        raise DataError(f"{file}: cannot be written: {closed.strerror or closed}; give another --root") from closed
    return file


def _holds(log: InteractionLog, name: str, file: Path) -> bool:
    """Whether the file is this log; a damaged one is not."""
    try:
        return _same(log, _log_of(name, _read(file), file))
    except DataError:
        return False


def _holds_items(items: pa.Table, file: Path) -> bool:
    """Whether writing the items would change nothing that is there."""
    try:
        return not file.is_file() or bool(pq.read_table(file).equals(items))
    except (pa.ArrowException, ValueError):
        return False


def _write_all(writers: Mapping[str, Callable[[Path], object]], folder: Path, made: Sequence[Path]) -> None:
    """All files in their places; where that fails, neither they nor the folders made for them are left."""
    staged = {final: folder / f".{final}.{os.getpid()}.tmp" for final in writers}
    try:
        for final, temporary in staged.items():
            writers[final](temporary)
        for final, temporary in staged.items():
            temporary.replace(folder / final)
    except BaseException:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)
        for empty in made:
            with contextlib.suppress(OSError):  # somebody else has written there
                empty.rmdir()
        raise


def check_name(name: str) -> str:
    """The name, or an error where it is none of a folder."""
    if not name or name != Path(name).name or name.startswith(".") or not name.isprintable():
        raise DatasetNotFound(f"a data set is named by its folder alone, found {name!r}; give the folder by --root")
    return name


def _log_file(name: str, root: Path) -> Path:
    file = root / check_name(name) / LOG_FILE
    try:
        if file.is_file():
            return file
        known = prepared_names(root)
    except OSError as closed:
        raise DatasetNotFound(f"no prepared log {name!r} under {root}: {closed.strerror}; give --root") from closed
    if not known:
        raise DatasetNotFound(
            f"no prepared log {name!r} under {root}, which holds none; "
            "give --root, or run `protofed data import` for a file of your own"
        )
    raise DatasetNotFound(
        f"no prepared log {name!r} under {root}{nearest(name, known)}; `protofed data list --root {root}` shows all"
    )


def _read(file: Path) -> pa.Table:
    """The columns we know, strings dictionary-encoded as they are read."""
    try:
        schema = pq.read_schema(file)
        _check_columns(file, schema.names)
        wanted = [name for name in (*NEEDED, *OPTIONAL) if name in schema.names]
        texts = [name for name in wanted if _is_text(schema.field(name).type)]
        with pq.ParquetFile(file, read_dictionary=texts, page_checksum_verification=True) as parquet:
            table = parquet.read(columns=wanted)
        table.validate(full=True)
        return table.unify_dictionaries()
    except (pa.ArrowException, OSError, ValueError) as broken:
        reason = " ".join(str(broken).split())[:200]
        raise DataError(f"{file}: must be a whole parquet file, found {reason}; prepare it again") from broken


def _check_columns(file: Path, names: Sequence[str]) -> None:
    absent = [name for name in NEEDED if name not in names]
    if absent:
        raise DataError(
            f"{file}: a prepared log needs the columns {', '.join(NEEDED)}, found no {', '.join(absent)} among "
            f"{', '.join(map(repr, names))}; {IMPORT}"
        )
    twice = [name for name in (*NEEDED, *OPTIONAL) if names.count(name) > 1]
    if twice:
        raise DataError(f"{file}: each column must be there once, found {', '.join(twice)} twice; rename one of them")


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _log_of(name: str, table: pa.Table, file: Path) -> InteractionLog:
    if not table.num_rows:
        raise DataError(f"{file}: a log needs at least one event, found none; prepare it again")
    for column in table.column_names:
        if column != "rating" and table[column].null_count:
            raise DataError(
                f"{file}: {column} must never be null, found {table[column].null_count} nulls; drop those rows"
            )
    users, user_ids = _codes(table["user"], file, "user")
    items, item_ids = _codes(table["item"], file, "item")
    present = table.column_names
    return from_codes(
        name,
        users,
        items,
        _seconds(table["timestamp"], file),
        user_ids,
        item_ids,
        ratings=_ratings(table["rating"], file) if "rating" in present else None,
        events=pa.DictionaryArray.from_arrays(*_codes(table["event"], file, "event")) if "event" in present else None,
        sessions=_sessions(table["session"], file) if "session" in present else None,
    )


def _codes(column: pa.ChunkedArray, file: Path, name: str) -> tuple[np.ndarray, pa.Array]:
    """The code of each row, and the original value of each code."""
    if pa.types.is_integer(column.type):
        return integer_codes(column.to_numpy())
    if pa.types.is_dictionary(column.type):
        whole = column.combine_chunks()
        whole = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
        _check_texts(whole.dictionary, file, name)
        return whole.indices.to_numpy(), whole.dictionary
    raise DataError(f"{file}: {name} must hold integers or strings, found {column.type}; convert it")


def _check_texts(values: pa.Array, file: Path, name: str) -> None:
    """Refuse what would make two lines of one identifier, or no identifier at all."""
    if not _is_text(values.type):
        return
    unusable = pc.or_(pc.equal(pc.binary_length(values), 0), pc.match_substring_regex(values, "[\r\n\\x00]"))
    if (found := values.filter(unusable)) and name != "event":
        raise DataError(
            f"{file}: {name} must be one line of text that is not empty, found {found[0].as_py()!r}; drop those rows"
        )


def _ratings(column: pa.ChunkedArray, file: Path) -> np.ndarray:
    """The ratings; a row without one is not a number."""
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise DataError(f"{file}: rating must hold numbers, found the type {kind}; convert it")
    ratings: np.ndarray = column.cast(pa.float32(), safe=False).to_numpy()
    if np.isinf(ratings).any():
        raise DataError(f"{file}: rating must hold finite numbers, found {ratings[np.isinf(ratings)][0]}; drop it")
    return ratings


def _sessions(column: pa.ChunkedArray, file: Path) -> np.ndarray:
    return column.to_numpy() if pa.types.is_integer(column.type) else _codes(column, file, "session")[0]


def _seconds(column: pa.ChunkedArray, file: Path) -> np.ndarray:
    """Unix seconds of numbers, dates or datetimes (without a zone they are UTC), parts of a second dropped."""
    kind = column.type
    dated = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    if not (dated or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise DataError(f"{file}: timestamp must hold whole unix seconds or datetimes, found the type {kind}; {IMPORT}")
    try:
        whole = pc.floor_temporal(column.cast(pa.timestamp("us"), safe=False), unit="second") if dated else column
        times: np.ndarray = (whole.cast(pa.timestamp("s")) if dated else whole).cast(pa.int64()).to_numpy()
    except pa.ArrowException as broken:
        raise DataError(f"{file}: timestamp must hold whole unix seconds, found {broken}; {IMPORT}") from broken
    check_seconds(times, str(file), f"or {IMPORT}")
    return times


def _write(log: InteractionLog, file: Path) -> None:
    """The log in row groups, so that the identifiers of 100 M rows are never all in memory."""
    groups = (_group(log, start) for start in range(0, len(log), ROWS_PER_GROUP))
    first = next(groups)
    with pq.ParquetWriter(file, first.schema, compression="zstd", write_page_checksum=True) as writer:
        writer.write_table(first)
        for group in groups:
            writer.write_table(group)


def _group(log: InteractionLog, start: int) -> pa.Table:
    rows = slice(start, start + ROWS_PER_GROUP)
    columns = {
        "user": log.user_ids.take(pa.array(log.users[rows].numpy())),
        "item": log.item_ids.take(pa.array(log.items[rows].numpy())),
        "timestamp": pa.array(log.times[rows].numpy()),
    }
    if log.ratings is not None:
        columns["rating"] = pa.array(log.ratings[rows].numpy(), from_pandas=True)  # null where there is none
    if log.events is not None:
        columns["event"] = log.events[rows].cast(pa.string())
    if log.sessions is not None:
        columns["session"] = pa.array(log.sessions[rows].numpy())
    return pa.table(columns)


def _same(one: InteractionLog, other: InteractionLog) -> bool:
    """Whether two logs hold the same events, whatever types their identifiers have."""
    if (len(one), one.n_users, one.n_items) != (len(other), other.n_users, other.n_items):
        return False
    starts = range(0, len(one), ROWS_PER_GROUP)
    return all(_same_rows(_group(one, start), _group(other, start)) for start in starts)


def _same_rows(one: pa.Table, other: pa.Table) -> bool:
    try:
        return bool(one.equals(other.cast(one.schema)))
    except (pa.ArrowException, ValueError):  # other columns, or strings that are no numbers
        return False
