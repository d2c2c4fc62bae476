"""Gradient training, one loop for every method: early stopping on a slice's validation part, or private rounds.

A private descent (`InRounds`) makes a fixed number of steps, sees one user at a time, never asks the validation part.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from protofed.backbone.injection import rescale_like
from protofed.backbone.losses import LOSSES, draw_negatives, window_losses
from protofed.backbone.sasrec import SASRec, at_rest
from protofed.config import TrainingConfig
from protofed.evaluation.ranking import ndcg, rank_among, rank_of_positive
from protofed.progress import Progress, silent
from protofed.seeds import numpy_stream, seed_of, seeded, stream
from protofed.slices.histories import Histories, leading_padding
from protofed.slices.stream import TimeSlice
from protofed.slices.windows import Windows, batches, moved, training_windows, trimmed

WindowLosses = Callable[[Windows], tuple[Float[Tensor, " W"], Int[Tensor, " W"]]]
ParameterGroups = list[dict[str, Any]]  # as PyTorch's optimisers take them
Trainable = Callable[[SASRec], ParameterGroups]
ExtraLosses = Callable[[SASRec, Windows], Float[Tensor, " W"]]  # what a method adds to each window's summed loss
VALIDATION_CHUNK = 512


@runtime_checkable
class Descend(Protocol):
    """Turns per-user losses into one update of the parameters: the plain one below, or a differentially private one."""

    def __call__(self, losses: WindowLosses, batch: Windows, optimiser: torch.optim.Optimizer) -> None: ...


@runtime_checkable
class InRounds(Protocol):
    """A descent that makes a fixed number of steps, each on a cohort that it draws itself: a private one."""

    def rounds(self) -> range:
        """The numbers of the steps that one more training makes; asking spends them."""
        ...

    def cohort(self, past: Histories, positions: np.ndarray, round_: int, *, length: int, stride: int) -> Windows:
        """The windows of who takes part in the round, user by user; there may be none."""
        ...

    def negatives(self, windows: Windows, n: int, n_items: int, round_: int) -> Int[Tensor, "W n"]:
        """Uniform items for each window, whoever else is in the cohort."""
        ...

    def gradients(self, losses: WindowLosses, batch: Windows, optimiser: torch.optim.Optimizer) -> None:
        """Leaves in every parameter's `grad` what may be known of the cohort; `losses` sees one user at a time."""
        ...

    def __call__(self, losses: WindowLosses, batch: Windows, optimiser: torch.optim.Optimizer) -> None: ...


@dataclass(frozen=True, slots=True)
class Drawing:
    """An extra loss and the stream it draws from, so that each user's draws can be put on a stream of their own."""

    losses: ExtraLosses
    rng: Generator

    def __call__(self, model: SASRec, batch: Windows) -> Float[Tensor, " W"]:
        return self.losses(model, batch)


@dataclass(frozen=True, slots=True)
class PlainDescent:
    """Steps along the mean loss over all targets of the batch, its gradient clipped to a norm."""

    max_grad_norm: float = 1.0

    def __call__(self, losses: WindowLosses, batch: Windows, optimiser: torch.optim.Optimizer) -> None:
        sums, counts = losses(batch)
        optimiser.zero_grad(set_to_none=True)
        (sums.sum() / counts.sum().clamp(min=1)).backward()
        nn.utils.clip_grad_norm_([p for group in optimiser.param_groups for p in group["params"]], self.max_grad_norm)
        optimiser.step()


@dataclass(frozen=True, slots=True)
class Task:
    """What one call of `train` learns: targets at these log positions, for at most so many epochs."""

    slice_: TimeSlice
    positions: np.ndarray
    epochs: int
    learning_rate: float
    prompt_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """How a training went: validation NDCG@10 before the first epoch and after each, and the newest target it used."""

    trace: tuple[float, ...]
    steps_per_epoch: int
    newest_target: int
    trainable: int = 0  # numbers that trained where the backbone is frozen, shared by all users

    @property
    def best_epoch(self) -> int:
        return best_of(self.trace)

    def diagnostics(self) -> dict[str, int | float | tuple[float, ...]]:
        """What the run's log keeps: Steps-to-95 % is read off the trace."""
        epochs = self.best_epoch if self.trace else 1  # private rounds count as one
        counted = {"trainable_parameters": self.trainable, "trainable_parameters_per_user": 0} if self.trainable else {}
        return {**counted, "epochs": epochs, "steps_per_epoch": self.steps_per_epoch, "validation_ndcg10": self.trace}


def best_of(trace: tuple[float, ...] | list[float]) -> int:
    """The first epoch with the highest value; the last one where no validation event gave a value."""
    return int(np.nanargmax(trace)) if np.isfinite(trace).any() else len(trace) - 1


def everything(model: SASRec) -> ParameterGroups:
    """All weights train."""
    return [{"params": list(model.parameters())}]


def train(
    model: SASRec,
    task: Task,
    config: TrainingConfig,
    *,
    seed: int,
    descend: Descend,
    trainable: Trainable = everything,
    extra: ExtraLosses | None = None,
    progress: Progress = silent,
) -> tuple[SASRec, Fit]:
    """A trained copy of the model, at the epoch whose validation NDCG@10 is best (epoch 0 is the model as it came).

    `extra` is given the copy that is being trained and each batch: penalties, distillation, replay.
    """
    model = copy.deepcopy(model).requires_grad_(False)
    groups = trainable(model)
    for parameter in (p for group in groups for p in group["params"]):
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(groups, lr=task.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.98))
    if isinstance(descend, InRounds):
        return train_in_rounds(model, task, config, optimiser, descend, seed=seed, extra=extra, progress=progress)
    trace, weights = [validation_ndcg(model, task.slice_, config.selection)], copy.deepcopy(model.state_dict())
    steps, newest = 0, -1
    for epoch in range(task.epochs):
        windows = epoch_windows(model, task, config, seed, epoch)
        newest = max(newest, int(windows.newest.max()) if len(windows) else -1)
        steps = run_epoch(model, windows, task, config, optimiser, descend, seed, epoch, extra)
        model.refresh_mean_row()
        trace.append(validation_ndcg(model, task.slice_, config.selection))
        if best_of(trace) == epoch + 1:
            weights = copy.deepcopy(model.state_dict())
        progress(f"slice {task.slice_.index}", epoch + 1, task.epochs, f"validation NDCG@10 {trace[-1]:.4f}")
        if epoch + 1 - best_of(trace) >= config.patience:
            break
    model.load_state_dict(weights)
    return at_rest(model), Fit(tuple(trace), steps, newest)


def train_in_rounds(
    model: SASRec,
    task: Task,
    config: TrainingConfig,
    optimiser: torch.optim.Optimizer,
    descend: InRounds,
    *,
    seed: int,
    extra: ExtraLosses | None = None,
    progress: Progress = silent,
) -> tuple[SASRec, Fit]:
    """The model after all rounds of one training, without dropout and random prompts; nothing is selected.

    `Fit` says only what is public: no validation trace, and the newest event that may have been learned from.
    """
    model.eval()
    rounds, device = descend.rounds(), model.items.device
    length, stride = model.config.history_length, config.stride
    for done, round_ in enumerate(rounds):
        cohort = descend.cohort(task.slice_.past, task.positions, round_, length=length, stride=stride)
        losses = losses_of_one_user(model, task, config, descend, seed, round_, extra)
        descend(losses, moved(cohort, device), optimiser)
        progress(f"slice {task.slice_.index}", done + 1, len(rounds), "private rounds")
    model.refresh_mean_row()
    return at_rest(model), Fit((), len(rounds), int(task.positions.max(initial=-1)))


def losses_of_one_user(
    model: SASRec,
    task: Task,
    config: TrainingConfig,
    descend: InRounds,
    seed: int,
    round_: int,
    extra: ExtraLosses | None,
) -> WindowLosses:
    """The losses of a batch that belongs to one user, whose draws depend on the user and the round alone."""

    def losses(batch: Windows) -> tuple[Tensor, Tensor]:
        negatives = descend.negatives(batch, config.negatives, task.slice_.n_train_items, round_)
        sums, counts = window_losses(model, batch, negatives, LOSSES[config.loss])
        if extra is None:
            return sums, counts
        if isinstance(extra, Drawing):
            extra.rng.manual_seed(seed_of(seed, "extra loss", round_, int(batch.users[0])))
        return sums + extra(model, batch), counts

    return losses


def epoch_windows(model: SASRec, task: Task, config: TrainingConfig, seed: int, epoch: int) -> Windows:
    """The windows of one epoch, cut anew."""
    return training_windows(
        task.slice_.past,
        task.positions,
        length=model.config.history_length,
        stride=config.stride,
        rng=numpy_stream(seed, "windows", task.slice_.index, epoch),
    )


def run_epoch(
    model: SASRec,
    windows: Windows,
    task: Task,
    config: TrainingConfig,
    optimiser: torch.optim.Optimizer,
    descend: Descend,
    seed: int,
    epoch: int,
    extra: ExtraLosses | None = None,
) -> int:
    """One pass over the windows; returns the number of steps."""
    model.train()
    purpose = (task.slice_.index, epoch)
    order, draws = stream(seed, "order", *purpose), stream(seed, "negatives", *purpose)
    steps, device = 0, model.items.device
    with seeded(seed, "dropout", *purpose):
        for batch in batches(windows, config.batch_size, order):
            negatives = draw_negatives(len(batch), config.negatives, task.slice_.n_train_items, draws).to(device)
            prompt = random_prompt(model, len(batch), task.prompt_rate, draws)

            def losses(batch: Windows, n: Tensor = negatives, p: Tensor | None = prompt) -> tuple[Tensor, Tensor]:
                sums, counts = window_losses(model, batch, n, LOSSES[config.loss], p)
                return (sums if extra is None else sums + extra(model, batch)), counts

            descend(losses, moved(trimmed(batch), device), optimiser)
            steps += 1
    model.eval()
    return steps


def random_prompt(model: SASRec, n: int, rate: float, rng: Generator) -> Float[Tensor, "W L_p d"] | None:
    """A random prompt of the backbone's input length in front of a whole batch, with probability `rate`.

    A backbone that has met prompts in its warm-up is not thrown off by one that is injected later.
    """
    if rate <= 0 or float(torch.rand((), generator=rng)) >= rate:
        return None
    noise = torch.randn(n, model.config.prompt_length, model.config.width, generator=rng).to(model.items.device)
    return rescale_like(noise, model.input_norm())


@torch.no_grad()
def validation_ndcg(
    model: SASRec, slice_: TimeSlice, selection: str = "sampled", last_hidden: Callable[[Tensor], Tensor] | None = None
) -> float:
    """NDCG@10 of the slice's validation queries, among sampled candidates or all items; NaN where there is none."""
    values, _ = validation_values(model, slice_, selection, last_hidden)
    return float(values.mean()) if len(values) else float("nan")


@torch.no_grad()
def validation_values(
    model: SASRec, slice_: TimeSlice, selection: str = "sampled", last_hidden: Callable[[Tensor], Tensor] | None = None
) -> tuple[Float[Tensor, " Q"], Int[np.ndarray, " Q"]]:
    """NDCG@10 of every validation query of the slice, short histories first, and which query each belongs to.

    Histories are read by `last_hidden`, by default the model's own.
    """
    model.eval()
    asked, device = slice_.validation, model.items.device
    values = [torch.zeros(0)]
    by_length = np.argsort(slice_.past.before[asked.positions], kind="stable")  # short histories need short inputs
    for start in range(0, len(asked), VALIDATION_CHUNK):
        chunk = by_length[start : start + VALIDATION_CHUNK]
        tokens = slice_.queries(chunk, model.config.history_length).tokens
        tokens = tokens[:, leading_padding(tokens) :].to(device)
        scores = model.scores((last_hidden or model.last_hidden)(tokens), asked.n_items)
        positive = asked.positives[chunk].to(device)
        if selection == "full":
            ranks = rank_of_positive(scores, positive)
        else:
            ranks = rank_among(scores, positive, asked.negatives[chunk].to(device))
        values.append(ndcg(ranks, 10).cpu())
    return torch.cat(values), by_length
