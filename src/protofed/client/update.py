"""Algorithm 1, ClientUpdate: one local step for a whole stack of clients, in one tensor program."""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.backbone.losses import LOSSES, window_losses
from protofed.client.alignment import DIVERGENCES, alignment_loss, wasserstein_alignment
from protofed.client.lessons import Lesson, draw_negatives
from protofed.client.model import LocalRule, Model
from protofed.client.own_rows import no_rows, own_embed
from protofed.client.prompts import PromptState, compose, mixture
from protofed.client.router import route
from protofed.client.state import DeviceState, Moments
from protofed.client.steps import (
    adamw_step,
    clip_gradient,
    gradient,
    long_term_prox,
    long_term_step,
    relative_lambda,
    short_term_step,
    sparsity,
)
from protofed.privacy.draws import Draws


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a local step tells about each client; it stays on the device."""

    loss: Float[Tensor, " U"]  # mean over the client's targets
    moved: Bool[Tensor, " U"]  # false where a gradient was not finite
    sparsity: Float[Tensor, " U"]  # zeros of the short prompt


def decay_rates(rule: LocalRule, step: int) -> LocalRule:
    """The rule at one of a slice's local steps: rates of long prompts and own rows fall along a cosine, to near zero.

    The appendix names a cosine schedule for AdamW; the printed plain steps of the literal mode stay as they are.
    """
    if rule.as_printed:
        return rule
    share = 0.5 * (1 + math.cos(math.pi * step / rule.steps))
    return replace(rule, eta_l=rule.eta_l * share, eta_r=rule.eta_r * share)


@dataclass(frozen=True, slots=True)
class Routing:
    """Which prototypes each query is routed to, and with which weights."""

    chosen: Int[Tensor, "U M"]
    weights: Float[Tensor, "U M"]


def route_queries(model: Model, h: Float[Tensor, "U d_z"], rule: LocalRule) -> Routing:
    """The routing of each query, made once for everything that follows from it."""
    return Routing(*route(h, model.v, top_m=rule.top_m, temperature=rule.temperature))


def compose_prompt(
    model: Model,
    prompts: PromptState,
    routing: Routing,
    gate: Float[Tensor, " U"],
    rule: LocalRule,
    norm: Float[Tensor, ""] | None = None,
) -> Float[Tensor, "U L_p d"]:
    """The prompt that is injected for each client's query: lines 2 to 5 of Algorithm 1.

    `norm` is the backbone's input norm, where it is at hand.
    """
    routed = mixture(model.prompts, routing.chosen, routing.weights)
    used = PromptState(
        prompts.long if rule.use_long else torch.zeros_like(prompts.long),
        prompts.short if rule.use_short else torch.zeros_like(prompts.short),
    )
    scale = None if rule.as_printed else model.backbone.input_norm() if norm is None else norm
    return compose(used, gate, routed if rule.use_prototypes else torch.zeros_like(routed), norm=scale)


def client_losses(
    model: Model, state: DeviceState, lesson: Lesson, negatives: Int[Tensor, "W n"], rule: LocalRule
) -> Float[Tensor, " U"]:
    """L_rec of each client: the mean over all its targets of the slice. First term of Eq. (14), eq:global_obj."""
    windows, routing = lesson.windows, route_queries(model, lesson.h, rule)
    prompts = compose_prompt(model, state.prompts, routing, lesson.gate, rule)
    embed = own_embed(state.rows, windows.users, model.backbone.embed)
    device = windows.tokens.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=rule.bf16 and device == "cuda"):
        sums, counts = window_losses(
            model.backbone, windows, negatives, LOSSES[rule.loss], prompts[windows.users], embed
        )
    per_client = torch.zeros(len(lesson.h), device=sums.device)
    total = per_client.index_add(0, windows.users, sums.float())
    return total / per_client.index_add(0, windows.users, counts.float()).clamp(min=1)


def client_update(
    model: Model,
    state: DeviceState,
    lesson: Lesson,
    negatives: Int[Tensor, "W n"],
    rule: LocalRule,
    brief_negatives: Int[Tensor, "B n"] | None = None,
) -> tuple[DeviceState, StepReport]:
    """One local step of every client of the stack, up to the upload. Algorithm 1, alg:client.

    A step is one pass over all positions of the client's slice. A client whose gradient is not finite stays as it was,
    and so does one that is not active. Where the lesson has a brief part, prompts follow the loss beside its short
    context and without own rows, own rows that of the lesson.
    """
    loss, (by_long, by_short, by_rows) = _gradients(model, state, lesson, negatives, rule)
    if lesson.brief is not None and brief_negatives is not None:
        alone = replace(state, rows=no_rows(state.taste.shape[1], device=loss.device))
        shorter = replace(lesson, windows=lesson.brief)
        brief_loss, (by_long, by_short, _) = _gradients(model, alone, shorter, brief_negatives, rule)
        loss = torch.where(brief_loss.isfinite(), loss, brief_loss)
    _, able = _short_step(state, by_short, rule, loss.isfinite() & state.active)
    state, moved = _long_step(model, state, by_long, lesson, rule, able)
    state, _ = _short_step(state, by_short, rule, moved)  # all of a client's steps or none
    state = _row_step(state, by_rows, rule, moved)
    return state, StepReport(loss, moved, sparsity(state.prompts.short))


def draw_step_negatives(
    model: Model, state: DeviceState, lesson: Lesson, draws: Draws, step: int
) -> tuple[Int[Tensor, "W n"], Int[Tensor, "B n"] | None]:
    """A local step's negatives for the lesson's windows, and for those with little context."""
    rule, at = model.rule, model.v.device
    both = [lesson.windows, *([lesson.brief] if lesson.brief is not None else [])]
    drawn = [draw_negatives(draws, state.users, each, rule.negatives, model.n_items, step).to(at) for each in both]
    return drawn[0], drawn[1] if len(drawn) > 1 else None


def learn_from_feedback(
    model: Model, state: DeviceState, lesson: Lesson, negatives: Int[Tensor, "W n"], rule: LocalRule
) -> tuple[DeviceState, Bool[Tensor, " U"]]:
    """The short prompts after one step on what was just observed, and who moved: the last lines of Algorithm 3.

    Called after the ranking was shown and the answer came, never before.
    """
    loss, (_, by_short, _) = _gradients(model, state, lesson, negatives, rule)
    return _short_step(state, by_short, rule, loss.isfinite())


def _gradients(
    model: Model, state: DeviceState, lesson: Lesson, negatives: Tensor, rule: LocalRule
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Each client's loss and its gradients by long prompt, short prompt and own rows; clients do not meet in them."""
    with torch.enable_grad():
        long, short = (x.detach().requires_grad_(True) for x in (state.prompts.long, state.prompts.short))
        rows = state.rows.rows.detach().requires_grad_(True)
        at = replace(state, prompts=PromptState(long, short), rows=replace(state.rows, rows=rows))
        loss = client_losses(model, at, lesson, negatives, rule)
        # One sum over clients would let a non-finite loss of one reach nobody else: each depends on its own leaves.
        grads = torch.autograd.grad(loss.sum(), (long, short, rows), allow_unused=True, materialize_grads=True)
    return loss.detach(), (grads[0], grads[1], grads[2])


def _short_step(
    state: DeviceState, grad: Tensor, rule: LocalRule, active: Tensor
) -> tuple[DeviceState, Bool[Tensor, " U"]]:
    if not rule.use_short:
        return state, active
    grad = clip_gradient(grad, rule.max_grad_norm)
    lambda_p = rule.lambda_p if rule.as_printed else relative_lambda(grad, rule.lambda_p, by_row=rule.by_row)
    prompts, moved = short_term_step(
        state.prompts, grad, eta_s=rule.eta_s, lambda_p=lambda_p, by_row=rule.by_row, active=active
    )
    return replace(state, prompts=prompts), moved


def _long_step(
    model: Model, state: DeviceState, grad: Tensor, lesson: Lesson, rule: LocalRule, active: Tensor
) -> tuple[DeviceState, Bool[Tensor, " U"]]:
    if not rule.use_long:
        return state, active
    strength = lesson.lambda_s if rule.align else torch.zeros_like(lesson.lambda_s)

    def pull(long: Tensor) -> Tensor:
        return alignment(model, long, rule, lesson.points)

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
    moments = _moments(state)
    long, after, moved = adamw_step(
        state.prompts.long, whole, moments.long, lr=rule.eta_l, weight_decay=rule.weight_decay, active=active
    )
    return replace(state, prompts=replace(state.prompts, long=long), moments=replace(moments, long=after)), moved


def _moments(state: DeviceState) -> Moments:
    assert state.moments is not None, "a local step outside a slice; call begin_slice first"
    return state.moments


def alignment(
    model: Model, long: Float[Tensor, "U L_p d"], rule: LocalRule, points: Float[Tensor, "U P d_z"] | None
) -> Float[Tensor, " U"]:
    """A(z_u, C) of each client in the form the rule asks for."""
    z = model.encoders.codec.encode(long)
    if rule.alignment == "wasserstein":
        cloud = z[:, None] if points is None else torch.cat([z[:, None], points], dim=1)
        return wasserstein_alignment(cloud, model.v, mass=torch.ones_like(cloud[..., 0]), iterations=30)
    divergence = DIVERGENCES[rule.alignment]
    return alignment_loss(z, model.v, gamma=rule.gamma, tau_a=rule.tau_a, divergence=divergence)


def _row_step(state: DeviceState, grad: Tensor, rule: LocalRule, active: Tensor) -> DeviceState:
    """The client's own rows follow L_rec alone."""
    if not rule.eta_r or not len(state.rows):
        return state
    whose, moments = active[state.rows.clients], _moments(state)
    rows, after, _ = adamw_step(
        state.rows.rows[:, None], grad[:, None], moments.rows, lr=rule.eta_r, weight_decay=0.0, active=whose
    )
    return replace(state, rows=replace(state.rows, rows=rows[:, 0]), moments=replace(moments, rows=after))
