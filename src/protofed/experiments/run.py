"""One method on one log, slice by slice: learn, check for leaks, evaluate, checkpoint."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from protofed.backbone.pretrain import cached_warm_up
from protofed.backbone.training import PlainDescent
from protofed.config import RunConfig, features_of
from protofed.data.interactions import InteractionLog, fingerprint
from protofed.errors import ConfigError, RunFolderError
from protofed.experiments import folder as folders
from protofed.experiments.evaluate import evaluate
from protofed.experiments.folder import RunFolder
from protofed.experiments.publish import Surroundings, publish, write_card
from protofed.experiments.stages import CHECKING, PREPARING, WARM_UP, evaluating, learning
from protofed.features.content import Content
from protofed.inference.folder import CARD, MODEL
from protofed.methods.catalogue import configured, method_named
from protofed.methods.headed import under_head, without_head
from protofed.methods.private import as_asked
from protofed.methods.protocol import Diagnostics, Method, Releasing, World
from protofed.methods.scoring import refuse_prior
from protofed.privacy.ledger import SHARE, share_with_base_events
from protofed.progress import RUN, Progress, silent, within
from protofed.slices.leaks import check_candidates, check_evidence, check_public
from protofed.slices.stream import SliceStream
from protofed.snapshot import Snapshot, restore, take_snapshot

Checkpoint = tuple[int, Snapshot] | None
TIMING_SCHEMA = pa.schema([("slice", pa.int32()), ("stage", pa.string()), ("seconds", pa.float64())])


@dataclass(frozen=True, slots=True)
class Experiment:
    """A config, the log it runs on, where, and where warm-ups are kept; it may test A[t, t] alone."""

    config: RunConfig
    log: InteractionLog
    cache: Path
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    command: str = "Experiment.run"
    diagonal: bool = False
    content: Content | None = None  # what is known of the log's items, where config.content asks for it
    keep: Surroundings | None = None  # make the folder a model, with these beside the log; None: results alone
    through: Callable[[Method[Any]], Method[Any]] | None = None  # what carries the method's rounds; None: this process

    def run(self, out: Path, progress: Progress = silent, *, patience: float = 0.0) -> RunFolder:
        """The finished run folder; what an earlier, killed call left is continued, what it finished is kept.

        A folder that another process works in is waited for at most `patience` seconds.
        """
        method = as_asked(configured(self.config, method_named(self.config.method)), self.config)
        method = self.through(method) if self.through else method
        method = under_head(method, self.config)
        check_content(self.config, self.content, self.log)
        data = SliceStream(self.log, self.config.stream)  # a log that cannot be cut leaves no folder behind
        with folders.opened(out, self.config, patience=patience) as folder:
            folders.refuse_other_log(folder, fingerprint(self.log))
            if not folder.finished:
                with deterministic():
                    run_slices(self, folder, method, data, progress)
            if self.keep is not None and (out / MODEL).is_file() and not (out / CARD).is_file():
                write_card(folder, self.config, data, self.keep)
            return folder


def check_content(config: RunConfig, content: Content | None, log: InteractionLog) -> None:
    """Refuse a run whose settings ask for content that it was not given, and content that tells of events."""
    if bool(features_of(config.content)) != (content is not None):
        raise ConfigError(
            f"content.features is {config.content.features!r}, but the run was given "
            f"{'no content' if content is None else 'content'}; features.build.content_of makes what settings ask for"
        )
    if content is not None:
        check_public(log, content)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Reproducible kernels only, until the block ends."""
    memory: Any = torch.utils.deterministic  # its attributes are made at run time
    before, filled = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # writes every tensor twice; nothing here reads it
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = filled


def run_slices(
    experiment: Experiment, folder: RunFolder, method: Method[Any], data: SliceStream, progress: Progress
) -> None:
    """Every slice that is not finished yet, each evaluated and checkpointed before the next."""
    environment = folders.environment(experiment.device, experiment.command, experiment.config.seed)
    share = share_with_base_events(data.log.users.numpy(), data.bounds[0].end)
    folders.describe(folder, {**environment, folders.EVENTS: fingerprint(data.log), SHARE: share})
    checkpoint = folders.load_checkpoint(folder)  # damage is told before anything is computed
    if checkpoint is not None:
        folders.check_slices(folder, checkpoint[0])
    n_slices = data.n_slices
    check_all_candidates(data, progress)
    progress(RUN, 0, n_slices + 1)
    world, warm_up_seconds = warmed_up(experiment, folder, data, progress)
    state, first = resume(folder, checkpoint, method, world)
    for index in range(first, data.n_slices + 1):
        slice_, began = data.slice_(index), time.monotonic()
        diagnostics: Diagnostics = {}
        if index > 0:
            descend = PlainDescent(experiment.config.training.max_grad_norm)
            write_ahead(folder, method, world, state, slices_ahead=1)
            progress(learning(index, n_slices), 0, None)
            learner = replace(world, progress=within(progress, learning(index, n_slices)))
            state, diagnostics = method.learn(learner, state, slice_, descend)
        learned = time.monotonic()
        check_evidence(data, index, method.evidence(state))
        progress(evaluating(index, n_slices), 0, None)
        asker = replace(world, progress=within(progress, evaluating(index, n_slices)))
        tables = evaluate(method, asker, state, slice_, data, diagonal=experiment.diagonal)
        seconds = {} if index else {"warm-up": warm_up_seconds}
        seconds |= {"learn": learned - began, "evaluate": time.monotonic() - learned}
        rows = [{"slice": index, "stage": stage, "seconds": spent} for stage, spent in seconds.items()]
        tables["timing"] = pa.Table.from_pylist(rows, schema=TIMING_SCHEMA)
        folder.log({"slice": index, "stage": "learn", **diagnostics})
        folders.save_slice(folder, index, tables, take_snapshot(state))
        progress(RUN, index + 1, n_slices + 1, f"slice {index} done" if index else "base block done")
    if experiment.keep is not None:
        publish(folder, method, world, state, data, experiment.keep)
    folders.finish(folder, data.n_slices)


def warmed_up(experiment: Experiment, folder: RunFolder, data: SliceStream, progress: Progress) -> tuple[World, float]:
    """The world every method starts from, and how long its warm-up took (next to nothing where it was kept)."""
    began = time.monotonic()
    config, device = experiment.config, experiment.device
    told = within(progress, WARM_UP)
    backbone, fit = cached_warm_up(
        config, data, experiment.cache, device=device, content=experiment.content, progress=told
    )
    folder.log({"slice": 0, "stage": "warm-up", **fit.diagnostics()})
    progress(PREPARING, 0, None)
    return World(config, data.slice_(0), backbone, within(progress, PREPARING)), time.monotonic() - began


def write_ahead(folder: RunFolder, method: Method[Any], world: World, state: Any, *, slices_ahead: int) -> None:
    """The ledger on disk, before what it lists leaves the devices; a repeated slice repeats the same releases."""
    if isinstance(method, Releasing) and isinstance(without_head(method, state)[0], Releasing):
        ledger = method.releases(world, state, slices_ahead)
        if ledger:  # whatever method made it: no ε is stated for a run that ranks by raw counts besides
            refuse_prior(world.config)
        folders.keep_ledger(folder, ledger, world.config.privacy.trust)


def check_all_candidates(data: SliceStream, progress: Progress = silent) -> None:
    """No candidate set of any slice looks ahead."""
    for index in range(data.n_slices + 1):
        progress(CHECKING, index, data.n_slices + 1)
        for part in ("val", "test"):
            check_candidates(data, data.query_set(index, part))


def resume(folder: RunFolder, checkpoint: Checkpoint, method: Method[Any], world: World) -> tuple[Any, int]:
    """The state to go on from and the slice to do next."""
    if checkpoint is None:
        return method.start(world), 0
    done, snapshot = checkpoint
    device, module = world.backbone.items.device, world.config.method.partition(":")[0]
    trusted = (module.partition(".")[0],) if ":" in world.config.method else ()
    try:
        return restore(snapshot, device, trusted=trusted), done + 1
    except Exception as problem:  # whatever the parts of another version's state raise
        raise RunFolderError(
            f"{folder.path / folders.CHECKPOINT} is not a state of this version ({' '.join(str(problem).split())}); "
            "delete it to start the run again"
        ) from problem


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise ConfigError(f"--device must be cpu, cuda or auto, got {name!r}") from problem
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda was asked for, but PyTorch finds no GPU here; use --device cpu")
    return device
