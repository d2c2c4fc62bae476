"""Devices for tests of what leaves a device: phi leaves the long prompt as it is, so an embedding can be anything."""

from dataclasses import replace
from functools import cache

import torch
from torch import Generator, Tensor
from worlds import random_model

from protofed.backbone.sasrec import SASRec, at_rest
from protofed.client.codec import LinearCodec, QueryEncoder, unit
from protofed.client.drift import literal_gate
from protofed.client.model import VARIANTS, Encoders, LocalRule, Model
from protofed.client.prompts import PromptState
from protofed.client.state import DeviceState, new_devices

K, D = 4, 8


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed))


@cache
def backbone() -> SASRec:
    return at_rest(random_model(4, width=D))


def model_with(v: Tensor, version: int = 0) -> Model:
    """A model with these prototypes, whose phi is the identity."""
    codec = LinearCodec(torch.eye(D), 1, normalise=False)
    g = QueryEncoder(D, Generator().manual_seed(0), d_z=D)
    encoders = Encoders(codec, g, literal_gate(), 1.0)
    prior = torch.zeros(len(VARIANTS))
    return Model(backbone(), encoders, v, codec.decode(v), LocalRule(), 4, prior, version=version)


def devices_with(users: Tensor, z: Tensor, contributes: Tensor | None = None) -> DeviceState:
    """Devices of which z[:, 0] is phi of the long prompt, and z[:, 1] that of long and short together."""
    state = new_devices(users, 1, D, D)
    short = z[:, 1:2] - z[:, :1] if z.shape[1] > 1 else torch.zeros_like(z)
    speaks = torch.ones(len(users), dtype=torch.bool) if contributes is None else contributes
    return replace(state, prompts=PromptState(z[:, :1], short), contributes=speaks)


def cohort(n: int, seed: int = 0, points: int = 1) -> tuple[Tensor, Tensor]:
    """User keys as wide as real ones, and their embeddings."""
    keys = torch.randint(2**62, (n,), generator=Generator().manual_seed(seed + 1))
    return keys, unit(drawn(n, points, D, seed=seed))
