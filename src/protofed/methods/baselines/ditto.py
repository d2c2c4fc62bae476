"""Ditto (Li et al. 2021, Ditto: Fair and Robust Federated Learning Through Personalization).

What we implement: the server's w by federated averaging; beside it every client keeps v_u, which minimises its own loss
+ strength / 2 ||v_u - w||^2, for ever. After the slice's rounds all active clients take `local_steps` steps on v_u, by
default as many as ProtoFed-SP's clients, pulled to the w broadcast then; queries are answered with v_u, or with w by
users who have none. v_u is the last block and the final norm in the standard variant (item table and all else stay
w's), a prompt in the peft variant: there it is ProtoFed-SP with one global prompt as the only anchor.
How it differs: the reference moves v_u in the rounds a client is sampled for, about one a slice here; every active
client steps once the rounds are over, whatever its coins. The pull is strength, not strength / 2, times the distance.
With strength 0 the copies train purely locally.
Privacy: see `federated`; only w's movement, computed from the broadcast w, is uploaded, and v_u stays on the device.
"""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from protofed.backbone.training import Descend
from protofed.client.lessons import ClientData
from protofed.federation.stacked import LocalSteps, flatten
from protofed.methods.baselines.fedavg import federated_averaging
from protofed.methods.baselines.federated import (
    FederatedState,
    evidence_of,
    list_releases,
    server_of,
    start_state,
    weights_of,
)
from protofed.methods.baselines.personal_copies import (
    copies_of,
    personal_layout,
    personalise,
    score_with_copies,
    with_copies,
)
from protofed.methods.protocol import Diagnostics, World
from protofed.privacy.ledger import Ledger
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice


def with_personal_steps(
    world: World, state: FederatedState, data: ClientData, slice_: TimeSlice, local: LocalSteps, chunk: int
) -> tuple[FederatedState, Diagnostics]:
    """The state after the active clients' own steps; v_u of a client that has none starts at w."""
    server = server_of(state)
    layout = personal_layout(server.model, server.prompt)
    common = flatten(weights_of(server.model, server.prompt), layout)
    users = data.users.to(common.device)
    start, _ = copies_of(state, users, common)
    end = personalise(world, server, layout, start, data, slice_, local, chunk)
    shift = float((end - common).norm(dim=-1).mean()) if len(data) else 0.0
    return with_copies(state, users, end), {"personal_shift": shift, "trainable_parameters_per_user": layout.size}


@dataclass(frozen=True, slots=True)
class Ditto:
    strength: float = 1.0  # lambda
    epochs: int = 3
    rate: float = 3e-4
    peft_rate: float = 5e-2
    optimiser: Literal["adamw", "sgd"] = "adamw"
    personal_rate: float = 3e-4
    peft_personal_rate: float = 1e-2
    local_steps: int = 20  # of each client on its copy, in a slice
    chunk: int = 64

    def start(self, world: World) -> FederatedState:
        return start_state(world, prompted=world.config.variant == "peft")

    def learn(
        self, world: World, state: FederatedState, slice_: TimeSlice, descend: Descend
    ) -> tuple[FederatedState, Diagnostics]:
        peft, clip = bool(len(state.prompt)), world.config.training.max_grad_norm
        local = LocalSteps(self.epochs, self.peft_rate if peft else self.rate, self.optimiser, clip)
        rate = self.peft_personal_rate if peft else self.personal_rate
        own = LocalSteps(self.local_steps, rate, self.optimiser, clip, pull=self.strength)
        state, data, told = federated_averaging(world, state, slice_, local, self.chunk)
        state, more = with_personal_steps(world, state, data, slice_, own, self.chunk)
        return state, {**told, **more, "personal_copies": len(state.owners)}

    def score(self, world: World, state: FederatedState, queries: Queries) -> Float[Tensor, "B I"]:
        return score_with_copies(state, queries)

    def evidence(self, state: FederatedState) -> Evidence:
        return evidence_of(state)

    def releases(self, world: World, state: FederatedState, slices_ahead: int = 0) -> Ledger:
        return list_releases(world, state, slices_ahead)
