"""docs/content.md: its tables hold the numbers of results/content.csv."""

import csv
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).parents[2]
TABLES = (ROOT / "docs" / "content.md").read_text(encoding="utf-8").partition("<!-- content -->")[2]
COLUMNS = (
    *(("sampled", "all"), ("sampled", "known_item"), ("sampled", "new_item"), ("sampled", "no_row")),
    *(("full", "all"), ("full", "no_row")),
)


def test_every_cell_is_the_mean_over_seeds_of_its_numbers():
    numbers, seeds = defaultdict(list), defaultdict(set)
    with (ROOT / "results" / "content.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            numbers[row["log"], row["rows"], row["candidates"], row["subset"]].append(float(row["ndcg@10"]))
            seeds[row["log"]].add(row["seed"])
    told = 0
    for table in TABLES.partition("<!-- end -->")[0].strip().split("\n\n"):
        head, _, *lines = table.splitlines()
        log, listed = re.match(r"\| (\w+), seeds ([\d, ]+) \|", head).groups()
        assert set(listed.split(", ")) == seeds[log]
        for line in lines:
            name, *cells = line.strip("| ").split(" | ")
            for cell, column in zip(cells, COLUMNS, strict=False):
                values = numbers[log, name, *column]
                assert cell == f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")
                told += 1
    assert told == len(numbers)
