"""A user's newest events as worked examples: what came before, what was met and what was not, oldest first."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from protofed.privacy.draws import MASK, philox
from protofed.slices.histories import PAD


@dataclass(frozen=True, slots=True)
class Format:
    """How many demonstrations, how much history each sums up, and which items may stand as not met."""

    count: int  # m
    span: int  # items before the event
    pool: int  # negatives are among items 0 .. pool - 1
    key: tuple[int, int]  # of the draws


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """The m newest events of each history, the newest last. `before` holds PAD or BOS where there is no item."""

    before: Int[Tensor, "B m span"]
    items: Int[Tensor, "B m"]
    shown: Bool[Tensor, "B m"]  # False where a user has fewer events
    negatives: Int[Tensor, "B m"]
    negative_shown: Bool[Tensor, "B m"]  # False too where every draw had been met


def demonstrations(tokens: Int[Tensor, "B L"], form: Format) -> Demonstrations:
    """The demonstrations of a query whose history ends in these tokens; they are a function of the tokens alone.

    All of them are therefore older than the query, in training as in serving, and nothing in them knows the answer.
    """
    width = form.count + form.span
    newest = torch.nn.functional.pad(tokens, (max(0, width - tokens.shape[1]), 0), value=PAD)[:, -width:]
    runs = newest.unfold(1, form.span + 1, 1)  # (B, m, span + 1)
    before, items = runs[..., :-1], runs[..., -1]
    shown = items >= 0
    negatives, found = draw_other_items(tokens, runs, form)
    return Demonstrations(before, items, shown, negatives, shown & found)


def draw_other_items(
    tokens: Int[Tensor, "B L"], runs: Int[Tensor, "B m n"], form: Format
) -> tuple[Int[Tensor, "B m"], Bool[Tensor, "B m"]]:
    """The first of four draws that is not among the tokens, and whether there is one.

    A draw is a keyed hash of the event's item and the two before it: no batch, order or later slice can change it. The
    query's answer may be drawn like any item not yet met; leaving it out would give it away.
    """
    recent = torch.nn.functional.pad(runs, (max(0, 3 - runs.shape[-1]), 0), value=PAD)[..., -3:] & MASK
    words = philox((recent[..., 2], recent[..., 1], recent[..., 0], torch.zeros_like(recent[..., 0])), form.key)
    draws = torch.stack(words, dim=-1) % form.pool  # (B, m, 4)
    free = (draws[..., None] != tokens[:, None, None, :]).all(-1)
    first = free.int().argmax(-1, keepdim=True)
    return draws.gather(-1, first)[..., 0], free.any(-1)
