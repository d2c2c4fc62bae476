"""The new-item rule, the same for every method: a row that starts at the items it was met with, then learned once."""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from protofed.backbone.sasrec import SASRec, grown
from protofed.backbone.training import ParameterGroups, Trainable
from protofed.slices.histories import Histories
from protofed.slices.stream import TimeSlice


def neighbours(past: Histories, positions: np.ndarray, until: int, span: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (index into `positions`, item the same user met at most `span` events before or after that event).

    Only events before log position `until` count on either side.
    """
    position_of_place = np.argsort(past.place, kind="stable")
    place, users = past.place[positions], past.users[positions]
    first, last = past.start[users], past.start[users + 1]
    pairs = []
    for shift in [*range(-span, 0), *range(1, span + 1)]:
        other = place + shift
        inside = (other >= first) & (other < last)
        inside[inside] = position_of_place[other[inside]] < until
        pairs.append((np.flatnonzero(inside), past.items[other[inside]]))
    return np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])


def cooccurrences(slice_: TimeSlice, span: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (item of a train event, item met by the same user at most `span` events before or after it)."""
    positions = slice_.train_positions
    event, other = neighbours(slice_.past, positions, slice_.bounds[-1].train_end, span)
    return slice_.past.items[slice_.past.place[positions]][event], other


def neighbour_means(
    slice_: TimeSlice, model: SASRec, wanted: np.ndarray, *, span: int = 5, top: int = 20
) -> tuple[Float[Tensor, "n d"], Bool[Tensor, " n"]]:
    """Per wanted item the count-weighted mean row of the `top` items it co-occurs with most, and whether any did."""
    item, other = cooccurrences(slice_, span)
    has_row = np.zeros(slice_.n_train_items, dtype=bool)
    has_row[: model.n_rows] = model.has_row.cpu().numpy()
    use = np.isin(item, wanted) & has_row[other]
    codes, counts = np.unique(item[use] * slice_.n_train_items + other[use], return_counts=True)
    item, other = codes // slice_.n_train_items, codes % slice_.n_train_items
    order = np.lexsort((other, -counts, item))  # per item, the most frequent first
    item, other, counts = item[order], other[order], counts[order]
    rank = np.arange(len(item)) - np.searchsorted(item, item)
    item, other, counts = (column[rank < top] for column in (item, other, counts))
    slot = torch.from_numpy(np.searchsorted(wanted, item))
    weight = torch.from_numpy(counts.astype(np.float32))
    rows = model.items.detach().cpu()[torch.from_numpy(other)]
    total = torch.zeros(len(wanted)).index_add_(0, slot, weight)
    mean = torch.zeros(len(wanted), rows.shape[1]).index_add_(0, slot, rows * weight[:, None])
    return mean / total.clamp(min=1e-9)[:, None], total > 0


def with_new_rows(model: SASRec, slice_: TimeSlice) -> tuple[SASRec, Bool[Tensor, " n"]]:
    """A copy with rows for the items met in this slice's train part that had none, and which rows those are.

    An item that co-occurs with no item that has a row keeps the mean row, or its row from content, but is trainable
    from now on.
    """
    bigger = grown(model, slice_.n_train_items)
    met = slice_.train_counts() > 0
    new = met & ~bigger.has_row.cpu()
    wanted = new.nonzero()[:, 0].numpy()
    rows, found = neighbour_means(slice_, model, wanted)
    start = model.untrained(new.nonzero()[:, 0].to(model.items.device)).cpu()
    rows = torch.where(found[:, None], rows, start)
    with torch.no_grad():
        bigger.items[new.to(bigger.items.device)] = rows.to(bigger.items.device)
    bigger.has_row |= new.to(bigger.has_row.device)
    bigger.refresh_mean_row()
    return bigger, new


def only_rows(mask: Bool[Tensor, " n"]) -> Trainable:
    """Trains nothing but these item rows; the others get neither gradient nor weight decay."""

    def trainable(model: SASRec) -> ParameterGroups:
        chosen = mask.to(model.items.device)[:, None]
        model.items.requires_grad_(True).register_hook(lambda grad: grad * chosen)
        return [{"params": [model.items], "weight_decay": 0.0, "numbers": int(mask.sum()) * model.items.shape[1]}]

    return trainable
