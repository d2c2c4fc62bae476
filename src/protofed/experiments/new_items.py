"""What content does for items that nobody has learned: their ranks with it and without, no training in between."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.backbone.content import with_nearest
from protofed.backbone.pretrain import cached_warm_up
from protofed.backbone.sasrec import SASRec
from protofed.config import RunConfig
from protofed.data.interactions import InteractionLog
from protofed.features.content import Content
from protofed.progress import Progress, silent
from protofed.slices.stream import SliceStream


@dataclass(frozen=True, slots=True)
class NewItems:
    """Test events on items that came after the base block: where each item stood among all that were available."""

    items: Int[Tensor, " E"]
    item_ids: pa.Array
    available: Int[Tensor, " E"]
    without: Float[Tensor, " E"]  # its rank, 1 for first; the middle of those that tie
    with_content: Float[Tensor, " E"]

    def __len__(self) -> int:
        return len(self.items)


def rank_new_items(
    config: RunConfig,
    log: InteractionLog,
    content: Content,
    cache: Path,
    device: torch.device,
    progress: Progress = silent,
) -> NewItems:
    """The ranks in the test parts of all slices, by the warm-up's backbone as it is and with its nearest rows."""
    data = SliceStream(log, config.stream)
    backbone, _ = cached_warm_up(config, data, cache, device=device, progress=progress)
    told = with_nearest(backbone, content, config.content.neighbours)
    items, available, ranks = [], [], []
    for index in range(1, data.n_slices + 1):
        asked = data.query_set(index, "test")
        new = np.flatnonzero(asked.positives.numpy() >= backbone.n_rows)
        queries = data.queries(asked, new, config.backbone.history_length)
        positives = asked.positives[torch.from_numpy(new)]
        tokens = queries.tokens.to(device)
        ranks.append(torch.stack([ranks_of(m, tokens, positives, queries.n_items) for m in (backbone, told)]))
        items.append(positives)
        available.append(torch.full_like(positives, queries.n_items))
    both = torch.cat(ranks, dim=1)
    return NewItems(torch.cat(items), log.item_ids, torch.cat(available), both[0], both[1])


@torch.no_grad()
def ranks_of(
    model: SASRec, tokens: Int[Tensor, "B L"], positives: Int[Tensor, " B"], n_items: int
) -> Float[Tensor, " B"]:
    """The rank of each positive among all items, the middle of those that tie."""
    if not len(tokens):
        return torch.zeros(0)
    scores = model.scores(model.last_hidden(tokens), n_items).cpu()
    own = scores.gather(1, positives[:, None])
    return 1 + (scores > own).sum(1).float() + ((scores == own).sum(1).float() - 1) / 2
