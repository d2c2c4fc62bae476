"""Files that are either whole or not there."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".unfinished"


@contextlib.contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """A path to write to; it takes the place of `path` once everything is on disk, and vanishes on an error."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        yield unfinished
        with open(unfinished, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """The text, whole or not at all."""
    with written_atomically(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def remove_unfinished(folder: Path) -> None:
    """Clear what a killed process left half-written."""
    for leftover in folder.glob(f"*{UNFINISHED}"):
        leftover.unlink(missing_ok=True)
