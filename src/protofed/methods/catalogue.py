"""Every method by name: a table to read, not a registry."""

import difflib
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from protofed.config import RunConfig, hyper_values, override_at_once
from protofed.errors import ConfigError
from protofed.methods.baselines.adapters import AdapterCL, Adapters
from protofed.methods.baselines.ccd import CCD
from protofed.methods.baselines.ditto import Ditto
from protofed.methods.baselines.dual_lora import DualLoRA
from protofed.methods.baselines.ewc import EWC
from protofed.methods.baselines.experience_replay import ERFreq, ERRandom
from protofed.methods.baselines.fedavg import FedAvg
from protofed.methods.baselines.fedprox import FedProx
from protofed.methods.baselines.fedrap import FedRAP
from protofed.methods.baselines.finetune_last import FineTuneLast
from protofed.methods.baselines.full_retrain import FullRetrain
from protofed.methods.baselines.infer import Infer
from protofed.methods.baselines.lwf import LwF
from protofed.methods.baselines.mas import MAS
from protofed.methods.baselines.pcl import PCL
from protofed.methods.baselines.prefix_tuning import PrefixTuning
from protofed.methods.baselines.recicl import RecICL
from protofed.methods.baselines.reloop import ReLoop
from protofed.methods.baselines.reloop2 import ReLoop2
from protofed.methods.baselines.sail_piw import SailPIW
from protofed.methods.baselines.synaptic_intelligence import SynapticIntelligence
from protofed.methods.frozen import Frozen
from protofed.methods.names import FLAGSHIP, OURS
from protofed.methods.popularity import Popularity
from protofed.methods.protocol import Method
from protofed.methods.protofed import ProtoFed
from protofed.methods.protofed_sp import ProtoFedSP
from protofed.methods.search_spaces import check_hyper

VERBS = ("start", "learn", "score", "evidence")
WAY_IN = "its module must be installed, on PYTHONPATH or in this folder, and its class made without arguments"


@dataclass(frozen=True, slots=True)
class Entry:
    """A method, what it is in one line, the settings it brings along and the variants it has."""

    method: Method[Any]
    summary: str
    settings: Mapping[str, object] = field(default_factory=dict)
    variants: tuple[str, ...] = ("standard",)
    trivial: bool = False  # no more than a floor for the others
    shares_nothing: bool = False  # after the base block, nobody learns anything from anybody
    modes: tuple[str, ...] = ()  # the values of protofed.mode that it has
    private_mode: str = ""  # the one of them in which it is private by itself


BOTH = ("standard", "peft")
PEFT = {"variant": "peft"}  # methods that know no other


METHODS: Mapping[str, Entry] = {
    "popularity": Entry(Popularity(), "train counts of the slice, the same for everybody", trivial=True),
    "frozen": Entry(Frozen(), "base backbone; new items get rows, nothing else learns", trivial=True),
    "frozen-no-new-rows": Entry(
        Frozen(new_rows=False),
        "base backbone as it is; new items share the mean row",
        trivial=True,
        shares_nothing=True,
    ),
    "personal-memory": Entry(
        Frozen(),
        "frozen, plus the user's own past items, recent ones more",
        {"scoring.personal_memory": 2.0},
        trivial=True,
    ),
    "finetune-last": Entry(FineTuneLast(), "all weights, warm-started, trained on the current slice", variants=BOTH),
    OURS: Entry(
        ProtoFedSP(),
        "prompts and own rows on the devices, prototypes shared under differential privacy",
        modes=("reference", "literal", "nodp"),
        private_mode="reference",
    ),
    FLAGSHIP: Entry(
        ProtoFed(),
        "ProtoFed-SP's devices under a head over their own past; --share says what leaves them",
        {"protofed.mode": "private", "scoring.head": True},
        modes=("nothing", "private"),
        private_mode="private",
    ),
    "full-retrain": Entry(FullRetrain(), "all weights, from scratch, on everything so far", variants=BOTH),
    "ewc": Entry(EWC(), "fine-tuned, held where the past's likelihood is sensitive (Fisher)", variants=BOTH),
    "si": Entry(
        SynapticIntelligence(),
        "fine-tuned, held by what each weight took off the loss while it was learned",
        variants=BOTH,
    ),
    "mas": Entry(MAS(), "fine-tuned, held where the scores are sensitive, labels unused", variants=BOTH),
    "lwf": Entry(LwF(), "fine-tuned, graded by yesterday's model on lists of items it knows", variants=BOTH),
    "sail-piw": Entry(SailPIW(), "lwf with a learned weight for each user", variants=BOTH),
    "er-random": Entry(ERRandom(), "fine-tuning that replays a uniform reservoir of earlier events", variants=BOTH),
    "er-freq": Entry(ERFreq(), "fine-tuning that replays earlier events, those of rare users likelier", variants=BOTH),
    "reloop": Entry(ReLoop(), "fine-tuning that may not err more than the last version did", variants=BOTH),
    "reloop2": Entry(ReLoop2(), "fine-tuning whose scores are compensated by remembered errors", variants=BOTH),
    "infer": Entry(Infer(), "fine-tuning that replays the events of largest influence on held-out ones", variants=BOTH),
    "ccd": Entry(CCD(), "teacher and student that teach each other through slow and fast proxies", variants=BOTH),
    "prompt-tuning": Entry(FineTuneLast(), "frozen backbone; one shared prompt, warm-started", PEFT, ("peft",)),
    "prefix-tuning": Entry(PrefixTuning(), "frozen backbone; shared keys and values in every block", PEFT, ("peft",)),
    "adapters": Entry(Adapters(), "frozen backbone; one set of bottlenecks in every block", PEFT, ("peft",)),
    "adapter-cl": Entry(
        AdapterCL(), "a set of adapters per slice; each query's own history chooses one", PEFT, ("peft",)
    ),
    "dual-lora": Entry(DualLoRA(), "a slow and a fast low-rank update of attention, merged", PEFT, ("peft",)),
    "recicl": Entry(RecICL(), "taught once to read demonstrations; later slices only bring newer ones"),
    "pcl": Entry(PCL(), "frozen backbone; each slice adds prompts to a history's newest items", PEFT, ("peft",)),
    "fedavg": Entry(FedAvg(), "federated averaging; each client then fine-tunes a copy of its own", variants=BOTH),
    "fedprox": Entry(FedProx(), "federated averaging with clients held near the broadcast", variants=BOTH),
    "ditto": Entry(Ditto(), "federated averaging, and copies on the devices that are held near it", variants=BOTH),
    "fedrap": Entry(FedRAP(), "a shared item table plus a private one on each device", variants=BOTH),
}


def method_named(name: str) -> Entry:
    """The method of that name; an unknown name is an error that suggests the nearest.

    `package.module:Name` is a method from outside the package.
    """
    if ":" in name:
        return Entry(method=outside_method(name), summary="a method from outside the package")
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(METHODS)}"
        raise ConfigError(f"unknown method {name!r}; {hint}")
    return METHODS[name]


def has_modes(method: str) -> bool:
    """Whether the method is private by a mode of its own, and not by being wrapped; one of another version is not."""
    return method in METHODS and bool(METHODS[method].modes)


def has_dial(method: str) -> bool:
    """Whether --share says what leaves the devices of this method."""
    return has_modes(method) and "nothing" in METHODS[method].modes


def private_by_itself(method: str, mode: str) -> bool:
    """Whether the method's own mechanism keeps the claim in this protofed.mode."""
    return has_modes(method) and METHODS[method].private_mode == mode


def shares_nothing(config: RunConfig) -> bool:
    """Whether no device tells anything of an event after the base block."""
    entry = method_named(config.method)
    return entry.shares_nothing or (bool(entry.modes) and config.protofed.mode == "nothing")


def only_noised(config: RunConfig) -> bool:
    """Whether all that leaves a device is in the ledger, so that an empty one means ε = 0."""
    return shares_nothing(config) or private_by_itself(config.method, config.protofed.mode)


def outside_method(name: str) -> Method[Any]:
    """The method, or one made without arguments of the class, that `package.module:Name` names."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"a method from outside the package is named package.module:Name, got {name!r}")
    if module.partition(".")[0] == "protofed":
        raise ConfigError(f"{name!r} lies inside the package; name it as `protofed run --list-methods` does")
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append("")  # the installed command does not look in the folder it is called from
    try:
        found = getattr(importlib.import_module(module), attribute)
        method = found() if isinstance(found, type) else found
    except Exception as problem:  # whatever the module of somebody else raises
        raise ConfigError(f"method {name!r} cannot be loaded: {_said(problem)}; {WAY_IN}") from problem
    if not isinstance(method, Method):
        lacks = [verb for verb in VERBS if not hasattr(method, verb)]
        raise ConfigError(f"{name!r} is no method: it lacks {', '.join(lacks)}; see protofed.methods.protocol.Method")
    return method


def _said(problem: Exception) -> str:
    """The kind of the error and its first line."""
    return ": ".join([type(problem).__name__, *str(problem).splitlines()[:1]])


def configured(config: RunConfig, entry: Entry | None = None) -> Method[Any]:
    """The config's method (or the entry's) with the hyper-parameters the config gives; a wrong one is an error.

    So is a variant that the method does not have.
    """
    entry = entry or method_named(config.method)
    if config.variant not in entry.variants:
        raise ConfigError(f"{config.method} has no variant {config.variant!r}; it has {', '.join(entry.variants)}")
    method, values = entry.method, hyper_values(config.hyper)
    if not values:
        return method
    if not is_dataclass(method) or not fields(method):
        raise ConfigError(f"{config.method} has no hyper-parameters, got hyper.{next(iter(values))}")
    found: Method[Any] = override_at_once(method, values, "hyper.")
    for key, value in values.items() if ":" not in config.method else ():  # an outside method knows its own ranges
        check_hyper(key, value)
    return found
