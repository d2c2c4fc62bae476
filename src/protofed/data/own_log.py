"""A log of one's own, in whatever table it comes, to one InteractionLog."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import polars as pl

from protofed.data.catalog import UTF8
from protofed.data.clock import Clock, clock_of
from protofed.data.columns import choose, shown
from protofed.data.interactions import InteractionLog
from protofed.data.reading import EXTRA, NOT_IN_IDS, Tally, gather
from protofed.data.tables import JsonLines, Table, open_table
from protofed.errors import ConfigError, DataError
from protofed.progress import Progress, silent

WHOLE = r"^(?:0|-?[1-9][0-9]{0,18})$"  # as an integer is written, so that 007 stays a text
WHOLE_FLOAT = r"\.0+$"
MALFORMED_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user says about the columns: a name, an empty name for none, or None to have it guessed."""

    user: str | None = None
    item: str | None = None
    time: str | None = None
    rating: str | None = None
    event: str | None = None
    time_format: str | None = None

    def columns(self) -> dict[str, str | None]:
        """The column of each role."""
        return {
            "user": self.user, "item": self.item, "time": self.time, "rating": self.rating, "event": self.event
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class OwnLog:
    """A log that was read, from which columns, and what became of the rows."""

    log: InteractionLog
    columns: Mapping[str, str]
    time: str  # how the times were read
    remarks: tuple[str, ...]
    read: int
    malformed: int
    first_malformed: int  # the row, from 1; 0 where there is none
    example: str


@dataclass(frozen=True, slots=True)
class Plan:
    """How the columns of a table become those of a log."""

    columns: Mapping[str, str]
    clock: Clock
    floats: frozenset[str]  # identifiers written as 12.0
    nested: bool  # whether a text may hold a nested value of JSON


def read_log(
    name: str,
    path: Path,
    asked: Asked = Asked(),  # noqa: B008 (frozen)
    progress: Progress = silent,
    *,
    encoding: str = UTF8,
    header: bool = True,
    malformed_share: float = MALFORMED_SHARE,
) -> OwnLog:
    """All well-formed rows of the table as a log; duplicates stay."""
    if not 0 <= malformed_share <= 1:
        raise ConfigError(f"--malformed must be a share from 0 to 1, got {malformed_share:g}; 0.01 is the default")
    table = open_table(path, encoding=encoding, header=header)
    columns, remarks = choose(asked.columns(), table.columns, path)
    plan, whole = plan_of(table, columns, asked.time_format)
    tally = Tally(share=malformed_share, advice="repair the file, or allow more by --malformed SHARE", logs=False)
    frames = table.frames(tuple(columns.values()), whole, progress)
    log = gather(name, frames, partial(shape, plan=plan, tally=tally), tally, path)
    if plan.floats:
        written = " and ".join(sorted(plan.floats))
        remarks.append(f"each {written} written as 12.0 is read as 12")
    return OwnLog(
        log, columns, plan.clock.words, tuple(remarks), tally.rows, tally.malformed, tally.first_malformed,
        tally.example,
    )  # fmt: skip


def plan_of(table: Table, columns: Mapping[str, str], time_format: str | None) -> tuple[Plan, frozenset[str]]:
    """How to read the columns, told by the first rows, and which are likely to hold integers alone."""
    sample = table.sample(tuple(columns.values()))
    if not len(sample):
        raise DataError(f"{table.path}: a log needs at least one row, found none below the header")
    clock = clock_of(sample[columns["time"]], f"{table.path}: {shown(columns['time'])}", time_format)
    floats = frozenset(role for role in ("user", "item") if written_as_floats(sample[columns[role]]))
    whole = {columns[role] for role in ("user", "item") if _all_whole(sample[columns[role]])}
    whole |= {columns["time"]} if clock.whole else set()
    return Plan(columns, clock, floats, isinstance(table, JsonLines)), frozenset(whole)


def written_as_floats(values: pl.Series) -> bool:
    """Whether all values are numbers, and some of them written as 12.0."""
    if values.dtype != pl.String:
        return False
    texts = values.drop_nulls().str.strip_chars()
    texts = texts.filter(texts != "")
    whole = texts.str.replace(WHOLE_FLOAT, "")
    return bool((texts != whole).any()) and bool(whole.str.contains(WHOLE).all())


def _all_whole(values: pl.Series) -> bool:
    texts = values.drop_nulls()
    return values.dtype == pl.String and len(texts) > 0 and bool(texts.str.contains(WHOLE).all())


def shape(frame: pl.DataFrame, plan: Plan, tally: Tally) -> pl.DataFrame:
    """The well-formed rows as columns user, item, time (and rating, event); the others are counted."""
    tally.rows += len(frame)
    columns = plan.columns
    shaped = {
        "user": identifiers(frame[columns["user"]], "user" in plan.floats, plan.nested),
        "item": identifiers(frame[columns["item"]], "item" in plan.floats, plan.nested),
        "time": plan.clock.seconds(frame[columns["time"]]),
    }
    bad = {role: values.is_null() for role, values in shaped.items() if values.null_count()}
    if "rating" in columns:
        shaped["rating"] = ratings(frame[columns["rating"]])
        odd = ~shaped["rating"].is_finite() & shaped["rating"].is_not_null()
        bad |= {"rating": odd} if odd.any() else {}
    if "event" in columns:
        shaped["event"] = events(frame[columns["event"]])
    if EXTRA in frame.columns and frame[EXTRA].null_count() < len(frame):
        bad = {EXTRA: frame[EXTRA].is_not_null()} | bad
    good = pl.DataFrame({role: values.alias(role) for role, values in shaped.items()})
    return _without(good, bad, frame, plan, tally) if bad else good


def _without(
    shaped: pl.DataFrame, bad: Mapping[str, pl.Series], frame: pl.DataFrame, plan: Plan, tally: Tally
) -> pl.DataFrame:
    """The rows where nothing is bad; the others are counted, and the first is told."""
    mask = pl.DataFrame(list(bad.values())).select(pl.any_horizontal(pl.all())).to_series() if bad else None
    assert mask is not None
    if not tally.malformed:
        place = int(mask.arg_max() or 0)
        tally.first_malformed = tally.rows - len(frame) + place + 1
        tally.example = _what_is_bad(next(role for role in bad if bad[role][place]), frame, place, plan)
    tally.malformed += int(mask.sum())
    return shaped.filter(~mask)


def _what_is_bad(role: str, frame: pl.DataFrame, place: int, plan: Plan) -> str:
    if role == EXTRA:
        return f"{str(frame[EXTRA][place])[:60]!r} beyond the last column"
    column = plan.columns[role]
    value = frame[column][place]
    if value is None or value == "":
        return f"nothing in {shown(column)}"
    rule = f", read as {plan.clock.words}" if role == "time" else ""
    return f"{shown(column)} is {str(value)[:60]!r}{rule}"


def identifiers(values: pl.Series, floats: bool = False, nested: bool = False) -> pl.Series:
    """Integers where every value is one, else texts; null for what identifies nothing."""
    if values.dtype.is_integer():
        narrow = values.cast(pl.Int64, strict=False)
        return narrow if narrow.null_count() == values.null_count() else values.cast(pl.String)
    if values.dtype.is_float():
        whole = values.is_finite() & (values == values.floor()) & (values.abs() < 2**63)
        return values.set(~whole.fill_null(False), None).cast(pl.Int64)
    if values.dtype != pl.String:
        raise DataError(f"{values.name}: identifiers are numbers or texts, found the type {values.dtype}; convert them")
    texts = values.str.strip_chars()
    if floats:
        texts = texts.str.replace(WHOLE_FLOAT, "")
    unusable = (texts == "") | texts.str.contains_any(NOT_IN_IDS)
    if nested:
        unusable |= texts.str.starts_with("{") | texts.str.starts_with("[")
    texts = texts.set(unusable.fill_null(False), None)
    if texts.str.contains(WHOLE).all():
        whole = texts.cast(pl.Int64, strict=False)
        return whole if whole.null_count() == texts.null_count() else texts
    return texts


def ratings(values: pl.Series) -> pl.Series:
    """Numbers, null where there is none; what is no number is not finite."""
    if values.dtype != pl.String:
        return values.cast(pl.Float32, strict=False).fill_nan(None)
    texts = values.str.strip_chars()
    numbers = texts.cast(pl.Float32, strict=False)
    return numbers.set((numbers.is_null() & (texts != "")).fill_null(False), float("nan"))


def events(values: pl.Series) -> pl.Series:
    """Names of events; empty where there is none."""
    return values.cast(pl.String).str.strip_chars().fill_null("")
