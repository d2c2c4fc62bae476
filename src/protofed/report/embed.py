"""Tables and figures as the JSON that the page holds once and draws from."""

import json
import math
from collections.abc import Sequence
from typing import Any

from protofed.report.layout import MISSING, Cell, Drawing, Line, Table

DIGITS = 5  # significant ones of a figure's numbers
MARKS = {(True, False): "trivial", (False, True): "marked"}


def to_json(value: Any) -> str:
    """JSON that may stand inside a <script> element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def table_values(table: Table) -> dict[str, Any]:
    """All that the page needs to show a table, sort it and hand out its CSV."""
    found = {
        "caption": table.caption,
        "corner": table.corner,
        "columns": [[c.label, c.group, c.hint, c.text, c.lower_is_better, c.ranked] for c in table.columns],
        "lines": [_line(line) for line in table.lines],
    }
    return found | ({"footer": [_line(line) for line in table.footer]} if table.footer else {})


def figure_values(drawing: Drawing) -> dict[str, Any]:
    """A figure's kind, words and columns; words that repeat are numbered."""
    columns = list(zip(*drawing.rows, strict=True)) or [()] * len(drawing.header)
    return {
        "kind": drawing.kind,
        "caption": drawing.caption,
        "axes": [drawing.x, drawing.y, drawing.from_zero],
        "header": list(drawing.header),
        "columns": [_column(column) for column in columns],
    }


def _column(values: Sequence[Any]) -> Any:
    if values and all(isinstance(value, str) for value in values):
        words = list(dict.fromkeys(values))
        places = {word: place for place, word in enumerate(words)}
        return {"words": words, "at": [places[value] for value in values]}
    return [_number(float(value)) for value in values]


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() else short


def _line(line: Line) -> list[Any]:
    return [line.label, MARKS.get((line.trivial, line.marked), ""), *map(_cell, line.cells)]


def _cell(cell: Cell) -> Any:
    """A word alone, or text, spread, interval, whether it is best, and its value where the text is no number."""
    told = _reads_as_number(cell.text) or math.isnan(cell.value)
    value = None if told else "inf" if cell.value == math.inf else _number(cell.value)
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
