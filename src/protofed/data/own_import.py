"""A table of one's own, and one about its items, to a prepared log; and what became of them in numbers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from protofed.data import filters
from protofed.data.catalog import UTF8
from protofed.data.interactions import InteractionLog
from protofed.data.items import Items, read_items, without_row
from protofed.data.own_log import MALFORMED_SHARE, Asked, OwnLog, read_log
from protofed.data.prepared import ITEMS_FILE, check_name, save_log
from protofed.data.reading import EARLIEST_MILLISECONDS
from protofed.data.stats import Counts, core_counts, counts, day_and_time
from protofed.data.tables import check_file
from protofed.progress import Progress, silent

EARLY = EARLIEST_MILLISECONDS // 1000  # unix seconds of March 1973
FEW = 5  # events; users with fewer are not in the 5-core


@dataclass(frozen=True, slots=True)
class ItemSummary:
    """What became of an item table."""

    file: str
    source: str
    rows: int  # items kept
    columns: Mapping[str, str]  # the source's, by what they became
    dropped_columns: tuple[str, ...]
    malformed: int
    duplicates: int
    misplaced: int
    log_items_without_row: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What an import read, kept and dropped."""

    name: str
    file: str
    rows: int
    users: int
    items: int
    first: str  # UTC
    last: str
    columns: Mapping[str, str]  # the file's, by what they became
    time: str  # how it was read
    remarks: tuple[str, ...]
    read: int
    malformed: int
    first_malformed: Mapping[str, object] | None  # its row, from 1, and what is wrong with it
    duplicates: int  # rows with the user, item and time of an earlier one; kept
    users_below_five: int
    five_core: Counts
    item_table: ItemSummary | None

    def as_dict(self) -> dict[str, object]:
        """Plain values, ready for JSON."""
        return asdict(self)


def import_log(
    path: Path,
    name: str,
    root: Path,
    asked: Asked = Asked(),  # noqa: B008 (frozen)
    progress: Progress = silent,
    *,
    items: Path | None = None,
    encoding: str = UTF8,
    header: bool = True,
    malformed_share: float = MALFORMED_SHARE,
    overwrite: bool = False,
) -> Summary:
    """The log (and its item table) written below `root`, or nothing at all."""
    check_name(name)
    if items is not None:
        check_file(items)
    own = read_log(name, path, asked, progress, encoding=encoding, header=header, malformed_share=malformed_share)
    about = None if items is None else read_items(
        items, log_column=own.columns["item"], texts=not pa.types.is_integer(own.log.item_ids.type), encoding=encoding
    )  # fmt: skip
    file = save_log(
        own.log,
        root,
        name,
        source=_source(own, path, encoding, items),
        items=None if about is None else about.table,
        overwrite=overwrite,
    )
    summary = (
        None if about is None or items is None else _item_summary(about, items, own.log, file.with_name(ITEMS_FILE))
    )
    return _summary(own, file, name, summary)


def _source(own: OwnLog, path: Path, encoding: str, items: Path | None) -> dict[str, object]:
    note: dict[str, object] = {"dataset": "own", "family": "own", "file": path.name, "rows": len(own.log)}
    note |= {"columns": dict(own.columns), "time": own.time}
    note |= {"items": items.name} if items is not None else {}
    return note | ({"encoding": encoding} if encoding != UTF8 else {})


def _summary(own: OwnLog, file: Path, name: str, items: ItemSummary | None) -> Summary:
    log, remarks = own.log, own.remarks
    if items is None and file.with_name(ITEMS_FILE).is_file():
        remarks += (f"{file.with_name(ITEMS_FILE)} stays as it was; --items FILE replaces it",)
    if int(log.times[-1]) < EARLY:
        remarks += (f"all times lie before 1973: is {own.columns['time']} the right column?",)
    size = counts(log)
    return Summary(
        name=name,
        file=str(file),
        rows=size.rows,
        users=size.users,
        items=size.items,
        first=day_and_time(log.times[0]),
        last=day_and_time(log.times[-1]),
        columns=dict(own.columns),
        time=own.time,
        remarks=remarks,
        read=own.read,
        malformed=own.malformed,
        first_malformed={"row": own.first_malformed, "what": own.example} if own.malformed else None,
        duplicates=filters.count_duplicates(log),
        users_below_five=int((np.bincount(log.users.numpy()) < FEW).sum()),
        five_core=core_counts(log),
        item_table=items,
    )


def _item_summary(about: Items, source: Path, log: InteractionLog, file: Path) -> ItemSummary:
    return ItemSummary(
        file=str(file),
        source=source.name,
        rows=about.table.num_rows,
        columns=dict(about.columns),
        dropped_columns=about.dropped,
        malformed=about.malformed,
        duplicates=about.duplicates,
        misplaced=about.misplaced,
        log_items_without_row=without_row(log, about.table),
    )
