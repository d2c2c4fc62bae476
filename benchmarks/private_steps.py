"""Users a second in a round of private steps: all of a cohort at once against a loop over its users.

    python benchmarks/private_steps.py --threads 1
    python benchmarks/private_steps.py --device cuda --items 50000

The loop makes one ordinary backward pass for each user, with its windows trimmed to their own length, and clips what
comes out; both must give the same sum, or the exit code is 1 and nothing is timed. Windows are drawn: most users have
one, some up to four, and a third of them has a short history.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import torch
from torch import Generator, Tensor

from protofed.backbone.losses import LOSSES, window_losses
from protofed.backbone.one_window import OneWindowLoss
from protofed.backbone.sasrec import SASRec
from protofed.config import BackboneConfig, TrainingConfig
from protofed.privacy.descent import Meter, PrivateDescent
from protofed.slices.histories import BOS, PAD
from protofed.slices.windows import NO_TARGET, Windows, moved, take, trimmed

COHORTS = (16, 64, 256, 1024)
LOOPED = 64  # a loop's speed does not depend on how many users follow, so it runs over so many at most
RATE, TOLERANCE = 0.05, 1e-5  # q; and how far apart the two sums may be, in radii and per square root of a user


def made_up(n_users: int, n_items: int, length: int, stride: int) -> Windows:
    """A cohort: 60 % of its users have one window, 25 % two, the others four; a third has 4 to 12 events."""
    rng = Generator().manual_seed(n_users)
    drawn = torch.rand(n_users, generator=rng)
    counts = torch.where(drawn < 0.6, 1, torch.where(drawn < 0.85, 2, 4))
    users = torch.arange(n_users).repeat_interleave(counts)
    events = torch.where(
        torch.rand(n_users, generator=rng) < 1 / 3, torch.randint(4, 13, (n_users,), generator=rng), length
    )
    place, left = torch.arange(length), (length - events)[users][:, None]
    tokens = torch.randint(n_items, (len(users), length), generator=rng)
    tokens = torch.where(place < left, PAD, torch.where(place == left, BOS, tokens))
    sources = torch.arange(length - stride, length).expand(len(users), -1)
    targets = torch.randint(n_items, (len(users), stride), generator=rng).masked_fill(sources < left, NO_TARGET)
    return Windows(users, tokens, sources.clone(), targets, torch.arange(len(users)))


def looped(private: PrivateDescent, loss: OneWindowLoss, batch: Windows, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """The sum of clipped gradients, one user after the other."""
    total = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights.values()]
    for user in batch.users.unique().tolist():
        own = trimmed(take(batch, (batch.users == user).nonzero()[:, 0]))
        negatives = private.negatives(own, loss.negatives, loss.n_items, loss.round_)
        sums, counts = window_losses(loss.model, own, negatives, loss.element_loss)
        found = torch.autograd.grad(sums.sum() / counts.sum(), list(weights.values()))
        length = torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in found]).norm()
        factor = (private.clip_radius / length).clamp(max=1)
        total = [a.add_(factor * each) for a, each in zip(total, found, strict=True)]
    return total


def apart(ours: Mapping[str, Tensor], theirs: list[Tensor]) -> float:
    """The length of the difference of two sums."""
    return float(torch.stack([(a - b).norm() for a, b in zip(ours.values(), theirs, strict=True)]).norm())


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


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=BackboneConfig().width)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    backbone, training = BackboneConfig(width=asked.width), TrainingConfig()
    model = SASRec(backbone, asked.items, Generator().manual_seed(0)).to(asked.device).eval()
    loss = OneWindowLoss(model, LOSSES[training.loss], training.negatives, asked.items, training.stride)
    weights = dict(model.named_parameters())
    print(f"{asked.device}, {asked.threads} threads, {asked.items} items, width {asked.width}")
    print(f"{'users':>6} {'windows':>8} {'at once/s':>10} {'loop/s':>8} {'ratio':>6}")
    for n in COHORTS:
        private = PrivateDescent(0, 0.0, RATE, 1.0, 1, round(n / RATE), Meter(0, 1))
        batch = moved(made_up(n, asked.items, backbone.history_length, training.stride), asked.device)
        few = take(batch, (batch.users < LOOPED).nonzero()[:, 0])
        far = apart(private.sums(loss, few, weights), looped(private, loss, few, weights))
        if not far <= TOLERANCE * LOOPED**0.5:
            print(f"the sums are {far:.1e} apart; {TOLERANCE * LOOPED**0.5:.0e} is allowed")
            sys.exit(1)
        fast = seconds(lambda p=private, b=batch: p.sums(loss, b, weights), asked.repeat) / n
        slow = seconds(lambda p=private, b=few: looped(p, loss, b, weights), asked.repeat) / min(n, LOOPED)
        print(f"{n:6} {len(batch):8} {1 / fast:10.1f} {1 / slow:8.1f} {slow / fast:6.1f}", flush=True)


if __name__ == "__main__":
    main()
