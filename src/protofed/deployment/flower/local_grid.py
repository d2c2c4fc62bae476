"""A grid in this process: the same ServerApp and ClientApp, without Ray and without sockets.

It sets the identity that Flower gives to a task's process, and message ids, which are private to Flower: one more
reason why flwr is pinned.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from protofed.deployment.flower.server_app import app as server_app

RUN, SERVER_NODE, TASK = 1, 1, 1
FIRST_NODE = 10  # the ids of nodes


class LocalGrid(Grid):
    """Nodes that answer at once, in the order in which they are asked."""

    def __init__(self, app: ClientApp, nodes: Mapping[int, Context]) -> None:
        self.app, self.nodes = app, dict(nodes)
        self.replies: dict[str, Message] = {}
        self.numbers = count(1)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, SERVER_NODE, TASK

    def set_run(self, run: Run) -> None: ...

    @property
    def run(self) -> Run:
        return Run.create_empty(RUN)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """The ids of the messages, which are answered at once."""
        return [self.deliver(numbered(message, next(self.numbers))) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Each reply once."""
        return [self.replies.pop(each) for each in list(message_ids) if each in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def deliver(self, message: Message) -> str:
        """The id of a message once its node has answered it."""
        self.replies[message.metadata.message_id] = self.answer(message)
        return message.metadata.message_id

    def answer(self, message: Message) -> Message:
        """What a node replies; it is handed a copy, as over a wire: Flower's secure protocol changes what it reads."""
        message.content = copy.deepcopy(message.content)
        return self.app(message, self.nodes[message.metadata.dst_node_id])


def numbered(message: Message, number: int) -> Message:
    """The message with an id, which Flower's SuperLink gives and no public function does."""
    message.metadata.__dict__["_message_id"] = str(number)
    return message


def host_contexts(folders: Iterable[Path]) -> dict[int, Context]:
    """A node for each host's folder."""
    named = {FIRST_NODE + number: folder for number, folder in enumerate(folders)}
    return {node: context_of(node, {"host": str(folder)}) for node, folder in named.items()}


def context_of(node: int, node_config: dict[str, Any], run_config: dict[str, Any] | None = None) -> Context:
    """The context that an app is called with."""
    return Context(
        run_id=RUN, node_id=node, node_config=node_config, state=RecordDict(), run_config=dict(run_config or {})
    )


def serve(grid: Grid, run_config: dict[str, Any], app: Callable[[Grid, Context], None] = server_app) -> None:
    """The ServerApp, run to its end over a grid."""
    app(grid, context_of(SERVER_NODE, {}, run_config))
