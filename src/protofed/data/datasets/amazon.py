"""Amazon reviews (McAuley Lab, UCSD): Books, Electronics or any other category, editions 2014, 2018 and 2023."""

import json
from pathlib import Path

import polars as pl

from protofed.data.catalog import UTF8
from protofed.data.filters import deduplicate
from protofed.data.interactions import InteractionLog
from protofed.data.reading import Layout, Tally, gather, head, json_lines, locate, milliseconds, table
from protofed.errors import DataError
from protofed.progress import Progress, silent

HEADER_2023 = "user_id,parent_asin,"
FILES = ("ratings_{0}.csv", "{0}.csv", "reviews_{0}_5.json", "{0}_5.json", "reviews_{0}.json", "{0}.json", "{0}.jsonl")
NUMBERS = {"rating": pl.Float32, "time": pl.Int64}
WANTED = ("user", "item", "rating", "time")
LAYOUTS = {
    2014: Layout({"user": pl.String, "item": pl.String, **NUMBERS}, header=False, numeric="time"),
    2018: Layout({"item": pl.String, "user": pl.String, **NUMBERS}, header=False, numeric="time"),
    2023: Layout(
        {"user_id": pl.String, "parent_asin": pl.String, "rating": pl.Float32, "timestamp": pl.Int64}, header=True
    ),
}
REVIEWS = {"reviewerID": pl.String, "asin": pl.String, "overall": pl.Float32, "unixReviewTime": pl.Int64}
RENAMED = dict(zip([*REVIEWS, *LAYOUTS[2023].columns], WANTED * 2, strict=True))


def load_books(path: Path, progress: Progress = silent, *, encoding: str = UTF8) -> InteractionLog:
    """The ratings of Amazon-Books."""
    return load(path, progress, category="Books", encoding=encoding)


def load_electronics(path: Path, progress: Progress = silent, *, encoding: str = UTF8) -> InteractionLog:
    """The ratings of Amazon-Electronics."""
    return load(path, progress, category="Electronics", encoding=encoding)


def load(path: Path, progress: Progress = silent, *, category: str = "Books", encoding: str = UTF8) -> InteractionLog:
    """The ratings of one category, exact duplicates dropped; the edition is told by the file itself."""
    names = [name.format(category) for name in FILES]
    file, tally = locate(path, names, f"Amazon ratings of {category}"), Tally()
    edition = edition_of(file, head(file, names, encoding))
    if file.name.removesuffix(".gz").endswith((".json", ".jsonl")):
        schema = LAYOUTS[2023].columns if edition == 2023 else REVIEWS
        frames = json_lines(file, schema, tally, progress, encoding=encoding)
    else:
        frames = table(file, LAYOUTS[edition], tally, progress, member=names, encoding=encoding)

    def shape(frame: pl.DataFrame) -> pl.DataFrame:
        frame = frame.rename(RENAMED, strict=False).select(WANTED)
        return milliseconds(frame, file) if edition == 2023 else frame

    return deduplicate(gather(f"amazon-{category.lower()}", frames, shape, tally, file))


def edition_of(file: Path, lines: list[str]) -> int:
    """2014, 2018 or 2023; without a header, the column of identifiers that begin with A is the user's."""
    if lines[0].lstrip().startswith("{"):
        return 2023 if "parent_asin" in _first_object(file, lines[0]) else 2014
    if lines[0].replace('"', "").startswith(HEADER_2023):
        return 2023
    rows = [line.split(",") for line in lines[:1000]]
    if len(rows[0]) >= 4 and rows[0][3].isdigit() and len(rows[0][3]) == 13:
        raise DataError(
            f"{file}: timestamps without a header must be unix seconds, found the milliseconds {rows[0][3]}; "
            f"if it is a 2023 file put its header {HEADER_2023 + 'rating,timestamp'!r} back, else divide them by 1000"
        )
    like_users = [sum(row[place].startswith("A") for row in rows if len(row) > place) for place in (0, 1)]
    if like_users[0] == like_users[1] and any(len(row) >= 2 for row in rows) and rows[0][-1].strip().isdigit():
        raise DataError(
            f"{file}: user identifiers begin with A in the first column (2014) or the second (2018), "
            f"found {like_users[0]} of {len(rows)} rows in both; get the official file"
        )
    return 2018 if like_users[1] > like_users[0] else 2014


def _first_object(file: Path, line: str) -> dict[str, object]:
    try:
        return dict(json.loads(line))
    except (ValueError, RecursionError) as broken:
        raise DataError(f"{file}: one JSON object per line belongs here, found {line[:80]!r}") from broken
