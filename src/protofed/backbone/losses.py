"""Recommendation losses at all targets of a window at once; negatives are shared inside a window."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor

from protofed.backbone.extras import Streamed, uniform_items
from protofed.backbone.sasrec import Embed, SASRec, one_hot
from protofed.slices.windows import NO_TARGET, Windows

ElementLoss = Callable[[Tensor, Tensor], Tensor]  # positive (B, P), negatives (B, P, n; -inf where void) -> (B, P)


def sampled_softmax(positive: Float[Tensor, "B P"], negatives: Float[Tensor, "B P n"]) -> Float[Tensor, "B P"]:
    """Cross-entropy of the positive against itself and its negatives."""
    return torch.logsumexp(torch.cat([positive[..., None], negatives], dim=-1), dim=-1) - positive


def bce(positive: Float[Tensor, "B P"], negatives: Float[Tensor, "B P n"]) -> Float[Tensor, "B P"]:
    """Pointwise binary cross-entropy; negatives weigh as much as the positive in all. Eq. (12)."""
    return F.softplus(-positive) + _mean_of_finite(F.softplus(negatives), negatives)


def bpr(positive: Float[Tensor, "B P"], negatives: Float[Tensor, "B P n"]) -> Float[Tensor, "B P"]:
    """Pairwise: the positive above each negative. Eq. (13)."""
    return _mean_of_finite(F.softplus(negatives - positive[..., None]), negatives)


def _mean_of_finite(values: Tensor, negatives: Tensor) -> Tensor:
    valid = negatives != -torch.inf
    return (values * valid).sum(-1) / valid.sum(-1).clamp(min=1)


LOSSES: Mapping[str, ElementLoss] = {"softmax": sampled_softmax, "bce": bce, "bpr": bpr}


def draw_negatives(n_windows: int, n: int, n_items: int, rng: Generator) -> Int[Tensor, "W n"]:
    """`uniform_items`, one draw after the other."""
    return uniform_items(Streamed(rng), n_windows, n, n_items)


def hidden_at(hidden: Float[Tensor, "W L d"], sources: Int[Tensor, "W P"]) -> Float[Tensor, "W P d"]:
    """The hidden states at these places of each window."""
    return one_hot(sources, hidden.shape[1], hidden) @ hidden


def states_at_sources(
    model: SASRec, windows: Windows, prompt: Float[Tensor, "W L_p d"] | None = None, embed: Embed | None = None
) -> Float[Tensor, "W P d"]:
    """The hidden states that the targets are predicted from, whether or not windows share lines."""
    lines = windows.lines
    if lines is None or prompt is not None or not model.reads_lines:
        return hidden_at(model.hidden(windows.tokens, prompt, embed), windows.sources)
    return hidden_at(model.hidden_on_lines(lines, embed), windows.sources + lines.shift[:, None])


def last_states(model: SASRec, windows: Windows) -> Float[Tensor, "W d"]:
    """The hidden state at each window's newest token, whether or not windows share lines."""
    lines, last = windows.lines, windows.tokens.shape[1] - 1
    if lines is None or not model.reads_lines:
        return model.last_hidden(windows.tokens)
    return hidden_at(model.hidden_on_lines(lines), (lines.shift + last)[:, None])[:, 0]


def look_up_together(
    look_up: Embed, tokens: Int[Tensor, "R L"], targets: Int[Tensor, "W P"], negatives: Int[Tensor, "W n"]
) -> tuple[Float[Tensor, "R L d"], Float[Tensor, "W P d"], Float[Tensor, "W n d"]]:
    """The rows of all three from one look-up, whose gradient is the dear part."""
    asked = (tokens, targets, negatives)
    if len(tokens) == len(targets):
        read, wanted, others = look_up(torch.cat(asked, dim=1)).split([items.shape[1] for items in asked], dim=1)
        return read, wanted, others
    rows = look_up(torch.cat([items.flatten() for items in asked])).split([items.numel() for items in asked])
    read, wanted, others = (found.unflatten(0, items.shape) for found, items in zip(rows, asked, strict=True))
    return read, wanted, others


def window_losses(
    model: SASRec,
    windows: Windows,
    negatives: Int[Tensor, "W n"],
    element_loss: ElementLoss,
    prompt: Float[Tensor, "W L_p d"] | None = None,
    embed: Embed | None = None,
) -> tuple[Float[Tensor, " W"], Int[Tensor, " W"]]:
    """Per window the summed loss of its targets and how many there are; a negative that is the target is void."""
    shared = windows.lines if prompt is None and embed is None and model.reads_lines else None
    tokens, look_up = windows.tokens if shared is None else shared.tokens, embed or model.embed
    read, wanted, others = look_up_together(look_up, tokens, windows.targets, negatives)

    def looked_up(items: Tensor) -> Tensor:  # a backbone may read other tokens than it is given
        return read if items is tokens else look_up(items)

    at_source = states_at_sources(model, replace(windows, lines=shared), prompt, looked_up)  # (W, P, d)
    positive = (at_source * wanted).sum(-1)
    against = at_source @ others.transpose(1, 2)  # (W, P, n)
    against = against.masked_fill(negatives[:, None, :] == windows.targets[..., None], -torch.inf)
    real = windows.targets != NO_TARGET
    return (element_loss(positive, against) * real).sum(-1), real.sum(-1)
