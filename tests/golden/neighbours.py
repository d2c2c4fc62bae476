"""Neighbouring logs, and what every user adds to every release of a run, caught just before it is summed and noised.

Two logs are neighbours when one lacks all events that one user has after the base block; slice edges, catalogue and
the number of users are public and stay. Both runs draw the same numbers for the same event, and the second is handed
the noised sums that the first released, so that all its releases are made at equal weights, not the first alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from protofed.client import lessons
from protofed.client import upload as uploads
from protofed.data.interactions import InteractionLog
from protofed.federation import newcomers as introducing
from protofed.federation import popularity, simulator
from protofed.methods.baselines import dual_lora, federated_rounds
from protofed.privacy import descent, draws
from protofed.privacy.descent import PrivateDescent
from protofed.privacy.upload import write_out
from protofed.privacy.user_gradients import Rows
from protofed.server import aggregate, fedkmeans
from protofed.server import newcomers as introductions
from protofed.slices.histories import Histories, histories
from protofed.slices.partition import SliceBounds
from protofed.slices.stream import SliceStream

MOST_ITEMS = 1_000  # more than any log here has
ROUNDING = 1e-5  # of the bound: single precision, before the clip
KEYED_BY_EVENT = ("private windows", "private negatives", "extra loss", "client negatives", "dual-lora sample")
Contribution = dict[str, Tensor]  # by the name of what it is added to


class Without(SliceStream):
    """The stream of a log without one user's events after the base block, cut where the whole one is."""

    def __init__(self, whole: SliceStream, user: int) -> None:
        log, base_end = whole.log, whole.bounds[0].end
        gone = (log.users.numpy() == user) & (np.arange(len(log)) >= base_end)
        self.whole, self.kept = whole, np.flatnonzero(~gone)  # the place in the whole log of each event left
        columns = (column[torch.from_numpy(self.kept)] for column in (log.users, log.items, log.times))
        self.log, self.config = InteractionLog(log.name, *columns, log.user_ids, log.item_ids), whole.config
        self.edges = {
            self._moved(edge): edge for b in whole.bounds for edge in (b.start, b.train_end, b.val_end, b.end)
        }
        self.bounds = tuple(
            SliceBounds(b.index, *(self._moved(edge) for edge in (b.start, b.train_end, b.val_end, b.end)))
            for b in whole.bounds
        )
        self._users, self._items = (column.numpy().astype(np.int64) for column in (self.log.users, self.log.items))
        self._times, self._query_sets = self.log.times.numpy(), {}

    def _moved(self, edge: int) -> int:
        return int(np.searchsorted(self.kept, edge))

    @cached_property
    def items_until(self) -> np.ndarray:
        """The catalogue is public: an item that only the user brought stays in it."""
        until = self.whole.items_until[np.append(self.kept, len(self.whole.log))]
        until[list(self.edges)] = self.whole.items_until[list(self.edges.values())]
        return until

    def _histories(self, end: int) -> Histories:
        """So is the number of users."""
        n_users = self.whole._histories(self.edges[end]).n_users
        return histories(self._users[:end], self._items[:end], self._times[:end], n_users)


def somebody(stream: SliceStream) -> int:
    """A user with events in the base block and in the train parts of slices 1 and 2, but not the last to arrive."""
    counts = [
        np.bincount(stream._users[slice(*stream.bounds[index].part("train"))], minlength=stream.log.n_users)
        for index in range(3)
    ]
    return int(np.minimum.reduce(counts)[:-1].argmax())


@dataclass(slots=True)
class Released:
    """One release: what each user adds, the noise's standard deviation, and the stream of the ledger it belongs to."""

    stream: str = "private steps"
    by_user: dict[int, Contribution] = field(default_factory=dict)
    std: float = 0.0

    def add(self, user: int, found: Contribution) -> None:
        assert user not in self.by_user, "a user adds once to a release"
        self.by_user[user] = found

    def total(self) -> Contribution:
        names = {name for found in self.by_user.values() for name in found}
        return {name: torch.stack([f[name] for f in self.by_user.values()]).sum(0) for name in names}


@dataclass(slots=True)
class Capture:
    """Every release of a run, in order, and the noised sums that left; a `script` is released in their place."""

    kept: np.ndarray | None = None  # the places of the run's events in the whole log
    script: list[Tensor] | None = None
    releases: list[Released] = field(default_factory=list)
    noised: list[Tensor] = field(default_factory=list)

    def of(self, stream: str) -> "Capture":
        """The releases of one stream."""
        return replace(self, releases=[release for release in self.releases if release.stream == stream])

    def noise(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`add_gaussian_noise`, written down."""

        def add(sums: Tensor, std: float, noise: Any) -> Tensor:
            self.releases[-1].std = std
            made = original(sums, std, noise)
            if self.script is not None:
                made = self.script[len(self.noised)]
                assert made.shape == sums.shape
            self.noised.append(made)
            return made

        return add

    def keyed(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`uniform` with the numbers that an event had in the whole log."""

        def drawn(seed: int, purpose: str, keys: Tensor, round_: int, shape: tuple[int, ...] = ()) -> Tensor:
            if self.kept is not None and purpose in KEYED_BY_EVENT:
                keys = torch.where(keys < 0, keys, torch.from_numpy(self.kept)[keys.clamp(min=0)])
            return original(seed, purpose, keys, round_, shape)

        return drawn


def capture_run(run: Callable[[], Any], stream: SliceStream, script: list[Tensor] | None = None) -> tuple[Capture, Any]:
    """Every release that the run makes on this stream, and what it returned."""
    capture = Capture(stream.kept if isinstance(stream, Without) else None, script)
    with pytest.MonkeyPatch.context() as patch:
        for module in (descent, lessons, dual_lora):
            patch.setattr(module, "uniform", capture.keyed(draws.uniform), raising=False)
        for module in (descent, federated_rounds, introductions, fedkmeans):
            patch.setattr(module, "add_gaussian_noise", capture.noise(module.add_gaussian_noise))
        watch_gradients(capture, patch)
        watch_clients(capture, patch)
        watch_introductions(capture, patch)
        watch_uploads(capture, patch, stream)
        return capture, run()


def watch_gradients(capture: Capture, patch: pytest.MonkeyPatch) -> None:
    """Private steps: the gradient of each user of a chunk, clipped by the real function as if alone."""
    sums, clipped_sum, gradients_of = PrivateDescent.sums, descent.clipped_sum, descent.gradients_of
    names: list[str] = []
    ids: list[int] = []
    n_rows = [0]

    def opened(self: PrivateDescent, *arguments: Any) -> Any:
        capture.releases.append(Released())
        exact = sums(self, *arguments)
        for name, found in capture.releases[-1].total().items():  # nothing is added that no user has said
            torch.testing.assert_close(found, exact[name].flatten(), atol=1e-9, rtol=1e-9)
        return exact

    def watched(loss: Any, weights: Any, chunk: Any, numbers: Tensor) -> Any:
        found = gradients_of(loss, weights, chunk, numbers)
        here = chunk.owners < chunk.n_users
        whose = dict(zip(chunk.owners[here].tolist(), chunk.inputs.batch.users[here].tolist(), strict=True))
        names[:], ids[:] = list(found.dense), [whose[place] for place in range(chunk.n_users)]
        n_rows[:] = [len(weights.get(descent.TABLE, ()))]
        return found

    def apart(contributions: list[Tensor], radius: float, rows: Rows | None = None) -> Any:
        for place, user in enumerate(ids):
            mine = None if rows is None else rows.owners == place
            own = None if mine is None else Rows(0 * rows.owners[mine], rows.items[mine], rows.values[mine])
            dense, table, _ = clipped_sum([each[place : place + 1] for each in contributions], radius, own)
            found = {name: part.flatten() for name, part in zip(names, dense, strict=True)}
            capture.releases[-1].add(user, found | in_table(table, n_rows[0]))
        return clipped_sum(contributions, radius, rows)

    patch.setattr(PrivateDescent, "sums", opened)
    patch.setattr(descent, "gradients_of", watched)
    patch.setattr(descent, "clipped_sum", apart)


def in_table(rows: Rows | None, n_rows: int) -> Contribution:
    """What a user adds to the item table, dense."""
    if rows is None:
        return {}
    table = torch.zeros(n_rows, rows.values.shape[1], dtype=torch.float64).index_add(0, rows.items, rows.values)
    return {descent.TABLE: table.flatten()}


def watch_clients(capture: Capture, patch: pytest.MonkeyPatch) -> None:
    """Federated baselines: the movement of each client of a stack, clipped by the real function as if alone."""
    one_round, trained, clipped_sum = (
        getattr(federated_rounds, name) for name in ("one_round", "train_cohort", "clipped_sum")
    )
    ids: list[int] = []

    def opened(*arguments: Any) -> Any:
        capture.releases.append(Released())
        return one_round(*arguments)

    def remembered(world: Any, server: Any, windows: Any, users: Tensor, *rest: Any) -> Any:
        ids[:] = users.tolist()
        return trained(world, server, windows, users, *rest)

    def apart(deltas: Any, radius: float) -> Any:
        for place, user in enumerate(ids):
            mine, stack = deltas.clients == place, deltas.stack
            own = replace(stack, dense=stack.dense[place : place + 1], rows=stack.rows[mine])
            alone = replace(deltas, stack=own, clients=0 * deltas.clients[mine], items=deltas.items[mine])
            dense, table, _ = clipped_sum(alone, radius)
            capture.releases[-1].add(user, {"dense": dense, "table": table.flatten()})
        return clipped_sum(deltas, radius)

    patch.setattr(federated_rounds, "one_round", opened)
    patch.setattr(federated_rounds, "train_cohort", remembered)
    patch.setattr(federated_rounds, "clipped_sum", apart)


def watch_introductions(capture: Capture, patch: pytest.MonkeyPatch) -> None:
    """New items and popularity: what each client says about items, all together."""
    make_item_upload = introducing.make_item_upload

    def opened(stream: str, said: Any, keys: Tensor, draws: Any, slice_index: int) -> Any:
        release = Released(stream)
        for user in said.users.unique().tolist():
            mine = said.users == user
            table = torch.zeros(MOST_ITEMS, said.values.shape[1], dtype=torch.float64)
            release.add(user, {"items": table.index_add(0, said.items[mine], said.values[mine].double()).flatten()})
        capture.releases.append(release)
        return make_item_upload(said, keys, draws, slice_index)

    for module, stream in ((introducing, "new items"), (popularity, "popularity")):
        patch.setattr(module, "make_item_upload", partial(opened, stream))


def watch_uploads(capture: Capture, patch: pytest.MonkeyPatch, stream: SliceStream) -> None:
    """ProtoFed-SP's prototypes: the rows that each device adds to the sums, before they are coded or noised by it.

    Where devices add the noise, the standard deviation written down is that of the noise which is priced.
    """
    simulate_round, make_upload, release_sums = simulator.simulate_round, simulator.make_upload, aggregate.release_sums
    number = {int(key): user for user, key in enumerate(stream._user_keys)}
    sending: list[int] = []

    def opened(*arguments: Any) -> Any:
        capture.releases.append(Released("prototypes"))
        return simulate_round(*arguments)

    def watched(model: Any, state: Any, rule: Any, *rest: Any) -> Any:
        sending[:] = [number[key] for key in state.users.tolist()]
        if rule.form == "integers":
            share = uploads.secure_std(rule.upload, rule.noise_multiplier, 1e9, least=rule.least, clients=0)
            capture.releases[-1].std = share / 1e9 * math.sqrt(rule.least - 1)
        elif rule.form == "noised rows":
            capture.releases[-1].std = rule.upload.noise_std(rule.noise_multiplier, "local")
        return make_upload(model, state, rule, *rest)

    def coded(original: Callable[..., Any]) -> Callable[..., Any]:
        def code(z: Tensor, block: Tensor, rule: Any, *rest: Any) -> Any:
            for user, table in zip(sending, write_out(z.double(), block, rule), strict=True):
                capture.releases[-1].add(user, {"sums": table.flatten()})
            return original(z, block, rule, *rest)

        return code

    def released(accepted: Any, rule: Any, noise: Any) -> Any:
        made = release_sums(accepted, rule, noise)
        if rule.form == "points":  # `noise` has written it down
            return made
        assert made is not None, "too few uploads: a test of nothing"
        made = made if capture.script is None else capture.script[len(capture.noised)]
        capture.noised.append(made)
        return made

    patch.setattr(simulator, "simulate_round", opened)
    patch.setattr(simulator, "make_upload", watched)
    patch.setattr(aggregate, "release_sums", released)
    for name in ("central_upload", "secure_upload", "local_upload"):
        patch.setattr(uploads, name, coded(getattr(uploads, name)))


def length(found: Contribution) -> float:
    return math.sqrt(sum(float(part.double().square().sum()) for part in found.values()))


def apart(one: Contribution, other: Contribution) -> float:
    """How far two contributions are from one another; nothing said is zero."""
    names = one.keys() | other.keys()
    missing = {name: torch.zeros_like((one | other)[name]) for name in names}
    return length({name: one.get(name, missing[name]) - other.get(name, missing[name]) for name in names})


def assert_neighbouring(whole: Capture, without: Capture, removed: int, bound: float) -> None:
    """Every release differs by the removed user's contribution, which is gone, and by no more than the bound."""
    assert [one.stream for one in whole.releases] == [one.stream for one in without.releases] != []
    assert any(length(one.by_user.get(removed, {})) > ROUNDING * bound for one in whole.releases), "a test of nothing"
    for place, (one, other) in enumerate(zip(whole.releases, without.releases, strict=True)):
        left = length(other.by_user.get(removed, {}))
        assert left == 0, f"release {place}: user {removed} has no event after the base block and still adds {left:g}"
        for user in (one.by_user.keys() | other.by_user.keys()) - {removed}:
            moved = apart(one.by_user.get(user, {}), other.by_user.get(user, {}))
            assert moved <= ROUNDING * bound, f"release {place}: user {user} moves by {moved:g}, being another one"
        moved = apart(one.total(), other.total())
        assert moved <= bound * (1 + ROUNDING), f"release {place}: the sums are {moved:g} apart, {bound:g} is priced"
