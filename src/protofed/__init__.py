"""ProtoFed: private, continual web personalization.

log = protofed.load_log("gowalla_1k", "data")
config = protofed.preset("small")
folder = protofed.Experiment(config, log, cache=Path("cache")).run(Path("runs/first"))
protofed.summarise_run(folder)

model = protofed.load("runs/first")
model.device("u00029").recommend(n=10)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protofed.backbone.sasrec import SASRec
    from protofed.config import RunConfig, override, preset, read_toml
    from protofed.data.filters import canonical, five_core
    from protofed.data.interactions import InteractionLog, from_columns
    from protofed.data.prepared import load_log, save_log
    from protofed.data.synthetic import WorldConfig, drifting_world
    from protofed.errors import ProtoFedError
    from protofed.experiments.run import Experiment
    from protofed.experiments.summary import summarise_run
    from protofed.inference.folder import load, save
    from protofed.inference.recommender import Device, Recommendation, Recommender
    from protofed.methods.catalogue import METHODS
    from protofed.methods.protocol import Method, World
    from protofed.slices.stream import SliceStream, TimeSlice, slice_log

    __version__: str

__all__ = [
    "METHODS",
    "Device",
    "Experiment",
    "InteractionLog",
    "Method",
    "ProtoFedError",
    "Recommendation",
    "Recommender",
    "RunConfig",
    "SASRec",
    "SliceStream",
    "TimeSlice",
    "World",
    "WorldConfig",
    "canonical",
    "drifting_world",
    "five_core",
    "from_columns",
    "load",
    "load_log",
    "override",
    "preset",
    "read_toml",
    "save",
    "save_log",
    "slice_log",
    "summarise_run",
]

HOMES = {  # where each public name is imported from once it is asked for: `import protofed` alone loads nothing
    "METHODS": "methods.catalogue",
    "Device": "inference.recommender",
    "Experiment": "experiments.run",
    "InteractionLog": "data.interactions",
    "Method": "methods.protocol",
    "ProtoFedError": "errors",
    "Recommendation": "inference.recommender",
    "Recommender": "inference.recommender",
    "RunConfig": "config",
    "SASRec": "backbone.sasrec",
    "SliceStream": "slices.stream",
    "TimeSlice": "slices.stream",
    "World": "methods.protocol",
    "WorldConfig": "data.synthetic",
    "canonical": "data.filters",
    "drifting_world": "data.synthetic",
    "five_core": "data.filters",
    "from_columns": "data.interactions",
    "load": "inference.folder",
    "load_log": "data.prepared",
    "override": "config",
    "preset": "config",
    "read_toml": "config",
    "save": "inference.folder",
    "save_log": "data.prepared",
    "slice_log": "slices.stream",
    "summarise_run": "experiments.summary",
}


def __getattr__(name: str) -> object:
    """A public name, imported from its home; the next use finds it here."""
    if name == "__version__":
        value: object = _version()
    elif name in HOMES:
        value = getattr(import_module(f"protofed.{HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'protofed' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def _version() -> str:
    """As installed; a source tree that nobody installed has none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("protofed")
    except PackageNotFoundError:
        return "0+unknown"
