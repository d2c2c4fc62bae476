"""`protofed demo`: the whole path on one log, from slices to a report."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from protofed.cli.bench import COLUMNS, LABELS
from protofed.cli.progress import LOADING, shown
from protofed.cli.run import CACHE, load, print_promise, promise_of, settle, surroundings
from protofed.config import RunConfig
from protofed.errors import check_installed
from protofed.methods.names import FLAGSHIP, OURS

if TYPE_CHECKING:
    import pyarrow as pa

    from protofed.data.interactions import InteractionLog

METHODS: Mapping[str, Mapping[str, object]] = {  # by the folder of the run
    "popularity": {"method": "popularity"},
    "frozen": {"method": "frozen"},
    "personal-memory": {"method": "personal-memory"},
    "finetune-last": {"method": "finetune-last"},
    OURS: {"method": OURS},
    f"{FLAGSHIP}-nothing": {"method": FLAGSHIP, "protofed.mode": "nothing"},
    f"{FLAGSHIP}-private": {"method": FLAGSHIP, "protofed.mode": "private"},
}


def demo(
    dataset: Annotated[str, typer.Option(help="`synthetic`, or a prepared log under --root.")] = "synthetic",
    root: Annotated[Path, typer.Option(help="The folder of prepared logs.")] = Path("data"),
    out: Annotated[Path, typer.Option(help="The folder of the runs; the same command resumes them.")] = Path(
        "runs/demo"
    ),
    report: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    cache: Annotated[Path, typer.Option(help="The folder that keeps warm-ups.")] = CACHE,
) -> None:
    """Run seven methods on one log, print their accuracy and write a report."""
    check_installed(extra="report")
    with shown(Console(stderr=True)) as progress:
        progress.expect("protofed demo")
        progress(LOADING, 0, None)
        from protofed.experiments.run import Experiment, pick_device
        from protofed.experiments.stages import stages_of
        from protofed.experiments.summary import summarise_run
        from protofed.methods.labels import run_label
        from protofed.report.page import build, check_target, write

        check_target(report)
        progress(f"reading {dataset}", 0, None)
        chosen = settle({"dataset": dataset})
        log, around = load(chosen, root), surroundings(chosen, root)
    console = Console()
    console.print(f"{log.name}: {len(log):,} events, {log.n_users:,} users, {log.n_items:,} items", highlight=False)
    rows: list[tuple[str, dict[str, Any]]] = []
    said: dict[str, object] = {}
    for number, (name, settings) in enumerate(METHODS.items()):
        config = settle({"dataset": dataset, **settings})
        method = run_label(config)
        console.print(f"{method} …", highlight=False)
        with shown(Console(stderr=True)) as progress:
            own = stages_of(config.stream.n_slices)  # what a stage takes says nothing about other methods' stages
            stages = tuple(replace(s, kind=f"{each}: {s.kind}") for each in METHODS for s in own)
            title = f"{method}, {number + 1} of {len(METHODS)} methods"
            progress.expect(title, stages, before=number * len(stages) // len(METHODS))
            experiment = Experiment(config, log, cache, pick_device(device), "protofed demo", keep=around)
            folder = experiment.run(out / name, progress)
        rows.append((method, summarise_run(folder)))
        if config.method == FLAGSHIP:
            said[method] = promise_of(folder, config)
    console.print(table(rows, log.name))
    console.print(meaning(rows, list(said)), highlight=False)
    for method, promise in said.items():
        print(f"{method}, ", end="")
        print_promise(promise)
    write(build(out)[0], report)
    console.print(f"wrote {report}: open it in a browser", highlight=False)
    print_new_items(chosen, log, around.items, cache, pick_device(device), console)
    if dataset == "synthetic":
        way_on = "`protofed data import FILE --as NAME`, then `protofed demo --dataset NAME`"
        console.print(f"With your own log: {way_on}.", highlight=False)


def meaning(rows: Sequence[tuple[str, dict[str, Any]]], ours: Sequence[str]) -> str:
    """What the table says, in one sentence: what a device reaches without others, and who else is there."""
    from protofed.experiments.summary import headline_ndcg

    reached, alone = {method: headline_ndcg(summary, "full", "all") for method, summary in rows}, ours[0]
    ahead = [method for method, value in reached.items() if method not in ours and value > reached[alone]]
    place = f"behind {', '.join(ahead)}" if ahead else "ahead of all other methods here"
    return (
        f"In full ranking {alone}, whose devices tell nobody anything after the base block, reaches "
        f"{reached[alone]:.3f}, {place}; the rows that are not {FLAGSHIP}'s or {OURS}'s read everybody's raw events."
    )


def print_new_items(
    config: RunConfig, log: "InteractionLog", items: "pa.Table | None", cache: Path, device: Any, console: Console
) -> None:
    """Where items that nobody had met stand with and without what is known of them; nothing without an item table."""
    from protofed.experiments.new_items import rank_new_items
    from protofed.features.build import content_of, plain_features

    features = plain_features(items)
    if not features:
        return
    content = content_of(replace(config.content, features=",".join(features)), log, items, cache)
    assert content is not None
    found = rank_new_items(config, log, content, cache, device)
    if not len(found):
        return
    best = int((found.without - found.with_content).argmax())
    console.print(
        f"Items that nobody had met when the model was trained ({len(found):,} test events): median rank "
        f"{found.without.median():.0f} without, {found.with_content.median():.0f} with their {' and '.join(features)} "
        f"(--features {','.join(features)}); {found.item_ids[int(found.items[best])].as_py()} moved from "
        f"{found.without[best]:.0f} to {found.with_content[best]:.0f} of {int(found.available[best])}.",
        highlight=False,
    )


def table(rows: list[tuple[str, dict[str, Any]]], name: str) -> Table:
    """NDCG@10 of each method: sampled and full ranking, all and novel events."""
    from protofed.experiments.summary import headline_ndcg

    made = Table(
        title=f"NDCG@10 on {name}, mean over slices",
        caption="1+99: sampled candidates; full: all items; AF: forgetting, lower is better",
    )
    made.add_column("method", no_wrap=True)
    for candidates, subset in COLUMNS:
        made.add_column(f"{LABELS[candidates]}\n{subset}", justify="right", no_wrap=True)
    made.add_column("AF", justify="right")
    for method, summary in rows:
        values = (*(headline_ndcg(summary, *column) for column in COLUMNS), summary["af"])
        made.add_row(method, *(f"{value:.3f}" for value in values))
    return made
