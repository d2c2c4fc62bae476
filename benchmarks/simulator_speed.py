"""Local steps of a stack of clients a second: one tensor program against a loop over clients.

    python benchmarks/simulator_speed.py --threads 2
    python benchmarks/simulator_speed.py --device cuda --bf16

The loop does the same mathematics with torch.optim.AdamW, one client at a time; both must end at the same prompts and
item rows (in float32), or the exit code is 1 and nothing is timed. The clients are those of million_users.py.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from million_users import Clients, made_up, small_world
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from protofed.backbone.losses import LOSSES, window_losses
from protofed.client.model import LocalRule, Model
from protofed.client.prompts import PromptState
from protofed.client.update import alignment, client_losses, client_update, compose_prompt, route_queries
from protofed.slices.windows import take

STACKS = (1, 8, 64, 512, 2048)
LOOPED = 64  # a loop's speed does not depend on how many clients follow, so it runs over so many at most
CHECKED, STEPS, TOLERANCE = 8, 3, 1e-4  # clients, their steps, and how far apart the two may end
Leaves = tuple[Tensor, Tensor, Tensor]  # long prompt, short prompt, own rows


def alone(u: int, clients: Clients, model: Model, rule: LocalRule) -> tuple[Callable[[], None], Leaves]:
    """A local step of client u without a simulator, and the tensors that it changes in place."""
    state, lesson, negatives = clients
    mine, own = lesson.windows.users == u, state.rows.clients == u
    windows, negatives, items = take(lesson.windows, mine.nonzero()[:, 0]), negatives[mine], state.rows.items[own]
    routing, gate, pull = route_queries(model, lesson.h[[u]], rule), lesson.gate[[u]], lesson.lambda_s[[u]]
    start = (state.prompts.long[[u]], state.prompts.short[[u]], state.rows.rows[own])
    long, short, rows = (part.clone().requires_grad_(True) for part in start)
    groups = [{"params": [long], "lr": rule.eta_l}, {"params": [rows], "lr": rule.eta_r}]
    optimiser = torch.optim.AdamW(groups, weight_decay=0.0)

    def embed(wanted: Tensor) -> Tensor:
        place = torch.searchsorted(items, wanted).clamp(max=len(items) - 1)
        return torch.where((items[place] == wanted)[..., None], rows[place], model.backbone.embed(wanted))

    def step() -> None:
        prompt = compose_prompt(model, PromptState(long, short), routing, gate, rule).expand(len(windows), -1, -1)
        with torch.autocast(prompt.device.type, dtype=torch.bfloat16, enabled=rule.bf16):
            sums, counts = window_losses(model.backbone, windows, negatives, LOSSES[rule.loss], prompt, embed)
        loss = sums.float().sum() / counts.sum() + (pull * alignment(model, long, rule, None)).sum()
        long.grad, rows.grad, grad = torch.autograd.grad(loss, (long, rows, short))
        optimiser.step()
        with torch.no_grad():
            grad = grad * (rule.max_grad_norm / grad.norm().clamp(min=rule.max_grad_norm))
            there, threshold = short - rule.eta_s * grad, rule.eta_s * rule.lambda_p * grad.abs().median()
            short.copy_(there.sign() * (there.abs() - threshold).clamp(min=0))

    return step, (long, short, rows)


def largest_difference(model: Model, rule: LocalRule) -> float:
    """Between stack and loop after a few steps, over prompts and rows; relative where all numbers are below 1."""
    state, lesson, negatives = clients = made_up(CHECKED, model)
    peers = [alone(u, clients, model, rule) for u in range(CHECKED)]
    for _ in range(STEPS):
        state, _ = client_update(model, state, lesson, negatives, rule)
        for step, _ in peers:
            step()
    ours = (state.prompts.long, state.prompts.short, state.rows.rows)
    theirs = (torch.cat(leaves).detach() for leaves in zip(*(leaves for _, leaves in peers), strict=True))
    return max(float((a - b).abs().max() / b.abs().max().clamp(max=1)) for a, b in zip(ours, theirs, strict=True))


def seconds(work: Callable[[], object], repeat: int) -> float:
    """The median time of a call, after one that does not count."""
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def matmul_peak(device: str, bf16: bool) -> float:
    """FLOPs a second of one large square product in the same type."""
    n = 8192 if device == "cuda" else 1536
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16 if bf16 else torch.float32)
    return 2 * n**3 / seconds(lambda: a @ a, 5)


def flops(work: Callable[[], object]) -> int:
    """Of all matrix products in a call; attention is counted as the products it consists of, done once."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def busiest(work: Callable[[], object], device: str, n: int = 8) -> Iterator[str]:
    """The operators with the most time of their own in a call, by the profiler."""
    with torch.profiler.profile() as profiled:
        work()
        if device == "cuda":
            torch.cuda.synchronize()
    which = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    spent = sorted(((getattr(e, which), e.count, e.key) for e in profiled.key_averages()), reverse=True)
    total = sum(us for us, _, _ in spent)
    for us, count, name in spent[:n]:
        yield f"{name[:60]:60} {count:6} calls {us / 1e3:10.2f} ms {us / total:6.1%}"


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--bf16", action="store_true", help="backbone passes in bfloat16, with --device cuda")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=5)
    asked = parser.parse_args()
    if asked.bf16 and asked.device == "cpu":
        parser.error("--bf16 needs --device cuda; the simulator ignores it on a CPU")
    torch.set_num_threads(asked.threads)
    model, rule = small_world(asked.device), LocalRule()
    apart = largest_difference(model, rule)
    print(f"stack and loop differ by {apart:.1e} after {STEPS} steps; {TOLERANCE:g} is allowed")
    if not apart <= TOLERANCE:
        sys.exit(1)
    rule, peak = replace(rule, bf16=asked.bf16), matmul_peak(asked.device, asked.bf16)
    print(f"{asked.device}, {asked.threads} threads, bf16 {asked.bf16}: a plain matmul does {peak / 1e9:.1f} GFLOP/s")
    print(f"{'U':>6} {'stack/s':>10} {'loop/s':>8} {'ratio':>6} {'ms/step':>9} {'MFLOP/update':>13} {'of peak':>8}")
    for n in STACKS:
        clients = made_up(n, model)
        peers = [alone(u, clients, model, rule)[0] for u in range(min(n, LOOPED))]
        took = seconds(lambda clients=clients: client_update(model, *clients, rule), asked.repeat)
        looped = seconds(lambda peers=peers: [step() for step in peers], asked.repeat) / len(peers)
        need = flops(lambda clients=clients: client_update(model, *clients, rule))
        rates = f"{n / took:10.1f} {1 / looped:8.1f} {looped * n / took:6.1f} {1e3 * took:9.1f}"
        print(f"{n:6} {rates} {need / n / 1e6:13.2f} {need / took / peak:8.1%}")
    forward = flops(lambda: client_losses(model, *clients, rule))
    print(f"of the {need / 1e9:.2f} GFLOP of a step of {n} clients {forward / 1e9:.2f} are forward; where time goes:")
    print(*busiest(lambda: client_update(model, *clients, rule), asked.device), sep="\n")


if __name__ == "__main__":
    main()
