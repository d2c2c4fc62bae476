"""RetailRocket (Kaggle retailrocket/ecommerce-dataset): views, carts and purchases of a web shop."""

from pathlib import Path

import polars as pl

from protofed.data.catalog import UTF8
from protofed.data.interactions import InteractionLog
from protofed.data.reading import Layout, Tally, gather, locate, milliseconds, table
from protofed.progress import Progress, silent

NAMES = ("events.csv",)
EVENTS = ("view", "addtocart", "transaction")
LAYOUT = Layout(
    {"timestamp": pl.Int64, "visitorid": pl.Int64, "event": pl.String, "itemid": pl.Int64, "transactionid": pl.String},
    header=True,
    required=("timestamp", "visitorid", "event", "itemid"),
)


def load(path: Path, progress: Progress = silent, *, encoding: str = UTF8) -> InteractionLog:
    """All three events; the file's milliseconds become seconds."""
    file, tally = locate(path, NAMES, "RetailRocket events"), Tally()

    def shape(frame: pl.DataFrame) -> pl.DataFrame:
        known = tally.drop(frame, pl.col("event").is_in(EVENTS), f"event not one of {', '.join(EVENTS)}")
        known = known.select("event", user="visitorid", item="itemid", time="timestamp")
        return milliseconds(known, file)

    return gather(
        "retailrocket", table(file, LAYOUT, tally, progress, member=NAMES, encoding=encoding), shape, tally, file
    )
