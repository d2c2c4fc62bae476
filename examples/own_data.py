"""From a shop's CSV to recommendations, with settings small enough for seconds.

    python examples/own_data.py

The shop is made up: everybody prefers one of four shelves and often buys the next item of a series.
"""

import csv
import random
import sys
import tempfile
from pathlib import Path

import protofed
from protofed.cli.main import app

SMALL = (
    *("--set", "stream.n_slices=2", "--set", "backbone.width=16", "--set", "backbone.layers=1"),
    *("--set", "backbone.history_length=10", "--set", "training.base_epochs=2", "--set", "protofed.local_steps=2"),
    *("--set", "protofed.base_steps=2", "--set", "privacy.rounds_per_slice=2"),
)


def write_orders(path: Path, n_customers: int = 60, n_events: int = 30) -> None:
    """A CSV of orders: customer_id, sku, created_at."""
    rng = random.Random(0)
    rows = []
    for customer in range(n_customers):
        shelf, place = customer % 4, rng.randrange(20)
        for seconds in sorted(rng.sample(range(90 * 86_400), n_events)):
            place = (place + 1) % 20 if rng.random() < 0.7 else rng.randrange(20)
            rows.append((f"c{customer:03d}", f"item-{shelf}-{place:02d}", 1_700_000_000 + seconds))
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("customer_id", "sku", "created_at"), *rows])


def protofed_command(*words: object) -> None:
    """`protofed WORDS`, in this process."""
    app([str(word) for word in words], standalone_mode=False)


def main(folder: Path) -> list[protofed.Recommendation]:
    """What the trained model recommends to the first customer; everything is written below `folder`."""
    write_orders(folder / "orders.csv")
    places = ("--root", folder / "data")
    protofed_command("data", "import", folder / "orders.csv", "--as", "shop", *places)
    settings = (*SMALL, "--target-epsilon", 3.4, "--cache", folder / "cache")
    protofed_command("run", "--dataset", "shop", *places, "--method", "protofed-sp", *settings, "--out", folder / "run")
    protofed_command("recommend", folder / "run", "--user", "c000", "-n", 5)

    device = protofed.load(folder / "run").device(history=["item-1-03", "item-1-04"])  # a new customer
    device.feedback("item-1-05")
    return device.recommend(n=5)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for row in main(Path(sys.argv[1] if len(sys.argv) > 1 else folder)):
            print(row.item, f"{row.score:.3f}")
