"""ProtoFed: private, continual web personalization.

log = protofed.load_log("gowalla_1k", "data")
config = protofed.preset("small")
folder = protofed.Experiment(config, log, cache=Path("cache")).run(Path("runs/first"))
protofed.summarise_run(folder)
"""

from protofed.backbone.sasrec import SASRec
from protofed.config import RunConfig, override, preset, read_toml
from protofed.data.filters import canonical, five_core
from protofed.data.interactions import InteractionLog, from_columns
from protofed.data.prepared import load_log, save_log
from protofed.data.synthetic import WorldConfig, drifting_world
from protofed.errors import ProtoFedError
from protofed.experiments.run import Experiment
from protofed.experiments.summary import summarise_run
from protofed.inference.device import feedback, recommend
from protofed.methods.catalogue import METHODS
from protofed.methods.protocol import Method, World
from protofed.slices.stream import SliceStream, TimeSlice, slice_log

__all__ = [
    "METHODS",
    "Experiment",
    "InteractionLog",
    "Method",
    "ProtoFedError",
    "RunConfig",
    "SASRec",
    "SliceStream",
    "TimeSlice",
    "World",
    "WorldConfig",
    "canonical",
    "drifting_world",
    "feedback",
    "five_core",
    "from_columns",
    "load_log",
    "override",
    "preset",
    "read_toml",
    "recommend",
    "save_log",
    "slice_log",
    "summarise_run",
]
