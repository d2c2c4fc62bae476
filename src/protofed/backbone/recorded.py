"""Training steps that a GPU repeats by itself: fixed shapes, recorded once as a CUDA graph, then replayed.

A small backbone keeps a GPU busy for a fraction of the time that Python takes to launch its kernels one by one. A batch
is padded to the largest shape there can be (windows without targets, tokens without items), which changes no loss; the
first steps run as they are, the next one is recorded, and every later one is a single launch. What a step does must
therefore depend on its inputs, on tensors that are changed in place, and on generators of the device alone.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor

from protofed.slices.histories import PAD
from protofed.slices.lines import Lines, columns_of, send_together, sharing_lines
from protofed.slices.windows import NO_TARGET, Windows, moved, pick_windows

STEPS_AS_THEY_ARE = 3  # libraries choose their kernels and optimisers make their moments in the first ones
LINES = 8  # lines that windows share come in multiples of this
STEPS_AHEAD = 16  # replays that may wait for the GPU; beyond them the process sleeps, and others have its core


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one step reads."""

    batch: Windows
    negatives: Int[Tensor, "W n"]
    prompt: Float[Tensor, "W L_p d"] | None = None


Step = Callable[[Inputs], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """The most windows, tokens and targets that a step can have."""

    windows: int
    tokens: int
    targets: int


def columns(inputs: Inputs) -> list[Tensor]:
    """All tensors a step reads; where windows have prompts they do not share lines."""
    batch = inputs.batch
    given = [batch.users, batch.tokens, batch.sources, batch.targets, batch.newest, inputs.negatives]
    if inputs.prompt is not None:
        return [*given, inputs.prompt]
    return given if batch.lines is None else [*given, *columns_of(batch.lines)]


def from_columns(given: list[Tensor]) -> Inputs:
    rest = given[6:]
    lines = Lines(*rest) if len(rest) > 1 else None
    return Inputs(Windows(*given[:5], lines=lines), given[5], rest[0] if len(rest) == 1 else None)


def pad_windows(batch: Windows, shape: Shape) -> Windows:
    """The same windows in the given shape; those that were added have no target."""
    more, left = shape.windows - len(batch), shape.tokens - batch.tokens.shape[1]
    right = shape.targets - batch.targets.shape[1]
    if not (more or left or right):
        return batch
    return Windows(
        users=F.pad(batch.users, (0, more)),
        tokens=F.pad(batch.tokens, (left, 0, 0, more), value=PAD),
        sources=F.pad(batch.sources + left, (0, right, 0, more)),
        targets=F.pad(batch.targets, (0, right, 0, more), value=NO_TARGET),
        newest=F.pad(batch.newest, (0, more), value=-1),
    )


def pad_inputs(inputs: Inputs, shape: Shape) -> Inputs:
    """The same step in the given shape; what was added has no target, so it adds nothing to a loss."""
    missing = shape.windows - len(inputs.negatives)
    negatives = F.pad(inputs.negatives, (0, 0, 0, missing)) if missing else inputs.negatives
    prompt = inputs.prompt if inputs.prompt is None else F.pad(inputs.prompt, (0, 0, 0, 0, 0, missing))
    return Inputs(pad_windows(inputs.batch, shape), negatives, prompt)


def in_shape(
    windows: Windows, size: int, shape: Shape, device: torch.device, *, share: bool = False
) -> Iterator[Windows]:
    """`size` windows at a time in the given shape, views of what is sent to the device at once.

    Windows that `share` lines get them in multiples of LINES, and half the targets where no window needs more: few
    shapes, so few recordings.
    """
    n = -(-len(windows) // size) * size
    here = pad_windows(windows, replace(shape, windows=n))
    whole, parts = moved(here, device), [slice(start, start + size) for start in range(0, n, size)]
    if not share:
        yield from (pick_windows(whole, part) for part in parts)
        return
    lines = send_together([sharing_lines(here.tokens[part], LINES) for part in parts], device)
    half = -(-shape.targets // 2)
    for part, laid in zip(parts, lines, strict=True):
        width = shape.targets if (here.targets[part, half:] != NO_TARGET).any() else half
        batch = pick_windows(whole, part)
        yield replace(batch, sources=batch.sources[:, :width], targets=batch.targets[:, :width], lines=laid)


@dataclass(slots=True)
class Recording:
    """A step's inputs on the device, and the graph that reads them once it is recorded."""

    given: list[Tensor]
    seen: int = 0
    graph: torch.cuda.CUDAGraph | None = None


@cache
def aside_on(device: torch.device) -> torch.cuda.Stream:
    """The one stream for steps that are not recorded: memory is kept for each stream that ever had some."""
    return torch.cuda.Stream(device)


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """`step`, replayed; inputs of different shapes, say with and without a prompt, are different recordings."""

    step: Step
    shape: Shape
    device: torch.device
    generators: tuple[Generator, ...] = ()
    recordings: dict[tuple[torch.Size, ...], Recording] = field(default_factory=dict)
    ahead: deque[torch.cuda.Event] = field(default_factory=deque)  # ends of the newest replays, oldest first

    def __call__(self, inputs: Inputs) -> None:
        given = columns(pad_inputs(inputs, replace(self.shape, targets=inputs.batch.targets.shape[1])))
        shapes = tuple(column.shape for column in given)
        recording = self.recordings.get(shapes)
        if recording is None:
            recording = Recording([torch.empty_like(column, device=self.device) for column in given])
            self.recordings[shapes] = recording
        for place, column in zip(recording.given, given, strict=True):
            place.copy_(column, non_blocking=True)
        recording.seen += 1
        if recording.seen <= STEPS_AS_THEY_ARE:
            self._run(recording)
            return
        if recording.graph is None:
            recording.graph = self._record(recording)
        recording.graph.replay()
        self._keep_pace()

    def _keep_pace(self) -> None:
        """Sleep while too many replays wait: launching into a full queue would spin on a core that others need."""
        ended = self.ahead.popleft() if len(self.ahead) == STEPS_AHEAD else torch.cuda.Event(blocking=True)
        ended.synchronize()  # at once where it was never recorded
        ended.record()
        self.ahead.append(ended)

    def laid(self, windows: Windows, size: int, rng: Generator, *, share: bool = False) -> Iterator[Windows]:
        """The windows in a drawn order, `size` at a time, where the steps will read them."""
        drawn = pick_windows(windows, torch.randperm(len(windows), generator=rng))
        return in_shape(drawn, size, self.shape, self.device, share=share)

    def _run(self, recording: Recording) -> None:
        """As it is, aside, as recording wants it."""
        now, aside = torch.cuda.current_stream(), aside_on(self.device)
        aside.wait_stream(now)
        with torch.cuda.stream(aside):
            self.step(from_columns(recording.given))
        now.wait_stream(aside)

    def _record(self, recording: Recording) -> torch.cuda.CUDAGraph:
        """The step as a graph; what passes in it lies where that of other recordings does: none runs beside another."""
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        pool = next((other.graph.pool() for other in self.recordings.values() if other.graph is not None), None)
        with torch.cuda.graph(graph, pool=pool):
            self.step(from_columns(recording.given))
        return graph
