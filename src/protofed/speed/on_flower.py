"""The workload in Flower's simulation engine: each client is a node of its own, and two Ray actors play them."""

import os
import time
from functools import cache
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from protofed.speed.alone import update_alone
from protofed.speed.clock import Clock
from protofed.speed.workload import Work, aggregate, first_library, made_up, uploads_of

PLACE = "PROTOFED_SPEED"  # clients, cohort and width, for the actors
CORES = 2
POLL = 0.1

app = ClientApp()


@cache
def world() -> Work:
    """The workload as an actor makes it once."""
    torch.set_num_threads(1)
    clients, cohort, width = map(int, os.environ[PLACE].split())
    return made_up(clients, cohort, width)


def arrays(**tensors: torch.Tensor) -> ArrayRecord:
    """Tensors as a record."""
    return ArrayRecord({name: Array(tensor.numpy()) for name, tensor in tensors.items()})


def tensor_of(records: RecordDict, name: str) -> torch.Tensor:
    """A tensor of a message."""
    return torch.from_numpy(records.array_records["arrays"][name].numpy().copy())


@app.train()
def train(message: Message, context: Context) -> Message:
    """A client's round; its prompt is in the node's state. Which client a node is the first order says."""
    work, v = world(), tensor_of(message.content, "v")
    client = int(message.content.config_records["who"]["client"])  # type: ignore[arg-type]
    known = "arrays" in context.state.array_records
    prompt = tensor_of(context.state, "prompt") if known else work.first_prompts(torch.tensor([client]))[0]
    prompt = update_alone(work, client, prompt, v)
    context.state["arrays"] = arrays(prompt=prompt)
    z, block = uploads_of(work, prompt[None], v)
    return Message(RecordDict({"arrays": arrays(z=z, block=block)}), reply_to=message)


def play(work: Work, clock: Clock) -> None:
    """Rounds of a ServerApp, once all nodes are there."""
    from flwr.simulation import run_simulation

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        nodes, library = nodes_of(grid, work.clients), first_library(work)
        for round_ in clock.rounds():
            asked = work.cohort_of(round_).tolist()
            sent = [order(library.v, client, nodes[client]) for client in asked]
            replies = {each.metadata.src_node_id: each.content for each in grid.send_and_receive(sent)}
            z, block = (torch.cat([tensor_of(replies[nodes[c]], name) for c in asked]) for name in ("z", "block"))
            library = aggregate(work, library, z, block)
            clock.ended = library.v, z

    os.environ[PLACE] = f"{work.clients} {work.cohort} {work.model.backbone.config.width}"
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    backend: dict[str, Any] = {
        "init_args": {"num_cpus": CORES},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server, app, work.clients, backend_config=backend)


def nodes_of(grid: Grid, n: int) -> list[int]:
    """The node of each client: Flower's own numbers are random, and any will do."""
    while len(nodes := sorted(grid.get_node_ids())) < n:
        time.sleep(POLL)
    return nodes


def order(v: torch.Tensor, client: int, node: int) -> Message:
    """What a node is sent."""
    records = RecordDict({"arrays": arrays(v=v), "who": ConfigRecord({"client": client})})
    return Message(records, node, MessageType.TRAIN)
