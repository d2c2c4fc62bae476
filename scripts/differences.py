"""One row of a report minus others: NDCG@10 with 95 % paired bootstrap intervals over users, seeds averaged first.

python scripts/differences.py results/overall gowalla_1k "protofed-sp (reference)" frozen "finetune-last (private)"
"""

import argparse
from pathlib import Path

import numpy as np

from protofed.evaluation.significance import bootstrap_difference
from protofed.report.intervals import per_user
from protofed.report.runs import find_runs
from protofed.report.sections import group
from protofed.seeds import seed_of

METRIC = "ndcg@10"
COLUMNS = (("sampled", "all"), ("sampled", "novel"), ("full", "all"), ("full", "novel"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, help="run folders or a pack")
    parser.add_argument("dataset")
    parser.add_argument("row")
    parser.add_argument("others", nargs="*", help="rows to compare with; all without it")
    asked = parser.parse_args()
    sections = {section.title: section for section in group(find_runs(asked.runs)[0])}
    if asked.dataset not in sections:
        parser.error(f"no data set {asked.dataset!r}; there are: {'; '.join(sections)}")
    section = sections[asked.dataset]
    rows = {row.label: row.runs for row in section.rows}
    others = asked.others or [label for label in rows if label != asked.row]
    if unknown := [label for label in (asked.row, *others) if label not in rows]:
        parser.error(f"no row {unknown[0]!r} on {asked.dataset}; there are: {'; '.join(rows)}")
    print(f"| {asked.row} minus | " + " | ".join(f"{c}, {s}" for c, s in COLUMNS) + " |\n|---|---|---|---|---|")
    tables = {column: per_user({name: rows[name] for name in (asked.row, *others)}, *column)[0] for column in COLUMNS}
    for other in others:
        cells = []
        for column, found in tables.items():
            rng = np.random.default_rng(seed_of(0, "differences", *column))
            gap = bootstrap_difference(found[asked.row, METRIC], found[other, METRIC], rng)
            cells.append(f"{gap.mean:+.3f} [{gap.low:.3f}, {gap.high:.3f}]")
        print(f"| {other} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
