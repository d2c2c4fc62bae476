"""Gradients of many users at once, each of its own loss alone, and the sum of them after clipping.

A user's loss is the sum of its windows' losses over the number of its targets, so its gradient is the sum of those of
its windows, and one tensor program makes the gradients of a chunk of windows. A chunk has a fixed number of places and
whole users only; a user takes 1, 2 or 4 places, as its own windows need them, and is read as long as its own histories
are (rounded up to a quarter, a half or all of the longest). What fills a chunk up is a window without events. Others
can therefore matter through rounding only: a matrix product over a chunk may round the last bits of a row according to
where in the chunk it stands. Clipping comes after that and is in double precision, so that every contribution keeps to
the radius, whatever was rounded before.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from protofed.backbone.extras import Dealt
from protofed.backbone.functional import lending
from protofed.backbone.one_window import TABLE, LookUps, OneWindowLoss, reading
from protofed.backbone.recorded import Inputs, Shape, columns, from_columns, pad_inputs
from protofed.slices.histories import PAD
from protofed.slices.windows import Windows, real_targets

CELLS_AT_ONCE = {"cpu": 16_000_000, "cuda": 300_000_000}  # numbers held for a chunk
TENSORS_KEPT = 24  # of the size of a window's hidden states, on the way through one block and back
NUMBERS_AT_ONCE = 1 << 20  # that are turned into double precision


@dataclass(frozen=True, slots=True)
class Rows:
    """Per-user gradients of the item table, where they are not zero; each pair of user and item is there once."""

    owners: Int[Tensor, " K"]
    items: Int[Tensor, " K"]
    values: Float[Tensor, "K d"]


@dataclass(frozen=True, slots=True)
class Laid:
    """The users of a batch and where their windows are in it."""

    inputs: Inputs  # with one window more, which is empty
    windows: Int[Tensor, " W1"]  # user by user, and the empty one
    counts: Int[Tensor, " U"]
    tokens: Int[Tensor, " U"]  # of the longest window, rounded up
    targets: Int[Tensor, " U"]  # of all windows


@dataclass(frozen=True, slots=True)
class Chunk:
    """W windows of users 0 .. n_users - 1; one that fills the chunk up is empty and belongs to user n_users."""

    n_users: int
    owners: Int[Tensor, " W"]
    targets: Int[Tensor, " W"]  # that the owner has in all its windows
    inputs: Inputs


@dataclass(frozen=True, slots=True)
class Gradients:
    """One row per user (and one for nobody) in every tensor, by the weight's name; the item table may be in `rows`."""

    dense: Mapping[str, Float[Tensor, "U1 ..."]]
    rows: Rows | None
    told: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]  # sums and counts of each window, from extra losses


def clipped_sum(
    contributions: list[Tensor], radius: float, rows: Rows | None = None
) -> tuple[list[Tensor], Rows | None, Bool[Tensor, " U"]]:
    """The sum over users of contributions clipped to the radius, the clipped rows one by one, and who was clipped.

    Each tensor is (U, ...) and a user's contribution is its row of all of them and its `rows`, concatenated; one that
    is not finite counts as zero. In double precision: adding or removing a user moves the sum by at most the radius.
    """
    flat = [tensor.reshape(len(tensor), math.prod(tensor.shape[1:])) for tensor in contributions]
    lengths = torch.stack([torch.linalg.vector_norm(each, dim=1, dtype=torch.float64) for each in flat]).norm(dim=0)
    if rows is not None:
        own = torch.linalg.vector_norm(rows.values, dim=1, dtype=torch.float64)
        lengths = lengths.square().index_add(0, rows.owners, own.square()).sqrt()
    finite, long = lengths.isfinite(), ~(lengths <= radius)
    factors = torch.where(long, radius / lengths, 1.0).where(finite, 0.0)
    sums = [_weighted(each, factors, finite) for each in flat]
    clipped = None if rows is None else _scaled(rows, factors[rows.owners], finite[rows.owners])
    return [total.view(each.shape[1:]) for total, each in zip(sums, contributions, strict=True)], clipped, long


def _weighted(
    flat: Float[Tensor, "U D"], factors: Float[Tensor, " U"], finite: Bool[Tensor, " U"]
) -> Float[Tensor, " D"]:
    """The sum of the finite rows times their factors, some columns at a time; 0 times infinity would be no number."""
    blocks = flat.split(max(1, NUMBERS_AT_ONCE // max(len(flat), 1)), dim=1)
    return torch.cat([factors @ block.double().where(finite[:, None], 0.0) for block in blocks])


def _scaled(rows: Rows, factors: Float[Tensor, " K"], finite: Bool[Tensor, " K"]) -> Rows:
    return replace(rows, values=rows.values.double().where(finite[:, None], 0.0) * factors[:, None])


def parts_of(most: int) -> tuple[int, ...]:
    """A quarter, a half and all of it, rounded up."""
    return tuple(sorted({-(-most // 4), -(-most // 2), most}))


def round_up_to(n: Int[Tensor, " U"], steps: tuple[int, ...]) -> Int[Tensor, " U"]:
    """The first of the growing steps that is no smaller."""
    table = torch.tensor(steps, device=n.device)
    return table[torch.searchsorted(table, n)]


def places_for(windows: int) -> tuple[int, ...]:
    """1, 2, 4 .. up to the first that is no smaller."""
    return tuple(2**k for k in range((windows - 1).bit_length() + 1))


def chunks(
    batch: Windows, negatives: Int[Tensor, "W n"], most: Shape, at_once: Callable[[int], int]
) -> Iterator[Chunk]:
    """All users of the batch; each may have `most` windows, tokens and targets. `at_once` gives a chunk's places."""
    laid, steps = laid_out(batch, negatives, most), places_for(most.windows)
    for tokens in parts_of(most.tokens):
        users, windows = assign_places(laid, (laid.tokens == tokens).nonzero()[:, 0], steps)
        n = -(-at_once(tokens) // steps[-1]) * steps[-1] if len(users) else 1
        for some in torch.arange(len(users), device=users.device).split(n):
            yield chunk_of(laid, users[some], F.pad(windows[some], (0, n - len(some)), value=len(batch)), tokens)


def laid_out(batch: Windows, negatives: Int[Tensor, "W n"], most: Shape) -> Laid:
    """The batch, user by user."""
    inputs = pad_inputs(Inputs(batch, negatives), Shape(len(batch) + 1, most.tokens, most.targets))
    _, owner, counts = torch.unique(batch.users, return_inverse=True, return_counts=True)
    if len(counts) and int(counts.max()) > most.windows:
        raise ValueError(f"a user may have {most.windows} windows in a private round, got {int(counts.max())}")
    nothing, windows = torch.zeros_like(counts), F.pad(owner.argsort(stable=True), (0, 1), value=len(batch))
    longest = nothing.scatter_reduce(0, owner, (batch.tokens != PAD).sum(-1), "amax")
    targets = nothing.index_add(0, owner, real_targets(batch))
    return Laid(inputs, windows, counts, round_up_to(longest, parts_of(most.tokens)), targets)


def assign_places(
    laid: Laid, users: Int[Tensor, " U"], steps: tuple[int, ...]
) -> tuple[Int[Tensor, " P"], Int[Tensor, " P"]]:
    """Each place's user and window; a place that a user does not need has the empty window.

    Who needs most places sits first, so that an edge at any multiple of the most places splits nobody.
    """
    places = round_up_to(laid.counts[users], steps)
    order = places.argsort(descending=True, stable=True)
    users, places = users[order], places[order]
    rank = torch.repeat_interleave(torch.arange(len(users), device=users.device), places)
    within = torch.arange(len(rank), device=users.device) - (places.cumsum(0) - places)[rank]
    first, empty = (laid.counts.cumsum(0) - laid.counts)[users], len(laid.windows) - 1
    index = torch.where(within < laid.counts[users][rank], first[rank] + within, empty)
    return users[rank], laid.windows[index]


def chunk_of(laid: Laid, users: Int[Tensor, " P"], windows: Int[Tensor, " W"], tokens: int) -> Chunk:
    """These windows, of so many tokens; their users are those of the first places."""
    found, owners = torch.unique(users, return_inverse=True)
    owners = F.pad(owners, (0, len(windows) - len(users)), value=len(found))
    targets = F.pad(laid.targets[users], (0, len(windows) - len(users)), value=1)
    inputs = from_columns([column[windows] for column in columns(laid.inputs)])
    batch, padding = inputs.batch, inputs.batch.tokens.shape[1] - tokens
    short = replace(batch, tokens=batch.tokens[:, padding:], sources=(batch.sources - padding).clamp(min=0))
    owners = owners.where(windows < len(laid.windows) - 1, len(found))
    return Chunk(len(found), owners, targets, replace(inputs, batch=short))


def windows_at_once(loss: OneWindowLoss, tokens: int, weights: Mapping[str, Tensor], expected: float) -> int:
    """How many windows a chunk has: half the expected cohort's number of users, or what there is room for."""
    needs, config = loss.needs(tokens), loss.model.config
    looked_up = sum(math.prod(shape) for shape in needs.look_ups) * config.width
    trained = sum(weight.numel() for name, weight in weights.items() if name != TABLE)
    table = 0 if needs.rows_alone or TABLE not in weights else weights[TABLE].numel()
    kept = TENSORS_KEPT * config.layers * tokens * config.width
    room = CELLS_AT_ONCE[loss.model.items.device.type] // (looked_up + 2 * (trained + table) + kept + needs.numbers)
    return max(1, min(room, math.ceil(expected / 2)))


def gradients_of(
    loss: OneWindowLoss, weights: Mapping[str, Tensor], chunk: Chunk, numbers: Float[Tensor, "W n"]
) -> Gradients:
    """Of each user's mean loss with respect to the weights: one tensor program makes those of all windows."""
    model, needs = loss.model, loss.needs(chunk.inputs.batch.tokens.shape[1])
    by_rows = TABLE in weights and needs.rows_alone
    dense = {name: weight.detach() for name, weight in weights.items() if not (by_rows and name == TABLE)}
    changes = [model.mean_row.new_zeros(*shape, len(model.mean_row)) for shape in needs.look_ups if by_rows]

    def one(dense: Mapping[str, Tensor], changes: list[Tensor], own: list[Tensor], n: Tensor, lots: Tensor) -> object:
        inputs, look_ups = from_columns([column[None] for column in own]), LookUps(model, changes)
        asked = reading(model, look_ups) if by_rows else model
        total, notes = lending(model, dense, lambda: loss(asked, inputs.batch, inputs.negatives, Dealt(lots)))
        return total / n, (look_ups.items, notes.sums, notes.counts)

    with sdpa_kernel(SDPBackend.MATH):  # the one that vmap knows how to batch
        each = vmap(grad(one, argnums=(0, 1), has_aux=True), in_dims=(None, None, 0, 0, 0))
        (slopes, changed), (items, *told) = each(dense, changes, columns(chunk.inputs), chunk.targets, numbers)
    rows = rows_of(items, changed, chunk.owners, model.n_rows) if by_rows else None
    return Gradients({name: by_user(slope, chunk) for name, slope in slopes.items()}, rows, (told[0], told[1]))


def by_user(slope: Float[Tensor, "W *shape"], chunk: Chunk) -> Float[Tensor, "U1 *shape"]:
    """The sum over each user's windows."""
    return slope.new_zeros(chunk.n_users + 1, *slope.shape[1:]).index_add(0, chunk.owners, slope)


def rows_of(items: list[Tensor], changed: list[Tensor], owners: Int[Tensor, " W"], n_rows: int) -> Rows:
    """What the look-ups of each user's windows add up to, item by item."""
    read = torch.cat([each.flatten(1) for each in items], dim=1)  # (W, R)
    values = torch.cat([each.flatten(1, -2) for each in changed], dim=1)  # (W, R, d)
    pairs, place = torch.unique(owners[:, None] * n_rows + read, return_inverse=True)
    nothing = values.new_zeros(len(pairs), values.shape[-1])
    return Rows(pairs // n_rows, pairs % n_rows, nothing.index_add(0, place.flatten(), values.flatten(0, 1)))
