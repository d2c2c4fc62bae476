"""What content does at ε = 0: `frozen-no-new-rows` with rows from what is known of items, tested by kind of item.

python scripts/content_evidence.py measure hm --seed 0 --root data --out runs/content
python scripts/content_evidence.py tables --out runs/content    # into docs/content.md and results/content.csv

A warm-up is trained once; the backbone then answers the test queries of every slice with each kind of rows. The mean
row and the shared rule (`frozen`, which reads everybody's raw events) are the packed runs of results/.
"""

import argparse
import csv
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from packed_tables import by_user, held, short

from protofed.backbone.content import with_nearest
from protofed.backbone.pretrain import cached_backbone
from protofed.backbone.sasrec import SASRec
from protofed.cli.run import CACHE, item_table, load, settle
from protofed.config import RunConfig
from protofed.evaluation.ranking import ndcg, rank_among, rank_of_positive
from protofed.evaluation.significance import PerUser, average_seeds, bootstrap_difference
from protofed.experiments.evaluate import CANDIDATES
from protofed.features.build import content_of, with_gaps
from protofed.features.content import Content
from protofed.seeds import seed_of
from protofed.slices.stream import SliceStream

ROOT = Path(__file__).parents[1]
LOGS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {  # what is known of items, the pack, settings
    "gowalla_1k": ("place", "overall", ()),
    "gowalla": ("place,text", "more", ()),
    "movielens": ("category,text", "more", ()),
    "hm": ("category,text", "more", ("stream.n_slices=1",)),
}
PACKED = {"mean row": "frozen-no-new-rows/default", "shared rule, raw": "frozen/default"}
SUBSETS = ("all", "known_item", "new_item", "unseen_item", "no_row")
COLUMNS = (
    ("sampled", "all", "all"),
    ("sampled", "known_item", "known items"),
    ("sampled", "new_item", "new items"),
    ("sampled", "no_row", "without a row"),
    ("full", "all", "full, all"),
    ("full", "no_row", "full, without a row"),
)
CHUNK = 500
Values = dict[str, np.ndarray]  # NDCG@10 of every test query of slices 1..T, by row and kind of candidates


def measured(log_name: str, seed: int, root: Path, cache: Path, kinds: list[str]) -> Values:
    """The values of every kind of rows on one log, and what was asked."""
    features, _, settings = LOGS[log_name]
    config = settle({"dataset": log_name, "method": "frozen-no-new-rows", "seed": seed}, None, settings)
    log = load(config, root)
    data, items = SliceStream(log, config.stream), item_table(log_name, root)
    everything = replace(config, content=replace(config.content, features=features)).content
    whole = content_of(everything, log, items, cache)
    gaps = Content(tuple(with_gaps(m, log, 0.5) for m in whole.modalities))
    found: Values = {}
    for kind in kinds:
        for name, content in variants(whole, gaps).items():
            model = backbone(replace(config, content=replace(config.content, kind=kind)), data, content, cache)
            found |= {f"{kind}, {name}|{asked}": values for asked, values in answers(model, data, config).items()}
            print(f"{log_name}, seed {seed}: {kind}, {name}", flush=True)
    return found | questions(data)


def variants(whole: Content, gaps: Content) -> dict[str, Content]:
    """Each feature alone, all together, and all with half of them missing."""
    together = " + ".join(m.name for m in whole.modalities)
    alone = {m.name: Content((m,)) for m in whole.modalities}
    return alone | {together: whole, f"{together}, half missing": gaps}


def backbone(config: RunConfig, data: SliceStream, content: Content, cache: Path) -> SASRec:
    tower = content if config.content.kind == "tower" else None
    model, _ = cached_backbone(config, data, cache, device=torch.device("cpu"), content=tower)
    return model if tower is not None else with_nearest(model, content, config.content.neighbours)


@torch.no_grad()
def answers(model: SASRec, data: SliceStream, config: RunConfig) -> Values:
    """NDCG@10 among 99 sampled items and among all, query by query."""
    found: dict[str, list[torch.Tensor]] = {"sampled": [], "full": []}
    for index in range(1, data.n_slices + 1):
        asked = data.query_set(index, "test")
        for chunk in np.array_split(np.arange(len(asked)), max(1, len(asked) // CHUNK)):
            queries = data.queries(asked, chunk, config.backbone.history_length)
            scores, positives = model.scores(model.last_hidden(queries.tokens), queries.n_items), asked.positives[chunk]
            found["sampled"].append(ndcg(rank_among(scores, positives, asked.negatives[chunk]), 10))
            found["full"].append(ndcg(rank_of_positive(scores, positives), 10))
    return {kind: torch.cat(parts).numpy() for kind, parts in found.items()}


def questions(data: SliceStream) -> Values:
    """Slice, user and subsets of the same queries."""
    asked = [data.query_set(index, "test") for index in range(1, data.n_slices + 1)]
    flags = {name: np.concatenate([each.subsets[name] for each in asked]) for name in SUBSETS if name != "no_row"}
    flags["no_row"] = torch.cat([each.positives for each in asked]).numpy() >= data.n_train_items(0)
    slices = np.concatenate([np.full(len(each), each.slice_index) for each in asked])
    return {"slice": slices, "user": torch.cat([each.users for each in asked]).numpy(), **flags}


def packed(log_name: str, seeds: list[int], asked: Values) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    """The values of the packed rows on the same queries."""
    runs, streams = held(log_name, ROOT / "results" / LOGS[log_name][1])
    found = {}
    for run in runs:
        for name, cell in PACKED.items():
            for seed in seeds:
                if run.folder.endswith(f"{cell}/seed-{seed}"):
                    there = streams[run.queries]["slice"].to_numpy() > 0
                    same = streams[run.queries]["new_item"].to_numpy()[there]
                    if not np.array_equal(same, asked["new_item"]):
                        raise SystemExit(f"{log_name}: {run.folder} answered other queries")
                    ranks = dict(zip(CANDIDATES, run.ranks, strict=True))
                    values = {k: ndcg(torch.from_numpy(ranks[k].astype(np.int64)), 10) for k in ("sampled", "full")}
                    found[name, seed] = {kind: value.numpy()[there] for kind, value in values.items()}
    return found


def headline(values: np.ndarray, asked: Values, subset: str) -> float:
    """Mean of A[t, t] over the slices that have such queries."""
    chosen = asked[subset].astype(bool)
    return mean(float(values[chosen & (asked["slice"] == t)].mean()) for t in np.unique(asked["slice"][chosen]))


def shown(values: list[float]) -> str:
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def gap(mine: list[np.ndarray], theirs: list[np.ndarray], asked: Values, subset: str, name: str) -> str:
    """One row minus another, seeds averaged; 95 % interval over users."""
    counts = by_user(np.ones(len(asked["slice"])), asked, subset).astype(np.int64)
    tables: list[PerUser] = [
        average_seeds(np.stack([by_user(values, asked, subset) for values in rows]), counts) for rows in (mine, theirs)
    ]
    found = bootstrap_difference(*tables, np.random.default_rng(seed_of(0, "content", name)))
    return f"{short(found.mean, '+')} [{short(found.low)}, {short(found.high)}]"


def tables(out: Path) -> tuple[list[str], list[list[object]]]:
    """The lines of the page, and every number seed by seed."""
    lines: list[str] = []
    numbers: list[list[object]] = []
    for log_name in LOGS:
        files = {int(re.findall(r"\d+", f.stem)[-1]): f for f in sorted(out.glob(f"{log_name}-seed-*.npz"))}
        if not files:
            continue
        loaded = {seed: dict(np.load(file)) for seed, file in files.items()}
        asked = next(iter(loaded.values()))
        rows: dict[str, dict[int, dict[str, np.ndarray]]] = {name: {} for name in PACKED}
        for (name, seed), values in packed(log_name, list(files), asked).items():
            rows[name][seed] = values
        for seed, values in loaded.items():
            for key in (key for key in values if key.endswith("|sampled")):
                name = key.removesuffix("|sampled")
                rows.setdefault(name, {})[seed] = {k: values[f"{name}|{k}"] for k in ("sampled", "full")}
        counts = (f"{title} ({int(asked[subset].sum()):,})" for _, subset, title in COLUMNS)
        titles = [f"{log_name}, seeds {', '.join(map(str, files))}", *counts, *(f"minus the {name}" for name in PACKED)]
        lines.append(f"| {' | '.join(titles)} |")
        lines += ["|" + "---|" * (3 + len(COLUMNS))]
        for name, by_seed in rows.items():
            cells = []
            for kind, subset, _ in COLUMNS:
                each = [headline(values[kind], asked, subset) for values in by_seed.values()]
                cells.append(shown(each))
                numbers += [
                    [log_name, name, seed, kind, subset, f"{v:.6f}"] for seed, v in zip(by_seed, each, strict=True)
                ]
            for other in PACKED:
                both = [seed for seed in by_seed if seed in rows[other]]
                pair = [[r[seed]["sampled"] for seed in both] for r in (by_seed, rows[other])]
                cells.append("–" if name == other else gap(*pair, asked, "new_item", f"{log_name} {name} {other}"))
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return lines, numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("measure")
    measure.add_argument("log", choices=LOGS)
    measure.add_argument("--seed", type=int, default=0)
    measure.add_argument("--root", type=Path, default=Path("data"))
    measure.add_argument("--cache", type=Path, default=CACHE)
    measure.add_argument("--kinds", default="nearest,tower")
    for command in (measure, commands.add_parser("tables")):
        command.add_argument("--out", type=Path, default=Path("runs/content"))
    asked = parser.parse_args()
    if asked.command == "measure":
        torch.set_num_threads(1)
        asked.out.mkdir(parents=True, exist_ok=True)
        found = measured(asked.log, asked.seed, asked.root, asked.cache, asked.kinds.split(","))
        file = asked.out / f"{asked.log}-seed-{asked.seed}.npz"
        np.savez_compressed(file, **((dict(np.load(file)) if file.is_file() else {}) | found))
        return
    lines, numbers = tables(asked.out)
    page = ROOT / "docs" / "content.md"
    before, _, rest = page.read_text(encoding="utf-8").partition("<!-- content -->\n")
    _, _, after = rest.partition("<!-- end -->\n")
    page.write_text(before + "<!-- content -->\n" + "\n".join(lines) + "<!-- end -->\n" + after, encoding="utf-8")
    with (ROOT / "results" / "content.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["log", "rows", "seed", "candidates", "subset", "ndcg@10"])
        writer.writerows(numbers)


if __name__ == "__main__":
    main()
