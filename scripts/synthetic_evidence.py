"""What ProtoFed-SP does on a world whose truth is known: clusters recovered, drift noticed, parts that matter.

python scripts/synthetic_evidence.py --seeds 0 1 2
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score

from protofed.backbone.pretrain import cached_warm_up
from protofed.backbone.training import PlainDescent
from protofed.cli.run import settle
from protofed.client.drift import drift_gate
from protofed.data.synthetic import drifting_world, preset
from protofed.data.synthetic_truth import DriftingWorld, cluster_at, drift_progress
from protofed.evaluation.forgetting import accuracy
from protofed.experiments.run import Experiment
from protofed.experiments.summary import matrix
from protofed.methods.protocol import World
from protofed.methods.protofed_sp import ProtoFedSP, ProtoFedState
from protofed.seeds import stream
from protofed.server.assignment import nearest
from protofed.slices.stream import SliceStream

PARTS = ("", "own-rows", "prompts", "long", "short", "prototypes", "alignment", "static-prototypes", "personal")
CPU = torch.device("cpu")


def clusters(state: ProtoFedState, made: DriftingWorld, now: int) -> tuple[float, float]:
    """Adjusted Rand index of users' nearest prototypes against their true clusters, and of their nearest z-cluster."""
    users = state.table.met.nonzero()[:, 0]
    z = state.codec.encode(state.table.long[users])
    truth = cluster_at(made.truth, users, torch.full_like(users, now))
    return float(adjusted_rand_score(truth, nearest(z, state.library.v))), len(users)


def gates(state: ProtoFedState, made: DriftingWorld, before: int, now: int) -> tuple[float, float]:
    """Mean alpha of users who moved by a tenth of their way or more in the slice, and of those who never move."""
    users = (state.table.met & (state.table.periods > 1)).nonzero()[:, 0]
    alpha = drift_gate(state.table.step[users].norm(dim=-1), state.gate)
    went = drift_progress(made.truth, users, torch.full_like(users, now)) - drift_progress(
        made.truth, users, torch.full_like(users, before)
    )
    moving, staying = made.users.drifting[users] & (went > 0.1), ~made.users.drifting[users]
    return float(alpha[moving].mean()), float(alpha[staying].mean())


def follow(seed: int, cache: Path, settings: list[str]) -> dict[str, list[float]]:
    """ARI after the base block and after every slice; alpha of moving and of staying users at every slice."""
    made = drifting_world(preset("default"), stream(0, "synthetic world"))
    config = settle({"dataset": "synthetic", "method": "protofed-sp", "seed": seed}, None, settings)
    data = SliceStream(made.log, config.stream)
    backbone, _ = cached_warm_up(config, data, cache, device=CPU)
    world, method = World(config, data.slice_(0), backbone), ProtoFedSP()
    state = method.start(world)
    times = made.log.times
    told: dict[str, list[float]] = {"ari": [], "moving": [], "staying": []}
    told["ari"].append(clusters(state, made, int(times[data.bounds[0].end - 1]))[0])
    for index in range(1, data.n_slices + 1):
        bounds = data.bounds[index]
        state, _ = method.learn(world, state, data.slice_(index), PlainDescent(1.0))
        now = int(times[bounds.train_end - 1])
        told["ari"].append(clusters(state, made, now)[0])
        moving, staying = gates(state, made, int(times[bounds.start]) - made.truth.config.span // 16, now)
        told["moving"].append(moving)
        told["staying"].append(staying)
    return told


def without(part: str, seed: int, cache: Path, settings: list[str]) -> dict[str, float]:
    """Headline NDCG@10 with one part left out."""
    chosen = [*settings, *([f"protofed.ablate={part}"] if part else [])]
    config = settle({"dataset": "synthetic", "method": "protofed-sp", "seed": seed}, None, chosen)
    made = drifting_world(preset("default"), stream(0, "synthetic world"))
    with tempfile.TemporaryDirectory() as folder:
        metrics = Experiment(config, made.log, cache).run(Path(folder) / "run").table("metrics")
    wanted = (("sampled", "all"), ("sampled", "novel"), ("sampled", "repeat"), ("full", "all"))
    return {f"{c}, {s}": accuracy(matrix(metrics, c, s, "ndcg@10")) for c, s in wanted}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parts", nargs="*", default=PARTS)
    parser.add_argument("--set", nargs="*", default=["protofed.mode=nodp", "protofed.prototypes=6"], dest="settings")
    arguments = parser.parse_args()
    cache = Path(tempfile.gettempdir()) / "protofed-synthetic"
    followed = [follow(seed, cache, arguments.settings) for seed in arguments.seeds]
    for name in ("ari", "moving", "staying"):
        values = np.array([f[name] for f in followed])
        print(name, " ".join(f"{v:.3f}" for v in values.mean(0)), f"(std of the mean {values.mean(1).std():.3f})")
    print("| without | sampled, all | sampled, novel | sampled, repeat | full, all |\n|---|---|---|---|---|")
    for part in arguments.parts:
        rows = [without(part, seed, cache, arguments.settings) for seed in arguments.seeds]
        cells = [f"{np.mean([r[k] for r in rows]):.4f} ± {np.std([r[k] for r in rows]):.4f}" for k in rows[0]]
        print(f"| {part or 'nothing'} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
