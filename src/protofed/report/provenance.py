"""Where the numbers come from: releases, environments, commands and configs."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from protofed.config import flatten
from protofed.privacy.ledger import SHARE, claim
from protofed.report.layout import Cell, Column, Line, Table
from protofed.report.runs import Run
from protofed.report.sections import Row, Section, flat_settings

DELTA = 1e-5  # the config's default


def claim_of(runs: Iterable[Run]) -> str:
    """The claim of all runs that released something, with their δ and, where they all know it, their logs' shares."""
    private = [run for run in runs if run.releases]
    deltas = {float(run.config.get("privacy", {}).get("delta", DELTA)) for run in private}
    shares = [run.environment.get(SHARE) for run in private]
    return claim(deltas or {DELTA}, [share for share in shares if share is not None] if None not in shares else ())


def environments(sections: Sequence[Section]) -> tuple[tuple[str, str], ...]:
    """Each fact of the environments and its values; where runs differ, how many have each."""
    runs = [run for _, _, run in _all(sections)]
    told = [flatten({key: value for key, value in run.environment.items() if key != "command"}) for run in runs]
    facts = [{key: _text(value) for key, value in fact.items() if value != {}} for fact in told]
    keys = sorted({key for fact in facts for key in fact})
    return tuple((key, _values([fact[key] for fact in facts if key in fact], len(runs))) for key in keys)


def widths(sections: Sequence[Section]) -> tuple[int, ...]:
    """Every width d that a run's backbone has."""
    told = (run.config.get("backbone", {}).get("width") for _, _, run in _all(sections))
    return tuple(sorted({width for width in told if width is not None}))


def commands(sections: Sequence[Section]) -> tuple[str, ...]:
    """The commands that runs kept, one for all that differ in their seed and their folder alone."""
    found = [run.environment.get("command") for _, _, run in _all(sections)]
    lines = [
        shlex.join(map(str, command)) if isinstance(command, list) else str(command) for command in found if command
    ]
    return tuple(dict.fromkeys(re.sub(r" --(seed|out)[ =]\S+", "", line) for line in lines))


def usual_settings(sections: Sequence[Section]) -> dict[str, Any]:
    """The value of each setting that most rows of the page have, by dotted names."""
    own = [flat_settings(row.runs[0]) for section in sections for row in section.rows]
    keys = dict.fromkeys(key for settings in own for key in settings)
    counts = {key: Counter(_text(settings.get(key)) for settings in own).most_common(1)[0][0] for key in keys}
    return {key: value for key, value in counts.items() if value != "null"}


def settings_table(sections: Sequence[Section]) -> Table:
    """What each row has otherwise than most, and its seeds."""
    usual = usual_settings(sections)
    columns = (Column("seeds", ranked=False, text=True), Column("settings", ranked=False, text=True))
    lines = tuple(
        Line(
            f"{section.title}: {row.label}",
            (Cell(" ".join(map(str, row.seeds))), Cell(_differing(flat_settings(row.runs[0]), usual))),
        )
        for section in sections
        for row in section.rows
    )
    return Table("settings", "What a row has otherwise", columns, lines)


def _differing(own: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    texts = {key: _text(own.get(key)) for key in {**usual, **own}}
    return ", ".join(f"{key} = {text}" for key, text in texts.items() if text != usual.get(key, "null"))


def _all(sections: Sequence[Section]) -> list[tuple[Section, Row, Run]]:
    return [(section, row, run) for section in sections for row in section.rows for run in row.runs]


def _values(values: Sequence[str], n_runs: int) -> str:
    counts = Counter(values)
    if len(counts) == 1 and len(values) == n_runs:
        return values[0]
    return "; ".join(f"{value} ({n} {'run' if n == 1 else 'runs'})" for value, n in sorted(counts.items()))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
