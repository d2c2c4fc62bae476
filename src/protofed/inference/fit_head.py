"""How a head is fitted: on the base block's later validation events, among all items, and kept only where it pays.

Each question may be asked at an age: with the counts, and the inner model's items, of an earlier time. So a head that
will live on the base block's counts for eight slices learns on questions for which they are as old.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from protofed.inference.head import Cells, Head, add_parts, item_cells, own_cells
from protofed.inference.item_side import ItemCounts, popularity_numbers
from protofed.seeds import seeded, stream
from protofed.slices.histories import Queries

SCALES = torch.linspace(-6.0, 2.0, 33)  # of log beta, for scores that spread by 1
MOST_QUESTIONS, MOST_CELLS = 8_000, 100_000_000  # of scores held at once while a head is fitted


@dataclass(frozen=True, slots=True)
class Examples:
    """Questions with their answers: inner scores of all items, the cells of the parts, the counts of every age."""

    scores: Float[Tensor, "Q I"]
    positives: Int[Tensor, " Q"]
    users: Int[Tensor, " Q"]
    own: Cells
    near: Cells
    y: Float[Tensor, "A I 3"]
    ages: Int[Tensor, " Q"]

    def __len__(self) -> int:
        return len(self.positives)


def slim(queries: int, items: int) -> int:
    """How many of the newest questions fit beside each other."""
    return min(queries, MOST_QUESTIONS, max(1, MOST_CELLS // max(items, 1)))


def examples_of(
    scores: Float[Tensor, "Q I"], positives: Int[Tensor, " Q"], queries: Queries, counts: ItemCounts
) -> Examples:
    """What a head is fitted on: questions of one age."""
    n = scores.shape[1]
    y = popularity_numbers(counts, n)[None]
    ages = torch.zeros(len(scores), dtype=torch.int64)
    return Examples(scores, positives, queries.users, own_cells(queries, n), item_cells(queries, counts, n), y, ages)


def join(parts: Sequence[Examples]) -> Examples:
    """Several sets of questions as one; parts of the same age share its counts, given once each."""
    sizes = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).tolist()
    tables: list[Tensor] = []
    ages = []
    for part in parts:
        known = [n for n, table in enumerate(tables) if torch.equal(table, part.y[0])]
        ages.append(part.ages + (known[0] if known else len(tables)))
        tables += [] if known else [part.y[0]]

    def cells(name: str) -> Cells:
        some = [getattr(part, name) for part in parts]
        which = torch.cat([each.which + first for each, first in zip(some, sizes, strict=False)])
        return Cells(which, torch.cat([each.items for each in some]), torch.cat([each.x for each in some]))

    return Examples(
        scores=torch.cat([part.scores for part in parts]),
        positives=torch.cat([part.positives for part in parts]),
        users=torch.cat([part.users for part in parts]),
        own=cells("own"),
        near=cells("near"),
        y=torch.stack(tables),
        ages=torch.cat(ages),
    )


def take_cells(cells: Cells, chosen: Int[Tensor, " n"]) -> Cells:
    """The cells of some of the questions, which are numbered anew in this order."""
    starts = torch.searchsorted(cells.which, chosen)
    counts = torch.searchsorted(cells.which, chosen, right=True) - starts
    which = torch.repeat_interleave(torch.arange(len(chosen)), counts)
    places = torch.arange(len(which)) - (counts.cumsum(0) - counts)[which] + starts[which]
    return Cells(which, cells.items[places], cells.x[places])


def take(examples: Examples, chosen: Int[Tensor, " n"]) -> Examples:
    """Some of the questions, in this order."""
    rows = {name: getattr(examples, name)[chosen] for name in ("scores", "positives", "users", "ages")}
    return replace(examples, own=take_cells(examples.own, chosen), near=take_cells(examples.near, chosen), **rows)


def final_scores(head: Head, some: Examples) -> Float[Tensor, "Q I"]:
    """What the head makes of the inner scores."""
    return add_parts(head, some.scores, some.own, some.near, some.y, some.ages)


def question_losses(head: Head, some: Examples) -> Float[Tensor, " Q"]:
    """Cross-entropy of each answer among all items."""
    return F.cross_entropy(final_scores(head, some), some.positives, reduction="none")


@torch.no_grad()
def all_losses(head: Head, examples: Examples) -> Float[Tensor, " Q"]:
    """The cross-entropy of every answer."""
    parts = [question_losses(head, take(examples, chosen)) for chosen in torch.arange(len(examples)).split(512)]
    return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class Fitting:
    """How a head is fitted."""

    rate: float = 1e-2
    decay: float = 0.1  # of all but beta: towards a head that changes nothing
    batch: int = 128
    epochs: int = 40
    patience: int = 4
    folds: int = 5  # one in so many users says when to stop, and which parts are worn
    sure: float = 1.0  # standard errors by which a part has to gain


def fit_head(
    examples: Examples,
    seed: int,
    how: Fitting | None = None,
    *,
    own: bool = True,
    items: bool = True,
    unread: Sequence[int] = (),
) -> Head:
    """The head that answers the questions of the users kept aside best, with the parts that pay there.

    m has to beat the scale of the scores alone, which changes no ranking; r has to beat what is there without it. m
    reads none of the numbers `unread`.
    """
    how = how or Fitting()
    learned, kept = split_users(examples, seed, how.folds)
    best = Head(own=False, items=False)
    if not len(learned) or not len(kept):
        return best.requires_grad_(False).eval()
    best.log_beta.data.copy_(fit_scale(learned))
    for part, allowed in (("own", own and len(learned.own.x) > 0), ("items", items)):
        if allowed:
            parts = {"own": best.own is not None, "items": best.items is not None} | {part: True}
            tried = train_head(Head(**parts), learned, kept, best.log_beta.detach(), seed, how, unread)
            best = tried if pays(all_losses(best, kept) - all_losses(tried, kept), kept.users, how.sure) else best
    return best.requires_grad_(False).eval()


def split_users(examples: Examples, seed: int, folds: int) -> tuple[Examples, Examples]:
    """The questions a head learns from, and those of one user in so many, which say when to stop and what to wear."""
    aside = examples.users % folds == int(stream(seed, "head fold").initial_seed()) % folds
    learned, kept = (take(examples, where.nonzero()[:, 0]) for where in (~aside, aside))
    return learned, kept


def gain_of(
    examples: Examples, head: Head, before: Examples, other: Head, seed: int, how: Fitting | None = None
) -> bool:
    """Whether a head pays beside another one that reads something else for the same questions."""
    how = how or Fitting()
    kept, old = (split_users(some, seed, how.folds)[1] for some in (examples, before))
    return len(kept) > 0 and pays(all_losses(other, old) - all_losses(head, kept), kept.users, how.sure)


def pays(gains: Float[Tensor, " Q"], users: Int[Tensor, " Q"], sure: float) -> bool:
    """Whether the mean gain is so many standard errors above 0, users and not questions being independent."""
    who, where = torch.unique(users, return_inverse=True)
    sums = torch.zeros(len(who), dtype=torch.float64).index_add(0, where, gains.double())
    counts = torch.bincount(where, minlength=len(who))
    mean = gains.double().mean()
    residual = sums - mean * counts
    return bool(mean > sure * residual.square().sum().sqrt() / len(gains))


def train_head(
    head: Head,
    learned: Examples,
    kept: Examples,
    log_beta: Tensor,
    seed: int,
    how: Fitting,
    unread: Sequence[int] = (),
) -> Head:
    """The head at its best epoch on the questions kept aside."""
    head.log_beta.data.copy_(log_beta)
    with seeded(seed, "head weights"):
        for part in (head.own, head.items):
            if part is not None:
                nn.init.xavier_uniform_(part.widen.weight)
    if head.own is not None:
        head.own.standardise(learned.own.x)
        head.own.leave_out(unread)
    if head.items is not None:
        head.items.standardise(item_numbers(learned))
    weights = [p for name, p in head.named_parameters() if name != "log_beta"]
    groups = [{"params": weights, "weight_decay": how.decay}, {"params": [head.log_beta], "weight_decay": 0.0}]
    optimiser, order = torch.optim.AdamW(groups, lr=how.rate), stream(seed, "head order")
    least, best, waited = float(all_losses(head, kept).mean()), copy.deepcopy(head.state_dict()), 0
    for _ in range(how.epochs):
        run_epoch(head, learned, optimiser, how.batch, order)
        loss = float(all_losses(head, kept).mean())
        waited = 0 if loss < least else waited + 1
        if loss < least:
            least, best = loss, copy.deepcopy(head.state_dict())
        if waited >= how.patience:
            break
    head.load_state_dict(best)
    return head


def item_numbers(examples: Examples) -> Float[Tensor, "P 5"]:
    """What r reads, for the answers and the co-visited items: what it is to tell apart."""
    near, ages = examples.near, examples.ages
    together = torch.cat([examples.y[ages[near.which], near.items], near.x], dim=1)
    everything = F.pad(examples.y.flatten(0, 1), (0, near.x.shape[1]))
    return torch.cat([together, everything])


@torch.no_grad()
def fit_scale(examples: Examples) -> Float[Tensor, ""]:
    """The logarithm of beta with which the inner scores alone answer best.

    The loss is convex in beta, so it falls and then rises along SCALES: the lowest is found by halving.
    """
    head = Head(own=False, items=False)
    finite = examples.scores[examples.scores.isfinite()]
    tried: Tensor = SCALES - finite.std().clamp(min=1e-12).log()

    def loss(number: int) -> float:
        head.log_beta.copy_(tried[number])
        return float(all_losses(head, examples).double().mean())

    first, last = 0, len(tried) - 1
    while first < last:
        middle = (first + last) // 2
        first, last = (first, middle) if loss(middle) <= loss(middle + 1) else (middle + 1, last)
    return tried[first]


def run_epoch(head: Head, examples: Examples, optimiser: torch.optim.Optimizer, batch: int, order: Generator) -> None:
    """One pass over the questions."""
    for chosen in torch.randperm(len(examples), generator=order).split(batch):
        optimiser.zero_grad(set_to_none=True)
        question_losses(head, take(examples, chosen)).mean().backward()
        optimiser.step()
