"""ProtoFed-SP, or what is under ProtoFed's head, with its rounds carried by Flower: here, on Ray, or by processes.

Everything but the slices' rounds is the method's own, so a run with an engine is evaluated like any other.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from protofed.backbone.training import Descend
from protofed.client.state import to_device
from protofed.config import ablations_of
from protofed.data.interactions import InteractionLog
from protofed.deployment.deal import HOSTS, SERVER, collect, deal, host_folders
from protofed.deployment.orders import cuts_of
from protofed.deployment.server import ServerState, read_server, rows_of
from protofed.errors import ConfigError
from protofed.federation.newcomers import with_rows, without_base_row
from protofed.methods.protocol import Diagnostics, Published, World
from protofed.methods.protofed_rules import as_run, round_rule
from protofed.methods.protofed_sp import ProtoFedSP, ProtoFedState, choices_of, costs_of, newest_target_of
from protofed.privacy.ledger import Ledger
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import SliceStream, TimeSlice

Engine = Callable[[Path, int], None]  # brings the federation in a folder to the end of a slice
CARRIED = ("reference", "nothing", "private")  # the modes of protofed-sp and of protofed that hosts can play
WAITING = 600.0  # seconds that a round of processes waits for each of them, where none is meant to die


@dataclass(frozen=True, slots=True)
class Federated:
    """The method on hosts: slices are learned by an engine, and the devices read back from the hosts' stores."""

    inner: ProtoFedSP
    folder: Path
    log: InteractionLog
    hosts: int
    engine: Engine
    seeded: bool = True

    def start(self, world: World) -> ProtoFedState:
        check_federated(world)
        return self.inner.start(world)

    def learn(
        self, world: World, state: ProtoFedState, slice_: TimeSlice, descend: Descend
    ) -> tuple[ProtoFedState, Diagnostics]:
        """The state after a slice; its rounds go on where an earlier call that was stopped left them."""
        if not (self.folder / SERVER).is_dir():
            deal_world(self, world, state)
        self.engine(self.folder, slice_.index)
        server = read_server(self.folder / SERVER)
        made = server.read_state()
        rows, cut = rows_of(server, made, server.cuts[slice_.index - 1]), server.cuts[slice_.index - 1]
        backbone = state.backbone
        if rows is not None:
            backbone = with_rows(world.backbone, without_base_row(world.backbone, cut.train_items), rows)
        users = torch.from_numpy(slice_.user_keys)
        state = replace(
            state,
            backbone=backbone,
            library=made.library,
            devices=to_device(collect(self.folder, users), state.devices.device),
            newcomers=made.newcomers,
            rounds=made.rounds,
            slice_index=slice_.index,
            newest_target=newest_target_of(state, slice_),
        )
        config = as_run(world.config)
        told = {**choices_of(config, state), **costs_of(config, state, made.rule)}
        return state, told

    def score(self, world: World, state: ProtoFedState, queries: Queries) -> Float[Tensor, "B I"]:
        return self.inner.score(world, state, queries)

    def evidence(self, state: ProtoFedState) -> Evidence:
        return self.inner.evidence(state)

    def publish(self, world: World, state: ProtoFedState, n_items: int) -> Published:
        return self.inner.publish(world, state, n_items)

    def choose_under(self, world: World, state: ProtoFedState) -> tuple[ProtoFedState, bool]:
        settings, (state, pay) = world.config.protofed, self.inner.choose_under(world, state)
        if not pay and settings.mode == "private" and "popularity" not in ablations_of(settings):
            raise ConfigError(
                "on this base block prompts are not worth an upload, and hosts are not asked for popularity, which "
                "would have the whole budget; give --share nothing, or --set protofed.ablate=popularity"
            )
        return state, pay

    def releases(self, world: World, state: ProtoFedState, slices_ahead: int = 0) -> Ledger:
        return self.inner.releases(world, state, slices_ahead)


def check_federated(world: World) -> None:
    """Refuse what no host could do: raw counts of everybody's events, and releases that are not made round by round."""
    mode = world.config.protofed.mode
    if mode not in CARRIED:
        raise ConfigError(
            f"a federation runs protofed.mode = reference, nothing or private, got {mode}: the others read raw events "
            "of all users; leave --mode out"
        )
    if world.beside:
        names = ", ".join(one.name for one in world.beside)
        raise ConfigError(
            f"hosts are not asked for {names}, which the rehearsal on the base block wants released; add "
            f"--set protofed.ablate={world.beside[0].name}, or give --share nothing"
        )


def deal_world(method: Federated, world: World, state: ProtoFedState) -> None:
    """The folders of the federation, from the state after the base block; a head is the same on all hosts for ever."""
    head = world.head if world.head and world.head.head.worn else None
    config, log = as_run(world.config), method.log
    rule = round_rule(config, state.library.n_prototypes, state.noise_multiplier, len(state.devices))
    made = ServerState(state.library, state.newcomers, state.newcomer_noise, rule, state.allowed_rounds)
    published = replace(method.inner.publish(world, state, log.n_items), rule=rule, head=head)
    cuts = cuts_of(SliceStream(log, config.stream))
    deal(method.folder, config, log, published, made, cuts, method.hosts, seeded=method.seeded)


def run_locally(folder: Path, index: int) -> None:
    """A slice in this process, over a grid without sockets."""
    from protofed.deployment.flower.client_app import app
    from protofed.deployment.flower.local_grid import LocalGrid, host_contexts, serve

    serve(LocalGrid(app, host_contexts(host_folders(folder))), asked_of(folder, index))


def run_in_simulation(folder: Path, index: int, *, cores: float = 1.0) -> None:
    """A slice in Flower's simulation engine, whose nodes are Ray actors of so many cores each."""
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    from protofed.deployment.flower.client_app import HOSTS as PLACE
    from protofed.deployment.flower.client_app import app as client_app
    from protofed.deployment.flower.local_grid import SERVER_NODE, context_of
    from protofed.deployment.flower.server_app import main

    server_app = ServerApp()
    config = asked_of(folder, index)

    @server_app.main()
    def configured(grid: Any, context: Any) -> None:
        main(grid, context_of(SERVER_NODE, {}, config))

    hosts = str((folder / HOSTS).resolve())
    silent = ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
    environment = {PLACE: hosts, **dict.fromkeys(silent, "0")}
    with in_environment(environment):
        backend = {"client_resources": {"num_cpus": cores, "num_gpus": 0.0}}
        run_simulation(server_app, client_app, len(host_folders(folder)), backend_config=backend)  # type: ignore[arg-type]


def asked_of(folder: Path, index: int) -> dict[str, Any]:
    """What a run of the ServerApp is told."""
    return {"folder": str(folder / SERVER), "slice": index, "nodes": len(host_folders(folder))}


@contextmanager
def in_environment(values: Mapping[str, str]) -> Iterator[None]:
    """The environment with these values until the block ends."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_by_processes(folder: Path, index: int) -> None:
    """A slice by a SuperLink and SuperNodes as processes of this machine, which end with it."""
    from protofed.deployment.flower.processes import cluster, run_slice

    with cluster(folder / "processes", folder) as made:
        run_slice(made, folder, index, timeout=WAITING)


ENGINES: Mapping[str, Engine] = {
    "local": run_locally,
    "simulation": run_in_simulation,
    "deployment": run_by_processes,
}
