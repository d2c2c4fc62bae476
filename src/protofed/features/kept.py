"""Vectors of many texts or pictures, made in pieces that are kept: who is stopped goes on, who asks again waits not."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.features.encoders import Encoder
from protofed.files import load_tensors, make_folder, remove_unfinished, save_tensors
from protofed.progress import Progress, silent

TEXTS_A_PIECE, PICTURES_A_PIECE = 8_192, 512
ABSENT, FINE, BROKEN = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Encoded:
    """A vector for each thing, and what became of it."""

    vectors: Float[Tensor, "n w"]  # float16; zeros where there is none
    status: Int[Tensor, " n"]  # ABSENT, FINE or BROKEN

    def count(self, status: int) -> int:
        return int((self.status == status).sum())


def encode_texts(encoder: Encoder, texts: Sequence[str], cache: Path, progress: Progress = silent) -> Encoded:
    """Vectors of texts; an empty one has none."""
    return _in_pieces(encoder, texts, list(texts), lambda text: text or None, cache, TEXTS_A_PIECE, progress)


def encode_images(encoder: Encoder, files: Sequence[Path | None], cache: Path, progress: Progress = silent) -> Encoded:
    """Vectors of pictures; files that are missing or are no pictures have none and are counted."""
    marks = [_mark(file) for file in files]
    return _in_pieces(encoder, files, marks, lambda file: pixels(file, encoder.side), cache, PICTURES_A_PIECE, progress)


def _in_pieces(
    encoder: Encoder,
    things: Sequence[Any],
    marks: Sequence[str],
    read: Callable[[Any], Any],
    cache: Path,
    size: int,
    progress: Progress,
) -> Encoded:
    """Piece by piece, from its file or made now; a piece is known by the encoder's hash and what its things hold."""
    folder = cache / "features" / f"{encoder.name}-{encoder.key}"
    make_folder(folder)
    remove_unfinished(folder)
    pieces = []
    for start in range(0, len(things), size):
        key = hashlib.sha256("\x00".join(marks[start : start + size]).encode("utf-8", "replace")).hexdigest()[:32]
        pieces.append(_piece(encoder, things[start : start + size], read, folder / f"{key}.safetensors"))
        done = min(start + size, len(things))
        progress("features", done, len(things), f"{encoder.name}: {done:,} of {len(things):,}")
    width = max((piece.vectors.shape[1] for piece in pieces), default=1)
    whole = [piece.vectors if piece.vectors.shape[1] == width else piece.vectors.new_zeros(len(piece.vectors), width)
             for piece in pieces]  # fmt: skip
    return Encoded(torch.cat(whole), torch.cat([piece.status for piece in pieces]))


def _piece(encoder: Encoder, things: Sequence[Any], read: Callable[[Any], Any], file: Path) -> Encoded:
    if file.is_file():
        try:
            tensors, _ = load_tensors(file)
            return Encoded(tensors["vectors"], tensors["status"])
        except (ValueError, KeyError):  # damaged: made again
            pass
    status, found, places = torch.zeros(len(things), dtype=torch.int64), [], []
    vectors: list[Tensor] = []
    for place, thing in enumerate(things):
        value = read(thing)
        if value is BROKEN:
            status[place] = BROKEN
        elif value is not None:
            found.append(value)
            places.append(place)
        if len(found) == encoder.batch:
            vectors.append(encoder.encode(found))
            found = []
    if found:
        vectors.append(encoder.encode(found))
    width = vectors[0].shape[1] if vectors else 1
    table = torch.zeros(len(things), width, dtype=torch.float16)
    if vectors:
        table[places] = torch.cat(vectors).half()
        status[places] = FINE
    save_tensors(file, {"vectors": table, "status": status}, {})
    return Encoded(table, status)


def _mark(file: Path | None) -> str:
    """What tells a picture from an earlier one at its place."""
    if file is None or not file.is_file():
        return "none"
    told = file.stat()
    return f"{file.name} {told.st_size} {told.st_mtime_ns}"


def pixels(file: Path | None, side: int) -> Any:
    """A picture as a square of so many pixels, None where there is no file, BROKEN where it is no picture."""
    if file is None or not file.is_file():
        return None
    from PIL import Image

    try:
        with Image.open(file) as opened:
            return np.array(opened.convert("RGB").resize((side, side), Image.Resampling.BICUBIC))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return BROKEN
