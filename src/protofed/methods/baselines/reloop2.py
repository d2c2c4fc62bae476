"""ReLoop2: a slow learner plus a fast memory of the errors it made when it served similar questions.

Zhu et al., "ReLoop2: Building Self-Adaptive Recommendation Models via Responsive Error Compensation Loop", KDD 2023.

What we implement: the slow learner is FineTune-Last. The slice's train events are first served by the weights the slice
found: for each event the positive (y = 1) and m uniform items (y = 0) leave an error e = y - p. After training they are
written to a sketch under their keys, key = last hidden state ⊙ item row: R SimHash tables of 2^b buckets, each with a
sum of errors and a count. A score is p + λ ê, ê the mean over tables of the bucket's mean error (0 where empty).
How it differs: p is σ(s) under the pointwise loss; softmax and pairwise scores are turned into the probability that the
item is the positive beside m uniform ones, σ(s - log mean exp s - log m), which orders a query's items as s does. Keys
are made with the weights after the slice, errors with those before it (as served); keys of earlier slices are left as
they are and count less with age (`decay` per slice). Nothing is written while testing, and not from validation parts.
Each slice has a sketch of its own and a query reads only those written from strictly earlier instants, so that judging
an old slice never consults its future; the original has one sketch and constant memory. The exact nearest-neighbour
mode is left out: it compares every candidate of every query with every entry.
Privacy: the sketch is raw data. A private form would release each slice's sums and counts with noise, a user's entries
capped at m per table (sensitivity sqrt(2 R) m), and would write nothing within a slice.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.backbone.losses import draw_negatives
from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Descend
from protofed.methods.baselines.buffer import event_windows, fine_tuned_state, in_chunks, within
from protofed.methods.frozen import BackboneState, backbone_evidence, backbone_scores, start_from_backbone
from protofed.methods.protocol import Diagnostics, World
from protofed.seeds import stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice

QUERIES_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class ErrorMemory:
    """Per slice t and table r: the summed errors and the number of entries of every bucket."""

    planes: Float[Tensor, "R b d"]  # drawn once; a restored memory needs the same ones
    sums: Float[Tensor, "t R buckets"]
    counts: Float[Tensor, "t R buckets"]
    newest: Int[Tensor, " t"]  # timestamp of the slice's newest entry


@dataclass(frozen=True, slots=True)
class MemoryState:
    """The slow learner and the fast one."""

    model: BackboneState
    memory: ErrorMemory


def probabilities(
    scores: Float[Tensor, "B n"], all_scores: Float[Tensor, "B I"], loss: str, m: int
) -> Float[Tensor, "B n"]:
    """How likely each item is the positive, beside m uniform items where scores are not probabilities already."""
    if loss == "bce":
        return scores.sigmoid()
    log_mean = all_scores.logsumexp(-1, keepdim=True) - math.log(all_scores.shape[1])
    return (scores - log_mean - math.log(m)).sigmoid()


def codes(
    hidden: Float[Tensor, "B d"], rows: Float[Tensor, "B n d"] | Float[Tensor, "n d"], planes: Float[Tensor, "b d"]
) -> Int[Tensor, "B n"]:
    """The bucket of each key hidden ⊙ row: one bit per plane, the side it lies on (its length does not matter)."""
    sides = torch.zeros(len(hidden), rows.shape[-2], dtype=torch.int64, device=hidden.device)
    for bit, plane in enumerate(planes):
        tilted = hidden * plane
        projected = tilted @ rows.T if rows.dim() == 2 else (rows @ tilted[..., None])[..., 0]
        sides |= (projected > 0).long() << bit
    return sides


def add_sketch(
    memory: ErrorMemory, buckets: Int[Tensor, "N R"], errors: Float[Tensor, " N"], newest: int
) -> ErrorMemory:
    """The memory with one more slice's sketch."""
    sums, counts = (torch.zeros(memory.sums.shape[1:], device=errors.device) for _ in range(2))
    for table in range(len(sums)):
        sums[table].index_add_(0, buckets[:, table], errors)
        counts[table].index_add_(0, buckets[:, table], torch.ones_like(errors))
    return ErrorMemory(
        memory.planes,
        torch.cat([memory.sums, sums[None]]),
        torch.cat([memory.counts, counts[None]]),
        torch.cat([memory.newest, torch.tensor([newest], device=memory.newest.device)]),
    )


def bucket_means(memory: ErrorMemory, decay: float) -> Float[Tensor, "t1 R buckets"]:
    """Entry j: every bucket's mean error over the first j sketches, each older slice weighing `decay` times as much."""
    sums, counts = (torch.zeros(memory.sums.shape[1:], device=memory.sums.device) for _ in range(2))
    means = [sums]
    for more, n in zip(memory.sums, memory.counts, strict=True):
        sums, counts = decay * sums + more, decay * counts + n
        means.append(torch.where(counts > 0, sums / counts.clamp(min=1e-12), 0.0))
    return torch.stack(means)


def readable(memory: ErrorMemory, times: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """How many of the sketches, oldest first, hold nothing but instants strictly before each query's."""
    return (memory.newest[None, :] < times[:, None]).long().cumprod(1).sum(1)


def estimate_errors(
    model: SASRec, memory: ErrorMemory, hidden: Float[Tensor, "B d"], times: Int[Tensor, " B"], n: int, decay: float
) -> Float[Tensor, "B I"]:
    """ê of every available item: the mean over tables of its bucket's mean error."""
    n_own = min(n, model.n_rows)
    known = model.knows(torch.arange(n, device=hidden.device))
    rows = torch.cat([model.items[:n_own], model.mean_row[None]])  # items that share the mean row share its key
    column = torch.where(known, torch.arange(n, device=hidden.device), n_own)
    means, first = bucket_means(memory, decay), readable(memory, times)
    total = torch.zeros(len(hidden), n_own + 1, device=hidden.device)
    for table, planes in enumerate(memory.planes):
        total += means[first, table].gather(1, codes(hidden, rows, planes))
    return (total / len(memory.planes))[:, column]


@dataclass(frozen=True, slots=True)
class ReLoop2:
    """FineTune-Last whose scores are compensated by remembered errors, with weight λ."""

    weight: float = 0.3
    tables: int = 8
    bits: int = 12
    negatives: int = 4
    decay: float = 0.5

    def __post_init__(self) -> None:
        within("weight", self.weight, 0, 1e6)
        within("tables", self.tables, 1, 1_000)
        within("bits", self.bits, 1, 20)
        within("negatives", self.negatives, 1, 1_000)
        within("decay", self.decay, 0, 1)

    def start(self, world: World) -> MemoryState:
        """An empty memory: nobody served the base block before the backbone had learned it."""
        device, shape = world.backbone.items.device, (0, self.tables, 2**self.bits)
        rng = stream(world.config.seed, "reloop2", "planes")
        planes = torch.randn(self.tables, self.bits, world.config.backbone.width, generator=rng).to(device)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return MemoryState(
            start_from_backbone(world),
            ErrorMemory(planes, torch.zeros(shape, device=device), torch.zeros(shape, device=device), none),
        )

    def learn(
        self, world: World, state: MemoryState, slice_: TimeSlice, descend: Descend
    ) -> tuple[MemoryState, Diagnostics]:
        learned, fit = fine_tuned_state(world, state.model, slice_, descend, None)
        buckets, errors = self._served(world, state, learned.backbone, slice_)
        positions = slice_.train_positions
        newest = int(slice_.times[positions].max()) if len(positions) else torch.iinfo(torch.int64).min
        memory = add_sketch(state.memory, buckets, errors, newest)
        diagnostics = {
            "memory_entries": len(errors),
            "memory_mean_absolute_error": float(errors.abs().mean()) if len(errors) else 0.0,
            "memory_occupied": float((memory.counts.sum(0) > 0).float().mean()),
        }
        return MemoryState(learned, memory), {**fit, **diagnostics}

    @torch.no_grad()
    def _served(
        self, world: World, state: MemoryState, after: SASRec, slice_: TimeSlice
    ) -> tuple[Int[Tensor, "N R"], Float[Tensor, " N"]]:
        """Key buckets (under the weights after the slice) and errors (under those before) of the train events."""
        before, n_items, device = state.model.backbone, slice_.n_train_items, after.items.device
        rng = stream(world.config.seed, "reloop2", "negatives", slice_.index)
        buckets = [torch.zeros(0, self.tables, dtype=torch.int64, device=device)]
        errors = [torch.zeros(0, device=device)]
        events = event_windows(slice_.past, slice_.train_positions, world.config.backbone.history_length)
        for chunk in in_chunks(events, device):
            drawn = draw_negatives(len(chunk), self.negatives, n_items, rng).to(device)
            shown = torch.cat([chunk.targets, drawn], dim=1)  # (B, 1 + m), the positive first
            real = torch.cat([torch.ones_like(chunk.targets, dtype=torch.bool), drawn != chunk.targets], dim=1)
            all_scores = before.scores(before.last_hidden(chunk.tokens), n_items)
            p = probabilities(all_scores.gather(1, shown), all_scores, world.config.training.loss, self.negatives)
            truth = torch.zeros_like(p)
            truth[:, 0] = 1
            hidden, rows = after.last_hidden(chunk.tokens), after.embed(shown)
            keys = torch.stack([codes(hidden, rows, planes) for planes in state.memory.planes], dim=-1)
            buckets.append(keys[real])
            errors.append((truth - p)[real])
        return torch.cat(buckets), torch.cat(errors)

    def score(self, world: World, state: MemoryState, queries: Queries) -> Float[Tensor, "B I"]:
        plain = backbone_scores(state.model, queries)
        if self.weight == 0 or not len(state.memory.newest):
            return plain
        p = probabilities(plain, plain, world.config.training.loss, self.negatives)
        model, parts = state.model.backbone, []
        for chunk in torch.arange(len(queries), device=plain.device).split(QUERIES_AT_ONCE):
            hidden, times = model.last_hidden(queries.tokens[chunk]), queries.times[chunk]
            parts.append(estimate_errors(model, state.memory, hidden, times, queries.n_items, self.decay))
        return p + self.weight * torch.cat(parts) if parts else p

    def evidence(self, state: MemoryState) -> Evidence:
        return backbone_evidence(state.model)
