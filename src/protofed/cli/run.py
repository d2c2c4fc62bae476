"""`protofed run`: one method, one log, all slices; resumable."""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from protofed.config import RunConfig, in_range, override, parse_override, preset, values_of
from protofed.errors import ConfigError, check_installed
from protofed.methods.names import FLAGSHIP, OURS

if TYPE_CHECKING:
    import pyarrow as pa

    from protofed.data.interactions import InteractionLog
    from protofed.data.synthetic import DriftingWorld
    from protofed.experiments.folder import RunFolder
    from protofed.experiments.publish import Surroundings

CACHE = Path.home() / ".cache" / "protofed"


def run(
    dataset: Annotated[str | None, typer.Option(help="A prepared log under --root, or `synthetic`.")] = None,
    method: Annotated[str | None, typer.Option(help="One of --list-methods, or package.module:Name.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; the same command resumes it.")] = None,
    root: Annotated[Path, typer.Option(help="The folder of prepared logs.")] = Path("data"),
    variant: Annotated[str | None, typer.Option(help="standard, or peft: train a shared prompt only.")] = None,
    preset_name: Annotated[str | None, typer.Option("--preset", help="small (d = 64) or paper (d = 256).")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, order and training negatives.")] = None,
    clients: Annotated[int | None, typer.Option(help="Keep only this many users; 0 keeps all.")] = None,
    share: Annotated[str | None, typer.Option(help="Of protofed: what may leave a device, nothing or private.")] = None,
    mode: Annotated[str | None, typer.Option(help=f"Of {OURS}: reference, literal or nodp.")] = None,
    target_epsilon: Annotated[float | None, typer.Option(help="The privacy budget ε of the whole stream.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Noise of every round, instead of a budget.")] = None,
    trust: Annotated[str | None, typer.Option(help="Who adds the noise: central, secure-aggregation or local.")] = None,
    ablate: Annotated[
        list[str] | None, typer.Option(help=f"Leave out a part of {FLAGSHIP} or {OURS}; repeatable.")
    ] = None,
    features: Annotated[
        str | None, typer.Option(help="What is known of items: place, category, text, image, vectors; comma-separated.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings; flags override it.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting, e.g. training.negatives=32.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    cache: Annotated[Path, typer.Option(help="The folder that keeps warm-ups.")] = CACHE,
    track: Annotated[Path | None, typer.Option(help="Write scalars for TensorBoard into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print results as JSON.")] = False,
    list_methods: Annotated[bool, typer.Option("--list-methods", help="List every method and stop.")] = False,
) -> None:
    """Run one method over all slices of one log.

    A run that was stopped continues where it was; a finished one is only shown again.
    """
    if list_methods:
        print_methods(as_json)
        return
    from protofed.cli.progress import LOADING, shown

    if out is None:
        raise ConfigError("--out is missing: name the folder this run is to write, e.g. --out runs/first")
    given: dict[str, object] = {"dataset": dataset, "method": method, "variant": variant, "preset": preset_name}
    given |= {"seed": seed, "clients": clients, "protofed.mode": share or mode, "privacy.trust": trust}
    given |= budget(target_epsilon, noise_multiplier)
    given |= {"protofed.ablate": ",".join(sorted(set(ablate))) if ablate else None, "content.features": features}
    flags = {key: value for key, value in given.items() if value is not None}
    check_named(flags, config, settings or [])
    check_dial(method, share, mode)
    if track is not None:
        check_installed(extra="track")
    with shown(Console(stderr=True)) as progress:
        progress.expect("protofed run")
        progress(LOADING, 0, None)
        from protofed.cli.track import tracked
        from protofed.experiments.run import Experiment, pick_device
        from protofed.experiments.stages import stages_of
        from protofed.features.build import content_of

        chosen = settle(flags, config, settings or [])
        progress(f"reading {chosen.dataset}", 0, None)
        log, around, n_slices = load(chosen, root), surroundings(chosen, root), chosen.stream.n_slices
        command = shlex.join(["protofed", *sys.argv[1:]])
        known = content_of(chosen.content, log, around.items, cache, progress)
        experiment = Experiment(chosen, log, cache, pick_device(device), command, content=known, keep=around)
        progress.expect(f"{chosen.method} on {chosen.dataset}", stages_of(n_slices))
        with tracked(track, out, n_slices, progress) as watched:
            folder = experiment.run(out, watched)
    print_result(folder, chosen, as_json)


def budget(target_epsilon: float | None, noise_multiplier: float | None) -> dict[str, object]:
    """What the two flags set: a noise alone has no budget to keep; with both, uploads stop where the budget ends.

    A budget of ε = 0 is refused: nothing that learns from a user has it.
    """
    if target_epsilon == 0:
        raise ConfigError(
            "--target-epsilon must be above 0, got 0; the project uses 3.4. Leave it out where --noise-multiplier is "
            "given, and for a run without privacy"
        )
    if noise_multiplier is not None and target_epsilon is None:
        target_epsilon = 0.0
    return {"privacy.target_epsilon": target_epsilon, "privacy.noise_multiplier": noise_multiplier}


def check_dial(method: str | None, share: str | None, mode: str | None) -> None:
    """Refuse --share and --mode where they are not of the method, and what is not built yet."""
    if share is not None and mode is not None:
        raise ConfigError(f"--share is of {FLAGSHIP} and --mode of {OURS}; give one of them")
    if share == "raw":
        raise ConfigError("--share raw is not built yet; use --share private, or a method that shares raw events")
    if share is not None and share not in ("nothing", "private"):
        raise ConfigError(f"--share must be nothing or private, got {share!r}")
    if share is not None and method not in (None, FLAGSHIP):
        raise ConfigError(f"--share is of {FLAGSHIP} alone, got --method {method}; leave it out")
    if mode is not None and method == FLAGSHIP:
        raise ConfigError(f"--mode is of {OURS}; {FLAGSHIP} takes --share nothing or --share private")


def check_named(flags: Mapping[str, object], file: Path | None, settings: Sequence[str]) -> None:
    """Refuse a run whose data set or method nobody named: a default would be somebody else's choice."""
    written = values_of(file) if file is not None else {}
    named = {*written, *flags, *(parse_override(text)[0] for text in settings)}
    ways = {"dataset": "a prepared log under --root, or --dataset synthetic", "method": "one of --list-methods"}
    for key, way_out in ways.items():
        if key not in named:
            raise ConfigError(f"--{key} is missing: name {way_out}; a file given with --config may name it too")


def settle(flags: Mapping[str, object], file: Path | None = None, settings: Sequence[str] = ()) -> RunConfig:
    """The run's config: what the preset and the method bring along, then the file, then flags, then --set.

    An error that is not there without the file names it.
    """
    if file is None:
        return together({}, flags, settings)
    written = values_of(file)
    try:
        return together(written, flags, settings)
    except ConfigError as problem:
        refusal = problem
    try:
        together({}, flags, settings)
    except ConfigError as problem:
        if str(problem) == str(refusal):
            raise
    raise ConfigError(f"{file}: {refusal}") from refusal


def together(written: Mapping[str, object], flags: Mapping[str, object], settings: Sequence[str]) -> RunConfig:
    """The config of a file's values, flags and --set, each going before those ahead of it."""
    from protofed.methods.catalogue import configured, has_modes, method_named

    typed = dict(parse_override(text) for text in settings)
    named = {**written, **flags, **typed}
    base = preset(named.get("preset", "small"))
    method = str(named.get("method", base.method))
    brought = method_named(method).settings
    asked = {"privacy.target_epsilon", "privacy.noise_multiplier"} & flags.keys()
    wrapped = {"privacy.wrap": True} if asked and not has_modes(method) else {}  # a method with modes does so itself
    chosen = in_range(override(base, {**brought, **written, **wrapped, **flags, **typed}))
    check_sharing(chosen, {*written, *flags, *typed})
    configured(chosen)  # a wrong hyper-parameter is told before any log is read
    return chosen


def check_sharing(config: RunConfig, given: Set[str]) -> None:
    """Refuse a mode that the method does not have, and a budget where nothing is shared."""
    from protofed.methods.catalogue import method_named

    modes, mode = method_named(config.method).modes, config.protofed.mode
    if modes and mode not in modes:
        raise ConfigError(f"protofed.mode of {config.method} must be one of {', '.join(modes)}, got {mode!r}")
    spent = sorted(given & {"privacy.target_epsilon", "privacy.noise_multiplier", "privacy.trust"})
    if modes and mode == "nothing" and spent:
        raise ConfigError(
            f"{spent[0]} has no meaning with --share nothing: nothing leaves a device, ε = 0; leave it out"
        )


def load(config: RunConfig, root: Path) -> "InteractionLog":
    """The log a config names: the synthetic world, or a prepared log under `root`, thinned to the asked-for clients."""
    from protofed.data.filters import subsample_users
    from protofed.data.prepared import load_log

    made_up = config.dataset == "synthetic"
    log = synthetic_world().log if made_up else load_log(config.dataset, root)
    return subsample_users(log, config.clients, seed=0) if config.clients else log


def surroundings(config: RunConfig, root: Path) -> "Surroundings":
    """What a model is given beside its log: everybody's events, of the asked-for clients, and the table of items."""
    from protofed.data.filters import before_core
    from protofed.data.prepared import family, load_log
    from protofed.experiments.publish import Surroundings

    items = item_table(config.dataset, root)
    if config.clients or config.dataset == "synthetic":
        return Surroundings(items=items)
    everyone = load_log(config.dataset, root, canonical=False)
    return Surroundings(before_core(everyone, family(config.dataset, root)), items)


def item_table(dataset: str, root: Path) -> "pa.Table | None":
    """What is known of the log's items; None without a table, or without polars, which reads it."""
    from importlib.util import find_spec

    if dataset == "synthetic":
        from protofed.data.synthetic_items import describe_items
        from protofed.seeds import stream

        return describe_items(synthetic_world(), stream(0, "synthetic items"))
    if find_spec("polars") is None:
        return None
    from protofed.data.items import load_items

    return load_items(dataset, root)


@cache
def synthetic_world() -> "DriftingWorld":
    """The embedded world and the truth behind it: the same events for every seed of a method."""
    from protofed.data.synthetic import drifting_world, preset
    from protofed.seeds import stream

    return drifting_world(preset("default"), stream(0, "synthetic world"))


def print_methods(as_json: bool) -> None:
    from protofed.methods.catalogue import METHODS

    if as_json:
        print(json.dumps({name: entry.summary for name, entry in METHODS.items()}, indent=2))
        return
    for name, entry in METHODS.items():
        print(f"{name:<20} {entry.summary}")


def print_result(folder: "RunFolder", config: RunConfig, as_json: bool) -> None:
    """What a finished run comes down to, and what it promised."""
    from protofed.experiments.summary import summarise_run

    summary = summarise_run(folder) | {"variant": config.variant, "privacy": promise_of(folder, config)}
    if as_json:
        print(json.dumps(summary, indent=2, ensure_ascii=False))
    else:
        print_summary(summary, folder.path)


def promise_of(folder: "RunFolder", config: RunConfig) -> dict[str, object] | None:
    """What a run's ledger promises; None where there is no claim."""
    from protofed.methods.catalogue import only_noised
    from protofed.privacy.promise import promised

    return promised(folder.path / "ledger.json", config.privacy.delta, nothing=only_noised(config))


def print_summary(summary: Mapping[str, Any], out: Path) -> None:
    """The headline as a table."""
    variant = "" if summary["variant"] == "standard" else f" ({summary['variant']})"
    title = f"{summary['method']}{variant} on {summary['dataset']}, seed {summary['seed']}"
    table = Table(title=title, caption="mean of A\\[t, t] over slices t = 1..T")
    for column in ("candidates", "subset", "NDCG@10", "HR@10", "queries"):
        table.add_column(column, justify="left" if column in ("candidates", "subset") else "right")
    for row in summary["headline"]:
        numbers = (f"{row['ndcg@10']:.4f}", f"{row['hr@10']:.4f}", f"{row['queries']:,}")
        table.add_row(row["candidates"], row["subset"], *numbers)
    console = Console()
    console.print(table)
    for line in in_words(summary["headline"]):
        print(line)
    print(f"forgetting AF {summary['af']:.4f}, backward transfer {summary['bwt']:.4f}")
    print_promise(summary["privacy"])
    for warning in summary["warnings"]:
        console.print(f"warning: {warning}", style="yellow", highlight=False)
    if (out / "model.safetensors").is_file():
        print(f"next: protofed recommend {shlex.quote(str(out))} --user ID -n 10")
    print(f"all figures: protofed report {shlex.quote(str(out))} -o report.html")


def in_words(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The two rows that matter most, for who has not read docs/metrics.md."""
    among = {"full": "of all items", "sampled": "of it and 99 others"}
    for row in rows:
        if row["subset"] == "all" and row["candidates"] in among:
            share = f"{100 * row['hr@10']:.0f} % of {row['queries']:,} questions"
            yield f"the user's next item was among the ten best {among[row['candidates']]} in {share}"


def print_promise(said: object) -> None:
    """ε with everything it means nothing without."""
    from protofed.privacy.promise import promise_lines

    for line in promise_lines(said):
        print(line)
