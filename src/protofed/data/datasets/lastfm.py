"""LastFM-1K (Oscar Celma, by permission of Last.fm): every track 992 people listened to."""

from pathlib import Path

import polars as pl

from protofed.data.catalog import UTF8
from protofed.data.interactions import InteractionLog
from protofed.data.reading import Layout, Tally, gather, locate, table, utc_seconds
from protofed.progress import Progress, silent

NAMES = ("userid-timestamp-artid-artname-traid-traname.tsv",)
LAYOUT = Layout(
    {"user": pl.String, "time": pl.String} | dict.fromkeys(("artist_id", "artist", "track_id", "track"), pl.String),
    header=False,
    separator="\t",
    numeric="time",
    required=("user", "time"),
)


def load(path: Path, progress: Progress = silent, *, encoding: str = UTF8) -> InteractionLog:
    """All listens; the item is the track's MusicBrainz id, or `artist<TAB>track` where it has none."""
    file, tally = locate(path, NAMES, "LastFM-1K listens"), Tally()
    named = pl.concat_str(pl.col("artist").fill_null(""), pl.col("track"), separator="\t")  # no field holds a tab

    def shape(frame: pl.DataFrame) -> pl.DataFrame:
        return tally.malform(frame.select("user", item=pl.coalesce("track_id", named), time=utc_seconds("time")))

    return gather(
        "lastfm-1k", table(file, LAYOUT, tally, progress, member=NAMES, encoding=encoding), shape, tally, file
    )
