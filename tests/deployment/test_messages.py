"""Orders and answers as Flower records: what is sent is what arrives, and rubbish never stops a round."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="the extra `federated` is not installed")

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from protofed.client.introductions import ItemUpload
from protofed.client.model import Broadcast
from protofed.client.upload import Upload
from protofed.deployment.flower.records import (
    answer_from_records,
    answer_to_records,
    order_from_records,
    order_to_records,
)
from protofed.deployment.orders import Answer, Cut, Order
from protofed.errors import DataError
from protofed.privacy.upload import RoundRule, UploadRule
from protofed.server.accept import accept, accept_items

CUTS = (Cut(1, 10, 20, 30, 5, 6), Cut(2, 40, 50, 60, 7, 8))


def upload(n: int, dtype: torch.dtype = torch.int8) -> Upload:
    tokens = torch.arange(n) - 2**62
    return Upload(3, 9, tokens, torch.arange(n) % 2 - 1, torch.arange(n * 4, dtype=dtype).reshape(n, 1, 4))


@pytest.mark.parametrize("rows", [None, torch.randn(3, 4)])
def test_an_order_arrives_as_it_was_sent(rows):
    sent = Order("upload", CUTS, Broadcast(9, torch.randn(2, 4)), 3, 7, rows)
    came = order_from_records(order_to_records(sent))
    assert (came.kind, came.cuts, came.round_, came.steps, came.place) == (sent.kind, CUTS, 3, 7, (2, 1, 3))
    assert came.broadcast.version == 9
    assert torch.equal(came.broadcast.v, sent.broadcast.v)
    assert came.rows is None if rows is None else torch.equal(came.rows, rows)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64])
def test_an_answer_arrives_as_it_was_sent(dtype):
    items = ItemUpload(2, torch.tensor([5]), torch.tensor([2]), torch.tensor([1, 3]), torch.randn(2, 17))
    sent = Answer((upload(3, dtype), upload(1, dtype)), items)
    came = answer_from_records(answer_to_records(sent))
    for one, other in zip(came.uploads, sent.uploads, strict=True):
        assert (one.round_, one.version) == (3, 9)
        for name in ("tokens", "block", "codes"):
            assert torch.equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype
    for name in ("tokens", "counts", "items", "values"):
        assert torch.equal(getattr(came.items, name), getattr(items, name))
    assert answer_from_records(answer_to_records(Answer())) == Answer()


def test_orders_ascend_as_a_federation_goes_on():
    v = Broadcast(0, torch.zeros(1, 1))
    order = [
        Order("introduce", CUTS[:1], v),
        Order("upload", CUTS[:1], v, 0),
        Order("upload", CUTS[:1], v, 1),
        Order("finish", CUTS[:1], v),
        Order("introduce", CUTS, v),
        Order("upload", CUTS, v, 2),
    ]
    assert sorted(order, key=lambda each: each.place) == order


VALUES = st.one_of(st.integers(-3, 3), st.floats(), st.text(max_size=3), st.binary(max_size=3))
NAMES = st.sampled_from(("tokens", "block", "codes", "counts", "items", "values", "other"))
SHAPES = st.lists(st.integers(0, 3), max_size=3)
DTYPES = st.sampled_from(("int8", "int64", "float32", "float64", "uint16", "complex64", "bool", "S3"))
ARRAYS = st.builds(lambda shape, dtype: Array(np.zeros(shape, dtype)), SHAPES, DTYPES)
BROKEN = st.builds(lambda data: Array("int8", (1,), "numpy.ndarray", data), st.binary(max_size=12))
GOOD = {"answer": {"stacks": 1}, "about-0": {"round": 3, "version": 9}, "about-items": {"slice": 1}}


@given(
    st.dictionaries(st.sampled_from(("stacks", "round", "version", "slice", "format")), VALUES, max_size=1),
    st.dictionaries(NAMES, ARRAYS | BROKEN),
    st.sampled_from(("upload-0", "items", "both")),
)
def test_whatever_a_host_sends_is_refused_in_one_line_or_by_accept(changes, columns, where):
    whole = answer_to_records(Answer((upload(1),)))
    records = RecordDict({name: ConfigRecord({**values, **changes}) for name, values in GOOD.items()})
    for name in ("upload-0", "items"):
        mine = columns if where in (name, "both") else {}
        records[name] = ArrayRecord({**(whole.array_records["upload-0"] if name == "upload-0" else {}), **mine})
    try:
        answer = answer_from_records(records)
    except DataError:
        return  # any other error would end the round
    accepted = accept(answer.uploads, RoundRule(UploadRule(2, 4), 1.0), round_=3, version=9)
    assert bool(accepted.points.isfinite().all())
    if answer.items is not None:
        accept_items([answer.items], slice_index=1, n_items=5, width=17)
