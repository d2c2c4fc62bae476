"""A slice begins on the devices: new events are remembered, queries observed, prompts and rows of what is new started.

From here on the same functions serve one device and a whole stack of them.
"""

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from protofed.backbone.losses import hidden_at
from protofed.backbone.sasrec import SASRec
from protofed.client.codec import QueryEncoder, unit
from protofed.client.drift import adaptive_stability, drift_gate, observe
from protofed.client.lessons import CutsByKey, Lesson, own_windows, session_starts
from protofed.client.memory import NewEvents, as_histories, places_since
from protofed.client.model import Model
from protofed.client.own_rows import OwnRows, own_embed, with_met_items
from protofed.client.prompts import PromptState, carry_over, first_contact
from protofed.client.state import DeviceState, remember, with_fresh_moments
from protofed.client.update import Routing, route_queries
from protofed.privacy.draws import Draws
from protofed.slices.histories import Histories
from protofed.slices.windows import NO_TARGET, Windows, moved, trimmed


def begin_slice(
    model: Model, state: DeviceState, events: NewEvents, draws: Draws, period: int
) -> tuple[DeviceState, Lesson]:
    """The devices at the start of slice `period` with their new events remembered, and what they learn from in it.

    Who learns from an event of the slice takes part: its query is observed, its items get rows, its short prompt fades
    with every session that began, and a prompt starts at first contact. The others only remember.
    """
    rule, state = model.rule, remember(state, events.memory)
    past = as_histories(state.memory, row_order=rule.row_order)
    targets = places_since(state.memory, events.first)
    windows, brief = cut_windows(model, state, past, targets, draws, period)
    state = take_part(model, state, windows, past)
    h = query_means(model.backbone, model.encoders.g, state.rows, moved(windows, state.device), len(state))
    drift = observe(state.drift, h, state.active)
    prompts = start_prompts(model, state, h, route_queries(model, h, rule), draws)
    sessions = session_starts(past, targets, 3600 * rule.session_gap_hours).to(state.device)
    prompts = carry_over(prompts, sessions, carry=rule.carry)
    state = replace(state, drift=drift, prompts=prompts, met=state.met | state.active)
    pull = adaptive_stability(drift.mean_drift, kappa=model.encoders.kappa, lambda_max=rule.lambda_max)
    points = torch.stack([h, unit(drift.mean)], dim=1) if rule.alignment == "wasserstein" else None
    gate = drift_gate(drift.drift, model.encoders.gate)
    return with_fresh_moments(state), Lesson(windows, h, gate, pull, points, brief)


def cut_windows(
    model: Model, state: DeviceState, past: Histories, targets: np.ndarray, draws: Draws, period: int
) -> tuple[Windows, Windows | None]:
    """Windows over what a slice learns from, and the same with the little context that prompts learn beside."""
    rule, length = model.rule, model.backbone.config.history_length
    cuts = CutsByKey(draws, "window cuts", state.users, period)
    windows = trimmed(own_windows(past, targets, cuts, length=length, stride=rule.stride))
    if not rule.prompt_history:
        return windows, None
    short, stride = rule.prompt_history, max(1, rule.prompt_history - 1)
    cuts = CutsByKey(draws, "brief cuts", state.users, period)
    return windows, trimmed(own_windows(past, targets, cuts, length=short, stride=stride))


def take_part(model: Model, state: DeviceState, windows: Windows, past: Histories) -> DeviceState:
    """The devices with those that have something to learn marked, and rows for all that these have met."""
    active = torch.zeros(len(state), dtype=torch.bool).index_fill(0, windows.users, True).to(state.device)
    seen = query_means(model.backbone, None, state.rows, moved(windows, state.device), len(state))
    taste = torch.where(active[:, None], seen, state.taste)
    state = replace(state, active=active, contributes=state.contributes | active, taste=taste)
    return add_met_rows(model, state, past, active)


def add_met_rows(model: Model, state: DeviceState, past: Histories, who: Bool[Tensor, " U"]) -> DeviceState:
    """The devices with a row for every item that is new to the memory of one of `who`.

    A row starts at the public row, or among the user's own neighbouring events, and a little towards what the user
    typically asks for: what having met an item was worth to base users.
    """
    if not model.rule.use_rows:
        return state
    clients = who.nonzero()[:, 0]
    boost = model.met_boost * state.taste[clients]
    return replace(state, rows=with_met_items(state.rows, model.row_source, past, len(past), clients, boost))


def start_prompts(
    model: Model, state: DeviceState, h: Float[Tensor, "U d_z"], routing: Routing, draws: Draws
) -> PromptState:
    """The devices' prompts; those of active devices that had none start near the prototypes they are routed to."""
    codec, prompts = model.encoders.codec, state.prompts
    noise = draws.normal("first contact", state.users, 0, tuple(prompts.long.shape[1:])).float()
    fresh = first_contact(codec, model.v, routing.chosen, routing.weights, noise)
    first = (state.active & ~state.met)[:, None, None]
    return PromptState(torch.where(first, fresh.long, prompts.long), torch.where(first, fresh.short, prompts.short))


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
