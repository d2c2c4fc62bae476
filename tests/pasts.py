"""Questions made of a few pasts, written down event by event."""

import numpy as np
import torch

from protofed.slices.histories import Queries


def queries_of(pasts: list[list[tuple[int, int]]], now: int, n_items: int = 6) -> Queries:
    pasts = [sorted(past, key=lambda event: event[1]) for past in pasts]
    items = [item for past in pasts for item, _ in past]
    times = [time for past in pasts for _, time in past]
    return Queries(
        users=torch.arange(len(pasts)),
        times=torch.full((len(pasts),), now),
        tokens=torch.zeros(len(pasts), 1, dtype=torch.int64),
        offsets=torch.tensor([0, *np.cumsum([len(past) for past in pasts])]),
        past_items=torch.tensor(items, dtype=torch.int64),
        past_times=torch.tensor(times, dtype=torch.int64),
        slice_index=0,
        n_items=n_items,
    )
