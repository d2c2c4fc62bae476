"""Gradient training, one loop for every method: early stopping on a slice's validation part, or private rounds.

A private descent (`InRounds`) makes a fixed number of steps, sees each window alone, never asks the validation part.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from protofed.backbone.extras import Extra
from protofed.backbone.injection import rescale_like
from protofed.backbone.kept_epochs import KeptEpochs, SoFar
from protofed.backbone.losses import LOSSES, draw_negatives, window_losses
from protofed.backbone.one_window import OneWindowLoss
from protofed.backbone.recorded import Inputs, RecordedSteps, Shape, Step
from protofed.backbone.sasrec import SASRec, at_rest
from protofed.backbone.validation import Exam, exam_of, mean_grade
from protofed.config import TrainingConfig
from protofed.progress import Progress, silent
from protofed.seeds import numpy_stream, seeded, stream
from protofed.slices.histories import Histories
from protofed.slices.lines import worth_sharing
from protofed.slices.stream import TimeSlice
from protofed.slices.windows import Windows, batches, moved, on_lines, training_windows, trimmed

WindowLosses = Callable[[Windows], tuple[Float[Tensor, " W"], Int[Tensor, " W"]]]
ParameterGroups = list[dict[str, Any]]  # as PyTorch's optimisers take them
Trainable = Callable[[SASRec], ParameterGroups]


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

    def gradients(self, loss: OneWindowLoss, batch: Windows, optimiser: torch.optim.Optimizer) -> None:
        """Leaves in every parameter's `grad` what may be known of the cohort, from the loss of each window."""
        ...

    def __call__(self, losses: OneWindowLoss, batch: Windows, optimiser: torch.optim.Optimizer) -> None: ...


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
    trainable: int = 0  # numbers that trained, one copy for all users

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


def numbers_in(groups: ParameterGroups) -> int:
    """How many numbers train; a group that trains a part of its tensors says how many itself."""
    return sum(group.get("numbers", sum(p.numel() for p in group["params"])) for group in groups)


def train(
    model: SASRec,
    task: Task,
    config: TrainingConfig,
    *,
    seed: int,
    descend: Descend,
    trainable: Trainable = everything,
    extra: Extra | None = None,
    kept: KeptEpochs | None = None,
    progress: Progress = silent,
) -> tuple[SASRec, Fit]:
    """A trained copy of the model, at the epoch whose validation NDCG@10 is best (epoch 0 is the model as it came).

    `extra` is given the copy that is being trained and each batch: penalties, distillation, replay. With `kept` the
    training goes on after the last epoch in that file, with the same result as if it had never been stopped.
    """
    model = copy.deepcopy(model).requires_grad_(False)
    groups = trainable(model)
    for parameter in (p for group in groups for p in group["params"]):
        parameter.requires_grad_(True)
    optimiser = adamw(groups, task.learning_rate, config.weight_decay, model.items.device)
    if isinstance(descend, InRounds):
        model, fit = train_in_rounds(model, task, config, optimiser, descend, extra=extra, progress=progress)
        return model, replace(fit, trainable=numbers_in(groups))
    assert kept is None or extra is None, "an extra loss may remember more than is kept"
    exam = exam_of(task.slice_, config.selection, model.config.history_length, model.items.device)
    so_far = kept.load(model, optimiser) if kept else None  # before any step is recorded
    so_far = so_far or SoFar((mean_grade(model, exam),), 0, -1, copy.deepcopy(model.state_dict()))
    if kept:
        report_epochs(progress, so_far, task.epochs, config)
    step = step_of(model, config, optimiser, descend, extra)
    while not is_over(so_far, task.epochs, config):
        so_far = next_epoch(model, exam, task, config, step, seed, so_far)
        if kept:
            kept.save(model, optimiser, so_far, is_best=best_of(so_far.trace) == len(so_far.trace) - 1)
        report_epochs(progress, so_far, task.epochs, config)
    model.load_state_dict(so_far.best)
    optimiser.zero_grad()  # a recorded step's gradients would keep its memory alive
    return at_rest(model), Fit(so_far.trace, so_far.steps_per_epoch, so_far.newest_target, numbers_in(groups))


def epochs_to_wait(config: TrainingConfig, steps_per_epoch: int) -> int:
    """How many epochs may pass without a better one: the patience in epochs and the patience in steps, both."""
    return max(config.patience, -(-config.patience_steps // steps_per_epoch) if steps_per_epoch else 0)


def last_epoch(so_far: SoFar, epochs: int, config: TrainingConfig) -> int:
    """The epoch that a training ends with if none is better than the best so far."""
    return min(epochs, best_of(so_far.trace) + epochs_to_wait(config, so_far.steps_per_epoch))


def is_over(so_far: SoFar, epochs: int, config: TrainingConfig) -> bool:
    """Whether a training stops here: after its last epoch, or when nothing better has come for long enough."""
    return len(so_far.trace) - 1 >= last_epoch(so_far, epochs, config)


def report_epochs(progress: Progress, so_far: SoFar, epochs: int, config: TrainingConfig) -> None:
    """Tell how many epochs are over, and how many there will be if none is better than the best so far."""
    done = len(so_far.trace) - 1
    at_most = f"at most {epochs} {'epoch' if epochs == 1 else 'epochs'}"
    note = f"epoch {done} of at most {epochs}, validation NDCG@10 {so_far.trace[-1]:.4f}" if done else at_most
    progress("epochs", done, last_epoch(so_far, epochs, config), note)


def next_epoch(
    model: SASRec, exam: Exam, task: Task, config: TrainingConfig, step: Step, seed: int, so_far: SoFar
) -> SoFar:
    """What the training knows after one more epoch of the model."""
    epoch = len(so_far.trace) - 1
    windows = epoch_windows(model, task, config, seed, epoch)
    newest = max(so_far.newest_target, int(windows.newest.max()) if len(windows) else -1)
    steps = run_epoch(model, windows, task, config, step, seed, epoch)
    model.refresh_mean_row()
    trace = (*so_far.trace, mean_grade(model, exam))
    best = copy.deepcopy(model.state_dict()) if best_of(trace) == epoch + 1 else so_far.best
    return SoFar(trace, steps, newest, best)


def adamw(groups: ParameterGroups, rate: float, decay: float, device: torch.device) -> torch.optim.AdamW:
    """The optimiser in one pass over all weights; on a GPU the form that can be recorded."""
    recordable = device.type == "cuda"
    return torch.optim.AdamW(groups, lr=rate, weight_decay=decay, betas=(0.9, 0.98), fused=True, capturable=recordable)


def step_of(
    model: SASRec, config: TrainingConfig, optimiser: torch.optim.Optimizer, descend: Descend, extra: Extra | None
) -> Step:
    """One step of the descent on a batch; on a GPU recorded and replayed."""
    device = model.items.device

    def step(inputs: Inputs) -> None:
        def losses(batch: Windows) -> tuple[Tensor, Tensor]:
            negatives = inputs.negatives.to(device)
            sums, counts = window_losses(model, batch, negatives, LOSSES[config.loss], inputs.prompt)
            return (sums if extra is None else sums + extra(model, batch)), counts

        descend(losses, moved(inputs.batch, device), optimiser)

    if device.type != "cuda":
        return step
    shape = Shape(config.batch_size, model.config.history_length, config.stride)
    draws = [extra.rng] if extra is not None and extra.rng.device.type == "cuda" else []
    return RecordedSteps(step, shape, device, tuple(draws))


def train_in_rounds(
    model: SASRec,
    task: Task,
    config: TrainingConfig,
    optimiser: torch.optim.Optimizer,
    descend: InRounds,
    *,
    extra: Extra | None = None,
    progress: Progress = silent,
) -> tuple[SASRec, Fit]:
    """The model after all rounds of one training, without dropout and random prompts; nothing is selected.

    `Fit` says only what is public: no validation trace, and the newest event that may have been learned from.
    """
    model.eval()
    rounds, device = descend.rounds(), model.items.device
    length, stride, n_items = model.config.history_length, config.stride, task.slice_.n_train_items
    loss = OneWindowLoss(model, LOSSES[config.loss], config.negatives, n_items, stride, extra)
    for done, round_ in enumerate(rounds):
        cohort = descend.cohort(task.slice_.past, task.positions, round_, length=length, stride=stride)
        descend(replace(loss, round_=round_), moved(cohort, device), optimiser)
        progress("private rounds", done + 1, len(rounds), f"private round {done + 1} of {len(rounds)}")
    model.refresh_mean_row()
    return at_rest(model), Fit((), len(rounds), int(task.positions.max(initial=-1)))


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
    step: Step,
    seed: int,
    epoch: int,
) -> int:
    """One pass over the windows; returns the number of steps."""
    model.train()
    purpose = (task.slice_.index, epoch)
    order, draws = stream(seed, "order", *purpose), stream(seed, "negatives", *purpose)
    steps, size = 0, config.batch_size
    share = model.reads_lines and worth_sharing(windows.tokens)
    known = model.has_row.nonzero()[:, 0]
    if isinstance(step, RecordedSteps):
        laid = step.laid(windows, size, order, share=share)
    else:
        laid = (on_lines(batch) if share else batch for batch in map(trimmed, batches(windows, size, order)))
    with seeded(seed, "dropout", *purpose):
        for batch in laid:
            n = min(size, len(windows) - steps * size)
            negatives = draw_negatives(n, config.negatives, task.slice_.n_train_items, draws)
            step(Inputs(batch, negatives, random_prompt(model, n, task.prompt_rate, draws, known)))
            steps += 1
    model.eval()
    return steps


def random_prompt(
    model: SASRec, n: int, rate: float, rng: Generator, known: Int[Tensor, " R"]
) -> Float[Tensor, "W L_p d"] | None:
    """A random prompt of the backbone's input length in front of a whole batch, with probability `rate`.

    A backbone that has met prompts in its warm-up is not thrown off by one that is injected later. `known`: the items
    with a row. Looked up at every prompt, or with noise sent from ordinary memory, they would make the process wait.
    """
    if rate <= 0 or float(torch.rand((), generator=rng)) >= rate:
        return None
    device, on_gpu = model.items.device, model.items.is_cuda
    noise = torch.randn(n, model.config.prompt_length, model.config.width, generator=rng)
    sent = noise.pin_memory().to(device, non_blocking=True) if on_gpu else noise
    return rescale_like(sent, model.input_norm(known))
