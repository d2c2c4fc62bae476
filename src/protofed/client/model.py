"""What every device holds alike: the frozen backbone, the encoders, the public rule, and the newest prototypes."""

import hashlib
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from protofed.backbone.sasrec import SASRec
from protofed.client.codec import Codec, QueryEncoder
from protofed.client.drift import Gate

VARIANTS = ((False, False), (False, True), (True, False), (True, True))  # (prompt, own rows) a client may use


@dataclass(frozen=True, slots=True)
class LocalRule:
    """How clients learn; the same public numbers on every device."""

    loss: Literal["softmax", "bce", "bpr"] = "softmax"
    top_m: int = 4
    temperature: float = 0.07  # tau
    eta_l: float = 5e-3  # step of the long prompt
    eta_s: float = 0.1  # step of the short prompt
    eta_r: float = 5e-3  # step of the client's own item rows; 0 leaves them where they start
    lambda_p: float = 1.0  # sparsity of the short prompt, in multiples of the median gradient entry
    lambda_max: float = 1.0  # the strongest pull to the prototypes
    gamma: float = 0.5  # weight of InfoNCE in the alignment
    tau_a: float = 0.1
    alignment: Literal["euclidean", "entropy", "wasserstein"] = "euclidean"
    inner_prox_steps: int = 0  # 0: Algorithm 1's explicit step; more: Eq. (3) by repetition
    by_row: bool = False  # soft-threshold whole tokens
    as_printed: bool = False  # plain gradient steps, absolute lambda_p, no rescaling: the literal mode
    max_grad_norm: float = 1.0  # of plain gradient steps
    weight_decay: float = 0.0
    use_long: bool = True
    use_short: bool = True
    use_prototypes: bool = True
    use_rows: bool = True
    align: bool = True
    bf16: bool = False  # the backbone's passes in bfloat16, on a GPU only
    steps: int = 20  # local steps in a slice
    negatives: int = 64  # per window
    stride: int = 25  # at most so many targets in a window
    prompt_history: int = 0  # tokens that prompts learn beside, own rows left out; 0: the whole context, with rows
    carry: float = 0.5  # what of the short prompt survives the start of a session
    session_gap_hours: float = 8.0  # a longer pause starts a session
    row_order: bool = False  # earlier rows of one timestamp count as history
    allowed: tuple[bool, ...] = (True,) * len(VARIANTS)  # which of VARIANTS a client may choose


@dataclass(frozen=True, slots=True)
class Encoders:
    """What the base block taught once and for all: phi and Dec, g, the drift gate, kappa of the pull."""

    codec: Codec
    g: QueryEncoder
    gate: Gate
    kappa: float


@dataclass(frozen=True, slots=True)
class Broadcast:
    """What the server sends after a round: the prototypes and their version. Devices decode the prompts themselves."""

    version: int
    v: Float[Tensor, "K d_z"]


@dataclass(frozen=True, slots=True)
class Model:
    """Everything that devices hold alike; nothing in it belongs to a user."""

    backbone: SASRec
    encoders: Encoders
    v: Float[Tensor, "K d_z"]
    prompts: Float[Tensor, "K L_p d"]  # c_k = Dec(v_k)
    rule: LocalRule
    n_items: int  # the catalogue: items 0 .. n_items - 1
    prior: Float[Tensor, " V"]  # the base users' verdict on each of VARIANTS
    met_boost: float = 0.0  # what an own row starts with, towards its owner's typical query
    just_met: float = 0.0  # what having met an item adds before its row is learned; 0: nothing
    version: int = 0  # of the prototypes
    first_rows: SASRec | None = field(default=None)  # whose public rows own ones start at; None: the backbone's

    @property
    def row_source(self) -> SASRec:
        """The backbone at whose public rows own ones start."""
        return self.first_rows or self.backbone


def receive(model: Model, broadcast: Broadcast) -> Model:
    """The model with the prototypes of a broadcast; their prompts are decoded once for all queries."""
    prompts = model.encoders.codec.decode(broadcast.v)
    return replace(model, v=broadcast.v, prompts=prompts, version=broadcast.version)


def fingerprint(model: Model) -> str:
    """What tells this model's devices from another's: a hash of everything that is fixed after the base block."""
    codec = model.encoders.codec
    parts: list[Tensor] = [model.prior, *model.encoders.g.state_dict().values()]
    parts += [*codec.state_dict().values()] if isinstance(codec, nn.Module) else []
    parts += [weight for name, weight in model.backbone.state_dict().items() if name.startswith("blocks.")]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
