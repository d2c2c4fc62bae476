"""Algorithm 3 for one device: the answer of `online_inference`, computed for U = 1 without a stack around it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from protofed.backbone.one_query import FlatBackbone, can_lay_out, embed_history, last_state, lay_out, score_items
from protofed.client.codec import unit
from protofed.client.drift import drift_gate
from protofed.client.model import Model
from protofed.client.prompts import PromptState, mixture
from protofed.client.state import DeviceState
from protofed.client.update import compose_prompt, route_queries


@dataclass(frozen=True, slots=True)
class Ready:
    """A model made ready to answer for one device after another."""

    model: Model
    flat: FlatBackbone
    norm: Float[Tensor, ""]  # what prompts are rescaled to


def make_ready(model: Model) -> Ready | None:
    """The model with its backbone laid out; None where it has parts that the general way alone knows."""
    if model.just_met or not can_lay_out(model.backbone):
        return None
    flat = lay_out(model.backbone, model.n_items, model.prompts.shape[1])
    return Ready(model, flat, model.backbone.input_norm())


@torch.inference_mode()
def score_next(ready: Ready, device: DeviceState) -> Float[Tensor, " I"]:
    """A score for every item as the device's next one. Algorithm 3, alg:inference."""
    flat, rows = ready.flat, device.rows
    use_rows = bool(device.use_rows)
    own_items, own_rows = (rows.items, rows.rows) if use_rows else (rows.items[:0], rows.rows[:0])
    history = embed_history(flat, device.memory.items.to(flat.rows.device), own_items, own_rows)
    hidden = last_state(flat, history)
    if bool(device.use_prompt):
        hidden = last_state(flat, history, _prompt(ready, device, hidden))
    scores = score_items(flat, hidden)
    return scores.index_copy_(0, own_items, own_rows @ hidden) if len(own_items) else scores


def _prompt(ready: Ready, device: DeviceState, hidden: Float[Tensor, " d"]) -> Float[Tensor, "p d"]:
    """The composed prompt; a device that was never met starts at its routed prototypes, without drift."""
    model, rule = ready.model, ready.model.rule
    routing = route_queries(model, model.encoders.g(hidden[None]), rule)
    if bool(device.met):
        prompts, drift = device.prompts, device.drift.drift
    else:
        long = model.encoders.codec.decode(unit(mixture(model.v, routing.chosen, routing.weights)))
        prompts, drift = PromptState(long, torch.zeros_like(long)), torch.zeros_like(hidden[:1])
    return compose_prompt(model, prompts, routing, drift_gate(drift, model.encoders.gate), rule, ready.norm)[0]
