"""Runs that may be compared: one section per data set and stream, one row per method and settings, seeds inside."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from protofed.config import RunConfig
from protofed.evaluation.significance import mean_and_std
from protofed.methods.catalogue import METHODS, private_by_itself
from protofed.methods.labels import label_of
from protofed.methods.names import FLAGSHIP, OURS
from protofed.report.layout import Estimate
from protofed.report.runs import Run, flat

TRIVIAL = tuple(name for name, entry in METHODS.items() if entry.trivial)
ANSWERED = ("dataset", "clients", "stream")  # what decides the queries, and so who may be compared
DEFAULTS = flat(asdict(RunConfig()))
NOISE, TARGET = "privacy.noise_multiplier", "privacy.target_epsilon"


@dataclass(frozen=True, slots=True)
class Row:
    """One method with one set of settings; its runs differ by seed."""

    label: str
    method: str
    runs: tuple[Run, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the row's numbers, by dotted names."""
        return self.runs[0].settings

    @property
    def name(self) -> str:
        """The method with its marks, without the settings that tell it from another row of the same name."""
        return label_of(self.runs[0].config)

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
    def is_noised(self) -> bool:
        """Whether the settings ask for noise: ProtoFed-SP's private mode does, and what is wrapped."""
        by_itself = private_by_itself(self.method, self.settings.get("protofed.mode", "reference"))
        return bool(by_itself or self.settings.get("privacy.wrap", False))

    @property
    def share(self) -> str:
        """What leaves a device after the base block: nothing, private releases, or raw events and gradients."""
        entry, mode = METHODS.get(self.method), self.settings.get("protofed.mode")
        nothing = entry is not None and (entry.shares_nothing or (bool(entry.modes) and mode == "nothing"))
        if nothing and not self.settings.get("scoring.popularity_prior"):
            return "nothing"
        return "private" if self.is_noised else "raw"

    def over_seeds(self, value: Callable[..., float], *of: object) -> Estimate:
        """The mean and the standard deviation of value(run, *of) over its runs."""
        return Estimate(*mean_and_std(np.array([value(run, *of) for run in self.runs])))


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
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for row in self.rows for run in row.runs)

    @property
    def n_slices(self) -> int:
        return max(run.n_slices for run in self.runs)

    @property
    def n_candidates(self) -> int:
        return self.runs[0].n_candidates


def group(runs: Sequence[Run]) -> tuple[Section, ...]:
    """Sections, those with most rows first, then by title; their rows by label, their runs by seed."""
    members = _by(runs, lambda run: {key: run.config.get(key) for key in ANSWERED})
    asked = [flat({key: own[0].config.get(key) for key in ANSWERED}) for own in members]
    titles = distinct_labels([own[0].config["dataset"] for own in members], asked)
    sections = [_section(title, own) for title, own in zip(titles, members, strict=True)]
    return tuple(sorted(sections, key=lambda section: (-len(section.rows), section.title)))


def alike(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Runs that differ by seed alone, under their method's name and the settings that tell it from another."""
    groups = _by(runs, lambda run: run.settings)
    names = [label_of(members[0].config) for members in groups]
    settings = [members[0].settings for members in groups]
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


def _usual(values: Sequence[object], default: object) -> str:
    """The value that all share, or that more have than any other; without one the default."""
    counts = Counter(json.dumps(value) for value in values).most_common(2)
    return json.dumps(default) if len(counts) == 2 and counts[0][1] == counts[1][1] else counts[0][0]


def _without_unused_target(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Noise that is given has no target: saying so in a label would make a sweep's own centre the odd one out."""
    given = settings.get(NOISE) and not settings.get(TARGET)
    return {**settings, TARGET: DEFAULTS[TARGET]} if given else settings


def _by(runs: Iterable[Run], key: Callable[[Run], Mapping[str, Any]]) -> list[list[Run]]:
    """Runs with the same settings together."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(key(run), sort_keys=True, default=str), []).append(run)
    return list(groups.values())
