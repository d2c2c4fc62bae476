"""Recommendation losses at all targets of a window at once; negatives are shared inside a window."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor

from protofed.backbone.extras import Streamed, uniform_items
from protofed.backbone.sasrec import Embed, SASRec
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
    """The hidden states at these places of each window.

    A product with zeros and ones: exact, and its gradient is one too, where that of `gather` has to be sorted first on
    a GPU to come out the same twice.
    """
    places = torch.arange(hidden.shape[1], device=hidden.device)
    return (sources[..., None] == places).to(hidden.dtype) @ hidden


def window_losses(
    model: SASRec,
    windows: Windows,
    negatives: Int[Tensor, "W n"],
    element_loss: ElementLoss,
    prompt: Float[Tensor, "W L_p d"] | None = None,
    embed: Embed | None = None,
) -> tuple[Float[Tensor, " W"], Int[Tensor, " W"]]:
    """Per window the summed loss of its targets and how many there are; a negative that is the target is void."""
    look_up, asked = embed or model.embed, (windows.tokens, windows.targets, negatives)
    rows = look_up(torch.cat(asked, dim=1))  # at once: the gradient of a look-up is the dear part
    read, wanted, others = rows.split([items.shape[1] for items in asked], dim=1)

    def looked_up(items: Tensor) -> Tensor:  # a backbone may read other tokens than it is given
        return read if items is windows.tokens else look_up(items)

    hidden = model.hidden(windows.tokens, prompt, looked_up)  # (W, L, d)
    at_source = hidden_at(hidden, windows.sources)  # (W, P, d)
    positive = (at_source * wanted).sum(-1)
    against = at_source @ others.transpose(1, 2)  # (W, P, n)
    against = against.masked_fill(negatives[:, None, :] == windows.targets[..., None], -torch.inf)
    real = windows.targets != NO_TARGET
    return (element_loss(positive, against) * real).sum(-1), real.sum(-1)
