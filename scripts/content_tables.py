"""The tables of docs/content.md, from runs of experiments/content.toml and content-alone.toml in a store.

protofed pack runs/content results/content
python scripts/content_tables.py results/content
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from packed_tables import by_user, held, short

from protofed.evaluation.ranking import ndcg
from protofed.evaluation.significance import PerUser, average_seeds, bootstrap_difference
from protofed.experiments.evaluate import CANDIDATES
from protofed.seeds import seed_of

LOGS = ("gowalla_1k", "gowalla", "movielens", "hm")
KINDS = (  # candidates and subset, and how a table calls them
    ("sampled", "all", "all"),
    ("sampled", "known_item", "known items"),
    ("sampled", "new_item", "new items"),
    ("sampled", "unseen_item", "unseen items"),
    ("full", "all", "full, all"),
    ("full", "new_item", "full, new items"),
)
NEW = ("sampled", "new_item")
BARE, SHARED = "frozen-no-new-rows", "frozen"
ID_ONLY = "id-only"


@dataclass(frozen=True, slots=True)
class Row:
    """The runs of one method and variant: of each seed, every query's NDCG@10 by kind of candidates."""

    method: str
    variant: str
    values: dict[int, dict[str, np.ndarray]]  # by seed
    asked: dict[str, np.ndarray]

    @property
    def label(self) -> str:
        return f"{self.method} | {self.variant.replace('default', 'nearest')}"


def rows_of(dataset: str, pack: Path) -> dict[tuple[str, str], Row]:
    """The rows of a log, by method and variant."""
    runs, streams = held(dataset, pack)
    found: dict[tuple[str, str], Row] = {}
    for run in runs:
        method, variant, seed = run.folder.split("/")[-3:]
        queries = streams[run.queries]
        asked = {name: queries[name].to_numpy() for name in queries.column_names}
        ranks = dict(zip(CANDIDATES, run.ranks, strict=True))
        values = {
            kind: ndcg(torch.from_numpy(ranks[kind].astype(np.int64)), 10).numpy() for kind in ("sampled", "full")
        }
        row = found.setdefault((method, variant), Row(method, variant, {}, asked))
        row.values[int(seed.removeprefix("seed-"))] = values
    return found


def headline(row: Row, candidates: str, subset: str) -> list[float]:
    """Mean of A[t, t] over the slices that have such queries, seed by seed."""
    chosen, at = row.asked[subset].astype(bool), row.asked["slice"]
    slices = [t for t in np.unique(at) if t > 0 and (chosen & (at == t)).any()]
    return [
        mean(float(values[candidates][chosen & (at == t)].mean()) for t in slices)
        for _, values in sorted(row.values.items())
    ]


def queries_of(row: Row, subset: str) -> int:
    return int((row.asked[subset].astype(bool) & (row.asked["slice"] > 0)).sum())


def per_user(row: Row, candidates: str, subset: str, seeds: Sequence[int]) -> PerUser:
    sums = np.stack([by_user(row.values[seed][candidates], row.asked, subset) for seed in seeds])
    counts = by_user(np.ones(len(row.asked["slice"])), row.asked, subset).astype(np.int64)
    return average_seeds(sums, counts)


def gap(row: Row, other: Row, candidates: str, subset: str) -> str:
    """The row minus the other, on the seeds that both have; 95 % interval over users."""
    seeds = sorted(set(row.values) & set(other.values))
    if not seeds:
        return "–"
    tables = [per_user(each, candidates, subset, seeds) for each in (row, other)]
    rng = np.random.default_rng(seed_of(0, "content", row.label, other.label))
    found = bootstrap_difference(*tables, rng)
    return f"{short(found.mean, '+')} [{short(found.low)}, {short(found.high)}]"


def shown(values: Sequence[float]) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


def accuracy(dataset: str, rows: Sequence[Row]) -> list[str]:
    counts = (f"{title} ({queries_of(rows[0], subset):,})" for _, subset, title in KINDS)
    lines = [f"| {dataset} | items without a row | seeds | {' | '.join(counts)} |", "|" + "---|" * (3 + len(KINDS))]
    for row in rows:
        cells = " | ".join(shown(headline(row, candidates, subset)) for candidates, subset, _ in KINDS)
        lines.append(f"| {row.label} | {len(row.values)} | {cells} |")
    return lines


def tests(dataset: str, found: dict[tuple[str, str], Row]) -> list[str]:
    """At ε = 0: what content adds to the mean row, and where that leaves it beside the shared rule."""
    lines = []
    for (method, variant), row in found.items():
        if method == BARE and variant != ID_ONLY and (BARE, ID_ONLY) in found:
            against = [found.get(key) for key in ((BARE, ID_ONLY), (SHARED, ID_ONLY))]
            cells = " | ".join("–" if other is None else gap(row, other, *NEW) for other in against)
            seeds = len(set(row.values) & set(found[BARE, ID_ONLY].values))
            lines.append(f"| {dataset} | {row.label.partition(' | ')[2]} | {seeds} | {cells} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path)
    pack = parser.parse_args().pack
    gaps = []
    for dataset in LOGS:
        try:
            found = dict(sorted(rows_of(dataset, pack).items()))
        except FileNotFoundError:
            continue
        if found:
            print("\n".join(accuracy(dataset, list(found.values()))), end="\n\n")
            gaps += tests(dataset, found)
    print(
        "| log | rows of new items | seeds | minus the mean row | minus the shared rule, raw |\n|---|---|---|---|---|"
    )
    print("\n".join(gaps))


if __name__ == "__main__":
    main()
