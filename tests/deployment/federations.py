"""A tiny world after its base block, dealt to hosts; computed once per test process."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from worlds import tiny_config, tiny_stream, warmed_up_on

from protofed.backbone.training import PlainDescent
from protofed.client.codec import CodecTraining
from protofed.deployment.flower.engines import Engine, Federated
from protofed.federation import preparation
from protofed.methods.protocol import World
from protofed.methods.protofed_sp import ProtoFedSP, ProtoFedState

METHOD, DESCEND = ProtoFedSP(), PlainDescent()


@cache
def base_block(**settings: object) -> tuple[World, ProtoFedState]:
    """A run that has learned the base block, its query encoder for 5 steps instead of 500."""
    given = {"privacy__sampling_rate": 0.5, "protofed__newcomers": "noised", "method": "protofed-sp", **settings}
    config, data = tiny_config(**given), tiny_stream()
    world = World(config, data.slice_(0), warmed_up_on(config, data)[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "CodecTraining", lambda: CodecTraining(steps=5))
        return world, METHOD.start(world)


def simulated(world: World, state: ProtoFedState, slices: int) -> ProtoFedState:
    """The state after so many slices in the simulator."""
    for index in range(1, slices + 1):
        state, _ = METHOD.learn(world, state, tiny_stream().slice_(index), DESCEND)
    return state


def federated(
    world: World, state: ProtoFedState, slices: int, folder: Path, engine: Engine, hosts: int = 3
) -> ProtoFedState:
    """The same with an engine."""
    method = Federated(METHOD, folder, tiny_stream().log, hosts, engine)
    for index in range(1, slices + 1):
        state, _ = method.learn(world, state, tiny_stream().slice_(index), DESCEND)
    return state


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference."""
    assert one.shape == other.shape
    return float((one - other).abs().max()) if one.numel() else 0.0


def assert_same(one: ProtoFedState, other: ProtoFedState, tolerance: float = 1e-5) -> None:
    """Library, rows of new items and all devices agree."""
    a, b = one.devices, other.devices
    assert torch.equal(a.users, b.users)
    assert torch.equal(a.memory.items, b.memory.items)
    assert torch.equal(a.memory.times, b.memory.times)
    assert torch.equal(a.rows.items, b.rows.items)
    assert apart(one.library.v, other.library.v) <= tolerance
    assert apart(one.library.ema_counts, other.library.ema_counts) <= tolerance
    assert (one.library.version, one.rounds) == (other.library.version, other.rounds)
    assert apart(one.backbone.items, other.backbone.items) <= tolerance
    for name in ("prompts.long", "prompts.short", "rows.rows", "drift.mean", "taste", "losses"):
        values = []
        for devices in (a, b):
            value = devices
            for part in name.split("."):
                value = getattr(value, part)
            values.append(value)
        assert apart(*values) <= tolerance, name
    assert torch.equal(a.use_prompt, b.use_prompt)
    assert torch.equal(a.use_rows, b.use_rows)
