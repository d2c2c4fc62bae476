"""What a bounded past costs a head: each user's newest event ranked from all before it, read whole and as it is kept.

python scripts/eviction.py runs/places --users 500
"""

import argparse
from dataclasses import replace
from itertools import pairwise

import torch

import protofed
from protofed.client.memory import Memory
from protofed.client.state import select
from protofed.evaluation.ranking import ndcg, rank_of_positive
from protofed.inference.kept_past import INSTANTS, ITEMS, TRANSITIONS, keep_past
from protofed.seeds import stream


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="the folder of a run with a head")
    parser.add_argument("--users", type=int, default=500, help="drawn at random")
    asked = parser.parse_args()
    model = protofed.load(asked.model)
    if model.head is None or model.head.head.own is None:
        parser.error(f"{asked.model} has no head that reads the own past")
    counts = model.devices.memory.counts
    places = (counts > 1).nonzero()[:, 0]
    drawn = places[torch.randperm(len(places), generator=stream(0, "eviction"))[: asked.users]]
    gone = dict.fromkeys(("items", "transitions", "instants"), 0)
    found: dict[str, list[torch.Tensor]] = {"whole": [], "kept": []}
    for place in drawn:
        device = select(model.devices, place[None])
        items, times = device.memory.items, device.memory.times
        before = replace(device, memory=Memory(torch.tensor([0, len(items) - 1]), items[:-1], times[:-1]))
        past = items[:-1].tolist()
        sizes = len(set(past)), len(set(pairwise(past))), len(past)
        for name, size, most in zip(gone, sizes, (ITEMS, TRANSITIONS, INSTANTS), strict=True):
            gone[name] += size > most
        kept = keep_past(past, times[:-1].tolist())
        for name, known in (("whole", None), ("kept", kept)):
            scores = model.score(before, known, int(times[-1]))
            found[name].append(ndcg(rank_of_positive(scores[None], items[-1:]), 10))
    print(f"{len(drawn)} users of {len(counts)}; something had to go: ", end="")
    print(", ".join(f"{name} {number / len(drawn):.1%}" for name, number in gone.items()))
    print(
        ", ".join(f"{name} {torch.cat(values).mean():.4f}" for name, values in found.items()), "NDCG@10, full ranking"
    )


if __name__ == "__main__":
    main()
