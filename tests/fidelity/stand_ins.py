"""Empty modules in the place of what Avalanche imports but the compared parts never call: images, logs, solvers."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

UNUSED = (
    *("torchvision", "pytorchcv", "torchmetrics", "gdown", "qpsolvers"),
    *("wandb", "torch.utils.tensorboard", "GPUtil"),
)


class StandIn(ModuleType):
    """Every name in it is a class that can be made and subclassed and has no methods, so that any use of it fails."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *arguments, **named: None})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{unused}.") for unused in UNUSED):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


@contextmanager
def standing_in() -> Iterator[None]:
    """Imports inside meet stand-ins; afterwards the next import of these names finds the real ones, or nothing."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, StandIn)]:
            parent, _, child = name.rpartition(".")
            vars(sys.modules.get(parent, ModuleType(""))).pop(child, None)
            del sys.modules[name]
