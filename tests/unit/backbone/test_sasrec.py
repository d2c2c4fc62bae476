"""The backbone against a slow forward pass written with loops, and what its masks, rows and weights promise."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator
from worlds import random_model

from protofed.backbone.sasrec import SASRec, grown
from protofed.config import BackboneConfig
from protofed.slices.histories import BOS, PAD

N_ROWS = 9
HISTORIES = torch.tensor(
    [
        [PAD, PAD, PAD, PAD, PAD, BOS],
        [PAD, PAD, PAD, BOS, 4, 4],
        [PAD, BOS, 8, 0, N_ROWS, 2],  # an item without a row in the middle
        [3, 1, 7, 5, 6, 0],
    ]
)


def drawn_prompt(n: int, length: int, seed: int = 0, width: int = 8) -> torch.Tensor:
    return 2 * torch.randn(n, length, width, generator=Generator().manual_seed(seed))


def slow_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    mean = sum(x) / len(x)
    variance = sum((value - mean) ** 2 for value in x) / len(x)
    return np.array([(v - mean) / math.sqrt(variance + 1e-5) * w + b for v, w, b in zip(x, weight, bias, strict=True)])


def slow_attention(q: list, k: list, v: list, heads: int, sees) -> list[np.ndarray]:
    width = len(q[0]) // heads
    mixed = []
    for asking in range(len(q)):
        seen = [other for other in range(len(q)) if sees(asking, other)]
        parts = []
        for head in range(heads):
            own = slice(head * width, (head + 1) * width)
            weights = [math.exp(float(q[asking][own] @ k[other][own]) / math.sqrt(width)) for other in seen]
            parts.append(sum(w * v[other][own] for w, other in zip(weights, seen, strict=True)) / sum(weights))
        mixed.append(np.concatenate(parts))
    return mixed


def slow_hidden(model: SASRec, tokens: list[int], prompt: list[np.ndarray]) -> list[np.ndarray]:
    """The hidden state at every token, one vector at a time, in float64."""
    w = {name: value.double().numpy() for name, value in model.state_dict().items()}
    d, n_prompt = model.config.width, len(prompt)

    def row(token: int) -> np.ndarray:
        known = 0 <= token < len(w["items"]) and w["has_row"][token]
        return w["bos"] if token == BOS else w["items"][token] if known else w["mean_row"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    def sees(asking: int, other: int) -> bool:
        if other < n_prompt or other == asking:
            return True
        return other <= asking and tokens[other - n_prompt] != PAD

    places = range(len(tokens))
    x = [*prompt, *(row(tokens[i]) * math.sqrt(d) + w["positions"][i - len(tokens)] for i in places)]
    for block in (f"blocks.{i}" for i in range(model.config.layers)):
        normed = [slow_norm(v, w[f"{block}.norm_attention.weight"], w[f"{block}.norm_attention.bias"]) for v in x]
        q, k, v = ([linear(v, f"{block}.{part}") for v in normed] for part in ("query", "key", "value"))
        mixed = slow_attention(q, k, v, model.config.heads, sees)
        x = [old + linear(new, f"{block}.output") for old, new in zip(x, mixed, strict=True)]
        for i, old in enumerate(x):
            normed_i = slow_norm(old, w[f"{block}.norm_ffn.weight"], w[f"{block}.norm_ffn.bias"])
            inner = [z * 0.5 * (1 + math.erf(z / math.sqrt(2))) for z in linear(normed_i, f"{block}.widen")]
            x[i] = old + linear(np.array(inner), f"{block}.narrow")
    return [slow_norm(v, w["norm.weight"], w["norm.bias"]) for v in x[n_prompt:]]


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("n_prompt", [0, 1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-11)])
def test_the_hidden_states_are_those_of_a_forward_pass_written_with_loops(n_prompt, dtype, tolerance):
    model = random_model(N_ROWS, heads=4).to(dtype)
    prompt = drawn_prompt(len(HISTORIES), n_prompt).to(dtype)
    hidden = model.hidden(HISTORIES, prompt if n_prompt else None).double()
    for tokens, own, found in zip(HISTORIES.tolist(), prompt.double().numpy(), hidden, strict=True):
        by_hand = np.stack(slow_hidden(model, tokens, list(own)))
        real = [place for place, token in enumerate(tokens) if token != PAD]  # nobody reads the state at a padding
        assert found[real].numpy() == pytest.approx(by_hand[real], abs=tolerance * 3, rel=tolerance)


@pytest.mark.parametrize("n_prompt", [0, 2])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_last_hidden_state_alone_equals_the_last_of_all(n_prompt, layers):
    model = random_model(N_ROWS, layers=layers)
    prompt = drawn_prompt(len(HISTORIES), n_prompt) if n_prompt else None
    alone, of_all = model.last_hidden(HISTORIES, prompt), model.hidden(HISTORIES, prompt)[:, -1]
    assert torch.allclose(alone, of_all, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 5), st.integers(0, N_ROWS), st.booleans())
def test_a_later_token_never_changes_an_earlier_hidden_state(place, item, prompted):
    model, tokens = random_model(N_ROWS), HISTORIES[-1:]
    prompt = drawn_prompt(1, 2) if prompted else None
    changed = tokens.clone()
    changed[0, place] = item
    before, after = model.hidden(tokens, prompt)[0], model.hidden(changed, prompt)[0]
    assert torch.equal(before[:place], after[:place])
    assert torch.equal(tokens, changed) or not torch.equal(before[place:], after[place:])


@pytest.mark.parametrize("n_prompt", [0, 3])
def test_the_amount_of_padding_does_not_matter(n_prompt):
    model = random_model(N_ROWS)
    short = torch.tensor([[BOS, 4, 2]])
    prompt = drawn_prompt(1, n_prompt) if n_prompt else None
    for padding in (1, 2, 3):
        padded = torch.nn.functional.pad(short, (padding, 0), value=PAD)
        assert torch.allclose(model.hidden(padded, prompt)[:, padding:], model.hidden(short, prompt), atol=1e-5)
        assert torch.allclose(model.last_hidden(padded, prompt), model.last_hidden(short, prompt), atol=1e-5)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_history_token_sees_every_prompt_token(place):
    model, tokens = random_model(N_ROWS), HISTORIES[-1:]
    prompt, other = drawn_prompt(1, 3), drawn_prompt(1, 3)
    other[0, place] += torch.linspace(-1, 1, 8)
    moved = (model.hidden(tokens, prompt) - model.hidden(tokens, other)).abs().amax(-1)
    assert (moved > 1e-4).all()


def test_the_order_of_history_items_matters_and_that_of_prompt_tokens_does_not():
    model, tokens = random_model(N_ROWS), HISTORIES[-1:]
    prompt = drawn_prompt(1, 3)
    assert torch.allclose(model.hidden(tokens, prompt), model.hidden(tokens, prompt.flip(1)), atol=1e-5)
    swapped = tokens[:, [1, 0, 2, 3, 4, 5]]
    assert not torch.allclose(model.last_hidden(tokens, prompt), model.last_hidden(swapped, prompt), atol=1e-3)


def test_an_empty_history_has_finite_scores():
    model = random_model(N_ROWS)
    scores = model.scores(model.last_hidden(HISTORIES[:1]), N_ROWS + 2)
    assert scores.shape == (1, N_ROWS + 2)
    assert scores.isfinite().all()


def test_an_item_without_a_row_is_read_and_scored_with_the_mean_row():
    model = random_model(N_ROWS)
    model.has_row[3] = False
    model.refresh_mean_row()
    kept = [item for item in range(N_ROWS) if item != 3]
    assert torch.allclose(model.mean_row, model.items[kept].mean(0))
    without = model.embed(torch.tensor([3, N_ROWS, N_ROWS + 50]))
    assert torch.equal(without, model.mean_row.expand(3, -1))
    assert torch.equal(model.embed(torch.tensor(kept)), model.items[kept])
    met_3, met_new = torch.tensor([[BOS, 3, 1]]), torch.tensor([[BOS, N_ROWS + 7, 1]])
    assert torch.equal(model.hidden(met_3), model.hidden(met_new))
    scores = model.scores(model.last_hidden(met_3), N_ROWS + 2)[0]
    assert scores[3].item() == pytest.approx(float(model.last_hidden(met_3)[0] @ model.mean_row), abs=1e-5)


@pytest.mark.parametrize("n_items", [N_ROWS + 2, 64, 1001])
def test_all_items_without_a_row_tie_to_the_last_bit(n_items):
    model = random_model(N_ROWS, width=12)
    model.has_row[3] = False
    scores = model.scores(torch.randn(7, 12, generator=Generator().manual_seed(0)), n_items)
    assert torch.equal(scores[:, N_ROWS:], scores[:, 3:4].expand(-1, n_items - N_ROWS))


def test_scores_are_inner_products_with_the_rows():
    model = random_model(N_ROWS)
    hidden = model.last_hidden(HISTORIES)
    by_hand = [[float(h @ model.items[item]) for item in range(N_ROWS)] for h in hidden]
    assert model.scores(hidden, N_ROWS).tolist() == pytest.approx(np.array(by_hand), abs=1e-5)
    assert torch.equal(model.scores(hidden, 4), model.scores(hidden, N_ROWS)[:, :4])


def test_a_grown_copy_keeps_every_weight_and_leaves_the_added_rows_unset():
    model = random_model(N_ROWS)
    model.has_row[5] = False
    bigger = grown(model, N_ROWS + 4).eval()
    for name, tensor in model.state_dict().items():
        assert torch.equal(bigger.state_dict()[name][: len(tensor)], tensor), name
    assert bigger.n_rows == N_ROWS + 4
    assert bigger.has_row.tolist() == [item not in (5, 9, 10, 11, 12) for item in range(N_ROWS + 4)]
    assert torch.equal(bigger.rows(N_ROWS + 6), model.rows(N_ROWS + 6))
    assert torch.equal(bigger.hidden(HISTORIES), model.hidden(HISTORIES))


def test_a_grown_copy_shares_no_memory_with_the_model():
    model = random_model(N_ROWS)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bigger = grown(model, N_ROWS)
    for tensor in bigger.state_dict().values():
        tensor.fill_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def built(seed: int, global_seed: int) -> dict[str, torch.Tensor]:
    with torch.random.fork_rng([]):
        torch.manual_seed(global_seed)
        return SASRec(BackboneConfig(width=8, heads=2), 5, Generator().manual_seed(seed)).state_dict()


def test_initial_weights_depend_on_the_given_generator_alone():
    first, again, other = built(1, 10), built(1, 20), built(2, 10)
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if name in ("items", "bos", "positions") or first[name].dim() == 2]
    assert len(drawn) == 3 + 2 * 6
    assert all(not torch.equal(first[name], other[name]) for name in drawn)


def test_fresh_rows_have_the_length_that_is_announced():
    model = SASRec(BackboneConfig(width=64), 2_000, Generator().manual_seed(0))
    assert model.items.norm(dim=-1).mean().item() == pytest.approx(0.4, rel=0.02)
    assert model.input_norm().item() == pytest.approx(0.4 * math.sqrt(64), rel=0.02)


def test_the_length_of_an_input_is_that_of_items_with_a_row_however_they_are_named():
    model = SASRec(BackboneConfig(width=64), 30, Generator().manual_seed(0))
    model.has_row = torch.arange(30) % 3 == 0
    by_hand = sum(float(model.items[item].norm()) for item in range(0, 30, 3)) / 10 * math.sqrt(64)
    assert model.input_norm().item() == pytest.approx(by_hand, rel=1e-5)
    assert torch.equal(model.input_norm(model.has_row.nonzero()[:, 0]), model.input_norm())


def test_dropout_acts_in_training_only():
    model = random_model(N_ROWS, dropout=0.5)
    assert torch.equal(model.hidden(HISTORIES), model.hidden(HISTORIES))
    with torch.random.fork_rng([]):
        model.train()
        assert not torch.equal(model.hidden(HISTORIES), model.hidden(HISTORIES))
