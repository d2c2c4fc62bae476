"""What stops a training early: NDCG@10 of a slice's validation part, asked again after every epoch.

An exam is laid out on the device once, and only the candidates that count are scored.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.backbone.sasrec import SASRec
from protofed.evaluation.ranking import ndcg, rank_of_positive
from protofed.slices.histories import leading_padding, tokens_ending_at
from protofed.slices.stream import TimeSlice

QUERIES_AT_ONCE = 512
LastHidden = Callable[[Int[Tensor, "B L"]], Float[Tensor, "B d"]]


@dataclass(frozen=True, slots=True)
class Questions:
    """Some validation queries on a device."""

    tokens: Int[Tensor, "B L"]
    positives: Int[Tensor, " B"]
    negatives: Int[Tensor, "B n"] | None  # None: all items compete


@dataclass(frozen=True, slots=True)
class Exam:
    """All validation queries of a slice, short histories first, and which of them each is."""

    parts: tuple[Questions, ...]
    order: Int[np.ndarray, " Q"]
    n_items: int


def exam_of(slice_: TimeSlice, selection: str, length: int, device: torch.device) -> Exam:
    """The slice's validation part among sampled candidates or all items."""
    asked, past = slice_.validation, slice_.past
    order = np.argsort(past.before[asked.positions], kind="stable")  # short histories need short inputs
    parts = []
    for start in range(0, len(asked), QUERIES_AT_ONCE):
        chunk = order[start : start + QUERIES_AT_ONCE]
        where = asked.positions[chunk]
        tokens = tokens_ending_at(past, past.users[where].astype(np.int64), past.before[where], length)
        negatives = None if selection == "full" else asked.negatives[chunk].to(device)
        trimmed = tokens[:, leading_padding(tokens) :].to(device)
        parts.append(Questions(trimmed, asked.positives[chunk].to(device), negatives))
    return Exam(tuple(parts), order, asked.n_items)


@torch.no_grad()
def grade_exam(model: SASRec, exam: Exam, last_hidden: LastHidden | None = None) -> Float[Tensor, " Q"]:
    """NDCG@10 of every query, in the exam's order; histories are read by `last_hidden`, by default the model's own."""
    asked = model.eval().laid_out()
    read = last_hidden or asked.last_hidden
    ranks = [_ranks(asked, read(part.tokens), part, exam.n_items) for part in exam.parts]
    return torch.cat([torch.zeros(0), *(ndcg(each, 10).cpu() for each in ranks)])


def _ranks(model: SASRec, hidden: Float[Tensor, "B d"], part: Questions, n_items: int) -> Int[Tensor, " B"]:
    if part.negatives is None:
        return rank_of_positive(model.scores(hidden, n_items), part.positives)
    candidates = torch.cat([part.positives[:, None], part.negatives], dim=1)
    scores = model.scores_among(hidden, candidates)
    return rank_of_positive(scores, torch.zeros_like(part.positives), candidates >= 0)


def mean_grade(model: SASRec, exam: Exam, last_hidden: LastHidden | None = None) -> float:
    """The mean NDCG@10; NaN where nothing is asked."""
    values = grade_exam(model, exam, last_hidden)
    return float(values.mean()) if len(values) else float("nan")


def validation_ndcg(model: SASRec, slice_: TimeSlice, selection: str = "sampled") -> float:
    """NDCG@10 of the slice's validation queries, asked once."""
    return mean_grade(model, exam_of(slice_, selection, model.config.history_length, model.items.device))
