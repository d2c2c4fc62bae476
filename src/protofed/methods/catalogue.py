"""Every method by name: a table to read, not a registry."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from protofed.errors import ConfigError
from protofed.methods.baselines.ccd import CCD
from protofed.methods.baselines.ewc import EWC
from protofed.methods.baselines.experience_replay import ERFreq, ERRandom
from protofed.methods.baselines.finetune_last import FineTuneLast
from protofed.methods.baselines.full_retrain import FullRetrain
from protofed.methods.baselines.infer import Infer
from protofed.methods.baselines.lwf import LwF
from protofed.methods.baselines.mas import MAS
from protofed.methods.baselines.reloop import ReLoop
from protofed.methods.baselines.reloop2 import ReLoop2
from protofed.methods.baselines.sail_piw import SailPIW
from protofed.methods.baselines.synaptic_intelligence import SynapticIntelligence
from protofed.methods.frozen import Frozen
from protofed.methods.popularity import Popularity
from protofed.methods.protocol import Method
from protofed.methods.protofed_sp import ProtoFedSP


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
    "protofed-sp": Entry(
        ProtoFedSP(), "prompts and own rows on the devices, prototypes shared under differential privacy"
    ),
    "full-retrain": Entry(FullRetrain(), "all weights, from scratch, on everything so far"),
    "ewc": Entry(EWC(), "fine-tuned, held where the past's likelihood is sensitive (Fisher)"),
    "si": Entry(SynapticIntelligence(), "fine-tuned, held by what each weight took off the loss while it was learned"),
    "mas": Entry(MAS(), "fine-tuned, held where the scores are sensitive, labels unused"),
    "lwf": Entry(LwF(), "fine-tuned, graded by yesterday's model on lists of items it knows"),
    "sail-piw": Entry(SailPIW(), "lwf with a learned weight for each user"),
    "er-random": Entry(ERRandom(), "fine-tuning that replays a uniform reservoir of earlier events"),
    "er-freq": Entry(ERFreq(), "fine-tuning that replays earlier events, those of rare users likelier"),
    "reloop": Entry(ReLoop(), "fine-tuning that may not err more than the last version did"),
    "reloop2": Entry(ReLoop2(), "fine-tuning whose scores are compensated by remembered errors"),
    "infer": Entry(Infer(), "fine-tuning that replays the events of largest influence on held-out ones"),
    "ccd": Entry(CCD(), "teacher and student that teach each other through slow and fast proxies"),
}


def method_named(name: str) -> Entry:
    """The method of that name; an unknown name is an error that suggests the nearest."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(METHODS)}"
        raise ConfigError(f"unknown method {name!r}; {hint}")
    return METHODS[name]
