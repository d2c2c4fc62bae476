"""Item rows a client keeps for itself: what it alone has learned about the items it met. They never leave the device.

A frozen backbone has no row for an item that appeared after its warm-up, and the shared rule for new items asks other
people's devices. A client's own events need nobody's permission: it places a new item among its own neighbours, and
then learns the rows of its own items along with its prompts. No equation of the paper; see docs/paper_notes.md.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.backbone.new_items import neighbours
from protofed.backbone.sasrec import Embed, SASRec
from protofed.slices.histories import Histories, Queries, distinct_past, met_before

SPAN = 2**32  # pairs are looked up by client * SPAN + item
NEIGHBOURS = 5  # events before and after, as in the shared rule


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Rows of P (client, item) pairs, sorted by client and then by item."""

    clients: Int[Tensor, " P"]
    items: Int[Tensor, " P"]
    rows: Float[Tensor, "P d"]

    def __len__(self) -> int:
        return len(self.clients)


def no_rows(d: int, *, device: torch.device | None = None) -> OwnRows:
    """Clients that have met nothing."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return OwnRows(nothing, nothing, torch.zeros(0, d, device=device))


def find(
    own: OwnRows, clients: Int[Tensor, "*n"], items: Int[Tensor, "*n"]
) -> tuple[Bool[Tensor, "*n"], Int[Tensor, "*n"]]:
    """Whether each client has a row of its own for each item, and where (a valid place wherever there is one)."""
    if not len(own):
        return torch.zeros_like(items, dtype=torch.bool), torch.zeros_like(items)
    wanted = clients * SPAN + items
    keys = own.clients * SPAN + own.items
    place = torch.searchsorted(keys, wanted.contiguous()).clamp(max=len(keys) - 1)
    return keys[place] == wanted, place


def own_embed(
    own: OwnRows, clients: Int[Tensor, " B"], public: Embed, allowed: Bool[Tensor, " n"] | None = None
) -> Embed:
    """Rows as client b of a batch reads them: its own where it has one, the public one elsewhere.

    `allowed` says by client whether it uses its own rows.
    """
    if not len(own):
        return public

    def embed(items: Int[Tensor, "B n"]) -> Float[Tensor, "B n d"]:
        whose = clients[:, None].expand_as(items)
        hit, place = find(own, whose, items)
        if allowed is not None:
            hit = hit & allowed[whose]
        return torch.where(hit[..., None], own.rows[place], public(items))

    return embed


def pairs_of(own: OwnRows, clients: Int[Tensor, " B"]) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"]]:
    """All pairs of these clients: which of `clients` (by place) each belongs to, and its place in `own`."""
    first, last = (torch.searchsorted(own.clients, edge.contiguous()) for edge in (clients, clients + 1))
    counts = last - first
    which = torch.repeat_interleave(torch.arange(len(clients), device=clients.device), counts)
    before = counts.cumsum(0) - counts
    return which, torch.arange(len(which), device=clients.device) - (before - first)[which]


def with_own_scores(
    scores: Float[Tensor, "B I"],
    hidden: Float[Tensor, "B d"],
    own: OwnRows,
    clients: Int[Tensor, " B"],
    allowed: Bool[Tensor, " n"] | None = None,
    queries: Queries | None = None,
) -> Float[Tensor, "B I"]:
    """Scores in which each client's own items are scored with its own rows.

    With `queries`, only what a query's own past holds: a row for an item that its client met later, asked about an
    earlier time, would give the answer away.
    """
    which, place = pairs_of(own, clients)
    keep = own.items[place] < scores.shape[1]
    if allowed is not None:
        keep = keep & allowed[clients[which]]
    if queries is not None:
        keep = keep & met_before(queries, which, own.items[place])
    which, place = which[keep], place[keep]
    return scores.index_put((which, own.items[place]), (hidden[which] * own.rows[place]).sum(-1))


def with_just_met(
    scores: Float[Tensor, "B I"],
    hidden: Float[Tensor, "B d"],
    own: OwnRows,
    queries: Queries,
    boost: float,
    allowed: Bool[Tensor, " B"],
) -> Float[Tensor, "B I"]:
    """Scores in which items of a query's own past that its client has no row for count as just met.

    Such a row would start at the public one and `boost` towards the client's typical query (as in `with_met_items`);
    asked now, that is the query itself, so its score rises by boost * |hidden|. Nothing is learned or kept.
    """
    which, items = distinct_past(queries)
    fresh = ~find(own, queries.users[which], items)[0] & allowed[which] & (items < scores.shape[1])
    which, items = which[fresh], items[fresh]
    return scores.index_put((which, items), scores[which, items] + boost * hidden[which].norm(dim=-1))


def subset(own: OwnRows, clients: Int[Tensor, " U"]) -> tuple[OwnRows, Int[Tensor, " P"]]:
    """The rows of a stack of clients, who are then numbered 0 .. U - 1, and their places in `own`. `clients` ascend."""
    which, place = pairs_of(own, clients)
    return OwnRows(which, own.items[place], own.rows[place]), place


def write_back(own: OwnRows, place: Int[Tensor, " P"], part: OwnRows) -> OwnRows:
    """The table with the rows of a stack put back where `subset` took them."""
    return replace(own, rows=own.rows.index_copy(0, place, part.rows.to(own.rows)))


def rows_to(own: OwnRows, device: torch.device) -> OwnRows:
    """The same rows on another device."""
    return OwnRows(own.clients.to(device), own.items.to(device), own.rows.to(device))


def merge_rows(own: OwnRows, clients: Int[Tensor, " U"], part: OwnRows) -> OwnRows:
    """The table in which these clients have the rows of `part`, whose clients are places in `clients`."""
    stay = ~torch.isin(own.clients, clients)
    whose = torch.cat([own.clients[stay], clients[part.clients]])
    items, rows = torch.cat([own.items[stay], part.items]), torch.cat([own.rows[stay], part.rows.to(own.rows)])
    order = (whose * SPAN + items).argsort()
    return OwnRows(whose[order], items[order], rows[order])


def with_met_items(
    own: OwnRows,
    model: SASRec,
    past: Histories,
    until: int,
    clients: Int[Tensor, " A"],
    boost: Float[Tensor, "A d"] | None = None,
) -> OwnRows:
    """The table with a pair for every item that these clients (ascending) met before log position `until`.

    Pairs that were there keep what they learned. A new one starts at the public row, or at the mean public row of the
    client's own neighbouring events where the item has none, or at the public mean row where those have none either;
    `boost` is added to a client's new rows (`met_boost`).
    """
    users, items = _distinct_pairs(past, until)
    mine = np.isin(users, clients.cpu().numpy())
    device = own.rows.device
    whose, what = (torch.from_numpy(column).to(device) for column in (users, items))
    known, place = find(own, whose, what)
    keep = known | torch.from_numpy(mine).to(device)
    rows = _first_rows(model, past, until, users, items, ~known.cpu().numpy() & mine).to(device)
    if boost is not None and len(clients):
        at = torch.searchsorted(clients.to(device), whose).clamp(max=len(clients) - 1)
        rows = rows + boost.to(device)[at]
    rows = torch.where(known[:, None], own.rows[place] if len(own) else rows, rows)
    return OwnRows(whose[keep], what[keep], rows[keep])


def met_boost(before: OwnRows, after: OwnRows, taste: Float[Tensor, "N d"]) -> float:
    """How far learned rows moved, on average, towards their client's typical query: what having met an item is worth.

    Both tables hold the same pairs; `taste` has a unit vector for each client. Rows that did not move do not count.
    """
    step = after.rows - before.rows
    moved = (step != 0).any(-1)
    if not bool(moved.any()):
        return 0.0
    return float((step[moved] * taste[after.clients[moved]].to(step)).sum(-1).mean())


def _distinct_pairs(past: Histories, until: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct (user, item) among the first events of the log, sorted."""
    positions = np.arange(until)
    codes = past.users[positions].astype(np.int64) * SPAN + past.items[past.place[positions]]
    distinct = np.unique(codes)
    return distinct // SPAN, distinct % SPAN


def _first_rows(
    model: SASRec, past: Histories, until: int, clients: np.ndarray, items: np.ndarray, fresh: np.ndarray
) -> Float[Tensor, "P d"]:
    """Public rows of all pairs; of fresh ones without a public row, the mean public row of their own neighbours."""
    every = torch.arange(int(items.max(initial=-1)) + 1, device=model.items.device)
    table, has_row = model.embed(every).detach().cpu(), model.tells_apart(every).cpu().numpy()
    rows = table[torch.from_numpy(items)]
    wanted = fresh & ~has_row[items]
    if not wanted.any():
        return rows
    positions = np.arange(until)
    codes = past.users[positions].astype(np.int64) * SPAN + past.items[past.place[positions]]
    slot = np.searchsorted(clients * SPAN + items, codes)
    positions, slot = positions[wanted[slot]], slot[wanted[slot]]
    event, other = neighbours(past, positions, until, NEIGHBOURS)
    use = has_row[other]
    target, source = torch.from_numpy(slot[event[use]]), torch.from_numpy(other[use])
    total = torch.zeros(len(rows)).index_add_(0, target, torch.ones(len(target)))
    summed = torch.zeros_like(rows).index_add_(0, target, table[source])
    return torch.where((total > 0)[:, None], summed / total.clamp(min=1)[:, None], rows)
