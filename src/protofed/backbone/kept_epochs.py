"""A training on disk between two epochs, so that one that is stopped or killed goes on from its last epoch."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.optim import Optimizer

from protofed.backbone.sasrec import SASRec
from protofed.errors import StorageError
from protofed.files import load_tensors, save_tensors

logger = logging.getLogger(__name__)

Weights = Mapping[str, Tensor]
NOW, BEST, MOMENTS = "now", "best", "moments"  # how the names of a file's tensors begin


@dataclass(frozen=True, slots=True)
class SoFar:
    """What a training knows after some epochs, besides the model and its optimiser: random draws are keyed by epoch."""

    trace: tuple[float, ...]
    steps_per_epoch: int
    newest_target: int
    best: Weights


@dataclass(slots=True)
class KeptEpochs:
    """The file of one training: weights, the best ones, the optimiser's moments and the trace after each epoch.

    Neither what a descent nor what an extra loss may remember is in it: it is for trainings that have neither.
    """

    path: Path
    is_kept: bool = True  # until an epoch could not be saved

    def save(self, model: SASRec, optimiser: Optimizer, so_far: SoFar, *, is_best: bool) -> None:
        """Write the state after an epoch; where the disk does not take it, say so once and train on without."""
        if not self.is_kept:
            return
        tensors = prefixed(NOW, model.state_dict()) | ({} if is_best else prefixed(BEST, so_far.best))
        notes = [so_far.trace, so_far.steps_per_epoch, so_far.newest_target]
        try:
            save_tensors(self.path, tensors | moments_of(optimiser), {"so far": json.dumps(notes)})
        except StorageError as problem:
            logger.warning("the training's epochs are not kept (%s)", problem)
            self.is_kept = False

    def load(self, model: SASRec, optimiser: Optimizer) -> SoFar | None:
        """What was known after the last epoch that was saved, its weights and moments put in place; None without one.

        A damaged file is told, and the training starts anew.
        """
        if not self.path.is_file():
            return None
        try:
            tensors, notes = load_tensors(self.path)
            trace, steps, newest = json.loads(notes["so far"])
            now = beginning_with(NOW, tensors)
            best = beginning_with(BEST, tensors) or now
            moments = moments_from(beginning_with(MOMENTS, tensors))
            for weights in (now, best):
                check_shapes(weights, model.state_dict())
            restore(optimiser, moments)
        except Exception as problem:
            reason = " ".join(str(problem).split())
            logger.warning("%s cannot be read (%s); the training starts anew", self.path, reason)
            return None
        model.load_state_dict(now)
        at = model.items.device
        return SoFar(tuple(trace), steps, newest, {name: tensor.to(at, copy=True) for name, tensor in best.items()})

    def remove(self) -> None:
        """Forget the training: it is over."""
        self.path.unlink(missing_ok=True)


def prefixed(prefix: str, tensors: Weights) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def beginning_with(prefix: str, tensors: Weights) -> dict[str, Tensor]:
    """The tensors that were saved under a prefix, by their own names."""
    return {name.removeprefix(f"{prefix}."): t for name, t in tensors.items() if name.startswith(f"{prefix}.")}


def check_shapes(found: Weights, wanted: Weights) -> None:
    """Refuse weights that are not this model's, before any of them is put into it."""
    if {name: t.shape for name, t in found.items()} != {name: t.shape for name, t in wanted.items()}:
        raise ValueError("it holds the weights of another model")


def moments_of(optimiser: Optimizer) -> dict[str, Tensor]:
    """What AdamW remembers of every parameter, named by the parameter's number."""
    state = optimiser.state_dict()["state"]
    return {f"{MOMENTS}.{number}.{name}": value for number, kept in state.items() for name, value in kept.items()}


def moments_from(tensors: Weights) -> dict[int, dict[str, Tensor]]:
    """The same as PyTorch's optimisers take them."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    return state


def restore(optimiser: Optimizer, moments: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Give an optimiser its memory back: all parameters' or, where one is missing or does not fit, an error."""
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    for number, kept in moments.items():
        if any(value.dim() and value.shape != parameters[number].shape for value in kept.values()):
            raise ValueError("it holds the moments of another model")
    optimiser.load_state_dict({**optimiser.state_dict(), "state": moments})
