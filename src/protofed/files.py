"""Files: whole or not there, tensors with a checksum, one lock for a folder, cells that no spreadsheet runs."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from protofed.errors import RunFolderError, StorageError, storage_error

UNFINISHED = ".unfinished"
NOTES, CHECKSUM = "notes", "sha256"
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how a cell begins that a spreadsheet runs
STEP = 1 << 24  # bytes hashed at once
WAIT = 600.0  # seconds for a lock whose holder writes tables; those of a large grid take minutes


def harmless(text: str) -> str:
    """A text that spreadsheets show as it is: one that they would run as a formula gets an apostrophe before it.

    A carriage return, which some take for the end of a row, becomes a space.
    """
    if not text.startswith(FORMULA):
        return text.replace("\r", " ")
    with contextlib.suppress(ValueError):
        float(text)
        return text  # a number
    return f"'{text}".replace("\r", " ")


@contextlib.contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """A path to write to; it takes the place of `path` once everything is on disk, and vanishes on an error."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        yield unfinished
        with open(unfinished, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as problem:
        raise storage_error(problem, path) from problem
    except SafetensorError as problem:
        raise _as_storage_error(problem, path) from problem
    finally:
        with contextlib.suppress(OSError):  # what went wrong before says it already
            unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """The text, whole or not at all."""
    with written_atomically(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def remove_unfinished(folder: Path) -> None:
    """Clear what a killed process left half-written."""
    for leftover in folder.glob(f"*{UNFINISHED}"):
        leftover.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """The folder, with those above it, once it is clear that files can be written into it."""
    probe = path / f".probe.{os.getpid()}{UNFINISHED}"
    if path.is_symlink() and not path.exists():
        raise StorageError(f"{path} is a link to {os.readlink(path)}, which is not there; give another place")
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as problem:
        raise storage_error(problem, path) from problem


@contextlib.contextmanager
def locked(path: Path, busy: str, *, patience: float = 0.0) -> Iterator[None]:
    """Nobody else inside until the block ends; `busy` is the error for who is not let in within `patience` seconds.

    A killed holder lets go. The lock's file stays: taking it away would let two in.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=patience, poll_interval=0.05)
    except Timeout as problem:
        raise RunFolderError(busy) from problem
    except OSError as problem:
        raise storage_error(problem, path) from problem
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def in_turn(path: Path, tell: Callable[[], None]) -> Iterator[None]:
    """Nobody else inside until the block ends; who has to wait is told so, and waits until the holder ends or dies."""
    lock = FileLock(path)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            tell()
            lock.acquire(timeout=-1, poll_interval=0.2)
    except OSError as problem:
        raise storage_error(problem, path) from problem
    try:
        yield
    finally:
        lock.release()


def save_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Tensors and notes in one safetensors file, with a checksum over all of them."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with written_atomically(path) as unfinished:
        told = {**notes, CHECKSUM: tensors_checksum(whole, notes)}
        unfinished.touch()
        mode = unfinished.stat().st_mode
        save_file(whole, unfinished, metadata={NOTES: json.dumps(told)})  # one entry: several come in any order
        unfinished.chmod(mode)  # whoever may read the folder's other files may read this one


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What `save_tensors` wrote; a ValueError says why where a file is damaged, an OSError where it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            notes = json.loads((file.metadata() or {}).get(NOTES, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as problem:
        raise ValueError(str(problem).splitlines()[0]) from problem
    written = notes.pop(CHECKSUM, None)
    if written is None:
        raise ValueError("it has no checksum")
    if written != tensors_checksum(tensors, notes):
        raise ValueError("its checksum does not match")
    return tensors, notes


def tensors_checksum(tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> str:
    """SHA-256 over every name, type, shape and byte."""
    digest = hashlib.sha256(json.dumps(sorted(notes.items())).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def file_checksum(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(STEP):
            digest.update(piece)
    return digest.hexdigest()


def _as_storage_error(problem: SafetensorError, path: Path) -> Exception:
    """The disk's error where that is what stopped the writer: safetensors tells it in words alone."""
    found = re.search(r"os error (\d+)", str(problem))
    return storage_error(OSError(int(found[1]), os.strerror(int(found[1]))), path) if found else problem
