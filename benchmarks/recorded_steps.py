"""Training steps a second on a GPU: recorded once and replayed, against launched kernel by kernel.

    python benchmarks/recorded_steps.py

Both train the same SASRec on the same made-up batches and must end at the same weights, or the exit code is 1 and
nothing is timed. A peer: the time the GPU itself is busy in a launched step.
"""

import argparse
import sys
import time
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile

from protofed.backbone import recorded
from protofed.backbone.losses import draw_negatives
from protofed.backbone.recorded import Inputs, Step
from protofed.backbone.sasrec import SASRec
from protofed.backbone.training import PlainDescent, adamw, step_of
from protofed.config import BackboneConfig, TrainingConfig
from protofed.experiments.run import deterministic
from protofed.seeds import seeded, stream
from protofed.slices.windows import Windows

ITEMS, CHECKED, TIMED, TOLERANCE = 20_000, 20, 200, 1e-3


def batches(n: int, config: TrainingConfig, length: int) -> list[Inputs]:
    """Full batches of random histories."""
    rng, w, p = stream(0, "benchmark"), config.batch_size, config.stride
    sources = torch.arange(length - p, length).expand(w, -1)
    made = []
    for _ in range(n):
        tokens, targets = (torch.randint(ITEMS, (w, k), generator=rng) for k in (length, p))
        batch = Windows(torch.arange(w), tokens, sources, targets, torch.arange(w))
        made.append(Inputs(batch, draw_negatives(w, config.negatives, ITEMS, rng)))
    return made


def started(backbone: BackboneConfig, config: TrainingConfig, device: torch.device) -> tuple[SASRec, Step]:
    """A fresh model and its step."""
    model = SASRec(backbone, ITEMS, stream(0, "model")).to(device).train()
    optimiser = adamw([{"params": list(model.parameters())}], 1e-3, 1e-4, device)
    return model, step_of(model, config, optimiser, PlainDescent(), None)


def after(step: Step, inputs: list[Inputs]) -> float:
    """Seconds that the steps take."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for each in inputs:
        step(each)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def launched(kind: recorded.RecordedSteps) -> Step:
    """The same step, never recorded."""
    return lambda inputs: kind._run(recorded.Recording([c.to(kind.device) for c in recorded.columns(inputs)]))


def busy(step: Step, inputs: list[Inputs]) -> float:
    """Seconds that the GPU computes."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        after(step, inputs)
    return sum(event.device_time_total for event in seen.key_averages()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=64)
    width = parser.parse_args().width
    if not torch.cuda.is_available():
        sys.exit("recorded steps need a GPU, and PyTorch finds none here")
    device, config, backbone = (
        torch.device("cuda"),
        TrainingConfig(),
        replace(BackboneConfig(), width=width, dropout=0.0),
    )
    with deterministic(), seeded(0, "benchmark"):
        (one, replayed), (other, plain) = (started(backbone, config, device) for _ in range(2))
        assert isinstance(plain, recorded.RecordedSteps)
        first = batches(CHECKED, config, backbone.history_length)
        after(replayed, first)
        after(launched(plain), first)
        apart = max(float((a - b).abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))
        print(f"{CHECKED} steps end {apart:.1e} apart")
        if apart > TOLERANCE:
            sys.exit(1)
        more = batches(TIMED, config, backbone.history_length)
        slow, fast, working = after(launched(plain), more), after(replayed, more), busy(launched(plain), more[:20])
    print(f"launched {TIMED / slow:.0f} steps/s, recorded {TIMED / fast:.0f} steps/s: {slow / fast:.1f} times as fast")
    print(f"the GPU is busy {1e3 * working / 20:.2f} ms a step of {1e3 * slow / TIMED:.2f} ms launched")


if __name__ == "__main__":
    main()
