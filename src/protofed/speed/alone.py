"""A client's round by itself, as one would write it without a simulator: what the loop, Flower and pfl call.

The network, the loss and the pull are the very functions that the stack runs; nothing is padded.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from protofed.backbone.losses import LOSSES, window_losses
from protofed.client.update import alignment
from protofed.slices.windows import Windows
from protofed.speed.workload import MOST, PULL, RULE, STEPS, Work


def update_alone(
    work: Work, client: int, prompt: Float[Tensor, "L_p d"], v: Float[Tensor, "K d_z"]
) -> Float[Tensor, "L_p d"]:
    """The client's prompt after its steps of a round."""
    events, model = work.events, replace(work.model, v=v)
    at = client % len(events.lengths)
    length = int(events.lengths[at])
    tokens, targets = events.tokens[at : at + 1, MOST - length :], events.targets[at : at + 1, MOST - length :]
    one = torch.zeros(1, dtype=torch.int64, device=v.device)
    windows = Windows(one, tokens, torch.arange(length, device=v.device)[None], targets, one)
    negatives, loss_of = events.negatives[at : at + 1], LOSSES[RULE.loss]
    prompt = prompt[None].detach()
    for _ in range(STEPS):
        prompt.requires_grad_(True)
        sums, counts = window_losses(model.backbone, windows, negatives, loss_of, prompt)
        loss = sums[0] / counts[0] + PULL * alignment(model, prompt, RULE, None)[0]
        (grad,) = torch.autograd.grad(loss, prompt)
        prompt = prompt.detach() - RULE.eta_l * grad * (RULE.max_grad_norm / grad.norm().clamp(min=RULE.max_grad_norm))
    return prompt.detach()[0]
