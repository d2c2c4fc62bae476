"""What bad clients do to prototypes and to accuracy: a share of the uploads is replaced, everything else stays.

    python benchmarks/bad_clients.py --out results/bad_clients.csv

The synthetic world, one base block, then a slice of rounds with every aggregator, attack and share. Bad clients are the
same in all of them; their devices learn as usual, so accuracy is everybody's. Displacement is the angle between a
prototype and the same one without bad clients, in degrees.
"""

import argparse
import csv
import dataclasses
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protofed.backbone.training import PlainDescent
from protofed.cli.federate import DEMO, begun, ndcg_of
from protofed.cli.run import load, settle
from protofed.client.upload import Upload, make_upload
from protofed.config import RunConfig, override
from protofed.federation import simulator
from protofed.methods.names import OURS
from protofed.methods.protofed_sp import ProtoFedSP
from protofed.progress import silent
from protofed.seeds import stream

AGGREGATORS = ("fedkmeans", "geometric-median", "barycenter")
ATTACKS = ("sign flipped", "huge", "NaN", "one prototype")
SHARES = (0.1, 0.2, 0.3)
COLUMNS = ("aggregator", "attack", "share", "bad_uploads", "ndcg_all", "ndcg_novel", "mean", "largest", "target")
SEEN = {"protofed.ablate": "acceptance,own-rows"}  # every device uses its prompt and nothing else: the worst case
TARGET, LARGEST = 0, 127  # the prototype that colluding clients are after; the largest code of an upload


def turned_bad(upload: Upload, bad: Tensor, attack: str) -> Upload:
    """The uploads that arrive, those of bad clients changed."""
    codes, block = upload.codes.clone(), upload.block.clone()
    if attack == "sign flipped":
        codes[bad] = codes[bad].clamp(min=-LARGEST).neg()
    elif attack == "huge":
        codes[bad] = (LARGEST * codes[bad].sign()).to(codes.dtype)
    elif attack == "one prototype":
        wanted = torch.randn(codes.shape[1:], generator=stream(0, "wanted direction"))
        codes[bad] = (LARGEST * wanted.sign()).to(codes.dtype)
        block[bad] = TARGET
    else:  # 8 bits hold no NaN, and an upload of another type is refused: all that is left of it is its absence
        keep = ~bad
        return replace(upload, tokens=upload.tokens[keep], codes=codes[keep], block=block[keep])
    return replace(upload, codes=codes, block=block)


def angles(one: Tensor, other: Tensor) -> Tensor:
    """Degrees between prototypes of the same number."""
    return torch.rad2deg(2 * torch.asin(((one - other).norm(dim=-1) / 2).clamp(max=1)))


class World:
    """One base block, and what a slice after it ends with."""

    def __init__(self, config: RunConfig, scratch: Path) -> None:
        self.config, self.method, self.descend = config, ProtoFedSP(), PlainDescent()
        self.world, self.data = begun(config, load(config, scratch), scratch / "cache", silent)
        self.start = self.method.start(self.world)

    def with_aggregator(self, aggregator: str) -> Any:
        """The world under another aggregator; the base block does not know any."""
        return dataclasses.replace(self.world, config=override(self.config, {"protofed.aggregator": aggregator}))

    def learned(self, aggregator: str, attack: str = "", share: float = 0.0) -> tuple[Tensor, dict[str, float], int]:
        """The prototypes, accuracy, and how many bad uploads came, after a slice with so many bad clients."""
        world, came = self.with_aggregator(aggregator), 0

        def make(model: Any, state: Any, rule: Any, draws: Any, round_: int) -> Upload:
            nonlocal came
            upload = make_upload(model, state, rule, draws, round_)
            bad = draws.uniform("bad", state.users, 0) < share
            came += int(bad.sum())
            return turned_bad(upload, bad, attack) if len(upload) and bool(bad.any()) else upload

        simulator.make_upload = make
        try:
            state, _ = self.method.learn(world, self.start, self.data.slice_(1), self.descend)
        finally:
            simulator.make_upload = make_upload
        return state.library.v, ndcg_of(self.method, world, state, self.data), came


def rows(world: World) -> Iterator[dict[str, Any]]:
    """One row for each aggregator, attack and share; honest ones first."""
    for aggregator in AGGREGATORS:
        honest, accuracy, _ = world.learned(aggregator)
        yield row(aggregator, "none", 0.0, honest, honest, accuracy, 0)
        for attack in ATTACKS:
            for share in SHARES:
                v, accuracy, came = world.learned(aggregator, attack, share)
                yield row(aggregator, attack, share, v, honest, accuracy, came)


def row(
    aggregator: str, attack: str, share: float, v: Tensor, honest: Tensor, accuracy: dict[str, float], came: int
) -> dict[str, Any]:
    """The columns of the table."""
    moved = angles(v, honest)
    degrees = (round(float(each), 2) for each in (moved.mean(), moved.max(), moved[TARGET]))
    ndcg = (round(accuracy[name], 4) for name in ("all", "novel"))
    return dict(zip(COLUMNS, (aggregator, attack, share, came, *ndcg, *degrees), strict=True))


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mode", choices=("reference", "nodp"), default="nodp")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    given = [f"{name}={value}" for name, value in (DEMO | SEEN | {"protofed.mode": asked.mode}).items()]
    config = settle({"dataset": "synthetic", "method": OURS}, None, given + asked.set)
    with tempfile.TemporaryDirectory() as scratch, open(asked.out, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for one in rows(World(config, Path(scratch))):
            print(*one.values(), sep="\t", flush=True)
            writer.writerow(one)
            file.flush()


if __name__ == "__main__":
    main()
