"""Hyper-parameters chosen on pseudo-slices: the base block alone, cut again as if it were a whole log.

The log ends where the base block's validation part does, before anything else sees it: no slice that a table averages,
and not even the base block's test part (it enters AF), has been tuned on. Every trial is an ordinary run over this
shortened log that tests A[t, t] alone; its objective is their mean over pseudo-slices t, NDCG@10, sampled candidates.
Trial 0 is the defaults; the others are drawn from the method's grid without replacement, by the run's seed.

A folder of trials: METHOD/trial-NN/ is a run folder, METHOD/trial-NN.json what came of it (written when the trial is
over, then never repeated), METHOD/best.toml the config of the best so far; trials.csv lists all.
"""

import csv
import hashlib
import io
import itertools
import json
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from protofed.config import PrivacyConfig, RunConfig, Value, in_range, override, to_toml
from protofed.data.interactions import InteractionLog, fingerprint, select
from protofed.errors import ConfigError, DataError, MachineError, ProtoFedError, RunFolderError
from protofed.evaluation.forgetting import accuracy
from protofed.experiments.folder import RunFolder, load_checkpoint
from protofed.experiments.grid import texts
from protofed.experiments.matrices import main_values
from protofed.experiments.records import read_json
from protofed.experiments.run import Experiment
from protofed.features.content import Content
from protofed.federation.plan import Stream, plan_releases
from protofed.files import CHECKSUM, harmless, make_folder, write_text
from protofed.methods.catalogue import configured, private_by_itself
from protofed.methods.private import Private, as_asked
from protofed.methods.search_spaces import Space, space_of
from protofed.progress import Progress, silent
from protofed.seeds import numpy_stream
from protofed.slices.partition import INSTANTS_PER_SLICE, partition

COLUMNS = ("method", "trial", "ndcg@10", "failed", "settings", "made_with")  # of trials.csv
LATER = ("head = false\n", "patience_steps = 0\n")  # settings that earlier trials do not name, at their defaults
Tried = Mapping[tuple[str, str], Mapping[str, str]]  # method, made_with -> a row of trials.csv


@dataclass(frozen=True, slots=True)
class Trial:
    """One point of the grid: settings on top of the defaults."""

    number: int
    settings: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a trial: its objective, or why there is none."""

    method: str
    trial: int
    settings: Mapping[str, Value]
    objective: float | None
    failed: str = ""
    made_with: str = ""  # a name for everything it was run with

    @property
    def counts(self) -> bool:
        """Whether this trial may win."""
        return not self.failed and self.objective is not None and math.isfinite(self.objective)


@dataclass(frozen=True, slots=True)
class Tuning:
    """One method's search; made by `tuning`, which cuts the log."""

    config: RunConfig  # of the real run; trials change settings in it
    pseudo_log: InteractionLog
    fingerprint: str  # of the pseudo-log
    n_slices: int
    privacy: PrivacyConfig  # whose noise every trial has
    trials: tuple[Trial, ...]


def tuning(
    config: RunConfig, log: InteractionLog, *, n_slices: int = 3, n_trials: int = 20, held: Sequence[str] = ()
) -> Tuning:
    """The search for the config's method on the log's base block; settings named in `held` are not searched."""
    if n_trials < 1:
        raise ConfigError(f"--trials must be at least 1, got {n_trials}; trial 0 is the defaults")
    everything = space_of(config.method, config.variant, private=config.privacy.wrap)
    space = {key: values for key, values in everything.items() if key not in held}
    block = base_block(log, config, n_slices)
    trials = drawn_trials(config, space, n_trials)
    return Tuning(config, block, fingerprint(block), n_slices, pinned_noise(config), trials)


def base_block(log: InteractionLog, config: RunConfig, n_slices: int) -> InteractionLog:
    """The events up to the end of the base block's validation part, once it is clear that they can be cut again."""
    if n_slices < 1:
        raise ConfigError(f"--slices must be at least 1, got {n_slices}; the default is 3")
    stream = config.stream
    end = partition(
        log, n_slices=stream.n_slices, base_fraction=stream.base_fraction, edges=stream.edges, base=stream.base
    )[0].val_end
    keep = torch.arange(len(log)) < end
    block = select(log, keep)
    needed = (n_slices + 1) * INSTANTS_PER_SLICE
    if block.n_instants < needed:
        raise DataError(
            f"the base block of {log.name} has {block.n_instants} distinct timestamps before its test part, "
            f"too few for a pseudo base and {n_slices} pseudo-slices ({needed} needed); ask for fewer --slices"
        )
    return block


def drawn_trials(config: RunConfig, space: Space, n_trials: int) -> tuple[Trial, ...]:
    """The defaults, then other points of the grid, each at most once; all of them where there are no more."""
    grid = [dict(zip(space, point, strict=True)) for point in itertools.product(*space.values())]
    defaults = {key: value_at(config, key) for key in space}
    points = (grid[index] for index in numpy_stream(config.seed, "tune", config.method).permutation(len(grid)))
    others = [point for point in points if point != defaults][: n_trials - 1]
    return (Trial(0, {}), *(Trial(number, point) for number, point in enumerate(others, start=1)))


def value_at(config: RunConfig, key: str) -> Any:
    """What a config gives at a dotted key, or its method at `hyper.NAME`."""
    return attrgetter(key.removeprefix("hyper."))(configured(config) if key.startswith("hyper.") else config)


def run_trial(
    search: Tuning,
    trial: Trial,
    out: Path,
    cache: Path,
    device: torch.device | None = None,
    *,
    command: str = "run_trial",
    content: Content | None = None,
    progress: Progress = silent,
) -> Outcome:
    """One trial in its own folder under `out`: continued where it was killed, read where it is over.

    Trials do not depend on each other, so processes and machines can share them out; `write_table` joins what they
    left under one `out`.
    """
    config, folder = override(search.config, trial.settings), trial_folder(search, trial, out)
    if (known := known_outcome(search, trial, out)) is not None:
        return known
    folder.parent.mkdir(parents=True, exist_ok=True)
    pseudo, where = pseudo_config(search, config), device or torch.device("cpu")
    experiment = Experiment(pseudo, search.pseudo_log, cache, where, command, diagonal=True, content=content)
    outcome, trace = attempted(experiment, trial, folder, progress)
    outcome = replace(outcome, made_with=digest(search, config))
    write_note(folder, outcome, trace)
    return outcome


def write_note(folder: Path, outcome: Outcome, trace: str = "") -> None:
    """The trial is over: from now on it is read, not run."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    note = asdict(outcome) | {"traceback": trace, CHECKSUM: _checksum(outcome)}
    write_text(note_of(folder), json.dumps(note, indent=2) + "\n")


def tried(trials: Path) -> Tried:
    """The rows of a trials.csv by method and by what each was made with."""
    way_out = "give the trials.csv that `protofed tune` wrote"
    try:
        with open(trials, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if missing := {*COLUMNS} - {*(reader.fieldnames or ())}:
                raise RunFolderError(f"{trials} has no column {min(missing)}; {way_out}")
            rows = {(row["method"], row["made_with"]): row for row in reader}
        for row in rows.values():
            if not row["failed"]:
                float(row["ndcg@10"])
    except (ValueError, TypeError, csv.Error) as problem:
        raise RunFolderError(f"{trials} cannot be read ({problem}); {way_out}") from problem
    return rows


def take_over(search: Tuning, rows: Tried, out: Path) -> int:
    """How many trials of an earlier search count here too: those made with the same, to the last setting."""
    taken, method = 0, search.config.method
    for trial in search.trials:
        folder, made_with = trial_folder(search, trial, out), digest(search, override(search.config, trial.settings))
        row = rows.get((method, made_with))
        if row is not None and not row["failed"] and not note_of(folder).is_file():
            value = float(row["ndcg@10"])
            write_note(folder, Outcome(method, trial.number, dict(trial.settings), value, made_with=made_with))
            taken += 1
    return taken


def attempted(experiment: Experiment, trial: Trial, folder: Path, progress: Progress) -> tuple[Outcome, str]:
    """The trial's outcome, and where it went wrong if it did; what would stop every trial is raised instead."""
    outcome = Outcome(experiment.config.method, trial.number, dict(trial.settings), None)
    try:
        in_range(experiment.config)
        run = experiment.run(folder, progress)
        return judged(outcome, run), ""
    except ConfigError as problem:
        if trial.number == 0:  # the defaults themselves are refused
            raise
        return replace(outcome, failed=f"refused: {problem}"), ""
    except (ProtoFedError, OSError):
        raise
    except Exception as problem:
        reason = (str(problem).splitlines() or [""])[0]
        if isinstance(problem, MemoryError | torch.OutOfMemoryError):  # the machine's failure, not the settings'
            raise MachineError(
                f"trial {trial.number} of {outcome.method} ran out of memory ({reason}); what is over is kept: start "
                "again with fewer processes beside it or a smaller --clients"
            ) from problem
        return replace(outcome, failed=f"{type(problem).__name__}: {reason}"), traceback.format_exc()


def judged(outcome: Outcome, run: RunFolder) -> Outcome:
    """The objective of a finished run: the mean of A[t, t]; a state or a value that is not finite is a failure."""
    value, checkpoint = accuracy(main_values(run.table("metrics"))), load_checkpoint(run)
    tensors = checkpoint[1].tensors if checkpoint is not None else {}
    broken = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken or not math.isfinite(value):
        return replace(outcome, failed=f"diverged: {broken[0] if broken else 'the objective'} is not finite")
    return replace(outcome, objective=value)


def pseudo_config(search: Tuning, config: RunConfig) -> RunConfig:
    """The config as a trial runs it: fewer slices, each with the noise that the real stream will need."""
    stream = replace(config.stream, n_slices=search.n_slices, base="block")
    noise = search.privacy  # what a trial may change besides, say a clipping radius, is its own
    privacy = replace(config.privacy, noise_multiplier=noise.noise_multiplier, target_epsilon=noise.target_epsilon)
    return replace(config, stream=stream, privacy=privacy)


def pinned_noise(config: RunConfig) -> PrivacyConfig:
    """The privacy settings with the real stream's noise: a budget spread over fewer slices would buy less of it."""
    privacy, method = config.privacy, as_asked(configured(config), config)
    own = private_by_itself(config.method, config.protofed.mode)
    if not (privacy.wrap or own) or not privacy.target_epsilon:
        return privacy
    n_slices = config.stream.n_slices
    trainings = method.trainings.until(n_slices) if isinstance(method, Private) else n_slices
    rounds = trainings * privacy.rounds_per_slice
    (settled,) = plan_releases(privacy, (Stream("rounds", privacy.sampling_rate, rounds, privacy.noise_multiplier),))
    return replace(privacy, noise_multiplier=settled.noise_multiplier, target_epsilon=0.0)


def trial_folder(search: Tuning, trial: Trial, out: Path) -> Path:
    return out / search.config.method / f"trial-{trial.number:02d}"


def note_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def digest(search: Tuning, config: RunConfig) -> str:
    """A name for everything a trial was run with."""
    text = to_toml(config)
    for line in LATER:
        text = text.replace(line, "")
    return hashlib.sha256(f"{search.fingerprint} {search.n_slices}\n{text}".encode()).hexdigest()[:16]


def known_outcome(search: Tuning, trial: Trial, out: Path) -> Outcome | None:
    """What an earlier call left of this trial, or None where it is not over."""
    path = note_of(trial_folder(search, trial, out))
    if not path.is_file():
        return None
    known = _outcome(path)
    if known.made_with != digest(search, override(search.config, trial.settings)):
        raise RunFolderError(f"{path} was made with other events, settings or defaults; choose a new folder")
    return known


def best_of(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The highest finite objective, the earlier trial where two are equal; None where every trial failed."""
    return max((o for o in outcomes if o.counts), key=lambda o: (o.objective or 0.0, -o.trial), default=None)


def write_best(search: Tuning, out: Path) -> Outcome | None:
    """METHOD/best.toml: the real run's config with the settings of the best trial that is over."""
    over = [known for trial in search.trials if (known := known_outcome(search, trial, out)) is not None]
    best = best_of(over)
    if best is not None:
        head = f"# trial {best.trial}, the best of the {len(over)} of {len(search.trials)} that are over: "
        head += f"mean sampled NDCG@10 {best.objective!r} over {search.n_slices} pseudo-slices of the base block\n"
        config = override(search.config, best.settings)
        write_text(out / search.config.method / "best.toml", head + to_toml(config))
    return best


def write_table(out: Path) -> list[Outcome]:
    """Every trial that is over, in order, as it now is in trials.csv; nothing in it depends on the clock."""
    outcomes = sorted(map(_outcome, out.glob("*/trial-*.json")), key=lambda o: (o.method, o.trial))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for o in outcomes:
        row = (o.method, o.trial, o.objective, o.failed, as_flags(o.settings), o.made_with)
        writer.writerow([harmless(value) if isinstance(value, str) else value for value in row])
    write_text(out / "trials.csv", text.getvalue())
    return outcomes


def as_flags(settings: Mapping[str, Value]) -> str:
    """Settings as one would give them to --set, separated by spaces."""
    return " ".join(texts(settings.items()))


def claim_folder(out: Path, asked: Mapping[str, object]) -> None:
    """The folder for this search: new, or holding the same one; `asked` is what all its methods share."""
    path = out / "tune.json"
    asked = json.loads(json.dumps(asked))
    if path.is_file():
        held = read_json(path, "choose a new folder")
        for key in sorted({*held, *asked}):
            was, now = held.get(key), asked.get(key)
            if was != now:
                told = f"{key} {was!r}, asked for {now!r}"
                raise RunFolderError(f"--out {out} holds another tune ({told}); choose a new folder")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunFolderError(f"--out {out} is not empty and holds no tune; choose a new folder")
    make_folder(out)
    write_text(path, json.dumps(asked, indent=2) + "\n")


def _outcome(path: Path) -> Outcome:
    """What a trial's note says; a note that lacks something, or was changed after it was written, is refused."""
    way_out = "delete it, and the trial is judged again"
    note = read_json(path, way_out)
    wanted = {field.name for field in fields(Outcome)}
    if missing := {*wanted, CHECKSUM} - {*note}:
        raise RunFolderError(f"{path} has no {min(missing)}; {way_out}")
    outcome = Outcome(**{name: note[name] for name in wanted})
    if note[CHECKSUM] != _checksum(outcome):
        raise RunFolderError(f"{path} is damaged: its checksum does not match; {way_out}")
    return outcome


def _checksum(outcome: Outcome) -> str:
    return hashlib.sha256(json.dumps(asdict(outcome), sort_keys=True).encode()).hexdigest()
