"""A device alone ends a slice where it ends in a stack: the same draws to the bit, the same state and upload to 1e-5.

Everything a slice is made of is played twice with the functions that every runtime calls: once for all active devices
together, once for single ones. Between the steps the prototypes move, as rounds would move them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from worlds import LENGTH, tiny_config, tiny_items, tiny_stream, warmed_up_on

from protofed.backbone.content import with_nearest
from protofed.client.begin import begin_slice
from protofed.client.codec import CodecTraining, unit
from protofed.client.memory import events_between, events_until, select_events
from protofed.client.model import Broadcast, Model, receive
from protofed.client.state import DeviceState, columns, put, resize, select
from protofed.client.update import client_update, decay_rates
from protofed.client.upload import Upload, embed_prompts, make_upload
from protofed.config import ABLATIONS, RunConfig, override
from protofed.data.items import load_items
from protofed.data.prepared import load_log
from protofed.features.build import content_of
from protofed.federation import preparation
from protofed.federation.popularity import base_votes
from protofed.federation.simulator import draw_step_negatives, events_of
from protofed.inference.end import Question, end_slice
from protofed.inference.head import FittedHead, Head
from protofed.methods.headed import Headed, HeadedState
from protofed.methods.protocol import World
from protofed.methods.protofed import ProtoFed
from protofed.methods.protofed_rules import as_run, round_rule
from protofed.methods.protofed_sp import ProtoFedSP, ProtoFedState, model_of
from protofed.privacy.draws import SeededDraws
from protofed.privacy.upload import RoundRule
from protofed.seeds import stream
from protofed.slices.histories import Queries, trimmed
from protofed.slices.stream import SliceStream, TimeSlice

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
STATE, SCORES = 1e-5, 1e-4  # how far states and scores may be apart
CODES = 1e-3  # share of codes that may differ, by one step
ROUND, DRAWS = 7, SeededDraws(0)


@dataclass(frozen=True)
class Played:
    """A stack after a slice, and what it drew and sent on the way."""

    state: DeviceState
    negatives: list[Tensor]
    z: Tensor
    upload: Upload


def a_world(config: RunConfig, data: SliceStream, items: pa.Table | None = None) -> tuple[World, ProtoFedState]:
    """A run that has learned the base block, its query encoder for 5 steps instead of 500; `items` are described."""
    backbone, content = warmed_up_on(config, data)[0], content_of(config.content, data.log, items, Path("unused"))
    backbone = with_nearest(backbone, content, config.content.neighbours) if content else backbone
    world = World(config, data.slice_(0), backbone)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "CodecTraining", lambda: CodecTraining(steps=5))
        return world, ProtoFedSP().start(world)


@cache
def tiny_world(**settings: object) -> tuple[World, ProtoFedState]:
    config = tiny_config(**{"privacy__sampling_rate": 0.5, "protofed__base_steps": 2, **settings})
    return a_world(config, tiny_stream(), tiny_items())


def questions_of(slice_: TimeSlice, places: Tensor, length: int) -> Iterator[Question]:
    """The validation events of some devices, numbered by their places in the stack."""
    asked = slice_.validation
    mine = torch.isin(asked.users, places).nonzero()[:, 0].numpy()
    if not len(mine):
        return
    queries = trimmed(slice_.queries(mine, length))
    queries = replace(queries, users=torch.searchsorted(places, queries.users))
    yield Question(queries, asked.positives[mine], asked.negatives[mine])


def play(model: Model, devices: DeviceState, slice_: TimeSlice, places: Tensor, rule: RoundRule) -> Played:
    """A whole slice of these devices."""
    state, lesson = begin_slice(model, select(devices, places), events_of(slice_, places, devices), DRAWS, slice_.index)
    drawn = []
    for step in range(model.rule.steps):
        if step == model.rule.steps // 2:
            model = receive(model, Broadcast(model.version + 1, unit(model.v + 0.2 * model.v.roll(1, 0))))
        negatives, brief = draw_step_negatives(model, state, lesson, DRAWS, step)
        drawn.append(negatives)
        state, _ = client_update(model, state, lesson, negatives, decay_rates(model.rule, step), brief)
    upload = make_upload(model, state, rule, DRAWS, ROUND)
    z = embed_prompts(model, state, rule)
    until = events_until(slice_.past, slice_.bounds[-1].val_end)[places]
    events = events_between(slice_.past, places, state.memory.counts, until)
    length = model.backbone.config.history_length
    return Played(end_slice(model, state, questions_of(slice_, places, length), events), drawn, z, upload)


def steps_apart(one: Tensor, other: Tensor) -> Tensor:
    """By how many steps codes differ; integers are counted modulo 2^32."""
    apart = one.long() - other.long()
    return (((apart + 2**31) % 2**32) - 2**31).abs()


@cache
def drawn_head() -> Head:
    """A head in which no number is zero, as if fitted."""
    head, rng = Head(), stream(0, "a head of chance")
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=rng)
    return head


def answers(world: World, state: ProtoFedState, devices: DeviceState, queries: Queries) -> Tensor:
    """What these devices rank by, under a head that reads the base block's counts."""
    inner, counts = replace(state, devices=devices), base_votes(world.base)
    return Headed(ProtoFed(), "base").score(world, HeadedState(inner, FittedHead(drawn_head(), counts), -1, 0), queries)


def questions_by(slice_: TimeSlice, places: Tensor, length: int) -> Queries:
    """All that some users are asked on the slice's validation part."""
    return trimmed(slice_.queries(torch.isin(slice_.validation.users, places).nonzero()[:, 0].numpy(), length))


def check(world: World, state: ProtoFedState, slice_: TimeSlice, *, stack: int, alone: int) -> None:
    """A stack of active devices against `alone` of them, one by one."""
    config = as_run(world.config)
    model = model_of(world, state, slice_.n_train_items)
    devices = resize(state.devices, torch.from_numpy(slice_.user_keys))
    active = torch.from_numpy(np.unique(slice_.past.users[slice_.train_positions]).astype(np.int64))[:stack]
    rule = round_rule(config, state.library.n_prototypes, state.noise_multiplier, len(devices))
    together = play(model, devices, slice_, active, rule)
    lesson = begin_slice(model, select(devices, active), events_of(slice_, active, devices), DRAWS, slice_.index)[1]
    chosen = np.linspace(0, len(active) - 1, alone).round().astype(int)
    asked = questions_by(slice_, active[chosen], model.backbone.config.history_length)
    assert len(asked), "nobody is asked: a test of nothing"
    ranked = answers(world, state, put(devices, active, together.state), asked)
    for n in chosen.tolist():
        lone = play(model, devices, slice_, active[n : n + 1], rule)
        mine = lesson.windows.users == n
        for one, many in zip(lone.negatives, together.negatives, strict=True):
            assert torch.equal(one, many[mine] if many.shape[0] == len(mine) else many)
        for one, many in zip(columns(lone.state), columns(together.state), strict=True):
            torch.testing.assert_close(one, many[n : n + 1], atol=STATE, rtol=STATE, equal_nan=True)
        rows = together.state.rows.clients == n
        assert torch.equal(lone.state.rows.items, together.state.rows.items[rows])
        torch.testing.assert_close(lone.state.rows.rows, together.state.rows.rows[rows], atol=STATE, rtol=STATE)
        remembered = select_events(together.state.memory, torch.tensor([n]))
        assert torch.equal(lone.state.memory.items, remembered.items)
        assert torch.equal(lone.state.memory.times, remembered.times)
        torch.testing.assert_close(lone.z, together.z[n : n + 1], atol=STATE, rtol=STATE)
        assert torch.equal(lone.upload.tokens, together.upload.tokens[n : n + 1])
        apart = steps_apart(lone.upload.codes, together.upload.codes[n : n + 1])
        assert int(apart.max()) <= 1
        assert int((apart != 0).sum()) <= max(1, CODES * apart.numel())
        mine = questions_by(slice_, active[n : n + 1], model.backbone.config.history_length)
        found = answers(world, state, lone.state, replace(mine, users=0 * mine.users))
        torch.testing.assert_close(found, ranked[asked.users == active[n]], atol=SCORES, rtol=STATE)


MODES = [
    {"protofed__mode": "reference"},
    {"protofed__mode": "nodp"},
    {"protofed__mode": "literal"},
    {"protofed__alignment": "wasserstein"},
    {"protofed__alignment": "entropy", "protofed__inner_prox_steps": 2},
    {"protofed__prompt_history": 3},
    {"protofed__at_once": True},
    {"protofed__group_sparsity": True, "training__loss": "bce"},
    {"protofed__codec": "mlp"},
    {"privacy__trust": "local"},
    {"privacy__trust": "secure-aggregation"},
    {"protofed__mode": "nodp", "protofed__aggregator": "barycenter"},
    {"stream__row_order_history": True},
    {"content__features": "place,category"},
    {"method": "protofed", "protofed__mode": "nothing", "content__features": "place,category"},
    {"method": "protofed", "protofed__mode": "private", "content__features": "place"},
    {"protofed__newcomers": "noised", "privacy__newcomer_noise": 1.0},
    *({"protofed__ablate": name} for name in ABLATIONS),
]


@pytest.mark.parametrize("settings", MODES, ids=lambda settings: " ".join(map(str, settings.values())))
def test_a_device_alone_is_the_device_in_a_stack(settings):
    row_order = {key: value for key, value in settings.items() if key.startswith("stream__")}
    if row_order:
        data = SliceStream(tiny_stream().log, tiny_config(**row_order).stream)
        world, state = a_world(tiny_config(**{"privacy__sampling_rate": 0.5, **row_order}), data)
    else:
        data, (world, state) = tiny_stream(), tiny_world(**settings)
    check(world, state, data.slice_(1), stack=512, alone=4)


def test_the_slice_that_is_played_has_newcomers_returning_users_sessions_and_questions():
    (_, state), slice_ = tiny_world(), tiny_stream().slice_(1)
    active = np.unique(slice_.past.users[slice_.train_positions])
    first = active >= len(state.devices)
    assert 0 < first.sum() < len(active)
    assert len(slice_.validation) > 20
    assert int(slice_.past.before.max()) > LENGTH


@cache
def gowalla() -> SliceStream:
    return SliceStream(load_log("gowalla_1k", SHARED), RunConfig().stream)


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="the real logs are not at ../shared/data")
@pytest.mark.parametrize(
    "settings",
    [
        *({"protofed.mode": mode} for mode in ("reference", "nodp", "literal")),
        *(
            {"protofed.mode": mode, "method": "protofed", "content.features": "place"}
            for mode in ("nothing", "private")
        ),
        *(pytest.param({"protofed.ablate": name}, marks=pytest.mark.long) for name in ABLATIONS),
    ],
    ids=lambda settings: next(iter(settings.values())),
)
def test_on_gowalla_a_device_alone_is_the_device_in_a_stack_of_512(settings):
    few = {
        "training.base_epochs": 1,
        "protofed.base_steps": 1,
        "protofed.local_steps": 4,
        "protofed.base_windows": 1,
        "privacy.noise_multiplier": 1.1282,
        "protofed.newcomers": "mean-row",
        **settings,
    }
    config = override(RunConfig(dataset="gowalla_1k", method="protofed-sp"), few)
    data = gowalla()
    world, state = a_world(config, data, load_items("gowalla_1k", SHARED))
    check(world, state, data.slice_(1), stack=512, alone=6)
