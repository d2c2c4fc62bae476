"""Yelp Open Dataset (Yelp Inc.): the reviews, one JSON object per line."""

from pathlib import Path

import polars as pl

from protofed.data.catalog import UTF8
from protofed.data.interactions import InteractionLog
from protofed.data.reading import Tally, gather, json_lines, locate
from protofed.progress import Progress, silent

NAMES = ("yelp_academic_dataset_review.json", "review.json")
SCHEMA = {"user_id": pl.String, "business_id": pl.String, "stars": pl.Float32, "date": pl.String}
WITH_TIME, DAY_ONLY = "%Y-%m-%d %H:%M:%S", "%Y-%m-%d"


def load(path: Path, progress: Progress = silent, *, encoding: str = UTF8) -> InteractionLog:
    """All reviews with their stars; dates carry no zone and are read as UTC, older editions have the day only."""
    file, tally = locate(path, NAMES, "Yelp reviews"), Tally()

    def shape(frame: pl.DataFrame) -> pl.DataFrame:
        date = pl.col("date").str
        time = pl.coalesce(date.to_datetime(WITH_TIME, strict=False), date.to_datetime(DAY_ONLY, strict=False))
        return tally.malform(frame.select(user="user_id", item="business_id", rating="stars", time=time.dt.epoch("s")))

    return gather("yelp", json_lines(file, SCHEMA, tally, progress, encoding=encoding), shape, tally, file)
