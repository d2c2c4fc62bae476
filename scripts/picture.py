"""README's picture from the stored runs: accuracy right after each slice, a line for each of eight methods.

python scripts/picture.py            # writes docs/accuracy.svg; needs matplotlib
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from packed_tables import OURS, answered, of_overall_tables

from protofed.evaluation.ranking import ndcg

ROOT = Path(__file__).parents[1]
DATASET = "gowalla_1k"
SHOWN = ("personal-memory", "protofed-sp (nodp)", "full-retrain", "si", OURS, "fedrap", "frozen", "popularity")


def curves() -> dict[str, np.ndarray]:
    """NDCG@10 of A[t, t], t = 1..T, sampled candidates, all events: the mean over seeds of each method shown."""
    found: dict[str, list[list[float]]] = {}
    for run in answered(DATASET, ROOT / "results" / "overall", of_overall_tables):
        values, slices = ndcg(run.ranks["sampled"], 10).numpy(), run.asked["slice"]
        of_slices = [float(values[slices == t].mean()) for t in range(1, slices.max() + 1)]
        found.setdefault(run.label, []).append(of_slices)
    return {label: np.mean(found[label], axis=0) for label in SHOWN}


def main() -> None:
    mpl.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "protofed", "font.size": 10, "svg.fonttype": "none"})
    plot, axes = plt.subplots(figsize=(7.2, 3.2))
    for label, values in sorted(curves().items(), key=lambda curve: -curve[1].mean()):
        ours = label.startswith("protofed-sp")
        axes.plot(range(1, len(values) + 1), values, marker="o", markersize=3, lw=2.4 if ours else 1.2, label=label)
    axes.set(xlabel="slice t", ylabel="NDCG@10 after slice t", ylim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    plot.tight_layout()
    plot.savefig(ROOT / "docs" / "accuracy.svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
