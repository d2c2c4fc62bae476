"""A slice's rounds of the federated baselines: coins, local steps, the server's step, and what the log is told."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.backbone.losses import LOSSES
from protofed.backbone.sasrec import at_rest
from protofed.client.lessons import ClientData, chunks, stack_size
from protofed.federation.rounds import Costs, server_noise, summarise_rounds
from protofed.federation.stacked import (
    PROMPT,
    ClientWeights,
    LocalSteps,
    Losses,
    PairedWindows,
    clipped_sum,
    deltas_of,
    draw_negatives_of_steps,
    flatten,
    pair_items,
    select_clients,
    squared_norms,
    stacked_losses,
    targets_of,
    train_stack,
    unflatten,
    weighted_sum,
)
from protofed.methods.baselines.federated import FederatedState, Server, weights_of
from protofed.methods.protocol import Diagnostics, World
from protofed.privacy.draws import SeededDraws, toss_coins
from protofed.privacy.mechanism import add_gaussian_noise
from protofed.server.aggregate import RoundReport
from protofed.slices.stream import TimeSlice
from protofed.slices.windows import Windows

FLOAT_BYTES = 4
STEPS_PER_ROUND = 1_000  # negatives are keyed by round * this + step,
ROUND_KEYS = 1 << 31  # beyond those of steps outside rounds (`personal_copies`)


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

    def __call__(self, server: Server, lesson: PairedWindows, users: Int[Tensor, " U"], round_: int) -> Losses: ...


def rounds_of(world: World, state: FederatedState, slice_: TimeSlice, local: LocalSteps, chunk: int) -> Rounds:
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
        clip_radius=privacy.clip_radius if privacy.wrap else 0.0,
        noise_multiplier=state.noise_multiplier,
    )


def plain_losses(world: World) -> LossesFor:
    """The recommendation loss with the client's own weights and rows."""
    element_loss = LOSSES[world.config.training.loss]

    def losses_for(server: Server, lesson: PairedWindows, users: Int[Tensor, " U"], round_: int) -> Losses:
        fixed = broadcast_rows(server, lesson)

        def losses(at: ClientWeights, step: int) -> Tensor:
            table = own_or_fixed(server, lesson, at.rows, fixed)
            windows, against = lesson.windows, lesson.negatives[step]
            return stacked_losses(server.model, server.layout, at.dense, windows, against, element_loss, table)

        return losses

    return losses_for


def broadcast_rows(server: Server, lesson: PairedWindows) -> Float[Tensor, "P d"]:
    """The broadcast row of each pair's item."""
    return server.model.embed(lesson.items).detach()


def own_or_fixed(
    server: Server, lesson: PairedWindows, rows: Float[Tensor, "P d"], fixed: Float[Tensor, "P d"]
) -> Float[Tensor, "P d"]:
    """The client's row of a pair whose item trains, the broadcast one of others."""
    return torch.where(may_train(server, lesson.items)[:, None], rows, fixed)


def may_train(server: Server, items: Int[Tensor, " P"]) -> Bool[Tensor, " P"]:
    """Which items have a row that trains."""
    return (items < len(server.rows)) & server.rows[items.clamp(max=len(server.rows) - 1)]


def federate(
    world: World, server: Server, data: ClientData, slice_: TimeSlice, rounds: Rounds, losses_for: LossesFor
) -> tuple[Server, list[RoundReport]]:
    """The server after the rounds of a slice."""
    reports = []
    for number in range(rounds.count):
        server, report = one_round(world, server, data, slice_, rounds, rounds.first + number, losses_for)
        reports.append(report)
        note = f"round {number + 1} of {rounds.count}, client loss {report.loss:.4f}"
        world.progress("rounds", number + 1, rounds.count, note)
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
    coin = toss_coins(SeededDraws(world.config.seed), torch.arange(rounds.population), round_, rounds.sampling_rate)
    cohort = select_clients(data, coin[data.users])
    device, width = server.model.items.device, server.model.config.width
    dense = torch.zeros(server.layout.size, dtype=torch.float64, device=device)
    table = torch.zeros(len(server.rows), width, dtype=torch.float64, device=device)
    total, seen = 0.0, []
    for where, windows in chunks(cohort, stack_size(rounds.chunk, server.model.items), device):
        users = cohort.users[where].to(device)
        start, end, lesson, loss = train_cohort(world, server, windows, users, slice_, rounds.local, round_, losses_for)
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
        dense, table = add_noise(world, server, dense, table, rounds, round_)
        total = rounds.sampling_rate * rounds.population
    return server_step(server, dense / max(total, 1e-9), table / max(total, 1e-9)), report_of(told, rounds)


def train_cohort(
    world: World,
    server: Server,
    windows: Windows,
    users: Int[Tensor, " U"],
    slice_: TimeSlice,
    local: LocalSteps,
    round_: int,
    losses_for: LossesFor,
) -> tuple[ClientWeights, ClientWeights, PairedWindows, Float[Tensor, " U"]]:
    """A stack of clients before and after its local steps, with its training windows and losses."""
    training = world.config.training
    key = ROUND_KEYS + round_ * STEPS_PER_ROUND
    negatives = draw_negatives_of_steps(
        windows, local.steps, training.negatives, slice_.n_train_items, seed=world.config.seed, key=key
    )
    lesson = pair_items(windows, negatives, len(users))
    weights = flatten(weights_of(server.model, server.prompt), server.layout)
    start = ClientWeights(weights.repeat(len(users), 1), broadcast_rows(server, lesson))
    end, loss = train_stack(start, lesson.clients, losses_for(server, lesson, users, round_), local)
    return start, end, lesson, loss


def add_noise(
    world: World,
    server: Server,
    dense: Float[Tensor, " D"],
    table: Float[Tensor, "n d"],
    rounds: Rounds,
    round_: int,
) -> tuple[Float[Tensor, " D"], Float[Tensor, "n d"]]:
    """The sums with noise in every trained coordinate, also where no client contributed."""
    noise = server_noise(world.config.seed, round_)
    std = rounds.noise_multiplier * rounds.clip_radius
    every = add_gaussian_noise(torch.cat([dense, table[server.rows].flatten()]), std, noise)
    table = table.clone()
    table[server.rows] = every[len(dense) :].reshape(-1, table.shape[1])
    return every[: len(dense)], table


def server_step(server: Server, dense: Float[Tensor, " D"], table: Float[Tensor, "n d"]) -> Server:
    """The server with these steps added to its weights and rows."""
    model, prompt = copy.deepcopy(server.model), server.prompt
    steps, weights = unflatten(server.layout, dense), dict(model.named_parameters())
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
    clipped = float((factors < 1).double().mean()) if len(factors) else 0.0
    means = [float(column.mean()) if len(column) else 0.0 for column in (loss, moved)]
    report = RoundReport(told.shape[1], loss=means[0], moved=means[1])
    return replace(report, clipped=clipped) if rounds.clip_radius else report


def report_slice(server: Server, data: ClientData, reports: Sequence[RoundReport], per_user: int) -> Diagnostics:
    """Diagnostics of a slice for the run's log; bytes count one client in one round, dense float32 tensors."""
    size = FLOAT_BYTES * server.parameters
    costs = Costs(size, size, server.parameters, per_user)
    return {"active_clients": len(data), **summarise_rounds(reports), **costs.diagnostics()}
