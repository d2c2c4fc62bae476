"""H&M Personalized Fashion Recommendations (Kaggle, 2022): two years of purchases."""

from pathlib import Path

import polars as pl

from protofed.data.catalog import UTF8
from protofed.data.interactions import InteractionLog
from protofed.data.reading import Layout, Tally, gather, locate, table
from protofed.progress import Progress, silent

NAMES = ("transactions_train.csv",)
LAYOUT = Layout(
    {"t_dat": pl.String, "customer_id": pl.String, "article_id": pl.String},
    header=True,
    quote='"',
)


def load(path: Path, progress: Progress = silent, *, encoding: str = UTF8) -> InteractionLog:
    """All purchases at midnight UTC of their day; equal rows stay, since two of an article are two rows."""
    file, tally = locate(path, NAMES, "H&M transactions"), Tally()
    day = pl.col("t_dat").str.to_datetime("%Y-%m-%d", strict=False).dt.epoch("s")
    written = pl.col("article_id")
    article = pl.when(written != "").then(written.str.zfill(10))  # spreadsheet copies lose the leading zero

    def shape(frame: pl.DataFrame) -> pl.DataFrame:
        return tally.malform(frame.select(user="customer_id", item=article, time=day))

    return gather("hm", table(file, LAYOUT, tally, progress, member=NAMES, encoding=encoding), shape, tally, file)
