"""The home page's table says what the exported runs say: who leads each log, at ε = 3.4 and sharing nothing."""

import csv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_of_the_home_page_is_that_of_the_exported_runs():
    lines = []
    for name in ("overall", "flagship"):
        with (ROOT / "results" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            lines += [line for line in csv.DictReader(file) if "=" not in line["method"]]
    private = {(line["dataset"], line["method"]) for line in lines if line["quantity"] == "ε"}
    rows = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("| log |")[2].partition("\n\n")[0]
    for row in rows.splitlines()[2:]:
        dataset, *cells = row.strip("| ").split(" | ")
        for place, cell in enumerate(cells):
            subset = "all" if place < 3 else "novel"
            values = {
                line["method"]: float(line["mean"])
                for line in lines
                if [line[key] for key in ("dataset", "table", "quantity", "candidates", "subset")]
                == [dataset, "accuracy", "ndcg@10", "sampled", subset]
                and (place in (0, 3) or (dataset, line["method"]) in private or place == 2)
                and (place != 2 or line["method"] == "frozen-no-new-rows" or "share nothing" in line["method"])
            }
            name, _, value = cell.rpartition(" ")
            assert values[name] == max(values.values())
            assert float(value) == round(values[name], 3)
    assert len(rows.splitlines()) == 2 + 4
