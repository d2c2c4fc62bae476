"""Item tables: what a site knows of its items, beside a prepared log."""

from pathlib import Path

import pyarrow as pa


def load_items(name: str, root: Path | str) -> pa.Table | None:
    """The item table of a prepared log, None where there is none."""
    return None
