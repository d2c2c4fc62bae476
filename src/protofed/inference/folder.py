"""A model as a folder: what devices hold alike, the devices of a simulation, items, settings, ledger, a model card.

model.safetensors is written last: it is there if and only if the folder is a whole model. Tensors carry checksums.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from protofed.client.model import Model, fingerprint
from protofed.client.state import DeviceState, select
from protofed.errors import DataError, RunFolderError
from protofed.files import load_tensors, make_folder, save_tensors, write_text, written_atomically
from protofed.inference.head import FittedHead
from protofed.inference.recommender import NOBODY, Bystanders, Catalogue, Recommender
from protofed.privacy.ledger import read_ledger, write_ledger
from protofed.privacy.upload import RoundRule
from protofed.snapshot import Snapshot, restore, take_snapshot

FORMAT = "protofed-model-1"
MODEL, DEVICES, ITEMS, CARD = "model.safetensors", "devices.safetensors", "items.parquet", "README.md"
SETTINGS, LEDGER = "config.toml", "ledger.json"
FILES = (MODEL, DEVICES, ITEMS, CARD)
RUN_AGAIN = "delete the folder and make it again with `protofed run`"  # which keeps a finished folder as it is


@dataclass(frozen=True, slots=True)
class Shared:
    """What model.safetensors holds."""

    model: Model
    rule: RoundRule | None
    next_round: int
    next_slice: int
    head: FittedHead | None = None


@dataclass(frozen=True, slots=True)
class Users:
    """What devices.safetensors holds."""

    devices: DeviceState
    bystanders: Bystanders


def save(recommender: Recommender, path: Path | str, *, devices: bool = True) -> Path:
    """The folder written; without `devices` it holds nothing of any user."""
    folder = Path(path)
    make_folder(folder)
    if not devices:
        nobody = select(recommender.devices, torch.zeros(0, dtype=torch.int64))
        recommender = replace(recommender, devices=nobody, bystanders=NOBODY)
    write_text(folder / SETTINGS, recommender.settings)
    write_ledger(folder / LEDGER, recommender.ledger, trust=recommender.trust)
    write_text(folder / CARD, recommender.card)
    save_parts(recommender, folder)
    return folder


def save_parts(recommender: Recommender, folder: Path) -> None:
    """What a run's folder lacks to be a model: items, devices and the model itself."""
    with written_atomically(folder / ITEMS) as unfinished:
        pq.write_table(recommender.catalogue.table, unfinished, compression="zstd", write_page_checksum=True)
    snapshot = take_snapshot(Users(recommender.devices, recommender.bystanders))
    notes = {"format": FORMAT, "outline": snapshot.outline, "model": fingerprint(recommender.model)}
    save_tensors(folder / DEVICES, snapshot.tensors, notes)
    shared = Shared(
        recommender.model, recommender.rule, recommender.next_round, recommender.next_slice, recommender.head
    )
    snapshot = take_snapshot(shared)
    notes = {"format": FORMAT, "outline": snapshot.outline, "name": recommender.name}
    save_tensors(folder / MODEL, snapshot.tensors, notes)


def load(path: Path | str, device: torch.device | str = "cpu") -> Recommender:
    """The model in a folder that `save` or `protofed run` wrote; nothing is trained and no log is needed."""
    folder = Path(path)
    refuse_no_model(folder)
    shared, name, _ = _restored(folder / MODEL, device)
    if not isinstance(shared, Shared):
        raise RunFolderError(f"{folder / MODEL} holds no model; {RUN_AGAIN}")
    model = shared.model
    users, _, owner = _restored(folder / DEVICES, device)
    if not isinstance(users, Users) or owner != fingerprint(model):
        raise RunFolderError(
            f"{folder / DEVICES} belongs to model {owner or 'none'}, not to {fingerprint(model)} beside it; {RUN_AGAIN}"
        )
    try:
        ledger, trust = read_ledger(folder / LEDGER)
    except DataError as problem:
        raise RunFolderError(f"{problem}; {RUN_AGAIN}") from problem
    return Recommender(
        name=name,
        model=model,
        rule=shared.rule,
        next_round=shared.next_round,
        next_slice=shared.next_slice,
        head=shared.head,
        catalogue=Catalogue(_items(folder / ITEMS, model.n_items)),
        devices=users.devices,
        bystanders=users.bystanders,
        ledger=ledger,
        trust=trust,
        settings=_text(folder / SETTINGS),
        card=_text(folder / CARD),
    )


def refuse_no_model(folder: Path) -> None:
    """One line for a place that holds no model: what is there instead, and how to get one."""
    if (folder / MODEL).is_file():
        return
    if not folder.is_dir():
        found = "it is a file, a model is a folder" if folder.is_file() else "there is no such folder"
        raise RunFolderError(f"no model at {folder}: {found}; name one that `protofed run --out` wrote")
    if not (folder / SETTINGS).is_file():
        raise RunFolderError(f"no model at {folder}: it is no run's folder; name one that `protofed run --out` wrote")
    if not (folder / "metrics.parquet").is_file():
        raise RunFolderError(f"no model at {folder}: its run is not finished; give the same `protofed run` again")
    if (folder / DEVICES).is_file():
        raise RunFolderError(f"no model at {folder}: {MODEL} is missing; {RUN_AGAIN}")
    raise RunFolderError(
        f"no model at {folder}: its run kept none (made by a bench or an older version, or ranked by what no device "
        "holds); train into a new folder with `protofed run`"
    )


def _restored(path: Path, device: torch.device | str) -> tuple[object, str, str]:
    """What a file of tensors holds, and the name and the model in its notes."""
    try:
        tensors, notes = load_tensors(path)
    except (ValueError, OSError) as problem:
        raise RunFolderError(f"{path} cannot be read ({' '.join(str(problem).split())}); {RUN_AGAIN}") from problem
    if notes.get("format") != FORMAT:
        raise RunFolderError(
            f"{path} is of format {notes.get('format', 'unknown')!r}, this version reads {FORMAT!r}; {RUN_AGAIN}"
        )
    try:
        value = restore(Snapshot(tensors, notes["outline"]), device)
    except Exception as problem:  # whatever the parts of another version raise
        raise RunFolderError(
            f"{path} is of another version of ProtoFed ({' '.join(str(problem).split())}); {RUN_AGAIN}"
        ) from problem
    return value, notes.get("name", ""), notes.get("model", "")


def _items(path: Path, n_items: int) -> pa.Table:
    """The table of the model's items."""
    try:
        table = pq.read_table(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as problem:
        why = " ".join(str(problem).split()) if path.exists() else "there is no such file"
        raise RunFolderError(f"{path} cannot be read ({why}); {RUN_AGAIN}") from problem
    if "item" not in table.column_names or len(table) != n_items:
        raise RunFolderError(f"{path} must name the model's {n_items:,} items, found {len(table):,} rows; {RUN_AGAIN}")
    return table


def _text(path: Path) -> str:
    """A text file's content; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except (UnicodeDecodeError, OSError) as problem:
        raise RunFolderError(f"{path} cannot be read ({problem}); {RUN_AGAIN}") from problem
