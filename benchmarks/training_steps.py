"""Training steps of the backbone on short windows, on one CPU thread: what each way of saving time is worth.

Windows of a given mean length, as a sparse log has them, are trained on in four ways, step by step in turns: as they
stand alone with PyTorch's dropout and its AdamW, one weight after the other; with faster draws; with all weights in one
pass; and with several windows on a line besides. Before anything is timed, lines and windows alone must end at the same
weights (without dropout, whose draws follow the layout).
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace

import torch
from torch import nn

from protofed.backbone.losses import draw_negatives
from protofed.backbone.recorded import Inputs, Step
from protofed.backbone.sasrec import Dropout, SASRec
from protofed.backbone.training import PlainDescent, adamw, step_of
from protofed.config import BackboneConfig, TrainingConfig
from protofed.seeds import seeded, stream
from protofed.slices.histories import BOS, PAD
from protofed.slices.windows import NO_TARGET, Windows, on_lines, trimmed

ITEMS, TOLERANCE = 20_000, 1e-4
CPU = torch.device("cpu")


def batches(n: int, mean: float, config: TrainingConfig, length: int) -> list[Inputs]:
    """Random histories whose lengths fall off geometrically, the last tokens of each to be learned."""
    rng, w = stream(0, "benchmark"), config.batch_size
    made = []
    for _ in range(n):
        lengths = (-mean * torch.rand(w, generator=rng).log()).long().clamp(1, length)
        places = torch.arange(length).expand(w, -1)
        tokens = torch.randint(ITEMS, (w, length), generator=rng).where(places >= length - lengths[:, None], PAD)
        tokens[torch.arange(w), length - lengths] = BOS
        sources = torch.arange(length - 4, length).expand(w, -1)
        targets = torch.randint(ITEMS, (w, 4), generator=rng).where(sources >= length - lengths[:, None], NO_TARGET)
        batch = trimmed(Windows(torch.arange(w), tokens, sources, targets, torch.arange(w)))
        made.append(Inputs(batch, draw_negatives(w, config.negatives, ITEMS, rng)))
    return made


def alone(inputs: Inputs) -> Inputs:
    return inputs


def with_lines(inputs: Inputs) -> Inputs:
    return replace(inputs, batch=on_lines(inputs.batch))


def started(backbone: BackboneConfig, *, draws: bool, one_pass: bool) -> tuple[SASRec, Step]:
    """A fresh model and its step."""
    model = SASRec(backbone, ITEMS, stream(0, "model")).train()
    if not draws:
        for module in [m for m in model.modules() if any(isinstance(c, Dropout) for c in m.children())]:
            module.dropout = nn.Dropout(backbone.dropout)
    weights = list(model.parameters())
    slow = torch.optim.AdamW(weights, lr=1e-3, weight_decay=1e-4, betas=(0.9, 0.98))
    optimiser = adamw([{"params": weights}], 1e-3, 1e-4, CPU) if one_pass else slow
    return model, step_of(model, TrainingConfig(), optimiser, PlainDescent(), None)


def apart(mean: float, backbone: BackboneConfig) -> float:
    """How far weights are apart after ten steps with and without lines."""
    ends = []
    for lay in (with_lines, alone):
        model, step = started(replace(backbone, dropout=0.0), draws=True, one_pass=True)
        for inputs in batches(10, mean, TrainingConfig(), backbone.history_length):
            step(lay(inputs))
        ends.append({name: p.detach() for name, p in model.named_parameters() if not name.endswith("key.bias")})
    return max(float((p - ends[1][name]).abs().max()) for name, p in ends[0].items())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mean", type=float, default=9.0, help="mean number of tokens in a window")
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    backbone = BackboneConfig()
    difference = apart(asked.mean, backbone)
    print(f"ten steps with and without lines end {difference:.1e} apart")
    if difference > TOLERANCE:
        sys.exit(1)
    given = batches(asked.steps, asked.mean, TrainingConfig(), backbone.history_length)
    ways = {
        "PyTorch's dropout and AdamW, windows alone": (started(backbone, draws=False, one_pass=False)[1], alone),
        "faster draws": (started(backbone, draws=True, one_pass=False)[1], alone),
        "and all weights in one pass": (started(backbone, draws=True, one_pass=True)[1], alone),
        "and windows on lines": (started(backbone, draws=True, one_pass=True)[1], with_lines),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with seeded(0, "benchmark"):
        for inputs in given:
            for name, (step, lay) in ways.items():
                began = time.process_time()
                step(lay(inputs))
                seconds[name].append(time.process_time() - began)
    first = statistics.median(seconds["PyTorch's dropout and AdamW, windows alone"])
    for name, each in seconds.items():
        middle = statistics.median(each)
        print(f"{1e3 * middle:6.1f} ms a step, {first / middle:4.1f} times as fast: {name}")


if __name__ == "__main__":
    main()
