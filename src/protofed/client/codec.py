"""Between prompts and the sphere of prototypes: the prompt encoder phi, its decoder Dec, and the query encoder g.

Prototypes are kept as unit vectors v_k; a prototype's prompt is always c_k = Dec(v_k), and phi(c_k) is never taken: the
paper updates v_k and composes c_k without saying how one becomes the other.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from protofed.errors import ConfigError
from protofed.seeds import seeded

RecLoss = Callable[[Tensor, Tensor], Tensor]  # decoded prompts (B, L_p, d), which warm-up prompts (B,) -> mean loss


def unit(x: Float[Tensor, "*n d_z"]) -> Float[Tensor, "*n d_z"]:
    """Vectors of length 1 in the same directions; a zero vector stays zero."""
    length: Tensor = x.norm(dim=-1, keepdim=True)
    return x / length.clamp(min=1e-6)


@runtime_checkable
class Codec(Protocol):
    """phi and Dec: prompts to unit vectors and back."""

    def encode(self, prompts: Float[Tensor, "U L_p d"]) -> Float[Tensor, "U d_z"]:
        """phi: one vector for each prompt."""
        ...

    def decode(self, v: Float[Tensor, "K d_z"]) -> Float[Tensor, "K L_p d"]:
        """Dec: one prompt for each vector."""
        ...


class LinearCodec(nn.Module):
    """phi(p) = W (p - centre) on the unit sphere and Dec(v) = centre + scale * W^T v, W with orthonormal rows.

    So phi(Dec(v)) = v for a unit v. Without the centre, what all clients have in common would fill the sphere and leave
    no room for how they differ. With `normalise` off phi is the affine map itself, and phi(Dec(v)) = scale * v.
    """

    rows: Tensor
    centre: Tensor
    scale: Tensor

    def __init__(
        self,
        rows: Float[Tensor, "d_z D"],
        prompt_length: int,
        *,
        normalise: bool = True,
        centre: Float[Tensor, " D"] | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.prompt_length, self.normalise = prompt_length, normalise
        self.register_buffer("rows", rows)
        self.register_buffer("centre", torch.zeros_like(rows[0]) if centre is None else centre)
        self.register_buffer("scale", torch.tensor(scale).to(rows))

    def encode(self, prompts: Float[Tensor, "U L_p d"]) -> Float[Tensor, "U d_z"]:
        z = (prompts.flatten(1) - self.centre) @ self.rows.T
        return unit(z) if self.normalise else z

    def decode(self, v: Float[Tensor, "K d_z"]) -> Float[Tensor, "K L_p d"]:
        return (self.centre + self.scale * (v @ self.rows)).reshape(len(v), self.prompt_length, -1)


class MlpCodec(nn.Module):
    """The paper's shape: token mean, two layers with GELU and LayerNorm; Dec is a wide hidden layer back to all tokens.

    Pooling makes phi's gradient the same for every token: alignment moves a prompt as a whole, never token by token.
    """

    def __init__(self, prompt_length: int, d: int, rng: Generator, *, d_z: int = 64, decoder_width: int = 512) -> None:
        super().__init__()
        self.prompt_length = prompt_length
        with seeded(0, "overwritten below"):
            self.encoder = _two_layers(d, 2 * d_z, d_z)
            self.decoder = nn.Sequential(
                nn.Linear(d_z, decoder_width), nn.GELU(), nn.Linear(decoder_width, prompt_length * d)
            )
        _draw(self, rng)

    def encode(self, prompts: Float[Tensor, "U L_p d"]) -> Float[Tensor, "U d_z"]:
        return unit(self.encoder(prompts.mean(1)))

    def decode(self, v: Float[Tensor, "K d_z"]) -> Float[Tensor, "K L_p d"]:
        decoded: Tensor = self.decoder(v)
        return decoded.reshape(len(v), self.prompt_length, -1)


class QueryEncoder(nn.Module):
    """g: the backbone's hidden state of a query to a unit vector; two layers, or one where `width` is 0."""

    def __init__(self, d: int, rng: Generator, *, d_z: int = 64, width: int = 128) -> None:
        super().__init__()
        with seeded(0, "overwritten below"):
            self.layers = _two_layers(d, width, d_z) if width else nn.Sequential(nn.Linear(d, d_z))
        _draw(self, rng)

    def forward(self, hidden: Float[Tensor, "U d"]) -> Float[Tensor, "U d_z"]:
        return unit(self.layers(hidden))


def _two_layers(d_in: int, width: int, d_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(d_in, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, d_out))


def _draw(module: nn.Module, rng: Generator) -> None:
    """Initial weights from the given stream alone; biases zero, LayerNorms as PyTorch makes them."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight, generator=rng)
            nn.init.zeros_(layer.bias)


def random_linear_codec(prompt_length: int, d: int, rng: Generator, *, d_z: int = 64) -> LinearCodec:
    """A linear codec whose rows are random orthonormal directions."""
    return LinearCodec(_completed(torch.empty(0, prompt_length * d), d_z, rng), prompt_length)


def pca_codec(prompts: Float[Tensor, "n L_p d"], rng: Generator, *, d_z: int = 64) -> LinearCodec:
    """A linear codec around the mean of warm-up prompts, along the main directions in which they differ from it.

    Directions that the prompts do not span are filled up with random ones; the scale is the prompts' typical distance
    from their mean within those directions.
    """
    flat = prompts.detach().flatten(1).double().cpu()
    centred = flat - flat.mean(0)
    values, directions = torch.linalg.eigh(centred.T @ centred)  # ascending
    spanned = int((values > max(1e-12 * float(values[-1]), 1e-20)).sum())
    main = directions.T.flip(0)[: min(spanned, d_z)]
    sign = main.gather(1, main.abs().argmax(1, keepdim=True)).sign()  # the library's choice of sign is arbitrary
    rows = _completed((main * sign).float(), d_z, rng)
    spread = float((centred.float() @ rows.T).norm(dim=-1).median()) or 1.0
    return LinearCodec(rows.to(prompts), prompts.shape[1], centre=flat.mean(0).float().to(prompts), scale=spread)


def _completed(rows: Float[Tensor, "n D"], d_z: int, rng: Generator) -> Float[Tensor, "d_z D"]:
    """These orthonormal rows and, up to d_z of them, random ones orthogonal to all before."""
    n, width = rows.shape
    if d_z > width:
        raise ConfigError(
            f"a linear codec needs prompt_length * width >= d_z, got {width} < {d_z}; lengthen the prompt or lower d_z"
        )
    drawn = torch.randn(d_z - n, width, generator=rng, dtype=torch.float64)
    basis, triangle = torch.linalg.qr(torch.cat([rows.double(), drawn]).T)
    kept: Tensor = basis * triangle.diagonal().sign()  # QR may flip a row that was given
    return kept.T.float().contiguous()


@torch.no_grad()
def cycle_error(codec: Codec, v: Float[Tensor, "K d_z"]) -> Float[Tensor, ""]:
    """Mean distance between v and phi(Dec(v)): how far a prototype moves on its way to a prompt and back."""
    distance: Tensor = (codec.encode(codec.decode(v)) - v).norm(dim=-1)
    return distance.mean()


@dataclass(frozen=True, slots=True)
class CodecTraining:
    """How an MLP codec or a query encoder is trained on warm-up users."""

    steps: int = 500
    batch_size: int = 128
    learning_rate: float = 1e-3
    cycle_weight: float = 1.0
    rec_weight: float = 1.0
    temperature: float = 0.1  # of the query encoder's contrast between users


@dataclass(frozen=True, slots=True)
class CodecFit:
    """How the training went: the loss before each step and what was left at the end on the warm-up prompts."""

    trace: tuple[float, ...]
    reconstruction: float  # mean of ||Dec(phi(p)) - p||^2 / ||p||^2
    cycle: float


def train_codec(
    codec: MlpCodec,
    prompts: Float[Tensor, "n L_p d"],
    rng: Generator,
    *,
    how: CodecTraining,
    rec_loss: RecLoss | None = None,
) -> tuple[MlpCodec, CodecFit]:
    """A frozen copy trained to give warm-up prompts back, to keep points of the sphere, and to recommend well.

    The recommendation loss is that of the prompts Dec(phi(p)) in place of p, where a function for it is handed in.
    """
    codec = copy.deepcopy(codec).requires_grad_(True)

    def loss(batch: Tensor) -> Tensor:
        z = codec.encode(prompts[batch])
        decoded = codec.decode(z)
        total = _relative_error(decoded, prompts[batch]) + how.cycle_weight * _cycle_loss(codec, z.detach(), rng)
        return total if rec_loss is None else total + how.rec_weight * rec_loss(decoded, batch)

    trace = _descend(codec, loss, len(prompts), rng, how)
    codec.requires_grad_(False)
    z = codec.encode(prompts)
    return codec, CodecFit(trace, float(_relative_error(codec.decode(z), prompts)), float(cycle_error(codec, z)))


def _relative_error(decoded: Tensor, prompts: Tensor) -> Tensor:
    error = (decoded - prompts).square().sum((1, 2)) / prompts.square().sum((1, 2)).clamp(min=1e-12)
    return error.mean()


def _cycle_loss(codec: Codec, z: Float[Tensor, "B d_z"], rng: Generator) -> Float[Tensor, ""]:
    """||phi(Dec(v)) - v||^2 at points between two users, because prototypes will lie between users."""
    share = torch.rand(len(z), 1, generator=rng).to(z)
    v = unit(share * z + (1 - share) * z.roll(1, 0))
    return (codec.encode(codec.decode(v)) - v).square().sum(-1).mean()


def train_query_encoder(
    g: QueryEncoder,
    hidden: Float[Tensor, "n d"],
    z: Float[Tensor, "n d_z"],
    rng: Generator,
    *,
    how: CodecTraining,
) -> tuple[QueryEncoder, tuple[float, ...]]:
    """A frozen copy that sends a warm-up user's query near the user's own prompt vector, and the loss before each step.

    The loss is 1 - cosine plus the contrast with the other users of the batch; the paper names no training of g.
    """
    g = copy.deepcopy(g).requires_grad_(True)

    def loss(batch: Tensor) -> Tensor:
        similarity: Tensor = g(hidden[batch]) @ z[batch].T  # (B, B)
        contrast = nn.functional.cross_entropy(similarity / how.temperature, torch.arange(len(batch), device=z.device))
        return (1 - similarity.diagonal()).mean() + contrast / math.log(max(len(batch), 2))

    trace = _descend(g, loss, len(hidden), rng, how)
    return g.requires_grad_(False), trace


def _descend(
    module: nn.Module, loss: Callable[[Tensor], Tensor], n: int, rng: Generator, how: CodecTraining
) -> tuple[float, ...]:
    """AdamW along the mean loss of batches drawn without replacement; the module changes, the trace comes back."""
    optimiser = torch.optim.AdamW(module.parameters(), lr=how.learning_rate)
    device = next(module.parameters()).device
    trace = []
    for _ in range(how.steps):
        batch: Int[Tensor, " B"] = torch.randperm(n, generator=rng)[: how.batch_size].to(device)
        value = loss(batch)
        optimiser.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        trace.append(float(value.detach()))
    return tuple(trace)


def fit_linear_query(hidden: Float[Tensor, "n d"], z: Float[Tensor, "n d_z"], *, ridge: float = 1.0) -> QueryEncoder:
    """The one-layer g whose output before normalising is the ridge regression of z on the hidden state.

    For few warm-up users, where two layers would learn them by heart.
    """
    x, y = hidden.detach().double(), z.detach().double()
    centred, target = x - x.mean(0), y - y.mean(0)
    gram = centred.T @ centred + ridge * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    slope = torch.linalg.solve(gram, centred.T @ target)  # (d, d_z)
    g = QueryEncoder(x.shape[1], Generator().manual_seed(0), d_z=y.shape[1], width=0).to(hidden.device)
    layer = g.layers[0]
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        layer.weight.copy_(slope.T)
        layer.bias.copy_(y.mean(0) - x.mean(0) @ slope)
    return g.requires_grad_(False)
