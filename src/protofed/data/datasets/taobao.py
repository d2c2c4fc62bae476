"""Taobao UserBehavior (Alibaba / Tianchi): 100 million clicks, carts, favourites and purchases of nine days."""

from pathlib import Path

import polars as pl

from protofed.data.catalog import UTF8
from protofed.data.interactions import InteractionLog
from protofed.data.reading import Layout, Tally, gather, locate, table
from protofed.errors import DataError
from protofed.progress import Progress, silent

NAMES = ("UserBehavior.csv",)
WINDOW = (1511539200, 1512316799)  # 2017-11-25 00:00:00 to 2017-12-03 23:59:59, Beijing time
OUTSIDE = "outside 2017-11-25 .. 2017-12-03 Beijing time"
LAYOUT = Layout(
    {"user": pl.Int64, "item": pl.Int64, "category": pl.Int64, "event": pl.String, "time": pl.Int64},
    header=False,
    numeric="time",
    required=("user", "item", "event", "time"),
    unread=("category",),
)


def load(path: Path, progress: Progress = silent, *, encoding: str = UTF8) -> InteractionLog:
    """All four behaviours within the official nine days, from UserBehavior.csv, packed or not."""
    file, tally = locate(path, NAMES, "Taobao user behaviour"), Tally()

    def shape(frame: pl.DataFrame) -> pl.DataFrame:
        inside = tally.drop(frame, pl.col("time").is_between(*WINDOW), OUTSIDE)
        _check_unit(frame, inside, file)
        return inside.select("user", "item", "time", "event")

    return gather("taobao", table(file, LAYOUT, tally, progress, member=NAMES, encoding=encoding), shape, tally, file)


def _check_unit(frame: pl.DataFrame, inside: pl.DataFrame, file: Path) -> None:
    """A few stray timestamps are known of the official file; a block full of them is another unit or another file."""
    if 2 * len(inside) >= len(frame):
        return
    in_ms = int((frame["time"] > 10**11).sum()) * 2 > len(frame)
    hint = "they look like milliseconds: divide them by 1000" if in_ms else "is it the official file?"
    raise DataError(
        f"{file}: timestamps must be unix seconds in {WINDOW[0]} .. {WINDOW[1]}, found {frame['time'][0]}; {hint}"
    )
