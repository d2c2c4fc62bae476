"""Algorithm 1, ClientUpdate: one local step for a whole stack of clients, in one tensor program."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.backbone.losses import LOSSES, window_losses
from protofed.backbone.sasrec import SASRec
from protofed.client.alignment import DIVERGENCES, alignment_loss, wasserstein_alignment
from protofed.client.codec import Codec
from protofed.client.own_rows import OwnRows, no_rows, own_embed
from protofed.client.prompts import PromptState, compose, mixture
from protofed.client.router import route
from protofed.client.steps import (
    AdamWState,
    adamw_start,
    adamw_step,
    clip_gradient,
    gradient,
    long_term_prox,
    long_term_step,
    relative_lambda,
    short_term_step,
    sparsity,
)
from protofed.slices.windows import Windows


@dataclass(frozen=True, slots=True)
class LocalRule:
    """How clients learn; the same public numbers on every device."""

    loss: Literal["softmax", "bce", "bpr"] = "softmax"
    top_m: int = 4
    temperature: float = 0.07  # tau
    eta_l: float = 5e-3  # step of the long prompt
    eta_s: float = 0.1  # step of the short prompt
    eta_r: float = 5e-3  # step of the client's own item rows; 0 leaves them where they start
    lambda_p: float = 1.0  # sparsity of the short prompt, in multiples of the median gradient entry
    gamma: float = 0.5  # weight of InfoNCE in the alignment
    tau_a: float = 0.1
    alignment: Literal["euclidean", "entropy", "wasserstein"] = "euclidean"
    inner_prox_steps: int = 0  # 0: Algorithm 1's explicit step; more: Eq. (3) by repetition
    by_row: bool = False  # soft-threshold whole tokens
    as_printed: bool = False  # plain gradient steps, absolute lambda_p, no rescaling: the literal mode
    max_grad_norm: float = 1.0  # of plain gradient steps
    weight_decay: float = 0.0
    use_long: bool = True
    use_short: bool = True
    use_prototypes: bool = True
    use_rows: bool = True
    align: bool = True
    bf16: bool = False  # the backbone's passes in bfloat16, on a GPU only


@dataclass(frozen=True, slots=True)
class Broadcast:
    """What every client holds alike: the frozen backbone and codec, and the newest prototypes."""

    backbone: SASRec
    codec: Codec
    v: Float[Tensor, "K d_z"]
    prompts: Float[Tensor, "K L_p d"]  # c_k = Dec(v_k)


@dataclass(frozen=True, slots=True)
class ClientState:
    """What a stack of clients changes while it learns."""

    prompts: PromptState
    moments: AdamWState  # of the long prompts
    rows: OwnRows  # clients numbered 0 .. U - 1
    row_moments: AdamWState


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a stack of clients learns from in a slice: its windows (users numbered 0 .. U - 1) and its query."""

    windows: Windows
    h: Float[Tensor, "U d_z"]  # unit vectors
    gate: Float[Tensor, " U"]  # alpha
    lambda_s: Float[Tensor, " U"]
    points: Float[Tensor, "U P d_z"] | None = None  # query embeddings that the Wasserstein form aligns along with z


@dataclass(frozen=True, slots=True)
class Brief:
    """The same events with little context: what prompts learn from where a whole history would leave them nothing."""

    windows: Windows  # users numbered as in the lesson
    negatives: Int[Tensor, "B n"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a local step tells about each client; it stays on the device."""

    loss: Float[Tensor, " U"]  # mean over the client's targets
    moved: Bool[Tensor, " U"]  # false where a gradient was not finite
    sparsity: Float[Tensor, " U"]  # zeros of the short prompt


def cooled(rule: LocalRule, step: int, steps: int) -> LocalRule:
    """The rule at one of a slice's local steps: rates of long prompts and own rows fall along a cosine, to near zero.

    The appendix names a cosine schedule for AdamW; the printed plain steps of the literal mode stay as they are.
    """
    if rule.as_printed:
        return rule
    share = 0.5 * (1 + math.cos(math.pi * step / steps))
    return replace(rule, eta_l=rule.eta_l * share, eta_r=rule.eta_r * share)


def fresh_state(prompts: PromptState, rows: OwnRows) -> ClientState:
    """Clients at the start of a slice: the optimiser begins anew."""
    return ClientState(prompts, adamw_start(prompts.long), rows, adamw_start(rows.rows[:, None]))


def composed(
    shared: Broadcast,
    prompts: PromptState,
    h: Float[Tensor, "U d_z"],
    gate: Float[Tensor, " U"],
    rule: LocalRule,
) -> Float[Tensor, "U L_p d"]:
    """The prompt that is injected for each client's query: lines 2 to 5 of Algorithm 1."""
    chosen, weights = route(h, shared.v, top_m=rule.top_m, temperature=rule.temperature)
    routed = mixture(shared.prompts, chosen, weights)
    used = PromptState(
        prompts.long if rule.use_long else torch.zeros_like(prompts.long),
        prompts.short if rule.use_short else torch.zeros_like(prompts.short),
    )
    norm = None if rule.as_printed else shared.backbone.input_norm()
    return compose(used, gate, routed if rule.use_prototypes else torch.zeros_like(routed), norm=norm)


def client_losses(
    shared: Broadcast,
    state: ClientState,
    lesson: Lesson,
    negatives: Int[Tensor, "W n"],
    rule: LocalRule,
) -> Float[Tensor, " U"]:
    """L_rec of each client: the mean over all its targets of the slice. First term of Eq. (14), eq:global_obj."""
    windows, prompts = lesson.windows, composed(shared, state.prompts, lesson.h, lesson.gate, rule)
    embed = own_embed(state.rows, windows.users, shared.backbone.embed)
    device = windows.tokens.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=rule.bf16 and device == "cuda"):
        sums, counts = window_losses(
            shared.backbone, windows, negatives, LOSSES[rule.loss], prompts[windows.users], embed
        )
    per_client = torch.zeros(len(lesson.h), device=sums.device)
    total = per_client.index_add(0, windows.users, sums.float())
    return total / per_client.index_add(0, windows.users, counts.float()).clamp(min=1)


def client_update(
    shared: Broadcast,
    state: ClientState,
    lesson: Lesson,
    negatives: Int[Tensor, "W n"],
    rule: LocalRule,
    brief: Brief | None = None,
) -> tuple[ClientState, StepReport]:
    """One local step of every client of the stack, up to the upload. Algorithm 1, alg:client.

    A step is one pass over all positions of the client's slice. A client whose gradient is not finite stays as it was.
    With `brief`, prompts follow the loss beside a short context and without own rows, own rows that of the lesson.
    """
    loss, (by_long, by_short, by_rows) = _gradients(shared, state, lesson, negatives, rule)
    if brief is not None:
        alone = replace(state, rows=no_rows(state.prompts.long.shape[-1], device=loss.device))
        told = replace(lesson, windows=brief.windows)
        brief_loss, (by_long, by_short, _) = _gradients(shared, alone, told, brief.negatives, rule)
        loss = torch.where(brief_loss.isfinite(), loss, brief_loss)
    _, able = _short_step(state, by_short, rule, loss.isfinite())
    state, moved = _long_step(shared, state, by_long, lesson, rule, able)
    state, _ = _short_step(state, by_short, rule, moved)  # all of a client's steps or none
    state = _row_step(state, by_rows, rule, moved)
    return state, StepReport(loss, moved, sparsity(state.prompts.short))


def learn_from_feedback(
    shared: Broadcast, state: ClientState, lesson: Lesson, negatives: Int[Tensor, "W n"], rule: LocalRule
) -> tuple[ClientState, Bool[Tensor, " U"]]:
    """The short prompts after one step on what was just observed, and who moved: the last lines of Algorithm 3.

    Called after the ranking was shown and the answer came, never before.
    """
    loss, (_, by_short, _) = _gradients(shared, state, lesson, negatives, rule)
    return _short_step(state, by_short, rule, loss.isfinite())


def _gradients(
    shared: Broadcast, state: ClientState, lesson: Lesson, negatives: Tensor, rule: LocalRule
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Each client's loss and its gradients by long prompt, short prompt and own rows; clients do not meet in them."""
    with torch.enable_grad():
        long, short = (x.detach().requires_grad_(True) for x in (state.prompts.long, state.prompts.short))
        rows = state.rows.rows.detach().requires_grad_(True)
        at = replace(state, prompts=PromptState(long, short), rows=replace(state.rows, rows=rows))
        loss = client_losses(shared, at, lesson, negatives, rule)
        # One sum over clients would let a non-finite loss of one reach nobody else: each depends on its own leaves.
        grads = torch.autograd.grad(loss.sum(), (long, short, rows), allow_unused=True, materialize_grads=True)
    return loss.detach(), (grads[0], grads[1], grads[2])


def _short_step(
    state: ClientState, grad: Tensor, rule: LocalRule, active: Tensor
) -> tuple[ClientState, Bool[Tensor, " U"]]:
    if not rule.use_short:
        return state, active
    grad = clip_gradient(grad, rule.max_grad_norm)
    lambda_p = rule.lambda_p if rule.as_printed else relative_lambda(grad, rule.lambda_p, by_row=rule.by_row)
    prompts, moved = short_term_step(
        state.prompts, grad, eta_s=rule.eta_s, lambda_p=lambda_p, by_row=rule.by_row, active=active
    )
    return replace(state, prompts=prompts), moved


def _long_step(
    shared: Broadcast,
    state: ClientState,
    grad: Tensor,
    lesson: Lesson,
    rule: LocalRule,
    active: Tensor,
) -> tuple[ClientState, Bool[Tensor, " U"]]:
    if not rule.use_long:
        return state, active
    strength = lesson.lambda_s if rule.align else torch.zeros_like(lesson.lambda_s)

    def pull(long: Tensor) -> Tensor:
        return alignment(shared, long, rule, lesson.points)

    if rule.inner_prox_steps:
        prompts, moved = long_term_prox(
            state.prompts,
            grad,
            pull,
            eta_l=rule.eta_l,
            lambda_s=strength,
            inner_prox_steps=rule.inner_prox_steps,
            active=active,
        )
        return replace(state, prompts=prompts), moved
    whole = grad + strength[:, None, None] * gradient(pull, state.prompts.long)
    if rule.as_printed:
        clipped = clip_gradient(whole, rule.max_grad_norm)
        prompts, moved = long_term_step(state.prompts, clipped, eta_l=rule.eta_l, active=active)
        return replace(state, prompts=prompts), moved
    long, moments, moved = adamw_step(
        state.prompts.long, whole, state.moments, lr=rule.eta_l, weight_decay=rule.weight_decay, active=active
    )
    return replace(state, prompts=replace(state.prompts, long=long), moments=moments), moved


def alignment(
    shared: Broadcast, long: Float[Tensor, "U L_p d"], rule: LocalRule, points: Float[Tensor, "U P d_z"] | None
) -> Float[Tensor, " U"]:
    """A(z_u, C) of each client in the form the rule asks for."""
    z = shared.codec.encode(long)
    if rule.alignment == "wasserstein":
        cloud = z[:, None] if points is None else torch.cat([z[:, None], points], dim=1)
        return wasserstein_alignment(cloud, shared.v, mass=torch.ones_like(cloud[..., 0]), iterations=30)
    divergence = DIVERGENCES[rule.alignment]
    return alignment_loss(z, shared.v, gamma=rule.gamma, tau_a=rule.tau_a, divergence=divergence)


def _row_step(state: ClientState, grad: Tensor, rule: LocalRule, active: Tensor) -> ClientState:
    """The client's own rows follow L_rec alone."""
    if not rule.eta_r or not len(state.rows):
        return state
    whose = active[state.rows.clients]
    rows, moments, _ = adamw_step(
        state.rows.rows[:, None], grad[:, None], state.row_moments, lr=rule.eta_r, weight_decay=0.0, active=whose
    )
    return replace(state, rows=replace(state.rows, rows=rows[:, 0]), row_moments=moments)
