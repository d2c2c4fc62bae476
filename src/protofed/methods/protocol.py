"""Anything the benchmark can run, in three verbs: start, learn, score."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Descend
from protofed.client.model import Model
from protofed.client.state import DeviceState
from protofed.config import RunConfig
from protofed.federation.plan import Plan
from protofed.inference.head import FittedHead
from protofed.privacy.ledger import Ledger
from protofed.privacy.upload import RoundRule
from protofed.progress import Progress, silent
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice

State = TypeVar("State")
Diagnostics = Mapping[str, int | float | tuple[float, ...]]  # for the run's log


@dataclass(frozen=True, slots=True)
class World:
    """What every method starts from: the settings, the base block and the backbone that was warmed up on it."""

    config: RunConfig
    base: TimeSlice
    backbone: SASRec
    progress: Progress = silent
    beside: Plan = ()  # streams that are released beside the method's own, out of the same budget
    head: FittedHead | None = None  # what the method's answers will be under


@runtime_checkable
class Method(Protocol[State]):
    """A continual recommender. Implementations are frozen dataclasses holding hyper-parameters only.

    All randomness comes from the named streams of `world.config.seed`: a state depends on the seed and the past alone.
    """

    def start(self, world: World) -> State:
        """The state after the base block."""
        ...

    def learn(self, world: World, state: State, slice_: TimeSlice, descend: Descend) -> tuple[State, Diagnostics]:
        """The state after one more slice; `descend` turns per-user losses into updates, plainly or privately."""
        ...

    def score(self, world: World, state: State, queries: Queries) -> Float[Tensor, "B I"]:
        """A score for each of the `queries.n_items` items available; higher ranks first."""
        ...

    def evidence(self, state: State) -> Evidence:
        """What the state admits to knowing, for the leak checker."""
        ...


@runtime_checkable
class Choosing(Protocol):
    """A method whose devices choose what of theirs they use."""

    def choose_under(self, world: World, state: Any) -> tuple[Any, bool]:
        """The state after the base block whose devices chose under the world's head; whether prompts pay there."""
        ...


@runtime_checkable
class Releasing(Protocol):
    """A method whose shared statistics are noised: it says beforehand what leaves the devices."""

    def releases(self, world: World, state: Any, slices_ahead: int = 0) -> Ledger:
        """Everything released so far and, ahead of it, by the next slices; the runner writes it before it happens."""
        ...


@dataclass(frozen=True, slots=True)
class Published:
    """What becomes of a run when devices are to recommend: the model they hold alike, their states, how they upload."""

    model: Model
    devices: DeviceState
    rule: RoundRule | None  # None: nothing leaves a device
    next_round: int
    head: FittedHead | None = None


@runtime_checkable
class Recommending(Protocol):
    """A method whose state is a model and devices: it can be loaded without the log, and recommend for one user."""

    def publish(self, world: World, state: Any, n_items: int) -> Published:
        """What devices hold after the newest slice, for a catalogue of so many items."""
        ...
