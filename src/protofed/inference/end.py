"""A slice ends on the devices: each uses its prompt, its own rows, both or neither, as its own validation events say.

Prompts over-fit clients with few events. The choice is made on the device, from the device's own events: it costs no ε.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.client.begin import add_met_rows
from protofed.client.memory import Memory, as_histories
from protofed.client.model import VARIANTS, Model
from protofed.client.state import DeviceState, choose_variants, remember
from protofed.inference.head import FittedHead, scores_under
from protofed.inference.online import online_inference
from protofed.slices.candidates import NO_CANDIDATE
from protofed.slices.histories import Queries, moved, trimmed
from protofed.slices.stream import TimeSlice

FADING = 0.5  # what older slices' evidence still counts, per slice
CHUNK = 512


@dataclass(frozen=True, slots=True)
class Question:
    """Validation events as ranking questions: who asks, the answer, and the items it competes with."""

    queries: Queries  # users are places in the stack
    positives: Int[Tensor, " B"]
    negatives: Int[Tensor, "B n"]


def end_slice(
    model: Model,
    state: DeviceState,
    validation: Iterable[Question],
    events: Memory,
    head: FittedHead | None = None,
) -> DeviceState:
    """The devices after a slice: what each uses from now on, then its validation events remembered, with rows for them.

    In this order: the choice must not be made on rows that its own questions gave rise to. Only devices that took part
    remember; `events` holds nothing for the others. Devices that answer under a head choose under it.
    """
    rule = model.rule
    if sum(rule.allowed) > 1:
        losses, users = variant_losses(model, state, validation, head)
        state = replace(state, losses=record_losses(state.losses, losses, users))
    use_prompt, use_rows = choose_variants(state.losses, model.prior, rule.allowed)
    state = remember(replace(state, use_prompt=use_prompt, use_rows=use_rows, moments=None), events)
    state = add_met_rows(model, state, as_histories(state.memory, row_order=rule.row_order), state.active)
    return replace(state, active=torch.zeros_like(state.active))


@torch.no_grad()
def variant_losses(
    model: Model, state: DeviceState, validation: Iterable[Question], head: FittedHead | None = None
) -> tuple[Float[Tensor, "B V"], Int[Tensor, " B"]]:
    """The loss of each validation event under each variant (and a head), and whose event it is."""
    device = state.device
    losses, users = [torch.zeros(0, len(VARIANTS), device=device)], [torch.zeros(0, dtype=torch.int64, device=device)]
    for asked in validation:
        scores = [online_inference(model, state, asked.queries, variant=variant) for variant in VARIANTS]
        scores = scores_under(head, scores, asked.queries) if head else scores
        by_variant = [candidate_loss(each, asked.positives, asked.negatives) for each in scores]
        losses.append(torch.stack(by_variant, dim=-1))
        users.append(asked.queries.users)
    return torch.cat(losses), torch.cat(users)


def validation_questions(slice_: TimeSlice, length: int, device: torch.device) -> Iterator[Question]:
    """The slice's validation events with their answers and sampled candidates, those of short histories first."""
    asked = slice_.validation
    order = np.argsort(slice_.past.before[asked.positions], kind="stable")
    for start in range(0, len(asked), CHUNK):
        chunk = order[start : start + CHUNK]
        queries = moved(trimmed(slice_.queries(chunk, length)), device)
        yield Question(queries, asked.positives[chunk].to(device), asked.negatives[chunk].to(device))


def candidate_loss(
    scores: Float[Tensor, "B I"], positives: Int[Tensor, " B"], negatives: Int[Tensor, "B n"]
) -> Float[Tensor, " B"]:
    """Cross-entropy of the positive among its sampled candidates."""
    against = scores.gather(1, negatives.clamp(min=0)).masked_fill(negatives == NO_CANDIDATE, -torch.inf)
    positive = scores.gather(1, positives[:, None])
    return torch.cat([positive, against], dim=1).logsumexp(-1) - positive[:, 0]


def record_losses(
    losses: Float[Tensor, "N V"], events: Float[Tensor, "B V"], users: Int[Tensor, " B"]
) -> Float[Tensor, "N V"]:
    """Each client's evidence after one more slice: older sums fade, new losses are added relative to using nothing."""
    gain = torch.nan_to_num(events - events[:, :1])
    return (FADING * losses).index_add(0, users, gain.to(losses))
