"""One step on a stack of prompts: sparse and proximal for the short ones, plain, proximal or AdamW for the long ones.

Every step also says which clients it moved: one whose gradient or result is not finite stays exactly as it was.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.client.prompts import PromptState

ClientLoss = Callable[[Tensor], Tensor]  # prompts (U, L_p, d) -> (U,)


def soft_threshold(x: Float[Tensor, "*n"], threshold: float | Tensor) -> Float[Tensor, "*n"]:
    """Values pulled towards zero by the threshold, and zero within it: the proximal map of threshold * ||x||_1."""
    return x.sign() * (x.abs() - threshold).clamp(min=0)


def group_soft_threshold(x: Float[Tensor, "U L_p d"], threshold: float | Tensor) -> Float[Tensor, "U L_p d"]:
    """The same for whole tokens: each row shortened by the threshold, and zero within it."""
    length: Tensor = x.norm(dim=-1, keepdim=True)
    return x * soft_threshold(length, threshold) / length.clamp(min=1e-12)


def relative_lambda(grad: Float[Tensor, "U L_p d"], ratio: float, *, by_row: bool = False) -> Float[Tensor, " U"]:
    """lambda_p as a multiple of each client's own median gradient entry (or row length, for whole tokens).

    The printed 1e-4 to 1e-3 lies below nearly all entries and leaves every coordinate alive.
    """
    size = grad.norm(dim=-1) if by_row else grad.abs().flatten(1)
    middle = size.sort(-1).values[:, (size.shape[-1] - 1) // 2]  # `median` has no reproducible CUDA kernel
    return ratio * middle


def sparsity(x: Float[Tensor, "U L_p d"]) -> Float[Tensor, " U"]:
    """Share of each client's coordinates that are exactly zero."""
    return (x == 0).flatten(1).float().mean(-1)


def clip_gradient(grad: Float[Tensor, "U L_p d"], max_norm: float) -> Float[Tensor, "U L_p d"]:
    """Each client's gradient shortened to the norm where it is longer."""
    length: Tensor = grad.flatten(1).norm(dim=-1)
    return grad * (max_norm / length.clamp(min=max_norm))[:, None, None]


def short_term_step(
    state: PromptState,
    grad: Float[Tensor, "U L_p d"],
    *,
    eta_s: float,
    lambda_p: float | Float[Tensor, " U"],
    by_row: bool = False,
    active: Bool[Tensor, " U"] | None = None,
) -> tuple[PromptState, Bool[Tensor, " U"]]:
    """One sparse proximal step on the short-term prompts, and which clients it moved. Eq. (2), eq:short_update.

    lambda_p is one number (as printed) or one for each client (`relative_lambda`); `by_row` drops whole tokens.
    """
    threshold = eta_s * torch.as_tensor(lambda_p, dtype=grad.dtype, device=grad.device).reshape(-1, 1, 1)
    shrink = group_soft_threshold if by_row else soft_threshold
    short, moved = _settled(state.short, shrink(state.short - eta_s * grad, threshold), grad, active)
    return replace(state, short=short), moved


def long_term_step(
    state: PromptState,
    grad: Float[Tensor, "U L_p d"],
    *,
    eta_l: float,
    active: Bool[Tensor, " U"] | None = None,
) -> tuple[PromptState, Bool[Tensor, " U"]]:
    """One gradient step of L_rec + lambda_s A on the long-term prompts, and which clients it moved: Algorithm 1.

    Eq. (3) is another update with no closed form: see `long_term_prox`.
    """
    long, moved = _settled(state.long, state.long - eta_l * grad, grad, active)
    return replace(state, long=long), moved


def long_term_prox(
    state: PromptState,
    rec_grad: Float[Tensor, "U L_p d"],
    alignment: ClientLoss,
    *,
    eta_l: float,
    lambda_s: Float[Tensor, " U"],
    inner_prox_steps: int = 5,
    active: Bool[Tensor, " U"] | None = None,
) -> tuple[PromptState, Bool[Tensor, " U"]]:
    """The minimiser of linearised L_rec + trust region + lambda_s A, and who moved. Eq. (3), eq:long_update.

    It solves the optimality condition p = p0 - eta_l (G + lambda_s grad A(p)) by repetition, which contracts while
    eta_l * lambda_s times the curvature of A is below 1; a single repetition is Algorithm 1's step.
    """
    long = state.long
    for _ in range(inner_prox_steps):
        pull = gradient(alignment, long)
        long = state.long - eta_l * (rec_grad + lambda_s[:, None, None] * pull)
    long, moved = _settled(state.long, long, rec_grad, active)
    return replace(state, long=long), moved


def gradient(loss: ClientLoss, prompts: Float[Tensor, "U L_p d"]) -> Float[Tensor, "U L_p d"]:
    """Each client's gradient of its own loss; clients do not meet in it."""
    with torch.enable_grad():
        at = prompts.detach().requires_grad_(True)
        return torch.autograd.grad(loss(at).sum(), at)[0]


@dataclass(frozen=True, slots=True)
class AdamWState:
    """Moments and step counts of AdamW, one for each client."""

    first: Float[Tensor, "U L_p d"]
    second: Float[Tensor, "U L_p d"]
    steps: Int[Tensor, " U"]


def adamw_start(prompts: Float[Tensor, "U L_p d"]) -> AdamWState:
    """The state before the first step; its moments may be written in place, so they are two tensors."""
    steps = torch.zeros(len(prompts), dtype=torch.long, device=prompts.device)
    return AdamWState(torch.zeros_like(prompts), torch.zeros_like(prompts), steps)


def adamw_step(
    prompts: Float[Tensor, "U L_p d"],
    grad: Float[Tensor, "U L_p d"],
    state: AdamWState,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    active: Bool[Tensor, " U"] | None = None,
) -> tuple[Float[Tensor, "U L_p d"], AdamWState, Bool[Tensor, " U"]]:
    """What torch.optim.AdamW would do to each client on its own; a client that is not moved keeps its moments too."""
    steps = state.steps + 1
    first = betas[0] * state.first + (1 - betas[0]) * grad
    second = betas[1] * state.second + (1 - betas[1]) * grad.square()
    unbias = [(1 - beta ** steps.double()).to(grad.dtype)[:, None, None] for beta in betas]  # 1 - 0.999 needs 64 bits
    direction = (first / unbias[0]) / ((second / unbias[1]).sqrt() + eps)
    new, moved = _settled(prompts, prompts * (1 - lr * weight_decay) - lr * direction, second, active)
    here = moved[:, None, None]
    after = AdamWState(
        torch.where(here, first, state.first),
        torch.where(here, second, state.second),
        torch.where(moved, steps, state.steps),
    )
    return new, after, moved


def _settled(
    old: Tensor, new: Tensor, cause: Tensor, active: Bool[Tensor, " U"] | None
) -> tuple[Tensor, Bool[Tensor, " U"]]:
    """New values of active clients whose gradient (or moments) and result are finite, old ones of others; who moved."""
    fine = (cause.isfinite() & new.isfinite()).flatten(1).all(-1)
    moved = fine if active is None else fine & active
    return torch.where(moved[:, None, None], new, old), moved
