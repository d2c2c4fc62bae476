"""The one thing that leaves a device: its upload of a round."""

import json
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.client.model import Model
from protofed.client.state import DeviceState
from protofed.errors import DataError
from protofed.privacy.draws import Draws
from protofed.privacy.upload import (
    NOTHING,
    SECURE_SCALE,
    RoundRule,
    central_upload,
    compact_local_upload,
    local_upload,
    secure_std,
    secure_upload,
)

FORMAT = "protofed-upload-1"


@dataclass(frozen=True, slots=True)
class Upload:
    """What U devices send in a round: 8-bit embeddings of P points, or all K rows where devices add the noise.

    The types are those of `make_upload`; whatever else arrives is refused by the server's `accept`.
    """

    round_: int
    version: int  # of the prototypes the devices assigned themselves to
    tokens: Tensor  # (U,) int64: tell a second copy of an upload, and nothing else
    block: Tensor  # (U,) int64: the prototype, NOTHING where there is nothing to say or the index would tell too much
    codes: Tensor  # (U, P, row) int8; int64 for integers modulo 2^32

    def __len__(self) -> int:
        return self.tokens.numel()


def make_upload(model: Model, state: DeviceState, rule: RoundRule, draws: Draws, round_: int) -> Upload:
    """The devices' uploads: encoded, assigned, clipped and quantised; noised where the trust model asks for it.

    A device that has learned from no event after the base block has nothing to say (`DeviceState.contributes`): taking
    the user's later events away then takes the user's contribution away, which is what the noise is priced for.
    """
    z = embed_prompts(model, state, rule)
    block = nearest(z[:, 0], model.v).where(state.contributes, NOTHING)
    make = {"points": _points, "noised points": _noised_points, "noised rows": _noised_rows, "integers": _integers}
    codes, block = make[rule.form](model, state.users, z, block, rule, draws, round_)
    return Upload(round_, model.version, draws.tokens(state.users, round_), block, codes)


def nearest(z: Float[Tensor, "U d_z"], v: Float[Tensor, "K d_z"]) -> Int[Tensor, " U"]:
    """The nearest prototype of each embedding, the first of equally near ones. A_k of Eq. (9), eq:fedkmeans.

    Called on the device with its clean embedding: after the noise, which in 64 dimensions is several times longer than
    the embedding, a server could only guess. A row that is not finite gets 0; its upload contributes nothing.
    """
    return torch.cdist(torch.nan_to_num(z), v, compute_mode="donot_use_mm_for_euclid_dist").argmin(dim=-1)


@torch.no_grad()
def embed_prompts(model: Model, state: DeviceState, rule: RoundRule) -> Float[Tensor, "U P d_z"]:
    """phi of each device's long prompt; for the barycenter also that of long and short together."""
    codec, prompts = model.encoders.codec, state.prompts
    points = [prompts.long, prompts.long + prompts.short][: rule.points]
    return torch.stack([codec.encode(point) for point in points], dim=1)


def _points(
    model: Model, users: Tensor, z: Tensor, block: Tensor, rule: RoundRule, draws: Draws, round_: int
) -> tuple[Tensor, Tensor]:
    """8-bit embeddings, each with the index of its prototype in clear."""
    rounding = draws.uniform("quantise", users, round_, (rule.points, rule.upload.width))
    sent = [central_upload(z[:, p], block, rule.upload, rounding[:, p]) for p in range(rule.points)]
    fine = z.isfinite().flatten(1).all(1)
    return torch.stack([each.codes for each in sent], dim=1), block.where(fine, NOTHING)


def _noised_points(
    model: Model, users: Tensor, z: Tensor, block: Tensor, rule: RoundRule, draws: Draws, round_: int
) -> tuple[Tensor, Tensor]:
    """Embeddings noised on the device; each of P as if it were alone, with sqrt(P) times the noise of one."""
    upload, n = rule.upload, rule.points
    z = z.where((block != NOTHING)[:, None, None], 0.0)
    std, shape = upload.noise_std(rule.noise_multiplier, "local") * n**0.5, (n, upload.width)
    own, rounding = draws.normal("local noise", users, round_, shape), draws.uniform("quantise", users, round_, shape)
    sent = [compact_local_upload(z[:, p], model.v, upload, std, own[:, p], rounding[:, p]) for p in range(n)]
    return torch.stack([each.codes for each in sent], dim=1), torch.full_like(block, NOTHING)


def _noised_rows(
    model: Model, users: Tensor, z: Tensor, block: Tensor, rule: RoundRule, draws: Draws, round_: int
) -> tuple[Tensor, Tensor]:
    """All K rows, noised on the device, so that not even the index tells."""
    upload = rule.upload
    std, shape = upload.noise_std(rule.noise_multiplier, "local"), (upload.n_prototypes, upload.width + 1)
    own, rounding = draws.normal("local noise", users, round_, shape), draws.uniform("quantise", users, round_, shape)
    return local_upload(z[:, 0], block, upload, std, own, rounding), torch.full_like(block, NOTHING)


def _integers(
    model: Model, users: Tensor, z: Tensor, block: Tensor, rule: RoundRule, draws: Draws, round_: int
) -> tuple[Tensor, Tensor]:
    """All K rows as integers with a share of the noise; the transport masks them, so that only their sum is seen."""
    upload = rule.upload
    std = secure_std(upload, rule.noise_multiplier, SECURE_SCALE, least=rule.least, clients=max(len(users), rule.least))
    share = draws.discrete_gaussian("noise share", users, round_, (upload.n_prototypes, upload.width + 1), std)
    return secure_upload(z[:, 0], block, upload, SECURE_SCALE, share), torch.full_like(block, NOTHING)


def to_bytes(upload: Upload) -> bytes:
    """The upload as one safetensors blob."""
    from safetensors.torch import save

    about = {"format": FORMAT, "round": str(upload.round_), "version": str(upload.version)}
    tensors = {"tokens": upload.tokens, "block": upload.block, "codes": upload.codes}
    return bytes(save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, metadata=about))


def from_bytes(blob: bytes) -> Upload:
    """The upload in a blob; what is in it is checked where it is accepted."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(blob)
        about = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")]).get("__metadata__", {})
        if about.get("format") != FORMAT:
            raise ValueError(f"its format should be {FORMAT}, found {about.get('format')!r}")
        columns = (tensors[name] for name in ("tokens", "block", "codes"))
        return Upload(int(about["round"]), int(about["version"]), *columns)
    except (SafetensorError, ValueError, KeyError, AttributeError) as problem:
        raise DataError(f"an upload could not be read: {problem}") from problem
