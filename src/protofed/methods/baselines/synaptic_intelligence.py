"""SI: weights are held in proportion to how much of the loss they took away while they were learned.

Zenke, Poole, Ganguli, Continual learning through synaptic intelligence, ICML 2017.
What we implement: at each step every weight earns -g * move, where g is the gradient of the recommendation loss alone
(no penalty in it, not clipped) and move is what the step did to the weight, decoupled weight decay taken out. After a
slice, importance <- max(0, importance + earned / ((end - start)^2 + damping)), and the next slice's mean loss gains
strength * sum of importance * (weight - weight before)^2.
How it differs: training goes back to its best validation epoch, so only what was earned up to it counts. The shared
warm-up leaves no path behind, so the first slice repeats it, from the same seed, to earn the base block's importances:
without them the base block would be unprotected. A row that is new in a slice is free in it and is important after it.
Privacy: importances that are computed from noised gradients and released weights are post-processing and cost nothing;
on a private descent g is the noised gradient (`EarningInRounds`), and the warm-up is repeated on the base block alone.
"""

from collections import deque
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.backbone.one_window import OneWindowLoss
from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Descend, Fit, InRounds, PlainDescent, Task, WindowLosses, train
from protofed.methods.baselines.finetune_last import fine_tuned
from protofed.methods.baselines.importance import (
    AnchoredState,
    AroundRounds,
    Springs,
    Weights,
    on,
    pad_rows,
    share_above_zero,
    weights_of,
    zeros_of,
)
from protofed.methods.frozen import backbone_evidence, backbone_scores, rows_for, start_from_backbone
from protofed.methods.protocol import Diagnostics, World
from protofed.methods.variants import is_peft
from protofed.progress import Progress, silent
from protofed.seeds import stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice
from protofed.slices.windows import Windows


@dataclass(slots=True)
class EarningDescent:
    """Another descent with the penalty added to its loss; keeps what every weight has earned, epoch by epoch.

    `progress` has to be told of each epoch's end, as `train` does; the start counts as one.
    """

    descend: Descend
    springs: Springs
    earned: dict[str, Tensor]
    epochs: deque[dict[str, Tensor]]
    report: Progress = silent

    def __call__(self, losses: WindowLosses, batch: Windows, optimiser: torch.optim.Optimizer) -> None:
        group = optimiser.param_groups[0]
        weights = dict(zip(self.earned, group["params"], strict=True))
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        gradients: dict[str, Tensor] = {}

        def watched(batch: Windows) -> tuple[Float[Tensor, " W"], Int[Tensor, " W"]]:
            sums, counts = losses(batch)
            mean = sums.sum() / counts.sum().clamp(min=1)
            found = torch.autograd.grad(mean, list(weights.values()), retain_graph=True, materialize_grads=True)
            gradients.update(zip(weights, found, strict=True))
            return (sums + self.springs.penalty(weights) * counts if self.springs.strength else sums), counts

        self.descend(watched, batch, optimiser)
        kept = 1 - group["lr"] * group["weight_decay"]  # decay is no learning
        for name, weight in weights.items():
            self.earned[name] -= gradients[name] * (weight.detach() - kept * before[name])

    def progress(self, task: str, done: int | float, total: int | float | None, note: str = "") -> None:
        self.epochs.append({name: tensor.clone() for name, tensor in self.earned.items()})
        self.report(task, done, total, note)

    def earned_until_best(self, fit: Fit) -> dict[str, Tensor]:
        """What was earned on the way to the epoch that training went back to."""
        epochs_after = len(fit.trace) - 1 - fit.best_epoch
        return self.epochs[-1 - epochs_after]


@dataclass(slots=True)
class EarningInRounds(AroundRounds, EarningDescent):
    """The same on a private descent: what is earned is counted with the noised gradient, all that may be known of it.

    The penalty depends on released weights alone, so its gradient is added to the noised one as it is.
    """

    def __call__(self, losses: WindowLosses | OneWindowLoss, batch: Windows, optimiser: torch.optim.Optimizer) -> None:
        assert isinstance(losses, OneWindowLoss)
        group = optimiser.param_groups[0]
        weights = dict(zip(self.earned, group["params"], strict=True))
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        self.gradients(losses, batch, optimiser)
        noised = {name: weight.grad.clone() for name, weight in weights.items()}
        self.springs.pull(weights)
        optimiser.step()
        kept = 1 - group["lr"] * group["weight_decay"]
        for name, weight in weights.items():
            self.earned[name] -= noised[name] * (weight.detach() - kept * before[name])

    def gradients(self, loss: OneWindowLoss, batch: Windows, optimiser: torch.optim.Optimizer) -> None:
        self.private().gradients(loss, batch, optimiser)


def earning(world: World, first: SASRec, descend: Descend, springs: Springs) -> EarningDescent:
    """A descent that has earned nothing yet; training never goes back by more epochs than its patience.

    A patience in steps is a patience of as many epochs at most.
    """
    nothing, training = zeros_of(first), world.config.training
    epochs = deque([zeros_of(first)], maxlen=max(training.patience, training.patience_steps) + 1)
    kind = EarningInRounds if isinstance(descend, InRounds) else EarningDescent
    return kind(descend, springs, nothing, epochs, world.progress)


def consolidate(
    importance: Weights, earned: Weights, start: Weights, end: Weights, damping: float
) -> dict[str, Tensor]:
    """max(0, importance + earned / ((end - start)^2 + damping)), weight by weight."""
    return {
        name: (old + earned[name] / ((end[name] - start[name]) ** 2 + damping)).clamp(min=0)
        for name, old in pad_rows(importance, end).items()
    }


def warm_up_again(world: World) -> tuple[SASRec, SASRec, dict[str, Tensor]]:
    """The backbone before its warm-up and after it, and what each weight earned on the way."""
    config, base = world.config, world.base
    training, device = config.training, world.backbone.items.device
    first = SASRec(config.backbone, base.n_train_items, stream(config.seed, "backbone")).to(device)
    task = Task(base, base.train_positions, training.base_epochs, training.learning_rate, training.prompt_rate)
    watch = earning(world, first, PlainDescent(training.max_grad_norm), Springs(0.0, {}, {}))
    last, fit = train(first, task, training, seed=config.seed, descend=watch, progress=watch.progress)
    return first, last, watch.earned_until_best(fit)


@dataclass(frozen=True, slots=True)
class SynapticIntelligence:
    strength: float = 1.0  # c; at 1 the penalty stands for the past's loss as it was
    damping: float = 1e-3  # xi: keeps a weight that hardly moved from mattering without bound

    def start(self, world: World) -> AnchoredState:
        begun = start_from_backbone(world)
        model = begun.backbone
        return AnchoredState(model, begun.slice_index, begun.newest_target, weights_of(model), zeros_of(model))

    def learn(
        self, world: World, state: AnchoredState, slice_: TimeSlice, descend: Descend
    ) -> tuple[AnchoredState, Diagnostics]:
        old = self._importance_so_far(world, state)
        first, new = rows_for(world, state.backbone, slice_)
        anchor = on(state.anchor, first.items.device)
        watch = earning(world, first, descend, Springs(self.strength, anchor, old))
        model, fit = fine_tuned(world, (first, new), slice_, watch, progress=watch.progress)
        earned, end = watch.earned_until_best(fit), weights_of(model)
        importance = consolidate(old, earned, weights_of(first), end, self.damping)
        newest = max(state.newest_target, fit.newest_target)
        total = sum(float(tensor.sum()) for tensor in earned.values())
        return AnchoredState(model, slice_.index, newest, end, importance), {
            "penalty": watch.springs.mean(),
            "earned": total,
            "important_share": share_above_zero(importance),
            **fit.diagnostics(),
        }

    def _importance_so_far(self, world: World, state: AnchoredState) -> dict[str, Tensor]:
        """The state's own; the base block's where the state has learned nothing since and something depends on it."""
        nothing_learned = is_peft(world)  # a prompt that the base block has not trained has earned nothing
        if self.strength == 0 or state.slice_index > world.base.index or nothing_learned:
            return on(state.importance, state.backbone.items.device)
        first, last, earned = warm_up_again(world)
        return consolidate(zeros_of(first), earned, weights_of(first), weights_of(last), self.damping)

    def score(self, world: World, state: AnchoredState, queries: Queries) -> Float[Tensor, "B I"]:
        return backbone_scores(state, queries)

    def evidence(self, state: AnchoredState) -> Evidence:
        return backbone_evidence(state)
