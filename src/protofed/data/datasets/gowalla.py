"""Gowalla check-ins (SNAP, Stanford; Cho, Myers and Leskovec, KDD 2011)."""

from pathlib import Path

import polars as pl

from protofed.data.catalog import UTF8
from protofed.data.interactions import InteractionLog
from protofed.data.reading import Layout, Tally, gather, locate, table, utc_seconds
from protofed.progress import Progress, silent

NAMES = ("loc-gowalla_totalCheckins.txt", "Gowalla_totalCheckins.txt")
LAYOUT = Layout(
    {"user": pl.Int64, "time": pl.String, "latitude": pl.String, "longitude": pl.String, "item": pl.Int64},
    header=False,
    separator="\t",
    numeric="time",
    required=("user", "time", "item"),
)


def load(path: Path, progress: Progress = silent, *, encoding: str = UTF8) -> InteractionLog:
    """All check-ins, repeats included; the item is the location, the times are UTC."""
    file, tally = locate(path, NAMES, "Gowalla check-ins"), Tally()

    def shape(frame: pl.DataFrame) -> pl.DataFrame:
        return tally.malform(frame.select("user", "item", time=utc_seconds("time")))

    return gather("gowalla", table(file, LAYOUT, tally, progress, member=NAMES, encoding=encoding), shape, tally, file)
