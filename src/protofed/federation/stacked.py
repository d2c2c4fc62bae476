"""Local training of many clients at once: a stack of parameters, one tensor program, no loop over clients.

A client's trainable weights are one flat vector; of the item table it needs only the rows its windows and negatives
touch, since the others get no gradient. A stack is therefore a matrix (U, D) and the rows of P (client, item) pairs;
what comes out equals training a whole copy of the model for each client. Clients learn without dropout.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from protofed.backbone.functional import lending
from protofed.backbone.losses import ElementLoss, window_losses
from protofed.backbone.sasrec import Embed, SASRec
from protofed.client.lessons import ClientData, draw_negatives_by_event
from protofed.client.own_rows import SPAN
from protofed.client.steps import AdamWState, adamw_start, adamw_step
from protofed.slices.windows import NO_TARGET, Windows, take

PROMPT = "soft prompt"  # its name in a layout; every other name is a weight of the backbone
SLACK = 1e-12  # relative room for the rounding of a clipped norm


@dataclass(frozen=True, slots=True)
class Layout:
    """Names and shapes of the weights that one flat vector holds, in order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return sum(prod(shape) for shape in self.shapes)


def layout_of(weights: Mapping[str, Tensor], names: tuple[str, ...]) -> Layout:
    """The layout of these weights."""
    return Layout(names, tuple(tuple(weights[name].shape) for name in names))


def flatten(weights: Mapping[str, Tensor], layout: Layout) -> Float[Tensor, " D"]:
    """The weights of a layout as one vector."""
    parts = [weights[name].detach().reshape(-1) for name in layout.names]
    return torch.cat(parts) if parts else next(iter(weights.values())).detach().new_zeros(0)


def unflatten(layout: Layout, vectors: Float[Tensor, "*U D"]) -> dict[str, Tensor]:
    """The inverse of `flatten`, for a vector or a stack of them."""
    parts = vectors.split([prod(shape) for shape in layout.shapes], dim=-1) if layout.names else ()
    triples = zip(layout.names, layout.shapes, parts, strict=True)
    return {name: part.reshape(*vectors.shape[:-1], *shape) for name, shape, part in triples}


@dataclass(frozen=True, slots=True)
class ClientWeights:
    """What U clients train."""

    dense: Float[Tensor, "U D"]
    rows: Float[Tensor, "P d"]  # of the pairs of `PairedWindows`; none where the item table does not train


Losses = Callable[[ClientWeights, int], Float[Tensor, " U"]]  # each client's own loss at a step


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """How a client descends; its optimiser starts anew whenever it is called upon."""

    steps: int
    rate: float
    optimiser: Literal["adamw", "sgd"] = "adamw"
    max_grad_norm: float = 1.0
    pull: float = 0.0  # adds pull / 2 * ||parameters - anchor||^2 to the loss


@dataclass(frozen=True, slots=True)
class PairedWindows:
    """What a stack of clients learns from, items of windows and negatives numbered by their (client, item) pair."""

    windows: Windows  # users numbered 0 .. U - 1
    negatives: Int[Tensor, "S W n"]  # of each step
    clients: Int[Tensor, " P"]  # pairs, sorted by client and then by item
    items: Int[Tensor, " P"]
    n_clients: int


def select_clients(data: ClientData, who: Bool[Tensor, " A"]) -> ClientData:
    """The data of the clients that `who` selects."""
    counts = data.starts.diff()
    windows = take(data.windows, torch.repeat_interleave(who, counts).nonzero()[:, 0])
    return ClientData(data.users[who], windows, F.pad(counts[who].cumsum(0), (1, 0)))


def draw_negatives_of_steps(
    windows: Windows, steps: int, n: int, n_items: int, *, seed: int, key: int
) -> Int[Tensor, "S W n"]:
    """Negatives for steps key, key + 1, ...; a window's negatives do not depend on the stack it is in."""
    each = [draw_negatives_by_event(windows, n, n_items, seed=seed, step=key + step) for step in range(steps)]
    return torch.stack(each) if each else torch.zeros(0, len(windows), n, dtype=torch.int64)


def pair_items(windows: Windows, negatives: Int[Tensor, "S W n"], n_clients: int) -> PairedWindows:
    """The windows with every item replaced by the place of its (client, item) pair; BOS and padding stay."""
    columns = (windows.tokens, windows.targets, negatives)
    codes = [windows.users[:, None] * SPAN + column for column in columns]
    keys = torch.cat([code[column >= 0] for code, column in zip(codes, columns, strict=True)]).unique()
    tokens, targets, numbered = (
        torch.where(column >= 0, torch.searchsorted(keys, code.contiguous()), column)
        for code, column in zip(codes, columns, strict=True)
    )
    return PairedWindows(
        replace(windows, tokens=tokens, targets=targets), numbered, keys // SPAN, keys % SPAN, n_clients
    )


def stacked_losses(
    model: SASRec,
    layout: Layout,
    vectors: Float[Tensor, "U D"],
    windows: Windows,
    negatives: Int[Tensor, "W n"],
    element_loss: ElementLoss,
    table: Float[Tensor, "P d"] | None = None,
) -> Float[Tensor, " U"]:
    """Each client's mean loss over its targets with its own weights in place of the model's.

    With a `table` the items of windows and negatives are places in it; without, they are read from the model.
    """
    mine = vectors.index_select(0, windows.users)
    sums, counts = _window_losses(model, layout, mine, windows, negatives, element_loss, row_lookup(table))
    nothing = torch.zeros(len(vectors), device=sums.device, dtype=sums.dtype)
    total = nothing.index_add(0, windows.users, sums)
    return total / nothing.index_add(0, windows.users, counts.to(sums.dtype)).clamp(min=1)


def row_lookup(table: Float[Tensor, "P d"] | None) -> Embed | None:
    """A function that looks rows up by their place in a table; padding gets some row, which nothing reads."""
    return None if table is None else lambda places: F.embedding(places.clamp(min=0), table)


def _with_weights(model: SASRec, layout: Layout, what: Callable[..., object]) -> Callable[..., object]:
    """`what(model, prompt, *arguments)` with a vector's weights in place of the model's, for a stack of vectors."""

    def one(vector: Tensor, *arguments: Tensor) -> object:
        weights = unflatten(layout, vector)
        prompt = weights.pop(PROMPT)[None] if PROMPT in weights else None
        return lending(model, weights, lambda: what(model, prompt, *arguments))

    return vmap(one)


def _window_losses(
    model: SASRec,
    layout: Layout,
    vectors: Float[Tensor, "W D"],
    windows: Windows,
    negatives: Int[Tensor, "W n"],
    element_loss: ElementLoss,
    embed: Embed | None,
) -> tuple[Tensor, Tensor]:
    """`window_losses` with a vector of weights for each window."""
    if set(layout.names) <= {PROMPT}:  # the model itself takes a prompt for each window
        prompt = unflatten(layout, vectors).get(PROMPT)
        return window_losses(model, windows, negatives, element_loss, prompt, embed)
    nobody = windows.users[:1]

    def one(model: SASRec, prompt: Tensor | None, *columns: Tensor) -> tuple[Tensor, Tensor]:
        tokens, sources, targets, against = (column[None] for column in columns)
        window = Windows(nobody, tokens, sources, targets, nobody)
        sums, counts = window_losses(model, window, against, element_loss, prompt, embed)
        return sums[0], counts[0]

    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels know no stacked weights
        each = _with_weights(model, layout, one)
        return each(vectors, windows.tokens, windows.sources, windows.targets, negatives)  # type: ignore[return-value]


def stacked_last_hidden(
    model: SASRec, layout: Layout, vectors: Float[Tensor, "B D"], tokens: Int[Tensor, "B L"]
) -> Float[Tensor, "B d"]:
    """The last hidden state of each history, with a vector of weights for each."""
    if set(layout.names) <= {PROMPT}:
        return model.last_hidden(tokens, unflatten(layout, vectors).get(PROMPT))

    def one(model: SASRec, prompt: Tensor | None, history: Tensor) -> Tensor:
        return model.last_hidden(history[None], prompt)[0]

    with sdpa_kernel(SDPBackend.MATH):
        return _with_weights(model, layout, one)(vectors, tokens)  # type: ignore[return-value]


def train_stack(
    start: ClientWeights,
    owners: Int[Tensor, " P"],
    losses: Losses,
    rule: LocalSteps,
    anchor: ClientWeights | None = None,
) -> tuple[ClientWeights, Float[Tensor, " U"]]:
    """The stack after its local steps, and each client's loss at the last of them, before it was taken.

    `owners` says whose rows they are; the anchor of the pull is the start, unless another is given. A client whose loss
    or gradient is not finite stays as it was.
    """
    at, anchor = start, anchor or start
    moments = (adamw_start(start.dense[:, None]), adamw_start(start.rows[:, None]))
    loss = torch.full((len(start.dense),), torch.nan, device=start.dense.device)
    for step in range(rule.steps):
        loss, slope = gradients(losses, at, step)
        slope = add_pull(slope, at, anchor, rule.pull)
        slope, fine = clip_slopes(slope, owners, rule.max_grad_norm)
        at, moments = _stepped(at, slope, moments, rule, fine & loss.isfinite(), owners)
    return at, loss


def gradients(losses: Losses, at: ClientWeights, step: int) -> tuple[Float[Tensor, " U"], ClientWeights]:
    """Each client's loss and its gradient; clients do not meet in them."""
    with torch.enable_grad():
        leaves = ClientWeights(at.dense.detach().requires_grad_(True), at.rows.detach().requires_grad_(True))
        loss = losses(leaves, step)
        slopes = torch.autograd.grad(loss.sum(), (leaves.dense, leaves.rows), allow_unused=True, materialize_grads=True)
    return loss.detach(), ClientWeights(*slopes)


def add_pull(slope: ClientWeights, at: ClientWeights, anchor: ClientWeights, pull: float) -> ClientWeights:
    """The gradient of the loss + pull / 2 * ||at - anchor||^2; untouched, to the bit, where there is no pull."""
    if not pull:
        return slope
    return ClientWeights(slope.dense + pull * (at.dense - anchor.dense), slope.rows + pull * (at.rows - anchor.rows))


def squared_norms(stack: ClientWeights, owners: Int[Tensor, " P"]) -> Float[Tensor, " U"]:
    """Each client's squared length over everything it trains, in float64: no finite float32 overflows there."""
    return stack.dense.double().square().sum(-1).index_add(0, owners, stack.rows.double().square().sum(-1))


def clip_slopes(
    slope: ClientWeights, owners: Int[Tensor, " P"], max_norm: float
) -> tuple[ClientWeights, Bool[Tensor, " U"]]:
    """Each client's gradient clipped to `max_norm`, and which clients have a finite one."""
    length = squared_norms(slope, owners).sqrt()
    factor = torch.where(length > max_norm, max_norm / length, 1.0).to(slope.dense.dtype)
    return ClientWeights(slope.dense * factor[:, None], slope.rows * factor[owners][:, None]), length.isfinite()


def _stepped(
    at: ClientWeights,
    slope: ClientWeights,
    moments: tuple[AdamWState, AdamWState],
    rule: LocalSteps,
    active: Bool[Tensor, " U"],
    owners: Int[Tensor, " P"],
) -> tuple[ClientWeights, tuple[AdamWState, AdamWState]]:
    """One step of plain gradient descent or of AdamW without decay, which would move rows nobody touched."""
    whose = active[owners]
    if rule.optimiser == "sgd":
        dense = torch.where(active[:, None], at.dense - rule.rate * slope.dense, at.dense)
        return ClientWeights(dense, torch.where(whose[:, None], at.rows - rule.rate * slope.rows, at.rows)), moments
    after = [
        adamw_step(old[:, None], grad[:, None], state, lr=rule.rate, weight_decay=0.0, active=who)
        for old, grad, state, who in (
            (at.dense, slope.dense, moments[0], active),
            (at.rows, slope.rows, moments[1], whose),
        )
    ]
    return ClientWeights(after[0][0][:, 0], after[1][0][:, 0]), (after[0][1], after[1][1])


@dataclass(frozen=True, slots=True)
class Deltas:
    """What U clients upload: how far each of them moved from the broadcast. The rows are those of a table of n_rows."""

    stack: ClientWeights
    clients: Int[Tensor, " P"]
    items: Int[Tensor, " P"]
    n_rows: int


def deltas_of(start: ClientWeights, end: ClientWeights, lesson: PairedWindows, n_rows: int) -> Deltas:
    """How far each client moved; a pair whose row did not train (or lies beyond the table) did not."""
    rows = end.rows - start.rows
    inside = lesson.items[: len(rows)] < n_rows
    clients, items = lesson.clients[: len(rows)][inside], lesson.items[: len(rows)][inside]
    return Deltas(ClientWeights(end.dense - start.dense, rows[inside]), clients, items, n_rows)


def weighted_sum(deltas: Deltas, weights: Float[Tensor, " U"]) -> tuple[Float[Tensor, " D"], Float[Tensor, "n d"]]:
    """The sum over clients of weight times delta, in float64, rows put at their items' places."""
    weights = weights.double()
    rows = deltas.stack.rows.double() * weights[deltas.clients][:, None]
    table = torch.zeros(deltas.n_rows, rows.shape[1], dtype=torch.float64, device=rows.device)
    return weights @ deltas.stack.dense.double(), table.index_add(0, deltas.items, rows)


def clip_factors(deltas: Deltas, radius: float) -> tuple[Deltas, Float[Tensor, " U"]]:
    """The deltas, zero where one is not finite, and what brings each of them to at most the radius.

    The length is that of the concatenation of everything a client uploads.
    """
    fine = squared_norms(deltas.stack, deltas.clients).isfinite()
    dense = deltas.stack.dense.where(fine[:, None], 0.0)
    rows = deltas.stack.rows.where(fine[deltas.clients][:, None], 0.0)
    finite = replace(deltas, stack=ClientWeights(dense, rows))
    length = squared_norms(finite.stack, deltas.clients).sqrt()
    within = radius * (1 - SLACK)
    return finite, torch.where(length > within, within / length, 1.0)


def clipped_sum(deltas: Deltas, radius: float) -> tuple[Float[Tensor, " D"], Float[Tensor, "n d"], Float[Tensor, " U"]]:
    """The sum, before noise, of deltas each no longer than the radius, and the factors that shortened them.

    Adding or removing a client moves the two parts together by at most the radius.
    """
    finite, factors = clip_factors(deltas, radius)
    return *weighted_sum(finite, factors), factors


def targets_of(windows: Windows, n_clients: int) -> Int[Tensor, " U"]:
    """How many train events each client of a stack has: n_u of the weighted mean."""
    counts = (windows.targets != NO_TARGET).sum(-1)
    return torch.zeros(n_clients, dtype=counts.dtype, device=counts.device).index_add(0, windows.users, counts)
