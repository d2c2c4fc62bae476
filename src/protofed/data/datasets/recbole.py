"""RecBole atomic files: `.inter`, tab-separated, with the type of each column in the header."""

import logging
from pathlib import Path

import polars as pl

from protofed.data.catalog import UTF8
from protofed.data.interactions import InteractionLog
from protofed.data.reading import Layout, Tally, gather, head, locate, table
from protofed.errors import DataError
from protofed.progress import Progress, silent

logger = logging.getLogger(__name__)


def load(path: Path, progress: Progress = silent, *, encoding: str = UTF8) -> InteractionLog:
    """The log of an `.inter` file, or of a folder that holds exactly one."""
    file, tally = locate(_only_inter(path), (), "RecBole interactions"), Tally()
    user, item, time, rating = columns_of(file, head(file, encoding=encoding)[0])
    types = {user: pl.String, item: pl.String, time: pl.Float64} | ({rating: pl.Float32} if rating else {})
    layout = Layout(types, header=True, separator="\t", required=(user, item, time))
    names = {"user": user, "item": item} | ({"rating": rating} if rating else {})

    def shape(frame: pl.DataFrame) -> pl.DataFrame:
        seconds = pl.col(time).floor().cast(pl.Int64, strict=False)
        return tally.malform(frame.select(time=seconds, **{new: pl.col(old) for new, old in names.items()}))

    return gather(name_of(path), table(file, layout, tally, progress, encoding=encoding), shape, tally, file)


def name_of(path: Path) -> str:
    """The data set's name: the file's, without its endings."""
    return path.name.removesuffix(".gz").removesuffix(".inter")


def columns_of(file: Path, line: str) -> tuple[str, str, str, str | None]:
    """The header's user, item, timestamp and (if there) rating columns, as written."""
    written = line.split("\t")
    typed = {name: kind for name, _, kind in (column.partition(":") for column in written)}
    if len(typed) != len(written) or not all(typed.values()):
        raise DataError(
            f"{file}: the first line must be a typed header as 'user_id:token<TAB>item_id:token<TAB>timestamp:float', "
            f"found {line[:80]!r}; put the header back"
        )
    tokens = [name for name, kind in typed.items() if kind == "token" and name not in ("item_id", "timestamp")]
    user = "user_id" if "user_id" in typed else tokens[0] if tokens else None
    item = "item_id" if "item_id" in typed else next((name for name in tokens if name != user), None)
    if user is None or item is None or "timestamp" not in typed:
        raise DataError(
            f"{file}: user_id, item_id and timestamp columns are needed, found {line[:80]!r}; "
            "a log without timestamps cannot be sliced by time"
        )
    if (user, item) != ("user_id", "item_id"):
        logger.warning("%s: taking %s as the user and %s as the item", file.name, user, item)
    as_written = {name: f"{name}:{kind}" for name, kind in typed.items()}
    return as_written[user], as_written[item], as_written["timestamp"], as_written.get("rating")


def _only_inter(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = sorted([*path.glob("*.inter"), *path.glob("*.inter.gz")])
    if len(found) != 1:
        raise DataError(f"{path}: the folder must hold exactly one .inter file, found {len(found)}; name the file")
    return found[0]
