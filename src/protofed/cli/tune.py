"""`protofed tune`: hyper-parameters chosen on pseudo-slices of the base block; resumable."""

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from protofed.cli.progress import shown
from protofed.cli.run import CACHE, item_table, load, settle
from protofed.config import hyper_values, parse_override
from protofed.errors import ConfigError
from protofed.progress import silent

if TYPE_CHECKING:
    from protofed.experiments.tuning import Outcome, Tuning
    from protofed.features.content import Content

OBJECTIVE = "mean over pseudo-slices t of A[t, t]: NDCG@10 of the test part, sampled candidates, all events"


@dataclass(frozen=True, slots=True)
class Asked:
    """A trial as a worker is asked for it."""

    method: str
    trial: int
    flags: Mapping[str, object]
    settings: Sequence[str]
    slices: int
    trials: int
    root: str
    out: str
    cache: str
    device: str
    command: str

    def __str__(self) -> str:
        return f"trial {self.trial} of {self.method}"


def tune(
    out: Annotated[Path | None, typer.Option(help="The folder of trials; the same command resumes it.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="A method to tune; repeatable, each gets the same trials.")
    ] = None,
    dataset: Annotated[str, typer.Option(help="A prepared log under --root, or `synthetic`.")] = "synthetic",
    root: Annotated[Path, typer.Option(help="The folder of prepared logs.")] = Path("data"),
    trials: Annotated[int, typer.Option(help="Trials of each method; at most its whole grid.")] = 20,
    slices: Annotated[int, typer.Option(help="Pseudo-slices inside the base block.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the search and of every trial.")] = 0,
    preset_name: Annotated[str | None, typer.Option("--preset", help="small (d = 64) or paper (d = 256).")] = None,
    variant: Annotated[str | None, typer.Option(help="standard or peft.")] = None,
    clients: Annotated[int | None, typer.Option(help="Keep only this many users; 0 keeps all.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value for all trials; it is not searched.")
    ] = None,
    known: Annotated[Path | None, typer.Option(help="The trials.csv of an earlier search to build on.")] = None,
    jobs: Annotated[int, typer.Option(help="How many trials at once, each on one thread.")] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    cache: Annotated[Path, typer.Option(help="The folder that keeps warm-ups.")] = CACHE,
    as_json: Annotated[bool, typer.Option("--json", help="Print results as JSON.")] = False,
) -> None:
    """Choose hyper-parameters on the base block alone, the same number of trials for every method."""
    from protofed.experiments.run import pick_device
    from protofed.experiments.tuning import claim_folder, run_trial, take_over, tried, write_best, write_table
    from protofed.files import make_folder

    if out is None or not method:
        missing, example = ("--out", "--out runs/tune") if out is None else ("--method", "--method ewc")
        raise ConfigError(f"{missing} is missing, e.g. {example}")
    if known is not None and not known.is_file():
        raise ConfigError(f"no file at --known {known}; give the trials.csv of an earlier search")
    if jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {jobs}")
    given = {"dataset": dataset, "seed": seed, "preset": preset_name, "variant": variant, "clients": clients}
    flags = {key: value for key, value in given.items() if value is not None}
    searches = planned(flags, settings or [], list(dict.fromkeys(method)), root, slices, trials)
    earlier = tried(known) if known is not None else {}
    asked = {**flags, "trials": trials, "slices": slices, "set": dict(map(parse_override, settings or []))}
    claim_folder(out, asked | {"events": searches[0].fingerprint})
    make_folder(cache)
    where, console = pick_device(device), Console(stderr=True)
    if known is not None:
        taken = sum(take_over(search, earlier, out) for search in searches)
        console.print(f"{taken} trials of {known} were made with the same and are taken over", highlight=False)
    command = shlex.join(["protofed", *sys.argv[1:]])
    if jobs == 1:
        for search in searches:
            content = known_of(search, root, cache)
            attempt = partial(run_trial, search, out=out, cache=cache, device=where, command=command, content=content)
            run_all(search, attempt, out, console)
    else:
        places = {"root": str(root), "out": str(out), "cache": str(cache), "device": device, "command": command}
        told = {"flags": flags, "settings": settings or [], "slices": slices, "trials": trials, **places}
        run_side_by_side(searches, told, out, console, jobs)
    found = {search.config.method: write_best(search, out) for search in searches}
    outcomes = [outcome for outcome in write_table(out) if outcome.method in found]
    print(json.dumps(summary(found, outcomes), indent=2)) if as_json else print_table(found, outcomes, out, root)
    if None in found.values():
        raise typer.Exit(1)


def planned(
    flags: Mapping[str, object], settings: Sequence[str], methods: Sequence[str], root: Path, slices: int, trials: int
) -> "list[Tuning]":
    """Every method's search; whatever is wrong with any of them is told before the first trial."""
    from protofed.experiments.tuning import tuning

    configs = [settle({**flags, "method": name}, None, settings) for name in methods]
    given = dict(map(parse_override, settings))
    held = [*given, *(f"hyper.{name}" for name in hyper_values(str(given.get("hyper", ""))))]
    log = load(configs[0], root)
    return [tuning(config, log, n_slices=slices, n_trials=trials, held=held) for config in configs]


def known_of(search: "Tuning", root: Path, cache: Path) -> "Content | None":
    """What is known of the pseudo-log's items, where the settings ask for it."""
    from protofed.features.build import content_of

    return content_of(search.config.content, search.pseudo_log, item_table(search.config.dataset, root), cache)


def run_all(search: "Tuning", attempt: "Callable[..., Outcome]", out: Path, console: Console) -> None:
    """Each trial that is not over yet, with a line for each; tables and best.toml are rewritten after every one."""
    from protofed.experiments.stages import stages_of

    say_if_nothing(search, console)
    for trial in search.trials:
        with shown(console) as bars:
            title = f"{search.config.method} trial {trial.number + 1} of {len(search.trials)}"
            bars.expect(title, stages_of(search.n_slices))
            outcome = attempt(trial, progress=bars if console.is_terminal else silent)
        noted(search, outcome, out, console)


def run_side_by_side(
    searches: "Sequence[Tuning]", told: Mapping[str, Any], out: Path, console: Console, jobs: int
) -> None:
    """The same trials on worker processes; they do not depend on each other, so neither does what comes of them."""
    from protofed.cli.worker import WORKER
    from protofed.experiments.pool import processes, side_by_side
    from protofed.experiments.tuning import known_outcome

    by_method = {search.config.method: search for search in searches}
    for search in searches:
        say_if_nothing(search, console)
    asked = [Asked(name, trial.number, **told) for name, search in by_method.items() for trial in search.trials]

    def outcome_of(one: Asked) -> "Outcome | None":
        search = by_method[one.method]
        return known_outcome(search, search.trials[one.trial], out)

    for one in side_by_side([one for one in asked if outcome_of(one) is None], processes(WORKER), jobs):
        outcome = outcome_of(one)
        assert outcome is not None
        noted(by_method[one.method], outcome, out, console)


def say_if_nothing(search: "Tuning", console: Console) -> None:
    from protofed.methods.search_spaces import space_of

    name = search.config.method
    if not space_of(name, search.config.variant, private=search.config.privacy.wrap):
        console.print(f"{name}: nothing to tune; one trial, its defaults", highlight=False)


def noted(search: "Tuning", outcome: "Outcome", out: Path, console: Console) -> None:
    """Tables and best.toml rewritten after a trial, and a line about it."""
    from protofed.experiments.tuning import write_best, write_table

    write_table(out)
    best = write_best(search, out)
    name, total, number = search.config.method, len(search.trials), outcome.trial
    said = outcome.failed or f"{outcome.objective:.4f}"
    so_far = f"; best {best.objective:.4f}, trial {best.trial}" if best else ""
    console.print(f"{name} trial {number} ({number + 1} of {total}): {said}{so_far}", highlight=False)


def summary(found: "Mapping[str, Outcome | None]", outcomes: "Sequence[Outcome]") -> dict[str, object]:
    """What --json prints."""
    methods = []
    for name, best in found.items():
        trials = [asdict(outcome) for outcome in outcomes if outcome.method == name]
        methods.append({"method": name, "best": asdict(best) if best else None, "trials": trials})
    return {"objective": OBJECTIVE, "methods": methods}


def print_table(found: "Mapping[str, Outcome | None]", outcomes: "Sequence[Outcome]", out: Path, root: Path) -> None:
    """The best trial of each method beside its defaults."""
    from protofed.experiments.tuning import as_flags

    table = Table(title="NDCG@10 on pseudo-slices of the base block", caption="1+99 candidates, mean of A\\[t, t]")
    for column in ("method", "trials", "failed", "defaults", "best", "settings of the best"):
        table.add_column(column, justify="left" if column in ("method", "settings of the best") else "right")
    for name, best in found.items():
        own = [outcome for outcome in outcomes if outcome.method == name]
        defaults = next((f"{o.objective:.4f}" for o in own if o.trial == 0 and o.counts), "–")
        chosen = (as_flags(best.settings).replace(" ", "\n") or "the defaults") if best else "every trial failed"
        failed = sum(not outcome.counts for outcome in own)
        value = f"{best.objective:.4f}" if best else "–"
        table.add_row(name, str(len(own)), str(failed), defaults, value, chosen)
    console = Console()
    console.print(table)
    first = next((name for name, best in found.items() if best), None)
    if first:
        command = f"protofed run --config {out / first / 'best.toml'} --root {root} --out runs/{first}"
        console.print(f"`{command}` runs it on the whole log", highlight=False, soft_wrap=True)
