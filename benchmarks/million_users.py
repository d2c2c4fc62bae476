"""The devices of a million users at the small preset in one process: bytes, seconds and memory.

    python benchmarks/million_users.py
    python benchmarks/million_users.py --users 100000 --rate 0.05 --trust local

Every user's prompts are written once, random stacks of users learn a step, and one round asks all users to upload. The
last line printed is one JSON object; the exit code is 1 where the peak exceeds the limit.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from protofed.backbone.sasrec import SASRec, at_rest
from protofed.client.codec import QueryEncoder, random_linear_codec, unit
from protofed.client.drift import DriftState, literal_gate
from protofed.client.lessons import Lesson
from protofed.client.model import VARIANTS, Encoders, LocalRule, Model
from protofed.client.own_rows import OwnRows
from protofed.client.prompts import PromptState, first_contact
from protofed.client.state import DeviceState, columns, new_devices, put, select, with_fresh_moments
from protofed.client.update import client_update, route_queries
from protofed.config import RunConfig
from protofed.federation.simulator import Schedule, simulate_round
from protofed.privacy.upload import RoundRule, UploadRule
from protofed.seeds import stream, user_keys
from protofed.server.library import new_library
from protofed.slices.windows import Windows, moved

PEAK_LIMIT_GB = 24.0
CONFIG = RunConfig()  # the small preset
LENGTH, D, PROMPT = CONFIG.backbone.history_length, CONFIG.backbone.width, CONFIG.backbone.prompt_length
D_Z, PROTOTYPES, ITEMS, MET = CONFIG.protofed.embedding, 128, 5_000, 40  # MET: items that a made-up client has met
Clients = tuple[DeviceState, Lesson, Tensor]  # and their negatives


def small_world(device: str = "cpu") -> Model:
    """An untrained backbone of the small preset, a codec and prototypes."""
    backbone = at_rest(SASRec(CONFIG.backbone, ITEMS, stream(0, "backbone"))).to(device)
    codec = random_linear_codec(PROMPT, D, stream(0, "codec"), d_z=D_Z).to(device)
    v = unit(torch.randn(PROTOTYPES, D_Z, generator=stream(0, "prototypes"))).to(device)
    g = QueryEncoder(D, stream(0, "query encoder"), d_z=D_Z).to(device)
    encoders, prior = Encoders(codec, g, literal_gate(), 1.0), torch.zeros(len(VARIANTS), device=device)
    return Model(backbone, encoders, v, codec.decode(v), LocalRule(), ITEMS, prior)


def made_up(n: int, model: Model) -> Clients:
    """n clients before their first step, each with one or two full windows over the items it met and rows for these."""
    rng, device, targets = stream(0, "clients", n), model.v.device, CONFIG.training.stride
    users = torch.repeat_interleave(torch.arange(n), 1 + torch.arange(n) % 2)
    met = torch.rand(n, ITEMS, generator=rng).topk(MET).indices.sort().values
    events = met[users].gather(1, torch.randint(MET, (len(users), LENGTH + 1), generator=rng))
    sources = torch.arange(LENGTH - targets, LENGTH).expand(len(users), -1)
    windows = Windows(users, events[:, :-1], sources, events[:, -targets:], torch.arange(len(users)))
    whose, items = torch.arange(n).repeat_interleave(MET).to(device), met.flatten().to(device)
    long = torch.randn(n, PROMPT, D, generator=rng).to(device)
    h = unit(torch.randn(n, D_Z, generator=rng)).to(device)
    gate, pull = torch.rand(2, n, generator=rng).to(device)
    negatives = torch.randint(ITEMS, (len(users), CONFIG.training.negatives), generator=rng).to(device)
    state, everybody = new_devices(torch.arange(n), PROMPT, D, D_Z, device=device), torch.ones(n, dtype=torch.bool)
    state = replace(
        state,
        prompts=PromptState(long, torch.zeros_like(long)),
        rows=OwnRows(whose, items, model.backbone.embed(items)),
        met=everybody.to(device),
        active=everybody.to(device),
        contributes=everybody.to(device),
    )
    return with_fresh_moments(state), Lesson(moved(windows, device), h, gate, pull), negatives


def memory_gb() -> dict[str, float]:
    """Now: all that is resident, and what of it is private (the rest are mapped files, such as libraries)."""
    _, resident, shared, *_ = (int(n) * resource.getpagesize() for n in Path("/proc/self/statm").read_text().split())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {"resident": resident, "private": resident - shared, "peak": peak}
    return {name: round(value / 1e9, 2) for name, value in found.items()}


@contextmanager
def timed(stage: str, times: dict[str, float]) -> Iterator[None]:
    """Print and add up what a stage took."""
    start = time.perf_counter()
    yield
    took = time.perf_counter() - start
    times[stage] = round(times.get(stage, 0.0) + took, 3)
    now = " ".join(f"{name} {value:6.2f} GB" for name, value in memory_gb().items())
    print(f"{stage:14} {took:8.3f} s   {now}", file=sys.stderr)


def all_users(n: int) -> Tensor:
    """Keys of n made-up users."""
    return torch.from_numpy(user_keys(range(n)))


def meet_everybody(devices: DeviceState, model: Model, size: int) -> DeviceState:
    """The devices after first contact of all users, a stack at a time."""
    rng, n = stream(0, "first contact"), len(devices)
    long, mean = torch.empty_like(devices.prompts.long), torch.empty_like(devices.drift.mean)
    for places in torch.arange(n).split(size):
        h = unit(torch.randn(len(places), D_Z, generator=rng))
        noise = torch.randn(len(places), PROMPT, D, generator=rng)
        routing = route_queries(model, h, model.rule)
        fresh = first_contact(model.encoders.codec, model.v, routing.chosen, routing.weights, noise)
        long[places], mean[places] = fresh.long, h
    everybody, drift = torch.ones(n, dtype=torch.bool), devices.drift
    return replace(
        devices,
        prompts=PromptState(long, torch.zeros_like(long)),
        drift=DriftState(mean, torch.zeros_like(mean), drift.total, torch.ones_like(drift.periods)),
        met=everybody,
        contributes=everybody,
    )


def one_round(devices: DeviceState, model: Model, rate: float, trust: str) -> int:
    """How many users uploaded in a round that asked all of them."""
    least = max(2, int(rate * len(devices) / 2))
    rule = RoundRule(UploadRule(PROTOTYPES, D_Z), 1.128, trust, least=least)
    schedule = Schedule(1, 1, 1, 0, rate, CONFIG.protofed.chunk, 0)
    return simulate_round(model, new_library(model.v), devices, [], rule, schedule, 0)[1].uploads


def measured(asked: argparse.Namespace) -> dict[str, object]:
    """Everything that is printed at the end."""
    model, size = small_world(), min(CONFIG.protofed.chunk, asked.users)
    (state, lesson, negatives), times, rng = made_up(size, model), {}, stream(0, "stacks")
    with timed("devices", times):
        devices = new_devices(all_users(asked.users), PROMPT, D, D_Z)
    with timed("first contact", times):
        devices = meet_everybody(devices, model, size)
    for _ in range(asked.stacks):
        places = torch.randperm(asked.users, generator=rng)[:size].sort().values
        with timed("gather", times):
            part = replace(select(devices, places), rows=state.rows, active=state.active)
        with timed("step", times):
            part, _ = client_update(model, with_fresh_moments(part), lesson, negatives, model.rule)
        with timed("write back", times):
            devices = put(devices, places, replace(part, rows=select(devices, places).rows, active=~part.active))
    with timed("round", times):
        uploads = one_round(devices, model, asked.rate, asked.trust)
    row = sum(column[:1].nbytes for column in columns(devices)) + devices.memory.offsets[:1].nbytes
    memory, size_gb = memory_gb(), round(row * asked.users / 1e9, 2)
    found = {"users": asked.users, "bytes_per_user": row, "devices_gb": size_gb, "uploads": uploads}
    return {**found, "seconds": times, "gb": memory, "within_limit": memory["peak"] <= PEAK_LIMIT_GB}


def main() -> None:
    """Build, learn, upload, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--stacks", type=int, default=4, help="random stacks of users that learn a step")
    parser.add_argument("--rate", type=float, default=CONFIG.privacy.sampling_rate, help="share of users that upload")
    parser.add_argument("--trust", choices=("central", "secure-aggregation", "local"), default="central")
    result = measured(parser.parse_args())
    print(json.dumps(result))
    sys.exit(0 if result["within_limit"] else 1)


if __name__ == "__main__":
    main()
