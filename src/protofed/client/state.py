"""Everything a device remembers, for a whole stack of devices at once; a phone, a browser or a lone node is U = 1."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from protofed.client.drift import DriftState, no_drift
from protofed.client.memory import Memory, append_events, no_memory, offsets_of, replace_events, select_events
from protofed.client.model import VARIANTS, Model, fingerprint
from protofed.client.own_rows import OwnRows, merge_rows, no_rows, rows_to, subset
from protofed.client.prompts import PromptState
from protofed.client.steps import AdamWState, adamw_start
from protofed.errors import DataError

FORMAT = "protofed-device-1"


@dataclass(frozen=True, slots=True)
class Moments:
    """The optimisers of a stack of devices; they begin anew in every slice."""

    long: AdamWState
    rows: AdamWState


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The memory of U devices; what no device has met yet is zero."""

    users: Int[Tensor, " U"]  # keys: what the devices' draws are keyed by
    prompts: PromptState
    rows: OwnRows  # of clients 0 .. U - 1, the places of the devices in the stack
    drift: DriftState
    taste: Float[Tensor, "U d"]  # direction of the user's queries when the device last learned
    met: Bool[Tensor, " U"]  # first contact has happened
    active: Bool[Tensor, " U"]  # learns in the slice under way
    contributes: Bool[Tensor, " U"]  # has learned from an event after the base block: nobody else may upload
    losses: Float[Tensor, "U V"]  # what each variant's loss on the user's own validation events adds up to
    use_prompt: Bool[Tensor, " U"]
    use_rows: Bool[Tensor, " U"]
    memory: Memory
    moments: Moments | None = None  # while a slice is under way

    def __len__(self) -> int:
        return len(self.users)

    @property
    def device(self) -> torch.device:
        """Where the prompts are; memories stay in host memory."""
        return self.prompts.long.device


def new_devices(
    users: Int[Tensor, " U"], prompt_length: int, d: int, d_z: int, *, device: torch.device | str = "cpu"
) -> DeviceState:
    """Devices that have met nothing; they use what `first_choice` says once that is known, until then nothing."""
    n, at = len(users), torch.device(device)
    prompt, flag = torch.zeros(n, prompt_length, d, device=at), torch.zeros(n, dtype=torch.bool, device=at)
    return DeviceState(
        users=users.to(at),
        prompts=PromptState(prompt, prompt),
        rows=no_rows(d, device=at),
        drift=no_drift(n, d_z, device=at),
        taste=torch.zeros(n, d, device=at),
        met=flag,
        active=flag,
        contributes=flag,
        losses=torch.zeros(n, len(VARIANTS), device=at),
        use_prompt=flag,
        use_rows=flag,
        memory=no_memory(n),
    )


def new_device(model: Model, user: int) -> DeviceState:
    """One device of this model that has met nothing; it uses what the base users' verdict advises."""
    _, prompt_length, d = model.prompts.shape
    key = torch.tensor([user], dtype=torch.int64)
    state = new_devices(key, prompt_length, d, model.v.shape[1], device=model.v.device)
    use_prompt, use_rows = choose_variants(state.losses, model.prior, model.rule.allowed)
    return replace(state, use_prompt=use_prompt, use_rows=use_rows)


def choose_variants(
    losses: Float[Tensor, "U V"], prior: Float[Tensor, " V"], allowed: tuple[bool, ...]
) -> tuple[Bool[Tensor, " U"], Bool[Tensor, " U"]]:
    """Who uses its prompt and who its own rows: the allowed variant with the least loss, prior included."""
    table = torch.tensor(VARIANTS, device=losses.device)
    barred = ~torch.tensor(allowed, device=losses.device)
    best = table[(losses + prior.to(losses)).masked_fill(barred, torch.inf).argmin(-1)]  # (U, 2)
    return best[:, 0], best[:, 1]


def by_device(state: DeviceState, change: Callable[[Tensor], Tensor]) -> DeviceState:
    """The state with every column that has one entry a device replaced; rows, memory and moments stay."""
    drift = state.drift
    return replace(
        state,
        users=change(state.users),
        prompts=PromptState(change(state.prompts.long), change(state.prompts.short)),
        drift=DriftState(change(drift.mean), change(drift.step), change(drift.total), change(drift.periods)),
        taste=change(state.taste),
        met=change(state.met),
        active=change(state.active),
        contributes=change(state.contributes),
        losses=change(state.losses),
        use_prompt=change(state.use_prompt),
        use_rows=change(state.use_rows),
    )


def columns(state: DeviceState) -> tuple[Tensor, ...]:
    """The columns with one entry a device, in a fixed order."""
    found: list[Tensor] = []

    def collect(column: Tensor) -> Tensor:
        found.append(column)
        return column

    by_device(state, collect)
    return tuple(found)


def select(state: DeviceState, places: Int[Tensor, " n"]) -> DeviceState:
    """Some of the devices, numbered anew; `places` ascend. Moments are not selected: slices begin after."""
    at = places.to(state.device)
    part = without_rows(state, places)
    return replace(part, rows=subset(state.rows, at)[0], memory=select_events(state.memory, places.cpu()))


def without_rows(state: DeviceState, places: Int[Tensor, " n"]) -> DeviceState:
    """Some of the devices with their prompts alone: all that an upload is made from."""
    at = places.to(state.device)
    nothing = no_rows(state.taste.shape[1], device=state.device)
    part = replace(state, rows=nothing, memory=no_memory(len(places)), moments=None)
    return by_device(part, lambda column: column[at])


def put(state: DeviceState, places: Int[Tensor, " n"], part: DeviceState) -> DeviceState:
    """The stack in which the devices at these places are those of `part`; moments are dropped."""
    at = places.to(state.device)
    news = iter(columns(part))
    kept = by_device(state, lambda column: column.index_copy(0, at, next(news).to(column)))
    rows = merge_rows(state.rows, at, rows_to(part.rows, state.device))
    return replace(kept, rows=rows, memory=replace_events(state.memory, places.cpu(), part.memory), moments=None)


def join(parts: Sequence[DeviceState]) -> DeviceState:
    """Several stacks as one, in their order; moments are dropped."""
    sizes = torch.tensor([len(part) for part in parts])
    first = (sizes.cumsum(0) - sizes).tolist()
    together = zip(*(columns(part) for part in parts), strict=True)
    news = iter([torch.cat(column) for column in together])
    rows = [(part.rows.clients + n, part.rows.items, part.rows.rows) for n, part in zip(first, parts, strict=True)]
    memories = [part.memory for part in parts]
    memory = Memory(
        offsets_of(torch.cat([each.counts for each in memories])),
        torch.cat([each.items for each in memories]),
        torch.cat([each.times for each in memories]),
    )
    clients, items, values = (torch.cat(column) for column in zip(*rows, strict=True))
    whole = by_device(parts[0], lambda column: next(news))
    return replace(whole, rows=OwnRows(clients, items, values), memory=memory, moments=None)


def resize(state: DeviceState, users: Int[Tensor, " N"]) -> DeviceState:
    """The stack with devices for more users, whose keys go on where those of the stack end."""
    n, (_, prompt_length, d) = len(state), state.prompts.long.shape
    if len(users) < n or not torch.equal(users[:n].to(state.users), state.users):
        raise DataError(f"a stack of {n} devices can only grow, and keeps its users; got {len(users)} users")
    more = new_devices(users[n:], prompt_length, d, state.drift.mean.shape[1], device=state.device)
    news = iter(columns(more))
    grown = by_device(state, lambda column: torch.cat([column, next(news)]))
    offsets = torch.cat([state.memory.offsets, state.memory.offsets[-1:].expand(len(users) - n)])
    return replace(grown, memory=replace(state.memory, offsets=offsets))


def to_device(state: DeviceState, device: torch.device) -> DeviceState:
    """The same state for computing elsewhere; memories stay where they are."""
    if state.device == device:
        return state
    moved = by_device(state, lambda column: column.to(device))
    moments = state.moments and Moments(*(moments_to(m, device) for m in (state.moments.long, state.moments.rows)))
    return replace(moved, rows=rows_to(state.rows, device), moments=moments)


def moments_to(moments: AdamWState, device: torch.device) -> AdamWState:
    """The same moments on another device."""
    return AdamWState(moments.first.to(device), moments.second.to(device), moments.steps.to(device))


def with_fresh_moments(state: DeviceState) -> DeviceState:
    """The state with optimisers that have taken no step."""
    return replace(state, moments=Moments(adamw_start(state.prompts.long), adamw_start(state.rows.rows[:, None])))


def remember(state: DeviceState, events: Memory) -> DeviceState:
    """The state with each user's new events at the end of the memory."""
    return replace(state, memory=append_events(state.memory, events))


def to_bytes(state: DeviceState, model: Model) -> bytes:
    """The state as one safetensors blob that says which model it belongs to."""
    from safetensors.torch import save

    if state.moments is not None:
        raise DataError("a device cannot be saved while a slice is under way; end the slice first")
    about = {"format": FORMAT, "model": fingerprint(model), "devices": json.dumps(len(state))}
    tensors = dict(zip(_NAMES, _flat(state), strict=True))  # columns of new devices share their zeros: copies do not
    return bytes(save({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}, metadata=about))


def from_bytes(blob: bytes, model: Model) -> DeviceState:
    """The state in a blob of `to_bytes`; one of another model or format is refused."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(blob)
        header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    except (SafetensorError, ValueError) as problem:
        raise DataError(f"a device's state could not be read: {problem}") from problem
    about = header.get("__metadata__", {})
    if about.get("format") != FORMAT or set(tensors) != set(_NAMES):
        raise DataError(f"a device's state should be of format {FORMAT}, found {about.get('format')!r}; start it anew")
    if about.get("model") != fingerprint(model):
        raise DataError(
            f"this device learned with model {about.get('model')}, not with {fingerprint(model)}; "
            "load the model it belongs to, or start it anew"
        )
    values = [tensors[name].to("cpu" if name in _HOST else model.v.device) for name in _NAMES]
    return _unflat(values)


_NAMES = (
    *("users", "long", "short", "drift_mean", "drift_step", "drift_total", "drift_periods", "taste", "met", "active"),
    *("contributes", "losses", "use_prompt", "use_rows", "row_clients", "row_items", "rows"),
    *("offsets", "items", "times"),
)
_HOST = ("offsets", "items", "times")


def _flat(state: DeviceState) -> tuple[Tensor, ...]:
    rows, memory = state.rows, state.memory
    return (*columns(state), rows.clients, rows.items, rows.rows, memory.offsets, memory.items, memory.times)


def _unflat(values: list[Tensor]) -> DeviceState:
    """The state of which `_flat` gives these values."""
    users, long, short, mean, step, total, periods, *flags = values[:14]
    taste, met, active, contributes, losses, use_prompt, use_rows = flags
    return DeviceState(
        users, PromptState(long, short), OwnRows(*values[14:17]), DriftState(mean, step, total, periods),
        taste, met, active, contributes, losses, use_prompt, use_rows, Memory(*values[17:]),
    )  # fmt: skip
