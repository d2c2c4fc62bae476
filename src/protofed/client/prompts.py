"""The memory of a client: a slow and a fast soft prompt, and the prompt composed of them and of prototypes."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.backbone.injection import rescale_like
from protofed.client.codec import Codec, unit


@dataclass(frozen=True, slots=True)
class PromptState:
    """The prompts of a stack of clients; one device is U = 1."""

    long: Float[Tensor, "U L_p d"]
    short: Float[Tensor, "U L_p d"]


def mixture(
    rows: Float[Tensor, "K *row"], chosen: Int[Tensor, "U M"], weights: Float[Tensor, "U M"]
) -> Float[Tensor, "U *row"]:
    """Each client's weighted sum of its chosen rows: vectors v_k, or prompts c_k that are decoded once for all."""
    spread = torch.zeros(len(chosen), len(rows), dtype=rows.dtype, device=rows.device)
    spread = spread.scatter(1, chosen, weights.to(rows.dtype))  # (U, K)
    return (spread @ rows.flatten(1)).reshape(len(chosen), *rows.shape[1:])


def compose(
    state: PromptState,
    gate: Float[Tensor, " U"],
    routed: Float[Tensor, "U L_p d"],
    *,
    norm: Float[Tensor, ""] | None = None,
) -> Float[Tensor, "U L_p d"]:
    """The injected prompt: long, plus gate times short, plus the mixture of prototypes. Eq. (1), eq:compose.

    Where a norm is given (the backbone's input norm), tokens are rescaled to it: an aligned long prompt counts its
    prototype twice, and the scale of a prompt that a LayerNorm reads should not matter. The paper does not rescale.
    """
    prompt = state.long + gate[:, None, None] * state.short + routed
    return prompt if norm is None else rescale_like(prompt, norm)


def first_contact(
    codec: Codec,
    v: Float[Tensor, "K d_z"],
    chosen: Int[Tensor, "U M"],
    weights: Float[Tensor, "U M"],
    noise: Float[Tensor, "U L_p d"],
    *,
    noise_std: float = 0.02,
) -> PromptState:
    """The prompts of clients met for the first time: near the prototypes their query is routed to, short one zero.

    `noise` is standard normal. The paper gives no initialisation; a common one would put all clients in one cluster.
    """
    long = codec.decode(unit(mixture(v, chosen, weights))) + noise_std * noise
    return PromptState(long, torch.zeros_like(long))


def carry_over(state: PromptState, sessions: Int[Tensor, " U"], *, carry: float = 0.5) -> PromptState:
    """The short prompt fades by `carry` with each of the sessions that begin; 0 forgets, as the paper's text suggests.

    `sessions` counts the session starts since the last call; a client with none is left as it is.
    """
    fade = torch.as_tensor(carry, dtype=state.short.dtype, device=state.short.device) ** sessions
    return replace(state, short=state.short * fade[:, None, None])
