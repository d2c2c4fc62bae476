"""What ProtoFed-SP does on a world whose truth is known: clusters recovered, drift noticed, parts that matter.

python scripts/synthetic_evidence.py --seeds 0 1 2
python scripts/synthetic_evidence.py --parts --set protofed.mode=nodp protofed.prototypes=6 protofed.prompt_history=3
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
from protofed.client.begin import query_means
from protofed.client.drift import drift_gate
from protofed.client.lessons import chunks, client_data
from protofed.client.own_rows import no_rows
from protofed.client.upload import nearest
from protofed.data.synthetic import drifting_world, preset
from protofed.data.synthetic_truth import DriftingWorld, cluster_at, drift_progress
from protofed.evaluation.forgetting import accuracy
from protofed.experiments.run import Experiment
from protofed.methods.protocol import World
from protofed.methods.protofed_sp import ProtoFedSP, ProtoFedState
from protofed.seeds import numpy_stream, stream
from protofed.slices.stream import SliceStream, TimeSlice

PARTS = ("", "own-rows", "prompts", "long", "short", "prototypes", "alignment", "static-prototypes", "personal")
MEASURED = ("ari", "ari of who stays", "ari of queries", "moving", "staying")
CPU, LENGTH = torch.device("cpu"), 50


def clusters(state: ProtoFedState, made: DriftingWorld, now: int) -> tuple[float, float]:
    """Adjusted Rand index of long prompts' nearest prototypes against true clusters: of all, of who never moves."""
    users = state.devices.met.nonzero()[:, 0]
    found = nearest(state.codec.encode(state.devices.prompts.long[users]), state.library.v)
    truth = cluster_at(made.truth, users, torch.full_like(users, now))
    stays = ~made.users.drifting[users]
    return adjusted_rand_score(truth, found), adjusted_rand_score(truth[stays], found[stays])


def routed(state: ProtoFedState, made: DriftingWorld, slice_: TimeSlice, now: int) -> float:
    """Adjusted Rand index of the prototypes that the slice's queries are routed to first."""
    rng = numpy_stream(0, "routed")
    data = client_data(slice_.past, slice_.train_positions, length=LENGTH, stride=LENGTH // 2, rng=rng)
    found = [
        nearest(
            query_means(
                state.backbone, state.g, no_rows(state.backbone.config.width), windows, where.stop - where.start
            ),
            state.library.v,
        )
        for where, windows in chunks(data, len(data), CPU)
    ]
    return adjusted_rand_score(cluster_at(made.truth, data.users, torch.full_like(data.users, now)), torch.cat(found))


def gates(state: ProtoFedState, made: DriftingWorld, before: int, now: int) -> tuple[float, float]:
    """Mean alpha of users who moved by a tenth of their way or more in the slice, and of those who never move."""
    devices = state.devices
    users = (devices.met & (devices.drift.periods > 1)).nonzero()[:, 0]
    alpha = drift_gate(devices.drift.drift[users], state.gate)
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
    told: dict[str, list[float]] = {name: [] for name in MEASURED}

    def look(index: int, now: int) -> None:
        everybody, stayed = clusters(state, made, now)
        told["ari"].append(everybody)
        told["ari of who stays"].append(stayed)
        told["ari of queries"].append(routed(state, made, data.slice_(index), now))

    look(0, int(times[data.bounds[0].end - 1]))
    for index in range(1, data.n_slices + 1):
        bounds = data.bounds[index]
        state, _ = method.learn(world, state, data.slice_(index), PlainDescent(1.0))
        now = int(times[bounds.train_end - 1])
        look(index, now)
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
        found = matrices(Experiment(config, made.log, cache).run(Path(folder) / "run").table("metrics"))
    wanted = (("sampled", "all"), ("sampled", "novel"), ("sampled", "repeat"), ("full", "all"))
    return {f"{c}, {s}": accuracy(found[c, s, "ndcg@10"].values) for c, s in wanted}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parts", nargs="*", default=PARTS)
    parser.add_argument("--set", nargs="*", default=["protofed.mode=nodp", "protofed.prototypes=6"], dest="settings")
    arguments = parser.parse_args()
    cache = Path(tempfile.gettempdir()) / "protofed-synthetic"
    followed = [follow(seed, cache, arguments.settings) for seed in arguments.seeds]
    for name in MEASURED:
        values = np.array([f[name] for f in followed])
        print(name, " ".join(f"{v:.3f}" for v in values.mean(0)), f"(std of the mean {values.mean(1).std():.3f})")
    print("| without | sampled, all | sampled, novel | sampled, repeat | full, all |\n|---|---|---|---|---|")
    for part in arguments.parts:
        rows = [without(part, seed, cache, arguments.settings) for seed in arguments.seeds]
        cells = [f"{np.mean([r[k] for r in rows]):.4f} ± {np.std([r[k] for r in rows]):.4f}" for k in rows[0]]
        print(f"| {part or 'nothing'} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
