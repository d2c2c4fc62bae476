"""One user's device: recommend, then learn from what the user did. The same functions as everywhere, with U = 1.

Strictly in time order: a ranking is made from what came before, shown, and only then is the answer observed.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.client.codec import QueryEncoder, unit
from protofed.client.drift import DriftState, Gate, drift_gate, no_drift, observe
from protofed.client.own_rows import NEIGHBOURS, OwnRows, find, no_rows, own_embed
from protofed.client.prompts import PromptState, carry_over, mixture
from protofed.client.router import route
from protofed.client.update import Broadcast, Lesson, LocalRule, fresh_state, learn_from_feedback
from protofed.errors import DataError
from protofed.inference.online import Devices, online_inference
from protofed.privacy.draws import uniform
from protofed.slices.histories import BOS, PAD, Queries
from protofed.slices.windows import Windows

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Model:
    """What every device holds alike."""

    shared: Broadcast
    g: QueryEncoder
    gate: Gate
    rule: LocalRule
    n_items: int  # the catalogue: items 0 .. n_items - 1
    carry: float = 0.5  # what of the short prompt survives the start of a session
    session_gap_hours: float = 8.0
    negatives: int = 64
    seed: int = 0
    just_met: float = 0.0  # what having met an item adds before its row is learned; 0: it starts a row at once instead


@dataclass(frozen=True, slots=True)
class Device:
    """One user's memory: prompts, own rows, drift, and the events so far."""

    prompts: PromptState  # U = 1
    rows: OwnRows  # of client 0
    drift: DriftState
    items: Int[Tensor, " n"]
    times: Int[Tensor, " n"]  # seconds
    met: bool = False
    use_prompt: bool = True
    use_rows: bool = True


@dataclass(frozen=True, slots=True)
class Ranking:
    """Items, best first, and their scores."""

    items: Int[Tensor, " n"]
    scores: Float[Tensor, " n"]


def new_device(model: Model) -> Device:
    """A device that has seen nothing: recommendations start at the prototypes its query is routed to."""
    at = model.shared.v.device
    zeros = torch.zeros_like(model.shared.prompts[:1])
    none = torch.zeros(0, dtype=torch.int64, device=at)
    d_z = model.shared.v.shape[1]
    rows = no_rows(model.shared.backbone.config.width, device=at)
    return Device(PromptState(zeros, zeros), rows, no_drift(1, d_z, device=at), none, none)


@torch.no_grad()
def recommend(model: Model, device: Device, n: int = 10, candidates: Int[Tensor, " c"] | None = None) -> Ranking:
    """The n best items for the user's next event, among all or among the candidates; nothing changes by asking."""
    scores = online_inference(
        model.shared, model.g, model.gate, model.rule, as_devices(model, device), as_query(model, device)
    )[0]
    among = torch.arange(len(scores), device=scores.device) if candidates is None else candidates.to(scores.device)
    if len(among) and not (int(among.min()) >= 0 and int(among.max()) < len(scores)):
        raise DataError(
            f"candidates must be items 0 .. {len(scores) - 1}, got {int(among.min())} .. {int(among.max())}"
        )
    best = scores[among].topk(min(n, len(among)))
    return Ranking(among[best.indices], best.values)


def feedback(model: Model, device: Device, item: int, time: int) -> Device:
    """The device after the user chose `item` at `time`: one short step, then the event is history.

    After a pause longer than a session gap the short prompt fades first. The long prompt and own rows learn when the
    device takes part in a slice's local steps, not here.
    """
    if not 0 <= item < model.n_items:
        raise DataError(f"item must be one of 0 .. {model.n_items - 1}, got {item}")
    if len(device.times) and time < int(device.times[-1]):
        raise DataError(f"feedback comes in time order: got time {time} after {int(device.times[-1])}")
    device = _session_begun(model, device, time)
    lesson, prompts = _lesson(model, device, item)
    drawn = uniform(model.seed, "feedback", torch.tensor([len(device.items)]), 0, (model.negatives,))
    negatives = (drawn * model.n_items).long().to(device.items.device)
    state = fresh_state(prompts, device.rows if device.use_rows else no_rows(device.rows.rows.shape[1]))
    state, _ = learn_from_feedback(model.shared, state, lesson, negatives, model.rule)
    return _remembering(model, replace(device, prompts=state.prompts, met=True), item, time)


def as_query(model: Model, device: Device) -> Queries:
    """What the device asks: its own history."""
    n = len(device.items)
    length = model.shared.backbone.config.history_length
    start = torch.tensor([BOS], device=device.items.device)
    tokens = torch.cat([start, device.items])[-length:]
    tokens = torch.nn.functional.pad(tokens, (length - len(tokens), 0), value=PAD)
    return Queries(
        users=torch.zeros(1, dtype=torch.int64, device=tokens.device),
        times=device.times[-1:] if n else torch.zeros(1, dtype=torch.int64, device=tokens.device),
        tokens=tokens[None],
        offsets=torch.tensor([0, n], device=tokens.device),
        past_items=device.items,
        past_times=device.times,
        slice_index=0,
        n_items=model.n_items,
    )


def as_devices(model: Model, device: Device) -> Devices:
    """The device as a table of one user."""
    one = torch.ones(1, dtype=torch.bool, device=device.items.device)
    return Devices(
        device.prompts, device.drift.drift, one & device.met, device.rows, one & device.use_prompt,
        one & device.use_rows, device.use_prompt, device.use_rows, model.just_met,
    )  # fmt: skip


def _session_begun(model: Model, device: Device, time: int) -> Device:
    """A pause of more than the gap begins a session: the short prompt fades, the query is observed."""
    pause = time - int(device.times[-1]) if len(device.times) else 0
    if len(device.times) and pause <= SECONDS_PER_HOUR * model.session_gap_hours:
        return device
    h = _query(model, device)
    begun = torch.ones(1, dtype=torch.int64, device=device.items.device)
    faded = carry_over(device.prompts, begun, carry=model.carry)
    return replace(device, prompts=faded, drift=observe(device.drift, h))


@torch.no_grad()
def _query(model: Model, device: Device) -> Float[Tensor, "1 d_z"]:
    """h: the device's history as the query encoder sees it, own rows included."""
    query, backbone = as_query(model, device), model.shared.backbone
    rows = device.rows if device.use_rows else no_rows(device.rows.rows.shape[1], device=query.tokens.device)
    h: Tensor = model.g(backbone.last_hidden(query.tokens, None, own_embed(rows, query.users, backbone.embed)))
    return h


def _lesson(model: Model, device: Device, item: int) -> tuple[Lesson, PromptState]:
    """The one event as a lesson, and the prompts it changes; a first event starts them at the routed prototypes."""
    query, devices = as_query(model, device), as_devices(model, device)
    tokens = query.tokens
    windows = Windows(
        users=query.users,
        tokens=tokens,
        sources=torch.full((1, 1), tokens.shape[1] - 1, device=tokens.device),
        targets=torch.tensor([[item]], device=tokens.device),
        newest=torch.tensor([len(device.items)], device=tokens.device),
    )
    h = _query(model, device)
    prompts = device.prompts if device.met else _first_prompts(model, h)
    gate = drift_gate(devices.drift, model.gate)
    return Lesson(windows, h, gate, torch.zeros_like(gate)), prompts


def _first_prompts(model: Model, h: Float[Tensor, "1 d_z"]) -> PromptState:
    chosen, weights = route(h, model.shared.v, top_m=model.rule.top_m, temperature=model.rule.temperature)
    long = model.shared.codec.decode(unit(mixture(model.shared.v, chosen, weights)))
    return PromptState(long, torch.zeros_like(long))


def _remembering(model: Model, device: Device, item: int, time: int) -> Device:
    """The event becomes history; an item met for the first time gets a row of the device's own, or counts as met."""
    at = device.items.device
    what, when = torch.tensor([item], device=at), torch.tensor([time], device=at)
    client = torch.zeros_like(what)
    rows = device.rows
    if not model.just_met and not bool(find(rows, client, what)[0]):
        row = first_row(model, device, item)
        place = int(torch.searchsorted(rows.items, what))
        rows = OwnRows(
            torch.zeros(len(rows) + 1, dtype=torch.int64, device=at),
            torch.cat([rows.items[:place], what, rows.items[place:]]),
            torch.cat([rows.rows[:place], row[None], rows.rows[place:]]),
        )
    return replace(device, rows=rows, items=torch.cat([device.items, what]), times=torch.cat([device.times, when]))


def first_row(model: Model, device: Device, item: int) -> Float[Tensor, " d"]:
    """The public row of an item, or the mean public row of the device's newest events where it has none."""
    backbone = model.shared.backbone
    what = torch.tensor([item], device=device.items.device)
    newest = device.items[-NEIGHBOURS:]
    newest = newest[backbone.knows(newest)]
    if bool(backbone.knows(what)) or not len(newest):
        return backbone.embed(what)[0].detach()
    return backbone.embed(newest).mean(0).detach()
