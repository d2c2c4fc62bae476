"""The tables of docs/results.md, docs/more_logs.md and docs/paper_size.md, rewritten in place from the committed runs.

python scripts/results_page.py            # `make report` does it after the exports
"""

import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

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
    patience_lines,
    searched_lines,
    sweep_lines,
    warm_up_lines,
    width_lines,
)

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "results"
SEARCHED = ("gowalla_1k", "yelp", "amazon_beauty", "taobao")
MORE = ("gowalla", "amazon_sports", "lastfm_30music", "retailrocket", "movielens", "hm")
SHORT_EPOCHS = ("retailrocket", "movielens", "hm")  # of MORE, those that were also run with a longer patience
WITHOUT_NOISE = "protofed-sp (nodp)"
MET_AT_ONCE = ("hm", "retailrocket")  # of those run with items that count as met at once, two in detail
REPEATING = ("gowalla_1k", "yelp", "taobao", "gowalla", "lastfm_30music", *MET_AT_ONCE)  # all of those
AT_ONCE = {
    "personal-memory/default": "personal-memory",
    "protofed-sp/nodp": WITHOUT_NOISE,
    "protofed-sp/nodp-at-once": f"{WITHOUT_NOISE}, at once",
    "protofed-sp/default": OURS,
    "protofed-sp/at-once": f"{OURS}, at once",
}

SHARED_PROMPT = (  # methods whose PEFT variant has rows
    *("full-retrain", "mas", "si", "infer", "er-random", "er-freq", "finetune-last", "ccd", "lwf"),
    *("sail-piw", "reloop", "ewc", "reloop2"),
)
LIBRARY_SIZE = {"prompt-tuning": "", "prefix-tuning": "-prefix", "adapters": "-adapters", "dual-lora": "-lora"}
REWARMED = ("full-retrain", "personal-memory", "si", "finetune-last", "frozen")  # and ProtoFed-SP

Table = tuple[str, Callable[[], list[str]]]  # how its head begins, and its lines


def without_claim(label: str) -> bool:
    """Every row but our private one."""
    return label != OURS


def parts() -> dict[str, str]:
    """ProtoFed-SP whole, then without what experiments/ablations.toml leaves out, in its order."""
    asked = tomllib.loads((ROOT / "experiments" / "ablations.toml").read_text(encoding="utf-8"))
    return {f"protofed-sp/{name}": name for name in ("default", *(variant["name"] for variant in asked["variant"]))}


def overall(dataset: str, pack: Path, export: Path) -> Iterator[Table]:
    """Accuracy and costs of every method."""
    yield f"{dataset}, every method", partial(accuracy_lines, dataset, pack)
    yield f"{dataset}, forgetting and costs", partial(cost_lines, dataset, pack, export)


def with_a_shared_prompt() -> list[Change]:
    """Every method that has one: all weights, then its PEFT variant."""
    pack = RESULTS / "pack"
    return [Change(name, "gowalla_1k", (pack, f"{name}/default"), (pack, f"{name}/peft")) for name in SHARED_PROMPT]


def at_library_size() -> list[Change]:
    """Small modules at their usual size, then at that of the prototype library."""
    pack = RESULTS / "pack"
    return [
        Change(f"{dataset}, {name}", dataset, (pack, f"{name}/default"), (pack, f"{name}/library-size{mark}"))
        for dataset in ("gowalla_1k", "yelp")
        for name, mark in LIBRARY_SIZE.items()
    ]


def met_at_once() -> list[Change]:
    """ProtoFed-SP without and with noise, before and after items count as met at once."""
    pack, kinds = RESULTS / "at_once", (("nodp", "nodp-at-once", "nodp"), ("default", "at-once", "reference"))
    return [
        Change(f"{dataset}, {mode}", dataset, (pack, f"protofed-sp/{was}"), (pack, f"protofed-sp/{now}"))
        for dataset in REPEATING
        for was, now, mode in kinds
    ]


def rewarmed() -> list[Change]:
    """Rows at the paper's width, before and after the warm-up was searched."""
    wide, after = RESULTS / "paper_size", RESULTS / "warm_up"
    cells = {name: (f"{name}/paper", f"{name}/rewarmed") for name in REWARMED}
    cells |= {WITHOUT_NOISE: ("protofed-sp/paper-nodp", "protofed-sp/rewarmed-nodp")}
    cells |= {OURS: ("protofed-sp/paper", "protofed-sp/rewarmed")}
    return [Change(name, "gowalla_1k", (wide, was), (after, now)) for name, (was, now) in cells.items()]


def tables_of_results() -> Iterator[Table]:
    """Those of docs/results.md."""
    pack, export = RESULTS / "pack", RESULTS / "overall.csv"
    for dataset in SEARCHED:
        yield from overall(dataset, pack, export)
        yield f"{dataset}, {OURS} minus", partial(gap_lines, dataset, pack)
    for dataset in ("gowalla_1k", "taobao"):
        yield f"{dataset}, left out", partial(cell_lines, dataset, pack, parts())
    yield "all weights → a shared prompt", partial(change_lines, with_a_shared_prompt())
    yield "usual size → the library's", partial(change_lines, at_library_size())
    yield "gowalla_1k, noise multiplier", partial(noise_lines, "gowalla_1k", export)
    yield "gowalla_1k, setting", partial(sweep_lines, "gowalla_1k", RESULTS / "sensitivity")


def tables_of_more_logs() -> Iterator[Table]:
    """Those of docs/more_logs.md: no row there is at the private one's price, so the one without noise is compared."""
    pack, export = RESULTS / "more", RESULTS / "more.csv"
    yield "six logs", partial(glance_lines, MORE, pack)
    for dataset in SHORT_EPOCHS:
        yield f"{dataset}, patience", partial(patience_lines, dataset, pack, RESULTS / "patience")
    yield "movielens, noise multiplier", partial(noise_lines, "movielens", export)
    yield "movielens, left out", partial(cell_lines, "movielens", RESULTS / "ablations", parts())
    yield "as it was → met at once", partial(change_lines, met_at_once())
    for dataset in MET_AT_ONCE:
        yield f"{dataset}, met at once", partial(cell_lines, dataset, RESULTS / "at_once", AT_ONCE)
    for dataset in MORE:
        yield from overall(dataset, pack, export)
        yield f"{dataset}, {WITHOUT_NOISE} minus", partial(gap_lines, dataset, pack, WITHOUT_NOISE, without_claim)


def tables_of_paper_size() -> Iterator[Table]:
    """Those of docs/paper_size.md."""
    pack, export = RESULTS / "paper_size", RESULTS / "paper_size.csv"
    yield "d = 64 → 256", partial(width_lines, SEARCHED, RESULTS / "pack", pack)
    yield "warm-up, d = 64 → 256", partial(warm_up_lines, SEARCHED, RESULTS / "pack", pack)
    searched = ("gowalla_1k", "yelp", "amazon_beauty")
    yield "warm-up at d = 256", partial(searched_lines, searched, (pack, RESULTS / "warm_up"))
    yield "searched at d = 256", partial(change_lines, rewarmed())
    for dataset in SEARCHED:
        yield from overall(dataset, pack, export)
        yield f"{dataset}, {WITHOUT_NOISE} minus", partial(gap_lines, dataset, pack, WITHOUT_NOISE, without_claim)


PAGES = {"results.md": tables_of_results, "more_logs.md": tables_of_more_logs, "paper_size.md": tables_of_paper_size}


def rewritten(name: str) -> str:
    """The page with its tables made anew."""
    page = (DOCS / name).read_text(encoding="utf-8")
    for title, lines in PAGES[name]():
        before, head, rest = page.partition(f"| {title} |")
        if not head:
            raise SystemExit(f"docs/{name} has no table that begins with | {title} |")
        old, _, after = rest.partition("\n\n")
        top = old.splitlines()[:2]  # what is left of the head, and the rule below it
        page = "\n".join([before + head + top[0], top[1], *lines()]) + "\n\n" + after
    return page


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(rewritten(name), encoding="utf-8")
