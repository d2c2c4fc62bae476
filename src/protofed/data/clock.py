"""How a column tells the time: whole unix seconds of dates, datetimes and counts since 1970."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import polars as pl

from protofed.data.interactions import END_OF_2100
from protofed.data.reading import EARLIEST_MILLISECONDS
from protofed.errors import DataError

UNITS = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}
DAY = "%Y-%m-%d"
WHOLE = {10: (DAY,), 19: (f"{DAY} %H:%M:%S", f"{DAY}T%H:%M:%S"), 20: (f"{DAY}T%H:%M:%SZ",)}  # by length: the fast ones
COMPACT = (
    r"^(?:19|20)[0-9][0-9](?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])$"  # 20240131; as unix seconds, a day of 1970
)
ISO = (
    r"^([0-9]{4})[-/]([0-9]{2})[-/]([0-9]{2})"
    r"(?:[Tt ]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.,][0-9]+)?)?(?: ?(Z|z|UTC|GMT|[+-][0-9]{2}(?::?[0-9]{2})?))?)?$"
)
NUMBER = r"^[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?$"


@dataclass(frozen=True, slots=True)
class Clock:
    """How a column tells the time, in words, and the unix seconds of its values (null for what is no such time)."""

    words: str
    seconds: Callable[[pl.Series], pl.Series]
    whole: bool = False  # whether the values are whole numbers


def clock_of(sample: pl.Series, where: str, time_format: str | None = None) -> Clock:
    """The clock that reads most of the sample, or an error that shows a value it cannot read."""
    seen = sample.drop_nulls()
    if time_format is None:
        clock = _told(seen, where)
        way_out = "name another column by --time, or its format by --time-format"
    else:
        clock = Clock(f"{time_format!r}{zone_of(time_format)}", partial(formatted, time_format=time_format))
        way_out = "give its format by --time-format, or leave that out for ISO dates and unix times"
    if len(seen) and clock.seconds(seen).null_count() == len(seen):
        raise DataError(
            f"{where}: none of the first times is one of 1970 to 2100, read as {clock.words}, "
            f"found {example(seen)}; {way_out}"
        )
    return clock


def zone_of(time_format: str) -> str:
    """Which zone a format's times are in."""
    return "" if "%z" in time_format or "%#z" in time_format or "%:z" in time_format else ", taken as UTC"


def example(values: pl.Series) -> str:
    """The first value, as it is written."""
    text = repr(values[0]) if isinstance(values[0], str) else str(values[0])
    return text if len(text) <= 60 else f"{text[:60]}…"


def _told(seen: pl.Series, where: str) -> Clock:
    """The clock of values of which none is null."""
    kind = seen.dtype
    if kind == pl.Date:
        return Clock("dates, UTC", day_seconds)
    if isinstance(kind, pl.Datetime):
        return Clock("datetimes" if kind.time_zone else "datetimes without a zone, taken as UTC", day_seconds)
    if kind.is_numeric():
        unit = unit_of(seen.cast(pl.Float64))
        return Clock(f"unix {unit}", partial(counted, unit=unit), whole=kind.is_integer())
    if kind != pl.String:
        raise DataError(f"{where} must hold times, found the type {str(kind).lower()}; name another column by --time")
    return _told_by_text(seen.str.strip_chars(), where)


def _told_by_text(texts: pl.Series, where: str) -> Clock:
    texts = texts.filter(texts != "")
    iso, numbers, compact = (int(texts.str.contains(form).sum()) for form in (ISO, NUMBER, COMPACT))
    if not len(texts):
        raise DataError(f"{where} is empty in the first rows; name another column by --time")
    if 2 * compact > len(texts):
        return Clock("dates such as 20240131, UTC", partial(formatted, time_format="%Y%m%d"))
    if 2 * numbers >= len(texts):
        written = texts.filter(texts.str.contains(NUMBER))
        unit = unit_of(written.cast(pl.Float64, strict=False).drop_nulls())
        return Clock(f"unix {unit}", partial(counted, unit=unit), whole=bool(texts.str.contains(r"^[0-9]+$").all()))
    if 2 * iso >= len(texts):
        return Clock(_iso_words(texts), iso_seconds)
    raise DataError(
        f"{where} must hold ISO dates or unix times, found {example(texts)}; say how it is written by --time-format, "
        "such as --time-format '%d.%m.%Y %H:%M'"
    )


def _iso_words(texts: pl.Series) -> str:
    parts = texts.str.extract_groups(ISO).struct.unnest()
    if parts["4"].null_count() == len(parts):
        return "ISO dates, UTC"
    return "ISO datetimes without a zone, taken as UTC" if parts["7"].null_count() == len(parts) else "ISO datetimes"


def unit_of(numbers: pl.Series) -> str:
    """The unit in which most of the numbers lie between 1973 and 5138; small ones are seconds."""
    middle = float(numbers.filter(numbers.is_finite()).median() or 0)  # type: ignore[arg-type]
    coarse_first = [unit for unit, size in UNITS.items() if abs(middle) < EARLIEST_MILLISECONDS * size]
    return coarse_first[0] if coarse_first else "nanoseconds"


def counted(values: pl.Series, unit: str) -> pl.Series:
    """Unix seconds of numbers in that unit, rounded down; a number that must be of another unit is null."""
    size = UNITS[unit]
    if values.dtype == pl.String:
        values = _numbers(values.str.strip_chars())
    if values.dtype.is_integer():
        seconds = values // size
    else:
        numbers = values.cast(pl.Float64)
        seconds = (numbers / size).floor()
        seconds = seconds.set(~seconds.is_finite(), None)
    least = EARLIEST_MILLISECONDS // 1000 if size > 1 else 0
    return within(seconds.cast(pl.Int64, strict=False), least)


def _numbers(texts: pl.Series) -> pl.Series:
    whole = texts.cast(pl.Int64, strict=False)
    return whole if whole.null_count() == texts.null_count() else texts.cast(pl.Float64, strict=False)


def within(seconds: pl.Series, least: int = 0) -> pl.Series:
    """The seconds, null where they lie before `least` or after the year 2100."""
    low, high = seconds.min(), seconds.max()
    if low is None or (int(low) >= least and int(high) <= END_OF_2100):  # type: ignore[arg-type]
        return seconds
    return seconds.set((seconds < least) | (seconds > END_OF_2100), None)


def day_seconds(times: pl.Series) -> pl.Series:
    """Unix seconds of dates or datetimes."""
    return within(times.dt.epoch("s").cast(pl.Int64))


def formatted(texts: pl.Series, time_format: str) -> pl.Series:
    """Unix seconds of texts in a strptime format; without a zone they are UTC."""
    texts = texts.cast(pl.String).str.strip_chars()
    zone = None if zone_of(time_format) else "UTC"
    try:
        return within(texts.str.to_datetime(time_format, strict=False, time_unit="us", time_zone=zone).dt.epoch("s"))
    except pl.exceptions.PolarsError as unknown:
        raise DataError(f"--time-format {time_format!r} is no format of dates: {unknown}") from unknown


def iso_seconds(texts: pl.Series) -> pl.Series:
    """Unix seconds of ISO 8601 dates and datetimes, rounded down; without a zone they are UTC."""
    seconds = pl.Series(texts.name, [None], pl.Int64).new_from_index(0, len(texts))
    length = texts.drop_nulls().head(1).str.len_bytes()
    for form in WHOLE.get(int(length[0]) if len(length) else 0, ()):
        read = texts.str.to_datetime(form, strict=False, time_unit="us").dt.epoch("s")
        seconds = read if read.null_count() < seconds.null_count() else seconds
    left = seconds.is_null() & texts.is_not_null()
    if left.any():
        seconds = seconds.scatter(left.arg_true(), _any_iso_seconds(texts.filter(left)))
    return within(seconds)


def _any_iso_seconds(texts: pl.Series) -> pl.Series:
    """The same, part by part, for every form there is."""
    part = texts.str.strip_chars().str.extract_groups(ISO).struct.unnest()
    day = (
        pl.concat_str("1", "2", "3", separator="-").str.to_date(DAY, strict=False).cast(pl.Datetime("us")).dt.epoch("s")
    )
    hour, minute, second = (pl.col(name).cast(pl.Int64).fill_null(0) for name in "456")
    clock = pl.when((hour < 24) & (minute < 60) & (second < 60)).then(3600 * hour + 60 * minute + second)
    sign = pl.when(pl.col("7").str.starts_with("-")).then(-1).otherwise(1)
    ahead, behind = (
        pl.col("7").str.extract(r"^[+-]([0-9]{2}):?([0-9]{2})?$", group).cast(pl.Int64).fill_null(0) for group in (1, 2)
    )
    return part.select(day + clock - sign * (3600 * ahead + 60 * behind)).to_series()
