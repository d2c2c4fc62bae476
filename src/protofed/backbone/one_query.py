"""The backbone for one query at a time: its weights laid out flat, a third of the calls, the same numbers to rounding.

A stack of queries is computed by SASRec itself. Here nothing is padded, nothing trains, and no module is called: what
one device needs, and what a graph for other runtimes is made from.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.backbone.sasrec import Block, SASRec


@dataclass(frozen=True, slots=True)
class FlatBlock:
    """One block's weights; query, key and value are one product."""

    heads: int
    norm_attention: tuple[Tensor, Tensor]
    qkv: tuple[Float[Tensor, "d3 d"], Float[Tensor, " d3"]]
    output: tuple[Tensor, Tensor]
    norm_ffn: tuple[Tensor, Tensor]
    widen: tuple[Tensor, Tensor]
    narrow: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class FlatBackbone:
    """All that one query needs of a backbone, for a catalogue of I items."""

    rows: Float[Tensor, "I d"]  # the mean row where an item has none
    lacking: Bool[Tensor, " I"] | None  # which items have none; None: all have one
    mean_row: Float[Tensor, " d"]
    bos: Float[Tensor, " d"]
    positions: Float[Tensor, "L d"]
    blocks: tuple[FlatBlock, ...]
    norm: tuple[Tensor, Tensor]
    masks: Bool[Tensor, "S S"]  # of the longest history behind the longest prompt

    @property
    def length(self) -> int:
        """L: a history has at most so many tokens, BOS among them."""
        return len(self.positions)


def can_lay_out(model: SASRec) -> bool:
    """Whether the backbone is the plain one: nothing attached that a flat form would leave out."""
    plain = all(isinstance(getattr(block, at), torch.nn.Identity) for block in model.blocks for at in AFTER)
    return type(model) is SASRec and model.prompt is None and model.prefix is None and plain


AFTER = ("after_attention", "after_ffn")


@torch.no_grad()
def lay_out(model: SASRec, n_items: int, prompt_length: int) -> FlatBackbone:
    """The flat form of a backbone at rest."""
    known = model.tells_apart(torch.arange(n_items, device=model.items.device))
    return FlatBackbone(
        rows=model.rows(n_items).detach().contiguous(),
        lacking=None if bool(known.all()) else ~known,
        mean_row=model.mean_row,
        bos=model.bos.detach(),
        positions=model.positions.detach(),
        blocks=tuple(_flat(block) for block in model.blocks if isinstance(block, Block)),
        norm=_pair(model.norm),
        masks=_mask(len(model.positions), prompt_length).to(model.items.device),
    )


def _flat(block: Block) -> FlatBlock:
    parts = (block.query, block.key, block.value)
    weight, bias = (torch.cat([getattr(part, name) for part in parts]).detach() for name in ("weight", "bias"))
    pairs = (_pair(part) for part in (block.output, block.norm_ffn, block.widen, block.narrow))
    return FlatBlock(block.heads, _pair(block.norm_attention), (weight, bias), *pairs)


def _pair(layer: torch.nn.Module) -> tuple[Tensor, Tensor]:
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    return weight.detach(), bias.detach()


def _mask(length: int, prompt_length: int) -> Bool[Tensor, "S S"]:
    """Everybody sees the prompts, a history token also itself and what came before it."""
    mask = torch.ones(prompt_length + length, prompt_length + length, dtype=torch.bool).tril()
    mask[:, :prompt_length] = True
    return mask


def embed_history(
    flat: FlatBackbone, items: Int[Tensor, " n"], own_items: Int[Tensor, " m"], own_rows: Float[Tensor, "m d"]
) -> Float[Tensor, "t d"]:
    """The input tokens of a history: BOS and items, or the newest items where they are more; own rows where there are.

    Own items ascend.
    """
    newest = items[-flat.length :]
    x = flat.rows[newest]
    if len(own_items):
        place = torch.searchsorted(own_items, newest).clamp_(max=len(own_items) - 1)
        x = torch.where((own_items[place] == newest)[:, None], own_rows[place], x)
    if len(newest) < flat.length:
        x = torch.cat([flat.bos[None], x])
    return x.mul(math.sqrt(x.shape[1])).add_(flat.positions[-len(x) :])


def last_state(
    flat: FlatBackbone, history: Float[Tensor, "t d"], prompt: Float[Tensor, "p d"] | None = None
) -> Float[Tensor, " d"]:
    """The hidden state that the next item is asked with."""
    longest = len(flat.masks) - flat.length
    first = longest if prompt is None else longest - len(prompt)
    x = history if prompt is None else torch.cat([prompt, history])
    for place, block in enumerate(flat.blocks):
        last = place == len(flat.blocks) - 1
        mask = None if last else flat.masks[first : first + len(x), first : first + len(x)]
        x = _through(block, x, mask, last=last)
    return F.layer_norm(x, x.shape[1:], *flat.norm)[0]


def _through(block: FlatBlock, x: Float[Tensor, "s d"], mask: Tensor | None, *, last: bool) -> Float[Tensor, "q d"]:
    """One block over all tokens, or for the newest token alone, which sees all."""
    width = x.shape[1:]
    qkv = F.linear(F.layer_norm(x, width, *block.norm_attention), *block.qkv)
    query, key, value = qkv.view(len(x), 3, block.heads, -1).permute(1, 2, 0, 3)  # (heads, s, d / heads)
    if last:
        query, x = query[:, -1:], x[-1:]
    mixed = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask)[0]
    x = x + F.linear(mixed.transpose(0, 1).reshape(len(x), -1), *block.output)
    inner = F.gelu(F.linear(F.layer_norm(x, width, *block.norm_ffn), *block.widen))
    return x + F.linear(inner, *block.narrow)


def score_items(flat: FlatBackbone, hidden: Float[Tensor, " d"]) -> Float[Tensor, " I"]:
    """Every item's score; items without a row tie."""
    scores = flat.rows @ hidden
    return scores if flat.lacking is None else torch.where(flat.lacking, flat.mean_row @ hidden, scores)
