"""States to named tensors and back: nothing is lost, nothing is shared, every method's scores stay the same."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from worlds import every_value, learned, questions, random_model

from protofed.backbone.sasrec import SASRec
from protofed.methods.catalogue import METHODS
from protofed.snapshot import Snapshot, restore, take_snapshot

HERE = (__name__,)


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
    trace: tuple[float, ...] = ()
    teacher: SASRec | None = None


def example(n_rows: int = 5, rate: float = 0.1) -> Outer:
    inner = Inner(torch.arange(6, dtype=torch.int64).view(2, 3), 7)
    return Outer(random_model(n_rows), inner, rate, True, {"a": torch.tensor([1.5]), "b": torch.tensor([True, False])})


def test_tensors_have_dotted_names_and_numbers_are_in_the_outline():
    snapshot = take_snapshot(example())
    assert {"state.inner.table", "state.buffers.a", "state.backbone.items"} <= set(snapshot.tensors)
    assert "state.backbone.blocks.0.query.weight" in snapshot.tensors
    kind, name, fields = json.loads(snapshot.outline)
    assert (kind, name) == ("dataclass", f"{__name__}:Outer")
    assert fields["rate"] == ["plain", 0.1]
    assert fields["teacher"] == ["plain", None]


def test_every_value_comes_back_as_it_was():
    state = replace(example(9, rate=1 / 3), frozen=False, trace=(0.1, float("inf")))
    back = restore(take_snapshot(state), trusted=HERE)
    assert torch.equal(back.inner.table, state.inner.table)
    assert back.inner.table.dtype == torch.int64
    assert (back.inner.rounds, back.rate, back.frozen, back.teacher) == (7, 1 / 3, False, None)
    assert back.trace == state.trace
    assert {name: value.tolist() for name, value in back.buffers.items()} == {"a": [1.5], "b": [True, False]}
    weights = back.backbone.state_dict()
    assert weights.keys() == state.backbone.state_dict().keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in state.backbone.state_dict().items())
    assert not back.backbone.training


def test_a_module_keeps_its_numbers_and_which_of_its_weights_learn():
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2, eps=1e-3), nn.Dropout(0.25)).train()
    module[0].bias.requires_grad_(False)
    back = restore(take_snapshot(module))
    assert [type(part) for part in back] == [nn.Linear, nn.LayerNorm, nn.Dropout]
    assert (back[1].eps, back[1].normalized_shape, back[2].p, back.training) == (1e-3, (2,), 0.25, True)
    assert {name: tensor.requires_grad for name, tensor in back.named_parameters()} == {
        "0.weight": True, "0.bias": False, "1.weight": True, "1.bias": True,
    }  # fmt: skip
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(back.eval()(x), module.eval()(x))


def test_a_state_that_holds_the_same_backbone_twice_can_be_saved():
    state = replace(example(), teacher=random_model(5, seed=1))
    state = replace(state, teacher=state.backbone, inner=replace(state.inner, table=state.backbone.items))
    snapshot = take_snapshot(state)
    back = restore(Snapshot(load(save(snapshot.tensors)), snapshot.outline), trusted=HERE)
    assert torch.equal(back.teacher.items, state.backbone.items)
    assert torch.equal(back.inner.table, state.backbone.items)


def test_a_packed_state_does_not_follow_later_changes():
    state = example()
    snapshot = take_snapshot(state)
    before = snapshot.tensors["state.inner.table"].clone()
    state.inner.table.zero_()
    assert torch.equal(snapshot.tensors["state.inner.table"], before)


@pytest.mark.parametrize(
    ("outline", "why"),
    [
        (["dataclass", "os:system", {}], "it holds a os:system, which is no part of protofed"),
        (["dataclass", "protofedx:Model", {}], "it holds a protofedx:Model, which is no part of protofed"),
        (["module", "torch.nn.functional:relu", {}, {}, {}, {}], "it holds a torch.nn.functional:relu, which is no st"),
        (["dataclass", "protofed.files:write_text", {}], "it holds a protofed.files:write_text, which is no state"),
        (["pickle", "x"], "state is of an unknown kind 'pickle'"),
    ],
)
def test_an_outline_makes_nothing_but_states_of_known_packages(outline, why):
    with pytest.raises(ValueError, match=why):
        restore(Snapshot({}, json.dumps(outline)))


def test_a_value_that_cannot_be_kept_is_named():
    with pytest.raises(TypeError, match=r"state\.inner cannot be kept: it is of type set"):
        take_snapshot(replace(example(), inner={1, 2}))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_methods_scores_survive_packing_bit_for_bit(name):
    run = learned(name)
    _, queries = questions()
    back = restore(take_snapshot(run.state))
    assert torch.equal(run.scores(queries, back), run.scores(queries))
    one, other = every_value(back), every_value(run.state)
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
