"""Small worlds for tests: a log of some 3,000 events, its stream, a backbone of width 16 and methods that learned once.

Everything here is computed at most once per test process; nobody may change what these functions return.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Generator, Tensor

from protofed.backbone.pretrain import content_key, warm_up
from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import Fit, PlainDescent
from protofed.config import BackboneConfig, RunConfig, override
from protofed.data.interactions import InteractionLog, from_codes
from protofed.data.synthetic import drifting_world, preset
from protofed.data.synthetic_items import describe_items
from protofed.experiments.evaluate import switched
from protofed.methods.catalogue import method_named
from protofed.methods.protocol import World
from protofed.seeds import stream
from protofed.slices.histories import Queries
from protofed.slices.stream import QuerySet, SliceStream
from protofed.snapshot import take_snapshot

CPU = torch.device("cpu")
LENGTH = 12
TINY = {
    "stream.n_slices": 2,
    "stream.n_negatives": 49,
    "backbone.width": 16,
    "backbone.layers": 1,
    "backbone.heads": 2,
    "backbone.ffn_width": 2,
    "backbone.history_length": LENGTH,
    "backbone.dropout": 0.1,
    "backbone.prompt_length": 2,
    "training.negatives": 32,
    "training.learning_rate": 1e-2,
    "training.slice_learning_rate": 5e-3,
    "training.stride": 6,
    "training.base_epochs": 8,
    "training.slice_epochs": 2,
    "privacy.noise_multiplier": 1.0,
    "privacy.target_epsilon": 0.0,
    "privacy.rounds_per_slice": 4,
    "protofed.embedding": 16,
    "protofed.base_steps": 4,
    "protofed.local_steps": 4,
}


def every_value(state: object) -> dict[str, Tensor]:
    """Every tensor of a state by name, and as one more its outline, which holds its numbers."""
    packed = take_snapshot(state)
    return {**packed.tensors, "outline": torch.frombuffer(bytearray(packed.outline.encode()), dtype=torch.uint8)}


def tiny_config(seed: int = 0, **settings: object) -> RunConfig:
    """Settings small enough for tests; a double underscore stands for the dot, as in training__negatives=8."""
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    return override(override(RunConfig(seed=seed), TINY), dotted)


@cache
def tiny_log() -> InteractionLog:
    return drifting_world(preset("tiny"), stream(0, "tests")).log


@cache
def tiny_items() -> pa.Table:
    """What a shop would say of the tiny log's items."""
    return describe_items(drifting_world(preset("tiny"), stream(0, "tests")), stream(0, "items"))


@cache
def tiny_stream() -> SliceStream:
    return SliceStream(tiny_log(), tiny_config().stream)


@cache
def another_future(slice_index: int) -> SliceStream:
    """The same stream up to the end of the slice's validation part; who meets what after it is shuffled."""
    return SliceStream(shuffled_after(tiny_log(), tiny_stream().bounds[slice_index].val_end), tiny_config().stream)


def shuffled_after(log: InteractionLog, position: int, *, newcomers: int = 0) -> InteractionLog:
    """The log with other users and items from `position` on, at the same times; the first `newcomers` are all new.

    Without newcomers there are as many users and items in all as before.
    """
    rng = np.random.default_rng(5)
    columns, identifiers = [], []
    for column, known in ((log.users, log.user_ids), (log.items, log.item_ids)):
        codes = column.numpy().astype(np.int64)
        codes[position:] = rng.permutation(codes[position:])
        codes[position : position + newcomers] = len(known) + np.arange(newcomers)
        columns.append(codes)
        identifiers.append(pa.concat_arrays([known, pa.array([f"newcomer {n}" for n in range(newcomers)], known.type)]))
    return from_codes(log.name, *columns, log.times.numpy(), *identifiers)


def warmed_up(seed: int = 0) -> tuple[SASRec, Fit]:
    return warmed_up_on(tiny_config(seed), tiny_stream())


WARM_UPS: dict[str, tuple[SASRec, Fit]] = {}


def warmed_up_on(config: RunConfig, data: SliceStream) -> tuple[SASRec, Fit]:
    """The warm-up of that content key, as a runner shares it between methods."""
    key = content_key(config, data, CPU)
    if key not in WARM_UPS:
        WARM_UPS[key] = warm_up(config, data.slice_(0), device=CPU)
    return WARM_UPS[key]


def random_model(n_rows: int, seed: int = 0, **backbone: Any) -> SASRec:
    """A backbone in which no parameter has a value that could hide a mistake: every bias and every norm is drawn."""
    settings = {"width": 8, "layers": 2, "heads": 2, "ffn_width": 2, "history_length": 6, "dropout": 0.0} | backbone
    rng = Generator().manual_seed(seed)
    model = SASRec(BackboneConfig(**settings), n_rows, rng)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=rng)
    model.refresh_mean_row()
    return model.eval()


@dataclass(frozen=True, slots=True)
class Learned:
    """A method that has learned slice 1 of a stream."""

    world: World
    data: SliceStream
    method: Any
    before: Any
    state: Any

    def scores(self, queries: Queries, state: Any = None) -> Tensor:
        """What the benchmark ranks by: the method's scores with its switches on top."""
        with torch.no_grad():
            plain = self.method.score(self.world, self.state if state is None else state, queries)
            return switched(plain, self.world, queries, self.data.slice_(1).train_counts())


def learn_once(name: str, seed: int = 0, data: SliceStream | None = None, variant: str | None = None) -> Learned:
    """The method of that name after slice 1, in the variant it brings along or the one asked for."""
    data = data or tiny_stream()
    entry = method_named(name)
    config = override(tiny_config(seed, method=name), {**entry.settings, **({"variant": variant} if variant else {})})
    world = World(config, data.slice_(0), warmed_up_on(config, data)[0])
    before = entry.method.start(world)
    state, _ = entry.method.learn(world, before, data.slice_(1), PlainDescent(config.training.max_grad_norm))
    return Learned(world, data, entry.method, before, state)


@cache
def learned(name: str, seed: int = 0, variant: str | None = None) -> Learned:
    """`learn_once` on the tiny stream, once per method, seed and variant."""
    return learn_once(name, seed, variant=variant)


def questions(slice_index: int = 1, part: str = "test") -> tuple[QuerySet, Queries]:
    """All ranking questions of one part of the tiny stream."""
    asked = tiny_stream().query_set(slice_index, part)
    return asked, tiny_stream().queries(asked, np.arange(len(asked)), LENGTH)
