"""The tables of results in docs/ (PAGES says on which pages), rewritten in place from the committed runs.

A page shows the rows of a table that a reader asks about first; results/tables has every table with more rows whole.

python scripts/results_page.py            # `make report` does it after the exports
"""

import csv
import io
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flagship_tables import dial_lines, headed_lines, private_lines
from packed_tables import (
    OURS,
    Change,
    accuracy_lines,
    cell_lines,
    change_lines,
    cost_lines,
    gap_lines,
    glance_lines,
    noise_lines,
    share_lines,
    sweep_lines,
    warm_up_lines,
    width_lines,
)

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "results"
SEARCHED = ("gowalla_1k", "yelp", "amazon_beauty", "taobao")
MORE = ("gowalla", "amazon_sports", "lastfm_30music", "retailrocket", "movielens", "hm")
WITHOUT_NOISE = "protofed-sp (nodp)"
SHARED_PROMPT = (  # methods whose PEFT variant has rows
    *("full-retrain", "mas", "si", "infer", "er-random", "er-freq", "finetune-last", "ccd", "lwf"),
    *("sail-piw", "reloop", "ewc", "reloop2"),
)
LIBRARY_SIZE = {"prompt-tuning": "", "prefix-tuning": "-prefix", "adapters": "-adapters", "dual-lora": "-lora"}

MOST_ROWS = 10  # of a table on a page
MOST_LOGS = 20  # of one that has a row for each log, and more where there is content
# Rows that are shown before others.
ASKED = (
    WITHOUT_NOISE,
    OURS,
    "personal-memory",
    "full-retrain",
    "fedrap",
    "frozen",
    "popularity",
)
ACCURACY = ("sampled, all", "sampled, novel", "sampled, repeat", "full, all", "full, novel", "HR@10, sampled, all")
COSTS = (
    *("95 %, NDCG@10", "95 %, HR@10", "AF", "BWT", "bytes up", "bytes down"),
    *("shared", "per user", "learn, s"),
)
LEFT_OUT = ("seeds", *ACCURACY)
GAPS = ("sampled, all", "sampled, novel", "full, all", "full, novel")


@dataclass(frozen=True, slots=True)
class Table:
    """A table by how its head begins, what makes its lines, and how many of them its page shows."""

    title: str
    lines: Callable[[], list[str]]
    most: int = MOST_ROWS
    columns: tuple[str, ...] = ()  # those of the page's own head, where it says nothing else


def without_claim(label: str) -> bool:
    """Every row but our private one."""
    return label != OURS


def parts() -> dict[str, str]:
    """ProtoFed-SP whole, then without what experiments/ablations.toml leaves out, in its order."""
    asked = tomllib.loads((ROOT / "experiments" / "ablations.toml").read_text(encoding="utf-8"))
    return {f"protofed-sp/{name}": name for name in ("default", *(variant["name"] for variant in asked["variant"]))}


def overall(dataset: str, pack: Path, export: Path, most: int = MOST_ROWS, costs: int = 0) -> Iterator[Table]:
    """Accuracy and costs of every method."""
    yield Table(f"{dataset}, every method", partial(accuracy_lines, dataset, pack), most, ACCURACY)
    yield Table(f"{dataset}, forgetting and costs", partial(cost_lines, dataset, pack, export), costs, COSTS)


def gaps(dataset: str, pack: Path, most: int) -> Table:
    """The row without noise minus every row without a claim."""
    lines = partial(gap_lines, dataset, pack, WITHOUT_NOISE, without_claim)
    return Table(f"{dataset}, {WITHOUT_NOISE} minus", lines, most, GAPS)


def with_a_shared_prompt() -> list[Change]:
    """Every method that has one: all weights, then its PEFT variant."""
    pack = RESULTS / "overall"
    return [Change(name, "gowalla_1k", (pack, f"{name}/default"), (pack, f"{name}/peft")) for name in SHARED_PROMPT]


def at_library_size() -> list[Change]:
    """Small modules at their usual size, then at that of the prototype library."""
    pack = RESULTS / "overall"
    return [
        Change(f"{dataset}, {name}", dataset, (pack, f"{name}/default"), (pack, f"{name}/library-size{mark}"))
        for dataset in ("gowalla_1k", "yelp")
        for name, mark in LIBRARY_SIZE.items()
    ]


def tables_of_results() -> Iterator[Table]:
    """Those of docs/results.md."""
    pack, export = RESULTS / "overall", RESULTS / "overall.csv"
    for dataset in SEARCHED:
        yield from overall(dataset, pack, export, most=8, costs=5 if dataset == "gowalla_1k" else 0)
        yield Table(f"{dataset}, {OURS} minus", partial(gap_lines, dataset, pack), 5, GAPS)
    yield Table("gowalla_1k, left out", partial(cell_lines, "gowalla_1k", pack, parts()))
    yield Table("taobao, left out", partial(cell_lines, "taobao", pack, parts()), 0, LEFT_OUT)
    yield Table("all weights → a shared prompt", partial(change_lines, with_a_shared_prompt()), 5)
    yield Table("usual size → the library's", partial(change_lines, at_library_size()))
    yield Table("gowalla_1k, noise multiplier", partial(noise_lines, "gowalla_1k", export))
    yield Table("gowalla_1k, setting", partial(sweep_lines, "gowalla_1k", RESULTS / "sensitivity"), 5)


def tables_of_more_logs() -> Iterator[Table]:
    """Those of docs/more_logs.md: no row there is at the private one's price, so the one without noise is compared."""
    pack, export = RESULTS / "more", RESULTS / "more.csv"
    yield Table("six logs", partial(glance_lines, MORE, pack))
    yield Table("movielens, noise multiplier", partial(noise_lines, "movielens", export))
    yield Table("movielens, left out", partial(cell_lines, "movielens", RESULTS / "ablations", parts()), 5)
    for dataset in MORE:
        yield from overall(dataset, pack, export, most=6)
        yield gaps(dataset, pack, 0)


def tables_of_paper_size() -> Iterator[Table]:
    """Those of docs/paper_size.md."""
    pack, export = RESULTS / "paper_size", RESULTS / "paper_size.csv"
    yield Table("d = 64 → 256", partial(width_lines, SEARCHED, RESULTS / "overall", pack))
    yield Table("warm-up, d = 64 → 256", partial(warm_up_lines, SEARCHED, RESULTS / "overall", pack))
    for dataset in SEARCHED:
        yield from overall(dataset, pack, export, most=8)
        yield gaps(dataset, pack, 5)


def tables_of_index() -> Iterator[Table]:
    """That of docs/index.md: what wins at which share setting."""
    yield Table("log", partial(share_lines, SEARCHED, (RESULTS / "overall.csv", RESULTS / "flagship.csv")))


def tables_of_head() -> Iterator[Table]:
    """Those of docs/head.md: the dial on every log, beside the strongest rivals without a head and under one."""
    packs = {name: RESULTS / ("overall" if name in SEARCHED else "more") for name in (*SEARCHED, *MORE)}
    for kind, title in (("sampled", "sampled, ε = 0"), ("full", "full ranking, ε = 0")):
        yield Table(title, partial(dial_lines, packs, RESULTS / "flagship", kind), MOST_LOGS)
    yield Table("ε = 3.4", partial(private_lines, packs, RESULTS / "flagship"), MOST_LOGS)
    yield Table("under the head", partial(headed_lines, packs, RESULTS / "flagship"), MOST_LOGS)


PAGES = {
    "index.md": tables_of_index,
    "head.md": tables_of_head,
    "results.md": tables_of_results,
    "more_logs.md": tables_of_more_logs,
    "paper_size.md": tables_of_paper_size,
}


def rewritten(name: str) -> tuple[str, dict[str, str]]:
    """The page with its tables made anew, and each table that has more rows than are shown, as CSV by its file."""
    page = (DOCS / name).read_text(encoding="utf-8")
    whole: dict[str, str] = {}
    for table in PAGES[name]():
        lines, head = table.lines(), heading(table, page)
        if len(lines) > table.most:
            whole[file_of(name, table.title)] = to_csv([head, *lines])
        if table.most:
            page = with_lines(page, table.title, leading(lines, table.most), name)
    return page, whole


def heading(table: Table, page: str) -> str:
    """The line of Markdown above a table's rows."""
    if table.columns:
        return f"| {table.title} | {' | '.join(table.columns)} |"
    _, head, rest = page.partition(f"| {table.title} |")
    return head + rest.partition("\n")[0]


def with_lines(page: str, title: str, lines: list[str], name: str) -> str:
    """The page with the rows of one table."""
    before, head, rest = page.partition(f"| {title} |")
    if not head:
        raise SystemExit(f"docs/{name} has no table that begins with | {title} |")
    old, _, after = rest.partition("\n\n")
    top = old.splitlines()[:2]  # what is left of the head, and the rule below it
    return "\n".join([before + head + top[0], top[1], *lines]) + "\n\n" + after


def leading(lines: list[str], most: int) -> list[str]:
    """The best row, those that are asked about and the next best ones, in their order."""
    labels = [cells_of(line)[0] for line in lines]
    asked = [lines[labels.index(label)] for label in ASKED if label in labels]
    chosen = list(dict.fromkeys([*lines[:1], *asked, *lines]))[:most]
    return [line for line in lines if line in chosen]


def cells_of(line: str) -> list[str]:
    """The cells of a line of Markdown, without what makes them bold."""
    return [cell.strip().replace("**", "") for cell in line.strip("|").split(" | ")]


def to_csv(lines: list[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(map(cells_of, lines))
    return buffer.getvalue()


def file_of(name: str, title: str) -> str:
    """Where a table is whole, below results/tables."""
    return f"{name.removesuffix('.md')}/{re.sub(r'[^a-z0-9_]+', '-', title.lower()).strip('-')}.csv"


if __name__ == "__main__":
    for name in PAGES:
        page, whole = rewritten(name)
        (DOCS / name).write_text(page, encoding="utf-8")
        for file, text in whole.items():
            (RESULTS / "tables" / file).parent.mkdir(parents=True, exist_ok=True)
            (RESULTS / "tables" / file).write_text(text, encoding="utf-8")
