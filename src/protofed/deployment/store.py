"""Device states in one SQLite file beside the host: a state is on disk with the answer it led to, or neither is."""

import contextlib
import json
import secrets
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from protofed.errors import DataError, StorageError
from protofed.files import CHECKSUM, tensors_checksum
from protofed.snapshot import Snapshot, restore, take_snapshot

FORMAT = "protofed-store-1"
PATIENCE = 600.0  # seconds that a second process waits for the first


@dataclass(frozen=True, slots=True)
class Kept:
    """What an open store holds; everything that is put is written when its transaction ends, or not at all."""

    database: sqlite3.Connection

    def get(self, name: str) -> Any:
        """The state of that name; None where there is none."""
        blob = self.read(name)
        return None if blob is None else state_of(blob)

    def put(self, name: str, state: object) -> None:
        """Keep a state under a name."""
        self.write(name, bytes_of(state))

    def read(self, name: str) -> bytes | None:
        """The bytes of that name."""
        found = self.database.execute("SELECT value FROM kept WHERE name = ?", (name,)).fetchone()
        return None if found is None else bytes(found[0])

    def write(self, name: str, value: bytes) -> None:
        """Keep bytes under a name."""
        self.database.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (name, value))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Kept]:
    """The store, for one transaction: nobody else writes meanwhile, and a crash or an error leaves it as it was."""
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)) as database:
            database.execute("PRAGMA synchronous = FULL")
            database.execute("BEGIN IMMEDIATE")
            try:
                database.execute("CREATE TABLE IF NOT EXISTS kept (name TEXT PRIMARY KEY, value BLOB NOT NULL)")
                yield Kept(database)
                database.execute("COMMIT")
            except BaseException:
                database.execute("ROLLBACK")
                raise
    except sqlite3.Error as problem:
        raise StorageError(
            f"{path}: device states cannot be kept there ({problem}); give a place that can be written"
        ) from problem


def secret_of(kept: Kept) -> bytes:
    """What the host's devices make their tokens with; drawn once from the operating system."""
    secret = kept.read("secret")
    if secret is None:
        secret = secrets.token_bytes(32)
        kept.write("secret", secret)
    return secret


def bytes_of(state: object) -> bytes:
    """A state as one safetensors blob, with a checksum over all of it."""
    snapshot = take_snapshot(state)
    about = {"format": FORMAT, "outline": snapshot.outline}
    return bytes(save(snapshot.tensors, about | {CHECKSUM: tensors_checksum(snapshot.tensors, about)}))


def state_of(blob: bytes) -> Any:
    """The state in a blob of `bytes_of`."""
    try:
        about = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")]).get("__metadata__", {})
        if about.get("format") != FORMAT:
            raise ValueError(f"its format should be {FORMAT}, found {about.get('format')!r}")
        tensors, written = load(blob), about.pop(CHECKSUM, None)
        if written != tensors_checksum(tensors, about):
            raise ValueError("its checksum does not match")
        return restore(Snapshot(tensors, about["outline"]))
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise DataError(f"a state of the store could not be read: {problem}; begin it anew") from problem
