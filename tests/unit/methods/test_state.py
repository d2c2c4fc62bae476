"""States to named tensors and back: nothing is lost, nothing is shared, every method's scores stay the same."""

from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor
from worlds import learned, questions, random_model

from protofed.backbone.sasrec import SASRec
from protofed.methods.catalogue import METHODS
from protofed.methods.state import pack, unpack


@dataclass(frozen=True)
class Inner:
    table: Tensor
    rounds: int


@dataclass(frozen=True)
class Outer:
    backbone: SASRec
    inner: Inner
    rate: float
    frozen: bool
    buffers: dict[str, Tensor]
    teacher: SASRec | None = None


def example(n_rows: int = 5, rate: float = 0.1) -> Outer:
    inner = Inner(torch.arange(6, dtype=torch.int64).view(2, 3), 7)
    return Outer(random_model(n_rows), inner, rate, True, {"a": torch.tensor([1.5]), "b": torch.tensor([True, False])})


def test_the_names_are_dotted_paths():
    names = set(pack(example()))
    assert {"state.inner.table", "state.inner.rounds", "state.rate", "state.frozen", "state.buffers.a"} <= names
    assert {"state.backbone.items", "state.backbone.has_row", "state.backbone.blocks.0.query.weight"} <= names
    assert not any("teacher" in name for name in names)


def test_every_value_comes_back_as_it_was():
    state = replace(example(9, rate=1 / 3), frozen=False)
    back = unpack(example(5), pack(state))  # the template has fewer rows and other numbers
    assert torch.equal(back.inner.table, state.inner.table)
    assert back.inner.table.dtype == torch.int64
    assert (back.inner.rounds, back.rate, back.frozen, back.teacher) == (7, 1 / 3, False, None)
    assert type(back.frozen) is bool
    assert {name: value.tolist() for name, value in back.buffers.items()} == {"a": [1.5], "b": [True, False]}
    weights = back.backbone.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in state.backbone.state_dict().items())
    assert not back.backbone.training


def test_a_state_that_holds_the_same_backbone_twice_can_be_saved():
    state = replace(example(), teacher=random_model(5, seed=1))
    state = replace(state, teacher=state.backbone, inner=replace(state.inner, table=state.backbone.items))
    back = unpack(state, load(save(pack(state))))
    assert torch.equal(back.teacher.items, state.backbone.items)
    assert torch.equal(back.inner.table, state.backbone.items)


def test_a_packed_state_does_not_follow_later_changes():
    state = example()
    packed = pack(state)
    before = packed["state.inner.table"].clone()
    state.inner.table.zero_()
    assert torch.equal(packed["state.inner.table"], before)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_methods_scores_survive_packing_bit_for_bit(name):
    run = learned(name)
    _, queries = questions()
    back = unpack(run.method.start(run.world), pack(run.state))
    assert torch.equal(run.scores(queries, back), run.scores(queries))
    assert pack(back).keys() == pack(run.state).keys()
