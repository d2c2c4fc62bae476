"""Named random streams, so that adding a draw in one place moves nothing elsewhere."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Generator


def seed_of(seed: int, *names: str | int) -> int:
    """A 63-bit seed for one named purpose."""
    digest = hashlib.sha256(repr((seed, names)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def stream(seed: int, *names: str | int, device: torch.device | str = "cpu") -> Generator:
    """A generator for one purpose, e.g. stream(7, "warm-up", "negatives", epoch)."""
    return Generator(device).manual_seed(seed_of(seed, *names))


def numpy_stream(seed: int, *names: str | int) -> np.random.Generator:
    """The same for numpy."""
    return np.random.default_rng(seed_of(seed, *names))


@contextlib.contextmanager
def seeded(seed: int, *names: str | int) -> Iterator[None]:
    """Put layers that draw from PyTorch's global generator (dropout) on a named stream; it is put back after."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed_of(seed, *names))
        yield


def user_keys(ids: Iterable[object]) -> np.ndarray:
    """Each user's number in every draw: 63 bits of a hash of the original id, the same in every log and runtime."""
    digests = (hashlib.sha256(str(user).encode()).digest()[:8] for user in ids)
    return np.array([int.from_bytes(digest, "big") >> 1 for digest in digests], dtype=np.int64)
