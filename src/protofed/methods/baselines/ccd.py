"""CCD: a large teacher and a small student that teach each other, slice after slice.

Lee et al., "Continual Collaborative Distillation for Recommender System", KDD 2024.

What we implement, per slice: (1) the student is generated from the teacher as the slice found it, by list-wise relaxed
ranking distillation of the teacher's top items beside L_rec on the previous train part (the base block's at first, from
scratch; later from the last student, without which averages of weights would mean nothing); (2) two proxies follow the
generated students, S slowly (0.9) for stability and P fast (0.1) for plasticity; (3) the student learns the slice,
replaying items that S and P rank higher than it does, with their σ(score) as soft labels; (4) the teacher learns the
slice, replaying items of S, P and the updated student. Replay weighs λ exp(-epoch / 10). λ = 0 makes the teacher
FineTune-Last bit for bit.
How it differs: one teacher, a SASRec like everybody's, and a student of a quarter of its width with one block. SASRec
has no user rows, so proxies average all weights, a "user" is the history at a window's end, item-side distillation is
left out, and items the window itself holds are not replayed. Ranks are over 1,000 uniform items and the teacher's top
100. Replayed items are drawn anew at every step against the model in training (the published code keeps the initial
scores). The teacher's LWC-KD and PIW terms are left out, negatives are drawn as for every method, and all slices share
one setting. Under `--variant peft` both live in the frozen backbone: the teacher is a LoRA of rank 8, the student a
shared prompt, proxies average prompts. They share the item table: the teacher learns a slice's new rows, the student
reads them as they start and afterwards as the teacher left them. There λ = 0 makes the teacher a plain LoRA.
Softmax scores have no natural zero, so σ(score) can lie close to 1 and labels be hardly soft; the log's
`soft_label` tells. The teacher is scored, having the same capacity as the others; `scored="student"` gives the student.
Privacy: teacher, student and proxies are functions of weights, free where those are released privately. Private steps
are paid for three trainings a slice (the first student learns the base block, plainly, for free), rounds stand for
epochs, and ranks and soft labels are computed within each user's own loss.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.backbone.extras import Extra, Lots, Notes, uniform_items
from protofed.backbone.losses import last_states
from protofed.backbone.sasrec import SASRec, at_rest, grown
from protofed.backbone.small_modules import modules_and_rows, small_weights, with_lora, with_weights
from protofed.backbone.training import Descend, Fit, Task, Trainable, train
from protofed.config import BackboneConfig
from protofed.methods.baselines.buffer import within
from protofed.methods.baselines.finetune_last import fine_tuned
from protofed.methods.frozen import (
    BackboneState,
    backbone_evidence,
    backbone_scores,
    on_base_block,
    rows_for,
    start_from_backbone,
)
from protofed.methods.protocol import Diagnostics, World
from protofed.methods.variants import attach_prompt, is_peft, parts_to_train
from protofed.progress import Progress
from protofed.seeds import stream
from protofed.slices.histories import Queries
from protofed.slices.leaks import Evidence
from protofed.slices.stream import TimeSlice
from protofed.slices.windows import Windows, real_targets

VOID = -1e9  # below every score, and still finite


@dataclass(frozen=True, slots=True)
class CCDState:
    """The teacher, the student after its last update, and the proxies of all generated students so far."""

    teacher: BackboneState
    student: SASRec
    stable: SASRec
    plastic: SASRec
    generations: int


@dataclass(frozen=True, slots=True)
class Clock:
    """A progress that remembers the epoch, on the device: the training tells it at each epoch's end."""

    tell: Progress
    epoch: Float[Tensor, ""]

    def __call__(self, task: str, done: int | float, total: int | float | None, note: str = "") -> None:
        self.epoch.fill_(int(done))
        self.tell(task, done, total, note)


@dataclass(frozen=True, slots=True)
class Source:
    """A model to replay from, and how many items of each user."""

    model: SASRec
    n: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """Items to replay for each window, with soft labels; `valid` says which are real."""

    items: Int[Tensor, "W n"]
    labels: Float[Tensor, "W n"]
    valid: Bool[Tensor, "W n"]


@dataclass(frozen=True, slots=True)
class Ordered:
    """A learner's scores of the pool, sorted once for all sources."""

    scores: Float[Tensor, "W K"]
    falling: Float[Tensor, "W K"]  # negated, so that they grow
    order: Int[Tensor, "W K"]


def student_config(config: BackboneConfig) -> BackboneConfig:
    """A quarter of the width (a multiple of the heads) and one block."""
    return replace(config, width=config.heads * max(1, config.width // (4 * config.heads)), layers=1)


def relaxed_ranking_loss(interesting: Float[Tensor, "W K"], others: Float[Tensor, "W n"]) -> Float[Tensor, " W"]:
    """-log probability that the interesting items come in this order, all before the others, whose order is free."""
    rest = others.logsumexp(-1, keepdim=True)
    left = torch.cat([rest, interesting.flip(-1)], dim=-1).logcumsumexp(-1)[:, 1:].flip(-1)  # (W, K) still to place
    return (left - interesting).sum(-1)


def average_weights(proxy: SASRec, student: SASRec, keep: float) -> SASRec:
    """keep times the proxy plus 1 - keep times the student, over all weights; rows the proxy lacks are copied."""
    model = grown(proxy, student.n_rows)
    fresh = student.has_row & ~model.has_row
    with torch.no_grad():
        for mine, its in zip(model.parameters(), student.parameters(), strict=True):
            mine.copy_(keep * mine + (1 - keep) * its)
        model.items[fresh] = student.items[fresh]
    model.has_row = student.has_row.clone()
    model.refresh_mean_row()
    return at_rest(model)


def average_modules(proxy: SASRec, student: SASRec, keep: float) -> SASRec:
    """The student with keep times the proxy's small modules plus 1 - keep times its own."""
    old, own = small_weights(proxy), small_weights(student)
    return with_weights(student, {name: keep * old[name] + (1 - keep) * tensor for name, tensor in own.items()})


def with_table_of(model: SASRec, other: SASRec) -> SASRec:
    """A copy that reads and scores items by the other's rows."""
    model = grown(model, other.n_rows)
    with torch.no_grad():
        model.items.copy_(other.items)
    model.has_row, model.mean_row = other.has_row.clone(), other.mean_row.clone()
    return at_rest(model)


def sort_scores(scores: Float[Tensor, "W K"]) -> Ordered:
    """The scores of each row with their order, highest first."""
    falling, order = (-scores).sort(dim=-1)
    return Ordered(scores, falling, order)


def count_above(mine: Ordered, usable: Bool[Tensor, "W K"], places: Int[Tensor, "W m"]) -> Int[Tensor, "W m"]:
    """For these places of each row: how many usable items have a higher score."""
    before = F.pad(usable.gather(1, mine.order).long().cumsum(-1), (1, 0))  # usable ones among the first 0, 1, .. K
    return before.gather(1, torch.searchsorted(mine.falling, -mine.scores.gather(1, places).contiguous()))


def merge_chosen(parts: list[Chosen]) -> Chosen:
    """All chosen items; one chosen more than once counts once, with its largest label."""
    items, labels, valid = (torch.cat([getattr(p, name) for p in parts], dim=1) for name in Chosen.__slots__)
    same = (items[:, :, None] == items[:, None, :]) & valid[:, :, None] & valid[:, None, :]
    largest = torch.where(same, labels[:, None, :], 0.0).amax(-1)
    again = (same & torch.ones_like(same).tril(-1)).any(-1)
    return Chosen(items, torch.where(valid, largest, labels), valid & ~again)


def soft_loss(scores: Float[Tensor, "W n"], chosen: Chosen) -> Float[Tensor, " W"]:
    """Mean binary cross-entropy of each window's valid items with their soft labels."""
    each = F.binary_cross_entropy_with_logits(scores, chosen.labels, reduction="none") * chosen.valid
    return each.sum(-1) / chosen.valid.sum(-1).clamp(min=1)


def note(notes: Notes, losses: Float[Tensor, " W"], chosen: Chosen, here: Bool[Tensor, " W"]) -> None:
    """What the windows that are `here` replayed."""
    valid = chosen.valid & here[:, None]
    notes.add("replay_loss", (losses * here).sum(), here.sum())
    notes.add("replayed_items", valid.sum(), here.sum())
    notes.add("soft_label", (chosen.labels * valid).sum(), valid.sum())


def candidate_pool(
    teacher: SASRec, hidden: Float[Tensor, "W d"], n_items: int, uniform: int, top: int, lots: Lots
) -> Int[Tensor, "W K"]:
    """Uniform items, the same for the batch, and each window's top items of the teacher, sorted; or all items."""
    if n_items <= uniform + top:
        return torch.arange(n_items, device=hidden.device).expand(len(hidden), -1)
    drawn = lots.integers(n_items, (1, uniform)).expand(len(hidden), -1)
    best = teacher.scores(hidden, n_items).topk(top, dim=-1).indices
    return torch.cat([drawn, best], dim=1).sort(dim=1).values


def unusable(pool: Int[Tensor, "W K"], batch: Windows) -> Bool[Tensor, "W K"]:
    """Places that repeat the item before them, or whose item the window's user has met in it."""
    repeated = F.pad(pool[:, 1:] == pool[:, :-1], (1, 0), value=False)
    met = torch.cat([batch.tokens, batch.targets], dim=1)
    return repeated | (pool[:, :, None] == met[:, None, :]).any(-1)


def item_scores(model: SASRec, hidden: Float[Tensor, "W d"], items: Int[Tensor, "W n"]) -> Float[Tensor, "W n"]:
    """Each window's own items as the model scores them."""
    return (model.embed(items) @ hidden[..., None])[..., 0]


def pool_scores(
    rows: Float[Tensor, "I d"], hidden: Float[Tensor, "W d"], pool: Int[Tensor, "W K"]
) -> Float[Tensor, "W K"]:
    """`item_scores` by rows that were read once for all windows: a pool holds more items than there are."""
    return (F.embedding(pool, rows) @ hidden[..., None])[..., 0]


def draw_by_rank(
    logits: Float[Tensor, "W K"], allowed: Bool[Tensor, "W K"], n: int, uniform: Float[Tensor, "W K"]
) -> tuple[Int[Tensor, "W m"], Bool[Tensor, "W m"]]:
    """n allowed places of each row without replacement, in proportion to exp(logit), and which of them are real."""
    perturbed = logits - (-uniform.clamp(min=1e-20).log()).log()
    places = perturbed.masked_fill(~allowed, -torch.inf).topk(min(n, logits.shape[1]), dim=-1).indices
    return places, allowed.gather(1, places)


@dataclass(frozen=True, slots=True)
class CCD:
    """Continual collaborative distillation; `weight` is λ of the replay."""

    weight: float = 0.5
    keep_stable: float = 0.9
    keep_plastic: float = 0.1
    n_stable: int = 3
    n_plastic: int = 3
    n_student: int = 3
    top: int = 100
    pool: int = 1_000
    sharpness: float = 1e-4
    anneal: float = 10.0
    distillation: float = 0.01
    distilled_top: int = 40
    scored: Literal["teacher", "student"] = "teacher"
    rank: int = 8  # of the teacher's LoRA under `peft`,
    scaling: float = 2.0  # its alpha / r
    lora_rate: float = 1e-2  # and its learning rate

    def __post_init__(self) -> None:
        within("weight", self.weight, 0, 1e6)
        within("keep_stable", self.keep_stable, 0, 1)
        within("keep_plastic", self.keep_plastic, 0, 1)
        within("n_stable + n_plastic", self.n_stable + self.n_plastic, 1, self.top)
        within("n_student", self.n_student, 0, self.top)
        within("anneal", self.anneal, 1e-9, 1e9)
        within("distilled_top", self.distilled_top, 1, 10_000)
        within("rank", self.rank, 1, 65_536)

    def start(self, world: World) -> CCDState:
        """The backbone as the teacher, and a student that knows nothing yet."""
        if is_peft(world):
            rng = stream(world.config.seed, "ccd", "teacher")
            teaching = with_lora(world.backbone, self.rank, self.scaling * self.rank, rng)
            pupil = attach_prompt(world, world.backbone, "ccd")
            return CCDState(replace(start_from_backbone(world), backbone=teaching), pupil, pupil, pupil, 0)
        config, teacher = student_config(world.config.backbone), world.backbone
        student = SASRec(config, teacher.n_rows, stream(world.config.seed, "ccd", "student"))
        student.has_row = teacher.has_row.cpu().clone()
        student.refresh_mean_row()
        student = at_rest(student.to(teacher.items.device))
        return CCDState(start_from_backbone(world), student, student, student, 0)

    def learn(self, world: World, state: CCDState, slice_: TimeSlice, descend: Descend) -> tuple[CCDState, Diagnostics]:
        generated, distilled = self._generated(world, state, slice_, descend)
        first, mean = state.generations == 0, average_modules if is_peft(world) else average_weights
        stable = generated if first else mean(state.stable, generated, self.keep_stable)
        plastic = generated if first else mean(state.plastic, generated, self.keep_plastic)
        sources = [Source(stable, self.n_stable), Source(plastic, self.n_plastic)]
        found = state.teacher.backbone
        pupil = replace(state.teacher, backbone=generated)
        updated, _, studied = self._updated(world, pupil, found, slice_, descend, sources, teaches=False)
        student, sources = updated.backbone, [*sources, Source(updated.backbone, self.n_student)]
        teacher, replayed, fit = self._updated(world, state.teacher, found, slice_, descend, sources, teaches=True)
        student = with_table_of(student, teacher.backbone) if is_peft(world) else student
        learned = CCDState(teacher, student, stable, plastic, state.generations + 1)
        steps = {"distilled_ndcg10": distilled.trace, "student_ndcg10": studied["validation_ndcg10"]}
        return learned, {**fit, **replayed, **steps}

    def _generated(self, world: World, state: CCDState, slice_: TimeSlice, descend: Descend) -> tuple[SASRec, Fit]:
        """The student after distillation from the teacher that the slice found."""
        settings = world.config.training
        if state.generations == 0:  # from scratch, where a small cap of epochs would make it weak
            task = Task(world.base, world.base.train_positions, settings.base_epochs, settings.learning_rate)
            descend = on_base_block(world, descend)
        else:
            previous = np.arange(*slice_.bounds[-2].part("train"))
            task = Task(slice_, previous, settings.slice_epochs, settings.slice_learning_rate)
        return train(
            state.student,
            task,
            settings,
            seed=world.config.seed,
            descend=descend,
            trainable=parts_to_train(world, torch.zeros(state.student.n_rows, dtype=torch.bool)),
            extra=self._imitation(world, state.teacher.backbone, slice_),
            progress=world.progress,
        )

    def _imitation(self, world: World, teacher: SASRec, slice_: TimeSlice) -> Extra | None:
        """The teacher's top items at each window's end, in its order, before uniform others."""
        if self.distillation == 0:
            return None
        rng = stream(world.config.seed, "ccd", "distil", slice_.index, device=teacher.items.device)
        n_items = teacher.n_rows
        n, k = world.config.training.negatives, max(1, min(self.distilled_top, n_items // 2))

        def losses(model: SASRec, batch: Windows, lots: Lots, notes: Notes) -> Float[Tensor, " W"]:
            with torch.no_grad():
                best = teacher.scores(last_states(teacher, batch), n_items).topk(k, dim=-1).indices
            drawn = uniform_items(lots, len(batch), n, n_items)
            scores = item_scores(model, last_states(model, batch), torch.cat([best, drawn], dim=1))
            void = (drawn[:, :, None] == best[:, None, :]).any(-1)
            loss = relaxed_ranking_loss(scores[:, :k], scores[:, k:].masked_fill(void, VOID))
            return self.distillation * loss * real_targets(batch)

        return Extra(losses, Notes(), rng)

    def _updated(
        self,
        world: World,
        learner: BackboneState,
        teacher: SASRec,
        slice_: TimeSlice,
        descend: Descend,
        sources: list[Source],
        *,
        teaches: bool,
    ) -> tuple[BackboneState, dict[str, float], Diagnostics]:
        """The learner after the slice and the replay from these sources, what it replayed, and how it went."""
        notes, clock = Notes(), Clock(world.progress, torch.zeros((), device=teacher.items.device))
        extra = self._replay(world, teacher, slice_, sources, clock, notes) if self.weight > 0 else None
        first, new = rows_for(world, learner.backbone, slice_)
        model, fit = fine_tuned(
            world,
            (first, new),
            slice_,
            descend,
            extra=extra,
            trainable=self._trainable(world, new, teaches=teaches),
            progress=clock,
        )
        learned = BackboneState(model, slice_.index, max(learner.newest_target, fit.newest_target))
        replayed = {"replay_loss": 0.0, "replayed_items": 0.0, "soft_label": 0.0} | notes.means()
        return learned, replayed, fit.diagnostics()

    def _trainable(self, world: World, new: Bool[Tensor, " n"], *, teaches: bool) -> Trainable:
        """Everything; under `peft` the teacher's LoRA and the new rows, or the student's prompt alone."""
        if is_peft(world) and teaches:
            return modules_and_rows(new, self.lora_rate)
        return parts_to_train(world, torch.zeros_like(new) if is_peft(world) else new)

    def _replay(
        self, world: World, teacher: SASRec, slice_: TimeSlice, sources: list[Source], clock: Clock, notes: Notes
    ) -> Extra:
        """Soft-labelled items of the sources at each window's end, with a weight that fades over the epochs."""
        n_items, purpose = slice_.n_train_items, ("ccd", "replay", slice_.index, len(sources))
        rng = stream(world.config.seed, *purpose, device=teacher.items.device)
        rows = [source.model.rows(n_items).detach() for source in sources]

        def losses(model: SASRec, batch: Windows, lots: Lots, notes: Notes) -> Float[Tensor, " W"]:
            hidden = last_states(model, batch)
            with torch.no_grad():
                pool = candidate_pool(teacher, last_states(teacher, batch), n_items, self.pool, self.top, lots)
                void, mine = unusable(pool, batch), sort_scores(pool_scores(model.rows(n_items), hidden, pool))
                parts = zip(sources, rows, strict=True)
                chosen = merge_chosen([self._chosen(*part, batch, pool, void, mine, lots) for part in parts])
            each, n = soft_loss(item_scores(model, hidden, chosen.items), chosen), real_targets(batch)
            note(notes, each, chosen, n > 0)
            return self.weight * (-clock.epoch / self.anneal).exp() * each * n

        return Extra(losses, notes, rng)

    def _chosen(
        self, source: Source, rows: Tensor, batch: Windows, pool: Tensor, void: Tensor, mine: Ordered, lots: Lots
    ) -> Chosen:
        """Items among the source's top, likelier the further the learner ranks them below the source."""
        its = pool_scores(rows, last_states(source.model, batch), pool)
        usable = ~void & source.model.knows(pool)
        best = its.masked_fill(~usable, VOID).topk(min(self.top, pool.shape[1]), dim=-1).indices
        its_rank, my_rank = torch.arange(best.shape[1], device=best.device), count_above(mine, usable, best)
        uniform = lots.uniform(tuple(pool.shape)).gather(1, best)  # an item keeps its number, however ranks round
        drawn, valid = draw_by_rank(self.sharpness * (my_rank - its_rank), usable.gather(1, best), source.n, uniform)
        places = best.gather(1, drawn)
        return Chosen(pool.gather(1, places), its.gather(1, places).sigmoid(), valid)

    def score(self, world: World, state: CCDState, queries: Queries) -> Float[Tensor, "B I"]:
        if self.scored == "student":
            return backbone_scores(replace(state.teacher, backbone=state.student), queries)
        return backbone_scores(state.teacher, queries)

    def evidence(self, state: CCDState) -> Evidence:
        return backbone_evidence(state.teacher)
