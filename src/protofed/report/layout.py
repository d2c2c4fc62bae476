"""Tables as values: what the page draws, what a browser sorts and what the CSV links hold."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from protofed.files import harmless

MISSING = "–"
MOST_NAMED = 8  # rows in one sentence
Kind = Literal["lines", "dots", "points", "users", "map"]


def number(value: float, digits: int = 3) -> str:
    """A number with a true minus sign, or a dash where there is none."""
    if not math.isfinite(value):
        return MISSING
    text = f"{value:.{digits}f}"
    return (text[1:] if float(text) == 0 and text.startswith("-") else text).replace("-", "\N{MINUS SIGN}")


def interval(low: float, high: float, digits: int = 3) -> str:
    """[low, high], or nothing where there is none."""
    return f"[{_short(low, digits)}, {_short(high, digits)}]" if math.isfinite(low) and math.isfinite(high) else ""


def _short(value: float, digits: int) -> str:
    """A number without the zero before its point, so that a table of twelve columns fits a page."""
    return number(value, digits).replace("0.", ".", 1) if abs(value) < 1 else number(value, digits)


def known(value: float, instead: float) -> float:
    """The value, or another one where it is no number."""
    return value if math.isfinite(value) else instead


def mean_of(values: Iterable[float]) -> float:
    """The mean of what is known; NaN where nothing is."""
    found = [value for value in values if math.isfinite(value)]
    return float(np.mean(found)) if found else math.nan


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, its standard deviation over seeds, and a confidence interval over users; NaN where unknown."""

    mean: float
    std: float = math.nan
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True, slots=True)
class Drawing:
    """One figure: how it is drawn, and the tidy numbers that it is drawn from."""

    name: str
    caption: str
    kind: Kind
    header: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    x: str = ""  # what the axes say
    y: str = ""
    from_zero: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, the heading above it, and what a reader learns by pointing at it."""

    label: str
    group: str = ""
    hint: str = ""
    lower_is_better: bool = False
    ranked: bool = True  # has a best value
    text: bool = False  # holds words
    show: Callable[[float], str] = number


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell shows and what it sorts by; `spread` and `interval` are set smaller."""

    text: str
    spread: str = ""
    interval: str = ""
    value: float = math.nan
    best: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a table."""

    label: str
    cells: tuple[Cell, ...]
    trivial: bool = False
    marked: bool = False  # drawn between two lines, for the row a table is about


@dataclass(frozen=True, slots=True)
class Table:
    """A table of numbers with a heading column."""

    name: str  # for ids and file names
    caption: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    footer: tuple[Line, ...] = ()
    corner: str = "method"


@dataclass(frozen=True, slots=True)
class Part:
    """One question and what the runs answer: tables and figures."""

    name: str
    title: str
    note: str
    tables: tuple[Table, ...] = ()
    drawings: tuple[Drawing, ...] = ()


@dataclass(frozen=True, slots=True)
class Missing:
    """A part that the runs cannot fill, and why in one line."""

    title: str
    why: str


def cells_of(columns: Sequence[Column], values: Sequence[float | str]) -> tuple[Cell, ...]:
    """The cells of a row: numbers as their columns show them, words as they are."""
    return tuple(
        Cell(value) if isinstance(value, str) else Cell(column.show(value), value=value)
        for column, value in zip(columns, values, strict=True)
    )


def table_of_estimates(
    name: str,
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[tuple[str, bool, Sequence[Estimate]]],
    footer: tuple[Line, ...] = (),
) -> Table:
    """Rows of (label, is it trivial, estimates), the best first by the first column, the best of each column marked."""
    rows = sorted(rows, key=lambda row: (-known(row[2][0].mean, -math.inf), row[0]))
    by_column = [[row[2][place] for row in rows] for place in range(len(columns))]
    cells = [estimate_cells(column, estimates) for column, estimates in zip(columns, by_column, strict=True)]
    lines = tuple(
        Line(label, tuple(column[place] for column in cells), trivial) for place, (label, trivial, _) in enumerate(rows)
    )
    return Table(name, caption, tuple(columns), lines, footer)


def estimate_cell(estimate: Estimate, digits: int = 3) -> Cell:
    """A mean with its spread and its interval."""
    spread = f"±{_short(estimate.std, digits)}" if math.isfinite(estimate.std) else ""
    around = interval(estimate.low, estimate.high, digits)
    return Cell(number(estimate.mean, digits), spread, around, value=estimate.mean)


def some(names: Sequence[str]) -> str:
    """All of them, or the first and how many more there are."""
    if len(names) <= MOST_NAMED:
        return ", ".join(names)
    return f"{', '.join(names[: MOST_NAMED - 1])} and {len(names) - MOST_NAMED + 1} more"


def beside(table: Table, columns: Sequence[Column], cells: Mapping[str, Sequence[Cell]]) -> Table:
    """The table with more columns at its right, their cells by the label of the row."""
    lines = tuple(replace(line, cells=(*line.cells, *cells[line.label])) for line in table.lines)
    footer = tuple(replace(line, cells=(*line.cells, *[Cell("")] * len(columns))) for line in table.footer)
    return replace(table, columns=(*table.columns, *columns), lines=lines, footer=footer)


def estimate_cells(column: Column, estimates: Sequence[Estimate]) -> list[Cell]:
    """A column's cells: three decimals, or four where all values are small; what reads as zero is never the best."""
    sizes = [abs(estimate.mean) for estimate in estimates if math.isfinite(estimate.mean)]
    digits = 3 if not sizes or max(sizes) >= 0.1 else 4
    cells = [estimate_cell(estimate, digits) for estimate in estimates]
    if not column.ranked or len(sizes) < 2:
        return cells
    sign = -1 if column.lower_is_better else 1
    top = max(round(sign * cell.value, digits) for cell in cells if math.isfinite(cell.value))
    return [replace(cell, best=bool(top) and round(sign * cell.value, digits) == top) for cell in cells]


def to_csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Comma-separated text; unknown numbers are empty fields, and no text is one that a spreadsheet runs."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([_field(name) for name in header])
    writer.writerows([_field(value) for value in row] for row in rows)
    return buffer.getvalue()


def _field(value: object) -> object:
    if isinstance(value, str):
        return harmless(value)
    if not isinstance(value, float):
        return value
    return f"{value:.6g}" if math.isfinite(value) else ""
