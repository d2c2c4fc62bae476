"""Prefixes, adapters and LoRA in a frozen backbone: what is learned, what is kept, how it is merged or chosen."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Generator
from worlds import Learned, learn_once, questions, random_model, tiny_config, tiny_stream, warmed_up

from protofed.backbone import training
from protofed.backbone.losses import LOSSES, draw_negatives
from protofed.backbone.small_modules import LoRALinear, small_parameters, small_weights, with_lora, with_weights
from protofed.backbone.training import PlainDescent
from protofed.backbone.validation import validation_ndcg
from protofed.errors import ConfigError
from protofed.methods.baselines.adapters import AdapterCL, Adapters, lowest, own_last_items, set_at
from protofed.methods.baselines.dual_lora import EVEN, WEIGHTS, DualLoRA, add_updates, average_factors
from protofed.methods.baselines.prefix_tuning import PrefixTuning
from protofed.methods.frozen import rows_for
from protofed.methods.protocol import World
from protofed.seeds import stream
from protofed.slices.histories import BOS, PAD
from protofed.slices.windows import NO_TARGET
from protofed.snapshot import restore, take_snapshot

METHODS = ["prompt-tuning", "prefix-tuning", "adapters", "adapter-cl", "dual-lora"]
HISTORIES = torch.tensor([[PAD, PAD, BOS, 3, 1, 4], [1, 5, 2, 6, 5, 3], [PAD, PAD, PAD, PAD, PAD, BOS]])


@pytest.fixture(autouse=True, scope="module")
def _last_epoch_counts() -> Iterator[None]:
    """Two epochs in a tiny world need not help on its validation part; what they do is looked at all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "best_of", lambda trace: len(trace) - 1)
        yield


@cache
def learned(name: str) -> Learned:
    """Not the shared one of worlds.py, which goes back to its best epoch."""
    return learn_once(name)


@cache
def world() -> World:
    return World(tiny_config(variant="peft"), tiny_stream().slice_(0), warmed_up()[0])


@cache
def after_slice_1(method: Any) -> tuple[Any, Any]:
    return method.learn(world(), method.start(world()), tiny_stream().slice_(1), PlainDescent())


@pytest.mark.parametrize("name", METHODS)
def test_no_weight_of_the_backbone_and_no_old_row_moves_and_the_modules_and_new_rows_do(name):
    run = learned(name)
    base, old, now = (model.state_dict() for model in (run.world.backbone, run.before.backbone, run.state.backbone))
    n_old = len(base["items"])
    assert all(torch.equal(now[key], base[key]) for key in base.keys() - {"items", "has_row", "mean_row"})
    assert torch.equal(now["items"][:n_old][base["has_row"]], base["items"][base["has_row"]])
    started, new = first_rows(run)
    assert new.any()
    assert not torch.equal(now["items"][new], started.items[new])
    assert all(not torch.equal(now[key], old[key]) for key in small_parameters(run.before.backbone))
    if name == "dual-lora":
        assert all((tensor != 0).any() for tensor in run.state.short.values())


def first_rows(run: Any) -> Any:
    return rows_for(run.world, run.before.backbone, tiny_stream().slice_(1))


@pytest.mark.parametrize("name", METHODS)
def test_the_log_counts_what_trains_and_shows_that_it_moved(name):
    run = learned(name)
    _, log = run.method.learn(run.world, run.before, tiny_stream().slice_(1), PlainDescent())
    _, new = first_rows(run)
    modules = sum(p.numel() for p in small_parameters(run.before.backbone).values())
    assert log["trainable_parameters"] == modules * (2 if name == "dual-lora" else 1) + int(new.sum()) * 16
    assert log["trainable_parameters_per_user"] == 0
    changes = {"prompt-tuning": (), "dual-lora": ("short_change", "long_change")}.get(name, ("module_change",))
    assert all(log[change] > 0 for change in changes)


def test_a_learned_prefix_has_no_network_left_and_goes_on_from_where_it_was():
    state, log = after_slice_1(PrefixTuning())
    assert set(small_parameters(state.backbone)) == {"prefix.pairs"}
    layers, length, d, inner = 1, 8, 16, 64
    assert state.backbone.prefix.pairs.shape == (layers, 2, length, d)
    assert log["network_parameters"] == length * d + d * inner + inner + inner * 2 * layers * d + 2 * layers * d
    frozen = replace(world(), config=tiny_config(variant="peft", training__slice_epochs=0))
    again, _ = PrefixTuning().learn(frozen, state, tiny_stream().slice_(2), PlainDescent())
    assert torch.equal(again.backbone.prefix.pairs, state.backbone.prefix.pairs)


def test_adapters_as_they_start_score_like_the_backbone():
    _, queries = questions()
    plain = world().backbone.scores(world().backbone.last_hidden(queries.tokens), queries.n_items)
    for method in (Adapters(), AdapterCL(), DualLoRA(), DualLoRA(merge="ensemble"), DualLoRA(merge="factor")):
        assert torch.allclose(method.score(world(), method.start(world()), queries), plain, atol=1e-6)


def test_the_last_items_of_a_history_are_asked_from_the_token_before_each():
    asked = own_last_items(HISTORIES, 4)
    assert asked.targets.tolist() == [[NO_TARGET, 3, 1, 4], [2, 6, 5, 3], [NO_TARGET] * 4]
    assert asked.sources.tolist() == [[1, 2, 3, 4]] * 3
    assert own_last_items(HISTORIES[:, -1:], 4).targets.shape == (3, 0)
    assert own_last_items(HISTORIES[:, -3:], 4).targets.tolist() == [[1, 4], [5, 3], [NO_TARGET, NO_TARGET]]


def test_the_lowest_loss_wins_and_of_equal_ones_the_newest():
    losses = torch.tensor([[1.0, 2.0, 0.0, 5.0], [2.0, 1.0, 0.0, 4.0], [3.0, 3.0, 0.0, 4.0]])
    assert lowest(losses).tolist() == [0, 1, 2, 2]


def test_adapter_cl_keeps_one_set_per_slice_and_old_ones_stay_as_they_were():
    method, (one, log) = AdapterCL(), after_slice_1(AdapterCL())
    two, _ = method.learn(world(), one, tiny_stream().slice_(2), PlainDescent())
    assert log["adapter_sets"] == 2
    for name, tensor in two.sets.items():
        assert tensor.shape[0] == 3
        assert torch.equal(tensor[:2], one.sets[name])
        assert torch.equal(tensor[2], small_parameters(two.backbone)[name])
    assert any(not torch.equal(tensor[1], tensor[2]) for tensor in two.sets.values())
    shared = Adapters().learn(world(), after_slice_1(Adapters())[0], tiny_stream().slice_(2), PlainDescent())[0]
    assert all(torch.equal(w, small_weights(two.backbone)[name]) for name, w in small_weights(shared.backbone).items())


def test_adapter_cl_reads_each_query_with_the_set_that_predicts_its_own_history_best():
    method, (state, _) = AdapterCL(), after_slice_1(AdapterCL())
    _, queries = questions()
    config = world().config.training
    drawn = draw_negatives(1, config.negatives, state.backbone.n_rows, stream(0, "adapter-cl"))[0]
    copies = [with_weights(state.backbone, set_at(state.sets, place)) for place in range(2)]
    chosen, scores = method.chosen(world(), state, queries.tokens), method.score(world(), state, queries)
    assert 0 < int(chosen.sum()) < len(chosen)  # both are used
    for row in range(0, len(queries), 7):
        tokens, losses = queries.tokens[row], []
        for model in copies:
            hidden, total = model.hidden(tokens[None])[0], 0.0
            for place in range(len(tokens) - 5, len(tokens)):
                if tokens[place] >= 0:
                    against = model.embed(drawn) @ hidden[place - 1]
                    against = against.masked_fill(drawn == tokens[place], -torch.inf)
                    positive = model.embed(tokens[place]) @ hidden[place - 1]
                    total += float(LOSSES[config.loss](positive[None, None], against[None, None]))
            losses.append(total)
        best = 0 if losses[0] < losses[1] - 1e-5 else 1
        if abs(losses[0] - losses[1]) > 1e-5:
            assert int(chosen[row]) == best
        expected = copies[int(chosen[row])].last_hidden(tokens[None])
        assert torch.allclose(scores[row], state.backbone.scores(expected, queries.n_items)[0], atol=1e-4)


def test_the_choice_of_adapters_does_not_look_at_the_querys_slice():
    method, (state, _) = AdapterCL(), after_slice_1(AdapterCL())
    _, queries = questions()
    elsewhere = replace(queries, slice_index=queries.slice_index + 1)
    assert torch.equal(method.score(world(), state, elsewhere), method.score(world(), state, queries))


def test_a_growing_number_of_sets_survives_packing():
    method, (one, _) = AdapterCL(), after_slice_1(AdapterCL())
    two, _ = method.learn(world(), one, tiny_stream().slice_(2), PlainDescent())
    _, queries = questions(2)
    back = restore(take_snapshot(two))
    assert torch.equal(method.score(world(), back, queries), method.score(world(), two, queries))


def two_loras() -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = with_lora(random_model(9), 2, 4.0, Generator().manual_seed(0))
    drawn = Generator().manual_seed(1)
    long, short = (
        {name: torch.randn(p.shape, generator=drawn) for name, p in small_parameters(model).items()} for _ in range(2)
    )
    return with_weights(model, long), long, short


def with_updates(model: Any, updates: dict[str, torch.Tensor]) -> Any:
    """A plain backbone whose query and value maps have these updates added, scaled once."""
    plain = random_model(9).requires_grad_(False)
    for place, block in enumerate(plain.blocks):
        for name in ("query", "value"):
            getattr(block, name).weight.add_(2.0 * updates[f"blocks.{place}.{name}"])
    return plain


def updates_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.removesuffix(".lora_up"): up @ weights[name.replace("lora_up", "lora_down")]
        for name, up in weights.items()
        if name.endswith("lora_up")
    }


@pytest.mark.parametrize("merge", ["delta", "factor", "ensemble"])
def test_loras_are_merged_as_plain_matrices_say(merge):
    model, long, short = two_loras()
    w = 0.3
    found = DualLoRA(merge=merge).last_hidden(model, short, w, HISTORIES)
    if merge == "ensemble":
        parts = [with_updates(model, updates_of(part)).last_hidden(HISTORIES) for part in (long, short)]
        expected = w * parts[0] + (1 - w) * parts[1]
    elif merge == "delta":
        both = {name: w * u + (1 - w) * updates_of(short)[name] for name, u in updates_of(long).items()}
        expected = with_updates(model, both).last_hidden(HISTORIES)
    else:
        mean = {name: w * tensor + (1 - w) * short[name] for name, tensor in long.items()}
        expected = with_updates(model, updates_of(mean)).last_hidden(HISTORIES)
    assert torch.allclose(found, expected, atol=1e-4)


def test_averaging_factors_brings_in_cross_terms_and_summing_updates_does_not():
    _, long, short = two_loras()
    by_sum, by_factor = updates_of(add_updates(long, short, 0.5)), updates_of(average_factors(long, short, 0.5))
    name = "blocks.0.query"
    cross = long[f"{name}.lora_up"] @ short[f"{name}.lora_down"] + short[f"{name}.lora_up"] @ long[f"{name}.lora_down"]
    own = updates_of(long)[name] + updates_of(short)[name]
    assert torch.allclose(by_sum[name], 0.5 * own, atol=1e-5)
    assert torch.allclose(by_factor[name], 0.25 * (own + cross), atol=1e-5)


def test_the_short_lora_forgets_and_the_long_one_goes_on():
    method = DualLoRA(learning_rate=0.1, long_rate=1.0)
    one, _ = after_slice_1(method)
    long_moved = [name for name, t in small_weights(one.backbone).items() if "up" in name and (t != 0).any()]
    assert long_moved
    still = replace(world(), config=tiny_config(variant="peft", training__slice_epochs=0))
    two, _ = method.learn(still, one, tiny_stream().slice_(2), PlainDescent())
    assert all((tensor == 0).all() for name, tensor in two.short.items() if name.endswith("lora_up"))
    assert all(torch.equal(t, small_weights(one.backbone)[name]) for name, t in small_weights(two.backbone).items())
    assert isinstance(two.backbone.blocks[0].query, LoRALinear)


def test_the_weight_is_the_best_on_the_validation_part():
    method = DualLoRA(learning_rate=0.1, long_rate=1.0)
    state, log = after_slice_1(method)
    slice_, values = tiny_stream().slice_(1), []
    for w in WEIGHTS:
        both = {
            name: w * u + (1 - w) * updates_of(state.short)[name]
            for name, u in updates_of(small_weights(state.backbone)).items()
        }
        plain = with_weights(state.backbone, {k: torch.zeros_like(t) for k, t in state.short.items()})
        for place, block in enumerate(plain.blocks):
            for name in ("query", "value"):
                getattr(block, name).weight.add_(method.scaling * both[f"blocks.{place}.{name}"])
        values.append(validation_ndcg(plain, slice_))
    assert log["merged_ndcg10"] == pytest.approx(values, abs=5e-3)
    assert state.weight == log["long_weight"] == WEIGHTS[log["merged_ndcg10"].index(max(log["merged_ndcg10"]))]
    assert DualLoRA().start(world()).weight == EVEN


def test_under_privacy_nothing_is_selected():
    private = replace(world(), config=tiny_config(variant="peft", privacy__wrap=True))
    method = DualLoRA()
    state = method.start(private)
    assert method._weight(private, state.backbone, state.short, tiny_stream().slice_(1)) == (EVEN, ())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PrefixTuning(length=0), "length must lie between 1 and 10000, got 0"),
        (lambda: Adapters(bottleneck=0), "bottleneck must lie between 1 and 65536, got 0"),
        (lambda: AdapterCL(history=0), "history must lie between 1 and 100000, got 0"),
        (lambda: DualLoRA(sample=2.0), r"sample must lie between 0 and 1, got 2\.0"),
    ],
)
def test_a_hyper_parameter_out_of_range_is_one_line_that_names_it(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
