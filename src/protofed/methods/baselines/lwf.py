"""LwF: yesterday's model grades today's histories, and the new one must not stray from those grades.

Li and Hoiem, Learning without forgetting, ECCV 2016 (TPAMI 2018).
What we implement: the teacher is the model as the slice found it; no old data is kept. At the newest target of each
window both models score a list: the item met, 50 uniform items and the teacher's 50 best of 1,000 uniform ones. The
mean loss gains strength * temperature^2 * KL(teacher || student) of the softened lists, the teacher without dropout.
How it differs: classes become a list of items, restricted to items the teacher has a row for (a made-up grade for a new
item would teach that new items are bad), each counted once. Logits of a recommender have no fixed scale, so both are
divided by the spread of the teacher's list before the temperature. A window weighs as its number of targets does. The
pool of 1,000 is drawn once per batch.
Privacy: the teacher is a model state that has been released anyway; nothing else is kept.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from protofed.backbone.extras import Extra, Lots, Notes
from protofed.backbone.losses import last_states
from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Descend
from protofed.methods.baselines.finetune_last import fine_tuned
from protofed.methods.baselines.importance import first_places
from protofed.methods.frozen import BackboneState, backbone_evidence, backbone_scores, rows_for, start_from_backbone
from protofed.methods.protocol import Diagnostics, World
from protofed.seeds import stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice
from protofed.slices.windows import NO_TARGET, Windows, real_targets

VOID = -1e9  # a logit that no softmax notices; infinity would make 0 * infinity of it


@dataclass(frozen=True, slots=True)
class Lists:
    """How many items the models are compared on, beside the one that was met."""

    uniform: int = 50
    best: int = 50  # the teacher's favourites
    pool: int = 1_000  # among so many uniform items


@dataclass(frozen=True, slots=True)
class Graded:
    """What one batch is compared on, and the teacher's view of it."""

    hidden: Float[Tensor, "W d"]
    items: Int[Tensor, "W C"]
    real: Bool[Tensor, "W C"]  # known to the teacher and there for the first time
    logits: Float[Tensor, "W C"]


def newest_targets(batch: Windows) -> Int[Tensor, " W"]:
    """The target that each window's last token predicts; NO_TARGET where a window has none."""
    places = torch.arange(batch.targets.shape[1], device=batch.targets.device)
    newest = torch.where(batch.targets != NO_TARGET, places, 0).max(dim=1, keepdim=True).values
    return batch.targets.gather(1, newest)[:, 0]


@torch.no_grad()
def grade_lists(teacher: SASRec, known: Int[Tensor, " n"], batch: Windows, lists: Lists, lots: Lots) -> Graded:
    """The list of each window, out of the items known to the teacher, and the teacher's logits on it."""
    hidden = last_states(teacher, batch)
    pool = known if len(known) <= lists.pool else known[lots.integers(len(known), (lists.pool,))]
    best = (hidden @ teacher.items[pool].T).topk(min(lists.best, len(pool)), dim=1).indices
    uniform = known[lots.integers(len(known), (len(batch), lists.uniform))]
    items = torch.cat([newest_targets(batch)[:, None], uniform, pool[best]], dim=1)
    first = first_places(items) == torch.arange(items.shape[1], device=items.device)
    return Graded(hidden, items, teacher.knows(items) & first, logits_of(teacher, hidden, items))


def logits_of(model: SASRec, hidden: Float[Tensor, "W d"], items: Int[Tensor, "W C"]) -> Float[Tensor, "W C"]:
    return (model.embed(items) @ hidden[..., None])[..., 0]


def divergence(
    teacher: Float[Tensor, "W C"], student: Float[Tensor, "W C"], real: Bool[Tensor, "W C"], temperature: float
) -> Float[Tensor, " W"]:
    """temperature^2 * KL(teacher || student) over the real entries, both in units of the teacher's spread there."""
    n = real.sum(1, keepdim=True).clamp(min=1)
    mean = (teacher * real).sum(1, keepdim=True) / n
    spread = (((teacher - mean) ** 2 * real).sum(1, keepdim=True) / n).sqrt().clamp(min=1e-6)
    log_p, log_q = (
        (logits / (spread * temperature)).masked_fill(~real, VOID).log_softmax(-1) for logits in (teacher, student)
    )
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)


def known_items(teacher: SASRec) -> Int[Tensor, " n"]:
    return teacher.has_row.nonzero()[:, 0]


def imitating(
    teacher: SASRec, strength: float, temperature: float, lists: Lists, rng: Generator, notes: Notes
) -> Extra | None:
    """The divergence from the teacher as an addition to each window's summed loss; None for strength 0."""
    if strength == 0:
        return None
    known = known_items(teacher)

    def losses(model: SASRec, batch: Windows, lots: Lots, notes: Notes) -> Float[Tensor, " W"]:
        asked = grade_lists(teacher, known, batch, lists, lots)
        student = logits_of(model, last_states(model, batch), asked.items)
        apart, n = divergence(asked.logits, student, asked.real, temperature), real_targets(batch)
        notes.add("divergence", (apart * (n > 0)).sum(), (n > 0).sum())
        return strength * apart * n

    return Extra(losses, notes, rng)


@dataclass(frozen=True, slots=True)
class LwF:
    strength: float = 1.0  # lambda_o
    temperature: float = 2.0
    lists: Lists = field(default_factory=Lists)

    def start(self, world: World) -> BackboneState:
        return start_from_backbone(world)

    def learn(
        self, world: World, state: BackboneState, slice_: TimeSlice, descend: Descend
    ) -> tuple[BackboneState, Diagnostics]:
        device = state.backbone.items.device
        notes, rng = Notes(), stream(world.config.seed, "lwf", slice_.index, device=device)
        extra = imitating(state.backbone, self.strength, self.temperature, self.lists, rng, notes)
        model, fit = fine_tuned(world, rows_for(world, state.backbone, slice_), slice_, descend, extra=extra)
        learned = BackboneState(model, slice_.index, max(state.newest_target, fit.newest_target))
        return learned, {"divergence": notes.mean("divergence"), **fit.diagnostics()}

    def score(self, world: World, state: BackboneState, queries: Queries) -> Float[Tensor, "B I"]:
        return backbone_scores(state, queries)

    def evidence(self, state: BackboneState) -> Evidence:
        return backbone_evidence(state)
