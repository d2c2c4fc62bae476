"""Per-user acceptance: a client uses its prompt, its own rows, both or neither, as its own validation events say.

Prompts over-fit clients with few events. The choice is made on the device, from the device's own events: it costs no ε.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.client.codec import QueryEncoder
from protofed.client.drift import Gate
from protofed.client.update import Broadcast, LocalRule
from protofed.inference.online import Devices, forced, online_inference
from protofed.slices.candidates import NO_CANDIDATE
from protofed.slices.histories import Queries, moved, trimmed
from protofed.slices.stream import TimeSlice

VARIANTS = ((False, False), (False, True), (True, False), (True, True))  # (prompt, own rows)
MEMORY = 0.5  # what older slices' evidence still counts, per slice
CHUNK = 512


@torch.no_grad()
def variant_losses(
    shared: Broadcast, g: QueryEncoder, gate: Gate, rule: LocalRule, devices: Devices, slice_: TimeSlice, length: int
) -> tuple[Float[Tensor, "B V"], Int[Tensor, " B"]]:
    """The loss of each validation event of the slice under each variant, and whose event it is."""
    device = shared.backbone.items.device
    losses, users = [], [torch.zeros(0, dtype=torch.int64, device=device)]
    for queries, positives, negatives in validation_questions(slice_, length, device):
        by_variant = []
        for prompt, rows in VARIANTS:
            scores = online_inference(shared, g, gate, rule, forced(devices, prompt=prompt, rows=rows), queries)
            by_variant.append(candidate_loss(scores, positives, negatives))
        losses.append(torch.stack(by_variant, dim=-1))
        users.append(queries.users)
    empty = torch.zeros(0, len(VARIANTS), device=device)
    return torch.cat([empty, *losses]), torch.cat(users)


def validation_questions(
    slice_: TimeSlice, length: int, device: torch.device
) -> Iterator[tuple[Queries, Int[Tensor, " B"], Int[Tensor, "B n"]]]:
    """The slice's validation events with their answers and sampled candidates, those of short histories first."""
    asked = slice_.validation
    order = np.argsort(slice_.past.before[asked.positions], kind="stable")
    for start in range(0, len(asked), CHUNK):
        chunk = order[start : start + CHUNK]
        queries = moved(trimmed(slice_.queries(chunk, length)), device)
        yield queries, asked.positives[chunk].to(device), asked.negatives[chunk].to(device)


def candidate_loss(
    scores: Float[Tensor, "B I"], positives: Int[Tensor, " B"], negatives: Int[Tensor, "B n"]
) -> Float[Tensor, " B"]:
    """Cross-entropy of the positive among its sampled candidates."""
    against = scores.gather(1, negatives.clamp(min=0)).masked_fill(negatives == NO_CANDIDATE, -torch.inf)
    positive = scores.gather(1, positives[:, None])
    return torch.cat([positive, against], dim=1).logsumexp(-1) - positive[:, 0]


def remembered(
    losses: Float[Tensor, "N V"], events: Float[Tensor, "B V"], users: Int[Tensor, " B"]
) -> Float[Tensor, "N V"]:
    """Each client's evidence after one more slice: older sums fade, new losses are added relative to using nothing."""
    gain = torch.nan_to_num(events - events[:, :1])
    return (MEMORY * losses).index_add(0, users, gain.to(losses))


def accepted(
    losses: Float[Tensor, "N V"], prior: Float[Tensor, " V"], allowed: Sequence[bool] = (True,) * len(VARIANTS)
) -> tuple[Bool[Tensor, " N"], Bool[Tensor, " N"]]:
    """Who uses its prompt and who its own rows: the allowed variant with the least loss, prior included."""
    table = torch.tensor(VARIANTS, device=losses.device)
    barred = ~torch.tensor(allowed, device=losses.device)
    best = table[(losses + prior).masked_fill(barred, torch.inf).argmin(-1)]  # (N, 2)
    return best[:, 0], best[:, 1]
