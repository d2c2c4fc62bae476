"""What slices may change: all weights (`standard`), or one shared prompt and the rows of new items (`peft`).

Under `peft` the backbone stays as the base block left it. Methods are not copied for it: they start from `first_model`
and train `parts_to_train`; what they add to the loss, keep or replay is the same.
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from protofed.backbone.sasrec import SASRec
from protofed.backbone.small_modules import modules_and_rows, small_parameters, with_prompt
from protofed.backbone.training import Trainable, everything
from protofed.methods.protocol import World
from protofed.seeds import stream


def is_peft(world: World) -> bool:
    return world.config.variant == "peft"


def first_model(world: World) -> SASRec:
    """The warmed-up backbone, under `peft` with a prompt that has learned nothing yet."""
    return attach_prompt(world, world.backbone, "start") if is_peft(world) else world.backbone


def attach_prompt(world: World, model: SASRec, *purpose: str | int) -> SASRec:
    """A copy with a fresh prompt, like those the warm-up met."""
    rng = stream(world.config.seed, "prompt", *purpose)
    return with_prompt(model, world.config.backbone.prompt_length, rng, world.backbone)


def parts_to_train(world: World, new: Bool[Tensor, " n"]) -> Trainable:
    """Everything, or under `peft` the prompt and the rows that are new in the slice."""
    return modules_and_rows(new, world.config.peft.learning_rate) if is_peft(world) else everything


def learning_rate(world: World) -> float:
    """Of what every slice trains: all weights, or the prompt."""
    return world.config.peft.learning_rate if is_peft(world) else world.config.training.slice_learning_rate


def n_trained(model: SASRec, new: Bool[Tensor, " n"]) -> int:
    """How many numbers a slice trains in a frozen backbone: small modules and new rows; 0 where nothing is attached."""
    modules = sum(parameter.numel() for parameter in small_parameters(model).values())
    return modules and modules + int(new.sum()) * model.config.width


def way_of_modules(before: SASRec, after: SASRec) -> float:
    """How far a slice has moved the small modules, for the log."""
    old = small_parameters(before)
    squares = [(new - old[name]).square().sum() for name, new in small_parameters(after).items()]
    return float(torch.stack(squares).sum().sqrt())
