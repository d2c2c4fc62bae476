"""A model one can hold: devices by the user's id, answers in item ids, no log and no training at hand."""

import secrets
import time as clock
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import pyarrow as pa
import torch
from jaxtyping import Float, Int

from protofed.backbone.injection import rescale_like
from protofed.client.memory import Memory, no_memory, select_events
from protofed.client.model import Model
from protofed.client.router import route
from protofed.client.state import DeviceState, new_device, remember, select
from protofed.client.upload import Upload, make_upload
from protofed.errors import DataError
from protofed.inference import device as single
from protofed.inference.answer import Ready, make_ready, score_next
from protofed.inference.head import FittedHead, with_head
from protofed.inference.head_alone import FlatHead, FlatPast, add_head, lay_out_head, lay_out_past
from protofed.inference.item_side import SPAN
from protofed.inference.kept_past import KeptPast, after_event, keep_past
from protofed.inference.online import online_inference
from protofed.privacy.draws import Draws, SystemDraws
from protofed.privacy.ledger import Ledger, Trust
from protofed.privacy.upload import NOTHING, RoundRule
from protofed.seeds import user_keys
from protofed.slices.histories import BOS

BARE = (False, False)  # the backbone alone: no prompt, no own rows
SHOWN = 3  # items that say what a prototype means


@dataclass(frozen=True)
class Catalogue:
    """The items a model ranks: row i of the table is item i, its column `item` the original id."""

    table: pa.Table

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {str(item): number for number, item in enumerate(self.table["item"].to_pylist())}

    def number(self, item: object) -> int | None:
        """The number of an item, None where the catalogue lacks it."""
        return self._numbers.get(str(item))

    def numbers(self, items: Iterable[object]) -> list[int]:
        """The numbers of items that are all in the catalogue."""
        found = [(item, self.number(item)) for item in items]
        unknown = [item for item, number in found if number is None]
        if unknown:
            raise DataError(
                f"item {unknown[0]!r} is not among the {len(self):,} items of this model "
                f"({len(unknown):,} of {len(found):,} are not); leave it out, or train again with it"
            )
        return [number for _, number in found if number is not None]

    @cached_property
    def _items(self) -> pa.ChunkedArray:
        return self.table["item"]

    @cached_property
    def _titles(self) -> pa.ChunkedArray | None:
        return self.table["title"] if "title" in self.table.column_names else None

    def item(self, number: int) -> object:
        """The original id of an item."""
        return self._items[number].as_py()

    def title(self, number: int) -> str | None:
        """What people call the item, where that is known."""
        return None if self._titles is None else self._titles[number].as_py()


@dataclass(frozen=True, slots=True)
class Prototype:
    """A prototype that a query is routed to: its number, its weight, and the items that its prompt lifts most."""

    number: int
    weight: float
    items: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an item stands where it stands."""

    times_met: int  # in the user's own past
    last_met: int | None  # unix seconds
    own_row: bool  # scored with a row that this device learned
    public_rank: int  # where the backbone alone would rank it among the same candidates, 1 for first
    like: tuple[object, ...]  # known items that its content places it beside; empty where events taught it
    prototypes: tuple[Prototype, ...]  # behind the whole answer; empty where this device uses no prompt


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One recommended item."""

    item: object
    score: float
    title: str | None = None
    why: Reason | None = None


@dataclass(frozen=True, slots=True)
class Bystanders:
    """Users of the log whom training left out: their keys, and what they did among the model's items."""

    users: Int[torch.Tensor, " U"]
    memory: Memory


NOBODY = Bystanders(torch.zeros(0, dtype=torch.int64), no_memory(0))


@dataclass(frozen=True)
class Recommender:
    """Everything a site holds of one trained model, and the devices of a simulated one."""

    name: str  # of the data it was trained on
    model: Model
    rule: RoundRule | None  # how uploads are made; None: nothing leaves a device
    next_round: int
    next_slice: int
    catalogue: Catalogue
    devices: DeviceState
    bystanders: Bystanders = NOBODY
    ledger: Ledger = ()
    trust: Trust = "central"
    head: FittedHead | None = None  # what the user's own past and counts of items add on top
    settings: str = ""  # the run's config.toml
    card: str = ""  # README.md

    def device(
        self,
        user: object | None = None,
        *,
        history: Sequence[object] | None = None,
        times: Sequence[int] | None = None,
        draws: Draws | None = None,
    ) -> "Device":
        """A user's device: the one that learned during training, or a new one that remembers this history.

        A history is oldest first; items of it that the catalogue lacks are left out and listed in `Device.unknown`.
        """
        if user is None and history is None:
            raise DataError("a device is somebody's: name a user of the log, or give a history (it may be empty)")
        draws = draws or SystemDraws(secrets.token_bytes(32))
        key = int(user_keys([user])[0]) if user is not None else secrets.randbits(62)
        if history is not None:
            known = [self.catalogue.number(item) is not None for item in history]
            unknown = tuple(item for item, inside in zip(history, known, strict=True) if not inside)
            events = self._events([item for item, inside in zip(history, known, strict=True) if inside], times, known)
            state = self._meet(remember(new_device(self.model, key), events), draws)
            return Device(self, state, draws, learned=0, unknown=unknown)
        left = self._remembered(key)
        if left is None:
            total = len(self.devices) + len(self.bystanders.users)
            raise DataError(
                f"no device of a user {user!r} among the {total:,} of {self.name}; "
                "check the id, or give the user's history"
            )
        state = self._meet(left, draws)
        return Device(self, state, draws, learned=len(state.memory.items))

    def _remembered(self, key: int) -> DeviceState | None:
        """What the user's device was left with; None where there was none."""
        found = (self.devices.users.cpu() == key).nonzero()[:, 0]
        if len(found):
            return select(self.devices, found[:1])
        beside = (self.bystanders.users == key).nonzero()[:, 0]
        if not len(beside):
            return None
        return remember(new_device(self.model, key), select_events(self.bystanders.memory, beside[:1]))

    def score(
        self, state: DeviceState, past: FlatPast | None = None, time: int | None = None
    ) -> Float[torch.Tensor, " I"]:
        """A score for every item as this device's next one at `time`, by default that of its newest event.

        `past`: the device's past as `lay_out` makes it, where that needs not be made anew.
        """
        if self._ready is not None:
            scores = score_next(self._ready, state)
        else:
            scores = online_inference(self.model, state, single.as_query(self.model, state))[0]
        if self.head is None or not self.head.head.worn:
            return scores
        if past is None:
            return with_head(self.head, scores[None], single.as_query(self.model, state, time))[0]
        newest = max(state.memory.times[-1:].tolist(), default=0)
        return add_head(self._flat_head, scores, past, newest if time is None else time)

    def lay_out(self, state: DeviceState, past: KeptPast | None) -> FlatPast | None:
        """A device's past made ready for the head; None where no head is worn."""
        if self.head is None or not self.head.head.worn:
            return None
        return lay_out_past(self._flat_head, past, state.memory.items[-SPAN:].tolist())

    @cached_property
    def _ready(self) -> Ready | None:
        return make_ready(self.model)

    @cached_property
    def _flat_head(self) -> FlatHead:
        assert self.head is not None
        return lay_out_head(self.head, self.model.n_items)

    def _events(self, items: list[object], times: Sequence[int] | None, known: list[bool]) -> Memory:
        """A history as a device remembers it; without times one event a second, ending now."""
        if times is not None and (len(times) != len(known) or any(b < a for a, b in pairwise(times))):
            raise DataError(f"times must be as many as the history's {len(known)} items and never fall, got {times!r}")
        now = int(clock.time())
        when = [t for t, inside in zip(times, known, strict=True) if inside] if times is not None else []
        when = when or list(range(now - len(items) + 1, now + 1))
        numbers = torch.tensor(self.catalogue.numbers(items), dtype=torch.int64)
        return Memory(torch.tensor([0, len(items)]), numbers, torch.tensor(when, dtype=torch.int64))

    def _meet(self, state: DeviceState, draws: Draws) -> DeviceState:
        """The device, met for the first time where it has a history that nothing was made of yet."""
        if bool(state.met) or not len(state.memory.items):
            return state
        return single.meet(self.model, state, draws, self.next_slice)

    def prototype_items(self, number: int, n: int = SHOWN) -> tuple[object, ...]:
        """The items that a prototype's prompt lifts most for somebody without a history."""
        return tuple(self.catalogue.item(item) for item in self._lifted[number, :n].tolist())

    def like(self, item: int, n: int = SHOWN) -> tuple[object, ...]:
        """The known items nearest to one that content alone describes; none where its row was learned from events."""
        near = neighbours_by_content(self.model, item, n)
        return tuple(self.catalogue.item(number) for number in near.tolist())

    @cached_property
    def _lifted(self) -> Int[torch.Tensor, "K n"]:
        return items_lifted(self.model, SHOWN)


class Device:
    """One user's device. What it remembers stays in `state`; only what `upload` returns is meant to leave it."""

    def __init__(
        self,
        recommender: Recommender,
        state: DeviceState,
        draws: Draws,
        *,
        learned: int,
        unknown: tuple[object, ...] = (),
    ) -> None:
        self.recommender, self.state, self.draws, self.unknown = recommender, state, draws, unknown
        self._learned = learned
        self._past: KeptPast | None = None
        self._laid_out: tuple[int, FlatPast | None] = (-1, None)

    @property
    def past(self) -> KeptPast | None:
        """What the head reads of the user's own past, kept up event by event; None without a head that reads it."""
        head, memory = self.recommender.head, self.state.memory
        if head is None or head.head.own is None:
            return None
        if self._past is None or self._past.n_events != len(memory.items):
            self._past = keep_past(memory.items.tolist(), memory.times.tolist())
        return self._past

    @property
    def laid_out(self) -> FlatPast | None:
        """What the head reads of this device, whatever the time of the question; made anew after every event."""
        memory = self.state.memory
        if self._laid_out[0] != len(memory.items):
            self._laid_out = len(memory.items), self.recommender.lay_out(self.state, self.past)
        return self._laid_out[1]

    def recommend(
        self,
        n: int = 10,
        *,
        candidates: Iterable[object] | None = None,
        exclude_seen: bool = False,
        why: bool = False,
        time: int | None = None,
    ) -> list[Recommendation]:
        """The n best items for the user's next event, best first; nothing changes by asking.

        `time` (unix seconds) is when the event will happen; by default, when the newest one did.
        """
        if n < 1:
            raise DataError(f"n must be at least 1, got {n}")
        catalogue, model = self.recommender.catalogue, self.recommender.model
        among = None if candidates is None else torch.tensor(catalogue.numbers(candidates), dtype=torch.int64)
        if exclude_seen:
            among = torch.arange(model.n_items) if among is None else among
            among = among[~torch.isin(among, self.state.memory.items)]
        ranking = single.best_items(self.recommender.score(self.state, self.laid_out, time), n, among)
        items, scores = ranking.items.tolist(), ranking.scores.tolist()
        reasons = self._reasons(items, among) if why else [None] * len(items)
        return [
            Recommendation(catalogue.item(item), score, catalogue.title(item), reason)
            for item, score, reason in zip(items, scores, reasons, strict=True)
        ]

    def feedback(self, item: object, time: int | None = None) -> None:
        """Observe that the user chose an item, now or at `time` (unix seconds): one short step, then remembered."""
        (number,) = self.recommender.catalogue.numbers([item])
        last = self.state.memory.times[-1:].tolist()
        when = time if time is not None else max([int(clock.time()), *last])
        past = self.past
        self.state = single.feedback(self.recommender.model, self.state, number, when, self.draws)
        self._past = after_event(past, number, when) if past is not None else None

    def learn(self) -> None:
        """Learn from all events since the last time, as in a slice of training: prompts and own rows."""
        if self._learned == len(self.state.memory.items):
            return
        model, period = self.recommender.model, self.recommender.next_slice
        self.state = single.learn(model, self.state, self._learned, self.draws, period)
        self._learned = len(self.state.memory.items)

    def upload(self, round_: int | None = None) -> Upload | None:
        """What this device sends in a round (the model's next one, unless given); None where it has nothing to say.

        A device that has learned from no event after the base block has nothing to say. Where devices add the noise,
        it sends its noise all the same.
        """
        number = self.recommender.next_round if round_ is None else round_
        rule = self.recommender.rule
        if rule is None:
            return None
        upload = make_upload(self.recommender.model, self.state, rule, self.draws, number)
        return None if rule.form == "points" and bool((upload.block == NOTHING).all()) else upload

    @torch.no_grad()
    def _reasons(self, items: list[int], among: torch.Tensor | None) -> list[Reason | None]:
        model, state = self.recommender.model, self.state
        query = single.as_query(model, state)
        alone = online_inference(model, state, query, variant=BARE)[0]
        rivals = alone if among is None else alone[among]
        past, times = state.memory.items, state.memory.times
        rows = set(state.rows.items.tolist()) if bool(state.use_rows) else set()
        prototypes = self._routed()
        found: list[Reason | None] = []
        for item in items:
            met = times[past == item].tolist()
            rank = 1 + int((rivals > alone[item]).sum())
            like = self.recommender.like(item)
            found.append(Reason(len(met), max(met, default=None), item in rows, rank, like, prototypes))
        return found

    def _routed(self) -> tuple[Prototype, ...]:
        """The prototypes that the device's next query is routed to, where it uses its prompt."""
        model = self.recommender.model
        if not (bool(self.state.use_prompt) and model.rule.use_prototypes):
            return ()
        h = single.query_embedding(model, self.state, single.as_query(model, self.state))
        chosen, weights = route(h, model.v, top_m=model.rule.top_m, temperature=model.rule.temperature)
        pairs = zip(chosen[0].tolist(), weights[0].tolist(), strict=True)
        return tuple(Prototype(k, weight, self.recommender.prototype_items(k)) for k, weight in pairs)


@torch.no_grad()
def items_lifted(model: Model, n: int) -> Int[torch.Tensor, "K n"]:
    """For each prototype the n items whose score its prompt raises most, for a user without a history."""
    backbone = model.backbone
    nobody = torch.full((1, 1), BOS, device=model.v.device)
    plain = backbone.scores(backbone.last_hidden(nobody), model.n_items)
    scale = backbone.input_norm()
    prompts = rescale_like(model.prompts, scale) if not model.rule.as_printed else model.prompts
    prompted = backbone.last_hidden(nobody.expand(len(prompts), -1), prompts)
    return (backbone.scores(prompted, model.n_items) - plain).topk(min(n, model.n_items)).indices


@torch.no_grad()
def neighbours_by_content(model: Model, item: int, n: int) -> Int[torch.Tensor, " n"]:
    """The known items whose rows point most nearly where content puts this one; none where it needs no content."""
    backbone, known = model.backbone, model.backbone.has_row.nonzero()[:, 0]
    content, asked = backbone.content, torch.tensor([item], device=backbone.items.device)
    if content is None or bool(backbone.knows(asked)) or not bool(content.describes(asked)):
        return known[:0]
    cosines = torch.cosine_similarity(backbone.embed(asked), backbone.embed(known), dim=-1)
    return known[cosines.topk(min(n, len(known))).indices]
