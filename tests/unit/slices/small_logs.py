"""Small logs with everything that makes time awkward, and the slow readings of them that the tests compare with."""

from typing import NamedTuple

import numpy as np

from protofed.data.interactions import InteractionLog, from_columns

DAY = 86_400
BURST = 14  # events of one user at one instant: more than the windows of these tests hold


class Event(NamedTuple):
    """One row of a log, by number."""

    user: int
    item: int
    time: int


def random_log(
    seed: int, n: int = 240, *, n_users: int = 7, n_items: int = 40, n_instants: int = 80, name: str = "toy"
) -> InteractionLog:
    """A log with ties, repeats, users and items that arrive late, and two instants crowded by one user."""
    rng = np.random.default_rng(seed)
    # Every instant occurs, so that the log can always be cut into as many slices as n_instants / 3 allows.
    times = np.sort(np.concatenate([np.arange(n_instants), rng.integers(0, n_instants, n - n_instants)]))
    progress = 0.3 + 0.7 * np.arange(n) / n
    users = (rng.random(n) * n_users * progress).astype(int)
    items = (rng.random(n) ** 2 * n_items * progress).astype(int)
    for start in rng.integers(0, n - BURST, 2):
        times[start : start + BURST], users[start : start + BURST] = times[start], users[start]
    return from_columns(name, [f"user-{u}" for u in users], [f"item-{i}" for i in items], np.sort(times) * DAY)


def log_of(rows: list[tuple[object, object, int]], name: str = "toy") -> InteractionLog:
    """A log of (user, item, time) rows."""
    users, items, times = zip(*rows, strict=True)
    return from_columns(name, users, items, list(times))


def events_of(log: InteractionLog) -> list[Event]:
    """The log's rows as plain tuples of numbers."""
    return [Event(*row) for row in zip(log.users.tolist(), log.items.tolist(), log.times.tolist(), strict=True)]


def rows_of(log: InteractionLog) -> list[tuple[object, object, int]]:
    """The log's rows by original identifiers."""
    users, items = log.user_ids.to_pylist(), log.item_ids.to_pylist()
    return [(users[event.user], items[event.item], event.time) for event in events_of(log)]


def earlier_events(events: list[Event], position: int, *, row_order: bool = False) -> list[Event]:
    """The history of the event at this position, oldest first."""
    asked = events[position]
    return [
        event
        for place, event in enumerate(events)
        if event.user == asked.user and (event.time < asked.time or (row_order and place < position))
    ]
