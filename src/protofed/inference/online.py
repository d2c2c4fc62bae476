"""Algorithm 3, OnlineInference: route the query, compose the prompt, rank with the frozen backbone."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.client.codec import QueryEncoder, unit
from protofed.client.drift import Gate, drift_gate
from protofed.client.own_rows import OwnRows, own_embed, with_just_met, with_own_scores
from protofed.client.prompts import PromptState, mixture
from protofed.client.router import route
from protofed.client.update import Broadcast, LocalRule, composed
from protofed.slices.histories import Queries


@dataclass(frozen=True, slots=True)
class Devices:
    """The memory of users 0 .. N - 1 as a ranking needs it; a user beyond N, or not met, has none."""

    prompts: PromptState
    drift: Float[Tensor, " N"]  # length of the last movement of each user's queries
    met: Bool[Tensor, " N"]
    rows: OwnRows
    use_prompt: Bool[Tensor, " N"]
    use_rows: Bool[Tensor, " N"]
    newcomers_use_prompt: bool  # what a user without a memory does
    newcomers_use_rows: bool = True  # the same for items it has just met
    just_met: float = 0.0  # what having met an item adds before its row is learned; 0: nothing


def online_inference(
    shared: Broadcast, g: QueryEncoder, gate: Gate, rule: LocalRule, devices: Devices, queries: Queries
) -> Float[Tensor, "B I"]:
    """A score for every available item, for each query; nothing is learned from it. Algorithm 3, alg:inference.

    The paper's listing returns before it learns from feedback, and learning earlier would use the answer it is asked
    for: ranking and `learn_from_feedback` are two calls here.
    """
    users, known, at = queries.users, *places(devices, queries.users)
    embed = own_embed(devices.rows, users, shared.backbone.embed, _by_user(devices.use_rows, users))
    hidden = shared.backbone.last_hidden(queries.tokens, None, embed)
    prompted = torch.where(known, devices.use_prompt[at], devices.newcomers_use_prompt)
    if bool(prompted.any()):
        prompt = query_prompt(shared, g(hidden), gate, rule, devices, known, at)
        with_prompt = shared.backbone.last_hidden(queries.tokens, prompt, embed)
        hidden = torch.where(prompted[:, None], with_prompt, hidden)
    scores = shared.backbone.scores(hidden, queries.n_items)
    if devices.just_met:
        counting = torch.where(known, devices.use_rows[at], devices.newcomers_use_rows)
        scores = with_just_met(scores, hidden, devices.rows, queries, devices.just_met, counting)
    return with_own_scores(scores, hidden, devices.rows, users, _by_user(devices.use_rows, users), queries)


def places(devices: Devices, users: Int[Tensor, " B"]) -> tuple[Bool[Tensor, " B"], Int[Tensor, " B"]]:
    """Who has a memory, and a valid place in it for everybody."""
    inside = users < len(devices.met)
    at = torch.where(inside, users, torch.zeros_like(users))
    return inside & devices.met[at], at


def _by_user(chosen: Bool[Tensor, " N"], users: Int[Tensor, " B"]) -> Bool[Tensor, " n"]:
    """The choice by user id, long enough for every user of the batch."""
    missing = int(users.max()) + 1 - len(chosen) if len(users) else 0
    return torch.nn.functional.pad(chosen, (0, missing)) if missing > 0 else chosen


def query_prompt(
    shared: Broadcast,
    h: Float[Tensor, "B d_z"],
    gate: Gate,
    rule: LocalRule,
    devices: Devices,
    known: Bool[Tensor, " B"],
    at: Int[Tensor, " B"],
) -> Float[Tensor, "B L_p d"]:
    """The composed prompt of each query; a user without a memory starts at its routed prototypes, without drift."""
    chosen, weights = route(h, shared.v, top_m=rule.top_m, temperature=rule.temperature)
    first = shared.codec.decode(unit(mixture(shared.v, chosen, weights)))
    here = known[:, None, None]
    prompts = PromptState(
        torch.where(here, devices.prompts.long[at], first),
        torch.where(here, devices.prompts.short[at], torch.zeros_like(first)),
    )
    drift = torch.where(known, devices.drift[at], torch.zeros_like(h[:, 0]))
    return composed(shared, prompts, h, drift_gate(drift, gate), rule)


def forced(devices: Devices, *, prompt: bool, rows: bool) -> Devices:
    """The same devices, all using their prompt (or not) and their own rows (or not)."""
    everybody = torch.ones_like(devices.met)
    return replace(
        devices,
        use_prompt=everybody & prompt,
        use_rows=everybody & rows,
        newcomers_use_prompt=prompt,
        newcomers_use_rows=rows,
    )
