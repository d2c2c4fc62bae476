"""Vectors from columns of an item table: places, and categories as one number for each."""

import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from protofed.errors import DataError
from protofed.features.content import PLACE, Modality, modality

MOST_CATEGORIES = 1_000  # the most frequent are kept
BETWEEN = re.compile(r"\s*[|;,>]\s*")  # how tables write several categories in one cell
NONE = ("", "(no genres listed)")


def place(items: pa.Table) -> Modality:
    """Latitude and longitude in degrees."""
    for column in ("lat", "lon"):
        need(items, column, "place")
    degrees = np.stack([items[column].to_numpy().astype(np.float64) for column in ("lat", "lon")], axis=1)
    vectors = torch.from_numpy(degrees)
    return modality(PLACE, vectors.nan_to_num(), vectors.isfinite().all(-1))


def category(items: pa.Table) -> Modality:
    """A one for each category of an item, over the square root of how many it has; what one item alone has is left out.

    A cell may name several, with bars, commas, semicolons or > between them.
    """
    need(items, "category", "category")
    named = [categories_of(text) for text in items["category"].to_pylist()]
    counts = Counter(name for names in named for name in names)
    kept = [name for name, n in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])) if n > 1]
    column = {name: place for place, name in enumerate(kept[:MOST_CATEGORIES])}
    if not column:
        raise DataError("no two items share a category; leave the feature `category` out")
    vectors = torch.zeros(len(named), len(column))
    for item, names in enumerate(named):
        vectors[item, [column[name] for name in names if name in column]] = 1.0
    length = vectors.norm(dim=-1, keepdim=True)
    return modality("category", vectors / length.clamp(min=1), length[:, 0] > 0)


def categories_of(text: str | None) -> tuple[str, ...]:
    """The distinct categories in a cell."""
    found = dict.fromkeys(name for name in BETWEEN.split((text or "").strip()) if name not in NONE)
    return tuple(found)


def texts(items: pa.Table) -> list[str]:
    """What an item is called, of which category, and what is written of it, in one text; empty where nothing is."""
    columns = [name for name in ("title", "category", "text") if name in items.column_names]
    if not columns:
        need(items, "title", "text")
    cells = zip(*(items[name].to_pylist() for name in columns), strict=True)
    return [". ".join(cell.replace("|", ", ") for cell in row if cell) for row in cells]


def need(items: pa.Table, column: str, feature: str) -> None:
    """Refuse a feature that the item table has no column for."""
    if column not in items.column_names:
        known = ", ".join(name for name in items.column_names if name != "item") or "nothing but their ids"
        raise DataError(
            f"the feature `{feature}` needs the column {column} in the item table, which has {known}; "
            f"leave it out, or import the table with it"
        )


def aligned(items: pa.Table | None, item_ids: pa.Array) -> pa.Table:
    """The items of these identifiers in their order, each with what the table says of it; null where it says nothing.

    Filters and slices keep identifiers, so a table travels with its log however the log is cut.
    """
    table = pa.table({"item": item_ids})
    if items is None:
        return table
    known = items["item"].combine_chunks()
    rows = pc.index_in(item_ids.cast(pa.string()), value_set=known.cast(pa.string()))
    for name in items.column_names:
        if name != "item":
            table = table.append_column(name, items[name].combine_chunks().take(rows))
    return table
