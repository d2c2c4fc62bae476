"""FedAvg-Finetune (McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data).

What we implement: in each round a Poisson cohort takes `epochs` full-batch steps on its slice's windows from the
broadcast; the server adds the mean of the movements, weighted by train events. After the slice's rounds every active
client fine-tunes a copy for `ft_steps` and is scored with it; copies are thrown away at the next slice. In the standard
variant the copy is the last block and the final norm (a whole model for each user would be a table of items for each
user), in the peft variant a prompt. Users without a copy are scored with the server's weights.
How it differs: no cohorts of fixed size, no mini-batches (a client's slice is smaller than one), no dropout on clients.
Privacy: see `federated`. Fine-tuning stays on the device and is free; weighting by events would break the bound on one
user's influence, so the private mean is unweighted.
"""

from dataclasses import dataclass, replace
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from protofed.backbone.training import Descend
from protofed.client.lessons import ClientData
from protofed.federation.stacked import LocalSteps, flatten
from protofed.methods.baselines.federated import (
    FederatedState,
    after_slice,
    evidence_of,
    list_releases,
    server_of,
    slice_data,
    start_state,
    weights_of,
    with_rows,
)
from protofed.methods.baselines.federated_rounds import federate, plain_losses, report_slice, rounds_of
from protofed.methods.baselines.personal_copies import personal_layout, personalise, score_with_copies, without_copies
from protofed.methods.protocol import Diagnostics, World
from protofed.privacy.ledger import Ledger
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice


def federated_averaging(
    world: World, state: FederatedState, slice_: TimeSlice, local: LocalSteps, chunk: int
) -> tuple[FederatedState, ClientData, Diagnostics]:
    """The state after one slice of federated averaging, personal copies as they were."""
    model = with_rows(world, state.backbone, slice_, train=not len(state.prompt))
    server, data = server_of(replace(state, backbone=model)), slice_data(world, slice_)
    rounds = rounds_of(world, state, slice_, local, chunk)
    server, reports = federate(world, server, data, slice_, rounds, plain_losses(world))
    told = report_slice(server, data, reports, 0)
    return after_slice(state, server, rounds.count, data, slice_), data, told


def finetune(
    world: World, state: FederatedState, data: ClientData, slice_: TimeSlice, local: LocalSteps, chunk: int
) -> tuple[FederatedState, Diagnostics]:
    """The state with a fresh copy for every active client, fine-tuned from the server's weights."""
    if not local.steps:
        return without_copies(state), {}
    server, device = server_of(state), state.backbone.items.device
    layout = personal_layout(server.model, server.prompt)
    common = flatten(weights_of(server.model, server.prompt), layout)
    start = common.expand(len(data), -1)
    end = personalise(world, server, layout, start, data, slice_, local, chunk)
    shift = float((end - start).norm(dim=-1).mean()) if len(data) else 0.0
    told: Diagnostics = {"personal_shift": shift, "trainable_parameters_per_user": layout.size}
    return replace(state, owners=data.users.to(device), personal=end), told


@dataclass(frozen=True, slots=True)
class FedAvg:
    epochs: int = 3  # local steps of a client in a round
    rate: float = 3e-4  # of those steps, all weights
    peft_rate: float = 5e-2  # of those steps, a prompt
    optimiser: Literal["adamw", "sgd"] = "adamw"  # its state starts anew each round
    ft_steps: int = 20  # local steps after the rounds; 0 scores everybody with the server's weights
    ft_rate: float = 3e-4
    peft_ft_rate: float = 5e-2
    chunk: int = 64  # clients computed at once; changes memory and speed, not results

    def start(self, world: World) -> FederatedState:
        return start_state(world, prompted=world.config.variant == "peft")

    def learn(
        self, world: World, state: FederatedState, slice_: TimeSlice, descend: Descend
    ) -> tuple[FederatedState, Diagnostics]:
        peft, clip = bool(len(state.prompt)), world.config.training.max_grad_norm
        local = LocalSteps(self.epochs, self.peft_rate if peft else self.rate, self.optimiser, clip)
        tuning = LocalSteps(self.ft_steps, self.peft_ft_rate if peft else self.ft_rate, self.optimiser, clip)
        state, data, told = federated_averaging(world, without_copies(state), slice_, local, self.chunk)
        state, more = finetune(world, state, data, slice_, tuning, self.chunk)
        return state, {**told, **more}

    def score(self, world: World, state: FederatedState, queries: Queries) -> Float[Tensor, "B I"]:
        return score_with_copies(state, queries)

    def evidence(self, state: FederatedState) -> Evidence:
        return evidence_of(state)

    def releases(self, world: World, state: FederatedState, slices_ahead: int = 0) -> Ledger:
        return list_releases(world, state, slices_ahead)
