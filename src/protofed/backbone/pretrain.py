"""The warm-up: the backbone learns the base block once; every method of the same data, preset and seed shares it."""

import contextlib
import hashlib
import json
import logging
from dataclasses import asdict, replace
from pathlib import Path

import torch

from protofed.backbone.content import with_nearest
from protofed.backbone.kept_epochs import KeptEpochs
from protofed.backbone.sasrec import CONTENT, ContentRows, SASRec, at_rest
from protofed.backbone.tower import Tower, Towered, settled
from protofed.backbone.training import Fit, PlainDescent, Task, everything, numbers_in, train
from protofed.config import RunConfig
from protofed.errors import RunFolderError, StorageError
from protofed.features.content import Content
from protofed.files import UNFINISHED, in_turn, load_tensors, make_folder, save_tensors
from protofed.progress import Progress, silent
from protofed.seeds import stream
from protofed.slices.stream import SliceStream, TimeSlice, halves

logger = logging.getLogger(__name__)

TOWER_RECIPE = 2  # the same for what a tower adds
RECIPE = 4  # raise when the warm-up's mathematics changes, so that no old cache is taken for a new one


def warm_up(
    config: RunConfig,
    base: TimeSlice,
    *,
    device: torch.device,
    content: Content | None = None,
    kept: KeptEpochs | None = None,
    progress: Progress = silent,
) -> tuple[SASRec, Fit]:
    """A backbone trained on the train part of the base block, stopped early on its validation part.

    Given content, it learns a tower on the way, which makes the rows of items that it has not trained.
    Where a head is to be fitted, the part's later half stops nothing: the head must not meet scores that it has chosen.
    """
    if config.scoring.head:
        base = replace(base, validation=halves(base.validation)[0])
    model = untrained_backbone(config, base.n_train_items, content).to(device)
    settings = config.training
    task = Task(base, base.train_positions, settings.base_epochs, settings.learning_rate, settings.prompt_rate)
    descend = PlainDescent(settings.max_grad_norm)
    model, fit = train(model, task, settings, seed=config.seed, descend=descend, kept=kept, progress=progress)
    return (settled(model) if isinstance(model, Towered) else model), fit


def untrained_backbone(config: RunConfig, n_rows: int, content: Content | None) -> SASRec:
    """A backbone as it starts, beside a tower where there is content for one."""
    rng = stream(config.seed, "backbone")
    if content is None:
        return SASRec(config.backbone, n_rows, rng)
    tower = Tower(content, torch.ones(n_rows, dtype=torch.bool), config.backbone.width, stream(config.seed, "tower"))
    return Towered(config.backbone, n_rows, rng, tower, config.content.id_dropout)


def content_key(config: RunConfig, data: SliceStream, device: torch.device, content: Content | None = None) -> str:
    """A name for the warm-up that changes with anything that could change its weights; `content`: of a tower."""
    digest = hashlib.sha256()
    base_only = replace(config.training, slice_learning_rate=0.0, slice_epochs=0)  # these act after the warm-up
    settings = [asdict(part) for part in (config.backbone, base_only)]
    digest.update(json.dumps([RECIPE, settings, config.seed, device.type, torch.__version__], sort_keys=True).encode())
    until = data.bounds[0].val_end
    for column in (data.log.users, data.log.items, data.log.times):
        digest.update(column[:until].numpy().tobytes())
    asked = data.query_set(0, "val")
    digest.update(asked.negatives.numpy().tobytes())
    digest.update(json.dumps([asdict(data.bounds[0]), data.config.row_order_history]).encode())
    if config.scoring.head:
        digest.update(b"stopped on the earlier half of the validation part")
    if content is not None:
        digest.update(json.dumps([TOWER_RECIPE, content.key(), config.content.id_dropout]).encode())
    return digest.hexdigest()[:32]


def cached_warm_up(
    config: RunConfig,
    data: SliceStream,
    cache: Path,
    *,
    device: torch.device,
    content: Content | None = None,
    progress: Progress = silent,
) -> tuple[SASRec, Fit]:
    """The warm-up from the cache folder, or trained now and put there; with the content rows that are asked for."""
    for_tower = content if config.content.kind == "tower" else None
    model, fit = cached_backbone(config, data, cache, device=device, content=for_tower, progress=progress)
    if content is None or for_tower is not None:
        return model, fit
    return with_nearest(model, content, config.content.neighbours), fit


def cached_backbone(
    config: RunConfig,
    data: SliceStream,
    cache: Path,
    *,
    device: torch.device,
    content: Content | None = None,
    progress: Progress = silent,
) -> tuple[SASRec, Fit]:
    """The warm-up from the cache folder, or trained now and put there.

    A damaged file is told, trained again and replaced. Whether the cache can be written to is known before training;
    where the disk fills up meanwhile, the run goes on with what it has trained. A warm-up that was stopped goes on
    after its last epoch; where another process makes the same one, this one waits for it.
    """
    name = f"warm-up-{content_key(config, data, device, content)}"
    path = cache / f"{name}.safetensors"
    if path.is_dir():
        raise RunFolderError(f"{path} is a folder where a warm-up belongs; remove it, or give another --cache")
    with contextlib.suppress(RunFolderError):  # told below, once nobody else mends it
        if path.is_file():
            return load_backbone(path, config, device)
    make_folder(cache)

    def tell() -> None:
        logger.info("waiting for another process that makes the same warm-up, %s", path)
        progress("waiting", 0, None, "another process is making the same warm-up; this one waits for it")

    with in_turn(cache / f".{name}.lock", tell):
        if (found := undamaged(path, config, device)) is not None:
            return found  # made meanwhile
        for leftover in cache.glob(f"{name}.*{UNFINISHED}"):
            leftover.unlink(missing_ok=True)
        kept = KeptEpochs(cache / f"{name}.training.safetensors")
        model, fit = warm_up(config, data.slice_(0), device=device, content=content, kept=kept, progress=progress)
        try:
            save_backbone(path, model, fit)
        except StorageError as problem:
            logger.warning("the warm-up is not kept for other runs (%s)", problem)
        else:
            kept.remove()
    return model, fit


def undamaged(path: Path, config: RunConfig, device: torch.device) -> tuple[SASRec, Fit] | None:
    """The finished warm-up in a file; None where there is none, or where it is damaged, which is told."""
    if not path.is_file():
        return None
    try:
        return load_backbone(path, config, device)
    except RunFolderError as problem:
        logger.warning("%s; it is damaged and is trained again", problem)
        return None


def save_backbone(path: Path, model: SASRec, fit: Fit) -> None:
    """Weights and how they came about, in one safetensors file."""
    save_tensors(path, model.state_dict(), {"fit": json.dumps(asdict(fit))})


def load_backbone(path: Path, config: RunConfig, device: torch.device) -> tuple[SASRec, Fit]:
    """What `save_backbone` wrote; a file that is not whole is an error."""
    try:
        weights, notes = load_tensors(path)
        fit = json.loads(notes["fit"])
        model = SASRec(config.backbone, len(weights["items"]), stream(config.seed, "backbone"))
        if f"{CONTENT}.rows" in weights:
            rows = ContentRows(weights[f"{CONTENT}.rows"], weights[f"{CONTENT}.described"])
            model.register_module(CONTENT, rows)
        model.load_state_dict(weights)
        trained = numbers_in(everything(model))
        how = Fit(tuple(fit["trace"]), fit["steps_per_epoch"], fit["newest_target"], trained)
    except Exception as problem:
        reason = str(problem).splitlines()[0]
        raise RunFolderError(f"{path} cannot be read ({reason})") from problem
    return at_rest(model.to(device)), how
