"""The ServerApp: our own loop over a slice's rounds, on whatever grid Flower hands over.

Every node there is is asked, and waited for as long as the run's config says: a round never hangs on one that is gone.
"""

import time
from collections.abc import Iterable
from pathlib import Path

from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp

from protofed.deployment.flower.records import answer_from_records, order_to_records
from protofed.deployment.orders import Answer, Ask, Heard, Order
from protofed.deployment.server import read_server, serve_slices
from protofed.errors import DataError
from protofed.privacy.upload import RoundRule

TIMEOUT = 600.0  # seconds a round waits for its nodes
PATIENCE = 60.0  # seconds a run waits for its nodes to connect
POLL = 1.0

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """All slices of the folder up to the one asked for."""
    config = context.run_config
    wait_for_nodes(grid, int(config.get("nodes", 1)), float(config.get("patience", PATIENCE)))
    folder, timeout = Path(str(config["folder"])), float(config.get("timeout", TIMEOUT))
    rule = read_server(folder).read_state().rule
    serve_slices(folder, int(config["slice"]), over(grid, timeout, rule))


def over(grid: Grid, timeout: float, rule: RoundRule) -> Ask:
    """Asking every node of a grid; where devices send integers, for their sum alone."""

    def ask(order: Order) -> Heard:
        if order.kind == "upload" and rule.form == "integers":
            from protofed.deployment.flower.secure import ask_masked

            return ask_masked(grid, order, (rule.upload.n_prototypes, rule.upload.width + 1), timeout)
        nodes = sorted(grid.get_node_ids())
        records, group = order_to_records(order), f"{order.cuts[-1].index}-{order.kind}-{order.round_}"
        sent = [Message(records, node, MessageType.TRAIN, group_id=group) for node in nodes]
        return heard(grid.send_and_receive(sent, timeout=timeout), nodes, group)

    return ask


def heard(replies: Iterable[Message], nodes: list[int], group: str) -> Heard:
    """The answers among the replies; a node that failed, sent what cannot be read, or nothing in time is lost.

    What belongs to an older order goes on to be refused where uploads are accepted.
    """
    answers: list[Answer] = []
    came = set()
    for reply in replies:
        if reply.has_error():
            continue
        try:
            answers.append(answer_from_records(reply.content))
        except DataError:
            continue
        if reply.metadata.group_id == group:
            came.add(reply.metadata.src_node_id)
    return Heard(answers, len(nodes), tuple(str(node) for node in nodes if node not in came))


def wait_for_nodes(grid: Grid, n: int, patience: float) -> None:
    """Until so many nodes are there, or no longer than this: whoever comes later is asked from then on."""
    until = time.monotonic() + patience
    while len(list(grid.get_node_ids())) < n and time.monotonic() < until:
        time.sleep(POLL)
