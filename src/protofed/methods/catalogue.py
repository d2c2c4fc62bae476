"""Every method by name: a table to read, not a registry."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from protofed.errors import ConfigError
from protofed.methods.baselines.finetune_last import FineTuneLast
from protofed.methods.baselines.full_retrain import FullRetrain
from protofed.methods.frozen import Frozen
from protofed.methods.popularity import Popularity
from protofed.methods.protocol import Method


@dataclass(frozen=True, slots=True)
class Entry:
    """A method, what it is in one line, and the settings it brings along."""

    method: Method[Any]
    summary: str
    settings: Mapping[str, object] = field(default_factory=dict)


METHODS: Mapping[str, Entry] = {
    "popularity": Entry(Popularity(), "train counts of the slice, the same for everybody"),
    "frozen": Entry(Frozen(), "base backbone; new items get rows, nothing else learns"),
    "frozen-no-new-rows": Entry(Frozen(new_rows=False), "base backbone as it is; new items share the mean row"),
    "personal-memory": Entry(
        Frozen(), "frozen, plus the user's own past items, recent ones more", {"scoring.personal_memory": 2.0}
    ),
    "finetune-last": Entry(FineTuneLast(), "all weights, warm-started, trained on the current slice"),
    "full-retrain": Entry(FullRetrain(), "all weights, from scratch, on everything so far"),
}


def method_named(name: str) -> Entry:
    """The method of that name; an unknown name is an error that suggests the nearest."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(METHODS)}"
        raise ConfigError(f"unknown method {name!r}; {hint}")
    return METHODS[name]
