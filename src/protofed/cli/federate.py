"""`protofed federate`: ProtoFed-SP and ProtoFed with their rounds carried by Flower."""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from protofed.cli.progress import LOADING, shown
from protofed.cli.run import CACHE, check_dial, load, print_result, settle, surroundings
from protofed.config import RunConfig, override
from protofed.errors import ConfigError, check_installed
from protofed.methods.names import FLAGSHIP, OURS

if TYPE_CHECKING:
    from protofed.deployment.flower.processes import Cluster
    from protofed.methods.protocol import World
    from protofed.slices.stream import SliceStream

NODES, TIMEOUT = 4, 60.0  # SuperNodes of the demo, and the seconds that its rounds wait for them
VICTIM, KILLED_AFTER, BACK_AFTER = 2, 4, 7  # which SuperNode dies, after how many rounds, and when it is back
EVENTS = {"all": "all events", "novel": "items new to their user"}
DEMO = {  # a small world in a minute: one slice of ten rounds
    "stream.n_slices": 1,
    "privacy.rounds_per_slice": 10,
    "privacy.sampling_rate": 0.1,
    "training.base_epochs": 12,
    "protofed.local_steps": 10,
    "protofed.base_steps": 10,
}


def federate(
    demo: Annotated[bool, typer.Option("--demo", help="Show a whole federation on this machine, then stop.")] = False,
    engine: Annotated[
        str | None, typer.Option(help="local (one process), simulation (Flower's, on Ray) or deployment (processes).")
    ] = None,
    prepare: Annotated[bool, typer.Option("--prepare", help="Only write the folders of server and hosts.")] = False,
    dataset: Annotated[str, typer.Option(help="A prepared log under --root, or `synthetic`.")] = "synthetic",
    method: Annotated[str, typer.Option(help=f"{OURS} or {FLAGSHIP}.")] = OURS,
    share: Annotated[str | None, typer.Option(help="Of protofed: what may leave a device, nothing or private.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder.")] = None,
    hosts: Annotated[int, typer.Option(help="How many hosts the users are dealt to.")] = NODES,
    root: Annotated[Path, typer.Option(help="The folder of prepared logs.")] = Path("data"),
    seed: Annotated[int, typer.Option(help="Of weights, order and training negatives.")] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting, e.g. privacy.sampling_rate=0.1.")
    ] = None,
    cache: Annotated[Path, typer.Option(help="The folder that keeps warm-ups.")] = CACHE,
    as_json: Annotated[bool, typer.Option("--json", help="Print results as JSON.")] = False,
) -> None:
    """Run the private method's rounds on Flower: a demo, a run with an engine, or folders for real hosts."""
    check_installed(extra="federated")
    if hosts < 1:
        raise ConfigError(f"--hosts must be at least 1, got {hosts}")
    if demo + prepare + (engine is not None) != 1:
        raise ConfigError("name one of --demo, --engine local|simulation|deployment and --prepare")
    if demo:
        show_demo(cache, as_json)
        return
    if out is None:
        raise ConfigError("--out is missing: name the folder to write, e.g. --out runs/federated")
    check_method(method, share)
    given = {"dataset": dataset, "method": method, "seed": seed, **({"protofed.mode": share} if share else {})}
    config = settle(given, None, settings or [])
    if prepare:
        prepare_folders(config, root, out, hosts, cache)
    else:
        run_with(str(engine), config, root, out, hosts, cache, as_json)


def check_method(method: str, share: str | None) -> None:
    """Refuse methods that have no devices, and a dial that the method does not have."""
    if method not in (OURS, FLAGSHIP):
        raise ConfigError(f"--method must be {OURS} or {FLAGSHIP}, got {method!r}; the others have no devices to ask")
    check_dial(method, share, None)


def run_with(engine: str, config: RunConfig, root: Path, out: Path, hosts: int, cache: Path, as_json: bool) -> None:
    """A run like any other, its rounds carried by an engine."""
    from protofed.deployment.flower.engines import ENGINES, Federated
    from protofed.experiments.run import Experiment

    if engine not in ENGINES:
        raise ConfigError(f"--engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    with shown(Console(stderr=True)) as progress:
        progress.expect("protofed federate")
        progress(LOADING, 0, None)
        log, around = load(config, root), surroundings(config, root)
        command, place = f"protofed federate --engine {engine}", out / "federation"
        carried: Any = lambda method: Federated(method, place, log, hosts, ENGINES[engine])  # noqa: E731
        experiment = Experiment(config, log, cache, command=command, keep=around, through=carried)
        folder = experiment.run(out, progress)
    print_result(folder, config, as_json)


def prepare_folders(config: RunConfig, root: Path, out: Path, hosts: int, cache: Path) -> None:
    """The folders of a server and its hosts, from the base block of a log; their draws are the operating system's."""
    from protofed.deployment.flower.engines import Federated, deal_world
    from protofed.deployment.flower.processes import write_app
    from protofed.files import make_folder
    from protofed.methods.catalogue import configured
    from protofed.methods.headed import Headed, under_head, without_head

    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"--out {out} is there already; a federation begins in a new folder")
    make_folder(out)  # before the work
    with shown(Console(stderr=True)) as progress:
        log = load(config, root)
        world, _ = begun(config, log, cache, progress)
        inner: Any = configured(config)
        federated = Federated(inner, out, log, hosts, lambda folder, index: None, seeded=False)
        method = under_head(federated, config)
        _, state = without_head(method, started := method.start(world))
        deal_world(federated, method.inside(world, started) if isinstance(method, Headed) else world, state)
        write_app(out / "app")
    made = f"{out}/server, {out}/app and {out}/hosts/0 to {hosts - 1}"
    print(f"wrote {made}; docs/how_to/federate.md says what to start where")


def begun(config: RunConfig, log: Any, cache: Path, progress: Any) -> "tuple[World, SliceStream]":
    """The world after its warm-up."""
    import torch

    from protofed.backbone.pretrain import cached_warm_up
    from protofed.methods.protocol import World
    from protofed.slices.stream import SliceStream

    data = SliceStream(log, config.stream)
    backbone, _ = cached_warm_up(config, data, cache, device=torch.device("cpu"), progress=progress)
    return World(config, data.slice_(0), backbone, progress), data


@dataclass(slots=True)
class Accident:
    """Kills a SuperNode once so many rounds are over, and starts it again some rounds later."""

    made: "Cluster"
    host: Path
    say: Callable[[str], None]
    done: int = 0
    told: set[int] = field(default_factory=set)

    def __call__(self, log: list[dict[str, object]]) -> None:
        for record in (each for each in log if "round" in each and each["round"] not in self.told):
            self.told.add(int(record["round"]))  # type: ignore[call-overload]
            self.say(round_line(record))
        if len(self.told) >= KILLED_AFTER and self.done == 0:
            self.made.kill_node(VICTIM)
            self.say(f"SuperNode {VICTIM + 1} was killed")
            self.done = 1
        if len(self.told) >= BACK_AFTER and self.done == 1:
            self.made.start_node(VICTIM, self.host)
            self.say(f"SuperNode {VICTIM + 1} was started again: its devices go on from their file")
            self.done = 2


def round_line(record: Mapping[str, Any]) -> str:
    """A round in words."""
    heard, lost = record["asked"] - len(record["lost"]), len(record["lost"])
    late = f", {lost} lost" if lost else ""
    refused = f", {sum(record['refused'].values())} refused" if record["refused"] else ""
    return f"round {record['round'] + 1}: {record['uploads']} uploads from {heard} SuperNodes{late}{refused}"


def show_demo(cache: Path, as_json: bool) -> None:
    """A SuperLink and four SuperNodes with TLS: ten rounds, one SuperNode killed and started again in the middle."""
    console = Console(stderr=True)
    scratch = Path(tempfile.mkdtemp(prefix="protofed-federation-"))
    try:
        result = demonstrate(scratch, cache, lambda text: console.print(text, highlight=False))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(json.dumps(result, indent=2, ensure_ascii=False)) if as_json else print_demo(result)


def demonstrate(scratch: Path, cache: Path, say: Callable[[str], None], config: RunConfig | None = None) -> Any:
    """What the demo ends with; everything it writes is below `scratch`."""
    from protofed.deployment.deal import SERVER, host_folders
    from protofed.deployment.flower.engines import Federated, deal_world
    from protofed.deployment.flower.processes import cluster, marked, read_log, run_slice
    from protofed.methods.protofed_sp import ProtoFedSP
    from protofed.privacy.promise import promised
    from protofed.progress import silent

    began = time.monotonic()
    config = config or override(settle({"dataset": "synthetic", "method": OURS}), DEMO)
    log = load(config, scratch)
    say(f"{log.name}: {log.n_users:,} users on {NODES} hosts; the base block, half of the log, is learned …")
    world, data = begun(config, log, cache, silent)
    method = Federated(ProtoFedSP(), scratch / "federation", log, NODES, lambda folder, index: None, seeded=False)
    start = method.start(world)
    deal_world(method, world, start)
    before = ndcg_of(method, world, start, data)
    passed = f"{time.monotonic() - began:.0f} s"
    say(f"{passed}: a SuperLink (server) and {NODES} SuperNodes (hosts) start, with TLS and a key each")
    with cluster(scratch / "processes", method.folder) as made:
        accident = Accident(made, host_folders(method.folder)[VICTIM], say)
        run_slice(made, method.folder, 1, timeout=TIMEOUT, watch=accident)
    state, _ = method.learn(world, start, data.slice_(1), None)  # type: ignore[arg-type]  # reads what is there
    return {
        "before": before,
        "after": ndcg_of(method, world, state, data),
        "rounds": [each for each in read_log(method.folder / SERVER / "log.jsonl") if "round" in each],
        "privacy": promised(method.folder / SERVER / "ledger.json", config.privacy.delta),
        "killed": VICTIM + 1,
        "processes_left": len(marked(made.mark)),
        "seconds": round(time.monotonic() - began),
    }


def ndcg_of(method: Any, world: "World", state: Any, data: "SliceStream") -> dict[str, float]:
    """NDCG@10 on the test part of slice 1, sampled candidates: all events, and those on items new to their user."""
    from protofed.experiments.evaluate import answer, metric_rows

    asked = data.query_set(1, "test")
    answered = answer(method, world, state, data.slice_(1).train_counts(), data, asked, 1, None)
    found = {(row["candidates"], row["subset"], row["metric"]): row["value"] for row in metric_rows(answered)}
    wanted = {name: ("sampled", name, "ndcg@10") for name in EVENTS}
    return {name: found[key] for name, key in wanted.items() if key in found}


def print_demo(result: Mapping[str, Any]) -> None:
    """The demo's end as a table."""
    rounds, privacy = result["rounds"], result["privacy"] or {}
    lost = [f"round {each['round'] + 1}" for each in rounds if each["lost"]]
    fewer = [f"round {each['round'] + 1}" for each in rounds if each["asked"] < NODES]
    table = Table(title="A federation of processes on this machine", show_header=False)
    for name in result["after"]:
        before, after = result["before"][name], result["after"][name]
        table.add_row(f"NDCG@10, {EVENTS[name]}", f"{before:.4f} before the rounds, {after:.4f} after")
    table.add_row("rounds, uploads", f"{len(rounds)}, {sum(each['uploads'] for each in rounds)}")
    table.add_row(f"SuperNode {result['killed']} killed and restarted", f"lost in {', '.join(lost) or 'no round'}")
    table.add_row("rounds without it", ", ".join(fewer) or "none")
    table.add_row("processes left behind", str(result["processes_left"] or "none"))
    if privacy.get("epsilon_release") is not None:
        seen, server = privacy["epsilon_release"], privacy["epsilon_server"]
        against = "nothing is promised" if server is None else f"{server:g}"
        table.add_row("ε, who sees what is released", f"{seen:g}, δ = {privacy['delta']:g}, {privacy['adjacency']}")
        table.add_row("ε, the server", f"{against} ({privacy['trust']} trust)")
    table.add_row("seconds", str(result["seconds"]))
    Console().print(table)
    print("NDCG@10: how high the right item stands among it and 99 others, 1 at best; on the slice's last events")
