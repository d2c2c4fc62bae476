"""FedRAP (Li, Long and Zhou 2024, Federated Recommendation with Additive Personalization), on a sequential backbone.

What we implement: user u reads and scores item i with C_i + D_i^(u). C is the shared item table, moved by federated
averaging; D^(u) has rows for the items of u's own history, starts at zero and never leaves the device, like a bias b_u
on u's last hidden state; an item that u met only after a question's time is scored with C_i alone. The transformer
stays as the base block left it. A client's loss is L_rec - lambda_r * separation(D, C) + mu_r * mean |C|, both over the
rows its windows and negatives touch, where separation is the mean squared distance of a coordinate, each row's squared
distance counted up to `margin`. The
curriculum lambda_r = lambda * tanh(r / 10), and mu_r alike, follows the rounds r of the whole stream.
How it differs: the original has no sequence encoder. In its released code the curriculum never reaches the loss and the
separation has no bound, so that the loss can fall for ever; here it does and it has. The original moves D in the rounds
a client is sampled for; then C's upload would depend on earlier coins. Here D and b are fixed during the rounds, and
every active client takes `local_steps` steps on them once the rounds are over, whatever its coins.
In the peft variant only rows of items that appeared after the base block belong to C's trainable part.
Privacy: see `federated`; the upload is C's movement over all trainable rows, touched or not.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.backbone.losses import LOSSES, ElementLoss
from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Descend
from protofed.client.lessons import ClientData, chunks, stack_size
from protofed.client.own_rows import (
    OwnRows,
    find,
    no_rows,
    own_embed,
    subset,
    with_met_items,
    with_own_scores,
    write_back,
)
from protofed.federation.stacked import (
    ClientWeights,
    Layout,
    LocalSteps,
    Losses,
    PairedWindows,
    draw_negatives_of_steps,
    layout_of,
    pair_items,
    stacked_losses,
    train_stack,
)
from protofed.methods.baselines.federated import (
    FederatedState,
    Server,
    after_slice,
    evidence_of,
    list_releases,
    slice_data,
    start_state,
    with_rows,
)
from protofed.methods.baselines.federated_rounds import (
    LossesFor,
    broadcast_rows,
    federate,
    own_or_fixed,
    report_slice,
    rounds_of,
)
from protofed.methods.baselines.personal_copies import STEPS_PER_SLICE, copies_of, with_copies
from protofed.methods.protocol import Diagnostics, World
from protofed.privacy.ledger import Ledger
from protofed.slices.histories import Histories, Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice

CURRICULUM = 10  # rounds


@dataclass(frozen=True, slots=True)
class FedRAPState:
    """The server with every user's bias as its personal copy, and D."""

    shared: FederatedState
    own: OwnRows


@dataclass(frozen=True, slots=True)
class Penalties:
    """The weights of the two terms at some round, and the bound of the first."""

    separation: float
    sparsity: float
    margin: float


def penalties_at(round_: int, separation: float, sparsity: float, margin: float) -> Penalties:
    """The curriculum: both weights grow from zero along tanh(r / 10)."""
    share = math.tanh(round_ / CURRICULUM)
    return Penalties(separation * share, sparsity * share, margin)


def penalty(
    c: Float[Tensor, "P d"],
    d: Float[Tensor, "P d"],
    met: Bool[Tensor, " P"],
    owners: Int[Tensor, " P"],
    n_clients: int,
    weights: Penalties,
) -> Float[Tensor, " U"]:
    """What each client's loss adds: mu * mean |C| over its pairs - lambda * separation over those it has a D for."""
    distance = (d - c).square().sum(-1).clamp(max=weights.margin) / c.shape[1]
    apart = client_means(distance, met, owners, n_clients)
    size = client_means(c.abs().mean(-1), torch.ones_like(met), owners, n_clients)
    return weights.sparsity * size - weights.separation * apart


def client_means(
    values: Float[Tensor, " P"], counts: Bool[Tensor, " P"], owners: Int[Tensor, " P"], n: int
) -> Float[Tensor, " U"]:
    """The mean over each client's pairs that count; 0 for a client without any."""
    nothing = torch.zeros(n, device=values.device, dtype=values.dtype)
    total = nothing.index_add(0, owners, values * counts)
    return total / nothing.index_add(0, owners, counts.to(values.dtype)).clamp(min=1)


def own_at(
    own: OwnRows, users: Int[Tensor, " P"], items: Int[Tensor, " P"]
) -> tuple[Float[Tensor, "P d"], Bool[Tensor, " P"]]:
    """D of each pair, zero where there is none, and where there is one."""
    met, place = find(own, users, items)
    if not len(own):
        return torch.zeros(len(items), own.rows.shape[1], device=own.rows.device), met
    return own.rows[place] * met[:, None], met


def head_of(model: SASRec) -> Layout:
    """The final norm's bias: adding b_u to it adds b_u to the hidden state."""
    return layout_of(dict(model.named_parameters()), ("norm.bias",))


def biases(model: SASRec, b: Float[Tensor, "U d"]) -> Float[Tensor, "U d"]:
    return model.norm.bias.detach() + b


def round_losses(method: "FedRAP", state: FedRAPState, element_loss: ElementLoss) -> LossesFor:
    """The loss of C in a round; D and b are those the client had before the slice's first round."""

    def losses_for(server: Server, lesson: PairedWindows, users: Int[Tensor, " U"], round_: int) -> Losses:
        fixed = broadcast_rows(server, lesson)
        d, met = own_at(state.own, users[lesson.clients], lesson.items)
        b, _ = copies_of(state.shared, users, torch.zeros_like(server.model.mean_row))
        vectors, head, weights = biases(server.model, b), head_of(server.model), method.penalties(round_)

        def losses(at: ClientWeights, step: int) -> Tensor:
            c = own_or_fixed(server, lesson, at.rows, fixed)
            windows, against = lesson.windows, lesson.negatives[step]
            rec = stacked_losses(server.model, head, vectors, windows, against, element_loss, c + d)
            return rec + penalty(c, d, met, lesson.clients, lesson.n_clients, weights)

        return losses

    return losses_for


def own_losses(
    model: SASRec, own: OwnRows, lessons: list[PairedWindows], weights: Penalties, loss: ElementLoss
) -> Losses:
    """The loss of D (the rows of a stack of clients) and b (its vectors) at each step, C being what was broadcast."""
    head = head_of(model)

    def losses(at: ClientWeights, step: int) -> Tensor:
        lesson = lessons[step]
        c = model.embed(lesson.items)
        d, met = own_at(replace(own, rows=at.rows), lesson.clients, lesson.items)
        vectors = biases(model, at.dense)
        rec = stacked_losses(model, head, vectors, lesson.windows, lesson.negatives[0], loss, c + d)
        return rec + penalty(c, d, met, lesson.clients, lesson.n_clients, weights)

    return losses


def with_pairs(own: OwnRows, model: SASRec, past: Histories, until: int, users: Int[Tensor, " A"]) -> OwnRows:
    """D with a row for every item these users met before log position `until`; a new one is zero."""
    pairs = with_met_items(own, model, past, until, users)
    known, _ = find(own, pairs.clients, pairs.items)
    return replace(pairs, rows=pairs.rows.where(known[:, None], 0.0))


def own_steps(
    world: World,
    model: SASRec,
    state: FedRAPState,
    data: ClientData,
    slice_: TimeSlice,
    local: LocalSteps,
    weights: Penalties,
    chunk: int,
) -> FedRAPState:
    """D and b of every active client after its local steps."""
    training, device = world.config.training, model.items.device
    own, users = state.own, data.users.to(device)
    b, _ = copies_of(state.shared, users, torch.zeros_like(model.mean_row))
    learned = [b[:0]]
    for where, windows in chunks(data, stack_size(chunk, model.items), device):
        n, key = where.stop - where.start, slice_.index * STEPS_PER_SLICE
        n_items = slice_.n_train_items
        negatives = draw_negatives_of_steps(
            windows, local.steps, training.negatives, n_items, seed=world.config.seed, key=key
        )
        lessons = [pair_items(windows, each[None], n) for each in negatives]
        part, place = subset(own, users[where])
        losses = own_losses(model, part, lessons, weights, LOSSES[training.loss])
        end, _ = train_stack(ClientWeights(b[where], part.rows), part.clients, losses, local)
        own = write_back(own, place, replace(part, rows=end.rows))
        learned.append(end.dense)
    return FedRAPState(with_copies(state.shared, users, torch.cat(learned)), own)


@dataclass(frozen=True, slots=True)
class FedRAP:
    separation: float = 0.1  # lambda
    sparsity: float = 0.1  # mu
    margin: float = 1.0  # squared distance of D and C beyond which nothing pushes them apart
    epochs: int = 3
    rate: float = 1e-3  # of C
    own_rate: float = 1e-3  # of D and b
    local_steps: int = 20  # of each client on D and b, in a slice
    optimiser: Literal["adamw", "sgd"] = "adamw"
    chunk: int = 64

    def penalties(self, round_: int) -> Penalties:
        return penalties_at(round_, self.separation, self.sparsity, self.margin)

    def start(self, world: World) -> FedRAPState:
        shared = start_state(world, prompted=False)
        return FedRAPState(shared, no_rows(world.config.backbone.width, device=world.backbone.items.device))

    def server(self, world: World, model: SASRec, prompt: Float[Tensor, "L_p d"]) -> Server:
        """C: every row, or in the peft variant those of items without one in the base block."""
        rows = model.has_row.clone()
        if world.config.variant == "peft":
            rows[: world.backbone.n_rows] &= ~world.backbone.has_row
        return Server(model, prompt, Layout((), ()), rows)

    def learn(
        self, world: World, state: FedRAPState, slice_: TimeSlice, descend: Descend
    ) -> tuple[FedRAPState, Diagnostics]:
        training = world.config.training
        model = with_rows(world, state.shared.backbone, slice_, train=True)
        data = slice_data(world, slice_)
        local = LocalSteps(self.epochs, self.rate, self.optimiser, training.max_grad_norm)
        rounds = rounds_of(world, state.shared, slice_, local, self.chunk)
        losses = round_losses(self, state, LOSSES[training.loss])
        server = self.server(world, model, state.shared.prompt)
        server, reports = federate(world, server, data, slice_, rounds, losses)
        shared = after_slice(state.shared, server, rounds.count, data, slice_)
        users = data.users.to(model.items.device)
        own = with_pairs(state.own, server.model, slice_.past, slice_.bounds[-1].train_end, users)
        steps = LocalSteps(self.local_steps, self.own_rate, self.optimiser, training.max_grad_norm)
        weights = self.penalties(shared.rounds)
        after = own_steps(world, server.model, FedRAPState(shared, own), data, slice_, steps, weights, self.chunk)
        width = world.config.backbone.width
        per_user = width + len(after.own) * width // max(len(after.shared.owners), 1)
        return after, {**report_slice(server, data, reports, per_user), **report_own_rows(server.model, after, weights)}

    def score(self, world: World, state: FedRAPState, queries: Queries) -> Float[Tensor, "B I"]:
        model, own, users = state.shared.backbone, state.own, queries.users
        seen = replace(own, rows=own.rows + model.embed(own.items)) if len(own) else own
        b, _ = copies_of(state.shared, users, torch.zeros_like(model.mean_row))
        hidden = model.last_hidden(queries.tokens, None, own_embed(seen, users, model.embed)) + b
        return with_own_scores(model.scores(hidden, queries.n_items), hidden, seen, users, queries=queries)

    def evidence(self, state: FedRAPState) -> Evidence:
        return evidence_of(state.shared)

    def releases(self, world: World, state: FedRAPState, slices_ahead: int = 0) -> Ledger:
        return list_releases(world, state.shared, slices_ahead)


def report_own_rows(model: SASRec, state: FedRAPState, weights: Penalties) -> dict[str, int | float]:
    """What the run's log keeps of D, and how far it lies from C."""
    own = state.own
    told: dict[str, int | float] = {"own_rows": len(own), "separation_weight": weights.separation}
    if not len(own):
        return told
    distance = (own.rows - model.embed(own.items)).square().sum(-1)
    told |= {"own_row_norm": float(own.rows.norm(dim=-1).mean())}
    return told | {"at_margin": float((distance >= weights.margin).float().mean())}
