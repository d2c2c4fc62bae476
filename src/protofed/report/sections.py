"""Runs that may be compared: one section per data set and stream, one row per method and settings, seeds inside."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from protofed.config import RunConfig, flatten
from protofed.experiments.records import Unfinished
from protofed.methods.catalogue import METHODS, private_by_itself
from protofed.methods.labels import label_of
from protofed.methods.names import FLAGSHIP, OURS
from protofed.report.runs import Run

TRIVIAL = tuple(name for name, entry in METHODS.items() if entry.trivial)
NOT_SETTINGS = ("seed", "out", "root", "device")  # they may differ between the seeds of one row
ANSWERED = ("dataset", "clients", "stream")  # what decides the queries, and so who may be compared
AnyRun = TypeVar("AnyRun", bound=Run | Unfinished)


@dataclass(frozen=True, slots=True)
class Row:
    """One method with one set of settings; its runs differ by seed."""

    label: str
    method: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)

    @property
    def is_trivial(self) -> bool:
        return self.method in TRIVIAL

    @property
    def is_ours(self) -> bool:
        return self.method in (OURS, FLAGSHIP)

    @property
    def share(self) -> str:
        """What leaves a device after the base block: nothing, private releases, or raw events and gradients."""
        config, entry = self.runs[0].config, METHODS.get(self.method)
        mode, scoring = config.get("protofed", {}).get("mode"), config.get("scoring", {})
        nothing = entry is not None and (entry.shares_nothing or (bool(entry.modes) and mode == "nothing"))
        if nothing and not scoring.get("popularity_prior"):
            return "nothing"
        return "private" if is_noised(config) else "raw"


@dataclass(frozen=True, slots=True)
class Section:
    """The rows that were asked the same queries."""

    title: str
    slug: str
    dataset: str
    rows: tuple[Row, ...]
    duplicates: tuple[str, ...]  # folders left out because another one holds the same settings and seed
    cut_short: tuple[str, ...]  # folders left out because others of the same stream reach further slices

    @property
    def n_slices(self) -> int:
        return max(run.n_slices for row in self.rows for run in row.runs)

    @property
    def n_candidates(self) -> int:
        """How many items a sampled query ranks, the positive among them."""
        return 1 + int(self.rows[0].runs[0].config.get("stream", {}).get("n_negatives", 99))


def group(runs: Sequence[Run]) -> tuple[Section, ...]:
    """Sections, those with most rows first, then by title; their rows by label, their runs by seed."""
    sections = [_section(title, members) for title, members in by_stream(runs)]
    return tuple(sorted(sections, key=lambda section: (-len(section.rows), section.title)))


def by_stream(runs: Sequence[AnyRun]) -> list[tuple[str, list[AnyRun]]]:
    """Runs that are asked the same queries, under the data set's name and the settings that tell it from another."""
    groups = _by(runs, lambda run: _canonical({key: run.config.get(key) for key in ANSWERED}))
    asked = [flat({key: members[0].config.get(key) for key in ANSWERED}) for members in groups]
    titles = distinct_labels([members[0].config["dataset"] for members in groups], asked)
    return list(zip(titles, groups, strict=True))


def alike(runs: Sequence[AnyRun]) -> list[tuple[str, list[AnyRun]]]:
    """Runs that differ by seed alone, under their method's name and the settings that tell it from another."""
    groups = _by(runs, lambda run: _canonical(_settings(run)))
    names = [label_of(members[0].config) for members in groups]
    settings = [flat(_settings(members[0])) for members in groups]
    short = distinct_labels(names, [_without_unused_target(own) for own in settings])
    labels = short if len(set(short)) == len(short) else distinct_labels(names, settings)
    return list(zip(labels, groups, strict=True))


def distinct_labels(names: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each name, followed by the settings that tell it from others of the same name.

    What most have goes unsaid, and the default where no value has the majority.
    """
    labels = []
    for name, own in zip(names, settings, strict=True):
        rivals = [other for rival, other in zip(names, settings, strict=True) if rival == name]
        keys = sorted({key for other in rivals for key in other})
        usual = {key: _usual([other.get(key) for other in rivals], DEFAULTS.get(key)) for key in keys}
        told = [key for key in keys if json.dumps(own.get(key)) != usual[key]]
        labels.append(", ".join([name, *(f"{key}={own.get(key)}" for key in told)]))
    return labels


def _usual(values: Sequence[object], default: object) -> str:
    """The value that all share, or that more have than any other; without one the default."""
    counts = Counter(json.dumps(value) for value in values).most_common(2)
    return json.dumps(default) if len(counts) == 2 and counts[0][1] == counts[1][1] else counts[0][0]


def slug(text: str) -> str:
    """A name that is safe in an id or a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unnamed"


def _section(title: str, found: Sequence[Run]) -> Section:
    longest = max(run.n_slices for run in found)
    runs = [run for run in found if run.n_slices == longest]
    cut_short = tuple(run.folder for run in found if run.n_slices < longest)
    rows, duplicates = [], []
    for label, members in alike(runs):
        by_seed = {run.seed: run for run in reversed(members)}  # the first folder of a seed is kept
        duplicates += [run.folder for run in members if by_seed[run.seed] is not run]
        rows.append(Row(label, members[0].config["method"], tuple(by_seed[seed] for seed in sorted(by_seed))))
    rows.sort(key=lambda row: row.label)
    return Section(title, slug(title), runs[0].config["dataset"], tuple(rows), tuple(duplicates), cut_short)


def is_noised(config: Mapping[str, Any]) -> bool:
    """Whether the settings ask for noise: ProtoFed-SP's private mode does, and what is wrapped."""
    ours = private_by_itself(config["method"], config.get("protofed", {}).get("mode", "reference"))
    return bool(ours or config.get("privacy", {}).get("wrap", False))


def _settings(run: Run | Unfinished) -> dict[str, Any]:
    return {key: value for key, value in run.config.items() if key not in NOT_SETTINGS}


def _without_unused_target(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Noise that is given has no target: saying so in a label would make a sweep's own centre the odd one out."""
    given = settings.get(NOISE) and not settings.get(TARGET)
    return {**settings, TARGET: DEFAULTS[TARGET]} if given else settings


def flat_settings(run: Run) -> dict[str, Any]:
    """What decides a run's numbers, seed aside, by dotted names."""
    return flat(_settings(run))


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _by(runs: Iterable[AnyRun], key: Callable[[AnyRun], str]) -> list[list[AnyRun]]:
    groups: dict[str, list[AnyRun]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by dotted names, what is no single value as text; empty tables are left out."""
    found = {key: value for key, value in flatten(table, prefix).items() if value != {}}
    return {key: value if isinstance(value, str | int | float | None) else str(value) for key, value in found.items()}


DEFAULTS = flat(asdict(RunConfig()))
NOISE, TARGET = "privacy.noise_multiplier", "privacy.target_epsilon"
