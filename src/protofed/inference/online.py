"""Algorithm 3, OnlineInference: route the query, compose the prompt, rank with the frozen backbone."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.client.codec import unit
from protofed.client.drift import drift_gate
from protofed.client.model import Model
from protofed.client.own_rows import own_embed, with_just_met, with_own_scores
from protofed.client.prompts import PromptState, mixture
from protofed.client.state import DeviceState, choose_variants
from protofed.client.update import compose_prompt, route_queries
from protofed.slices.histories import Queries

Variant = tuple[bool, bool]  # whether prompts are used, and own rows


def online_inference(
    model: Model, state: DeviceState, queries: Queries, *, variant: Variant | None = None
) -> Float[Tensor, "B I"]:
    """A score for every available item, for each query; nothing is learned from it. Algorithm 3, alg:inference.

    A query's user is a place in the stack; one beyond its end, or not met, has no memory and does what the base users'
    verdict advises. A `variant` overrides every choice. The paper's listing returns before it learns from feedback, and
    learning earlier would use the answer it is asked for: ranking and `learn_from_feedback` are two calls here.
    """
    users, known, at = queries.users, *memory_places(state, queries.users)
    with_prompt, with_rows = choices(model, state, known, at, variant)
    owners = own_choices(state, users, variant)
    embed = own_embed(state.rows, users, model.backbone.embed, owners)
    hidden = model.backbone.last_hidden(queries.tokens, None, embed)
    if bool(with_prompt.any()):
        prompt = query_prompt(model, state, model.encoders.g(hidden), known, at)
        prompted = model.backbone.last_hidden(queries.tokens, prompt, embed)
        hidden = torch.where(with_prompt[:, None], prompted, hidden)
    scores = model.backbone.scores(hidden, queries.n_items)
    if model.just_met:
        scores = with_just_met(scores, hidden, state.rows, queries, model.just_met, with_rows)
    return with_own_scores(scores, hidden, state.rows, users, owners, queries)


def memory_places(state: DeviceState, users: Int[Tensor, " B"]) -> tuple[Bool[Tensor, " B"], Int[Tensor, " B"]]:
    """Who has a memory, and a valid place in the stack for everybody."""
    inside = users < len(state)
    at = torch.where(inside, users, torch.zeros_like(users))
    return inside & state.met[at], at


def choices(
    model: Model, state: DeviceState, known: Bool[Tensor, " B"], at: Int[Tensor, " B"], variant: Variant | None
) -> tuple[Bool[Tensor, " B"], Bool[Tensor, " B"]]:
    """Whether each query uses a prompt, and rows of its own."""
    if variant is not None:
        return torch.full_like(known, variant[0]), torch.full_like(known, variant[1])
    nobody = torch.zeros_like(model.prior)[None]
    prompt, rows = choose_variants(nobody, model.prior, model.rule.allowed)
    return torch.where(known, state.use_prompt[at], prompt), torch.where(known, state.use_rows[at], rows)


def own_choices(state: DeviceState, users: Int[Tensor, " B"], variant: Variant | None) -> Bool[Tensor, " n"]:
    """Who of the stack reads its own rows, long enough for every user of the queries."""
    chosen = state.use_rows if variant is None else torch.full_like(state.use_rows, variant[1])
    missing = int(users.max()) + 1 - len(chosen) if len(users) else 0
    return torch.nn.functional.pad(chosen, (0, missing)) if missing > 0 else chosen


def query_prompt(
    model: Model, state: DeviceState, h: Float[Tensor, "B d_z"], known: Bool[Tensor, " B"], at: Int[Tensor, " B"]
) -> Float[Tensor, "B L_p d"]:
    """The composed prompt of each query; a user without a memory starts at its routed prototypes, without drift."""
    routing = route_queries(model, h, model.rule)
    first = model.encoders.codec.decode(unit(mixture(model.v, routing.chosen, routing.weights)))
    here = known[:, None, None]
    prompts = PromptState(
        torch.where(here, state.prompts.long[at], first),
        torch.where(here, state.prompts.short[at], torch.zeros_like(first)),
    )
    drift = torch.where(known, state.drift.drift[at], torch.zeros_like(h[:, 0]))
    return compose_prompt(model, prompts, routing, drift_gate(drift, model.encoders.gate), model.rule)
