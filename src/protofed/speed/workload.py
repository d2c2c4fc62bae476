"""Workload W: what one round of the comparison asks of its clients, the same for every system.

Clients with 20 to 40 made-up events each; a frozen transformer of two layers; a prompt of eight tokens for each
client. In a round some clients take three plain gradient steps on their prompt, at all positions of their history and
pulled to the prototypes, and upload its clipped embedding. No noise, no coding, no evaluation: what is timed is the
clients' work and what a system adds to it. Nothing here needs more than PyTorch.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.backbone.sasrec import SASRec, at_rest
from protofed.client.codec import QueryEncoder, random_linear_codec, unit
from protofed.client.drift import literal_gate
from protofed.client.lessons import Lesson
from protofed.client.model import VARIANTS, Encoders, LocalRule, Model
from protofed.client.prompts import PromptState
from protofed.client.state import DeviceState, new_devices
from protofed.client.update import client_update
from protofed.client.upload import nearest
from protofed.config import BackboneConfig
from protofed.privacy.mechanism import clip
from protofed.privacy.upload import UploadRule
from protofed.seeds import stream
from protofed.server.fedkmeans import exact_sums, fedkmeans
from protofed.server.library import PrototypeLibrary, new_library
from protofed.slices.histories import BOS, PAD
from protofed.slices.windows import NO_TARGET, Windows

ITEMS, LEAST, MOST, NEGATIVES = 5_000, 20, 40, 99
PROMPT, D_Z, PROTOTYPES, HEADS, LAYERS = 8, 64, 128, 4, 2
STEPS, PULL = 3, 0.5  # local steps of a round, and how strongly a prompt is pulled
POOL = 1_000  # different clients' events; more clients than that repeat them
RULE = LocalRule(
    loss="bce", eta_l=0.1, eta_r=0.0, steps=STEPS, negatives=NEGATIVES, as_printed=True, use_short=False,
    use_prototypes=False, use_rows=False,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Events:
    """The events of a pool of clients: histories from the left, with padding there, and what each position predicts."""

    tokens: Int[Tensor, "N L"]
    targets: Int[Tensor, "N L"]
    negatives: Int[Tensor, "N n"]
    lengths: Int[Tensor, " N"]

    def to(self, device: torch.device | str) -> "Events":
        """The same on another device."""
        return Events(*(part.to(device) for part in (self.tokens, self.targets, self.negatives, self.lengths)))


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that all systems begin with."""

    model: Model
    events: Events
    upload: UploadRule
    clients: int
    cohort: int

    def cohort_of(self, round_: int) -> Int[Tensor, " n"]:
        """Who takes part in a round, in ascending order."""
        return torch.randperm(self.clients, generator=stream(0, "cohort", round_))[: self.cohort].sort().values

    def first_prompts(self, clients: Int[Tensor, " n"]) -> Float[Tensor, "n L_p d"]:
        """What clients begin with: a prototype's prompt each."""
        return self.model.prompts[clients.to(self.model.v.device) % PROTOTYPES]  # a copy


def made_up(clients: int, cohort: int, width: int, device: str = "cpu") -> Work:
    """The workload with prompts and item rows of that width, from fixed seeds."""
    config = BackboneConfig(width=width, layers=LAYERS, heads=HEADS, ffn_width=1, history_length=MOST)
    backbone = at_rest(SASRec(config, ITEMS, stream(0, "backbone"))).to(device)
    codec = random_linear_codec(PROMPT, width, stream(0, "codec"), d_z=D_Z).to(device)
    v = unit(torch.randn(PROTOTYPES, D_Z, generator=stream(0, "prototypes"))).to(device)
    g = QueryEncoder(width, stream(0, "query encoder"), d_z=D_Z).to(device)
    encoders, prior = Encoders(codec, g, literal_gate(), 1.0), torch.zeros(len(VARIANTS), device=device)
    model = Model(backbone, encoders, v, codec.decode(v), RULE, ITEMS, prior)
    return Work(model, made_up_events(min(clients, POOL)).to(device), UploadRule(PROTOTYPES, D_Z), clients, cohort)


def made_up_events(n: int) -> Events:
    """n clients' events; of each all but the newest are read, and all are predicted."""
    rng = stream(0, "events", n)
    lengths = torch.randint(LEAST, MOST + 1, (n,), generator=rng)
    targets = torch.randint(ITEMS, (n, MOST), generator=rng)
    empty = torch.arange(MOST) < (MOST - lengths)[:, None]
    tokens = torch.cat([torch.full((n, 1), BOS), targets[:, :-1]], dim=1)
    tokens[torch.arange(n), MOST - lengths] = BOS
    negatives = torch.randint(ITEMS, (n, NEGATIVES), generator=rng)
    return Events(tokens.masked_fill(empty, PAD), targets.masked_fill(empty, NO_TARGET), negatives, lengths)


def update_together(
    work: Work, clients: Int[Tensor, " n"], prompts: Float[Tensor, "n L_p d"], v: Float[Tensor, "K d_z"]
) -> Float[Tensor, "n L_p d"]:
    """The clients' prompts after their steps of a round: ours, a stack at once."""
    model, at = replace(work.model, v=v), v.device
    lesson, negatives = lesson_of(work, clients)
    state = devices_of(prompts, clients.to(at))
    for _ in range(STEPS):
        state, _ = client_update(model, state, lesson, negatives, RULE)
    return state.prompts.long


def lesson_of(work: Work, clients: Int[Tensor, " n"]) -> tuple[Lesson, Int[Tensor, "n m"]]:
    """What a stack learns from, without columns that only pad, and its negatives."""
    events = work.events
    at, n = (clients % len(events.lengths)).to(events.tokens.device), len(clients)
    longest = int(events.lengths[at].max())
    tokens, targets = events.tokens[at, MOST - longest :], events.targets[at, MOST - longest :]
    places = torch.arange(n, device=at.device)
    windows = Windows(places, tokens, torch.arange(longest, device=at.device).expand(n, -1), targets, places)
    ones = torch.ones(n, device=at.device)
    return Lesson(windows, work.model.v[places % PROTOTYPES], 0 * ones, PULL * ones), events.negatives[at]


def devices_of(prompts: Float[Tensor, "n L_p d"], clients: Int[Tensor, " n"]) -> DeviceState:
    """Devices that hold these prompts and nothing else."""
    state = new_devices(clients, PROMPT, prompts.shape[-1], D_Z, device=prompts.device)
    everybody = torch.ones_like(clients, dtype=torch.bool)
    return replace(state, prompts=PromptState(prompts, torch.zeros_like(prompts)), active=everybody)


@torch.no_grad()
def uploads_of(
    work: Work, prompts: Float[Tensor, "n L_p d"], v: Float[Tensor, "K d_z"]
) -> tuple[Float[Tensor, "n d_z"], Int[Tensor, " n"]]:
    """What the clients send: clipped embeddings, and the prototype of each."""
    z = work.model.encoders.codec.encode(prompts)
    return clip(z, work.upload.clip_radius), nearest(z, v)


def first_library(work: Work) -> PrototypeLibrary:
    """The prototypes before the first round."""
    return new_library(work.model.v)


def aggregate(
    work: Work, library: PrototypeLibrary, z: Float[Tensor, "n d_z"], block: Int[Tensor, " n"]
) -> PrototypeLibrary:
    """The prototypes after a round, without noise."""
    return fedkmeans(library, exact_sums(z, block, work.upload), count_weight=work.upload.count_weight)
