"""The `peft` variant: the same methods with a frozen backbone, one shared prompt and new rows."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from worlds import Learned, every_value, learn_once, questions, tiny_config, tiny_stream, warmed_up

from protofed.backbone import training
from protofed.backbone.small_modules import small_parameters, with_weights
from protofed.backbone.training import PlainDescent
from protofed.cli.run import settle
from protofed.errors import ConfigError
from protofed.methods.baselines.buffer import Capacity
from protofed.methods.baselines.ewc import EWC
from protofed.methods.baselines.experience_replay import ERFreq, ERRandom
from protofed.methods.baselines.finetune_last import FineTuneLast
from protofed.methods.baselines.infer import EventLosses, Infer
from protofed.methods.baselines.lwf import LwF
from protofed.methods.baselines.mas import MAS
from protofed.methods.baselines.reloop import ReLoop
from protofed.methods.baselines.sail_piw import SailPIW
from protofed.methods.baselines.synaptic_intelligence import SynapticIntelligence
from protofed.methods.catalogue import METHODS, configured
from protofed.methods.frozen import rows_for
from protofed.methods.labels import method_label
from protofed.methods.protocol import World

FINE_TUNING = (
    *("finetune-last", "full-retrain", "ewc", "si", "mas", "lwf", "sail-piw"),
    *("er-random", "er-freq", "reloop", "reloop2", "infer"),
)
PROMPT = "prompt.tokens"


@pytest.fixture(autouse=True, scope="module")
def _last_epoch_counts() -> Iterator[None]:
    """Two epochs in a tiny world need not help on its validation part; what they do is looked at all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "best_of", lambda trace: len(trace) - 1)
        yield


@cache
def learned(name: str, variant: str | None = None) -> Learned:
    """Not the shared one of worlds.py, which goes back to its best epoch."""
    return learn_once(name, variant=variant)


@cache
def world(variant: str = "peft") -> World:
    return World(tiny_config(variant=variant), tiny_stream().slice_(0), warmed_up()[0])


@cache
def both_slices(method: Any) -> tuple[Any, Any]:
    one, _ = method.learn(world(), method.start(world()), tiny_stream().slice_(1), PlainDescent())
    return one, method.learn(world(), one, tiny_stream().slice_(2), PlainDescent())[0]


def backbone(state: Any) -> Any:
    return (state.model if hasattr(state, "model") else state).backbone


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[key]) for key, tensor in one.items())


@pytest.mark.parametrize("name", FINE_TUNING)
def test_the_prompt_and_new_rows_move_and_no_other_bit_of_the_backbone(name):
    run = learned(name, variant="peft")
    base, old, now = (m.state_dict() for m in (run.world.backbone, backbone(run.before), backbone(run.state)))
    assert old.keys() == base.keys() | {PROMPT, "prompt.length"}
    assert all(torch.equal(now[key], base[key]) for key in base.keys() - {"items", "has_row", "mean_row"})
    known = base["has_row"]
    assert torch.equal(now["items"][: len(known)][known], base["items"][known])
    first, new = rows_for(run.world, backbone(run.before), tiny_stream().slice_(1))
    assert not torch.equal(now["items"][new], first.items[new])
    assert torch.equal(now["items"][~new], first.items[~new])
    assert not torch.equal(now[PROMPT], old[PROMPT])
    assert torch.equal(now["prompt.length"], old["prompt.length"])


@pytest.mark.parametrize("name", FINE_TUNING)
def test_rows_are_learned_in_the_slice_of_their_item_and_never_again(name):
    run = learned(name, variant="peft")
    later, log = run.method.learn(run.world, run.state, tiny_stream().slice_(2), PlainDescent())
    old, now = backbone(run.state), backbone(later)
    assert torch.equal(now.items[: old.n_rows][old.has_row], old.items[old.has_row])
    weighting = run.method._drawn(run.world).parameters() if name == "sail-piw" else ()
    prompt_and_rows = 2 * 16 + 16 * int((now.has_row.sum() - old.has_row.sum()).item())
    assert log["trainable_parameters"] == prompt_and_rows + sum(parameter.numel() for parameter in weighting)
    assert log["trainable_parameters_per_user"] == 0


@pytest.mark.parametrize(
    "method",
    [
        EWC(strength=0.0, examples=16),
        MAS(strength=0.0, examples=16),
        SynapticIntelligence(strength=0.0),
        LwF(strength=0.0),
        SailPIW(strength=0.0),
        ERRandom(beta=0.0),
        ERFreq(capacity=Capacity(share=0.0)),
        Infer(beta=0.0),
        ReLoop(alpha=0.0),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_strength_of_zero_is_finetune_last_bit_for_bit(method):
    for found, plain in zip(both_slices(method), both_slices(FineTuneLast()), strict=True):
        assert same(every_value(backbone(found)), every_value(plain.backbone))


@pytest.mark.parametrize(
    "method",
    [EWC(strength=1e3, examples=64), MAS(strength=1e3, examples=64), SynapticIntelligence(strength=1e3), LwF()],
    ids=lambda method: type(method).__name__,
)
def test_a_strength_changes_what_is_learned(method):
    assert not torch.equal(
        backbone(both_slices(method)[1]).prompt.tokens, both_slices(FineTuneLast())[1].backbone.prompt.tokens
    )


@pytest.mark.parametrize(
    "method", [EWC(examples=64), MAS(examples=64), SynapticIntelligence()], ids=lambda m: type(m).__name__
)
def test_importances_are_those_of_the_prompt_alone(method):
    state = both_slices(method)[0]
    assert set(state.importance) == set(state.anchor) == {PROMPT}
    assert torch.equal(state.anchor[PROMPT], state.backbone.prompt.tokens)
    assert (state.importance[PROMPT] >= 0).all()
    assert (state.importance[PROMPT] > 0).any()


def test_a_strong_spring_keeps_the_prompt_where_it_was():
    start = FineTuneLast().start(world()).backbone.prompt.tokens
    free, held = (
        both_slices(method)[0].backbone.prompt.tokens for method in (FineTuneLast(), EWC(strength=1e4, examples=64))
    )
    assert (held - start).norm() < 0.5 * (free - start).norm()


def test_si_does_not_repeat_a_warm_up_that_taught_the_prompt_nothing():
    state, method = SynapticIntelligence().start(world()), SynapticIntelligence()
    assert (method._importance_so_far(world(), state)[PROMPT] == 0).all()


def test_influence_is_measured_on_the_prompt():
    weights = EventLosses(FineTuneLast().start(world()).backbone, "softmax").dense_tail()
    assert set(weights) == {PROMPT}


def test_full_retraining_draws_the_prompt_anew_and_forgets_the_one_it_finds():
    run = learned("full-retrain", variant="peft")
    other = replace(run.before, backbone=replace_prompt(run.before.backbone))
    again, _ = run.method.learn(run.world, other, tiny_stream().slice_(1), PlainDescent())
    assert same(every_value(again.backbone), every_value(run.state.backbone))


def replace_prompt(model: Any) -> Any:
    return with_weights(model, {PROMPT: torch.ones_like(model.prompt.tokens)})


def test_a_cold_start_draws_the_prompt_anew_and_keeps_the_backbone():
    one, two = both_slices(FineTuneLast(cold=True))
    assert torch.equal(two.backbone.blocks[0].query.weight, world().backbone.blocks[0].query.weight)
    still = replace(world(), config=tiny_config(variant="peft", training__slice_epochs=0))
    fresh, _ = FineTuneLast(cold=True).learn(still, one, tiny_stream().slice_(2), PlainDescent())
    assert not torch.equal(fresh.backbone.prompt.tokens, one.backbone.prompt.tokens)


def test_prompt_tuning_is_finetune_last_in_the_peft_variant():
    _, queries = questions()
    tuned, plain = learned("prompt-tuning"), learned("finetune-last", variant="peft")
    assert same(every_value(tuned.state), every_value(plain.state))
    assert torch.equal(tuned.scores(queries), plain.scores(queries))
    assert METHODS["prompt-tuning"].method == FineTuneLast()


def test_the_standard_variant_attaches_nothing():
    assert not small_parameters(FineTuneLast().start(world("standard")).backbone)
    assert FineTuneLast().start(world("standard")).backbone is world("standard").backbone


@pytest.mark.parametrize(
    ("method", "variant", "has"),
    [("popularity", "peft", "standard"), ("recicl", "peft", "standard"), ("dual-lora", "standard", "peft")],
)
def test_a_variant_that_a_method_lacks_is_one_line_that_names_those_it_has(method, variant, has):
    with pytest.raises(ConfigError, match=f"^{method} has no variant '{variant}'; it has {has}$"):
        settle({"method": method, "variant": variant})


@pytest.mark.parametrize("name", METHODS)
def test_every_method_brings_along_a_variant_that_it_has(name):
    config = settle({"method": name})
    assert config.variant == METHODS[name].variants[0]
    assert configured(config) == METHODS[name].method
    for variant in METHODS[name].variants:
        assert settle({"method": name, "variant": variant}).variant == variant


def test_tables_name_the_variant():
    assert method_label("ewc", "reference", "") == "ewc"
    assert method_label("ewc", "reference", "", variant="peft") == "ewc (peft)"
    assert method_label("ewc", "reference", "", variant="peft", private=True) == "ewc (peft, private)"
    assert method_label("protofed-sp", "nodp", "", variant="standard") == "protofed-sp (nodp)"
    assert method_label("frozen", "", "", head=True, content="text,place") == "frozen (content: text, place, head)"
    assert method_label("protofed", "nothing", "", head=True) == "protofed (share nothing)"  # brings its head
    assert method_label("protofed", "private", "", head=False) == "protofed (share private, no head)"
