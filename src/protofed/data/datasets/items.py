"""The item tables that come with official data sets: articles, movies and businesses beside the log, places in it."""

from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pyarrow as pa

from protofed.data.catalog import UTF8
from protofed.data.datasets import gowalla
from protofed.data.items import RANGES, Items, as_arrow, placed, read_items
from protofed.data.reading import PACKED, Tally, locate, table
from protofed.progress import Progress, silent


@dataclass(frozen=True, slots=True)
class Beside:
    """Where a data set's item table lies, and what it calls its items."""

    names: tuple[str, ...]
    column: str
    texts: bool
    digits: int = 0  # identifiers are padded with zeros to so many


BESIDE = {
    "hm": Beside(("articles.csv",), "article_id", texts=True, digits=10),
    "movielens-20m": Beside(("movies.csv", "movie.csv"), "movieId", texts=False),
    "yelp": Beside(("yelp_academic_dataset_business.json", "business.json"), "business_id", texts=True),
}


def official_items(
    dataset: str, source: Path, progress: Progress = silent, *, encoding: str = UTF8
) -> tuple[Items, Path] | None:
    """A data set's item table and the file it comes from, looked for beside the log; None where there is none."""
    if dataset == "gowalla":
        file = locate(source, gowalla.NAMES, "Gowalla check-ins")
        return gowalla_places(file, progress, encoding=encoding), file
    known = BESIDE.get(dataset)
    folder = source if source.is_dir() else source.parent
    files = [folder / f"{name}{end}" for name in known.names for end in PACKED] if known is not None else []
    file_ = next((file for file in files if file.is_file()), None)
    if known is None or file_ is None:
        return None
    items = read_items(file_, log_column=known.column, texts=known.texts, encoding=encoding)
    return (_padded(items, known.digits) if known.digits else items), file_


def _padded(items: Items, digits: int) -> Items:
    """Identifiers with the leading zeros that copies from spreadsheets lose."""
    column = pa.array([str(item).zfill(digits) for item in items.table["item"].to_pylist()], pa.large_string())
    rest = items.table.drop_columns(["item"])
    whole = pa.table({"item": column, **{name: rest[name] for name in rest.column_names}})
    return Items(whole, items.columns, items.dropped, items.rows, items.malformed, items.duplicates, items.misplaced)


def gowalla_places(file: Path, progress: Progress = silent, *, encoding: str = UTF8) -> Items:
    """Latitude and longitude of every location, as its first check-in in the file has them."""
    seen: pl.DataFrame | None = None
    rows = 0
    for frame in table(file, gowalla.LAYOUT, Tally(), progress, member=gowalla.NAMES, encoding=encoding):
        rows += len(frame)
        spots = frame.select(
            "item",
            lat=pl.col("latitude").cast(pl.Float64, strict=False),
            lon=pl.col("longitude").cast(pl.Float64, strict=False),
        ).drop_nulls("item")
        known = spots if seen is None else pl.concat([seen, spots])
        seen = known.unique("item", keep="first", maintain_order=True)
    assert seen is not None
    whole, misplaced = placed(seen)
    columns = {"item": "item", **{role: role for role in RANGES}}
    return Items(as_arrow(whole), columns, (), rows, malformed=0, duplicates=0, misplaced=misplaced)
