"""The devices of a million users at the small preset in one process: bytes, seconds and memory.

    python benchmarks/million_users.py --where disk --folder /scratch
    python benchmarks/million_users.py --where memory

Every user's prompts are written once, random stacks of users learn a step, and one round asks all users to upload. The
last line printed is one JSON object; the exit code is 1 where the peak exceeds the limit.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from protofed.backbone.sasrec import SASRec, at_rest
from protofed.client.codec import random_linear_codec, unit
from protofed.client.own_rows import OwnRows
from protofed.client.prompts import PromptState, first_contact
from protofed.client.router import route
from protofed.client.update import Broadcast, ClientState, Lesson, LocalRule, client_update, fresh_state
from protofed.config import RunConfig
from protofed.federation.simulator import Schedule, upload_round
from protofed.federation.table import ClientTable, keep_prompts, new_table, prompts_of
from protofed.privacy.upload import UploadRule
from protofed.seeds import stream
from protofed.server.aggregate import ServerRule
from protofed.server.library import new_library
from protofed.slices.windows import Windows, moved

PEAK_LIMIT_GB = 24.0
CONFIG = RunConfig()  # the small preset
LENGTH, D, PROMPT = CONFIG.backbone.history_length, CONFIG.backbone.width, CONFIG.backbone.prompt_length
D_Z, PROTOTYPES, ITEMS, MET = CONFIG.protofed.embedding, 128, 5_000, 40  # MET: items that a made-up client has met
Clients = tuple[ClientState, Lesson, Tensor]  # and their negatives


def small_world(device: str = "cpu") -> Broadcast:
    """An untrained backbone of the small preset, a codec and prototypes."""
    backbone = at_rest(SASRec(CONFIG.backbone, ITEMS, stream(0, "backbone"))).to(device)
    codec = random_linear_codec(PROMPT, D, stream(0, "codec"), d_z=D_Z).to(device)
    v = unit(torch.randn(PROTOTYPES, D_Z, generator=stream(0, "prototypes"))).to(device)
    return Broadcast(backbone, codec, v, codec.decode(v))


def made_up(n: int, shared: Broadcast) -> Clients:
    """n clients before their first step, each with one or two full windows over the items it met and rows for these."""
    rng, device, targets = stream(0, "clients", n), shared.v.device, CONFIG.training.stride
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
    state = fresh_state(PromptState(long, torch.zeros_like(long)), OwnRows(whose, items, shared.backbone.embed(items)))
    return state, Lesson(moved(windows, device), h, gate, pull), negatives


def memory_gb() -> dict[str, float]:
    """Now: all that is resident, and what of it is private (the rest are mapped files, which the system may drop)."""
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


def everybody_meets(table: ClientTable, shared: Broadcast, rule: LocalRule, size: int) -> None:
    """First contact of all users, a stack at a time."""
    rng = stream(0, "first contact")
    for users in torch.arange(len(table)).split(size):
        h = unit(torch.randn(len(users), D_Z, generator=rng))
        noise = torch.randn(len(users), PROMPT, D, generator=rng)
        chosen, weights = route(h, shared.v, top_m=rule.top_m, temperature=rule.temperature)
        keep_prompts(table, users, first_contact(shared.codec, shared.v, chosen, weights, noise))
        table.mean[users], table.periods[users], table.met[users] = h, 1, True


def one_round(table: ClientTable, shared: Broadcast, rule: LocalRule, rate: float, trust: str) -> int:
    """How many users uploaded in a round that asked all of them."""
    server = ServerRule(UploadRule(PROTOTYPES, D_Z), 1.128, trust, honest=max(1, int(rate * len(table) / 2)))
    schedule = Schedule(1, 1, 0, rate, CONFIG.training.negatives, ITEMS, CONFIG.protofed.chunk, 1.0, 0.5, 0, 1)
    return upload_round(shared, new_library(shared.v), table, rule, server, schedule, 0)[1].uploads


def measured(asked: argparse.Namespace, folder: Path | None) -> dict[str, object]:
    """Everything that is printed at the end."""
    shared, rule, size = small_world(), LocalRule(), min(CONFIG.protofed.chunk, asked.users)
    (state, lesson, negatives), times, rng = made_up(size, shared), {}, stream(0, "stacks")
    with timed("table", times):
        table = new_table(asked.users, PROMPT, D, D_Z, folder=folder)
    with timed("first contact", times):
        everybody_meets(table, shared, rule, size)
    for _ in range(asked.stacks):
        users = torch.randperm(asked.users, generator=rng)[:size].sort().values
        with timed("gather", times):
            state = replace(state, prompts=prompts_of(table, users, torch.device("cpu")))
        with timed("step", times):
            state, _ = client_update(shared, fresh_state(state.prompts, state.rows), lesson, negatives, rule)
        with timed("write back", times):
            keep_prompts(table, users, state.prompts)
    with timed("round", times):
        uploads = one_round(table, shared, rule, asked.rate, asked.trust)
    row, memory = sum(getattr(table, field.name)[:1].nbytes for field in fields(table)), memory_gb()
    size_gb = round(row * asked.users / 1e9, 2)
    found = {"users": asked.users, "where": asked.where, "bytes_per_user": row, "table_gb": size_gb, "uploads": uploads}
    return {**found, "seconds": times, "gb": memory, "within_limit": memory["peak"] <= PEAK_LIMIT_GB}


def main() -> None:
    """Build, learn, upload, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--where", choices=("memory", "disk"), default="memory")
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--stacks", type=int, default=4, help="random stacks of users that learn a step")
    parser.add_argument("--rate", type=float, default=CONFIG.privacy.sampling_rate, help="share of users that upload")
    parser.add_argument("--trust", choices=("central", "secure-aggregation", "local"), default="central")
    parser.add_argument("--folder", type=Path, help="where --where disk puts a temporary folder of its own")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        result = measured(asked, Path(folder) if asked.where == "disk" else None)
    print(json.dumps(result))
    sys.exit(0 if result["within_limit"] else 1)


if __name__ == "__main__":
    main()
