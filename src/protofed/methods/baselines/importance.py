"""What the regularisation baselines share: a slice's fine-tuning, quadratic anchors, per-example gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from protofed.backbone.extras import Extra, Lots, Notes
from protofed.backbone.functional import lending
from protofed.backbone.one_window import OneWindowLoss
from protofed.backbone.sasrec import SASRec
from protofed.backbone.small_modules import small_parameters
from protofed.backbone.training import Descend, Fit, InRounds, WindowLosses
from protofed.methods.baselines.finetune_last import fine_tuned
from protofed.methods.frozen import BackboneState, rows_for
from protofed.methods.protocol import World
from protofed.seeds import numpy_stream, stream
from protofed.slices.histories import Histories, tokens_ending_at
from protofed.slices.stream import TimeSlice
from protofed.slices.windows import Windows, real_targets

Weights = Mapping[str, Tensor]  # by the parameter's name
Objective = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden (d,), logits (C,), chosen candidate () -> scalar
CHUNK = 32  # examples whose gradients are held at once


@dataclass(frozen=True, slots=True)
class AnchoredState(BackboneState):
    """A backbone, the weights it is drawn back to, and how much each of them matters."""

    anchor: dict[str, Tensor]
    importance: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Springs:
    """strength * sum of importance * (weight - anchor)^2, and the mean of what it was in a training."""

    strength: float
    anchor: Weights
    importance: Weights
    notes: Notes = field(default_factory=Notes)

    def penalty(self, weights: Weights) -> Float[Tensor, ""]:
        penalty = self.strength * quadratic(weights, self.anchor, self.importance)
        self.notes.add("penalty", penalty)
        return penalty

    def pull(self, weights: Weights) -> None:
        """Adds the penalty's gradient to what every weight has in its `grad`."""
        if self.strength:
            self.penalty(weights).backward()

    def mean(self) -> float:
        return self.notes.mean("penalty")


class AroundRounds:
    """A descent that takes its rounds and cohorts from the private one that it goes around."""

    __slots__ = ()
    descend: Descend

    def private(self) -> InRounds:
        assert isinstance(self.descend, InRounds)
        return self.descend

    def rounds(self) -> range:
        return self.private().rounds()

    def cohort(self, past: Histories, positions: np.ndarray, round_: int, *, length: int, stride: int) -> Windows:
        return self.private().cohort(past, positions, round_, length=length, stride=stride)


@dataclass(frozen=True, slots=True)
class SprungInRounds(AroundRounds):
    """A private descent whose noised gradient gains that of the springs, which depends on released weights alone."""

    descend: Descend
    springs: Springs

    def gradients(self, loss: OneWindowLoss, batch: Windows, optimiser: torch.optim.Optimizer) -> None:
        self.private().gradients(loss, batch, optimiser)
        self.springs.pull(dict(loss.model.named_parameters()))

    def __call__(self, losses: WindowLosses | OneWindowLoss, batch: Windows, optimiser: torch.optim.Optimizer) -> None:
        assert isinstance(losses, OneWindowLoss)
        self.gradients(losses, batch, optimiser)
        optimiser.step()


def learn_anchored(
    world: World, state: AnchoredState, slice_: TimeSlice, descend: Descend, strength: float
) -> tuple[SASRec, Fit, float]:
    """The slice fine-tuned under strength * sum of importance * (weight - anchor)^2, and the mean of that penalty."""
    device = state.backbone.items.device
    springs = Springs(strength, on(state.anchor, device), on(state.importance, device))
    first = rows_for(world, state.backbone, slice_)
    if isinstance(descend, InRounds):
        model, fit = fine_tuned(world, first, slice_, SprungInRounds(descend, springs))
    else:
        model, fit = fine_tuned(world, first, slice_, descend, extra=drawing_back(springs))
    return model, fit, springs.mean()


def drawing_back(springs: Springs) -> Extra | None:
    """The penalty as an addition to each window's summed loss, so that the mean loss gains it once; None for 0."""
    if springs.strength == 0:
        return None

    def losses(model: SASRec, batch: Windows, lots: Lots, notes: Notes) -> Float[Tensor, " W"]:
        return springs.penalty(dict(model.named_parameters())) * real_targets(batch)

    return Extra(losses, springs.notes)


def quadratic(weights: Weights, anchor: Weights, importance: Weights) -> Float[Tensor, ""]:
    """Sum of importance * (weight - anchor)^2; item rows that are younger than the anchor are free."""
    parts = [(importance[name] * (weights[name][: len(old)] - old) ** 2).sum() for name, old in anchor.items()]
    return torch.stack(parts).sum()


def weights_that_learn(model: SASRec) -> dict[str, nn.Parameter]:
    """What every slice trains, by name: small modules where there are any, or else everything.

    A frozen backbone's item rows are learned in one slice only, so later ones cannot spoil them.
    """
    return small_parameters(model) or dict(model.named_parameters())


def weights_of(model: SASRec) -> dict[str, Tensor]:
    """A copy of every weight that slices train, by name."""
    return {name: parameter.detach().clone() for name, parameter in weights_that_learn(model).items()}


def zeros_of(model: SASRec) -> dict[str, Tensor]:
    return {name: torch.zeros_like(parameter) for name, parameter in weights_that_learn(model).items()}


def on(weights: Weights, device: torch.device) -> dict[str, Tensor]:
    """The same weights on a device: a state that comes from a file holds its dictionaries on the CPU."""
    return {name: tensor.to(device) for name, tensor in weights.items()}


def pad_rows(old: Weights, like: Weights) -> dict[str, Tensor]:
    """`old` in the shapes of `like`, on its device; rows that `old` does not have are zero."""
    bigger = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    for name, tensor in old.items():
        bigger[name][: len(tensor)] = tensor
    return bigger


def scale_to_mean_one(importance: Weights) -> tuple[dict[str, Tensor], float]:
    """The importances divided by the mean of those that are not zero, and that mean."""
    total = sum(float(tensor.double().sum()) for tensor in importance.values())
    mean = total / max(sum(int((tensor != 0).sum()) for tensor in importance.values()), 1)
    return {name: tensor / (mean or 1.0) for name, tensor in importance.items()}, mean


def share_above_zero(importance: Weights) -> float:
    """Which part of all weights has an importance."""
    positive = sum(int((tensor > 0).sum()) for tensor in importance.values())
    return positive / sum(tensor.numel() for tensor in importance.values())


@dataclass(frozen=True, slots=True)
class Examples:
    """Some train events as ranking questions: a history and candidates, of which the first is what was met."""

    tokens: Int[Tensor, "N L"]
    candidates: Int[Tensor, "N C"]
    newest: int  # log position of the newest event among them

    def __len__(self) -> int:
        return len(self.tokens)


def draw_examples(world: World, slice_: TimeSlice, n: int, n_negatives: int, purpose: str) -> Examples:
    """Up to `n` of the slice's train events, each with uniform negatives other than its own item."""
    names = (world.config.seed, purpose, slice_.index)
    train, past = slice_.train_positions, slice_.past
    positions = numpy_stream(*names).choice(train, min(n, len(train)), replace=False)
    users, length = past.users[positions].astype(np.int64), world.config.backbone.history_length
    tokens = tokens_ending_at(past, users, past.before[positions], length)
    positive = torch.from_numpy(past.items[past.place[positions]])[:, None]
    others = torch.randint(slice_.n_train_items - 1, (len(positions), n_negatives), generator=stream(*names))
    candidates = torch.cat([positive, others + (others >= positive)], dim=1)
    device = world.backbone.items.device
    return Examples(tokens.to(device), candidates.to(device), int(positions.max(initial=-1)))


def first_places(items: Int[Tensor, "B K"]) -> Int[Tensor, "B K"]:
    """Where in its row each item stands for the first time."""
    return (items[:, :, None] == items[:, None, :]).int().argmax(-1)


def encode_and_score(model: SASRec, tokens: Int[Tensor, " L"], candidates: Int[Tensor, " C"]) -> tuple[Tensor, Tensor]:
    """The last state of one history, and its candidates' scores."""
    hidden = model.last_hidden(tokens[None])[0]
    return hidden, model.embed(candidates) @ hidden


def mean_gradient_sizes(
    model: SASRec, examples: Examples, chosen: Int[Tensor, " N"], objective: Objective, size: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Per weight the mean over examples of `size` of the objective's gradient, one example at a time, no dropout.

    Each example sees a table of its own items only, so that its gradient never has the size of the catalogue.
    """
    totals = zeros_of(model)
    shared = {name: weight.detach() for name, weight in weights_that_learn(model).items() if name != "items"}

    def one(weights: Weights, rows: Tensor, known: Tensor, tokens: Tensor, asked: Tensor, choice: Tensor) -> Tensor:
        local = {**weights, "items": rows, "has_row": known}
        with sdpa_kernel(SDPBackend.MATH):  # the one that vmap knows how to batch
            hidden, logits = lending(model, local, lambda: encode_and_score(model, tokens, asked))
        return objective(hidden, logits, choice)

    gradients: Callable[..., tuple[dict[str, Tensor], Tensor]]
    gradients = vmap(grad(one, argnums=(0, 1)), in_dims=(None, 0, 0, 0, 0, 0))
    for start in range(0, len(examples), CHUNK):
        part = slice(start, start + CHUNK)
        tokens, candidates = examples.tokens[part], examples.candidates[part]
        items = torch.cat([tokens, candidates], dim=1)  # (B, L + C)
        place, inside = first_places(items), items.clamp(0, model.n_rows - 1)
        places = torch.where(items < 0, items, place).split([tokens.shape[1], candidates.shape[1]], dim=1)
        dense, rows = gradients(shared, model.items.detach()[inside], model.knows(items), *places, chosen[part])
        if "items" in totals:
            totals["items"].index_add_(0, inside.flatten(), size(rows).flatten(0, 1))
        for name, gradient in dense.items():
            totals[name] += size(gradient).sum(0)
    return {name: total / max(len(examples), 1) for name, total in totals.items()}
