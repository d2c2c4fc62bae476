"""A small head on the device: the score of whatever model is inside, and what the user's own past adds to it.

score(i) = beta * inner(i) + m(own past with i) for items of the past, beta * inner(i) for all others. A few hundred
numbers, fitted among all items, so that what was met before is weighed against what was not. m never leaves a device.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from protofed.inference.own_past import NUMBERS, own_past
from protofed.seeds import seeded, stream
from protofed.slices.histories import Queries

HIDDEN = 24
SCALES = torch.linspace(-2.0, 1.0, 16)  # of log beta
MOST_QUESTIONS, MOST_CELLS = 8_000, 100_000_000  # of scores held at once while a head is fitted


class Head(nn.Module):
    """beta and m; as made it changes no ranking: beta is 1 and m is 0."""

    centre: Tensor
    spread: Tensor

    def __init__(self, width: int = len(NUMBERS), hidden: int = HIDDEN) -> None:
        super().__init__()
        self.log_beta = nn.Parameter(torch.zeros(()))
        with seeded(0, "overwritten below"):
            self.line, self.widen, self.narrow = nn.Linear(width, 1), nn.Linear(width, hidden), nn.Linear(hidden, 1)
        for layer in (self.line, self.narrow):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.register_buffer("centre", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))

    def forward(self, x: Float[Tensor, "P f"]) -> Float[Tensor, " P"]:
        """m."""
        x = (x - self.centre) / self.spread
        value: Tensor = self.line(x) + self.narrow(F.gelu(self.widen(x)))
        return value[:, 0]

    def on_top(
        self, scores: Float[Tensor, "B I"], which: Int[Tensor, " P"], items: Int[Tensor, " P"], x: Float[Tensor, "P f"]
    ) -> Float[Tensor, "B I"]:
        """The final scores, given those of the model inside."""
        whole = self.log_beta.exp() * scores
        return whole.index_put((which, items), whole[which, items] + self(x))


@torch.no_grad()
def with_head(head: Head, scores: Float[Tensor, "B I"], queries: Queries) -> Float[Tensor, "B I"]:
    """The final scores of queries whose inner scores are given."""
    which, items, x = own_past(queries)
    inside = items < scores.shape[1]
    return head.on_top(scores, which[inside], items[inside], x[inside])


@dataclass(frozen=True, slots=True)
class Examples:
    """Questions with their answers: inner scores of all items, and the numbers of the own past."""

    scores: Float[Tensor, "Q I"]
    positives: Int[Tensor, " Q"]
    users: Int[Tensor, " Q"]
    which: Int[Tensor, " P"]  # ascending
    items: Int[Tensor, " P"]
    x: Float[Tensor, "P f"]

    def __len__(self) -> int:
        return len(self.positives)


def slim(queries: int, items: int) -> int:
    """How many of the newest questions fit beside each other."""
    return min(queries, MOST_QUESTIONS, max(1, MOST_CELLS // max(items, 1)))


def examples_of(scores: Float[Tensor, "Q I"], positives: Int[Tensor, " Q"], queries: Queries) -> Examples:
    """What a head is fitted on."""
    which, items, x = own_past(queries)
    inside = items < scores.shape[1]
    return Examples(scores, positives, queries.users, which[inside], items[inside], x[inside])


def join(parts: Sequence[Examples]) -> Examples:
    """Several sets of questions as one; later catalogues are larger, and what was not there yet cannot win."""
    width = max(part.scores.shape[1] for part in parts)
    sizes = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).tolist()
    columns = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in ("positives", "users", "items", "x")
    }
    scores = [F.pad(p.scores, (0, width - p.scores.shape[1]), value=float("-inf")) for p in parts]
    which = [part.which + first for part, first in zip(parts, sizes, strict=False)]
    return Examples(scores=torch.cat(scores), which=torch.cat(which), **columns)


def take(examples: Examples, chosen: Int[Tensor, " n"]) -> Examples:
    """Some of the questions, in this order."""
    starts = torch.searchsorted(examples.which, chosen)
    counts = torch.searchsorted(examples.which, chosen, right=True) - starts
    which = torch.repeat_interleave(torch.arange(len(chosen)), counts)
    places = torch.arange(len(which)) - (counts.cumsum(0) - counts)[which] + starts[which]
    rows = (examples.scores[chosen], examples.positives[chosen], examples.users[chosen])
    return Examples(*rows, which, examples.items[places], examples.x[places])


def question_losses(head: Head, some: Examples) -> Float[Tensor, " Q"]:
    """Cross-entropy of each answer among all items."""
    return F.cross_entropy(head.on_top(some.scores, some.which, some.items, some.x), some.positives, reduction="none")


@dataclass(frozen=True, slots=True)
class Fitting:
    """How a head is fitted."""

    rate: float = 1e-2
    decay: float = 0.1  # of all but beta: towards a head that changes nothing
    batch: int = 128
    epochs: int = 40
    patience: int = 4
    folds: int = 5  # one in so many users says when to stop, and whether the head is worn at all


def fit_head(examples: Examples, seed: int, how: Fitting | None = None) -> tuple[Head, bool]:
    """The head that answers the questions of the users kept aside best, and whether m earns its place there.

    What it has to beat is the scale of the scores alone, which changes no ranking.
    """
    how = how or Fitting()
    aside = examples.users % how.folds == int(stream(seed, "head fold").initial_seed()) % how.folds
    learned, kept = (take(examples, where.nonzero()[:, 0]) for where in (~aside, aside))
    head = Head()
    if not len(learned) or not len(kept) or not len(learned.x):
        return head.requires_grad_(False).eval(), False
    with seeded(seed, "head weights"):
        nn.init.xavier_uniform_(head.widen.weight)
    head.centre.copy_(learned.x.mean(0))
    head.spread.copy_(learned.x.std(0, correction=0).clamp(min=1e-3))
    weights = [p for name, p in head.named_parameters() if name != "log_beta"]
    groups = [{"params": weights, "weight_decay": how.decay}, {"params": [head.log_beta], "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=how.rate)
    order = stream(seed, "head order")
    head.log_beta.copy_(fit_scale(learned))
    none = least = mean_loss(head, kept)
    best, waited = copy.deepcopy(head.state_dict()), 0
    for _ in range(how.epochs):
        epoch(head, learned, optimiser, how.batch, order)
        loss = mean_loss(head, kept)
        waited = 0 if loss < least else waited + 1
        if loss < least:
            least, best = loss, copy.deepcopy(head.state_dict())
        if waited >= how.patience:
            break
    head.load_state_dict(best)
    return head.requires_grad_(False).eval(), least < none


@torch.no_grad()
def fit_scale(examples: Examples) -> Float[Tensor, ""]:
    """The logarithm of beta with which the inner scores alone answer best."""
    head = Head()

    def loss(log_beta: Tensor) -> float:
        head.log_beta.copy_(log_beta)
        return mean_loss(head, examples)

    return min(SCALES, key=loss)


def epoch(head: Head, examples: Examples, optimiser: torch.optim.Optimizer, batch: int, order: Generator) -> None:
    """One pass over the questions."""
    for chosen in torch.randperm(len(examples), generator=order).split(batch):
        optimiser.zero_grad(set_to_none=True)
        question_losses(head, take(examples, chosen)).mean().backward()
        optimiser.step()


@torch.no_grad()
def mean_loss(head: Head, examples: Examples) -> float:
    """The mean cross-entropy of the answers."""
    parts = [question_losses(head, take(examples, chosen)) for chosen in torch.arange(len(examples)).split(512)]
    return float(torch.cat(parts).mean())
