"""FedProx (Li et al. 2020, Federated Optimization in Heterogeneous Networks).

What we implement: federated averaging whose clients descend their loss + mu / 2 ||theta - theta_broadcast||^2, and are
scored with the server's weights. With mu = 0 it is FedAvg without fine-tuning, bit for bit.
How it differs: the term is part of the loss, so its gradient is clipped and preconditioned like the rest; the reference
code's sparse path overwrites the centre it pulls to, ours never moves within a round. No stragglers. `ft_steps` adds
FedAvg-Finetune's personal copies. The reference gives no default for mu; ours are 0.01, and 0.1 for a prompt.
Privacy: see `federated`; the pull knows nothing but the broadcast.
"""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from protofed.backbone.training import Descend
from protofed.federation.stacked import LocalSteps
from protofed.methods.baselines.fedavg import federated_averaging, finetune
from protofed.methods.baselines.federated import FederatedState, evidence_of, list_releases, start_state
from protofed.methods.baselines.personal_copies import score_with_copies, without_copies
from protofed.methods.protocol import Diagnostics, World
from protofed.privacy.ledger import Ledger
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice


@dataclass(frozen=True, slots=True)
class FedProx:
    mu: float = 0.01  # all weights
    peft_mu: float = 0.1  # a prompt
    epochs: int = 3
    rate: float = 3e-4
    peft_rate: float = 5e-2
    optimiser: Literal["adamw", "sgd"] = "adamw"
    ft_steps: int = 0
    ft_rate: float = 3e-4
    peft_ft_rate: float = 5e-2
    chunk: int = 64

    def start(self, world: World) -> FederatedState:
        return start_state(world, prompted=world.config.variant == "peft")

    def learn(
        self, world: World, state: FederatedState, slice_: TimeSlice, descend: Descend
    ) -> tuple[FederatedState, Diagnostics]:
        peft, clip = bool(len(state.prompt)), world.config.training.max_grad_norm
        rate, mu = (self.peft_rate, self.peft_mu) if peft else (self.rate, self.mu)
        local = LocalSteps(self.epochs, rate, self.optimiser, clip, pull=mu)
        tuning = LocalSteps(self.ft_steps, self.peft_ft_rate if peft else self.ft_rate, self.optimiser, clip)
        state, data, told = federated_averaging(world, without_copies(state), slice_, local, self.chunk)
        state, more = finetune(world, state, data, slice_, tuning, self.chunk)
        return state, {**told, **more, "pull": mu}

    def score(self, world: World, state: FederatedState, queries: Queries) -> Float[Tensor, "B I"]:
        return score_with_copies(state, queries)

    def evidence(self, state: FederatedState) -> Evidence:
        return evidence_of(state)

    def releases(self, world: World, state: FederatedState, slices_ahead: int = 0) -> Ledger:
        return list_releases(world, state, slices_ahead)
