"""NDCG@10 of packed rows by when the asked item was first met: what was never learned, what could not be yet.

python scripts/repeats.py results/more lastfm_30music "protofed-sp (nodp)" frozen personal-memory --root data
"""

import argparse
from pathlib import Path

import numpy as np
from packed_tables import answered

from protofed.cli.run import load
from protofed.config import override, preset
from protofed.evaluation.ranking import ndcg
from protofed.slices.stream import SliceStream

KINDS = ("novel", "met before the slice", "met in its train part", "met after its train part")


def first_meetings(users: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Per log position: where the user first met the item."""
    _, first, place = np.unique(users * (items.max() + 1) + items, return_index=True, return_inverse=True)
    return first[place]


def kinds(data: SliceStream, slice_index: int) -> np.ndarray:
    """Per test query of a slice: a place in KINDS. Methods learn from train parts, so the last kind is in no one's."""
    asked, bounds = data.query_set(slice_index, "test"), data.bounds[slice_index]
    met = first_meetings(data.log.users.numpy().astype(np.int64), data.log.items.numpy().astype(np.int64))
    edges = np.array([bounds.start, bounds.train_end])
    return np.where(asked.subsets["repeat"], 1 + np.searchsorted(edges, met[asked.positions], side="right"), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pack", type=Path)
    parser.add_argument("dataset")
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder of prepared logs")
    parser.add_argument("--slices", type=int, default=8)
    asked = parser.parse_args()
    config = override(preset("small"), {"dataset": asked.dataset, "stream.n_slices": asked.slices})
    data = SliceStream(load(config, asked.root), config.stream)
    kind = np.concatenate([kinds(data, t) for t in range(1, data.n_slices + 1)])
    counts = np.bincount(kind, minlength=len(KINDS))
    print(f"| {asked.dataset} | " + " | ".join(f"{name} ({n})" for name, n in zip(KINDS, counts, strict=True)) + " |")
    print("|---" * (1 + len(KINDS)) + "|")
    found: dict[str, list[list[float]]] = {}
    for run in answered(asked.dataset, asked.pack):
        after_base = run.asked["slice"] > 0
        if not np.array_equal(run.asked["repeat"][after_base].astype(bool), kind > 0):
            raise SystemExit(f"the runs of {asked.dataset} answered other queries than this log has; check --slices")
        values = ndcg(run.ranks["sampled"], 10).numpy()[after_base]
        means = [float(values[kind == place].mean()) if n else np.nan for place, n in enumerate(counts)]
        found.setdefault(run.label, []).append(means)
    for name in asked.rows:
        if name not in found:
            raise SystemExit(f"no row {name!r}; there are {', '.join(sorted(found))}")
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in np.mean(found[name], axis=0)) + " |")


if __name__ == "__main__":
    main()
