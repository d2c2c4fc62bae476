"""From a log and its item table to vectors in the log's numbering: what settings ask for, made now or found kept."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch

from protofed.config import ContentConfig, features_of
from protofed.data.interactions import InteractionLog
from protofed.errors import DataError
from protofed.features import encoders, kept
from protofed.features.columns import category, need, place, texts
from protofed.features.content import Content, Modality, modality
from protofed.features.vectors import read_vectors
from protofed.progress import Progress, silent


@dataclass(frozen=True, slots=True)
class Made:
    """A modality of the whole item table, and what became of its items in numbers."""

    modality: Modality
    notes: Mapping[str, int]


def content_of(
    config: ContentConfig, log: InteractionLog, items: pa.Table | None, cache: Path, progress: Progress = silent
) -> Content | None:
    """What is known of the log's items, as far as settings ask for it; None where they ask for nothing."""
    asked = features_of(config)
    if not asked:
        return None
    if items is None:
        raise DataError(
            f"{log.name} has no item table, which content.features = {config.features!r} needs; "
            "import one by `protofed data import LOG --items FILE --as NAME`, or leave the features out"
        )
    made = (make(name, config, items, cache, progress).modality for name in asked)
    content = Content(tuple(with_gaps(for_log(m, log, items), log, config.missing) for m in made))
    bare = [m.name for m in content.modalities if not m.present.any()]
    if bare:
        raise DataError(f"{log.name}: no item of the log has {bare[0]} in its item table; leave the feature out")
    return content


def plain_features(items: pa.Table | None) -> tuple[str, ...]:
    """The features that an item table gives without an encoder."""
    columns = {"place": {"lat", "lon"}, "category": {"category"}}
    return () if items is None else tuple(name for name, needs in columns.items() if needs <= set(items.column_names))


def make(name: str, config: ContentConfig, items: pa.Table, cache: Path, progress: Progress = silent) -> Made:
    """One feature of the whole item table."""
    if name == "text":
        encoder = encoders.text_encoder(config.text_model)
        found = kept.encode_texts(encoder, texts(items), cache, progress)
        return Made(_modality("text", found), {"without text": found.count(kept.ABSENT)})
    if name == "image":
        files = image_files(items, config.images)
        encoder = encoders.image_encoder(config.image_model)
        found = kept.encode_images(encoder, files, cache, progress)
        notes = {"without a picture": found.count(kept.ABSENT), "with a file that is none": found.count(kept.BROKEN)}
        return Made(_modality("image", found), notes)
    if name == "vectors":
        if not config.vectors:
            raise DataError("the feature `vectors` needs a file; name it by content.vectors = FILE (.npy or .parquet)")
        one = read_vectors(Path(config.vectors), items)
    else:
        one = place(items) if name == "place" else category(items)
    return Made(one, {f"without {name}": int((~one.present).sum())})


def for_log(whole: Modality, log: InteractionLog, items: pa.Table) -> Modality:
    """The rows of the log's items in its numbering; those that the table lacks have none.

    Filters and slices keep identifiers, so a table travels with its log however the log is cut.
    """
    known = items["item"].combine_chunks().cast(pa.string())
    rows = pc.index_in(log.item_ids.cast(pa.string()), value_set=known)
    there = torch.from_numpy(pc.is_valid(rows).to_numpy(zero_copy_only=False))
    at = torch.from_numpy(pc.fill_null(rows, 0).to_numpy().astype("int64"))
    return modality(whole.name, whole.vectors[at], whole.present[at] & there)


def with_gaps(whole: Modality, log: InteractionLog, share: float) -> Modality:
    """Without the vectors of a share of the items, by a hash of feature and identifier: a larger share takes more."""
    if not share:
        return whole
    names = (f"{whole.name} {item}".encode() for item in log.item_ids.to_pylist())
    draws = [int.from_bytes(hashlib.sha256(name).digest()[:8], "big") / 2**64 for name in names]
    kept_ones = torch.tensor(draws, dtype=torch.float64) >= share
    return modality(whole.name, whole.vectors, whole.present & kept_ones)


def image_files(items: pa.Table, folder: str) -> list[Path | None]:
    """Where each item's picture should lie: as its column `image` says, else by its id.

    Pictures that go by ids are FOLDER/ID.jpg, or FOLDER/ID's first three signs/ID.jpg.
    """
    if not folder:
        raise DataError("the feature `image` needs the folder of the pictures; name it by content.images = FOLDER")
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder of pictures; name it by content.images = FOLDER")
    if "image" in items.column_names:
        return [None if name is None else root / name for name in items["image"].to_pylist()]
    need(items, "item", "image")
    ids = [str(item) for item in items["item"].to_pylist()]
    return [next((f for f in (root / f"{i}.jpg", root / i[:3] / f"{i}.jpg") if f.is_file()), None) for i in ids]


def _modality(name: str, found: kept.Encoded) -> Modality:
    return modality(name, found.vectors.float(), found.status == kept.FINE)
