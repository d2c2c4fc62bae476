"""The lines of the tables of docs/head.md: ProtoFed at both settings beside the strongest rivals of each log."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from packed_tables import OURS, PRIVATE, SILENT, answered, by_user, held, short

from protofed.evaluation.ranking import ndcg
from protofed.evaluation.significance import PerUser, average_seeds, bootstrap_difference, mean_over_slices
from protofed.seeds import seed_of

CELLS = ("default", "nodp", "private", "nothing", "nothing-content", "private-content", "head", "head-content")
NOTHING, TOLD = "protofed (share nothing)", "protofed (share private)"
RELEASES = ("prototypes", "new items", "popularity")


@cache
def users_of(dataset: str, pack: Path, kind: str) -> dict[str, list[PerUser]]:
    """By row: NDCG@10 over all events of one kind of candidates by user and slice, seed by seed."""
    found: dict[str, list[PerUser]] = {}
    for run in answered(dataset, pack, lambda cell: cell.partition("/")[2] in CELLS):
        values = ndcg(run.ranks[kind], 10).numpy()
        counts = by_user(np.ones(len(values)), run.asked, "all").astype(np.int64)
        found.setdefault(run.label, []).append(PerUser(by_user(values, run.asked, "all"), counts))
    return found


def together(seeds: list[PerUser]) -> PerUser:
    """Several seeds as one."""
    return average_seeds(np.stack([each.sums for each in seeds]), seeds[0].counts)


def value_of(seeds: list[PerUser]) -> str:
    """`.733 ± .004`, without the spread where there is one seed."""
    means = [mean_over_slices(each) for each in seeds]
    return short(mean(means)) + (f" ± {short(stdev(means))}" if len(means) > 1 else " (one seed)")


def gap_of(mine: list[PerUser], theirs: list[PerUser], kind: str) -> str:
    """The difference with its 95 % interval over users."""
    rng = np.random.default_rng(seed_of(0, "differences", kind, "all"))
    found = bootstrap_difference(together(mine), together(theirs), rng)
    return f"{short(found.mean, '+')} [{short(found.low)}, {short(found.high)}]"


def rivals_of(dataset: str, pack: Path, flagship: Path, kind: str) -> Iterator[str]:
    """The best other row under this ε, popularity alone included, and the best one that shares raw events; no head."""
    rows = {**users_of(dataset, pack, kind), **users_of(dataset, flagship, kind)}
    values = {
        name: mean_over_slices(together(seeds))
        for name, seeds in rows.items()
        if name != OURS and "share" not in name and "head" not in name
    }
    private = {name for name in values if name.endswith(PRIVATE) or name == SILENT}
    for names in (private, set(values) - private):
        yield max(sorted(names), key=values.__getitem__)


def dial_lines(packs: Mapping[str, Path], flagship: Path, kind: str) -> list[str]:
    """Sharing nothing, with content where there is some, minus the strongest rivals."""
    made = []
    for dataset, pack in packs.items():
        rows = {**users_of(dataset, pack, kind), **users_of(dataset, flagship, kind)}
        rivals = (OURS, *rivals_of(dataset, pack, flagship, kind))
        for name in (each for each in sorted(rows) if each.startswith(NOTHING[:-1])):
            title = f"{dataset}{name.removeprefix(NOTHING[:-1]).rstrip(')').replace(' content:', ' with')}"
            gaps = [gap_of(rows[name], rows[rival], kind) for rival in rivals]
            cells = [gaps[0], *(f"{rival}: {gap}" for rival, gap in zip(rivals[1:], gaps[1:], strict=True))]
            made.append(f"| {title} | {value_of(rows[name])} | " + " | ".join(cells) + " |")
    return made


def private_lines(packs: Mapping[str, Path], flagship: Path) -> list[str]:
    """What is released under ε = 3.4, and what that adds to sharing nothing."""
    made = []
    for dataset, pack in packs.items():
        both = [{**users_of(dataset, pack, kind), **users_of(dataset, flagship, kind)} for kind in ("sampled", "full")]
        if TOLD not in both[0]:
            continue
        cells = [released(dataset, flagship)]
        for kind, rows in zip(("sampled", "full"), both, strict=True):
            same = len(rows[TOLD])
            cells += [value_of(rows[TOLD]), gap_of(rows[TOLD], rows[NOTHING][:same], kind)]
        cells.append(gap_of(both[0][TOLD], both[0][OURS], "sampled"))
        made.append(f"| {dataset} | " + " | ".join(cells) + " |")
    return made


def released(dataset: str, flagship: Path) -> str:
    """Which streams the private runs have in their ledgers, and in how many of them."""
    ledgers = [
        {release["stream"] for release in json.loads(run.texts["ledger"])["releases"]}
        for run in held(dataset, flagship)[0]
        if run.folder.split("/")[-3:-1] == ["protofed", "default"]
    ]
    counts = {name: sum(name in streams for streams in ledgers) for name in RELEASES}
    told = [name if n == len(ledgers) else f"{name} ({n} of {len(ledgers)} seeds)" for name, n in counts.items() if n]
    return ", ".join(told) or "nothing"


def headed_lines(packs: Mapping[str, Path], flagship: Path) -> list[str]:
    """Rivals under the head beside themselves without, seed for seed."""
    made = []
    for dataset, pack in packs.items():
        before, after = ({k: users_of(dataset, each, k) for k in ("sampled", "full")} for each in (pack, flagship))
        for name in sorted(after["sampled"]):
            plain = name.replace(" (head)", "")
            if not name.endswith("(head)") or plain not in before["sampled"]:
                continue
            cells = []
            for kind in ("sampled", "full"):
                mine, theirs = after[kind][name], before[kind][plain]
                cells += [value_of(mine), gap_of(mine, theirs[: len(mine)], kind)]
            made.append(f"| {dataset}, {plain} | " + " | ".join(cells) + " |")
    return made
