"""What a server asks of a host of devices, and what comes back: the same whatever carries it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from protofed.client.introductions import ItemUpload
from protofed.client.model import Broadcast
from protofed.client.upload import Upload
from protofed.slices.stream import SliceStream

Kind = Literal["introduce", "upload", "finish"]


@dataclass(frozen=True, slots=True)
class Cut:
    """A slice's public edges in unix seconds, and the size of the catalogue at the last two: nothing of a user.

    Train events have start <= time < train_end, validation events train_end <= time < val_end.
    """

    index: int
    start: int
    train_end: int
    val_end: int
    train_items: int
    val_items: int


@dataclass(frozen=True, slots=True)
class Order:
    """Be this far in the newest slice, then do this. An order that comes twice is obeyed once.

    introduce: say which new items the slice's train part met. upload: for this round, after so many local steps of the
    slice. finish: take the remaining steps and choose by the validation events.
    """

    kind: Kind
    cuts: tuple[Cut, ...]  # of slices 1 .. the one under way, so that who was away can make good
    broadcast: Broadcast
    round_: int = 0
    steps: int = 0
    rows: Float[Tensor, "n d"] | None = None  # of all items that the base block did not teach

    @property
    def place(self) -> tuple[int, int, int]:
        """Orders of one run of the federation ascend by it."""
        return (self.cuts[-1].index, ("introduce", "upload", "finish").index(self.kind), self.round_)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a host sends back; nothing where it has only obeyed."""

    uploads: tuple[Upload, ...] = ()
    items: ItemUpload | None = None


@dataclass(frozen=True, slots=True)
class Heard:
    """What came back of an order: the answers, how many hosts were asked, and which of them were lost."""

    answers: list[Answer]
    asked: int
    lost: tuple[str, ...] = ()
    total: tuple[int, Int[Tensor, "K row"]] | None = None  # how many uploads, and their sum: where nothing else is seen


Ask = Callable[[Order], Heard]


def cuts_of(data: SliceStream) -> tuple[Cut, ...]:
    """The public edges of slices 1, 2, ... of a log."""
    times = data.log.times

    def cut(index: int) -> Cut:
        bounds = data.bounds[index]
        start, train_end, val_end = (int(times[place]) for place in (bounds.start, bounds.train_end, bounds.val_end))
        items = data.n_train_items(index), int(data.items_until[bounds.val_end])
        return Cut(index, start, train_end, val_end, *items)

    return tuple(cut(index) for index in range(1, data.n_slices + 1))
