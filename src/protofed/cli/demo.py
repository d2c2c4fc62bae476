"""`protofed demo`: the whole path on one log, from slices to a report."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from protofed.cli.progress import shown
from protofed.cli.run import CACHE, load, print_promise, settle, surroundings
from protofed.methods.names import OURS

LABELS = {"sampled": "1+99", "full": "full"}
METHODS = ("popularity", "frozen", "personal-memory", "finetune-last", OURS)


def demo(
    dataset: Annotated[str, typer.Option(help="`synthetic`, or a prepared log under --root")] = "synthetic",
    root: Annotated[Path, typer.Option(help="folder of prepared logs")] = Path("data"),
    out: Annotated[Path, typer.Option(help="folder for the runs; the same command resumes them")] = Path("runs/demo"),
    report: Annotated[Path, typer.Option(help="the HTML file to write")] = Path("report.html"),
    device: Annotated[str, typer.Option(help="cpu, cuda or auto")] = "auto",
    cache: Annotated[Path, typer.Option(help="folder where warm-ups are kept")] = CACHE,
) -> None:
    """Run the first methods on a log, print their accuracy and write a report."""
    from protofed.experiments.run import Experiment, pick_device
    from protofed.experiments.summary import summarise_run
    from protofed.privacy.promise import promised
    from protofed.report.page import build, check_target, write

    check_target(report)
    console = Console()
    chosen = settle({"dataset": dataset})
    log, around = load(chosen, root), surroundings(chosen, root)
    console.print(f"{log.name}: {len(log):,} events, {log.n_users:,} users, {log.n_items:,} items", highlight=False)
    rows = []
    for method in METHODS:
        config = settle({"dataset": dataset, "method": method})
        console.print(f"{method} …", highlight=False)
        with shown(Console(stderr=True)) as progress:
            experiment = Experiment(config, log, cache, pick_device(device), "protofed demo", keep=around)
            folder = experiment.run(out / method, progress)
        rows.append((method, summarise_run(folder)))
    console.print(table(rows, log.name))
    print(f"{OURS}, ", end="")
    print_promise(promised(out / OURS / "ledger.json", config.privacy.delta))
    write(build(out)[0], report)
    console.print(f"wrote {report}: open it in a browser", highlight=False)
    if dataset == "synthetic":
        console.print(
            "With your own log: `protofed data prepare NAME --source FILE --root data`, then "
            "`protofed demo --dataset NAME --root data`; `protofed data list` names the formats it reads.",
            highlight=False,
        )


def table(rows: list[tuple[str, dict[str, object]]], name: str) -> Table:
    """NDCG@10 of each method: sampled and full ranking, all and novel events."""
    shown_as = (("sampled", "all"), ("sampled", "novel"), ("full", "all"), ("full", "novel"))
    made = Table(
        title=f"NDCG@10 on {name}, mean over slices",
        caption="1+99: sampled candidates; full: all items; AF: forgetting, lower is better",
    )
    made.add_column("method", no_wrap=True)
    for candidates, subset in shown_as:
        made.add_column(f"{LABELS[candidates]}\n{subset}", justify="right", no_wrap=True)
    made.add_column("AF", justify="right")
    for method, summary in rows:
        found = {(row["candidates"], row["subset"]): row["ndcg@10"] for row in summary["headline"]}  # type: ignore[attr-defined]
        made.add_row(method, *(f"{found.get(key, float('nan')):.3f}" for key in shown_as), f"{summary['af']:.3f}")
    return made
