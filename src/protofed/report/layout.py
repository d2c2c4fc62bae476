"""Tables and figures as values, as the JSON that the page draws from, and as CSV."""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from protofed.files import harmless

MISSING = "–"
MOST_NAMED = 8  # rows in one sentence
DIGITS = 5  # significant ones of a figure's numbers
MARKS = {(True, False): "trivial", (False, True): "marked"}
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
    """What a cell shows, by default that nothing is known, and what it sorts by; two of its parts are set smaller."""

    text: str = MISSING
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


def cells_of(columns: Sequence[Column], values: Sequence[float | str]) -> tuple[Cell, ...]:
    """The cells of a row: numbers as their columns show them, words as they are."""
    return tuple(
        Cell(value) if isinstance(value, str) else Cell(column.show(value), value=value)
        for column, value in zip(columns, values, strict=True)
    )


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


def estimate_cell(e: Estimate, digits: int = 3) -> Cell:
    """A mean with its spread and its interval."""
    spread = f"±{_short(e.std, digits)}" if math.isfinite(e.std) else ""
    return Cell(number(e.mean, digits), spread, interval(e.low, e.high, digits), value=e.mean)


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


def to_json(value: Any) -> str:
    """JSON that may stand inside a <script> element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def table_values(table: Table) -> dict[str, Any]:
    """All that the page needs to show a table, sort it and hand out its CSV."""
    lines, footer = (
        [[line.label, MARKS.get((line.trivial, line.marked), ""), *map(_json_cell, line.cells)] for line in lines]
        for lines in (table.lines, table.footer)
    )
    columns = [[c.label, c.group, c.hint, c.text, c.lower_is_better, c.ranked] for c in table.columns]
    found = {"caption": table.caption, "corner": table.corner, "columns": columns, "lines": lines}
    return found | ({"footer": footer} if footer else {})


def figure_values(drawing: Drawing) -> dict[str, Any]:
    """A figure's kind, words and columns; words that repeat are numbered."""
    columns = list(zip(*drawing.rows, strict=True)) or [()] * len(drawing.header)
    axes = [drawing.x, drawing.y, drawing.from_zero]
    words = {"kind": drawing.kind, "caption": drawing.caption, "axes": axes, "header": list(drawing.header)}
    return words | {"columns": [_json_column(column) for column in columns]}


def _json_column(values: Sequence[Any]) -> Any:
    if values and all(isinstance(value, str) for value in values):
        words = list(dict.fromkeys(values))
        return {"words": words, "at": [words.index(value) for value in values]}
    return [_json_number(float(value)) for value in values]


def _json_number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() else short


def _json_cell(cell: Cell) -> Any:
    """A word alone, or text, spread, interval, whether it is best, and its value where the text is no number."""
    told = _reads_as_number(cell.text) or math.isnan(cell.value)
    value = None if told else "inf" if cell.value == math.inf else _json_number(cell.value)
    parts = [cell.text, cell.spread or None, cell.interval or None, 1 if cell.best else None, value]
    while parts[1:] and parts[-1] is None:
        parts.pop()
    return parts if parts[1:] else cell.text


def _reads_as_number(text: str) -> bool:
    try:
        float(text.replace("\N{MINUS SIGN}", "-").replace(",", ""))
    except ValueError:
        return text == MISSING
    return True


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
