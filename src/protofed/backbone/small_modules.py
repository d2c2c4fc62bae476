"""Small trainable modules in a frozen backbone: a shared prompt, key and value prefixes, adapters, LoRA.

Each function gives a copy of a backbone with modules attached; it trains, scores, grows, packs and copies as before.
LoRA and adapters change nothing as they start; a prompt or a prefix always does: it adds keys to every softmax.
"""

import copy
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Generator, Tensor, nn

from protofed.backbone.injection import rescale_like, visible
from protofed.backbone.new_items import only_rows
from protofed.backbone.sasrec import Block, SASRec, at_rest
from protofed.backbone.training import ParameterGroups, Trainable
from protofed.seeds import seeded

Weights = Mapping[str, Tensor]  # of small modules, by the parameter's name
NAMES = frozenset({"prompt", "prefix", "after_attention", "after_ffn", "lora_down", "lora_up"})


class Prompt(nn.Module):
    """Soft tokens in front of every history, the same for all, always of the length the backbone's inputs have."""

    length: Tensor

    def __init__(self, tokens: Float[Tensor, "L_p d"], length: Float[Tensor, ""]) -> None:
        super().__init__()
        self.tokens = nn.Parameter(tokens.clone())
        self.register_buffer("length", length.clone())

    def forward(self) -> Float[Tensor, "1 L_p d"]:
        return rescale_like(self.tokens[None], self.length)


class Prefix(nn.Module):
    """Keys and values in front of those of each block; in training, a small network may say how they change."""

    change: nn.Module | None

    def __init__(self, pairs: Float[Tensor, "layers 2 L_x d"]) -> None:
        super().__init__()
        self.pairs = nn.Parameter(pairs.clone())
        self.register_module("change", None)

    def forward(self) -> Float[Tensor, "layers 2 L_x d"]:
        pairs: Tensor = self.pairs if self.change is None else self.pairs + self.change()
        return pairs


class Change(nn.Module):
    """A re-parametrised change of a prefix: its tokens through one hidden layer that all blocks share; 0 at first."""

    def __init__(self, like: Float[Tensor, "layers 2 L_x d"], inner: int, rng: Generator) -> None:
        super().__init__()
        layers, _, length, d = like.shape
        self.layers = layers
        self.tokens = nn.Parameter(torch.randn(length, d, generator=rng))
        with seeded(0, "overwritten below"):
            self.widen, self.narrow = nn.Linear(d, inner), nn.Linear(inner, layers * 2 * d)
        with torch.no_grad():
            nn.init.xavier_uniform_(self.widen.weight, generator=rng)
            for zero in (self.widen.bias, self.narrow.weight, self.narrow.bias):
                zero.zero_()

    def forward(self) -> Float[Tensor, "layers 2 L_x d"]:
        out: Tensor = self.narrow(torch.tanh(self.widen(self.tokens)))  # (L_x, layers * 2 * d)
        return out.unflatten(-1, (self.layers, 2, -1)).permute(1, 2, 0, 3)  # type: ignore[no-any-return]


class Adapter(nn.Module):
    """x + up(gelu(down(x))) through a bottleneck; the identity as it starts."""

    def __init__(self, width: int, bottleneck: int, rng: Generator) -> None:
        super().__init__()
        with seeded(0, "overwritten below"):
            self.down, self.up = nn.Linear(width, bottleneck), nn.Linear(bottleneck, width)
        with torch.no_grad():
            nn.init.xavier_uniform_(self.down.weight, generator=rng)
            for zero in (self.down.bias, self.up.weight, self.up.bias):
                zero.zero_()

    def forward(self, x: Float[Tensor, "*B d"]) -> Float[Tensor, "*B d"]:
        return x + self.up(F.gelu(self.down(x)))  # type: ignore[no-any-return]


class LoRALinear(nn.Linear):
    """A frozen linear map plus alpha / r times up @ down; the map itself as it starts."""

    def __init__(self, inner: nn.Linear, rank: int, alpha: float, rng: Generator) -> None:
        with seeded(0, "overwritten below"):
            super().__init__(inner.in_features, inner.out_features)
        self.weight, self.bias = inner.weight, inner.bias
        self.scaling = alpha / rank
        bound = self.in_features**-0.5  # Kaiming's, as the reference implementation draws it
        self.lora_down = nn.Parameter((2 * torch.rand(rank, self.in_features, generator=rng) - 1) * bound)
        self.lora_up = nn.Parameter(torch.zeros(self.out_features, rank))

    def forward(self, x: Float[Tensor, "*B d_in"]) -> Float[Tensor, "*B d_out"]:
        changed = F.linear(F.linear(x, self.lora_down), self.lora_up)
        return F.linear(x, self.weight, self.bias) + self.scaling * changed


def some_inputs(model: SASRec, n: int, rng: Generator) -> Float[Tensor, "n d"]:
    """Drawn item rows as vectors of the backbone's input length: what new prompts start as."""
    known = model.has_row.nonzero()[:, 0].cpu()
    chosen = known[torch.randperm(len(known), generator=rng)[torch.arange(n) % len(known)]]
    rows = model.items.detach()[chosen.to(model.items.device)]
    return rescale_like(rows[None], model.input_norm())[0]


def with_prompt(model: SASRec, length: int, rng: Generator, like: SASRec | None = None) -> SASRec:
    """A copy with a soft prompt of so many tokens, started at drawn items; an earlier prompt is replaced.

    Items and the length of an input are taken from `like` where it is given: rows that came later are shorter.
    """
    model, like = copy.deepcopy(model), like or model
    model.prompt = Prompt(some_inputs(like, length, rng), like.input_norm())
    return ready_to_score(model)


def with_prefix(model: SASRec, length: int, rng: Generator) -> SASRec:
    """A copy with key and value prefixes, started as the keys and values that a prompt of drawn items would have."""
    model = copy.deepcopy(model)
    model.prefix = Prefix(prefix_like(model, some_inputs(model, length, rng)))
    return ready_to_score(model)


@torch.no_grad()
def prefix_like(model: SASRec, tokens: Float[Tensor, "L_p d"]) -> Float[Tensor, "layers 2 L_p d"]:
    """The keys and values of a prompt in every block: it reads nothing but itself, so they are the same for all."""
    x, pairs = tokens[None], []
    mask = visible(torch.zeros(1, 0, dtype=torch.int64, device=tokens.device), len(tokens))
    for block in blocks_of(model):
        normed = block.norm_attention(x)
        pairs.append(torch.cat([block.key(normed), block.value(normed)]))
        x = block.eval()(x, mask)
    return torch.stack(pairs)


def reparametrise(model: SASRec, inner: int, rng: Generator) -> SASRec:
    """A copy whose prefix trains through a network of that inner width (Li and Liang, 2021); equal as it starts."""
    model = copy.deepcopy(model)
    prefix = prefix_of(model)
    prefix.change = Change(prefix.pairs, inner, rng)
    return ready_to_score(model)


def fold_prefix(model: SASRec) -> SASRec:
    """A copy whose prefix is what the network made of it, bit for bit, and the network is gone."""
    model = copy.deepcopy(model)
    model.prefix = Prefix(prefix_of(model)().detach())
    return ready_to_score(model)


def prefix_of(model: SASRec) -> Prefix:
    assert isinstance(model.prefix, Prefix)
    return model.prefix


def with_adapters(model: SASRec, bottleneck: int, rng: Generator) -> SASRec:
    """A copy with an adapter after each attention's output and each feed-forward part, before they are added."""
    model = copy.deepcopy(model)
    for block in blocks_of(model):
        block.after_attention = Adapter(model.config.width, bottleneck, rng)
        block.after_ffn = Adapter(model.config.width, bottleneck, rng)
    return ready_to_score(model)


def with_lora(model: SASRec, rank: int, alpha: float, rng: Generator) -> SASRec:
    """A copy with LoRA on the query and value maps of every block."""
    model = copy.deepcopy(model)
    for block in blocks_of(model):
        block.query = LoRALinear(block.query, rank, alpha, rng)
        block.value = LoRALinear(block.value, rank, alpha, rng)
    return ready_to_score(model)


def blocks_of(model: SASRec) -> list[Block]:
    return [block for block in model.blocks if isinstance(block, Block)]


def ready_to_score(model: SASRec) -> SASRec:
    """The model with everything that was attached on its device, ready to score."""
    return at_rest(model.to(model.items.device))


def small_parameters(model: SASRec) -> dict[str, nn.Parameter]:
    """What was attached, by name; a prefix that trains through a network is that network."""
    found = {name: p for name, p in model.named_parameters() if NAMES & set(name.split("."))}
    if "prefix.pairs" in found and prefix_of(model).change is not None:
        del found["prefix.pairs"]
    return found


def small_weights(model: SASRec) -> dict[str, Tensor]:
    """A copy of what was attached, by name."""
    return {name: parameter.detach().clone() for name, parameter in small_parameters(model).items()}


def with_weights(model: SASRec, weights: Weights) -> SASRec:
    """A copy whose small modules have these values."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in small_parameters(model).items():
            parameter.copy_(weights[name])
    return at_rest(model)


def modules_and_rows(new: Bool[Tensor, " n"], learning_rate: float) -> Trainable:
    """Trains the small modules, at a rate of their own, and these item rows; nothing else of the backbone moves."""

    def trainable(model: SASRec) -> ParameterGroups:
        modules = [{"params": list(small_parameters(model).values()), "lr": learning_rate}]
        return modules + (only_rows(new)(model) if new.any() else [])

    return trainable
