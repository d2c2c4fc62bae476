"""Tables and the README's figure from the committed results: results in, Markdown and SVG out, no number typed by hand.

python scripts/headline.py results/gowalla_1k/small.parquet --figure docs/accuracy.svg
python scripts/headline.py --collect runs/ results/gowalla_1k/small.parquet
"""

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from protofed.config import read_toml
from protofed.methods.labels import run_label

COLUMNS = (("sampled", "all"), ("sampled", "novel"), ("sampled", "repeat"), ("full", "all"), ("full", "novel"))
STRATA = ("new_item", "known_item", "new_user", "returning", "empty_history", "unseen_item")


def collect(runs: Path) -> pa.Table:
    """The test rows of every finished run: NDCG@10 and HR@10 on the diagonal, all of A[s, t] for all events."""
    tables = []
    for folder in sorted(path.parent for path in runs.rglob("metrics.parquet")):
        config, table = read_toml(folder / "config.toml"), pq.read_table(folder / "metrics.parquet")
        diagonal = pc.equal(table["slice_trained"], table["slice_tested"])
        whole = pc.and_(pc.equal(table["subset"], "all"), pc.is_in(table["candidates"], pa.array(["sampled", "full"])))
        metric = pc.is_in(table["metric"], pa.array(["ndcg@10", "hr@10"]))
        table = table.filter(pc.and_(pc.and_(pc.equal(table["split"], "test"), metric), pc.or_(diagonal, whole)))
        names = (
            pa.array([run_label(config)] * len(table)),
            pa.array(np.full(len(table), config.seed, dtype=np.int32)),
        )
        tables.append(table.drop_columns(["split"]).add_column(0, "method", names[0]).add_column(1, "seed", names[1]))
    return pa.concat_tables(tables)


def diagonal_means(rows: list[dict[str, object]], metric: str) -> dict[tuple[str, str, str], list[float]]:
    """Per method, candidates and subset: the mean of A[t, t] over t = 1..T, one value per seed."""
    values = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["metric"] == metric and row["slice_trained"] == row["slice_tested"] and row["slice_trained"] > 0:
            values[row["method"], row["candidates"], row["subset"]][row["seed"]].append(row["value"])
    return {key: [float(np.mean(v)) for v in seeds.values()] for key, seeds in values.items()}


def table(means: dict[tuple[str, str, str], list[float]], columns: tuple[tuple[str, str], ...]) -> str:
    """Markdown, best first."""
    methods = sorted({key[0] for key in means}, key=lambda m: -np.mean(means[m, "sampled", "all"]))
    lines = ["| method | " + " | ".join(f"{c}, {s}" for c, s in columns) + " |", "|---|" + "---|" * len(columns)]
    for method in methods:
        cells = [means.get((method, c, s), [np.nan]) for c, s in columns]
        shown = [f"{np.mean(v):.3f} ± {np.std(v, ddof=1):.3f}" if len(v) > 1 else f"{np.mean(v):.3f}" for v in cells]
        lines.append(f"| {method} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def figure(rows: list[dict[str, object]], path: Path) -> None:
    """Accuracy right after each slice, one line per method, mean over seeds."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "protofed", "font.size": 10, "svg.fonttype": "none"})
    curves = defaultdict(lambda: defaultdict(list))
    for row in rows:
        wanted = (row["metric"], row["candidates"], row["subset"]) == ("ndcg@10", "sampled", "all")
        wanted = wanted and ", without " not in str(row["method"])  # ablations have a table, not a line
        if wanted and row["slice_trained"] == row["slice_tested"] and row["slice_trained"] > 0:
            curves[row["method"]][row["slice_tested"]].append(row["value"])
    plot, axes = plt.subplots(figsize=(7.2, 3.2))
    for method, slices in sorted(curves.items(), key=lambda item: -np.mean(list(item[1].values()))):
        axes.plot(list(slices), [np.mean(v) for v in slices.values()], marker="o", markersize=3, label=method)
    axes.set(xlabel="slice t", ylabel="NDCG@10 after slice t", ylim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    plot.tight_layout()
    plot.savefig(path, facecolor="white", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--collect", type=Path, metavar="RUNS", help="first gather finished runs into RESULTS")
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    if arguments.collect:
        pq.write_table(collect(arguments.collect), arguments.results, compression="zstd")
    rows = pq.read_table(arguments.results).to_pylist()
    print(table(diagonal_means(rows, "ndcg@10"), COLUMNS), end="\n\n")
    print(table(diagonal_means(rows, "hr@10"), COLUMNS), end="\n\n")
    strata = (*(("sampled", subset) for subset in STRATA), ("sampled_hard", "repeat"), ("full_unseen", "all"))
    print(table(diagonal_means(rows, "ndcg@10"), strata))
    if arguments.figure:
        figure(rows, arguments.figure)


if __name__ == "__main__":
    main()
