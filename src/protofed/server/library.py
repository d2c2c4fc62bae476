"""PrototypeLibrary: the shared state of the federation, in one space and on one sphere."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from protofed.client.model import Broadcast
from protofed.errors import ConfigError, DataError
from protofed.files import written_atomically

FORMAT = "protofed-library-1"
LEAST_UPLOADS = 3  # uploads a prototype should expect in a round
LARGEST_DEFAULT = 128


@dataclass(frozen=True, slots=True)
class PrototypeLibrary:
    """K prototypes and the running averages that move them; prompts c_k are always decoded from v, never stored."""

    v: Float[Tensor, "K d_z"]  # unit length
    ema_sums: Float[Tensor, "K d_z"]  # running average of the noised sums of a round
    ema_counts: Float[Tensor, " K"]  # running average of the noised number of uploads of a round
    version: int = 0  # one more with every change, so that a client notices a stale copy

    @property
    def n_prototypes(self) -> int:
        return len(self.v)

    def broadcast(self) -> Broadcast:
        """What devices are sent: the prototypes and their version, never the averages behind them."""
        return Broadcast(self.version, self.v)


def new_library(v: Float[Tensor, "K d_z"], mass: float = LEAST_UPLOADS) -> PrototypeLibrary:
    """A library that starts at `v` as if each prototype had been fed `mass` uploads a round.

    Without that mass the first noised sums alone, mostly noise, would say where a prototype is.
    """
    lengths = v.norm(dim=-1, keepdim=True)
    if not (torch.isfinite(v).all() and (lengths > 0).all()):
        raise ConfigError("prototypes must be finite vectors other than zero; the warm-up did not give such")
    v = v / lengths
    return PrototypeLibrary(v, mass * v, torch.full_like(v[:, 0], mass))


def default_prototypes(rate: float, clients: int) -> int:
    """K: the largest power of two up to 128 that a round feeds three uploads each, and at least 1."""
    k = LARGEST_DEFAULT
    while k > 1 and rate * clients / k < LEAST_UPLOADS:
        k //= 2
    return k


def check_cohort(n_prototypes: int, rate: float, clients: int) -> None:
    """Refuse more prototypes than a round's cohort has uploads: most would only ever see noise."""
    if n_prototypes > max(1.0, rate * clients):
        raise ConfigError(
            f"{n_prototypes} prototypes are more than the {rate * clients:g} uploads a round expects "
            f"(rate {rate:g} of {clients} clients); take K = {default_prototypes(rate, clients)} or a higher rate"
        )


def save(library: PrototypeLibrary, path: Path) -> None:
    """The library as a safetensors file, whole or not at all."""
    from safetensors.torch import save_file

    tensors = {"v": library.v, "ema_sums": library.ema_sums, "ema_counts": library.ema_counts}
    about = {"format": FORMAT, "version": json.dumps(library.version)}
    with written_atomically(path) as unfinished:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, unfinished, about)


def load(path: Path) -> PrototypeLibrary:
    """A saved library."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise DataError(f"no prototype library at {path}")
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as problem:
        raise DataError(f"{path} is not a safetensors file: {problem}") from problem
    if about.get("format") != FORMAT:
        raise DataError(f"{path} is not a prototype library of format {FORMAT}, found {about.get('format')!r}")
    return PrototypeLibrary(**tensors, version=json.loads(about["version"]))
