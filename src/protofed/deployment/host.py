"""A host of many users' devices: brings them as far as an order asks, and says what they send.

It decides nothing about learning or privacy: coins, steps and uploads are those of the simulator's devices.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from protofed.backbone.sasrec import SASRec
from protofed.client.model import Model, receive
from protofed.client.state import DeviceState, resize
from protofed.client.upload import Upload
from protofed.config import RunConfig, from_toml
from protofed.deployment.events import Events, own_events, slice_of
from protofed.deployment.orders import Answer, Cut, Order
from protofed.deployment.store import Kept, opened, secret_of
from protofed.errors import RunFolderError
from protofed.federation.newcomers import introduce, with_rows, without_base_row
from protofed.federation.simulator import (
    Schedule,
    Stack,
    ask_devices,
    begin_stacks,
    finish_slice,
    make_uploads,
    put_stacks,
    step_stacks,
)
from protofed.inference.folder import load
from protofed.inference.head import FittedHead
from protofed.methods.protofed_rules import as_run, local_rule
from protofed.privacy.draws import SeededDraws, SystemDraws
from protofed.privacy.upload import RoundRule
from protofed.slices.stream import TimeSlice

EVENTS, STORE, SEEDED = "events.parquet", "devices.sqlite", "seeded"
BEFORE = (0, 0, 0)  # the place of who has obeyed nothing yet


@dataclass(frozen=True, slots=True)
class Host:
    """What a host was given: the model after the base block, the public rules, and its own users' events."""

    model: Model
    head: FittedHead | None
    rule: RoundRule
    config: RunConfig
    events: Events
    seeded: bool  # draws of the seed, for simulation; else of the operating system


@dataclass(frozen=True, slots=True)
class Devices:
    """The host's devices: all as they began the slice, the learning ones as stacks, and how far they are."""

    state: DeviceState
    stacks: tuple[Stack, ...]
    index: int  # of the slice under way, or of the last one
    steps: int  # taken in it
    finished: bool
    place: tuple[int, int, int] = BEFORE  # of the newest order that was obeyed
    round_: int = -1  # the newest that was answered


def read_host(folder: Path) -> tuple[Host, DeviceState]:
    """What is in a host's folder (see `protofed.deployment.deal`), and its users' devices after the base block."""
    given = load(folder)
    config, table = from_toml(given.settings), read_events(folder / EVENTS)
    events = own_events(given.name, table, given.catalogue.table["item"].combine_chunks())
    assert given.rule is not None
    return Host(given.model, given.head, given.rule, config, events, (folder / SEEDED).is_file()), given.devices


def read_events(file: Path) -> pa.Table:
    """The events of a host's users."""
    try:
        return pq.read_table(file)
    except (pa.ArrowException, OSError) as problem:
        said = str(problem).splitlines()[0]
        raise RunFolderError(f"{file} cannot be read ({said}); copy it from where the federation began") from problem


def obey(folder: Path, order: Order) -> Answer:
    """The answer of the host in a folder; its devices are kept with it, so that a second copy changes nothing."""
    host, first = read_host(folder)
    with opened(folder / STORE) as kept:
        return answer(host, first, kept, order)


def answer(host: Host, first: DeviceState, kept: Kept, order: Order) -> Answer:
    """What the devices send; the same again for the same order, nothing for one that is older than the newest."""
    draws = SeededDraws(host.config.seed) if host.seeded else SystemDraws(secret_of(kept))
    schedule = schedule_of(host.config, draws)
    if order.kind == "introduce":
        return Answer(items=introduce(host.model.backbone, sliced(host, order.cuts[-1]), draws))
    devices = kept.get("devices") or Devices(first, (), 0, 0, True)
    if order.place <= devices.place:
        again = order.place == devices.place and order.kind == "upload"
        return Answer(kept.get("uploads")) if again else Answer()
    devices = bring_to(host, devices, order, schedule)
    uploads: tuple[Upload, ...] = ()
    if order.kind == "upload" and devices.round_ < order.round_ < planned_rounds(host.config):
        devices = replace(devices, round_=order.round_)
        model = model_for(host, order, order.cuts[-1])
        cut = replace(schedule, slice_index=order.cuts[-1].index)
        asked = ask_devices(devices.state, devices.stacks, host.rule, cut, order.round_)
        uploads = tuple(up for up in make_uploads(model, asked, host.rule, cut, order.round_) if len(up))
    kept.put("devices", replace(devices, place=order.place))
    kept.put("uploads", uploads)
    return Answer(uploads)


def planned_rounds(config: RunConfig) -> int:
    """How many rounds ε was computed for at most; no device answers more, whatever it is asked."""
    return config.stream.n_slices * config.privacy.rounds_per_slice


def bring_to(host: Host, devices: Devices, order: Order, schedule: Schedule) -> Devices:
    """The devices as far as the order asks; slices that they missed are made good with what is sent now."""
    newest = order.cuts[-1].index
    for cut in order.cuts:
        if cut.index < devices.index or (cut.index == devices.index and devices.finished):
            continue
        model, own = model_for(host, order, cut), replace(schedule, slice_index=cut.index)
        slice_ = sliced(host, cut)
        if cut.index > devices.index:
            state = resize(devices.state, torch.from_numpy(slice_.user_keys))
            stacks = tuple(begin_stacks(model, state, slice_, own))
            devices = Devices(state, stacks, cut.index, 0, False, devices.place, devices.round_)
        ends = cut.index < newest or order.kind == "finish"
        devices = stepped(model, devices, own, own.steps if ends else order.steps)
        devices = finished(model, devices, slice_, host.head) if ends else devices
    return devices


def stepped(model: Model, devices: Devices, schedule: Schedule, steps: int) -> Devices:
    """The devices after so many local steps of the slice in all."""
    stacks = list(devices.stacks)
    for number in range(devices.steps, steps):
        stacks, _ = step_stacks(model, stacks, schedule, number)
    return replace(devices, stacks=tuple(stacks), steps=max(steps, devices.steps))


def finished(model: Model, devices: Devices, slice_: TimeSlice, head: FittedHead | None) -> Devices:
    """The devices after the slice."""
    state = finish_slice(model, put_stacks(devices.state, devices.stacks), slice_, head)
    return replace(devices, state=state, stacks=(), finished=True)


def model_for(host: Host, order: Order, cut: Cut) -> Model:
    """What the devices hold alike in a slice: with its catalogue, the newest prototypes and rows of new items."""
    model = replace(receive(host.model, order.broadcast), n_items=cut.train_items)
    if order.rows is None:
        return model
    return replace(model, backbone=backbone_with(host.model, order.rows, order.cuts[-1]), first_rows=model.backbone)


def backbone_with(model: Model, rows: Tensor, cut: Cut) -> SASRec:
    """The backbone with the rows that were sent for all items of the catalogue that it was not taught."""
    return with_rows(model.backbone, without_base_row(model.backbone, cut.train_items), rows)


def sliced(host: Host, cut: Cut) -> TimeSlice:
    """The host's part of a slice."""
    stream = host.config.stream
    return slice_of(host.events, cut, stream.n_negatives, row_order=stream.row_order_history)


def schedule_of(config: RunConfig, draws: SeededDraws | SystemDraws) -> Schedule:
    """How devices learn in a slice; the slice's number and the round's are the order's."""
    settings = config.protofed
    steps = local_rule(as_run(config)).steps
    return Schedule(0, steps, 0, 0, config.privacy.sampling_rate, settings.chunk, config.seed, own_draws=draws)
