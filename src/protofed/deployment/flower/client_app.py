"""The ClientApp of a host: an order in, the answer of its devices out.

    flower-supernode ... --node-config 'host="/srv/protofed/host"'

In a simulation the hosts' folders are numbered by partition: `protofed.hosts` of the environment names where they are.
"""

import os
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from protofed.deployment.flower.records import answer_to_records, order_from_records
from protofed.deployment.host import obey

HOSTS = "PROTOFED_HOSTS"  # the folder of all hosts' folders, where one machine plays them all

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """The answer of this host's devices."""
    answer = obey(folder_of(context), order_from_records(message.content))
    return Message(answer_to_records(answer), reply_to=message)


def folder_of(context: Context) -> Path:
    """The folder of the host that this node is."""
    config = context.node_config
    if "host" in config:
        return Path(str(config["host"]))
    return Path(os.environ[HOSTS]) / str(config["partition-id"])
