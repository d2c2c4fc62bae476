"""How well ProtoFed's SASRec learns the base block, under the protocol of README.md and RecBole's selection rule.

    python benchmarks/backbone_parity/our_side.py --root ../shared/data --dataset gowalla_1k --out ours.json \
        --set training.negatives=100000 --set training.selection=full --set training.patience=10

One record per seed is appended to the results file as soon as it is there.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from protofed.backbone.pretrain import warm_up
from protofed.backbone.sasrec import SASRec
from protofed.config import RunConfig, in_range, override, parse_override, preset
from protofed.data.prepared import load_log
from protofed.evaluation.ranking import hit_rate, ndcg, rank_of_positive
from protofed.experiments.run import pick_device
from protofed.slices.histories import trimmed
from protofed.slices.stream import SliceStream

CHUNK = 512


@torch.no_grad()
def figures(model: SASRec, data: SliceStream, part: str) -> dict[str, dict[str, float]]:
    """NDCG@10 and HR@10 of the base block's queries that have a history, among all items and among train items."""
    asked = data.query_set(0, part)
    rows = np.flatnonzero(~asked.subsets["empty_history"])
    n_train, device = data.n_train_items(0), model.items.device
    full, among_train = [], []
    for chunk in np.array_split(rows, max(1, len(rows) // CHUNK)):
        queries = trimmed(data.queries(asked, chunk, model.config.history_length))
        scores = model.scores(model.last_hidden(queries.tokens.to(device)), asked.n_items).cpu()
        positive = asked.positives[chunk]
        allowed = torch.arange(asked.n_items).expand_as(scores) < n_train
        full.append(rank_of_positive(scores, positive))
        among_train.append(rank_of_positive(scores, positive, allowed))
    known = asked.positives[rows] < n_train
    everywhere, restricted = torch.cat(full), torch.cat(among_train)
    ranked = {
        "all": everywhere,
        "known_target": everywhere[known],
        "known_target_among_train_items": restricted[known],
    }
    return {
        name: {"ndcg": float(ndcg(r, 10).mean()), "hr": float(hit_rate(r, 10).mean()), "queries": len(r)}
        for name, r in ranked.items()
    }


def record(config: RunConfig, data: SliceStream, device: torch.device) -> dict[str, object]:
    """One seed: train, then measure."""
    began = time.monotonic()
    model, fit = warm_up(config, data.slice_(0), device=device)
    return {
        "seed": config.seed,
        "epochs": fit.best_epoch,
        "seconds": round(time.monotonic() - began, 1),
        "val": figures(model, data, "val"),
        "test": figures(model, data, "test"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--dataset", default="gowalla_1k")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    changes = dict(parse_override(text) for text in arguments.settings)
    data = SliceStream(load_log(arguments.dataset, arguments.root))
    found = json.loads(arguments.out.read_text()) if arguments.out.is_file() else []
    for seed in arguments.seeds:
        config = in_range(override(preset("small"), changes | {"seed": seed, "dataset": arguments.dataset}))
        found.append({"settings": arguments.settings, **record(config, data, pick_device(arguments.device))})
        arguments.out.write_text(json.dumps(found, indent=1))
        print(json.dumps(found[-1]))


if __name__ == "__main__":
    main()
