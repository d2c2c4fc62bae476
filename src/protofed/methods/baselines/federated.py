"""What the federated baselines share: cohorts, rounds, the server's step, personal copies, and the books kept of them.

A client is a user. In each round every user tosses a coin; those it chose who have train events in the slice descend
from the broadcast on all their windows at once, and upload how far they moved. The server adds the mean weighted by
events. The standard variant trains all weights and the item table, the peft variant one prompt shared by all.

Privacy. In the private form (DPFed) each upload, over all its tensors together, is clipped to `privacy.clip_radius`;
the server adds Gaussian noise to every coordinate of the sum, untouched item rows included, and divides by the fixed
number q * N of clients expected. Rounds are fixed ahead, nothing is selected on validation events, and items that
appear after the base block start at the public mean row. Every upload is a function of the broadcast and of the
client's own events, never of its earlier coins. Personal copies stay on the devices. Otherwise nothing is promised.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.backbone.injection import rescale_like
from protofed.backbone.losses import LOSSES
from protofed.backbone.sasrec import SASRec, at_rest, grown
from protofed.errors import ConfigError
from protofed.federation.lessons import ClientData, chunks, client_data
from protofed.federation.plan import Plan, plan, releases
from protofed.federation.stacked import (
    PROMPT,
    Layout,
    Lesson,
    LocalSteps,
    Losses,
    Stack,
    chosen,
    clipped_sum,
    deltas_of,
    drawn,
    flat,
    layout_of,
    lesson_of,
    named,
    squared_norms,
    stacked_last_hidden,
    stacked_losses,
    targets_of,
    trained,
    weighted_sum,
)
from protofed.methods.frozen import rows_for
from protofed.methods.protocol import Diagnostics, World
from protofed.privacy.draws import bernoulli
from protofed.privacy.ledger import Ledger
from protofed.privacy.mechanism import add_gaussian_noise, seeded_noise
from protofed.seeds import numpy_stream, stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice
from protofed.slices.windows import Windows

FLOAT_BYTES = 4
STEPS_PER_ROUND = 1_000  # negatives are keyed by round * this + step,
STEPS_PER_SLICE = 100_000  # those of steps outside rounds by slice * this + step,
ROUND_KEYS = 1 << 31  # and the two ranges lie apart
QUERIES_AT_ONCE = 128  # each with a copy of its user's weights


@dataclass(frozen=True, slots=True)
class FederatedState:
    """The server's weights, the personal copies on the devices, and how far the rounds have come."""

    backbone: SASRec
    prompt: Float[Tensor, "L_p d"]  # shared by all; no tokens in the standard variant
    owners: Int[Tensor, " M"]  # users with a personal copy, ascending
    personal: Float[Tensor, "M D"]
    noise_multiplier: float
    allowed_rounds: int
    rounds: int  # made so far
    slice_index: int
    newest_target: int


@dataclass(frozen=True, slots=True)
class Server:
    """What is broadcast and aggregated: the weights of a layout, and those rows of the item table that may train."""

    model: SASRec
    prompt: Float[Tensor, "L_p d"]
    layout: Layout
    rows: Bool[Tensor, " n"]

    @property
    def parameters(self) -> int:
        """How many numbers travel each way in a round."""
        return self.layout.size + int(self.rows.sum()) * self.model.config.width


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of one slice."""

    local: LocalSteps
    first: int
    count: int
    sampling_rate: float
    population: int  # N, public
    chunk: int
    clip_radius: float = 0.0  # 0: not private
    noise_multiplier: float = 0.0


@runtime_checkable
class LossesFor(Protocol):
    """The loss that a stack of clients descends in a round, given the broadcast it starts from."""

    def __call__(self, server: Server, lesson: Lesson, users: Int[Tensor, " U"], round_: int) -> Losses: ...


def is_private(world: World, private: bool) -> bool:
    """Whether this run is noised: the method says so, or the run asks for every method to be."""
    return private or world.config.privacy.wrap


def started(world: World, *, private: bool, prompted: bool) -> FederatedState:
    """The warmed-up backbone, a first shared prompt where there is to be one, and the noise the budget asks for."""
    privacy, config = world.config.privacy, world.config.backbone
    if private and privacy.trust != "central":
        raise ConfigError(f"federated baselines are private under central trust only, got trust {privacy.trust!r}")
    settled = plan(privacy, world.config.stream.n_slices, private=private)
    device = world.backbone.items.device
    prompt = torch.zeros(0, config.width, device=device)
    if prompted:
        noise = torch.randn(1, config.prompt_length, config.width, generator=stream(world.config.seed, "shared prompt"))
        prompt = rescale_like(noise.to(device), world.backbone.input_norm())[0]
    return FederatedState(
        backbone=world.backbone,
        prompt=prompt,
        owners=torch.zeros(0, dtype=torch.int64, device=device),
        personal=torch.zeros(0, 0, device=device),
        noise_multiplier=settled.noise_multiplier,
        allowed_rounds=settled.rounds,
        rounds=0,
        slice_index=world.base.index,
        newest_target=int(world.base.train_positions[-1]),
    )


def weights_of(model: SASRec, prompt: Float[Tensor, "L_p d"]) -> dict[str, Tensor]:
    """Every weight by name, the prompt among them where there is one."""
    return dict(model.named_parameters()) | ({PROMPT: prompt} if len(prompt) else {})


def shared_layout(model: SASRec, prompt: Float[Tensor, "L_p d"]) -> Layout:
    """What the server trains besides item rows: the prompt where there is one, else all weights."""
    weights = weights_of(model, prompt)
    names = (PROMPT,) if len(prompt) else tuple(name for name in weights if name != "items")
    return layout_of(weights, names)


def personal_layout(model: SASRec, prompt: Float[Tensor, "L_p d"]) -> Layout:
    """What a client keeps a copy of: the prompt where there is one, else the last block and the final norm."""
    weights = weights_of(model, prompt)
    last = f"blocks.{len(model.blocks) - 1}."
    names = tuple(name for name in weights if name.startswith((last, "norm.")))
    return layout_of(weights, (PROMPT,) if len(prompt) else names)


def server_of(state: FederatedState) -> Server:
    """The server of the FedAvg family in the state's variant."""
    model, frozen = state.backbone, bool(len(state.prompt))
    rows = torch.zeros_like(model.has_row) if frozen else model.has_row
    return Server(model, state.prompt, shared_layout(model, state.prompt), rows)


def with_rows(world: World, model: SASRec, slice_: TimeSlice, *, private: bool, train: bool) -> SASRec:
    """The model with rows for the slice's items: by the shared rule, or, in private, at the public mean row.

    In private, rows that do not train are left out: such items are read as the mean row anyway.
    """
    if not private:
        return rows_for(world, model, slice_)[0]
    if not train:
        return model
    bigger = grown(model, slice_.n_train_items)
    with torch.no_grad():
        bigger.items[~bigger.has_row] = model.mean_row
    bigger.has_row = torch.ones_like(bigger.has_row)
    return bigger


def slice_data(world: World, slice_: TimeSlice) -> ClientData:
    """The windows of the users who are active in the slice."""
    return client_data(
        slice_.past,
        slice_.train_positions,
        length=world.config.backbone.history_length,
        stride=world.config.training.stride,
        rng=numpy_stream(world.config.seed, "client windows", slice_.index),
    )


def rounds_of(
    world: World, state: FederatedState, slice_: TimeSlice, local: LocalSteps, chunk: int, *, private: bool
) -> Rounds:
    """The slice's rounds; they end where the budget does."""
    privacy = world.config.privacy
    left = max(0, state.allowed_rounds - state.rounds)
    return Rounds(
        local=local,
        first=state.rounds,
        count=min(privacy.rounds_per_slice, left),
        sampling_rate=privacy.sampling_rate,
        population=slice_.past.n_users,
        chunk=chunk,
        clip_radius=privacy.clip_radius if private else 0.0,
        noise_multiplier=state.noise_multiplier,
    )


def plain_losses(world: World) -> LossesFor:
    """The recommendation loss with the client's own weights and rows."""
    element_loss = LOSSES[world.config.training.loss]

    def losses_for(server: Server, lesson: Lesson, users: Int[Tensor, " U"], round_: int) -> Losses:
        fixed = broadcast_rows(server, lesson)

        def losses(at: Stack, step: int) -> Tensor:
            table = own_or_fixed(server, lesson, at.rows, fixed)
            windows, against = lesson.windows, lesson.negatives[step]
            return stacked_losses(server.model, server.layout, at.dense, windows, against, element_loss, table)

        return losses

    return losses_for


def broadcast_rows(server: Server, lesson: Lesson) -> Float[Tensor, "P d"]:
    """The broadcast row of each pair's item."""
    return server.model.embed(lesson.items).detach()


def own_or_fixed(
    server: Server, lesson: Lesson, rows: Float[Tensor, "P d"], fixed: Float[Tensor, "P d"]
) -> Float[Tensor, "P d"]:
    """The client's row of a pair whose item trains, the broadcast one of others."""
    return torch.where(may_train(server, lesson.items)[:, None], rows, fixed)


def may_train(server: Server, items: Int[Tensor, " P"]) -> Bool[Tensor, " P"]:
    """Which items have a row that trains."""
    return (items < len(server.rows)) & server.rows[items.clamp(max=len(server.rows) - 1)]


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What one round tells the run's log."""

    uploads: int
    loss: float  # mean over the cohort
    moved: float  # mean length of an upload
    clipped: float  # share of uploads that were shortened


def federate(
    world: World, server: Server, data: ClientData, slice_: TimeSlice, rounds: Rounds, losses_for: LossesFor
) -> tuple[Server, list[RoundReport]]:
    """The server after the rounds of a slice."""
    reports = []
    for number in range(rounds.count):
        server, report = one_round(world, server, data, slice_, rounds, rounds.first + number, losses_for)
        reports.append(report)
        world.progress(f"rounds of slice {slice_.index}", number + 1, rounds.count, f"client loss {report.loss:.4f}")
    return server, reports


def one_round(
    world: World,
    server: Server,
    data: ClientData,
    slice_: TimeSlice,
    rounds: Rounds,
    round_: int,
    losses_for: LossesFor,
) -> tuple[Server, RoundReport]:
    """Everybody tosses a coin; those it chose upload, if they have events; the server takes one step."""
    coin = bernoulli(world.config.seed, "coin", torch.arange(rounds.population), round_, rounds.sampling_rate)
    cohort = chosen(data, coin[data.users])
    device, width = server.model.items.device, server.model.config.width
    dense = torch.zeros(server.layout.size, dtype=torch.float64, device=device)
    table = torch.zeros(len(server.rows), width, dtype=torch.float64, device=device)
    total, seen = 0.0, []
    for where, windows in chunks(cohort, rounds.chunk, device):
        users = cohort.users[where].to(device)
        start, end, lesson, loss = cohort_trained(
            world, server, windows, users, slice_, rounds.local, round_, losses_for
        )
        deltas = deltas_of(start, end, lesson, len(server.rows))
        factors = targets_of(windows, len(users)).double()
        if rounds.clip_radius:
            part, rows, factors = clipped_sum(deltas, rounds.clip_radius)
        else:
            part, rows = weighted_sum(deltas, factors)
        dense, table, total = dense + part, table + rows, total + float(factors.sum())
        seen.append(torch.stack([loss.double(), squared_norms(deltas.stack, deltas.clients).sqrt(), factors]))
    told = torch.cat([torch.zeros(3, 0, dtype=torch.float64, device=device), *seen], dim=1)
    if rounds.clip_radius:
        dense, table = noised(world, server, dense, table, rounds, round_)
        total = rounds.sampling_rate * rounds.population
    return server_step(server, dense / max(total, 1e-9), table / max(total, 1e-9)), report_of(told, rounds)


def cohort_trained(
    world: World,
    server: Server,
    windows: Windows,
    users: Int[Tensor, " U"],
    slice_: TimeSlice,
    local: LocalSteps,
    round_: int,
    losses_for: LossesFor,
) -> tuple[Stack, Stack, Lesson, Float[Tensor, " U"]]:
    """A stack of clients at the broadcast and after its local steps, what it learned from, and its loss."""
    training = world.config.training
    key = ROUND_KEYS + round_ * STEPS_PER_ROUND
    negatives = drawn(windows, local.steps, training.negatives, slice_.n_train_items, seed=world.config.seed, key=key)
    lesson = lesson_of(windows, negatives, len(users))
    weights = flat(weights_of(server.model, server.prompt), server.layout)
    start = Stack(weights.repeat(len(users), 1), broadcast_rows(server, lesson))
    end, loss = trained(start, lesson.clients, losses_for(server, lesson, users, round_), local)
    return start, end, lesson, loss


def noised(
    world: World,
    server: Server,
    dense: Float[Tensor, " D"],
    table: Float[Tensor, "n d"],
    rounds: Rounds,
    round_: int,
) -> tuple[Float[Tensor, " D"], Float[Tensor, "n d"]]:
    """The sums with noise in every coordinate that trains, whether anybody touched it or not."""
    noise = seeded_noise(stream(world.config.seed, "server noise", round_))
    std = rounds.noise_multiplier * rounds.clip_radius
    every = add_gaussian_noise(torch.cat([dense, table[server.rows].flatten()]), std, noise)
    table = table.clone()
    table[server.rows] = every[len(dense) :].reshape(-1, table.shape[1])
    return every[: len(dense)], table


def server_step(server: Server, dense: Float[Tensor, " D"], table: Float[Tensor, "n d"]) -> Server:
    """The server with these steps added to its weights and rows."""
    model, prompt = copy.deepcopy(server.model), server.prompt
    steps, weights = named(server.layout, dense), dict(model.named_parameters())
    with torch.no_grad():
        for name in server.layout.names:
            if name != PROMPT:
                weights[name].add_(steps[name].to(weights[name].dtype))
        model.items.add_((table * server.rows[:, None]).to(model.items.dtype))
    if PROMPT in steps:
        prompt = prompt + steps[PROMPT].to(prompt.dtype)
    model.refresh_mean_row()
    return replace(server, model=at_rest(model), prompt=prompt)


def report_of(told: Float[Tensor, "three U"], rounds: Rounds) -> RoundReport:
    """Loss, length and factor of every upload of a round, in short."""
    loss, moved, factors = (column[column.isfinite()] for column in told)
    clipped = float((factors < 1).double().mean()) if rounds.clip_radius and len(factors) else 0.0
    means = [float(column.mean()) if len(column) else 0.0 for column in (loss, moved)]
    return RoundReport(told.shape[1], means[0], means[1], clipped)


def personalised(
    world: World,
    server: Server,
    layout: Layout,
    start: Float[Tensor, "A D"],
    data: ClientData,
    slice_: TimeSlice,
    local: LocalSteps,
    chunk: int,
) -> Float[Tensor, "A D"]:
    """Every active client's copy after local steps, pulled towards the server's weights; nothing leaves the devices."""
    training, device = world.config.training, server.model.items.device
    anchor, parts = flat(weights_of(server.model, server.prompt), layout), [start[:0]]
    for where, windows in chunks(data, chunk, device):
        key = slice_.index * STEPS_PER_SLICE
        n_items = slice_.n_train_items
        negatives = drawn(windows, local.steps, training.negatives, n_items, seed=world.config.seed, key=key)

        def losses(at: Stack, step: int, windows: Windows = windows, negatives: Tensor = negatives) -> Tensor:
            element_loss = LOSSES[training.loss]
            return stacked_losses(server.model, layout, at.dense, windows, negatives[step], element_loss)

        begin = without_rows(start[where], server.model.config.width)
        target = without_rows(anchor.expand_as(begin.dense), server.model.config.width)
        end, _ = trained(begin, torch.zeros(0, dtype=torch.int64, device=device), losses, local, target)
        parts.append(end.dense)
    return torch.cat(parts)


def without_rows(dense: Float[Tensor, "U D"], width: int) -> Stack:
    """A stack that trains no item rows."""
    return Stack(dense, dense.new_zeros(0, width))


def copies_of(
    state: FederatedState, users: Int[Tensor, " B"], otherwise: Float[Tensor, " D"]
) -> tuple[Float[Tensor, "B D"], Bool[Tensor, " B"]]:
    """Each user's personal copy, or `otherwise` where it has none, and who has one."""
    if not len(state.owners):
        return otherwise.repeat(len(users), 1), torch.zeros_like(users, dtype=torch.bool)
    place = torch.searchsorted(state.owners, users.contiguous()).clamp(max=len(state.owners) - 1)
    mine = state.owners[place] == users
    return torch.where(mine[:, None], state.personal[place], otherwise), mine


def scored(state: FederatedState, queries: Queries) -> Float[Tensor, "B I"]:
    """Scores with each user's own copy; a user without one, or everybody where there are none, uses the server's."""
    model, device = state.backbone, state.backbone.items.device
    if not len(state.owners):
        prompt = state.prompt.expand(len(queries), -1, -1) if len(state.prompt) else None
        return model.scores(model.last_hidden(queries.tokens, prompt), queries.n_items)
    layout = personal_layout(model, state.prompt)
    common = flat(weights_of(model, state.prompt), layout)
    hidden = [torch.zeros(0, model.config.width, device=device)]
    for first in range(0, len(queries), QUERIES_AT_ONCE):
        part = slice(first, first + QUERIES_AT_ONCE)
        copies, _ = copies_of(state, queries.users[part], common)
        hidden.append(stacked_last_hidden(model, layout, copies, queries.tokens[part]))
    return model.scores(torch.cat(hidden), queries.n_items)


def after_slice(
    state: FederatedState, server: Server, rounds: Rounds, data: ClientData, slice_: TimeSlice
) -> FederatedState:
    """The state after a slice's rounds; personal copies are still those of before."""
    newest = int(data.windows.newest.max()) if len(data) else -1
    return replace(
        state,
        backbone=server.model,
        prompt=server.prompt,
        rounds=state.rounds + rounds.count,
        slice_index=slice_.index,
        newest_target=max(state.newest_target, newest),
    )


def evidence_of(state: FederatedState) -> Evidence:
    return Evidence(state.slice_index, newest_target=state.newest_target, item_rows=state.backbone.n_rows)


def released(world: World, state: FederatedState, slices_ahead: int, *, private: bool) -> Ledger:
    """What has left the devices so far and what the next slices will make leave; nothing where nothing is noised."""
    if not private:
        return ()
    settled = Plan(state.noise_multiplier, state.allowed_rounds)
    privacy = world.config.privacy
    ledger = releases(privacy, settled, state.rounds + slices_ahead * privacy.rounds_per_slice)
    return tuple(replace(release, stream="weights") for release in ledger)


def told_of(
    server: Server, data: ClientData, rounds: Rounds, reports: Sequence[RoundReport], per_user: int
) -> Diagnostics:
    """What the run's log keeps of a slice: bytes are those of one client in one round, dense float32 tensors."""
    n = max(len(reports), 1)
    told: dict[str, int | float] = {
        "active_clients": len(data),
        "rounds": rounds.count,
        "uploads_per_round": sum(r.uploads for r in reports) / n,
        "client_loss": reports[-1].loss if reports else 0.0,
        "upload_norm": sum(r.moved for r in reports) / n,
        "trainable_parameters": server.parameters,
        "trainable_parameters_per_user": per_user,
        "bytes_up": FLOAT_BYTES * server.parameters,
        "bytes_down": FLOAT_BYTES * server.parameters,
    }
    return told | ({"clipped_share": sum(r.clipped for r in reports) / n} if rounds.clip_radius else {})
