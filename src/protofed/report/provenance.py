"""Where the numbers come from: releases, environments, commands and configs."""

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protofed.config import flatten
from protofed.privacy.ledger import SHARE, claim
from protofed.report.runs import Run
from protofed.report.sections import Row, Section

DELTA = 1e-5  # the config's default


@dataclass(frozen=True, slots=True)
class Released:
    """What the seeds of a row released, where they released the same: alike releases counted together."""

    label: str
    folders: str
    releases: tuple[tuple[str, int], ...]  # a release in words, how many times


@dataclass(frozen=True, slots=True)
class Settings:
    """The config of a row, verbatim, with the folders and seeds it stands for."""

    title: str
    seeds: str
    folders: str
    text: str


def claim_of(runs: Iterable[Run]) -> str:
    """The claim of all runs that released something, with their δ and, where they all know it, their logs' shares."""
    private = [run for run in runs if run.ledger]
    deltas = {float(run.config.get("privacy", {}).get("delta", DELTA)) for run in private}
    shares = [run.environment.get(SHARE) for run in private]
    return claim(deltas or {DELTA}, [share for share in shares if share is not None] if None not in shares else ())


def releases(sections: Sequence[Section]) -> tuple[Released, ...]:
    """The rows that released something, and what; seeds with different ledgers apart."""
    found = []
    for title, row in [(section.title, row) for section in sections for row in section.rows]:
        ledgers = {run.seed: _counted(run.ledger) for run in row.runs if run.ledger}
        for ledger in dict.fromkeys(ledgers.values()):
            runs = [run for run in row.runs if ledgers.get(run.seed) == ledger]
            label = f"{title}, {row.label}, seed {', '.join(str(run.seed) for run in runs)}"
            found.append(Released(label, ", ".join(f"{run.folder}/ledger.json" for run in runs), ledger))
    return tuple(found)


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
    """The command of every run that kept it, without repeats."""
    found = [run.environment.get("command") for _, _, run in _all(sections)]
    lines = [
        shlex.join(map(str, command)) if isinstance(command, list) else str(command) for command in found if command
    ]
    return tuple(dict.fromkeys(lines))


def settings(sections: Sequence[Section]) -> tuple[Settings, ...]:
    """The config of each row; its seeds differ in nothing that decides a number."""
    return tuple(
        Settings(
            f"{section.title}: {row.label}",
            ", ".join(map(str, row.seeds)),
            ", ".join(run.folder for run in row.runs),
            row.runs[0].config_text,
        )
        for section in sections
        for row in section.rows
    )


def _all(sections: Sequence[Section]) -> list[tuple[Section, Row, Run]]:
    return [(section, row, run) for section in sections for row in section.rows for run in row.runs]


def _counted(ledger: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, int], ...]:
    words = (", ".join(f"{key} {_text(value)}" for key, value in release.items()) for release in ledger)
    return tuple(Counter(words).items())


def _values(values: Sequence[str], n_runs: int) -> str:
    counts = Counter(values)
    if len(counts) == 1 and len(values) == n_runs:
        return values[0]
    return "; ".join(f"{value} ({n} {'run' if n == 1 else 'runs'})" for value, n in sorted(counts.items()))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
