"""What a user's own past says about an item in it: numbers that never leave the device."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from protofed.slices.histories import Queries

DAY = 86_400.0
HALF_LIVES = (0.25, 2.0, 14.0, 90.0)  # days
FOLLOW_HALF_LIFE = 30.0  # days
HOUR_WIDTH, WEEK_WIDTH = 1.5, 3.0  # hours: how near in the day, or the week, an earlier event has to be
NUMBERS = (
    *("count", "6 hours", "2 days", "14 days", "90 days", "events since", "last event", "followed", "followed lately"),
    *("time of day", "hour of week", "share", "events", "repeat rate", "age", "age squared", "once", "constant"),
)
QUERY_TIME = (
    "6 hours",
    "2 days",
    "14 days",
    "90 days",
    "followed lately",
    "time of day",
    "hour of week",
    "age",
    "age squared",
)


def own_past(queries: Queries) -> tuple[Int[Tensor, " P"], Int[Tensor, " P"], Float[Tensor, "P 18"]]:
    """Every item of each query's own past once: which query, which item, and the numbers of NUMBERS about it."""
    at, n_items = queries.past_items.device, queries.n_items
    sizes = queries.offsets.diff()
    query = torch.repeat_interleave(torch.arange(len(queries), device=at), sizes)
    pairs, pair = torch.unique(query * n_items + queries.past_items, return_inverse=True)
    which, item, p = pairs // n_items, pairs % n_items, len(pairs)
    age = (queries.times[query] - queries.past_times).clamp(min=0).double() / DAY
    place = torch.arange(len(query), device=at) - queries.offsets[:-1][query]

    def add(values: Tensor) -> Tensor:
        return torch.zeros(p, dtype=torch.float64, device=at).index_add(0, pair, values.double())

    count = add(torch.ones_like(age))
    last = torch.zeros(p, dtype=torch.int64, device=at).scatter_reduce(0, pair, place, "amax", include_self=False)
    youngest = torch.full((p,), math.inf, dtype=torch.float64, device=at).scatter_reduce(0, pair, age, "amin")
    since = sizes[which] - 1 - last
    follows = follows_the_last(queries, query, place)
    hours = 24 * age  # hours since an event: its distance in the day is that of the time of day
    n = sizes[which].double()
    distinct = torch.bincount(which, minlength=len(queries))[which].double()
    log_age = youngest.log1p()
    columns = (
        count.log1p(),
        *((10 * add(0.5 ** (age / h))).log1p() for h in HALF_LIVES),
        since.double().log1p(),
        (since == 0).double(),
        add(follows).log1p(),
        add(follows * 0.5 ** (age / FOLLOW_HALF_LIFE)).log1p(),
        add(near(hours, 24.0, HOUR_WIDTH)).log1p(),
        add(near(hours, 168.0, WEEK_WIDTH)).log1p(),
        count / n,
        n.log1p(),
        1 - distinct / n,
        log_age,
        log_age.square() / 10,
        (count == 1).double(),
        torch.ones_like(count),
    )
    return which, item, torch.stack(columns, dim=1).float()


def follows_the_last(queries: Queries, query: Int[Tensor, " M"], place: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
    """1 for each event of a past that came right after an event on the item the past ends with, else 0."""
    items = queries.past_items
    if not len(items):
        return torch.zeros(0, device=items.device)
    ends = items[(queries.offsets[1:] - 1).clamp(min=0)]
    before = items.roll(1)
    return ((place > 0) & (before == ends[query])).float()


def near(hours: Float[Tensor, " M"], period: float, width: float) -> Float[Tensor, " M"]:
    """How near two instants so many hours apart are within a period: 1 for the same phase, 0 far from it."""
    angle = 2 * math.pi * hours / period
    return ((angle.cos() - 1) / (2 * math.pi * width / period) ** 2).exp()
