"""`protofed bench`: a grid of runs on worker processes; resumable, with one tidy table of results."""

import contextlib
import json
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from protofed.cli.progress import duration, shown
from protofed.cli.run import CACHE, settle
from protofed.cli.worker import WORKER
from protofed.config import parse_override
from protofed.errors import ConfigError, check_installed

if TYPE_CHECKING:
    from protofed.experiments.bench import Board, Job, Status, Tell
    from protofed.experiments.grid import Cell, Grid

LABELS = {"sampled": "1+99", "full": "full"}
COLUMNS = (("sampled", "all"), ("sampled", "novel"), ("full", "all"), ("full", "novel"))


def bench(
    out: Annotated[Path | None, typer.Option(help="The folder of all runs; the same command resumes it.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file: grid, settings, variants, sweep.")] = None,
    datasets: Annotated[str | None, typer.Option(help="Comma-separated; overrides the file's.")] = None,
    methods: Annotated[str | None, typer.Option(help="Comma-separated; overrides the file's.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Comma-separated; overrides the file's.")] = None,
    preset_name: Annotated[str | None, typer.Option("--preset", help="small (d = 64) or paper (d = 256).")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value for every run.")] = None,
    tuned: Annotated[
        list[Path] | None, typer.Option(help="The --out of `protofed tune`; repeatable, the first that fits is used.")
    ] = None,
    root: Annotated[Path, typer.Option(help="The folder of prepared logs.")] = Path("data"),
    jobs: Annotated[int, typer.Option(help="How many runs at once, each on one thread.")] = 1,
    shard: Annotated[str | None, typer.Option(help="i/n: only part i of n, e.g. one part per machine.")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Run on a Ray cluster that shares the folders.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    cache: Annotated[Path, typer.Option(help="The folder that keeps warm-ups.")] = CACHE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and what is left to do.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the final table as JSON.")] = False,
) -> None:
    """Run data sets × methods × variants × seeds.

    Finished runs are kept; one that fails does not stop the others.
    """
    from protofed.experiments import bench as benches
    from protofed.experiments import grid as grids
    from protofed.experiments import pool
    from protofed.experiments.tidy import write_tables
    from protofed.files import make_folder

    if out is None:
        raise ConfigError("--out is missing: name the folder of this bench, e.g. --out runs/bench")
    if jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {jobs}")
    part = grids.parse_shard(shard) if shard else (1, 1)
    if ray:
        check_installed(extra="ray")
    grid = chosen_grid(config, {"datasets": datasets, "methods": methods, "seeds": seeds}, preset_name, settings or [])
    check_places(grid, root, device)
    everything = grids.cells(grid, settle, grids.tuned_in(*tuned) if tuned else grids.untuned)
    cells = grids.shard(everything, *part)
    board = {cell.folder: benches.standing(cell, out) for cell in cells}
    if dry_run:
        print_plan(cells, board, out, as_json)
        return
    cluster = pool.ray_tasks(WORKER) if ray else None
    name = f"bench-{part[0]}-of-{part[1]}" if shard else "bench"
    with benches.held(out, name), stoppable(out):
        make_folder(cache)  # one that cannot be written is told now, not by every cell
        write_tables(out)
        start = cluster or pool.processes(WORKER)
        job_of = partial(job, out=out, root=root, cache=cache, device=device)
        with told(cells, board, jobs) as tell:
            board = benches.run_cells(cells, board, out, start, job_of, jobs, tell)
    finish(everything, board, out, as_json)


def chosen_grid(
    file: Path | None, lists: dict[str, str | None], preset_name: str | None, settings: Sequence[str]
) -> "Grid":
    """The file's grid with what the flags replace and add."""
    from protofed.experiments.grid import grid_of, read_grid

    grid = read_grid(file) if file is not None else grid_of({})
    given = {f"grid.{key}": listed(key, text) for key, text in lists.items() if text is not None}
    asked = dict(parse_override(text) for text in settings) | ({"preset": preset_name} if preset_name else {})
    flags = grid_of(given | {f"settings.{key}": value for key, value in asked.items()})
    replaced = {key.removeprefix("grid."): getattr(flags, key.removeprefix("grid.")) for key in given}
    return replace(grid, **replaced, settings=tuple((dict(grid.settings) | dict(flags.settings)).items()))


def listed(key: str, text: str) -> list[object]:
    """The names, or for seeds the numbers, of a comma-separated flag."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if key != "seeds":
        return list(names)
    try:
        return [int(name) for name in names]
    except ValueError as problem:
        raise ConfigError(f"--seeds takes whole numbers, got {text!r}; for example --seeds 0,1,2") from problem


def check_places(grid: "Grid", root: Path, device: str) -> None:
    """Refuse now what would make every cell fail later."""
    from protofed.data.catalog import nearest
    from protofed.data.prepared import prepared_names
    from protofed.experiments.run import pick_device

    pick_device(device)
    known = (*prepared_names(root), "synthetic")
    for dataset in grid.datasets:
        if dataset not in known:
            raise ConfigError(f"no prepared log {dataset!r} under {root}{nearest(dataset, known)}; give --root")


def job(cell: "Cell", *, out: Path, root: Path, cache: Path, device: str) -> "Job":
    """What the cell's worker is told."""
    from protofed.config import to_toml
    from protofed.experiments.bench import Job

    flags = ("--root", str(root)) if cell.config.dataset != "synthetic" else ()
    command = cell.command(*flags, "--out", str(out / cell.folder))
    folder, data, warm_ups = (str(path.absolute()) for path in (out / cell.folder, root, cache))
    return Job(folder, to_toml(cell.config), data, warm_ups, device, command)


@contextlib.contextmanager
def stoppable(out: Path) -> Iterator[None]:
    """SIGTERM is like Ctrl-C: workers are stopped, then one line says how to go on."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped; the same command continues what is in {out}", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def told(cells: Sequence["Cell"], board: "Board", jobs: int) -> Iterator["Tell"]:
    """One line on stderr when a cell starts, finishes or fails, above a bar on a terminal."""
    console, now = Console(stderr=True), dict(board)
    kept = sum(status.state == "done" for status in board.values())
    console.print(f"{len(cells)} cells, {kept} done before, {jobs} at once", highlight=False)
    with shown(console) as bars:

        def tell(cell: "Cell", status: "Status") -> None:
            now[cell.folder] = status
            so_far = overall(cells, now, jobs)
            said = {
                "running": "started",
                "done": f"done in {status.seconds:.0f} s, NDCG@10 {status.score:.4f}; {so_far}",
                "failed": f"failed: {status.error}",
            }
            line = f"{time.strftime('%H:%M:%S')} {cell.folder} {said[status.state]}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
            over = sum(status.state in ("done", "failed") for status in now.values())
            bars("cells", over, len(cells), so_far)

        yield tell


def overall(cells: Sequence["Cell"], board: "Board", jobs: int) -> str:
    """`3 of 14 done, 1 failed, about 4 min left`."""
    from protofed.experiments.bench import time_left

    states = [status.state for status in board.values()]
    left = time_left(cells, board, jobs, time.monotonic())
    failed = f", {states.count('failed')} failed" if "failed" in states else ""
    known = f", about {duration(left)} left" if math.isfinite(left) and left > 0 else ""
    return f"{states.count('done')} of {len(states)} done{failed}{known}"


def print_plan(cells: Sequence["Cell"], board: "Board", out: Path, as_json: bool) -> None:
    """Every cell and whether it is done; nothing is written."""
    plan: list[dict[str, str]] = []
    for cell in cells:
        waiting = "started" if (out / cell.folder / "config.toml").is_file() else "left"  # a killed run continues
        plan.append({"folder": cell.folder, "state": "done" if board[cell.folder].state == "done" else waiting})
    left = sum(row["state"] != "done" for row in plan)
    if as_json:
        print(json.dumps({"cells": plan, "done": len(plan) - left, "left": left}, indent=2))
        return
    for row in plan:
        print(f"{row['state']:<8} {row['folder']}")
    print(f"{len(plan)} cells: {len(plan) - left} done, {left} left")


def finish(cells: Sequence["Cell"], board: "Board", out: Path, as_json: bool) -> None:
    """The final table, then what failed; exit code 1 if anything did."""
    failed = {name: status.error for name, status in board.items() if status.state == "failed"}
    rows = final_rows(cells, out)
    if as_json:
        answer = {"rows": rows, "failed": failed, "results": str(out / "results.parquet")}
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        print_rows(rows, out)
    for name, error in failed.items():
        print(f"failed: {name}: {error}", file=sys.stderr)
    if failed:
        told = f"{len(failed)} of {len(board)} cells failed ({out / 'failed'})"
        print(f"{told}; the same command tries them again", file=sys.stderr)
        raise typer.Exit(1)


def final_rows(cells: Sequence["Cell"], out: Path) -> list[dict[str, Any]]:
    """Per data set, method and variant: its finished seeds and their mean and spread, a missing number as null."""
    from protofed.experiments.folder import RunFolder
    from protofed.experiments.summary import headline_ndcg, summarise_run
    from protofed.experiments.tidy import finished_runs

    asked = {out / cell.folder for cell in cells}
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in finished_runs(out):
        if run.path in asked:
            key = (run.config.dataset, run.config.method, run.variant)
            groups.setdefault(key, []).append(summarise_run(RunFolder(run.path)))
    return [
        {"dataset": dataset, "method": method, "variant": variant, "seeds": [run["seed"] for run in runs]}
        | {"/".join(("ndcg@10", *column)): spread([headline_ndcg(run, *column) for run in runs]) for column in COLUMNS}
        | {"af": spread([run["af"] for run in runs])}
        for (dataset, method, variant), runs in groups.items()
    ]


def spread(values: list[float]) -> dict[str, float | None]:
    """Mean and standard deviation over seeds; null where there is none."""
    from statistics import fmean, stdev

    known = [value for value in values if math.isfinite(value)]
    return {"mean": fmean(known) if known else None, "std": stdev(known) if len(known) > 1 else None}


def print_rows(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """The final table for a person, one per data set."""
    console = Console()
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        table = Table(title=f"NDCG@10 on {dataset}, mean over slices and seeds", box=None, padding=(0, 1))
        for column in ("method", "variant", "seeds"):
            table.add_column(column, overflow="fold")
        for kind, subset in COLUMNS:
            table.add_column(f"{LABELS[kind]}\n{subset}", justify="right", no_wrap=True)
        for row in rows:
            if row["dataset"] == dataset:
                numbers = [shown_spread(**row[f"ndcg@10/{kind}/{subset}"]) for kind, subset in COLUMNS]
                table.add_row(row["method"], row["variant"], str(len(row["seeds"])), *numbers)
        console.print(table)
    console.print(f"every metric: {out / 'results.parquet'}", highlight=False, soft_wrap=True)


def shown_spread(mean: float | None, std: float | None) -> str:
    """`0.412±0.003`, without the spread where there is one seed."""
    return "–" if mean is None else f"{mean:.3f}" if std is None else f"{mean:.3f}±{std:.3f}"
