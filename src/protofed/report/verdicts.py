"""The first table where there are several data sets: who is best on each, and where ProtoFed-SP stands."""

import math
from collections.abc import Sequence

from protofed.report.layout import Cell, Column, Line, Table, number, some, to_csv
from protofed.report.opening import best_private, known_mean, rivals_of_the_best, rows_to_compare
from protofed.report.tables import Results

NONE = "none"

COLUMNS = (
    Column("best row", "", "mean of A[t, t], sampled candidates, all events, NDCG@10", ranked=False, text=True),
    Column("level with it", "", "95 % interval of the difference over users holds 0", ranked=False, text=True),
    Column("best trivial row", ranked=False, text=True),
    Column("ProtoFed-SP", "", "its best row, the place among all rows, how far from the best", ranked=False, text=True),
    Column("best private row", ranked=False, text=True),
)


def verdicts(results: Sequence[Results]) -> Table:
    """A line for each data set; NDCG@10, sampled candidates, all events."""
    lines = [(found.section.title, verdict(found)) for found in results]
    tidy = [(title, *words) for title, words in lines]
    return Table(
        "verdicts",
        "NDCG@10, sampled candidates, all events; ε of each private row with its rounds and noise: Privacy, below",
        COLUMNS,
        tuple(Line(title, tuple(Cell(word) for word in words)) for title, words in lines),
        csv=to_csv(["data set", *(column.label for column in COLUMNS)], tidy),
        corner="data set",
    )


def verdict(found: Results) -> tuple[str, ...]:
    """The words of a data set's line, one for each column."""
    rows = sorted(rows_to_compare(found), key=lambda row: (-known_mean(found, row), row.label))
    rows = [row for row in rows if math.isfinite(known_mean(found, row))]
    values = {row.label: known_mean(found, row) for row in rows}
    trivial = [row.label for row in rows if row.is_trivial]
    ours = [row.label for row in rows if row.is_ours]
    return (
        _with_value(values, [row.label for row in rows]),
        some([label for label, level in rivals_of_the_best(found).items() if level]) or NONE,
        _with_value(values, trivial),
        _standing(values, ours[0]) if ours else NONE,
        best_private(found),
    )


def _with_value(values: dict[str, float], labels: Sequence[str]) -> str:
    return f"{labels[0]}, {number(values[labels[0]])}" if labels else NONE


def _standing(values: dict[str, float], label: str) -> str:
    """`protofed-sp (nodp), 0.221, place 17 of 30, 0.074 behind`."""
    place = 1 + sum(value > values[label] for value in values.values())
    gap = max(values.values()) - values[label]
    behind = f", {number(gap)} behind" if place > 1 else ""
    return f"{label}, {number(values[label])}, place {place} of {len(values)}{behind}"
