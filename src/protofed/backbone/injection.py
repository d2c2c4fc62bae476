"""Soft prompts in front of a history: [prompt ; E(x)]."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.slices.histories import PAD
from protofed.slices.lines import NOBODY


def inject(prompt: Float[Tensor, "B L_p d"] | None, tokens: Float[Tensor, "B L d"]) -> Float[Tensor, "B S d"]:
    """Prompt tokens in front of the history; they carry no position, so the history's positions do not shift."""
    return tokens if prompt is None else torch.cat([prompt, tokens], dim=1)


def visible(tokens: Int[Tensor, "B L"], prompt_length: int) -> Bool[Tensor, "B S S"]:
    """Who may look at whom: everybody at the prompts, a history token also at itself and what came before it.

    Padding is seen by nobody but itself (a row that sees nothing would be undefined).
    """
    total = prompt_length + tokens.shape[1]
    causal = torch.ones(total, total, dtype=torch.bool, device=tokens.device).tril()
    causal[:, :prompt_length] = True
    real = torch.nn.functional.pad(tokens != PAD, (prompt_length, 0), value=True)  # (B, S)
    itself = torch.eye(total, dtype=torch.bool, device=tokens.device)
    mask: Tensor = (causal & real[:, None, :]) | itself
    return mask


def visible_on_lines(windows: Int[Tensor, "R L"]) -> Bool[Tensor, "R L L"]:
    """Who may look at whom where windows share a line: a token at itself and at what came before it in its window."""
    length, device = windows.shape[1], windows.device
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    together = (windows[:, :, None] == windows[:, None, :]) & (windows != NOBODY)[:, None, :]
    mask: Tensor = (causal & together) | torch.eye(length, dtype=torch.bool, device=device)
    return mask


def rescale_like(prompt: Float[Tensor, "B L_p d"], norm: Float[Tensor, ""]) -> Float[Tensor, "B L_p d"]:
    """Prompt tokens brought to the length the backbone's own input tokens have."""
    length: Tensor = prompt.norm(dim=-1, keepdim=True)
    return prompt * (norm / length.clamp(min=1e-6))
