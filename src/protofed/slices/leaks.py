"""The leak checker: every look-ahead fails loudly, under its own name.

The runner calls these on what it really hands out and gets back; none of them trusts the code it checks.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from protofed.data.interactions import InteractionLog
from protofed.errors import LeakError
from protofed.features.content import PLACE, Content
from protofed.slices.candidates import NO_CANDIDATE
from protofed.slices.stream import QuerySet, SliceStream

SAME_ORDER = 0.9  # Spearman's correlation from which a column counts as a statistic of events
FEWEST_RANKED, MIN_LEVELS = 20, 5  # fewer items, or columns of fewer values, rank alike by chance


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a method's state admits to knowing; None where it holds nothing of the kind.

    A method fills this from its own state, and the checker holds it against the stream.
    """

    slice_index: int  # the newest slice the state (prompts, weights, buffers) was learned at
    newest_target: int | None = None  # log position of the newest event that gave a gradient
    item_rows: int | None = None  # items with a row of their own
    popularity: Int[Tensor, " n"] | None = None  # item counts the state scores with
    head_target: int | None = None  # log position of the newest event that a head was fitted on
    counts_until: int | None = None  # log position where the counts that a head reads end


def check_candidates(stream: SliceStream, asked: QuerySet) -> None:
    """No negative that was first seen after the slice, and none the user has met by then."""
    end = stream.bounds[asked.slice_index].part(asked.part)[1]
    items, users = stream.log.items.numpy(), stream.log.users.numpy()
    first_seen = np.full(stream.log.n_items, len(items), dtype=np.int64)
    np.minimum.at(first_seen, items, np.arange(len(items)))
    for name, drawn in (("negative", asked.negatives), ("hard negative", asked.hard)):
        real = drawn[drawn != NO_CANDIDATE].numpy()
        late = real[first_seen[real] >= end]
        if len(late):
            raise LeakError(
                f"a {name} from the future: item {late[0]} is a candidate of slice {asked.slice_index} ({asked.part}) "
                f"but is first seen at log position {first_seen[late[0]]}, after the part's end {end}"
            )
    n_items = stream.log.n_items
    met = np.unique(users[:end].astype(np.int64) * n_items + items[:end])
    drawn = asked.users[:, None].numpy() * n_items + asked.negatives.numpy()
    wrong = (np.isin(drawn, met) & (asked.negatives.numpy() != NO_CANDIDATE)).any(1)
    if wrong.any():
        user = int(asked.users[int(wrong.argmax())])
        raise LeakError(f"a positive among the negatives: user {user} has met one of its candidates by position {end}")


def check_public(log: InteractionLog, content: Content) -> None:
    """Nothing that is given as known of items says when, how often or how well liked they were met in the log.

    A catalogue is public; a column that ranks items as their counts or times do was made from events, later ones too.
    """
    facts = facts_of_events(log)
    for modality in content.modalities:
        if modality.name == PLACE:
            continue
        there = modality.present.numpy()
        for column, values in enumerate(modality.vectors[modality.present].double().numpy().T):
            for what, truth in facts.items():
                if is_same_order(values, truth[there]):
                    raise LeakError(
                        f"a statistic of events among what is known of items: column {column} of {modality.name} ranks "
                        f"them as {what} in the log does; leave the column out"
                    )


def facts_of_events(log: InteractionLog) -> dict[str, np.ndarray]:
    """What the log's events say of each item, of all slices: what no description may know."""
    items, places = log.items.numpy(), np.arange(len(log))
    first, last = np.full(log.n_items, len(log)), np.zeros(log.n_items, dtype=np.int64)
    np.minimum.at(first, items, places)
    np.maximum.at(last, items, places)
    counts = np.bincount(items, minlength=log.n_items)
    times = log.times.numpy()
    facts = {"their number of events": counts, "their first event": times[first], "their last event": times[last]}
    if log.ratings is not None:
        sums = np.bincount(items, weights=np.nan_to_num(log.ratings.numpy()), minlength=log.n_items)
        facts["their mean rating"] = sums / np.maximum(counts, 1)
    return facts


def is_same_order(values: np.ndarray, truth: np.ndarray) -> bool:
    """Whether two columns rank nearly alike, upwards or downwards: Spearman's correlation, ties at their mean rank."""
    if len(values) < FEWEST_RANKED or len(np.unique(values)) < MIN_LEVELS or len(np.unique(truth)) < MIN_LEVELS:
        return False
    from scipy.stats import rankdata  # a second to load, and a host's process starts for every order

    ranks = [rankdata(column) for column in (values, truth)]
    return bool(abs(np.corrcoef(*ranks)[0, 1]) > SAME_ORDER)


def check_evidence(stream: SliceStream, slice_index: int, evidence: Evidence) -> None:
    """Nothing in the state of slice `slice_index` comes from later than its train cut; a head, from the base block."""
    bounds = stream.bounds[slice_index]
    if evidence.slice_index > slice_index:
        raise LeakError(
            f"a state of a later slice: slice {slice_index} would be answered with prompts or weights of slice "
            f"{evidence.slice_index}"
        )
    if evidence.newest_target is not None and evidence.newest_target >= bounds.train_end:
        part = "validation" if evidence.newest_target < bounds.val_end else "test or later"
        raise LeakError(
            f"{part} events in training: a gradient came from log position {evidence.newest_target}, "
            f"the train part of slice {slice_index} ends at {bounds.train_end}"
        )
    if evidence.item_rows is not None and evidence.item_rows > stream.n_train_items(slice_index):
        raise LeakError(
            f"an item row that exists too early: {evidence.item_rows} rows at slice {slice_index}, where only "
            f"{stream.n_train_items(slice_index)} items have been seen up to the train cut"
        )
    if evidence.head_target is not None and evidence.head_target >= stream.bounds[0].val_end:
        raise LeakError(
            f"a head fitted after the base block: on an event at log position {evidence.head_target}, the base block's "
            f"validation part ends at {stream.bounds[0].val_end}"
        )
    if evidence.counts_until is not None and evidence.counts_until > bounds.train_end:
        raise LeakError(
            f"counts of later events under a head: they end at log position {evidence.counts_until}, the train part of "
            f"slice {slice_index} ends at {bounds.train_end}"
        )
    if evidence.popularity is not None:
        _check_popularity(stream, slice_index, evidence.popularity)


def _check_popularity(stream: SliceStream, slice_index: int, counted: Tensor) -> None:
    train = stream.log.items[slice(*stream.bounds[slice_index].part("train"))].long()
    allowed = torch.bincount(train, minlength=len(counted))
    if len(allowed) > len(counted):
        counted = torch.nn.functional.pad(counted, (0, len(allowed) - len(counted)))
    if not torch.equal(counted.cpu().long(), allowed):
        extra = int(counted.sum()) - int(allowed.sum())
        raise LeakError(
            f"popularity counted outside the train part: {int(counted.sum())} events at slice {slice_index}, "
            f"its train part has {int(allowed.sum())} ({extra:+d})"
        )
