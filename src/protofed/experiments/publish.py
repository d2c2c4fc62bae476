"""From a finished run to a model that needs no log: devices that remember their whole history, items, a model card."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from protofed.client.memory import Memory, events_between, events_until, offsets_of
from protofed.client.model import VARIANTS, LocalRule, Model
from protofed.client.state import DeviceState, choose_variants, new_devices, remember, resize
from protofed.config import RunConfig
from protofed.data.interactions import InteractionLog
from protofed.experiments.folder import RunFolder
from protofed.experiments.summary import summarise_run
from protofed.features.columns import aligned
from protofed.federation.preparation import nobody_yet
from protofed.files import write_text
from protofed.inference.folder import CARD, save_parts
from protofed.inference.recommender import BARE, NOBODY, Bystanders, Catalogue, Recommender
from protofed.methods.catalogue import only_noised, shares_nothing
from protofed.methods.frozen import BackboneState
from protofed.methods.headed import Headed
from protofed.methods.protocol import Method, Published, Recommending, World
from protofed.privacy.promise import promise_lines, promised
from protofed.seeds import user_keys
from protofed.slices.stream import SliceStream

CARD_TEXT = """\
# {title}

A model made by ProtoFed. To use it:

```python
import protofed

model = protofed.load("THIS FOLDER")
model.device("USER").recommend(n=10)
```

## What leaves a device
{promise}

devices.safetensors holds the simulated devices of this run: histories, prompts, own rows. It is for
experiments; `protofed.save(model, path, devices=False)` writes a folder without anything of a user.

## Data
{events}
The backbone learned the first {share} of the events, then was frozen;
{n_slices} slices followed.

## Accuracy
Mean over slices, each tested on events after it was learned; `sampled`: one positive among 99 negatives,
`full`: among all items. A model is tested before it has seen the slice's last tenth.

| candidates | events | NDCG@10 | HR@10 | queries |
|---|---|---|---|---|
{rows}

## Limits
- Items that first appear after the last event are unknown to this model: train again to add them.
- Events of the base block, the first {share}, were collected centrally; no ε covers them.
- It was tested on this log alone; what it is worth elsewhere was not measured.
- The tests are of the past: what people would have done with other items in view is not in a log.

## Settings
{settings}; all of them in config.toml.
"""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a model is given beside the log it learned from: the log with every user, and descriptions of items."""

    everyone: InteractionLog | None = None
    items: pa.Table | None = None


def publish(
    folder: RunFolder, method: Method[Any], world: World, state: Any, data: SliceStream, around: Surroundings
) -> None:
    """The run's folder made a model: every device remembers its user's events up to the end of the log.

    Nothing is written where no device could answer as the benchmark ranked.
    """
    log = data.log
    made = published(method, world, state, log.n_items)
    if made is None:
        return
    recommender = Recommender(
        name=log.name,
        model=made.model,
        rule=made.rule,
        head=made.head,
        next_round=made.next_round,
        next_slice=data.n_slices + 1,
        catalogue=Catalogue(aligned(around.items, log.item_ids)),
        devices=catch_up(made.model, made.devices, data),
        bystanders=NOBODY if around.everyone is None else left_out(log, around.everyone),
    )
    save_parts(recommender, folder.path)


def published(method: Method[Any], world: World, state: Any, n_items: int) -> Published | None:
    """What devices hold after the newest slice: the method says, or a backbone alone; None for all other methods.

    Switches that rank by counts of the whole log, or by a formula beside the method, are on no device.
    """
    scoring = world.config.scoring
    if scoring.popularity_prior or scoring.personal_memory:
        return None
    if isinstance(method, Headed):
        made = published(method.inner, method.inside(world, state), state.inner, n_items)
        head, rule = (
            state.fitted if state.fitted.head.worn else None,
            None if state.uploads_out or not made else made.rule,
        )
        return made and replace(made, head=head, rule=rule)
    if isinstance(method, Recommending):
        made = method.publish(world, state, n_items)
        return replace(made, rule=None) if shares_nothing(world.config) else made
    if not isinstance(state, BackboneState):
        return None
    bare = LocalRule(use_rows=False, steps=0, allowed=tuple(variant == BARE for variant in VARIANTS))
    model = nobody_yet(world.config, state.backbone, bare, n_items)
    (_, prompt_length, d), d_z = model.prompts.shape, model.v.shape[1]
    nobody = new_devices(torch.zeros(0, dtype=torch.int64), prompt_length, d, d_z, device=model.v.device)
    return Published(replace(model, rule=bare), nobody, None, 0)


def catch_up(model: Model, devices: DeviceState, data: SliceStream) -> DeviceState:
    """A device for every user of the log, with all the user's events in its memory; nothing is learned from them."""
    keys = torch.from_numpy(user_keys(data.log.user_ids.to_pylist()))
    devices = first_choices(model, resize(devices, keys))
    everybody, known = torch.arange(len(devices)), devices.memory.counts
    return remember(devices, events_between(data.past, everybody, known, events_until(data.past, len(data.log))))


def first_choices(model: Model, devices: DeviceState) -> DeviceState:
    """The devices, those that have met nothing using what the base users' verdict advises."""
    use_prompt, use_rows = choose_variants(torch.zeros_like(devices.losses), model.prior, model.rule.allowed)
    return replace(
        devices,
        use_prompt=torch.where(devices.met, devices.use_prompt, use_prompt),
        use_rows=torch.where(devices.met, devices.use_rows, use_rows),
    )


def left_out(log: InteractionLog, everyone: InteractionLog) -> Bystanders:
    """The users that training left out, with what they did among the model's items, if anything."""
    items = pc.index_in(everyone.item_ids, value_set=log.item_ids.cast(everyone.item_ids.type))
    items = pc.fill_null(items, -1).to_numpy()[everyone.items.numpy()]
    stranger = pc.invert(pc.is_in(everyone.user_ids, value_set=log.user_ids.cast(everyone.user_ids.type)))
    users = np.flatnonzero(stranger.to_numpy(zero_copy_only=False))
    keep = np.isin(everyone.users.numpy(), users) & (items >= 0)
    whose = np.searchsorted(users, everyone.users.numpy()[keep])
    order = np.argsort(whose, kind="stable")  # the log is in time order: so is every user's part of it
    events = Memory(
        offsets_of(torch.from_numpy(np.bincount(whose, minlength=len(users)))),
        torch.from_numpy(items[keep][order].astype(np.int64)),
        torch.from_numpy(everyone.times.numpy()[keep][order].astype(np.int64)),
    )
    keys = torch.from_numpy(user_keys(everyone.user_ids.take(pa.array(users)).to_pylist()))
    return Bystanders(keys, events)


def write_card(folder: RunFolder, config: RunConfig, data: SliceStream, around: Surroundings) -> None:
    """README.md of a model: what it is, what leaves a device, what it was trained on, how good it is, its limits."""
    log, share = data.log, f"{100 * config.stream.base_fraction:g} %"
    said = promised(folder.path / "ledger.json", config.privacy.delta, nothing=only_noised(config))
    rest = 0 if around.everyone is None else around.everyone.n_users - log.n_users
    few = f"{rest:,} more users have too few events to learn from; their devices start from their history."
    rows = [
        f"| {row['candidates']} | {row['subset']} | {row['ndcg@10']:.4f} | {row['hr@10']:.4f} | {row['queries']:,} |"
        for row in summarise_run(folder)["headline"]
    ]
    events = f"{len(log):,} events of {log.n_users:,} users with {log.n_items:,} items"
    text = CARD_TEXT.format(
        title=f"{config.method} on {log.name}",
        promise="\n".join(promise_lines(said)),
        events="\n".join([f"{events}, {day(log, 0)} to {day(log, -1)}.", *([few] if rest else [])]),
        share=share,
        n_slices=data.n_slices,
        rows="\n".join(rows),
        settings=f"Preset {config.preset}, d = {config.backbone.width}, seed {config.seed}",
    )
    write_text(folder.path / CARD, text)


def day(log: InteractionLog, place: int) -> str:
    """The date of an event of the log, UTC."""
    return str(np.datetime64(int(log.times[place]), "s").astype("datetime64[D]"))
