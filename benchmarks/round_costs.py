"""What a round costs a client and the server: bytes as they are sent, and seconds on one core.

    python benchmarks/round_costs.py

Uploads are made up; sizes and server seconds depend on their number and form alone. docs/scale.md is made from it.
"""

import argparse
import time
from dataclasses import replace

import torch
from million_users import made_up, small_world

from protofed.client.model import Broadcast
from protofed.client.state import select
from protofed.client.state import to_bytes as state_bytes
from protofed.client.update import client_update
from protofed.client.upload import Upload, make_upload, to_bytes
from protofed.deployment.flower.records import answer_to_records, order_to_records
from protofed.deployment.orders import Answer, Cut, Order
from protofed.privacy.draws import SeededDraws
from protofed.privacy.mechanism import seeded_noise
from protofed.privacy.upload import RoundRule, UploadRule
from protofed.seeds import stream
from protofed.server.accept import accept
from protofed.server.aggregate import server_aggregate
from protofed.server.library import new_library

CUT = Cut(1, 0, 1, 2, 5_000, 5_000)
FORMS = {"central": "points", "secure-aggregation": "integers", "local": "noised rows"}


def rule_for(trust: str, k: int, n: int) -> RoundRule:
    """The round's rule at the default noise."""
    return RoundRule(UploadRule(k, 64), 1.1282, trust, least=max(2, n // 2))  # type: ignore[arg-type]


def wire(records: object) -> int:
    """Bytes of Flower's records, as they go into a message."""
    from flwr.common.serde import recorddict_to_proto

    return len(recorddict_to_proto(records).SerializeToString())  # type: ignore[arg-type]


def seconds(work: object, repeat: int = 5) -> float:
    """CPU seconds of a call: the least of some."""
    times = []
    for _ in range(repeat):
        began = time.process_time()
        work()  # type: ignore[operator]
        times.append(time.process_time() - began)
    return min(times)


def sizes(k: int) -> None:
    """What one device sends and is sent."""
    model = replace(small_world(), v=new_library(torch.randn(k, 64)).v)
    state, _, _ = made_up(1, model)
    for trust in FORMS:
        upload = make_upload(model, state, rule_for(trust, k, 50), SeededDraws(0), 0)
        number = sum(part.numel() * part.element_size() for part in (upload.codes, upload.block))
        print(f"K {k:4} {trust:20} {number:8,} bytes of numbers up, as a file {len(to_bytes(upload)):,}")
    order = Order("upload", (CUT,), Broadcast(0, model.v))
    number, message = model.v.numel() * 4, wire(order_to_records(order))
    print(f"K {k:4} prototypes down       {number:8,} bytes, in Flower's message {message:,}")


def host_message(n: int, k: int) -> None:
    """What a host of n devices sends in one message."""
    model = replace(small_world(), v=new_library(torch.randn(k, 64)).v)
    state, _, _ = made_up(n, model)
    upload = make_upload(model, state, rule_for("central", k, n), SeededDraws(0), 0)
    size = wire(answer_to_records(Answer((upload,))))
    print(f"a host's answer for {n} devices: {size:,} bytes, {size / n:.0f} a device")


def device(n: int) -> None:
    """A device's state, and what its local steps take by themselves and in a stack."""
    model = small_world()
    state, lesson, negatives = made_up(n, model)
    print(f"a device's state: {len(state_bytes(select(state, torch.arange(1)), model)):,} bytes")
    one = made_up(1, model)
    alone = seconds(lambda: client_update(model, *one, model.rule))
    together = seconds(lambda: client_update(model, state, lesson, negatives, model.rule)) / n
    print(f"a local step: {1e3 * alone:.2f} ms alone, {1e3 * together:.2f} ms in a stack of {n}")


def server(n: int, k: int, trust: str) -> None:
    """What accepting and adding up so many uploads takes."""
    rule, library, rng = rule_for(trust, k, n), new_library(torch.randn(k, 64)), stream(0, "uploads")
    shape = (n, 1, 64) if trust == "central" else (n, k, 65)
    codes = torch.randint(-127, 128, shape, generator=rng)
    codes = codes.to(torch.int64 if trust == "secure-aggregation" else torch.int8)
    block = torch.randint(k, (n,), generator=rng) if trust == "central" else torch.full((n,), -1)
    parts = [
        Upload(
            0, 0, torch.arange(first, min(first + 1_000, n)), block[first : first + 1_000], codes[first : first + 1_000]
        )
        for first in range(0, n, 1_000)
    ]

    def work() -> None:
        accepted = accept(parts, rule, round_=0, version=0)
        server_aggregate(library, accepted, rule, seeded_noise(stream(0, "noise")), stream(0, "parting"))

    took = seconds(work, 3)
    print(f"server, {trust}, K {k}: {n:,} uploads in {took:.2f} CPU s, {1e6 * took / n:.1f} µs an upload")


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    for k in (16, 128):
        sizes(k)
    host_message(1_000, 128)
    device(64)
    for trust, n in (("central", 100_000), ("local", 2_000), ("secure-aggregation", 2_000)):
        server(n, 128, trust)


if __name__ == "__main__":
    main()
