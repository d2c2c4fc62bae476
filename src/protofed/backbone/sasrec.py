"""SASRec (Kang and McAuley, 2018), pre-LN: the sequential recommender that is warmed up once and then frozen."""

import copy
import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

from protofed.backbone.injection import inject, visible, visible_on_lines
from protofed.config import BackboneConfig
from protofed.seeds import seeded
from protofed.slices.histories import BOS
from protofed.slices.lines import Lines


class ContentRows(nn.Module):
    """Rows of items that have no trained one, from what is publicly known of them; `described` says which have any.

    Here they are fixed; a subclass may make them anew from the rows that others have.
    """

    rows: Tensor
    described: Tensor

    def __init__(self, rows: Float[Tensor, "C d"], described: Bool[Tensor, " C"]) -> None:
        super().__init__()
        self.register_buffer("rows", rows)
        self.register_buffer("described", described)

    def describes(self, items: Int[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Which items have such a row."""
        return (items >= 0) & (items < len(self.rows)) & self.described[items.clamp(0, len(self.rows) - 1)]

    def rows_of(self, items: Int[Tensor, "*shape"], otherwise: Float[Tensor, " d"]) -> Float[Tensor, "*shape d"]:
        """The items' rows, and one for all others."""
        found = F.embedding(items.clamp(0, len(self.rows) - 1), self.rows)
        return torch.where(self.describes(items)[..., None], found, otherwise)

    def refresh(self, items: Float[Tensor, "R d"], has_row: Bool[Tensor, " R"]) -> None:
        """Follow the trained rows, in place; these do not."""


Embed = Callable[[Tensor], Tensor]  # items (B, n) -> rows (B, n, d); a client may have rows of its own
CONTENT = "content_rows"  # the name of the module that holds them
ROW_SCALE = 0.4  # length of a fresh item row: short rows learn faster and over-fit later than unit ones


def one_hot(index: Int[Tensor, "*shape"], n: int, like: Tensor) -> Float[Tensor, "*shape n"]:
    """Rows of zeros with a one at each index; an index outside has none.

    A product with it picks exactly, and its gradient is a product again, where that of `gather` has to be sorted first
    on a GPU to come out the same twice.
    """
    return (index[..., None] == torch.arange(n, device=index.device)).to(like.dtype)


class Dropout(nn.Dropout):
    """PyTorch's, but on a CPU its draws take a large part of a training step, and uniform numbers a quarter of that."""

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        if x.is_cuda or not self.training or not self.p:
            return super().forward(x)
        return x * ((torch.rand_like(x) < 1 - self.p) / (1 - self.p))


class Block(nn.Module):
    """Self-attention and a feed-forward part, each behind a LayerNorm and around a residual."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_ffn = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, inner), nn.Linear(inner, width)
        self.dropout = Dropout(dropout)
        self.after_attention: nn.Module = nn.Identity()  # here and below is where adapters go
        self.after_ffn: nn.Module = nn.Identity()

    def forward(
        self,
        x: Float[Tensor, "B S d"],
        mask: Bool[Tensor, "B S S"],
        *,
        prefix: Float[Tensor, "2 L_x d"] | None = None,
        last_only: bool = False,
    ) -> Float[Tensor, "B S_out d"]:
        """All positions, or the last one alone (which reads the keys and values of all, and those of a prefix)."""
        normed = self.norm_attention(x)
        asking = normed[:, -1:] if last_only else normed
        mask = mask[:, -1:] if last_only else mask
        x = x[:, -1:] if last_only else x
        x = x + self.dropout(self.after_attention(self.output(self._attend(asking, normed, mask, prefix))))
        x = x + self.dropout(self.after_ffn(self.narrow(self.dropout(F.gelu(self.widen(self.norm_ffn(x)))))))
        return x

    def _attend(self, asking: Tensor, seen: Tensor, mask: Tensor, prefix: Tensor | None) -> Tensor:
        query, key, value = self.query(asking), self.key(seen), self.value(seen)
        if prefix is not None:
            ahead = prefix[:, None].expand(-1, len(seen), -1, -1)  # (2, B, L_x, d)
            key, value = torch.cat([ahead[0], key], dim=1), torch.cat([ahead[1], value], dim=1)
            mask = F.pad(mask, (prefix.shape[1], 0), value=True)
        q, k, v = (self._split(part) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])  # (B, heads, S, d / heads)
        return mixed.transpose(1, 2).flatten(2)

    def _split(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return split


class SASRec(nn.Module):
    """f_theta: scores are inner products of the last hidden state with item rows, shared by input and output.

    Rows exist only for items seen up to the newest train cut the model has learned from; `has_row` says which of them
    were ever initialised. Every other item is read and scored with the mean row or, where the model was given content
    (backbone/content.py), with a row made from what is publicly known of it. `prompt` and `prefix` are small
    modules that may be attached (backbone/small_modules.py); a prompt that a caller gives takes the own one's place.
    """

    items: nn.Parameter
    has_row: Tensor
    mean_row: Tensor
    prompt: nn.Module | None
    prefix: nn.Module | None

    def __init__(self, config: BackboneConfig, n_rows: int, rng: Generator) -> None:
        super().__init__()
        self.config = config
        with seeded(0, "overwritten below"):  # PyTorch's layers draw weights of their own when they are made
            self._build(config, n_rows)
        self._draw(rng)

    def _build(self, config: BackboneConfig, n_rows: int) -> None:
        d = config.width
        self.items = nn.Parameter(torch.empty(n_rows, d))
        self.bos = nn.Parameter(torch.empty(d))
        self.positions = nn.Parameter(torch.empty(config.history_length, d))
        inner = config.ffn_width * d
        self.blocks = nn.ModuleList(Block(d, config.heads, inner, config.dropout) for _ in range(config.layers))
        self.norm = nn.LayerNorm(d)
        self.dropout = Dropout(config.dropout)
        self.register_buffer("has_row", torch.ones(n_rows, dtype=torch.bool))
        self.register_buffer("mean_row", torch.zeros(d))
        self.register_module("prompt", None)
        self.register_module("prefix", None)

    def _draw(self, rng: Generator) -> None:
        """Initial weights from the given stream alone."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2 and name not in ("items", "positions"):
                    nn.init.xavier_uniform_(parameter, generator=rng)
                elif name in ("items", "positions", "bos"):
                    parameter.normal_(0, ROW_SCALE / math.sqrt(self.config.width), generator=rng)
                elif "norm" not in name:
                    parameter.zero_()
        self.refresh_mean_row()

    @property
    def n_rows(self) -> int:
        return len(self.items)

    @property
    def content(self) -> "ContentRows | None":
        """Rows of items without a trained one, from what is known of them; None where nothing is."""
        return self._modules.get(CONTENT)  # type: ignore[return-value]

    def refresh_mean_row(self) -> None:
        """Recompute the rows that stand for items without one, in place; call after training."""
        self.mean_row.copy_(self.items.detach()[self.has_row].mean(0))
        if self.content is not None:
            self.content.refresh(self.items.detach(), self.has_row)

    def knows(self, items: Int[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Which items have a row of their own."""
        return (items >= 0) & (items < self.n_rows) & self.has_row[items.clamp(0, self.n_rows - 1)]

    def tells_apart(self, items: Int[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Which items have a row that is not everybody's: a trained one, or one from content."""
        return self.knows(items) if self.content is None else self.knows(items) | self.content.describes(items)

    def untrained(self, items: Int[Tensor, "*shape"]) -> Float[Tensor, "*#shape d"]:
        """The rows that items have without a trained one."""
        return self.mean_row if self.content is None else self.content.rows_of(items, self.mean_row)

    def embed(self, items: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape d"]:
        inside = items.clamp(0, self.n_rows - 1)
        return torch.where(self.knows(items)[..., None], F.embedding(inside, self.items), self.untrained(items))

    def token_inputs(self, tokens: Int[Tensor, "B L"], embed: Embed | None = None) -> Float[Tensor, "B L d"]:
        """Input vectors of history tokens: item row or BOS, scaled, plus the position counted from the right end."""
        return self._scaled(tokens, embed) + self.positions[-tokens.shape[1] :]

    def hidden(
        self,
        tokens: Int[Tensor, "B L"],
        prompt: Float[Tensor, "B L_p d"] | None = None,
        embed: Embed | None = None,
    ) -> Float[Tensor, "B L d"]:
        x, mask = self._start(tokens, prompt, embed)
        for block, prefix in zip(self.blocks, self._prefixes(), strict=True):
            x = block(x, mask, prefix=prefix)
        return self.norm(x[:, -tokens.shape[1] :])  # type: ignore[no-any-return]

    @property
    def reads_lines(self) -> bool:
        """Whether windows may share a line: not where each has a prompt of its own in front, or reads other tokens."""
        return type(self) is SASRec and self.prompt is None

    def hidden_on_lines(self, lines: Lines, embed: Embed | None = None) -> Float[Tensor, "W L d"]:
        """`hidden` of windows that share lines; a window's states stand `shift` columns away from where they would."""
        positions = self.positions[-lines.tokens.shape[1] :]
        x = self._scaled(lines.tokens, embed) + one_hot(lines.places, len(positions), positions) @ positions
        x, mask = self.dropout(x), visible_on_lines(lines.windows)
        for block, prefix in zip(self.blocks, self._prefixes(), strict=True):
            x = block(x, mask, prefix=prefix)
        whole: Tensor = one_hot(lines.line, len(x), x) @ self.norm(x).flatten(1)  # each window's line
        own: Tensor = whole.unflatten(1, x.shape[1:])
        return own

    def last_hidden(
        self,
        tokens: Int[Tensor, "B L"],
        prompt: Float[Tensor, "B L_p d"] | None = None,
        embed: Embed | None = None,
    ) -> Float[Tensor, "B d"]:
        x, mask = self._start(tokens, prompt, embed)
        for place, (block, prefix) in enumerate(zip(self.blocks, self._prefixes(), strict=True)):
            x = block(x, mask, prefix=prefix, last_only=place == len(self.blocks) - 1)
        return self.norm(x[:, -1])  # type: ignore[no-any-return]

    def scores(self, hidden: Float[Tensor, "B d"], n_items: int) -> Float[Tensor, "B I"]:
        known = self.tells_apart(torch.arange(n_items, device=self.items.device))
        # A matrix product rounds some columns differently, and items that share the mean row have to tie.
        return torch.where(known, hidden @ self.rows(n_items).T, (hidden @ self.mean_row)[:, None])

    def scores_among(self, hidden: Float[Tensor, "B d"], items: Int[Tensor, "B n"]) -> Float[Tensor, "B n"]:
        """`scores` of a few items for each query."""
        own = (self.embed(items) @ hidden[..., None])[..., 0]
        return torch.where(self.tells_apart(items), own, (hidden @ self.mean_row)[:, None])

    def rows(self, n_items: int) -> Float[Tensor, "I d"]:
        """The row each of items 0 .. n_items - 1 is scored with."""
        return self.embed(torch.arange(n_items, device=self.items.device))

    def laid_out(self) -> "SASRec":
        """A model that scores as this one does now, and whose rows only have to be looked up: this one itself."""
        return self

    def input_norm(self, known: Int[Tensor, " R"] | None = None) -> Float[Tensor, ""]:
        """The typical length of an input token: what prompts are rescaled to; `known`: items with a row, if at hand."""
        lengths: Tensor = self.items.detach()[self.has_row if known is None else known].norm(dim=-1)
        return lengths.mean() * math.sqrt(self.config.width)

    def _scaled(self, tokens: Int[Tensor, "B L"], embed: Embed | None) -> Float[Tensor, "B L d"]:
        """Item rows or BOS, scaled."""
        x = torch.where((tokens == BOS)[..., None], self.bos, (embed or self.embed)(tokens))
        return x * math.sqrt(self.config.width)

    def _prefixes(self) -> Iterable[Tensor | None]:
        """Keys and values in front of each block's own."""
        return [None] * len(self.blocks) if self.prefix is None else self.prefix()

    def _start(self, tokens: Tensor, prompt: Tensor | None, embed: Embed | None) -> tuple[Tensor, Tensor]:
        if prompt is None and self.prompt is not None:
            prompt = self.prompt().expand(len(tokens), -1, -1)
        x = inject(prompt, self.dropout(self.token_inputs(tokens, embed)))
        return x, visible(tokens, 0 if prompt is None else prompt.shape[1])


def grown(model: SASRec, n_rows: int) -> SASRec:
    """A copy with rows for items 0 .. n_rows - 1; the added ones are not yet initialised and read as the mean row."""
    if n_rows < model.n_rows:
        raise ValueError(f"a table of {model.n_rows} rows cannot be grown to {n_rows}")
    bigger = copy.deepcopy(model)  # small modules come along
    bigger.items = nn.Parameter(F.pad(model.items.detach(), (0, 0, 0, n_rows - model.n_rows)))
    bigger.has_row = F.pad(model.has_row, (0, n_rows - model.n_rows))
    return at_rest(bigger).train(model.training)


def at_rest(model: SASRec) -> SASRec:
    """The model itself, ready to score: no dropout, no gradients.

    PyTorch takes another path through some products where a weight requires a gradient, and it rounds differently; a
    model must score the same bits whether it was just trained or comes from a file.
    """
    return model.requires_grad_(False).eval()
