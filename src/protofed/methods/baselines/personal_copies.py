"""Copies of some weights that clients of the federated baselines keep for themselves: trained, found, scored with."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.backbone.losses import LOSSES
from protofed.backbone.sasrec import SASRec
from protofed.client.lessons import ClientData, chunks, stack_size
from protofed.federation.stacked import (
    PROMPT,
    ClientWeights,
    Layout,
    LocalSteps,
    draw_negatives_of_steps,
    flatten,
    layout_of,
    stacked_last_hidden,
    stacked_losses,
    train_stack,
)
from protofed.methods.baselines.federated import FederatedState, Server, weights_of
from protofed.methods.protocol import World
from protofed.slices.histories import Queries
from protofed.slices.stream import TimeSlice
from protofed.slices.windows import Windows

STEPS_PER_SLICE = 100_000  # negatives are keyed by slice * this + step, below those of rounds (`federated_rounds`)
QUERIES_AT_ONCE = 128  # each with a copy of its user's weights


def personal_layout(model: SASRec, prompt: Float[Tensor, "L_p d"]) -> Layout:
    """What a client keeps a copy of: the prompt where there is one, else the last block and the final norm."""
    weights = weights_of(model, prompt)
    last = f"blocks.{len(model.blocks) - 1}."
    names = tuple(name for name in weights if name.startswith((last, "norm.")))
    return layout_of(weights, (PROMPT,) if len(prompt) else names)


def personalise(
    world: World,
    server: Server,
    layout: Layout,
    start: Float[Tensor, "A D"],
    data: ClientData,
    slice_: TimeSlice,
    local: LocalSteps,
    chunk: int,
) -> Float[Tensor, "A D"]:
    """Personal copies after local steps, pulled towards the server's weights; nothing leaves the devices."""
    training, device = world.config.training, server.model.items.device
    anchor, parts = flatten(weights_of(server.model, server.prompt), layout), [start[:0]]
    for where, windows in chunks(data, stack_size(chunk, server.model.items), device):
        key = slice_.index * STEPS_PER_SLICE
        n_items = slice_.n_train_items
        negatives = draw_negatives_of_steps(
            windows, local.steps, training.negatives, n_items, seed=world.config.seed, key=key
        )

        def losses(at: ClientWeights, step: int, windows: Windows = windows, negatives: Tensor = negatives) -> Tensor:
            element_loss = LOSSES[training.loss]
            return stacked_losses(server.model, layout, at.dense, windows, negatives[step], element_loss)

        begin = without_rows(start[where], server.model.config.width)
        target = without_rows(anchor.expand_as(begin.dense), server.model.config.width)
        end, _ = train_stack(begin, torch.zeros(0, dtype=torch.int64, device=device), losses, local, target)
        parts.append(end.dense)
    return torch.cat(parts)


def without_rows(dense: Float[Tensor, "U D"], width: int) -> ClientWeights:
    """A stack that trains no item rows."""
    return ClientWeights(dense, dense.new_zeros(0, width))


def copies_of(
    state: FederatedState, users: Int[Tensor, " B"], otherwise: Float[Tensor, " D"]
) -> tuple[Float[Tensor, "B D"], Bool[Tensor, " B"]]:
    """Each user's personal copy, or `otherwise` where it has none, and who has one."""
    if not len(state.owners):
        return otherwise.repeat(len(users), 1), torch.zeros_like(users, dtype=torch.bool)
    place = torch.searchsorted(state.owners, users.contiguous()).clamp(max=len(state.owners) - 1)
    mine = state.owners[place] == users
    return torch.where(mine[:, None], state.personal[place], otherwise), mine


def with_copies(state: FederatedState, users: Tensor, copies: Tensor) -> FederatedState:
    """The state in which these users (ascending) have these copies, and all others what they had."""
    stay = ~torch.isin(state.owners, users)
    owners = torch.cat([state.owners[stay], users])
    order = owners.argsort()
    kept = state.personal[stay] if len(state.owners) else copies[:0]
    return replace(state, owners=owners[order], personal=torch.cat([kept, copies])[order])


def without_copies(state: FederatedState) -> FederatedState:
    """The state with every personal copy thrown away."""
    return replace(state, owners=state.owners[:0], personal=state.personal[:0])


def score_with_copies(state: FederatedState, queries: Queries) -> Float[Tensor, "B I"]:
    """Scores with each user's personal copy, or with the server's weights for users without one."""
    model, device = state.backbone, state.backbone.items.device
    if not len(state.owners):
        prompt = state.prompt.expand(len(queries), -1, -1) if len(state.prompt) else None
        return model.scores(model.last_hidden(queries.tokens, prompt), queries.n_items)
    layout = personal_layout(model, state.prompt)
    common = flatten(weights_of(model, state.prompt), layout)
    hidden = [torch.zeros(0, model.config.width, device=device)]
    size = stack_size(QUERIES_AT_ONCE, model.items)
    for first in range(0, len(queries), size):
        part = slice(first, first + size)
        copies, _ = copies_of(state, queries.users[part], common)
        hidden.append(stacked_last_hidden(model, layout, copies, queries.tokens[part]))
    return model.scores(torch.cat(hidden), queries.n_items)
