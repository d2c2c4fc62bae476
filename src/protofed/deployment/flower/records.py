"""Orders and answers as Flower records and back: arrays for what is numbers, a config record for the rest."""

import json
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from protofed.client.introductions import ItemUpload
from protofed.client.model import Broadcast
from protofed.client.upload import Upload
from protofed.deployment.orders import Answer, Cut, Order
from protofed.errors import DataError

FORMAT = "protofed-order-1"


def order_to_records(order: Order) -> RecordDict:
    """The order as records."""
    arrays = {"v": order.broadcast.v, **({} if order.rows is None else {"rows": order.rows})}
    about = ConfigRecord(
        {
            "format": FORMAT,
            "kind": order.kind,
            "version": order.broadcast.version,
            "round": order.round_,
            "steps": order.steps,
            "cuts": json.dumps([asdict(cut) for cut in order.cuts]),
        }
    )
    return RecordDict({"order": about, "arrays": arrays_of(arrays)})


def order_from_records(records: RecordDict) -> Order:
    """The inverse of `order_to_records`."""
    about, arrays = records.config_records["order"], tensors_of(records.array_records["arrays"])
    if about["format"] != FORMAT:
        raise DataError(f"an order should be of format {FORMAT}, found {about['format']!r}; update this host")
    cuts = tuple(Cut(**cut) for cut in json.loads(str(about["cuts"])))
    broadcast = Broadcast(int(about["version"]), arrays["v"])  # type: ignore[arg-type]
    numbers = (int(about["round"]), int(about["steps"]))  # type: ignore[arg-type]
    return Order(about["kind"], cuts, broadcast, *numbers, arrays.get("rows"))  # type: ignore[arg-type]


def answer_to_records(answer: Answer) -> RecordDict:
    """The answer as records: one of arrays for each stack of devices that sends something."""
    records = RecordDict({"answer": ConfigRecord({"format": FORMAT, "stacks": len(answer.uploads)})})
    for number, upload in enumerate(answer.uploads):
        columns = {"tokens": upload.tokens, "block": upload.block, "codes": upload.codes}
        records[f"upload-{number}"] = arrays_of(columns)
        records[f"about-{number}"] = ConfigRecord({"round": upload.round_, "version": upload.version})
    if answer.items is not None:
        said = answer.items
        columns = {"tokens": said.tokens, "counts": said.counts, "items": said.items, "values": said.values}
        records["items"] = arrays_of(columns)
        records["about-items"] = ConfigRecord({"slice": said.slice_index})
    return records


def answer_from_records(records: RecordDict) -> Answer:
    """What a host sent; whatever is wrong with it beyond its form is found where it is accepted."""
    try:
        arrays, configs = records.array_records, records.config_records
        uploads = []
        for number in range(int(configs["answer"]["stacks"])):  # type: ignore[arg-type]
            columns, about = tensors_of(arrays[f"upload-{number}"]), configs[f"about-{number}"]
            whole = (int(about["round"]), int(about["version"]))  # type: ignore[arg-type]
            uploads.append(Upload(*whole, *(columns[name] for name in ("tokens", "block", "codes"))))
        if "items" not in arrays:
            return Answer(tuple(uploads))
        columns = tensors_of(arrays["items"])
        said = (columns[name] for name in ("tokens", "counts", "items", "values"))
        return Answer(tuple(uploads), ItemUpload(int(configs["about-items"]["slice"]), *said))  # type: ignore[arg-type]
    except Exception as problem:  # whatever a dishonest host sends must not stop a round
        raise DataError(f"an answer could not be read: {problem}") from problem


def arrays_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as an array record."""
    return ArrayRecord({name: Array(np.ascontiguousarray(tensor.cpu().numpy())) for name, tensor in tensors.items()})


def tensors_of(record: ArrayRecord) -> dict[str, Tensor]:
    """The tensors of an array record."""
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}
