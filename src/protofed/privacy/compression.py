"""Fewer bytes for an upload: 8-bit scalars, PCA, product quantisation.

Whatever is fitted (a PCA basis, codebooks) is fitted on warm-up data: fitting on uploads would be one more query.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Generator, Tensor

from protofed.errors import ConfigError, MissingExtra

LEVELS = 127  # codes -127..127, so that zero is a code


def quantise(x: Float[Tensor, "*shape"], reach: float, uniforms: Float[Tensor, "*shape"]) -> Int8[Tensor, "*shape"]:
    """8-bit codes of numbers in [-reach, reach], rounded up or down at random so that the mean is right.

    The range is a public constant, never the data's own. Numbers outside it are cut off, what is not finite becomes 0.
    """
    steps = torch.nan_to_num(x, nan=0.0).double().clamp(-reach, reach) * (LEVELS / reach)
    return (steps + uniforms).floor().clamp(-LEVELS, LEVELS).to(torch.int8)


def dequantise(codes: Int8[Tensor, "*shape"], reach: float) -> Float[Tensor, "*shape"]:
    """The numbers that codes stand for; at most reach / 127 from the original."""
    return codes.to(torch.float32).clamp(min=-LEVELS) * (reach / LEVELS)


@dataclass(frozen=True, slots=True)
class Pca:
    """A projection onto the directions along which warm-up embeddings vary most."""

    mean: Float[Tensor, " d_phi"]
    basis: Float[Tensor, "d_phi d_z"]  # orthonormal columns

    def compress(self, x: Float[Tensor, "U d_phi"]) -> Float[Tensor, "U d_z"]:
        """Coordinates in the basis."""
        return (x - self.mean) @ self.basis

    def expand(self, z: Float[Tensor, "U d_z"]) -> Float[Tensor, "U d_phi"]:
        """The nearest embeddings that have these coordinates."""
        return z @ self.basis.T + self.mean


def fit_pca(warm_up: Float[Tensor, "B d_phi"], width: int) -> Pca:
    """The best linear compression of warm-up embeddings to `width` numbers."""
    n, full = warm_up.shape
    if not 1 <= width <= min(n, full):
        raise ConfigError(f"PCA keeps between 1 and {min(n, full)} of {full} numbers fitted on {n} rows, got {width}")
    mean = warm_up.mean(dim=0)
    rows = torch.linalg.svd(warm_up - mean, full_matrices=False).Vh[:width]
    largest = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True))
    return Pca(mean, (rows * largest.sign()).T.contiguous())  # a fixed sign: another library gives the same basis


@dataclass(frozen=True, slots=True)
class Codebooks:
    """Product quantisation: one byte for each of S parts of a vector."""

    centres: Float[Tensor, "S C d_part"]

    def encode(self, z: Float[Tensor, "U d_z"]) -> UInt8[Tensor, "U S"]:
        """The nearest centre of each part."""
        parts = z.reshape(len(z), len(self.centres), -1).transpose(0, 1)  # (S, U, d_part)
        return torch.cdist(parts, self.centres).argmin(dim=-1).T.to(torch.uint8)

    def decode(self, codes: UInt8[Tensor, "U S"]) -> Float[Tensor, "U d_z"]:
        """The centres, put together."""
        parts = [centres[code] for centres, code in zip(self.centres, codes.long().T, strict=True)]
        return torch.cat(parts, dim=-1)


def fit_codebooks(
    warm_up: Float[Tensor, "B d_z"], n_parts: int, rng: Generator, *, n_centres: int = 256, library: str = "own"
) -> Codebooks:
    """Codebooks fitted on warm-up embeddings by k-means, part by part; `library="faiss"` is faster on large data.

    For local trust, fit on warm-up embeddings *with noise*, or the codebooks cannot reach what is sent.
    """
    n, width = warm_up.shape
    if width % n_parts or not 1 <= n_centres <= min(256, n):
        raise ConfigError(
            f"codebooks need a width divisible by their parts and at most min(256, rows) centres, "
            f"got width {width}, {n_parts} parts, {n_centres} centres, {n} rows"
        )
    parts = warm_up.reshape(n, n_parts, -1).transpose(0, 1)
    fit = _faiss_centres if library == "faiss" else _centres
    return Codebooks(torch.stack([fit(part, n_centres, rng) for part in parts]))


def _centres(x: Float[Tensor, "B d"], n_centres: int, rng: Generator, iterations: int = 25) -> Float[Tensor, "C d"]:
    centres = x[torch.randperm(len(x), generator=rng)[:n_centres]]
    for _ in range(iterations):
        nearest = torch.cdist(x, centres).argmin(dim=-1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, x)
        counts = torch.bincount(nearest, minlength=n_centres)[:, None]
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return centres


def _faiss_centres(x: Float[Tensor, "B d"], n_centres: int, rng: Generator) -> Float[Tensor, "C d"]:
    try:
        import faiss
    except ImportError as missing:
        raise MissingExtra("faiss", "ann") from missing
    seed = int(torch.randint(2**31 - 1, (1,), generator=rng))
    kmeans = faiss.Kmeans(x.shape[1], n_centres, niter=25, seed=seed)
    kmeans.train(x.contiguous().numpy())
    return torch.from_numpy(kmeans.centroids)
