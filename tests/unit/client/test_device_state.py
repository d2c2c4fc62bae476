"""The state of a stack of devices against dictionaries, one for each user; and what a saved device comes back as."""

import itertools
from dataclasses import dataclass, fields, replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Generator, Tensor
from worlds import random_model

from protofed.client.codec import QueryEncoder, random_linear_codec, unit
from protofed.client.drift import DriftState, literal_gate, observe
from protofed.client.memory import Memory
from protofed.client.model import VARIANTS, Broadcast, Encoders, LocalRule, Model, fingerprint, receive
from protofed.client.own_rows import OwnRows
from protofed.client.state import (
    DeviceState,
    by_device,
    choose_variants,
    columns,
    from_bytes,
    join,
    new_device,
    new_devices,
    put,
    remember,
    resize,
    select,
    to_bytes,
    to_device,
    with_fresh_moments,
    without_rows,
)
from protofed.errors import DataError
from protofed.inference.device import recommend

N, L_P, WIDTH, D_Z = 9, 2, 8, 4
NAMES = (
    *("users", "long", "short", "mean", "step", "total", "periods", "taste", "met", "active", "contributes"),
    *("losses", "use_prompt", "use_rows"),
)
META = torch.device("meta")
PLACES = st.sets(st.integers(0, N - 1)).map(sorted)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed))


@dataclass
class Slow:
    """One user in plain Python: a value for each column, the rows by item, and the events."""

    columns: dict[str, object]
    rows: dict[int, list[float]]
    events: list[tuple[int, int]]


def slow_devices(state: DeviceState) -> list[Slow]:
    """Every device of a stack on its own."""
    by_name = dict(zip(NAMES, columns(state), strict=True))
    edges = list(itertools.pairwise(state.memory.offsets.tolist()))
    assert edges[-1:] == [] or edges[-1][1] == len(state.memory.items)
    found = []
    for u in range(len(state)):
        mine = (state.rows.clients == u).nonzero()[:, 0].tolist()
        items = [int(state.rows.items[p]) for p in mine]
        assert items == sorted(set(items))
        first, last = edges[u]
        events = zip(state.memory.items.tolist()[first:last], state.memory.times.tolist()[first:last], strict=True)
        rows = {item: state.rows.rows[p].tolist() for item, p in zip(items, mine, strict=True)}
        found.append(Slow({name: column[u].tolist() for name, column in by_name.items()}, rows, list(events)))
    assert state.rows.clients.tolist() == [u for u in range(len(state)) for _ in found[u].rows]
    return found


@cache
def devices(n: int = N, seed: int = 0) -> DeviceState:
    """Devices in which no two numbers are alike; every third has no rows, every fourth remembers nothing."""
    state = new_devices(100 * (seed + 1) + torch.arange(n), L_P, WIDTH, D_Z)
    rng = Generator().manual_seed(seed)

    def other(column: Tensor) -> Tensor:
        if column.dtype == torch.bool:
            return torch.rand(column.shape, generator=rng) < 0.5
        if column.is_floating_point():
            return torch.randn(column.shape, generator=rng)
        return column + torch.randint(1000, (1,), generator=rng)

    pairs = [(u, item) for u in range(n) if u % 3 for item in range(seed, seed + 2 * u, 2)]
    whose, what = (torch.tensor([pair[k] for pair in pairs], dtype=torch.int64) for k in (0, 1))
    counts = [0 if u % 4 == 3 else u + 1 for u in range(n)]
    offsets = torch.tensor([0, *itertools.accumulate(counts)])
    times = torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(count) for count in counts)])
    items = torch.randint(50, (sum(counts),), generator=rng)
    state = by_device(state, other)
    rows = OwnRows(whose, what, torch.randn(len(pairs), WIDTH, generator=rng))
    return replace(state, rows=rows, memory=Memory(offsets, items, times))


def check_slow(state: DeviceState, expected: list[Slow]) -> None:
    assert slow_devices(state) == expected


def check_equal(one: DeviceState, other: DeviceState) -> None:
    assert slow_devices(one) == slow_devices(other)
    assert [c.dtype for c in columns(one)] == [c.dtype for c in columns(other)]


def test_no_column_of_a_device_is_left_out_of_its_columns():
    state, nested = devices(), {"prompts", "drift"}
    apart = [f.name for f in fields(DeviceState) if f.name not in {*nested, "rows", "memory", "moments"}]
    names = {*apart, *(f.name for name in nested for f in fields(getattr(state, name)))}
    assert names == set(NAMES)
    holders = {**dict.fromkeys(("long", "short"), state.prompts)}
    holders |= dict.fromkeys(("mean", "step", "total", "periods"), state.drift)
    for name, column in zip(NAMES, columns(state), strict=True):
        assert column is getattr(holders.get(name, state), name)


@pytest.mark.parametrize("n", [0, 1, N])
def test_new_devices_have_met_and_remember_nothing(n):
    keys = 7 + torch.arange(n)
    state = new_devices(keys, L_P, WIDTH, D_Z)
    assert len(state) == n
    assert torch.equal(state.users, keys)
    for slow in slow_devices(state):
        assert not any(torch.tensor(value).any() for name, value in slow.columns.items() if name != "users")
        assert (slow.rows, slow.events) == ({}, [])
    assert state.moments is None
    kinds = {"users": torch.int64, "periods": torch.int64}
    kinds |= dict.fromkeys(("met", "active", "contributes", "use_prompt", "use_rows"), torch.bool)
    for name, column in zip(NAMES, columns(state), strict=True):
        assert column.dtype == kinds.get(name, torch.float32), name


@settings(max_examples=40)
@given(PLACES)
def test_selected_devices_are_those_of_their_users(places):
    state = devices()
    check_slow(select(state, torch.tensor(places, dtype=torch.int64)), [slow_devices(state)[u] for u in places])


@settings(max_examples=40)
@given(PLACES)
def test_devices_without_rows_keep_all_but_rows_memory_and_moments(places):
    state = with_fresh_moments(devices())
    part = without_rows(state, torch.tensor(places, dtype=torch.int64))
    assert part.moments is None
    check_slow(part, [Slow(slow_devices(state)[u].columns, {}, []) for u in places])


@settings(max_examples=40)
@given(PLACES)
def test_put_devices_replace_those_at_their_places_and_nobody_else(places):
    state, part = devices(), devices(len(places), seed=1)
    after = put(state, torch.tensor(places, dtype=torch.int64), part)
    expected, news = slow_devices(state), iter(slow_devices(part))
    for place in places:
        expected[place] = next(news)
    check_slow(after, expected)


@settings(max_examples=40)
@given(PLACES)
def test_devices_that_were_selected_and_put_back_change_nothing(places):
    state, at = devices(), torch.tensor(places, dtype=torch.int64)
    check_equal(put(state, at, select(state, at)), state)


def test_putting_selecting_and_joining_leave_their_arguments_alone():
    state, part, at = devices(), devices(3, seed=1), torch.tensor([1, 4, 8])
    before = slow_devices(state), slow_devices(part)
    put(state, at, part)
    join([state, part])
    for column in columns(select(state, at)):
        column.zero_()
    assert (slow_devices(state), slow_devices(part)) == before


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_joined_stacks_are_one_after_the_other(sizes):
    parts = [devices(n, seed=k) for k, n in enumerate(sizes)]
    check_slow(join(parts), [slow for part in parts for slow in slow_devices(part)])


@settings(max_examples=40)
@given(st.sets(st.integers(1, N - 1)).map(sorted))
def test_a_stack_that_is_cut_and_joined_is_the_same(cuts):
    state = devices()
    pieces = torch.arange(N).tensor_split(cuts)
    check_equal(join([select(state, piece) for piece in pieces]), state)


@pytest.mark.parametrize("more", [0, 1, 2 * N])
def test_a_resized_stack_keeps_its_devices_and_has_met_nobody_new(more):
    state = devices()
    keys = torch.cat([state.users, 900 + torch.arange(more)])
    bigger = resize(state, keys)
    check_slow(bigger, slow_devices(state) + slow_devices(new_devices(keys[N:], L_P, WIDTH, D_Z)))


def test_writing_to_a_resized_stack_leaves_the_old_one():
    state = devices()
    before = slow_devices(state)
    for more in (0, 2):
        for column in columns(resize(state, torch.cat([state.users, torch.arange(more)]))):
            column.fill_(1)
        assert slow_devices(state) == before


@pytest.mark.parametrize("keys", ["fewer", "others"])
def test_a_stack_that_would_lose_a_user_is_refused_in_one_line(keys):
    state = devices()
    users = state.users[:-1] if keys == "fewer" else state.users + 1
    line = rf"^a stack of 9 devices can only grow, and keeps its users; got {len(users)} users$"
    with pytest.raises(DataError, match=line):
        resize(state, users)


def test_a_stack_of_nobody_grows_selects_joins_and_is_put():
    empty, nobody = new_devices(torch.arange(0), L_P, WIDTH, D_Z), torch.arange(0)
    assert len(resize(empty, torch.arange(3))) == 3
    assert len(select(empty, nobody)) == len(join([empty, empty])) == 0
    check_equal(put(devices(), nobody, empty), devices())


@settings(max_examples=40)
@given(st.integers(0, 6))
def test_remembered_events_follow_each_users_own(seed):
    state, more = devices(), devices(N, seed=seed + 1).memory
    news = slow_devices(devices(N, seed=seed + 1))
    expected = slow_devices(state)
    for slow, new in zip(expected, news, strict=True):
        slow.events = slow.events + new.events
    check_slow(remember(state, more), expected)


TURNS = st.lists(st.tuples(PLACES.filter(bool), st.integers(0, 2**20)), max_size=5)


@settings(max_examples=40)
@given(TURNS)
def test_devices_hold_what_a_dictionary_would_after_any_turns(turns):
    """Some devices observe a query, get prompts, rows and events; then the next do."""
    state, expected = new_devices(torch.arange(N), L_P, WIDTH, D_Z), {}
    everybody = slow_devices(state)
    for places, seed in turns:
        at = torch.tensor(places)
        part = select(state, at)
        fresh = devices(len(places), seed=seed % 50)
        h = unit(drawn(len(places), D_Z, seed=seed))
        part = replace(part, prompts=fresh.prompts, rows=fresh.rows, met=torch.ones_like(part.met))
        part = remember(replace(part, drift=observe(part.drift, h)), fresh.memory)
        state = put(state, at, part)
        alone, rows = slow_devices(fresh), slow_devices(part)
        for n, u in enumerate(places):
            drift, old = expected.get(u, (None, everybody[u]))
            drift = observe(drift or new_devices(at[:1], L_P, WIDTH, D_Z).drift, h[n : n + 1])
            told = {f.name: getattr(drift, f.name)[0].tolist() for f in fields(DriftState)}
            prompts = {name: alone[n].columns[name] for name in ("long", "short")}
            events = [*old.events, *alone[n].events]
            expected[u] = drift, Slow({**old.columns, **prompts, **told, "met": True}, rows[n].rows, events)
    found = slow_devices(state)
    for u in range(N):
        slow = expected[u][1] if u in expected else everybody[u]
        assert (found[u].rows, found[u].events) == (slow.rows, slow.events)
        for name, value in slow.columns.items():  # a norm of several rows may differ from that of one in its last bit
            assert torch.allclose(torch.tensor(found[u].columns[name]), torch.tensor(value), atol=1e-7, rtol=0), name


def test_a_slices_moments_begin_at_zero_steps_one_for_each_prompt_and_row():
    state = devices()
    moments = with_fresh_moments(state).moments
    assert moments.long.first.shape == state.prompts.long.shape
    assert moments.rows.first.shape == (len(state.rows), 1, WIDTH)
    for kept in (moments.long, moments.rows):
        assert not any(bool(column.any()) for column in (kept.first, kept.second, kept.steps))


def test_devices_that_compute_elsewhere_take_all_but_their_memory_along():
    state = with_fresh_moments(devices())
    there = to_device(state, META)
    assert to_device(state, torch.device("cpu")) is state
    tensors = [*columns(there), there.rows.clients, there.rows.items, there.rows.rows]
    tensors += [getattr(kept, f.name) for kept in (there.moments.long, there.moments.rows) for f in fields(kept)]
    assert all(tensor.is_meta for tensor in tensors)
    assert there.memory is state.memory


def test_each_device_takes_the_variant_with_the_least_loss_prior_included():
    losses = torch.tensor([[0.0, -1.0, -2.0, -1.5], [0.0, -1.0, 0.5, 0.9], [0.0, 0.1, 0.1, 0.1], [0.0, 0.0, 0.0, -0.1]])
    anything = (True,) * 4
    use_prompt, use_rows = choose_variants(losses, torch.zeros(4), anything)
    assert use_prompt.tolist() == [True, False, False, True]
    assert use_rows.tolist() == [False, True, False, True]
    use_prompt, use_rows = choose_variants(losses, torch.tensor([0.0, 0.0, 0.0, -1.0]), anything)
    assert use_prompt.tolist() == [True, False, True, True]
    assert use_rows.tolist() == [True, True, True, True]


def test_equal_evidence_is_settled_by_the_prior_and_then_in_favour_of_less():
    nobody, anything = torch.zeros(1, 4), (True,) * 4
    assert [bool(x) for x in choose_variants(nobody, torch.zeros(4), anything)] == [False, False]
    assert [bool(x) for x in choose_variants(nobody, torch.tensor([0.0, 0.0, -0.1, 0.0]), anything)] == [True, False]


@pytest.mark.parametrize(
    "allowed", [(True, True, False, False), (True, False, True, False), (False, False, False, True)]
)
def test_a_variant_that_is_not_allowed_is_never_taken(allowed):
    losses, prior = 3 * drawn(50, 4), drawn(4, seed=1)
    use_prompt, use_rows = choose_variants(losses, prior, allowed)
    for row, prompt, rows in zip((losses + prior).tolist(), use_prompt.tolist(), use_rows.tolist(), strict=True):
        best = min((loss, v) for v, loss in enumerate(row) if allowed[v])[1]
        assert (prompt, rows) == VARIANTS[best]


@cache
def a_model(seed: int = 0) -> Model:
    backbone = random_model(12, seed=seed).requires_grad_(False)
    codec = random_linear_codec(L_P, WIDTH, Generator().manual_seed(seed), d_z=D_Z)
    g = QueryEncoder(WIDTH, Generator().manual_seed(seed), d_z=D_Z).requires_grad_(False)
    v = unit(drawn(3, D_Z, seed=seed))
    prior = torch.tensor([0.0, 0.0, -1.0, 0.0])
    return Model(backbone, Encoders(codec, g, literal_gate(), 1.0), v, codec.decode(v), LocalRule(top_m=2), 12, prior)


def test_a_new_device_of_a_model_uses_what_the_base_users_verdict_advises():
    model = a_model()
    state = new_device(model, 2**62 + 5)
    assert state.users.tolist() == [2**62 + 5]
    assert (bool(state.use_prompt), bool(state.use_rows)) == (True, False)
    rows_only = replace(model, rule=replace(model.rule, allowed=(False, True, False, False)))
    state = new_device(rows_only, 1)
    assert (bool(state.use_prompt), bool(state.use_rows)) == (False, True)
    assert [f.shape[1:] for f in (state.prompts.long, state.drift.mean)] == [(L_P, WIDTH), (D_Z,)]


@settings(max_examples=40)
@given(PLACES, st.integers(0, 5))
def test_saved_devices_come_back_as_they_were(places, seed):
    state = select(devices(seed=seed), torch.tensor(places, dtype=torch.int64))
    back = from_bytes(to_bytes(state, a_model()), a_model())
    check_equal(back, state)
    assert back.moments is None


@pytest.mark.parametrize("n", [0, 1, 3])
def test_devices_that_have_met_nothing_are_saved_too(n):
    """Their columns are one tensor of zeros, several times."""
    state = new_devices(torch.arange(n), L_P, WIDTH, D_Z)
    check_equal(from_bytes(to_bytes(state, a_model()), a_model()), state)


def test_a_device_that_came_back_recommends_what_it_did():
    model = a_model()
    state = replace(select(devices(), torch.tensor([7])), use_prompt=torch.tensor([True]), met=torch.tensor([True]))
    items = state.memory.items % model.n_items
    rows = replace(state.rows, items=torch.arange(len(state.rows)).clamp(max=model.n_items - 1)[: len(state.rows)])
    rows = OwnRows(rows.clients[:5], rows.items[:5], rows.rows[:5])
    state = replace(state, rows=rows, memory=replace(state.memory, items=items))
    before = recommend(model, state, n=12)
    after = recommend(model, from_bytes(to_bytes(state, model), model), n=12)
    assert torch.equal(before.items, after.items)
    assert torch.equal(before.scores, after.scores)


def test_an_unfinished_slice_is_not_saved():
    line = r"^a device cannot be saved while a slice is under way; end the slice first$"
    with pytest.raises(DataError, match=line):
        to_bytes(with_fresh_moments(devices()), a_model())


def test_a_device_of_another_model_is_refused_in_one_line():
    blob = to_bytes(devices(), a_model())
    one, other = fingerprint(a_model()), fingerprint(a_model(1))
    line = rf"^this device learned with model {one}, not with {other}; load the model it belongs to, or start it anew$"
    with pytest.raises(DataError, match=line):
        from_bytes(blob, a_model(1))


def test_a_models_fingerprint_follows_what_is_fixed_and_not_the_prototypes_or_public_rows():
    model = a_model()
    codec, g, prior = a_model(1).encoders.codec, a_model(1).encoders.g, model.prior + 1
    others = [
        replace(model, encoders=replace(model.encoders, codec=codec)),
        replace(model, encoders=replace(model.encoders, g=g)),
        replace(model, prior=prior),
        replace(model, backbone=a_model(1).backbone),
    ]
    assert len({fingerprint(each) for each in [model, *others]}) == 5
    newer = receive(model, Broadcast(4, unit(drawn(3, D_Z, seed=9))))
    assert newer.version == 4
    assert torch.equal(newer.prompts, model.encoders.codec.decode(newer.v))
    assert fingerprint(newer) == fingerprint(model)
    more_items = random_model(12, seed=0).requires_grad_(False)
    more_items.items.add_(1)
    assert fingerprint(replace(model, backbone=more_items)) == fingerprint(model)


BLOB_SIZES = st.floats(0, 1, exclude_max=True)


@settings(max_examples=40)
@given(BLOB_SIZES)
def test_a_cut_blob_is_refused_in_one_line(share):
    blob = to_bytes(devices(3), a_model())
    with pytest.raises(DataError, match=r"^a device's state could not be read: [^\n]+$"):
        from_bytes(blob[: int(share * len(blob))], a_model())


@pytest.mark.parametrize("blob", [b"", b"not a device", b"\xff" * 64, b"\x02" + bytes(7) + b"[]"])
def test_what_is_no_blob_is_refused_in_one_line(blob):
    with pytest.raises(DataError, match=r"^a device's state could not be read: [^\n]+$"):
        from_bytes(blob, a_model())


def resaved(change: dict[str, Tensor | None], about: dict[str, str] | None) -> bytes:
    """A saved device with other tensors (None: left out) and what it says about itself."""
    tensors = load(to_bytes(devices(), a_model())) | change
    return bytes(save({name: tensor for name, tensor in tensors.items() if tensor is not None}, metadata=about))


ABOUT = {"format": "protofed-device-1", "devices": "9"}


@pytest.mark.parametrize(
    ("change", "about", "found"),
    [
        ({}, None, "None"),
        ({}, {**ABOUT, "format": "protofed-device-2"}, "'protofed-device-2'"),
        ({"long": None}, ABOUT, "'protofed-device-1'"),
        ({"nickname": torch.zeros(1)}, ABOUT, "'protofed-device-1'"),
    ],
    ids=["no format", "another format", "a column missing", "a column too many"],
)
def test_a_blob_of_another_format_is_refused_in_one_line(change, about, found):
    line = rf"^a device's state should be of format protofed-device-1, found {found}; start it anew$"
    with pytest.raises(DataError, match=line):
        from_bytes(resaved(change, about), a_model())
