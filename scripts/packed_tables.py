"""The lines of tables in docs/ that hold packed runs: from the packed ranks, and where it says so from an export."""

import csv
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pyarrow as pa
import torch

from protofed.config import from_toml
from protofed.evaluation.ranking import hit_rate, ndcg
from protofed.evaluation.significance import (
    DRAWS,
    LEVEL,
    PerUser,
    average_seeds,
    bootstrap_means,
    mean_over_slices,
    percentile_interval,
)
from protofed.experiments.evaluate import CANDIDATES
from protofed.experiments.store import RUNS, Held, place_of, read_held, read_streams
from protofed.methods.labels import run_label
from protofed.seeds import seed_of

CELLS = ("default", "nodp", "private", "paper", "paper-nodp")  # of the overall tables; other variants have their own
ACCURACY = (
    *(("ndcg@10", *pair) for pair in (("sampled", "all"), ("sampled", "novel"), ("sampled", "repeat"))),
    *(("ndcg@10", "full", "all"), ("ndcg@10", "full", "novel"), ("hr@10", "sampled", "all")),
)
GAPS = (("sampled", "all"), ("sampled", "novel"), ("full", "all"), ("full", "novel"))
OURS, PRIVATE = "protofed-sp (reference)", "private)"  # the private row that is ours, and how the labels of others end
SILENT = "frozen-no-new-rows"  # a method that shares nothing after the base block
METRICS = {"ndcg@10": ndcg, "hr@10": hit_rate}
NO_SUCH_EVENTS = -1.0  # a log without repeats has no figure for them
COSTS = ("bytes_up", "bytes_down", "trainable_parameters", "trainable_parameters_per_user", "learn")

Values = list[float]  # one for each seed


@dataclass(frozen=True, slots=True)
class Answered:
    """A packed run: its cell, its row in a report, and the rank of every query by kind of candidates."""

    cell: str  # METHOD/VARIANT
    label: str
    asked: dict[str, np.ndarray]
    ranks: dict[str, torch.Tensor]

    @property
    def variant(self) -> str:
        return self.cell.partition("/")[2]


@dataclass(frozen=True, slots=True)
class Change:
    """The same log's cells METHOD/VARIANT before and after something changed, each with the pack it is in."""

    name: str
    dataset: str
    before: tuple[Path, str]
    after: tuple[Path, str]


@cache
def held(dataset: str, pack: Path) -> tuple[list[Held], dict[str, pa.Table]]:
    """The runs of a data set in a store, and the queries of their streams."""
    store, below = place_of(pack)
    path = store / f"{dataset}{RUNS}"
    runs = read_held(path, below)
    return runs, read_streams(path, [run.queries for run in runs if run.queries])


def answered(dataset: str, pack: Path, wanted: Callable[[str], bool] = lambda cell: True) -> Iterator[Answered]:
    """The stored runs of the cells METHOD/VARIANT that are wanted."""
    runs, streams = held(dataset, pack)
    for run in runs:
        cell = "/".join(run.folder.split("/")[-3:-1])
        if wanted(cell) and run.queries is not None and run.ranks is not None:
            queries = streams[run.queries]
            asked = {name: queries[name].to_numpy() for name in ("slice", "user", "all", "novel", "repeat")}
            ranks = (torch.from_numpy(kind.astype(np.int64)) for kind in run.ranks)
            label = run_label(from_toml(run.texts["config"]))
            yield Answered(cell, label, asked, dict(zip(CANDIDATES, ranks, strict=True)))


def of_overall_tables(cell: str) -> bool:
    """Whether a cell METHOD/VARIANT is one of CELLS."""
    return cell.partition("/")[2] in CELLS


@cache
def accuracies(dataset: str, pack: Path) -> dict[str, list[Values]]:
    """By row of the overall table, best first: every column of ACCURACY, mean of A[t, t], from the packed ranks."""
    seeds: dict[str, list[Values]] = {}
    for run in answered(dataset, pack, of_overall_tables):
        seeds.setdefault(run.label, []).append(columns_of(run))
    return dict(sorted(by_column(seeds).items(), key=lambda row: -mean(row[1][0])))


def by_column(seeds: dict[str, list[Values]]) -> dict[str, list[Values]]:
    """The values of each column over seeds, from those of each seed over columns."""
    return {name: [list(column) for column in zip(*each, strict=True)] for name, each in seeds.items()}


def columns_of(run: Answered) -> Values:
    asked = run.asked
    slices = [t for t in np.unique(asked["slice"]) if t > 0]
    found = []
    for metric, kind, subset in ACCURACY:
        values = METRICS[metric](run.ranks[kind], 10).numpy()
        chosen = asked[subset].astype(bool)
        asked_of = [values[chosen & (asked["slice"] == t)] for t in slices]
        found.append(mean([float(part.mean()) for part in asked_of]) if all(map(len, asked_of)) else NO_SUCH_EVENTS)
    return found


def accuracy_lines(dataset: str, pack: Path) -> list[str]:
    rows = accuracies(dataset, pack)
    best = [max(mean(row[place]) for row in rows.values()) for place in range(len(ACCURACY))]

    def shown(values: Values, place: int) -> str:
        if NO_SUCH_EVENTS in values:
            return "–"
        if len(values) == 1:
            return f"{values[0]:.3f} (one seed)"
        text = f"{mean(values):.3f} ± {stdev(values):.3f}"
        return f"**{text}**" if mean(values) == best[place] else text

    return [
        f"| {name} | " + " | ".join(shown(values, place) for place, values in enumerate(row)) + " |"
        for name, row in rows.items()
    ]


def glance_lines(datasets: Sequence[str], pack: Path) -> list[str]:
    """Every method on every log, sampled NDCG@10 over all events, by mean place; the best of each log in bold."""
    logs = [sampled_means(dataset, pack) for dataset in datasets]

    def shown(log: dict[str, float], name: str) -> str:
        return f"**{log[name]:.3f}**" if log[name] == max(log.values()) else f"{log[name]:.3f}"

    return [
        f"| {name} | " + " | ".join([*(shown(log, name) for log in logs), f"{place:.1f}"]) + " |"
        for name, place in mean_places(logs).items()
    ]


def sampled_means(dataset: str, pack: Path) -> dict[str, float]:
    """By row: sampled NDCG@10 over all events, mean of seeds."""
    return {name: mean(row[0]) for name, row in accuracies(dataset, pack).items()}


def mean_places(logs: Sequence[dict[str, float]]) -> dict[str, float]:
    """By row, best first: its place among all rows, averaged over logs."""
    places = {name: mean([1 + sum(other > log[name] for other in log.values()) for log in logs]) for name in logs[0]}
    return dict(sorted(places.items(), key=lambda row: row[1]))


def width_lines(datasets: Sequence[str], narrow: Path, wide: Path) -> list[str]:
    """What a wider backbone does to each of its rows, log by log, with the mean place among them at both widths."""
    after = [sampled_means(dataset, wide) for dataset in datasets]
    everything = [sampled_means(dataset, narrow) for dataset in datasets]
    before = [{name: log[name] for name in same} for log, same in zip(everything, after, strict=True)]
    places = mean_places(before)
    return [
        f"| {name} | "
        + " | ".join(f"{old[name]:.3f} → {new[name]:.3f}" for old, new in zip(before, after, strict=True))
        + f" | {places[name]:.1f} → {place:.1f} |"
        for name, place in mean_places(after).items()
    ]


def exported(dataset: str, export: Path) -> dict[str, dict[tuple[str, str, str], dict[str, str]]]:
    """The export by row, then by quantity, candidates and subset; of several releases the first, the prototypes'."""
    found: dict[str, dict[tuple[str, str, str], dict[str, str]]] = {}
    with export.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["dataset"] == dataset and line["table"] in ("accuracy", "continual", "cost", "privacy"):
                key = line["quantity"], line["candidates"], line["subset"]
                found.setdefault(line["method"], {}).setdefault(key, line)
    return found


def share_lines(datasets: Sequence[str], exports: Sequence[Path]) -> list[str]:
    """Of each log the best method of all, under a budget and sharing nothing; then the first two on novel events."""
    made = []
    for dataset in datasets:
        found = {name: cells for export in exports for name, cells in exported(dataset, export).items()}
        rows = {name: cells for name, cells in found.items() if "=" not in name}
        private = {name for name, cells in rows.items() if ("ε", "", "") in cells}
        silent = {name for name in rows if name == SILENT or "share nothing" in name}
        groups = (("all", set(rows)), ("all", private), ("all", silent), ("novel", set(rows)), ("novel", private))
        made.append(f"| {dataset} | " + " | ".join(leader(rows, names, subset) for subset, names in groups) + " |")
    return made


def leader(rows: Mapping[str, Mapping[tuple[str, str, str], dict[str, str]]], names: set[str], subset: str) -> str:
    """The best of these rows by sampled NDCG@10, and its value."""
    values = {name: float(rows[name]["ndcg@10", "sampled", subset]["mean"]) for name in sorted(names)}
    best = max(values, key=values.__getitem__)
    return f"{best} {short(values[best])}"


def cost_lines(dataset: str, pack: Path, export: Path) -> list[str]:
    """Intervals, forgetting and costs, from the export."""
    rows = exported(dataset, export)

    def told(name: str, key: tuple[str, str, str], form: str) -> str:
        cell = rows[name].get(key, {"mean": ""})
        return f"{float(cell['mean']):{form}}" if cell["mean"] else "–"

    made = []
    for name in accuracies(dataset, pack):
        both = (rows[name][metric, "sampled", "all"] for metric in ("ndcg@10", "hr@10"))
        cells = [f"[{float(cell['low95']):.3f}, {float(cell['high95']):.3f}]" for cell in both]
        cells += [told(name, (quantity, "sampled", "all"), ".3f") for quantity in ("AF", "BWT")]
        cells += [told(name, (quantity, "", ""), ",.0f") for quantity in COSTS]
        made.append(f"| {name} | " + " | ".join(cells) + " |")
    return made


def noise_lines(dataset: str, export: Path) -> list[str]:
    """ProtoFed-SP by its noise: ε, accuracy and forgetting, means and deviations over seeds."""
    asked = [("ndcg@10", "sampled", "all"), ("ndcg@10", "full", "all"), ("AF", "sampled", "all")]
    made = {}
    for name, cells in exported(dataset, export).items():
        if name == OURS or name.startswith(f"{OURS}, privacy.noise_multiplier="):
            noise, price = (cells[key, "", ""]["text"] for key in ("noise multiplier", "ε"))
            shown = [f"{float(cells[key]['mean']):.3f} ± {float(cells[key]['std']):.3f}" for key in asked]
            made[float(noise)] = f"| {noise} | {price} | " + " | ".join(shown) + " |"
    return [made[noise] for noise in sorted(made)]


def by_user(values: np.ndarray, asked: dict[str, np.ndarray], subset: str) -> np.ndarray:
    """The sum of the values over each user's queries of the subset, a column for each slice from 1 on."""
    chosen = asked[subset].astype(bool) & (asked["slice"] > 0)
    users, slices = asked["user"][chosen], asked["slice"][chosen] - 1
    sums = np.zeros((asked["user"].max() + 1, asked["slice"].max()))
    np.add.at(sums, (users, slices), values[chosen])
    return sums


def per_user(dataset: str, pack: Path, compared: Callable[[str], bool]) -> list[dict[str, PerUser]]:
    """For every column of GAPS, NDCG@10 of each row that is compared, by user and slice, seeds averaged."""
    seeds: list[dict[str, list[np.ndarray]]] = [{} for _ in GAPS]
    counts: list[list[np.ndarray]] = [[] for _ in GAPS]
    for run in answered(dataset, pack, of_overall_tables):
        if compared(run.label):
            for place, (kind, subset) in enumerate(GAPS):
                found = ndcg(run.ranks[kind], 10).numpy()
                seeds[place].setdefault(run.label, []).append(by_user(found, run.asked, subset))
                counts[place].append(by_user(np.ones(len(found)), run.asked, subset).astype(np.int64))
    if any(not np.array_equal(each, same[0]) for same in counts for each in same):
        raise SystemExit(f"{dataset}: the rows answered different queries and cannot be compared in pairs")
    return [
        {label: average_seeds(np.stack(each), same[0]) for label, each in rows.items()}
        for rows, same in zip(seeds, counts, strict=True)
    ]


def at_equal_price(label: str) -> bool:
    """Our private row and the private rows of others."""
    return label == OURS or label.endswith(PRIVATE)


def gap_lines(
    dataset: str, pack: Path, ours: str = OURS, compared: Callable[[str], bool] = at_equal_price
) -> list[str]:
    """Our row minus each other one that is compared, the strongest rival first; 95 % intervals over users."""
    cells: dict[str, list[str]] = {}
    for column, tables in zip(GAPS, per_user(dataset, pack, compared), strict=True):
        others = sorted((name for name in tables if name != ours), key=lambda name: -mean_over_slices(tables[name]))
        rng = np.random.default_rng(seed_of(0, "differences", *column))
        own, *theirs = bootstrap_means([tables[ours], *(tables[name] for name in others)], rng, DRAWS)
        for name, draws in zip(others, theirs, strict=True):
            gap = mean_over_slices(tables[ours]) - mean_over_slices(tables[name])
            low, high = (short(end) for end in percentile_interval(own - draws, LEVEL))
            cells.setdefault(name, []).append(f"{short(gap, '+')} [{low}, {high}]")
    return [f"| {name} | " + " | ".join(row) + " |" for name, row in cells.items()]


def short(value: float, sign: str = "") -> str:
    """Three digits without the zero before the point."""
    return f"{value:{sign}.3f}".replace("0.", ".", 1).replace("-", "\N{MINUS SIGN}")


def warm_up_lines(datasets: Sequence[str], narrow: Path, wide: Path) -> list[str]:
    """The backbone's own validation NDCG@10 on the base block and its best epoch, mean of seeds, at both widths."""
    made = []
    for dataset in datasets:
        (before, when), (after, then) = (best_epoch(dataset, pack) for pack in (narrow, wide))
        made.append(f"| {dataset} | {before:.3f} → {after:.3f} | {when:.0f} → {then:.0f} |")
    return made


def best_epoch(dataset: str, pack: Path) -> tuple[float, float]:
    """The best value of the warm-up's validation trace and its epoch, means over the seeds of a frozen row."""
    at_defaults = (["frozen-no-new-rows", "default"], ["frozen-no-new-rows", "paper"])
    traces = [
        warm_up_trace(run.texts["log"]) for run in held(dataset, pack)[0] if run.folder.split("/")[-3:-1] in at_defaults
    ]
    return mean([max(trace) for trace in traces]), mean([1 + trace.index(max(trace)) for trace in traces])


def warm_up_trace(log: str) -> list[float]:
    """The validation NDCG@10 of every epoch of the warm-up, from a run's log."""
    return list(json.loads(log.splitlines()[0])["validation_ndcg10"])


def by_cell(dataset: str, pack: Path, cells: Collection[str]) -> dict[str, list[Values]]:
    """By cell METHOD/VARIANT of those named: every column of ACCURACY, seed by seed."""
    seeds: dict[str, list[Values]] = {}
    for run in answered(dataset, pack, cells.__contains__):
        seeds.setdefault(run.cell, []).append(columns_of(run))
    return by_column(seeds)


def cell_lines(dataset: str, pack: Path, cells: Mapping[str, str]) -> list[str]:
    """The cells METHOD/VARIANT that are named, in their order: how many seeds, then every column of ACCURACY."""
    found = by_cell(dataset, pack, cells)

    def shown(column: Values) -> str:
        if NO_SUCH_EVENTS in column:
            return "–"
        return f"{column[0]:.3f} (one seed)" if len(column) == 1 else f"{mean(column):.3f} ± {stdev(column):.3f}"

    return [
        f"| {name} | {len(found[cell][0])} | " + " | ".join(map(shown, found[cell])) + " |"
        for cell, name in cells.items()
    ]


def change_lines(changes: Sequence[Change]) -> list[str]:
    """Every column of ACCURACY before and after, means of seeds."""

    def shown(before: Values, after: Values) -> str:
        return "–" if NO_SUCH_EVENTS in before else f"{mean(before):.3f} → {mean(after):.3f}"

    wanted: dict[tuple[str, Path], set[str]] = {}
    for change in changes:
        for pack, cell in (change.before, change.after):
            wanted.setdefault((change.dataset, pack), set()).add(cell)
    found = {place: by_cell(*place, cells) for place, cells in wanted.items()}
    made = []
    for change in changes:
        before, after = (found[change.dataset, pack][cell] for pack, cell in (change.before, change.after))
        made.append(f"| {change.name} | " + " | ".join(map(shown, before, after)) + " |")
    return made


def sweep_lines(dataset: str, pack: Path) -> list[str]:
    """ProtoFed-SP with one setting changed at a time, the settings as they are first."""
    seeds: dict[str, list[Values]] = {}
    for run in answered(dataset, pack):
        seeds.setdefault(run.variant.partition(",")[2], []).append(columns_of(run))

    def place(changed: str) -> tuple[str, float]:
        setting, _, value = changed.partition("=")
        return setting, float(value or 0)

    def shown(column: Values) -> str:
        return f"{mean(column):.4f} ± {stdev(column):.4f}"

    found = by_column(seeds)
    return [
        f"| {changed.replace('=', ' = ') or 'as tuned'} | {len(found[changed][0])} | "
        + " | ".join(shown(column) for column in found[changed])
        + " |"
        for changed in sorted(found, key=place)
    ]
