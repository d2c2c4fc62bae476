"""One user's device: recommend, then learn from what the user did. The same functions as everywhere, with U = 1.

Strictly in time order: a ranking is made from what came before, shown, and only then is the answer observed.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.client.begin import add_met_rows, begin_slice, query_means, start_prompts
from protofed.client.drift import drift_gate
from protofed.client.lessons import STEPS_PER_SLICE, Lesson, draw_negatives
from protofed.client.memory import Memory, NewEvents, as_histories, no_memory
from protofed.client.model import Model
from protofed.client.own_rows import no_rows, own_embed
from protofed.client.prompts import carry_over
from protofed.client.state import DeviceState, remember
from protofed.client.update import (
    client_update,
    decay_rates,
    draw_step_negatives,
    learn_from_feedback,
    route_queries,
)
from protofed.errors import DataError
from protofed.inference.end import end_slice
from protofed.inference.online import online_inference
from protofed.privacy.draws import Draws
from protofed.slices.histories import BOS, PAD, Queries
from protofed.slices.windows import Windows, moved

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Ranking:
    """Items, best first, and their scores."""

    items: Int[Tensor, " n"]
    scores: Float[Tensor, " n"]


@torch.no_grad()
def recommend(model: Model, device: DeviceState, n: int = 10, candidates: Int[Tensor, " c"] | None = None) -> Ranking:
    """The n best items for the user's next event, among all or among the candidates; nothing changes by asking."""
    return best_items(online_inference(model, device, as_query(model, device))[0], n, candidates)


def best_items(scores: Float[Tensor, " I"], n: int, candidates: Int[Tensor, " c"] | None = None) -> Ranking:
    """The n items of the highest scores, among all or among the candidates."""
    if candidates is None:
        best = scores.topk(min(n, len(scores)))
        return Ranking(best.indices, best.values)
    among = candidates.to(scores.device)
    if len(among) and not (int(among.min()) >= 0 and int(among.max()) < len(scores)):
        raise DataError(
            f"candidates must be items 0 .. {len(scores) - 1}, got {int(among.min())} .. {int(among.max())}"
        )
    best = scores[among].topk(min(n, len(among)))
    return Ranking(among[best.indices], best.values)


def feedback(model: Model, device: DeviceState, item: int, time: int, draws: Draws) -> DeviceState:
    """The device after the user chose `item` at `time`: one short step, then the event is remembered.

    After a pause longer than a session gap the short prompt fades first. The long prompt and own rows learn when the
    device takes part in a slice, and drift is observed then too, not here.
    """
    times = device.memory.times
    if not 0 <= item < model.n_items:
        raise DataError(f"item must be one of 0 .. {model.n_items - 1}, got {item}")
    if len(times) and time < int(times[-1]):
        raise DataError(f"feedback comes in time order: got time {time} after {int(times[-1])}")
    pause = time - int(times[-1]) if len(times) else 0
    begun = torch.full((1,), int(not len(times) or pause > SECONDS_PER_HOUR * model.rule.session_gap_hours))
    device = replace(device, prompts=carry_over(device.prompts, begun.to(device.device), carry=model.rule.carry))
    device = _learn_event(model, device, item, draws)
    what, when = torch.tensor([item]), torch.tensor([time])
    device = remember(device, Memory(torch.tensor([0, 1]), what, when))
    if model.just_met:
        return device  # what was met counts at once, without a row
    past = as_histories(device.memory, row_order=model.rule.row_order)
    return add_met_rows(model, device, past, torch.ones_like(device.met))


def meet(model: Model, device: DeviceState, draws: Draws, period: int) -> DeviceState:
    """A device that only remembers, after first contact: rows for what it met, a prompt near its routed prototypes.

    Nothing is learned yet, so it has nothing to send either.
    """
    everything = NewEvents(no_memory(1), torch.zeros(1, dtype=torch.int64))
    begun, _ = begin_slice(model, device, everything, draws, period)
    return replace(begun, active=device.active, contributes=device.contributes, moments=None)


def learn(model: Model, device: DeviceState, first: int, draws: Draws, period: int) -> DeviceState:
    """The device after all local steps of a slice whose train part is its own events from number `first` on."""
    state, lesson = begin_slice(model, device, NewEvents(no_memory(1), torch.tensor([first])), draws, period)
    for step in range(model.rule.steps):
        negatives, brief = draw_step_negatives(model, state, lesson, draws, period * STEPS_PER_SLICE + step)
        state, _ = client_update(model, state, lesson, negatives, decay_rates(model.rule, step), brief)
    return end_slice(model, state, (), no_memory(1))


def as_query(model: Model, device: DeviceState, time: int | None = None) -> Queries:
    """What the device asks: its own history, at `time`, or when its newest event happened."""
    items, times, at = device.memory.items, device.memory.times, device.device
    length = model.backbone.config.history_length
    newest = times[-1:] if len(times) else torch.zeros(1, dtype=torch.int64)
    asked = newest if time is None else torch.tensor([time])
    tokens = torch.cat([torch.tensor([BOS]), items])[-length:]
    tokens = torch.nn.functional.pad(tokens, (length - len(tokens), 0), value=PAD)
    return Queries(
        users=torch.zeros(1, dtype=torch.int64, device=at),
        times=asked.to(at),
        tokens=tokens[None].to(at),
        offsets=torch.tensor([0, len(items)], device=at),
        past_items=items.to(at),
        past_times=times.to(at),
        slice_index=0,
        n_items=model.n_items,
    )


def _learn_event(model: Model, device: DeviceState, item: int, draws: Draws) -> DeviceState:
    """The device with its short prompt one step on; a first event is its first contact."""
    query, number = as_query(model, device), len(device.memory.items)
    at = query.tokens.device
    windows = Windows(
        users=query.users,
        tokens=query.tokens,
        sources=torch.full((1, 1), query.tokens.shape[1] - 1, device=at),
        targets=torch.tensor([[item]], device=at),
        newest=torch.tensor([number], device=at),
    )
    rows = device.rows if bool(device.use_rows) else no_rows(device.taste.shape[1], device=at)
    seen = query_means(model.backbone, None, rows, windows, 1)
    h = query_embedding(model, replace(device, rows=rows), query)
    active = torch.ones_like(device.met)
    begun = replace(device, active=active, taste=torch.where(device.met[:, None], device.taste, seen))
    prompts = start_prompts(model, begun, h, route_queries(model, h, model.rule), draws)
    gate = drift_gate(device.drift.drift, model.encoders.gate)
    lesson = Lesson(windows, h, gate, torch.zeros_like(gate))
    negatives = draw_negatives(draws, device.users, moved(windows, "cpu"), model.rule.negatives, model.n_items, 0)
    learning = replace(begun, prompts=prompts, rows=rows)
    learned, _ = learn_from_feedback(model, learning, lesson, negatives.to(at), model.rule)
    return replace(begun, prompts=learned.prompts, met=active, active=device.active)


@torch.no_grad()
def query_embedding(model: Model, device: DeviceState, query: Queries) -> Float[Tensor, "1 d_z"]:
    """h: the device's history as the query encoder sees it, own rows included."""
    embed = own_embed(device.rows, query.users, model.backbone.embed)
    h: Tensor = model.encoders.g(model.backbone.last_hidden(query.tokens, None, embed))
    return h
