"""A trained base block dealt out to a server and hosts, as folders; and the devices of hosts on one machine back."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from protofed.client.state import DeviceState, new_devices, put, select
from protofed.config import RunConfig, to_toml
from protofed.data.interactions import InteractionLog
from protofed.deployment.events import events_of_users
from protofed.deployment.host import EVENTS, SEEDED, STORE, Devices
from protofed.deployment.orders import Cut
from protofed.deployment.server import ServerState, write_server
from protofed.deployment.store import opened
from protofed.features.columns import aligned
from protofed.federation.simulator import put_stacks
from protofed.files import write_text, written_atomically
from protofed.inference.folder import load, save
from protofed.inference.recommender import Catalogue, Recommender
from protofed.methods.protocol import Published
from protofed.seeds import user_keys

SERVER, HOSTS = "server", "hosts"
CARD = "A folder of a federation: see docs/how_to/federate.md.\n"


def deal(
    folder: Path,
    config: RunConfig,
    log: InteractionLog,
    made: Published,
    state: ServerState,
    cuts: Sequence[Cut],
    n_hosts: int,
    *,
    seeded: bool,
) -> None:
    """The folders of a federation: server/ without any user, hosts/0, hosts/1, ... with the users whose key says so."""
    whole = Recommender(
        name=log.name,
        model=made.model,
        rule=made.rule,
        next_round=made.next_round,
        next_slice=1,
        catalogue=Catalogue(aligned(None, log.item_ids)),
        devices=made.devices,
        trust=config.privacy.trust,
        settings=to_toml(config),
        card=CARD,
        head=made.head,
    )
    keys = user_keys(log.user_ids.to_pylist())
    for number in range(n_hosts):
        here = folder / HOSTS / str(number)
        mine = keys % n_hosts == number
        own = torch.from_numpy(np.flatnonzero(mine[: len(made.devices)]))
        save(replace(whole, devices=select(made.devices, own)), here)
        with written_atomically(here / EVENTS) as unfinished:
            pq.write_table(events_of_users(log, mine), unfinished)
        if seeded:
            write_text(here / SEEDED, "coins and noise of this host can be repeated: for simulation\n")
    save(whole, folder / SERVER, devices=False)
    write_server(folder / SERVER, state, tuple(cuts), seeded=seeded)


def host_folders(folder: Path) -> list[Path]:
    """The hosts' folders in their order."""
    return sorted((folder / HOSTS).iterdir(), key=lambda path: int(path.name))


def collect(folder: Path, users: torch.Tensor) -> DeviceState:
    """The devices of all hosts, in the order of these keys: only where one machine plays them all."""
    state: DeviceState | None = None
    for here in host_folders(folder):
        part = devices_of(here)
        if state is None:
            (_, length, d), d_z = part.prompts.long.shape, part.drift.mean.shape[1]
            state = new_devices(users, length, d, d_z)
        if len(part):
            state = put(state, torch.isin(users, part.users).nonzero()[:, 0], part)
    assert state is not None
    return state


def devices_of(here: Path) -> DeviceState:
    """A host's devices as they are now."""
    with opened(here / STORE) as kept:
        devices = kept.get("devices")
    if devices is None:
        return load(here).devices
    assert isinstance(devices, Devices)
    return put_stacks(devices.state, devices.stacks)
