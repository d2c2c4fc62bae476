"""One process that plays the server and all devices of a slice, whole stacks of devices at a time.

It decides who is asked and when. What a device does is in `client`, what a server does in `server`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from protofed.client.begin import begin_slice
from protofed.client.lessons import STEPS_PER_SLICE, Lesson, lesson_to, stack_size
from protofed.client.memory import NewEvents, events_between, events_until, new_events
from protofed.client.model import Model, receive
from protofed.client.state import DeviceState, join, put, select, to_device, without_rows
from protofed.client.update import StepReport, client_update, decay_rates, draw_step_negatives
from protofed.client.upload import Upload, embed_prompts, make_upload
from protofed.federation.rounds import server_noise, summarise_rounds, timetable
from protofed.inference.end import end_slice, validation_questions
from protofed.inference.head import FittedHead
from protofed.privacy.draws import Draws, SeededDraws, toss_coins
from protofed.privacy.upload import RoundRule
from protofed.progress import Progress, silent
from protofed.seeds import stream
from protofed.server.accept import accept
from protofed.server.aggregate import RoundReport, server_aggregate
from protofed.server.library import PrototypeLibrary
from protofed.slices.stream import TimeSlice

UPLOADS_AT_ONCE = 2_048  # of devices that are idle in the slice; each may hold K noised rows


@dataclass(frozen=True, slots=True)
class Schedule:
    """How local steps and rounds of a slice interleave; `rounds` is what the budget still allows."""

    slice_index: int
    steps: int
    rounds: int
    first_round: int  # rounds of earlier slices: the draws of a round are keyed by its number over the whole stream
    sampling_rate: float
    chunk: int
    seed: int
    own_draws: Draws | None = None  # of devices that are not simulated; None: those of the seed

    @property
    def draws(self) -> Draws:
        """Where the devices take their random numbers from."""
        return self.own_draws or SeededDraws(self.seed)


@dataclass(frozen=True, slots=True)
class Stack:
    """Some devices that learn in the slice: their places among all, their state, and what they learn from."""

    places: Int[Tensor, " n"]
    state: DeviceState
    lesson: Lesson


def simulate_slice(
    model: Model,
    library: PrototypeLibrary,
    devices: DeviceState,
    slice_: TimeSlice,
    rule: RoundRule,
    schedule: Schedule,
    progress: Progress = silent,
) -> tuple[PrototypeLibrary, DeviceState, dict[str, int | float]]:
    """All local steps and rounds of one slice; library and devices come back new, and what happened."""
    stacks = list(begin_stacks(model, devices, slice_, schedule))
    steps: list[StepReport] = []
    rounds: list[RoundReport] = []
    planned = list(timetable(schedule.steps, schedule.rounds))
    for done, (what, number) in enumerate(planned):
        model = model if model.version == library.version else receive(model, library.broadcast())
        if what == "step":
            stacks, steps = step_stacks(model, stacks, schedule, number)
        else:
            library, report = simulate_round(model, library, devices, stacks, rule, schedule, number)
            rounds.append(report)
        progress("steps and rounds", done + 1, len(planned), f"{what} {number + 1}")
    active = sum(len(stack.places) for stack in stacks)
    return (
        library,
        put_stacks(devices, stacks),
        {"active_clients": active, **summarise_rounds(rounds), **summarise_steps(steps)},
    )


def begin_stacks(model: Model, devices: DeviceState, slice_: TimeSlice, schedule: Schedule) -> Iterator[Stack]:
    """The devices that have train events in the slice, as stacks that have begun it."""
    draws, at = schedule.draws, model.v.device
    start, end = slice_.bounds[-1].part("train")
    active = (events_until(slice_.past, end) > events_until(slice_.past, start)).nonzero()[:, 0]
    size = stack_size(schedule.chunk, model.backbone.items)
    for places in active.split(size) if len(active) else ():  # nobody would still be one stack
        part = to_device(select(devices, places), at)
        state, lesson = begin_slice(model, part, events_of(slice_, places, devices), draws, schedule.slice_index)
        yield Stack(places, to_device(state, devices.device), lesson)


def put_stacks(devices: DeviceState, stacks: Sequence[Stack]) -> DeviceState:
    """All devices, those of the stacks as they are there."""
    if not stacks:
        return devices
    places = torch.cat([stack.places for stack in stacks])
    return put(devices, places, join([stack.state for stack in stacks]))


def step_stacks(
    model: Model, stacks: Sequence[Stack], schedule: Schedule, number: int
) -> tuple[list[Stack], list[StepReport]]:
    """Every stack after one local step, and what the step told."""
    rule, draws, at = decay_rates(model.rule, number), schedule.draws, model.v.device
    key, done, reports = schedule.slice_index * STEPS_PER_SLICE + number, [], []
    for stack in stacks:
        negatives, brief = draw_step_negatives(model, stack.state, stack.lesson, draws, key)
        state, report = client_update(
            model, to_device(stack.state, at), lesson_to(stack.lesson, at), negatives, rule, brief
        )
        done.append(replace(stack, state=to_device(state, stack.state.device)))
        reports.append(report)
    return done, reports


def simulate_round(
    model: Model,
    library: PrototypeLibrary,
    devices: DeviceState,
    stacks: Sequence[Stack],
    rule: RoundRule,
    schedule: Schedule,
    number: int,
) -> tuple[PrototypeLibrary, RoundReport]:
    """One round: every device tosses its coin, those it chose upload, the server aggregates what it accepts."""
    round_ = schedule.first_round + number
    asked = list(ask_devices(devices, stacks, rule, schedule, round_))
    uploads = make_uploads(model, asked, rule, schedule, round_)
    accepted = accept(uploads, rule, round_=round_, version=library.version)
    noise, parting = server_noise(schedule.seed, round_), stream(schedule.seed, "separation", round_)
    library, report = server_aggregate(library, accepted, rule, noise, parting)
    return library, replace(report, clipped=clipped_share(model, asked, rule))


def make_uploads(
    model: Model, asked: Iterable[DeviceState], rule: RoundRule, schedule: Schedule, round_: int
) -> Iterator[Upload]:
    """What the asked devices send, some at a time."""
    for part in asked:
        yield make_upload(model, to_device(part, model.v.device), rule, schedule.draws, round_)


def ask_devices(
    devices: DeviceState, stacks: Sequence[Stack], rule: RoundRule, schedule: Schedule, round_: int
) -> Iterator[DeviceState]:
    """The devices whose coin asks for an upload, some at a time.

    Where the server adds the noise, who has nothing to say stays silent; where devices add it they all send their part.
    """
    coins = toss_coins(schedule.draws, devices.users, round_, schedule.sampling_rate)
    idle = torch.ones_like(coins)
    for stack in stacks:
        places = stack.places.to(coins.device)
        idle[places] = False
        yield chosen_of(stack.state, coins[places], rule)
    for places in idle.nonzero()[:, 0].split(UPLOADS_AT_ONCE):
        yield chosen_of(without_rows(devices, places), coins[places], rule)


def chosen_of(state: DeviceState, coins: Bool[Tensor, " U"], rule: RoundRule) -> DeviceState:
    """Those of the devices that send something."""
    speaks = state.contributes | (rule.form != "points")
    return without_rows(state, (coins & speaks).nonzero()[:, 0])


def clipped_share(model: Model, asked: Iterable[DeviceState], rule: RoundRule) -> float:
    """The share of embeddings longer than the radius: only a simulation can look."""
    lengths = [embed_prompts(model, to_device(part, model.v.device), rule)[:, 0].norm(dim=-1) for part in asked]
    over = torch.cat([torch.zeros(0, device=model.v.device), *lengths]) > rule.upload.clip_radius * (1 + 1e-5)
    return float(over.float().mean()) if len(over) else 0.0


def finish_slice(model: Model, devices: DeviceState, slice_: TimeSlice, head: FittedHead | None = None) -> DeviceState:
    """All devices after the slice's validation events; those that took part remember them."""
    past, at = slice_.past, model.v.device
    everybody, known = torch.arange(len(devices)), devices.memory.counts
    until = torch.where(devices.active.cpu(), events_until(past, slice_.bounds[-1].val_end), known)
    validation = validation_questions(slice_, model.backbone.config.history_length, at)
    events = events_between(past, everybody, known, until)
    return to_device(end_slice(model, to_device(devices, at), validation, events, head), devices.device)


def events_of(slice_: TimeSlice, places: Int[Tensor, " n"], devices: DeviceState) -> NewEvents:
    """What a slice's train part brings to some devices."""
    start, end = slice_.bounds[-1].part("train")
    return new_events(slice_.past, places, devices.memory.counts[places], start, end)


def summarise_steps(steps: Sequence[StepReport]) -> dict[str, int | float]:
    """What the run's log keeps of a slice's last local step; a number that is not finite is left out."""
    if not steps:
        return {}
    loss, moved, zeros = (
        torch.cat([getattr(step, name).float().cpu() for step in steps]) for name in ("loss", "moved", "sparsity")
    )
    told = {"client_loss": float(loss.nanmean()), "stuck_clients": float((1 - moved).sum())}
    told |= {"short_sparsity": float(zeros.mean())}
    return {name: value for name, value in told.items() if math.isfinite(value)}
