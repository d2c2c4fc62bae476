"""A grid of runs: data sets × methods × variants × swept settings × seeds, each cell with a folder of its own."""

import hashlib
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from protofed.config import (
    RunConfig,
    features_of,
    flatten,
    from_values,
    hyper_values,
    override,
    parse_override,
    to_toml,
    values_of,
)
from protofed.errors import ConfigError
from protofed.methods.catalogue import METHODS, method_named
from protofed.methods.search_spaces import space_of

Tuned = Callable[[str, str, str, bool], Mapping[str, object] | None]  # data set, method, variant, whether private
Settle = Callable[[Mapping[str, object], None, Sequence[str]], RunConfig]  # `protofed run`: flags, no file, its --set
DEFAULT, ALL = "default", "all"
AXES = {"dataset": "grid.datasets", "method": "grid.methods", "seed": "grid.seeds"}
RESERVED = ("failed", "results.parquet", "runs.parquet")  # files of a bench folder
VARIANT_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
LONGEST = 120  # characters of one part of a folder's name


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings under a name, for some methods (none named: for all), and settings it alone sweeps."""

    name: str
    methods: tuple[str, ...] = ()
    settings: tuple[tuple[str, object], ...] = ()
    sweep: tuple[tuple[str, tuple[object, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """What is multiplied; a method has its plain cell (where it is not left out), then those of its variants."""

    datasets: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    settings: tuple[tuple[str, object], ...] = ()
    variants: tuple[Variant, ...] = ()
    sweep: tuple[tuple[str, tuple[object, ...]], ...] = ()
    plain: tuple[str, ...] = tuple(METHODS)  # methods that have a plain cell
    logs: Mapping[str, tuple[tuple[str, object], ...]] = field(default_factory=dict)  # what one data set alone is given


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the grid."""

    variant: str  # the variant's name and the swept values, as the folder has them
    config: RunConfig
    settings: tuple[tuple[str, object], ...]  # what was asked for beyond data set, method and seed
    tuned: bool = True  # False: tuned settings are wanted and not known, so no run can be this one

    @property
    def folder(self) -> str:
        """Where the run lives below the bench folder: data set / method / variant / seed."""
        dataset, variant = (_part(text) for text in (quote(self.config.dataset, safe=""), self.variant))
        return f"{dataset}/{quote(self.config.method, safe='')}/{variant}/seed-{self.config.seed}"

    @property
    def warm_up(self) -> str:
        """What decides the warm-up: cells with the same text share it."""
        training = replace(self.config.training, slice_learning_rate=0.0, slice_epochs=0)  # these act after it
        config = self.config
        tower = asdict(config.content) if config.content.kind == "tower" and features_of(config.content) else {}
        parts = (asdict(config.stream), asdict(config.backbone), asdict(training), config.scoring.head, tower)
        return repr((config.dataset, config.clients, config.preset, config.seed, parts))

    def command(self, *flags: str) -> str:
        """The `protofed run` that makes the same run."""
        words = [word for flag in AXES for word in (f"--{flag}", str(getattr(self.config, flag)))]
        words += [word for text in texts(self.settings) for word in ("--set", text)]
        return shlex.join(["protofed", "run", *words, *flags])


@dataclass(frozen=True, slots=True)
class _GridTable:
    datasets: object = ()
    methods: object = ()
    seeds: object = (0,)
    plain: object = tuple(METHODS)


@dataclass(frozen=True, slots=True)
class _VariantTable:
    name: object = None
    methods: object = ()
    settings: object = None
    sweep: object = None


@dataclass(frozen=True, slots=True)
class _File:
    grid: _GridTable = _GridTable()
    settings: object = None
    sweep: object = None
    variant: object = ()


def read_grid(path: Path) -> Grid:
    """The grid in a TOML file, strictly: an unknown key is an error that suggests the nearest."""
    if not path.is_file():
        raise ConfigError(f"no experiment file at {path}")
    values = values_of(path)
    try:
        return grid_of(values)
    except ConfigError as problem:
        raise ConfigError(f"{path}: {problem}") from problem


def grid_of(values: Mapping[str, object]) -> Grid:
    """The grid that dotted keys describe, e.g. {"grid.seeds": [0, 1], "settings.training.negatives": 32}."""
    settings, rest = _taken(values, "settings")
    sweep, rest = _taken(rest, "sweep")
    logs, rest = _taken(rest, "log")
    file = override(_File(), rest)
    return Grid(
        datasets=_names("grid.datasets", file.grid.datasets),
        methods=_methods("grid.methods", file.grid.methods),
        seeds=_seeds(file.grid.seeds),
        settings=_settings("settings", settings),
        variants=tuple(_variant(entry) for entry in _list("variant", file.variant)),
        sweep=_sweep("sweep", sweep),
        plain=_methods("grid.plain", file.grid.plain),
        logs=_by_log(logs),
    )


def untuned(dataset: str, method: str, variant: str, private: bool) -> Mapping[str, object]:
    """Every method at its defaults."""
    return {}


def tuned_in(*folders: Path, required: bool = True) -> Tuned:
    """What `protofed tune --out folder` found: of each METHOD/best.toml, the settings that the search was over.

    A log of its own has them in DATASET/METHOD/best.toml; what lies there goes before METHOD/best.toml, and one folder
    before the next; what was tuned in another variant, or with noise where a cell has none, or without, is passed over.
    A method that is not tuned yet as a cell asks is refused, or where that is not `required` has no settings.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"no folder at --tuned {folder}; give the --out of `protofed tune`")

    def tuned(dataset: str, method: str, variant: str, private: bool) -> Mapping[str, object] | None:
        space = space_of(method, variant, private=private)
        if not space:
            return {}
        own = Path(quote(dataset, safe=""), method, "best.toml")
        places = [folder / place for folder in folders for place in (own, Path(method, "best.toml"))]
        asked, others = (method, variant, private), []
        for place in filter(Path.is_file, places):
            config, values = _best(place)
            if _tuned_for(config) == asked:
                return {key: values[key] for key in space if key in values}
            others.append((place, config))
        if not required:
            return None
        if not others:
            given = ", ".join(map(str, folders))
            raise ConfigError(f"--tuned {given} has no {method}/best.toml; tune {method} too, or leave it out")
        place, config = others[0]
        was, wanted = _words(*_tuned_for(config)), _words(*asked)
        raise ConfigError(f"{place} was tuned for {was}, a cell is {wanted}; tune that into another folder")

    return tuned


def _best(path: Path) -> tuple[RunConfig, dict[str, object]]:
    """The config of a best.toml and its dotted keys."""
    try:
        config, values = from_values(values_of(path)), values_of(path)
    except ConfigError as problem:
        raise ConfigError(f"{path}: {problem}") from problem
    return config, values | {f"hyper.{key}": value for key, value in hyper_values(config.hyper).items()}


def _tuned_for(config: RunConfig) -> tuple[str, str, bool]:
    return config.method, config.variant, config.privacy.wrap


def _words(method: str, variant: str, private: bool) -> str:
    return f"{method} ({variant}{', private' if private else ''})"


def cells(grid: Grid, settle: Settle, tuned: Tuned = untuned) -> tuple[Cell, ...]:
    """Every cell, in the grid's order; no two share a folder, none is made twice."""
    if not grid.datasets or not grid.methods:
        missing = "datasets" if not grid.datasets else "methods"
        raise ConfigError(f"the grid has no {missing}; give --{missing}, or grid.{missing} in the file of --config")
    for dataset in grid.datasets:
        if dataset in RESERVED:
            raise ConfigError(f"a data set must not be named {dataset!r}, as a file of the bench is; rename its folder")
    found = _swept_once(tuple(_expanded(grid, settle, tuned)))
    if not found:
        raise ConfigError(
            "the grid has no cell: grid.plain leaves the plain ones out, and no variant is for its methods"
        )
    _distinct([(cell.folder.casefold(), cell.folder) for cell in found], "two cells would share the folder {1}")
    same = "{0} and {1} would be the same run; drop one, or name the methods the variant is for"
    _distinct([(to_toml(cell.config), cell.folder) for cell in found], same)
    return found


def _swept_once(found: tuple[Cell, ...]) -> tuple[Cell, ...]:
    """The cells without those of a sweep that a plain one is already: the value it sweeps over may be the tuned one."""
    plain = {to_toml(cell.config) for cell in found if cell.variant == DEFAULT}
    return tuple(cell for cell in found if "=" not in cell.variant or to_toml(cell.config) not in plain)


def shard(found: Sequence[Cell], index: int, count: int) -> tuple[Cell, ...]:
    """Part `index` (from 1) of `count`: disjoint, together everything, each method spread evenly."""
    by_method = sorted(range(len(found)), key=lambda place: found[place].config.method)
    mine = {place for turn, place in enumerate(by_method) if turn % count == index - 1}
    return tuple(cell for place, cell in enumerate(found) if place in mine)


def parse_shard(text: str) -> tuple[int, int]:
    """`2/5` as (2, 5)."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = (int(number) for number in match.groups()) if match else (0, 0)
    if not 1 <= index <= count:
        raise ConfigError(f"--shard takes i/n with 1 <= i <= n, got {text!r}; for example --shard 1/4")
    return index, count


def texts(settings: Iterable[tuple[str, object]]) -> list[str]:
    """Settings as --set takes them."""
    return [setting(key, value) for key, value in settings]


def setting(key: str, value: object) -> str:
    """`key=value` that --set reads back as it was."""
    bare = f"{key}={_text(value)}"
    if parse_override(bare) == (key, value):
        return bare
    return f"{key}={json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")  # as TOML, which forbids DEL


def _expanded(grid: Grid, settle: Settle, tuned: Tuned) -> Iterator[Cell]:
    for dataset, method in itertools.product(grid.datasets, grid.methods):
        outside = ":" in method and grid.plain == tuple(METHODS)  # not in the catalogue, and nobody chose plain cells
        plain = [Variant(DEFAULT)] if outside or method in grid.plain else []
        variants = [v for v in grid.variants if not v.methods or method in v.methods]
        for variant in (*plain, *variants):
            sweep = dict(grid.sweep) | dict(variant.sweep)
            for swept in itertools.product(*sweep.values()):
                chosen = dict(zip(sweep, swept, strict=True))
                asked = dict(grid.settings) | dict(grid.logs.get(dataset, ())) | dict(variant.settings) | chosen
                best = tuned(dataset, method, _variant_of(method, asked), asked.get("privacy.wrap") is True)
                settings = {**(best or {}), **asked}
                for seed in grid.seeds:
                    named = {"dataset": dataset, "method": method, "seed": seed}
                    # by way of the same texts as `command`, so that both make one config
                    config = settle(named, None, texts(settings.items()))
                    # the config's own value: 1 and 1.0 are one setting and must be one folder
                    values = [f"{key}={quote(_text(_value(config, key)), safe='+')}" for key in chosen]
                    yield Cell(",".join([variant.name, *values]), config, tuple(settings.items()), best is not None)


def _variant_of(method: str, settings: Mapping[str, object]) -> str:
    """What its slices change, standard or peft: as asked, else as the method brings it along."""
    return str(settings.get("variant", method_named(method).settings.get("variant", "standard")))


def _value(config: RunConfig, key: str) -> object:
    if key.startswith("hyper."):
        return hyper_values(config.hyper)[key.removeprefix("hyper.")]
    return attrgetter(key)(config)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _part(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}~{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _distinct(named: Sequence[tuple[str, str]], message: str) -> None:
    first: dict[str, str] = {}
    for key, name in named:
        if key in first:
            raise ConfigError(message.format(first[key], name))
        first[key] = name


def _taken(values: Mapping[str, object], table: str) -> tuple[dict[str, object], dict[str, object]]:
    """The keys of one table without its name, and the other keys; a table that is empty is neither."""
    within = f"{table}."
    inside = {key.removeprefix(within): value for key, value in values.items() if key.startswith(within)}
    return inside, {k: v for k, v in values.items() if not k.startswith(within) and (k, v) != (table, {})}


def _variant(entry: object) -> Variant:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"variant must be a list of tables, [[variant]], got {entry!r}")
    table = override(_VariantTable(), entry)
    if not isinstance(table.name, str) or not VARIANT_NAME.fullmatch(table.name) or table.name == DEFAULT:
        rule = f"small letters, digits, '.', '_', '-', and not {DEFAULT!r}"
        raise ConfigError(f"variant.name must consist of {rule}, got {table.name!r}")
    where = f"variant {table.name!r}"
    return Variant(
        name=table.name,
        methods=_methods(f"{where}: methods", table.methods),
        settings=_settings(f"{where}: settings", _dotted(f"{where}: settings", table.settings)),
        sweep=_sweep(f"{where}: sweep", _dotted(f"{where}: sweep", table.sweep)),
    )


def _dotted(where: str, table: object) -> dict[str, object]:
    """Dotted keys of a table, however deep it is written."""
    if table is not None and not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table, got {table!r}")
    return flatten(table or {})


def _by_log(values: Mapping[str, object]) -> dict[str, tuple[tuple[str, object], ...]]:
    """The settings of each data set, from keys such as hm.stream.n_slices."""
    tables: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        log, _, setting = key.partition(".")
        tables.setdefault(log, {})[setting] = value
    return {log: _settings(f"log.{log}", table) for log, table in tables.items()}


def _settings(where: str, values: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    for key, value in values.items():
        if key in AXES:
            raise ConfigError(f"{where} must not set {key!r}; list it in {AXES[key]}")
        if isinstance(value, list | Mapping):
            raise ConfigError(f"{where}: {key} must be a single value, got {value!r}; lists belong in [sweep]")
    return tuple(values.items())


def _sweep(where: str, values: Mapping[str, object]) -> tuple[tuple[str, tuple[object, ...]], ...]:
    for key, options in values.items():
        if not isinstance(options, list) or not options:
            raise ConfigError(f"{where}: {key} must be a list of values, got {options!r}")
        _settings(where, dict.fromkeys([key], options[0]))
    return tuple((key, tuple(options)) for key, options in values.items() if isinstance(options, list))


def _list(where: str, value: object) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} must be a list, got {value!r}")
    return value


def _names(where: str, value: object) -> tuple[str, ...]:
    names = _once(where, _list(where, value))
    for name in names:
        if not isinstance(name, str) or not name or name.startswith("."):
            raise ConfigError(f"{where} must hold names, got {name!r}")
    return names


def _methods(where: str, value: object) -> tuple[str, ...]:
    """The methods of a list: `all` stands for those of the catalogue, and a name after a minus is left out."""
    names = _names(where, value)
    named = [name for name in names if not name.startswith("-")]
    chosen = dict.fromkeys(itertools.chain.from_iterable(METHODS if name == ALL else [name] for name in named))
    for name in (*chosen, *(name.removeprefix("-") for name in names if name.startswith("-"))):
        method_named(name)
    return tuple(name for name in chosen if f"-{name}" not in names)


def _seeds(value: object) -> tuple[int, ...]:
    seeds = _once("grid.seeds", _list("grid.seeds", value))
    for seed in seeds:
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise ConfigError(f"grid.seeds must hold whole numbers >= 0, got {seed!r}")
    if not seeds:
        raise ConfigError("grid.seeds must name at least one seed, got none")
    return seeds


def _once(where: str, values: Sequence[Any]) -> tuple[Any, ...]:
    for place, value in enumerate(values):
        if value in values[:place]:
            raise ConfigError(f"{where} names {value!r} twice")
    return tuple(values)
