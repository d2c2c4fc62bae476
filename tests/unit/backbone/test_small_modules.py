"""Small modules in a frozen backbone do what their formulas say, and nothing else of the backbone notices."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from worlds import random_model, tiny_config, tiny_stream, warmed_up

from protofed.backbone import training
from protofed.backbone.functional import lending
from protofed.backbone.losses import LOSSES, window_losses
from protofed.backbone.sasrec import SASRec, at_rest, grown
from protofed.backbone.small_modules import (
    Adapter,
    Change,
    LoRALinear,
    Prompt,
    fold_prefix,
    modules_and_rows,
    prefix_like,
    prefix_of,
    reparametrise,
    small_parameters,
    small_weights,
    some_inputs,
    with_adapters,
    with_lora,
    with_prefix,
    with_prompt,
    with_weights,
)
from protofed.backbone.training import PlainDescent, Task, train
from protofed.slices.histories import BOS, PAD
from protofed.slices.windows import Windows
from protofed.snapshot import restore, take_snapshot

N_ROWS = 9
HISTORIES = torch.tensor([[PAD, PAD, BOS, 3, 1, 4], [1, 5, 2, 6, 5, 3], [PAD, PAD, PAD, PAD, PAD, BOS]])
KINDS: dict[str, Callable[[SASRec, Generator], SASRec]] = {
    "prompt": lambda model, rng: with_prompt(model, 3, rng),
    "prefix": lambda model, rng: with_prefix(model, 3, rng),
    "adapters": lambda model, rng: with_adapters(model, 2, rng),
    "lora": lambda model, rng: with_lora(model, 2, 4.0, rng),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def rng(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def attached(kind: str, model: SASRec | None = None) -> SASRec:
    """A backbone with modules in which no value is one that could hide a mistake."""
    model = KINDS[kind](random_model(N_ROWS) if model is None else model, rng(1))
    drawn = rng(2)
    noise = {name: 0.5 * torch.randn(p.shape, generator=drawn) for name, p in small_parameters(model).items()}
    return with_weights(model, {name: p + noise[name] for name, p in small_parameters(model).items()})


def slow_block(block: nn.Module, x: Tensor, seen: list[list[int]], prefix: Tensor | None = None) -> Tensor:
    """One history (S, d) through a block: attention by explicit loops, `seen[i]` the places that place i looks at."""
    heads, d = block.heads, x.shape[1]
    size = d // heads
    normed = F.layer_norm(x, (d,), block.norm_attention.weight, block.norm_attention.bias)

    def mapped(layer: nn.Module, rows: Tensor) -> Tensor:
        weight = layer.weight
        if isinstance(layer, LoRALinear):
            weight = weight + layer.scaling * layer.lora_up @ layer.lora_down
        return rows @ weight.T + layer.bias

    q, k, v = (mapped(layer, normed) for layer in (block.query, block.key, block.value))
    out = torch.zeros_like(x)
    for i in range(len(x)):
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            keys = [k[j, part] for j in seen[i]] + ([] if prefix is None else [row[part] for row in prefix[0]])
            values = [v[j, part] for j in seen[i]] + ([] if prefix is None else [row[part] for row in prefix[1]])
            weights = [math.exp(float(q[i, part] @ key) / math.sqrt(size)) for key in keys]
            out[i, part] = sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
    x = x + slow_adapter(block.after_attention, out @ block.output.weight.T + block.output.bias)
    normed = F.layer_norm(x, (d,), block.norm_ffn.weight, block.norm_ffn.bias)
    inner = F.gelu(normed @ block.widen.weight.T + block.widen.bias)
    return x + slow_adapter(block.after_ffn, inner @ block.narrow.weight.T + block.narrow.bias)


def slow_adapter(adapter: nn.Module, x: Tensor) -> Tensor:
    if isinstance(adapter, nn.Identity):
        return x
    inner = x @ adapter.down.weight.T + adapter.down.bias
    inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    return x + inner @ adapter.up.weight.T + adapter.up.bias


def slow_hidden(model: SASRec, history: list[int]) -> Tensor:
    """The hidden states of an unpadded history, by the loops above; a prompt's tokens see only each other."""
    x = model.token_inputs(torch.tensor([history]))[0]
    n_prompt = 0
    if model.prompt is not None:
        tokens = model.prompt.tokens
        tokens = tokens / tokens.norm(dim=1, keepdim=True) * model.input_norm()
        x, n_prompt = torch.cat([tokens, x]), len(tokens)
    seen = [list(range(max(i + 1, n_prompt))) for i in range(len(x))]
    pairs = [None] * len(model.blocks) if model.prefix is None else list(model.prefix.pairs)
    for block, pair in zip(model.blocks, pairs, strict=True):
        x = slow_block(block, x, seen, pair)
    return F.layer_norm(x[n_prompt:], (x.shape[1],), model.norm.weight, model.norm.bias)


@kinds
def test_the_hidden_states_are_those_of_an_explicit_loop(kind):
    model = attached(kind)
    with torch.no_grad():
        found, expected = model.hidden(HISTORIES[1:2])[0], slow_hidden(model, HISTORIES[1].tolist())
        padded, short = model.hidden(HISTORIES[:1])[0, 2:], slow_hidden(model, [BOS, 3, 1, 4])
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(padded, short, atol=1e-5)


@kinds
def test_the_last_hidden_state_alone_is_the_last_of_all(kind):
    model = attached(kind)
    assert torch.allclose(model.last_hidden(HISTORIES), model.hidden(HISTORIES)[:, -1], atol=1e-6)


@kinds
def test_padding_in_front_changes_nothing(kind):
    model = attached(kind)
    more = F.pad(HISTORIES[:1, 2:], (2, 0), value=PAD)
    assert torch.allclose(model.last_hidden(more), model.last_hidden(HISTORIES[:1, 2:]), atol=1e-6)


@pytest.mark.parametrize(("kind", "silent"), [("prompt", False), ("prefix", False), ("adapters", True), ("lora", True)])
def test_fresh_adapters_and_lora_change_no_bit_and_a_fresh_prompt_or_prefix_does(kind, silent):
    model = random_model(N_ROWS)
    fresh = KINDS[kind](model, rng())
    assert torch.equal(fresh.hidden(HISTORIES), model.hidden(HISTORIES)) == silent
    assert not torch.equal(attached(kind, model).hidden(HISTORIES), model.hidden(HISTORIES))


def test_even_a_prompt_of_zeros_is_seen():
    model = random_model(N_ROWS)
    nothing = torch.zeros(len(HISTORIES), 3, 8)
    assert not torch.allclose(model.hidden(HISTORIES, nothing), model.hidden(HISTORIES), atol=1e-3)


def test_an_attached_prompt_reads_like_the_same_prompt_given_and_a_given_one_takes_its_place():
    model, bare = attached("prompt"), at_rest(random_model(N_ROWS))
    tokens = model.prompt().expand(len(HISTORIES), -1, -1)
    assert torch.equal(model.hidden(HISTORIES), bare.hidden(HISTORIES, tokens))
    other = torch.randn(len(HISTORIES), 2, 8, generator=rng(5))
    assert torch.equal(model.last_hidden(HISTORIES, other), bare.last_hidden(HISTORIES, other))


def test_prompt_tokens_always_have_the_length_of_the_backbones_inputs():
    model = attached("prompt")
    assert isinstance(model.prompt, Prompt)
    assert torch.allclose(model.prompt().norm(dim=-1), model.input_norm().expand(1, 3))
    longer = with_weights(model, {"prompt.tokens": 7 * model.prompt.tokens})
    assert torch.allclose(longer.hidden(HISTORIES), model.hidden(HISTORIES), atol=1e-5)


def test_prompts_start_at_items_that_have_rows_and_repeat_only_where_there_are_too_few():
    model = random_model(N_ROWS)
    model.has_row[[0, 4, 7]] = False
    inputs = some_inputs(model, 6, rng())
    aligned = F.cosine_similarity(inputs[:, None], model.items.detach()[None], dim=-1)
    assert sorted(aligned.argmax(1).tolist()) == [1, 2, 3, 5, 6, 8]
    assert torch.allclose(aligned.amax(1), torch.ones(6), atol=1e-5)
    assert len(some_inputs(model, 20, rng())) == 20


def test_a_prefix_made_of_a_prompts_keys_and_values_reads_like_the_prompt():
    model = random_model(N_ROWS)
    prompted = with_prompt(model, 3, rng(4))
    prefixed = with_prefix(model, 3, rng())
    prefixed.prefix.pairs.copy_(prefix_like(model, prompted.prompt()[0]))
    assert torch.allclose(prefixed.hidden(HISTORIES), prompted.hidden(HISTORIES), atol=1e-5)
    assert torch.allclose(with_prefix(model, 3, rng(4)).prefix.pairs, prefixed.prefix.pairs, atol=1e-5)


def test_lora_scales_its_update_once():
    layer = nn.Linear(4, 3)
    lora = LoRALinear(layer, rank=2, alpha=6.0, rng=rng())
    with torch.no_grad():
        lora.lora_up.copy_(torch.randn(3, 2, generator=rng(1)))
        x = torch.randn(5, 4, generator=rng(2))
        by_hand = x @ layer.weight.T + layer.bias + 3.0 * (x @ lora.lora_down.T) @ lora.lora_up.T
        assert torch.allclose(lora(x), by_hand, atol=1e-6)


@pytest.mark.slow
def test_lora_is_that_of_the_peft_library():
    peft = pytest.importorskip("peft")
    holder = nn.Sequential()
    holder.add_module("query", nn.Linear(8, 8))
    ours = LoRALinear(copy.deepcopy(holder.query), rank=2, alpha=4.0, rng=rng())
    theirs = peft.get_peft_model(holder, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["query"]))
    x, layer = torch.randn(3, 8, generator=rng(1)), theirs.base_model.model.query
    assert torch.allclose(theirs(x), ours(x), atol=1e-6)
    with torch.no_grad():
        ours.lora_up.normal_(generator=rng(2))
        layer.lora_A["default"].weight.copy_(ours.lora_down)
        layer.lora_B["default"].weight.copy_(ours.lora_up)
        assert torch.allclose(theirs(x), ours(x), atol=1e-5)
    bound = layer.lora_A["default"].in_features ** -0.5
    assert ours.lora_down.abs().max() <= bound


def test_a_change_of_the_prefix_is_laid_out_as_in_the_peft_library():
    peft = pytest.importorskip("peft")
    layers, length, d, inner = 2, 3, 8, 5
    config = peft.PrefixTuningConfig(
        num_virtual_tokens=length,
        token_dim=d,
        num_layers=layers,
        num_attention_heads=2,
        encoder_hidden_size=inner,
        prefix_projection=True,
    )
    theirs, ours = peft.PrefixEncoder(config), Change(torch.zeros(layers, 2, length, d), inner, rng())
    with torch.no_grad():
        ours.narrow.weight.normal_(generator=rng(1))
        pairs = [(theirs.embedding, ours.tokens), (theirs.transform[0], ours.widen), (theirs.transform[2], ours.narrow)]
        for layer, own in pairs:
            layer.weight.copy_(own if isinstance(own, nn.Parameter) else own.weight)
        theirs.transform[0].bias.zero_()
        theirs.transform[2].bias.zero_()
        flat = theirs(torch.arange(length)[None])  # as get_prompt views it: tokens, then layers * 2, then heads
        expected = flat.view(1, length, layers * 2, 2, d // 2).permute(2, 0, 3, 1, 4).split(2)
        for layer in range(layers):
            for part in range(2):
                by_head = ours()[layer, part].unflatten(-1, (2, -1)).transpose(0, 1)  # (heads, L_x, d / heads)
                assert torch.allclose(expected[layer][part, 0], by_head, atol=1e-6)


def test_an_adapter_adds_what_its_bottleneck_says():
    adapter, x = Adapter(6, 2, rng()), torch.randn(4, 6, generator=rng(1))
    assert torch.equal(adapter(x), x)
    with torch.no_grad():
        adapter.up.weight.normal_(generator=rng(2))
        adapter.down.bias.normal_(generator=rng(3))
        assert torch.allclose(adapter(x), slow_adapter(adapter, x), atol=1e-6)


def test_a_prefix_starts_its_training_where_it_was_and_keeps_every_bit_when_the_network_goes():
    model = attached("prefix")
    network = reparametrise(model, 5, rng())
    assert torch.equal(network.hidden(HISTORIES), model.hidden(HISTORIES))
    assert all(name.startswith("prefix.change.") for name in small_parameters(network))
    with torch.no_grad():
        for parameter in small_parameters(network).values():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng(7)))
    after = fold_prefix(network)
    assert not torch.equal(network.hidden(HISTORIES), model.hidden(HISTORIES))
    assert torch.equal(after.hidden(HISTORIES), network.hidden(HISTORIES))
    assert set(small_parameters(after)) == {"prefix.pairs"}
    change = prefix_of(network).change
    layer, token = 1, 2  # by hand, one block's keys at one place
    inner = torch.tanh(change.widen.weight @ change.tokens[token] + change.widen.bias)
    out = (change.narrow.weight @ inner + change.narrow.bias).view(2, 2, 8)
    assert torch.allclose(after.prefix.pairs[layer, 0, token], model.prefix.pairs[layer, 0, token] + out[layer, 0])


@kinds
def test_modules_survive_growing_copying_and_packing(kind):
    model = attached(kind)
    bigger = grown(model, N_ROWS + 4)
    for twin in (bigger, copy.deepcopy(model), restore(take_snapshot(model)), restore(take_snapshot(bigger))):
        assert torch.equal(twin.hidden(HISTORIES), model.hidden(HISTORIES))
        assert small_parameters(twin).keys() == small_parameters(model).keys()
    for tensor in bigger.state_dict().values():
        tensor.fill_(1)
    assert torch.equal(attached(kind).hidden(HISTORIES), model.hidden(HISTORIES))


@kinds
def test_attaching_leaves_the_given_backbone_alone_and_keeps_its_weights(kind):
    model = random_model(N_ROWS)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changed = attached(kind, model)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in changed.state_dict().items() if name in before)
    assert not any(parameter.requires_grad for parameter in changed.parameters())
    assert not changed.training


@kinds
def test_first_values_depend_on_the_given_generator_alone(kind):
    def made(seed: int, global_seed: int) -> dict[str, Tensor]:
        with torch.random.fork_rng([]):
            torch.manual_seed(global_seed)
            return small_weights(KINDS[kind](random_model(N_ROWS), rng(seed)))

    first, again, other = made(1, 10), made(1, 20), made(2, 10)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("prompt", 3 * 8),
        ("prefix", 2 * 2 * 3 * 8),
        ("adapters", 2 * 2 * (2 * 8 * 2 + 2 + 8)),
        ("lora", 2 * 2 * (2 * 8 * 2)),
    ],
)
def test_small_parameters_are_what_was_attached(kind, count):
    model = attached(kind)
    assert sum(parameter.numel() for parameter in small_parameters(model).values()) == count
    bare = {name for name, _ in random_model(N_ROWS).named_parameters()}
    assert {name for name, _ in model.named_parameters()} == bare | small_parameters(model).keys()


@kinds
def test_lent_values_read_like_a_copy_that_has_them_and_leave_no_trace(kind):
    model, other = attached(kind), KINDS[kind](random_model(N_ROWS), rng(1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lent = lending(model, small_weights(other), lambda: model.last_hidden(HISTORIES))
    assert torch.equal(lent, other.last_hidden(HISTORIES))
    assert torch.equal(lent, with_weights(model, small_weights(other)).last_hidden(HISTORIES))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@kinds
def test_training_reaches_every_module(kind):
    model = attached(kind).requires_grad_(True)
    asked = Windows(
        torch.zeros(3, dtype=torch.int64),
        HISTORIES,
        torch.full((3, 1), 5),
        torch.tensor([[2], [7], [1]]),
        torch.zeros(3, dtype=torch.int64),
    )
    sums, _ = window_losses(model, asked, torch.arange(N_ROWS).expand(3, -1), LOSSES["softmax"])
    sums.sum().backward()
    assert all((parameter.grad != 0).any() for parameter in small_parameters(model).values())


@kinds
@pytest.mark.parametrize("any_new", [True, False])
def test_a_training_moves_modules_and_new_rows_and_no_other_bit(kind, any_new, monkeypatch):
    config, slice_ = tiny_config(), tiny_stream().slice_(1)
    first = KINDS[kind](grown(warmed_up()[0], slice_.n_train_items), rng())
    new = torch.zeros(first.n_rows, dtype=torch.bool)
    new[-5:] = any_new
    first.has_row |= new
    monkeypatch.setattr(training, "best_of", lambda trace: len(trace) - 1)  # no validation event sends it back
    task = Task(slice_, slice_.train_positions[:300], 1, 0.01)
    trainable = modules_and_rows(new, 0.02)
    after, _ = train(first, task, config.training, seed=0, descend=PlainDescent(), trainable=trainable)
    old, now = first.state_dict(), after.state_dict()
    modules = small_parameters(first).keys()
    assert all(not torch.equal(now[name], old[name]) for name in modules)
    others = old.keys() - modules - {"items", "mean_row"}
    assert all(torch.equal(now[name], old[name]) for name in others)
    assert torch.equal(now["items"][~new], old["items"][~new])
    assert torch.equal(now["items"], old["items"]) != any_new
