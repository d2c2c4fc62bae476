"""The ClientApp of a host: an order in, the answer of its devices out.

    flower-supernode ... --node-config 'host="/srv/protofed/host"'

In a simulation the hosts' folders are numbered by partition: `protofed.hosts` of the environment names where they are.
"""

import os
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from protofed.deployment.flower import secure
from protofed.deployment.flower.records import answer_to_records, order_from_records
from protofed.deployment.host import obey
from protofed.errors import DataError

HOSTS = "PROTOFED_HOSTS"  # the folder of all hosts' folders, where one machine plays them all

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """The answer of this host's devices."""
    folder = folder_of(context)
    if secure.is_masked(message):
        return secure.answer_masked(message, context, lambda asked: masked_sum(folder, asked))
    answer = obey(folder, order_from_records(message.content))
    if any(upload.codes.dtype == torch.int64 for upload in answer.uploads):
        raise DataError("integers of secure aggregation were asked for without a mask; they stay here")
    return Message(answer_to_records(answer), reply_to=message)


def masked_sum(folder: Path, message: Message) -> Tensor:
    """What the host's devices put into the sum."""
    order = order_from_records(message.content)
    k, width = order.broadcast.v.shape
    return secure.sum_integers(obey(folder, order).uploads, (k, width + 1))


def folder_of(context: Context) -> Path:
    """The folder of the host that this node is."""
    config = context.node_config
    if "host" in config:
        return Path(str(config["host"]))
    return Path(os.environ[HOSTS]) / str(config["partition-id"])
