"""Where the numbers come from: releases, environments, commands and configs."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from protofed.config import flatten
from protofed.privacy.ledger import SHARE, claim
from protofed.report.layout import Column, Line, Table, cells_of
from protofed.report.runs import Run
from protofed.report.sections import DEFAULTS, Section


def claim_of(runs: Iterable[Run]) -> str:
    """The claim of all runs that released something, with their δ and, where they all know it, their logs' shares."""
    private = [run for run in runs if run.releases]
    default = float(DEFAULTS["privacy.delta"])
    deltas = {float(run.settings.get("privacy.delta", default)) for run in private}
    shares = [run.environment.get(SHARE) for run in private]
    return claim(deltas or {default}, [share for share in shares if share is not None] if None not in shares else ())


def environments(runs: Sequence[Run]) -> tuple[tuple[str, str], ...]:
    """Each fact of the environments and its values; where runs differ, how many have each."""
    told: dict[str, Counter[str]] = {}
    for run in runs:
        for key, value in flatten(run.environment).items():
            if key != "command" and value != {}:
                told.setdefault(key, Counter())[_text(value)] += 1
    return tuple((key, _values(told[key], len(runs))) for key in sorted(told))


def commands(runs: Sequence[Run]) -> tuple[str, ...]:
    """The commands that runs kept, one for all that differ in their seed and their folder alone."""
    found = [command for run in runs if (command := run.environment.get("command"))]
    lines = [shlex.join(map(str, command)) if isinstance(command, list) else str(command) for command in found]
    return tuple(dict.fromkeys(re.sub(r" --(seed|out)[ =]\S+", "", line) for line in lines))


def usual_settings(sections: Sequence[Section]) -> dict[str, str]:
    """The value of each setting that most rows of the page have, by dotted names."""
    own = [row.settings for section in sections for row in section.rows]
    keys = dict.fromkeys(key for settings in own for key in settings)
    counts = {key: Counter(_text(settings.get(key)) for settings in own).most_common(1)[0][0] for key in keys}
    return {key: value for key, value in counts.items() if value != "null"}


def settings_table(sections: Sequence[Section]) -> Table:
    """What each row has otherwise than most, and its seeds."""
    usual = usual_settings(sections)
    columns = (Column("seeds", ranked=False, text=True), Column("settings", ranked=False, text=True))
    rows = [(f"{section.title}: {row.label}", row) for section in sections for row in section.rows]
    lines = tuple(
        Line(name, cells_of(columns, [" ".join(map(str, row.seeds)), _differing(row.settings, usual)]))
        for name, row in rows
    )
    return Table("settings", "What a row has otherwise", columns, lines)


def _differing(own: Mapping[str, Any], usual: Mapping[str, str]) -> str:
    texts = {key: _text(own.get(key)) for key in {**usual, **own}}
    return ", ".join(f"{key} = {text}" for key, text in texts.items() if text != usual.get(key, "null"))


def _values(counts: Counter[str], n_runs: int) -> str:
    if [*counts.values()] == [n_runs]:
        return next(iter(counts))
    return "; ".join(f"{value} ({n} {'run' if n == 1 else 'runs'})" for value, n in sorted(counts.items()))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
