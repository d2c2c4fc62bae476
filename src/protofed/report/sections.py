"""Runs that may be compared: one section per data set and stream, one row per method and settings, seeds inside."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

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
Item = TypeVar("Item")
Key = TypeVar("Key")
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


def group(runs: Sequence[Run]) -> tuple[Section, ...]:
    """Sections, those with most rows first, then by title; their rows by label, their runs by seed."""
    streams = [*grouped(runs, lambda run: _as_text({key: run.config.get(key) for key in ANSWERED})).values()]
    asked = [flat({key: own[0].config.get(key) for key in ANSWERED}) for own in streams]
    titles = distinct_labels([own[0].config["dataset"] for own in streams], asked)
    sections = [_section(title, own) for title, own in zip(titles, streams, strict=True)]
    return tuple(sorted(sections, key=lambda section: (-len(section.rows), section.title)))


def distinct_labels(names: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each name, followed by the settings that tell it from others of the same name.

    What most have goes unsaid, and the default where no value has the majority.
    """
    rivals = grouped(zip(names, settings, strict=True), lambda pair: pair[0])
    usual = {name: _usual([own for _, own in pairs]) for name, pairs in rivals.items()}
    labels = []
    for name, own in zip(names, settings, strict=True):
        told = [key for key, value in usual[name].items() if json.dumps(own.get(key)) != value]
        labels.append(", ".join([name, *(f"{key}={own.get(key)}" for key in told)]))
    return labels


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by what the key says of each, in the order they come."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def slug(text: str) -> str:
    """A name that is safe in an id or a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unnamed"


def _section(title: str, found: Sequence[Run]) -> Section:
    """The runs that reach the last slice; those that differ by seed alone are a row, the first folder of each kept."""
    longest = max(run.n_slices for run in found)
    cut_short = tuple(run.folder for run in found if run.n_slices < longest)
    groups = [*grouped((run for run in found if run.n_slices == longest), lambda run: _as_text(run.settings)).values()]
    rows, duplicates = [], []
    for label, members in zip(_labels([members[0] for members in groups]), groups, strict=True):
        by_seed = {run.seed: run for run in reversed(members)}
        duplicates += [run.folder for run in members if by_seed[run.seed] is not run]
        rows.append(Row(label, members[0].config["method"], tuple(by_seed[seed] for seed in sorted(by_seed))))
    rows.sort(key=lambda row: row.label)
    return Section(title, slug(title), found[0].config["dataset"], tuple(rows), tuple(duplicates), cut_short)


def _labels(runs: Sequence[Run]) -> list[str]:
    """The method of each run with the settings that tell it from the others.

    Noise that is given has no target: saying so would make a sweep's own centre the odd one out.
    """
    names, settings = [label_of(run.config) for run in runs], [run.settings for run in runs]
    usual = {TARGET: DEFAULTS[TARGET]}
    plain = [own | usual if own.get(NOISE) and not own.get(TARGET) else own for own in settings]
    short = distinct_labels(names, plain)
    return short if len(set(short)) == len(short) else distinct_labels(names, settings)


def _usual(settings: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The value of each setting that all share, or that more have than any other; without one the default."""
    found = {}
    for key in sorted({key for own in settings for key in own}):
        counts = Counter(json.dumps(own.get(key)) for own in settings).most_common(2)
        tie = len(counts) == 2 and counts[0][1] == counts[1][1]
        found[key] = json.dumps(DEFAULTS.get(key)) if tie else counts[0][0]
    return found


def _as_text(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=str)
