"""MovieLens (GroupLens, University of Minnesota): ML-20M, its Kaggle re-issue, and the older .dat and .data layouts."""

from pathlib import Path

import polars as pl

from protofed.data.catalog import UTF8
from protofed.data.interactions import InteractionLog
from protofed.data.reading import Layout, Tally, gather, head, locate, table
from protofed.progress import Progress, silent

NAMES = ("ratings.csv", "rating.csv", "ratings.dat", "u.data")
WANTED = ("user", "item", "rating", "time")
NUMBERS = {"user": pl.Int64, "item": pl.Int64, "rating": pl.Float32, "time": pl.Int64}
OFFICIAL = {"userId": pl.Int64, "movieId": pl.Int64, "rating": pl.Float32, "timestamp": pl.Int64}
COMMAS = Layout(OFFICIAL, header=True, quote='"')
KAGGLE = Layout(OFFICIAL | {"timestamp": pl.String}, header=True, quote='"')
TABS = Layout(NUMBERS, header=False, separator="\t", numeric="time")
# polars splits at one byte, so `::` is a colon and an empty column
COLONS = Layout(
    {"user": pl.Int64, "_1": pl.String, "item": pl.Int64, "_2": pl.String, "rating": pl.Float32, "_3": pl.String}
    | {"time": pl.Int64},
    header=False,
    separator=":",
    numeric="time",
    required=WANTED,
)


def load(path: Path, progress: Progress = silent, *, encoding: str = UTF8) -> InteractionLog:
    """All ratings with their stars; the canonical filter keeps those of 4 and more."""
    file, tally = locate(path, NAMES, "MovieLens ratings"), Tally()
    layout = layout_of(head(file, NAMES, encoding))

    def shape(frame: pl.DataFrame) -> pl.DataFrame:
        frame = frame.rename({"userId": "user", "movieId": "item", "timestamp": "time"}, strict=False).select(WANTED)
        return tally.malform(_seconds(frame)) if layout is KAGGLE else frame

    return gather(
        "movielens-20m", table(file, layout, tally, progress, member=NAMES, encoding=encoding), shape, tally, file
    )


def layout_of(lines: list[str]) -> Layout:
    """Which of the four layouts the first lines show; the official one where they show none."""
    if "::" in lines[0]:
        return COLONS
    if lines[0].count("\t") == 3:
        return TABS
    return KAGGLE if len(lines) > 1 and "-" in lines[1].split(",")[-1].lstrip('"-') else COMMAS


def _seconds(frame: pl.DataFrame) -> pl.DataFrame:
    """The re-issue writes `2005-04-02 23:53:47`, in UTC."""
    return frame.with_columns(pl.col("time").str.to_datetime("%Y-%m-%d %H:%M:%S", strict=False).dt.epoch("s"))
