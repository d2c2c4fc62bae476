"""One process that plays the server and all clients of a slice, whole stacks of clients at a time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.backbone.losses import hidden_at
from protofed.backbone.sasrec import SASRec
from protofed.client.codec import Codec, QueryEncoder, unit
from protofed.client.drift import Gate, adaptive_stability, drift_gate, observe
from protofed.client.own_rows import OwnRows, own_embed, subset, written_back
from protofed.client.prompts import PromptState, carry_over, first_contact
from protofed.client.router import route
from protofed.client.steps import AdamWState, adamw_start
from protofed.client.update import Brief, Broadcast, ClientState, Lesson, LocalRule, StepReport, client_update, cooled
from protofed.federation.lessons import ClientData, chunks, negatives_of, stack_size
from protofed.federation.table import ClientTable, drift_of, keep_drift, keep_prompts, prompts_of
from protofed.privacy.draws import bernoulli, normal
from protofed.privacy.mechanism import seeded_noise
from protofed.seeds import stream
from protofed.server.aggregate import RoundReport, ServerRule, server_aggregate
from protofed.server.library import PrototypeLibrary
from protofed.slices.windows import NO_TARGET, Windows, moved


@dataclass(frozen=True, slots=True)
class Encoders:
    """What the base block taught once and for all: phi and Dec, g, the drift gate, kappa of the pull."""

    codec: Codec
    g: QueryEncoder
    gate: Gate
    kappa: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """How local steps and rounds of a slice interleave; `rounds` is what the budget still allows."""

    local_steps: int
    rounds: int
    first_round: int  # rounds of earlier slices: the draws of a round are keyed by its number over the whole stream
    sampling_rate: float
    negatives: int
    n_items: int  # negatives come from items 0 .. n_items - 1
    chunk: int
    lambda_max: float
    carry: float
    seed: int
    slice_index: int


@dataclass(frozen=True, slots=True)
class Moments:
    """The optimisers of all active clients of a slice."""

    long: AdamWState
    rows: AdamWState


def broadcast(backbone: SASRec, codec: Codec, v: Float[Tensor, "K d_z"]) -> Broadcast:
    """What the server sends: prototypes; their prompts are decoded on arrival, once for all queries."""
    return Broadcast(backbone, codec, v, codec.decode(v))


@torch.no_grad()
def hidden_at_targets(backbone: SASRec, rows: OwnRows, windows: Windows) -> Float[Tensor, "W P d"]:
    """The backbone's hidden state, without a prompt, wherever a target is predicted; zero where there is none."""
    hidden = backbone.hidden(windows.tokens, None, own_embed(rows, windows.users, backbone.embed))
    return hidden_at(hidden, windows.sources) * (windows.targets != NO_TARGET)[..., None]


@torch.no_grad()
def query_means(
    backbone: SASRec, g: QueryEncoder | None, rows: OwnRows, windows: Windows, n: int
) -> Float[Tensor, "n d_z"]:
    """Each client's mean query over all its targets, as a unit vector; raw hidden states where there is no g."""
    hidden = hidden_at_targets(backbone, rows, windows)
    real = (windows.targets != NO_TARGET)[..., None]
    h = hidden if g is None else g(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])  # (W, P, d_z)
    sums = (h * real).sum(1)
    return unit(torch.zeros(n, sums.shape[-1], device=sums.device).index_add(0, windows.users, sums))


def tastes(backbone: SASRec, own: OwnRows, data: ClientData, chunk: int) -> Float[Tensor, "A d"]:
    """The direction of each active client's hidden states, a unit vector."""
    device, active = backbone.items.device, subset(own, data.users.to(own.clients.device))[0]
    parts = [
        query_means(backbone, None, on(rows_of_stack(active, where)[0], device), windows, where.stop - where.start)
        for where, windows in chunks(data, stack_size(chunk, backbone.items), device)
    ]
    return torch.cat([torch.zeros(0, backbone.config.width, device=device), *parts])


def simulate_slice(
    backbone: SASRec,
    encoders: Encoders,
    library: PrototypeLibrary,
    table: ClientTable,
    own: OwnRows,
    data: ClientData,
    sessions: Int[Tensor, " N"],
    rule: LocalRule,
    server: ServerRule,
    schedule: Schedule,
    brief: ClientData | None = None,
) -> tuple[PrototypeLibrary, OwnRows, dict[str, int | float]]:
    """All local steps and rounds of one slice; the table is written in place, library and own rows come back new.

    Prompts learn from `brief` where it is given: the same clients' events with little context.
    """
    device = backbone.items.device
    size = stack_size(schedule.chunk, backbone.items)
    stacks = list(chunks(data, size, torch.device("cpu")))
    briefs = in_brief(brief, len(stacks), size)
    active_rows, place = subset(own, data.users.to(own.clients.device))
    lessons = [
        meet(backbone, encoders, library, table, active_rows, data, sessions, where, windows, schedule, rule)
        for where, windows in stacks
    ]
    moments = fresh_moments(table, data, active_rows)
    steps: list[StepReport] = []
    rounds: list[RoundReport] = []
    for what, number in timetable(schedule.local_steps, schedule.rounds):
        shared = broadcast(backbone, encoders.codec, library.v)
        if what == "step":
            key = schedule.slice_index * 100_000 + number

            def draw(windows: Windows, step: int = key) -> Int[Tensor, "W n"]:
                return negatives_of(windows, schedule.negatives, schedule.n_items, seed=schedule.seed, step=step)

            for (where, _), lesson, short in zip(stacks, lessons, briefs, strict=True):
                state = client_stack(table, data, active_rows, moments, where, device)
                on_device = replace(lesson, windows=moved(lesson.windows, device))
                told = None if short is None else Brief(moved(short, device), draw(short).to(device))
                state, report = client_update(
                    shared, state, on_device, draw(lesson.windows).to(device),
                    cooled(rule, number, schedule.local_steps), told,
                )  # fmt: skip
                keep_stack(table, data, active_rows, moments, where, state)
                if number == schedule.local_steps - 1:
                    steps.append(report)
        else:
            round_ = schedule.first_round + number
            library, report_ = upload_round(shared, library, table, rule, server, schedule, round_)
            rounds.append(report_)
    return library, written_back(own, place, active_rows), summary(data, steps, rounds)


def in_brief(brief: ClientData | None, stacks: int, chunk: int) -> list[Windows | None]:
    """The brief windows of each stack of clients; None where there are none."""
    if brief is None:
        return [None] * stacks
    return [windows for _, windows in chunks(brief, chunk, torch.device("cpu"))]


def timetable(steps: int, rounds: int) -> Iterator[tuple[str, int]]:
    """Steps and rounds in the order they happen, each spread evenly over the slice, a step before a round."""
    events = [((i + 1) / steps, 0, i) for i in range(steps)] + [((i + 1) / rounds, 1, i) for i in range(rounds)]
    for _, kind, number in sorted(events):
        yield ("round" if kind else "step"), number


def meet(
    backbone: SASRec,
    encoders: Encoders,
    library: PrototypeLibrary,
    table: ClientTable,
    active_rows: OwnRows,
    data: ClientData,
    sessions: Int[Tensor, " N"],
    where: slice,
    windows: Windows,
    schedule: Schedule,
    rule: LocalRule,
) -> Lesson:
    """A slice begins for a stack of clients: queries are observed, newcomers get prompts, short prompts fade."""
    device, users = backbone.items.device, data.users[where]
    rows = rows_of_stack(active_rows, where)[0]
    on_device = moved(windows, device)
    h = query_means(backbone, encoders.g, on(rows, device), on_device, len(users))
    drift = observe(drift_of(table, users, device), h)
    keep_drift(table, users, drift)
    chosen, weights = route(h, library.v, top_m=rule.top_m, temperature=rule.temperature)
    noise = normal(schedule.seed, "first contact", users.to(device), 0, tuple(table.long.shape[1:])).float()
    fresh = first_contact(encoders.codec, library.v, chosen, weights, noise)
    before, met = prompts_of(table, users, device), table.met[users.to(table.device)].to(device)
    here = met[:, None, None]
    prompts = PromptState(torch.where(here, before.long, fresh.long), torch.where(here, before.short, fresh.short))
    keep_prompts(table, users, carry_over(prompts, sessions[users].to(device), carry=schedule.carry))
    table.met[users.to(table.device)] = True
    lambda_s = adaptive_stability(drift.mean_drift, kappa=encoders.kappa, lambda_max=schedule.lambda_max)
    points = torch.stack([h, unit(drift.mean)], dim=1) if rule.alignment == "wasserstein" else None
    return Lesson(windows, h, drift_gate(drift.drift, encoders.gate), lambda_s, points)


def fresh_moments(table: ClientTable, data: ClientData, rows: OwnRows) -> Moments:
    """Optimisers before the first step of a slice, kept where the table is kept."""
    like = table.long[:0].new_zeros(len(data), *table.long.shape[1:])
    return Moments(adamw_start(like), adamw_start(torch.zeros_like(rows.rows[:, None])))


def rows_of_stack(active: OwnRows, where: slice) -> tuple[OwnRows, slice]:
    """The own rows of clients `where` among the active ones, numbered from 0, and their places."""
    edges = torch.tensor([where.start, where.stop], device=active.clients.device)
    first, last = torch.searchsorted(active.clients, edges).tolist()
    part = slice(first, last)
    return OwnRows(active.clients[part] - where.start, active.items[part], active.rows[part]), part


def client_stack(
    table: ClientTable, data: ClientData, active_rows: OwnRows, moments: Moments, where: slice, device: torch.device
) -> ClientState:
    """The state of a stack of active clients, on the compute device."""
    rows, part = rows_of_stack(active_rows, where)
    return ClientState(
        prompts_of(table, data.users[where], device),
        _moments_to(moments.long, where, device),
        on(rows, device),
        _moments_to(moments.rows, part, device),
    )


def keep_stack(
    table: ClientTable, data: ClientData, active_rows: OwnRows, moments: Moments, where: slice, state: ClientState
) -> None:
    """Write a stack's state back to where `client_stack` took it from."""
    _, part = rows_of_stack(active_rows, where)
    keep_prompts(table, data.users[where], state.prompts)
    active_rows.rows[part] = state.rows.rows.to(active_rows.rows)
    for kept, new, at in ((moments.long, state.moments, where), (moments.rows, state.row_moments, part)):
        for name in ("first", "second", "steps"):
            getattr(kept, name)[at] = getattr(new, name).to(getattr(kept, name))


def upload_round(
    shared: Broadcast,
    library: PrototypeLibrary,
    table: ClientTable,
    rule: LocalRule,
    server: ServerRule,
    schedule: Schedule,
    round_: int,
) -> tuple[PrototypeLibrary, RoundReport]:
    """One round: every client tosses its coin; those it chose upload, if they have a prompt; the server aggregates."""
    device = shared.v.device
    everybody = torch.arange(len(table), device=table.device)
    coin = bernoulli(schedule.seed, "coin", everybody, round_, schedule.sampling_rate)
    sampled = everybody[coin & table.met]
    prompts = prompts_of(table, sampled, device)
    z = shared.codec.encode(prompts.long)[:, None]
    if server.aggregator == "barycenter":
        z = torch.cat([z, shared.codec.encode(prompts.long + prompts.short)[:, None]], dim=1)
    noise = seeded_noise(stream(schedule.seed, "server noise", round_))
    parting = stream(schedule.seed, "separation", round_)
    return server_aggregate(
        library, sampled.to(device), z, server, seed=schedule.seed, round_=round_, noise=noise, rng=parting
    )


def summary(data: ClientData, steps: Sequence[StepReport], rounds: Sequence[RoundReport]) -> dict[str, int | float]:
    """What the run's log keeps of a slice; a number that is not finite (no noise, a single prototype) is left out."""
    told: dict[str, int | float] = {"active_clients": len(data), "rounds": len(rounds)}
    if steps:
        loss, went, zeros = (torch.cat([getattr(s, name).float().cpu() for s in steps]) for name in _REPORTED)
        told |= {"client_loss": float(loss.nanmean()), "stuck_clients": float((1 - went).sum())}
        told |= {"short_sparsity": float(zeros.mean())}
    if rounds:
        told |= {
            "uploads_per_round": sum(r.uploads for r in rounds) / len(rounds),
            "clipped_share": sum(r.clipped for r in rounds) / len(rounds),
            "signal_to_noise": sum(r.signal_to_noise for r in rounds) / len(rounds),
            "smallest_distance": rounds[-1].smallest_distance,
        }
    return {name: value for name, value in told.items() if math.isfinite(value)}


_REPORTED = ("loss", "moved", "sparsity")


def on(rows: OwnRows, device: torch.device) -> OwnRows:
    """The same rows on another device."""
    return OwnRows(rows.clients.to(device), rows.items.to(device), rows.rows.to(device))


def _moments_to(state: AdamWState, where: slice, device: torch.device) -> AdamWState:
    return AdamWState(state.first[where].to(device), state.second[where].to(device), state.steps[where].to(device))
