"""The parity table in Markdown from the committed records: `table.py results/backbone_parity/results.csv`."""

import csv
import statistics
import sys
from collections import defaultdict
from pathlib import Path


def main(path: Path) -> None:
    found: dict[tuple[str, str, str], dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    epochs = defaultdict(set)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = (row["side"], row["variant"], row["dropout"])
            found[key][row["split"], row["queries"]].append(float(row["ndcg10"]))
            epochs[key].add((row["seed"], int(row["epochs"])))
    columns = (("val", "all"), ("test", "all"), ("test", "known_target"))
    print("| side | loss | dropout | epochs | validation | test | test, target has a train event |")
    print("|---|---|---|---|---|---|---|")
    for (side, variant, dropout), values in found.items():
        cells = [f"{statistics.mean(values[c]):.4f} ± {statistics.stdev(values[c]):.4f}" for c in columns]
        last = sorted(epoch for _, epoch in epochs[side, variant, dropout])
        print(f"| {side} | {variant} | {dropout} | {last[0]}–{last[-1]} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
