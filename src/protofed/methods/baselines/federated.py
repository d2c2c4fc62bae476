"""What the federated baselines share: the server's weights and personal copies as a state, its start and its ledger.

A client is a user. In each round every user tosses a coin; those it chose who have train events in the slice descend
from the broadcast on all their windows at once, and upload how far they moved. The server adds the mean weighted by
events (`federated_rounds`). The standard variant trains all weights and the item table, the peft variant one prompt
shared by all. Some methods keep copies on the devices besides (`personal_copies`).

Privacy. With `privacy.wrap` (DPFed) each upload, over all its tensors together, is clipped to `privacy.clip_radius`;
the server adds Gaussian noise to every coordinate of the sum, untouched item rows included, and divides by the fixed
number q * N of clients expected. Rounds are fixed ahead, nothing is selected on validation events, and items that
appear after the base block start at the public mean row. Every upload is a function of the broadcast and of the
client's own events, never of its earlier coins. Personal copies stay on the devices. Otherwise nothing is promised.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.backbone.injection import rescale_like
from protofed.backbone.sasrec import SASRec, grown
from protofed.client.lessons import ClientData, client_data
from protofed.config import PrivacyConfig
from protofed.errors import ConfigError
from protofed.federation.plan import Stream, ledger, plan_releases
from protofed.federation.stacked import PROMPT, Layout, layout_of
from protofed.methods.frozen import rows_for
from protofed.methods.protocol import World
from protofed.privacy.ledger import Ledger
from protofed.seeds import numpy_stream, stream
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice


@dataclass(frozen=True, slots=True)
class FederatedState:
    """The server's weights, the personal copies on the devices, and how far the rounds have come."""

    backbone: SASRec
    prompt: Float[Tensor, "L_p d"]  # shared by all; no tokens in the standard variant
    owners: Int[Tensor, " M"]  # users with a personal copy, ascending
    personal: Float[Tensor, "M D"]
    noise_multiplier: float
    allowed_rounds: int
    rounds: int  # made so far
    slice_index: int
    newest_target: int


@dataclass(frozen=True, slots=True)
class Server:
    """What is broadcast and aggregated: the weights of a layout, and those rows of the item table that may train."""

    model: SASRec
    prompt: Float[Tensor, "L_p d"]
    layout: Layout
    rows: Bool[Tensor, " n"]

    @property
    def parameters(self) -> int:
        """How many numbers travel each way in a round."""
        return self.layout.size + int(self.rows.sum()) * self.model.config.width


def start_state(world: World, *, prompted: bool) -> FederatedState:
    """State before slice 1: warmed-up backbone, first shared prompt if `prompted`, and the planned noise."""
    privacy, config = world.config.privacy, world.config.backbone
    if privacy.wrap and privacy.trust != "central":
        raise ConfigError(f"federated baselines are private under central trust only, got trust {privacy.trust!r}")
    wanted = world.config.stream.n_slices * privacy.rounds_per_slice
    asked = weights_stream(privacy, wanted, privacy.noise_multiplier)
    (weights,) = plan_releases(privacy, (asked,), private=privacy.wrap)
    device = world.backbone.items.device
    prompt = torch.zeros(0, config.width, device=device)
    if prompted:
        noise = torch.randn(1, config.prompt_length, config.width, generator=stream(world.config.seed, "shared prompt"))
        prompt = rescale_like(noise.to(device), world.backbone.input_norm())[0]
    return FederatedState(
        backbone=world.backbone,
        prompt=prompt,
        owners=torch.zeros(0, dtype=torch.int64, device=device),
        personal=torch.zeros(0, 0, device=device),
        noise_multiplier=weights.noise_multiplier,
        allowed_rounds=weights.rounds,
        rounds=0,
        slice_index=world.base.index,
        newest_target=int(world.base.train_positions[-1]),
    )


def weights_of(model: SASRec, prompt: Float[Tensor, "L_p d"]) -> dict[str, Tensor]:
    """Every weight by name, the prompt among them where there is one."""
    return dict(model.named_parameters()) | ({PROMPT: prompt} if len(prompt) else {})


def shared_layout(model: SASRec, prompt: Float[Tensor, "L_p d"]) -> Layout:
    """What the server trains besides item rows: the prompt where there is one, else all weights."""
    weights = weights_of(model, prompt)
    names = (PROMPT,) if len(prompt) else tuple(name for name in weights if name != "items")
    return layout_of(weights, names)


def server_of(state: FederatedState) -> Server:
    """The server of the FedAvg family in the state's variant."""
    model, frozen = state.backbone, bool(len(state.prompt))
    rows = torch.zeros_like(model.has_row) if frozen else model.has_row
    return Server(model, state.prompt, shared_layout(model, state.prompt), rows)


def with_rows(world: World, model: SASRec, slice_: TimeSlice, *, train: bool) -> SASRec:
    """The model with rows for the slice's items: by the shared rule, or, in private, at the public mean row.

    In private, rows that do not train are left out: such items are read as the mean row anyway.
    """
    if not world.config.privacy.wrap:
        return rows_for(world, model, slice_)[0]
    if not train:
        return model
    bigger = grown(model, slice_.n_train_items)
    with torch.no_grad():
        bigger.items[~bigger.has_row] = model.untrained((~bigger.has_row).nonzero()[:, 0])
    bigger.has_row = torch.ones_like(bigger.has_row)
    return bigger


def slice_data(world: World, slice_: TimeSlice) -> ClientData:
    """The windows of the users who are active in the slice."""
    return client_data(
        slice_.past,
        slice_.train_positions,
        length=world.config.backbone.history_length,
        stride=world.config.training.stride,
        rng=numpy_stream(world.config.seed, "client windows", slice_.index),
    )


def after_slice(
    state: FederatedState, server: Server, rounds: int, data: ClientData, slice_: TimeSlice
) -> FederatedState:
    """The state after a slice's rounds; personal copies are still those of before."""
    newest = int(data.windows.newest.max()) if len(data) else -1
    return replace(
        state,
        backbone=server.model,
        prompt=server.prompt,
        rounds=state.rounds + rounds,
        slice_index=slice_.index,
        newest_target=max(state.newest_target, newest),
    )


def evidence_of(state: FederatedState) -> Evidence:
    return Evidence(state.slice_index, newest_target=state.newest_target, item_rows=state.backbone.n_rows)


def list_releases(world: World, state: FederatedState, slices_ahead: int) -> Ledger:
    """Releases so far and of the next slices; empty for a run without noise."""
    privacy = world.config.privacy
    if not privacy.wrap:
        return ()
    weights = weights_stream(privacy, state.allowed_rounds, state.noise_multiplier)
    return ledger((weights,), {weights.name: state.rounds + slices_ahead * privacy.rounds_per_slice})


def weights_stream(privacy: PrivacyConfig, rounds: int, noise_multiplier: float) -> Stream:
    """What these methods release: sums of clients' noised movements."""
    return Stream("weights", privacy.sampling_rate, rounds, noise_multiplier)
