"""What content costs: encoding an item table against the bare encoder, and a warm-up with a tower against one without.

Texts are those of an item table, or made up, 25 words each. The bare encoder is called on the same batches and nothing
is kept of it. Warm-ups take a few epochs each, in turns; what is compared is the median of their seconds.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from protofed.backbone.pretrain import warm_up
from protofed.cli.run import item_table, load, settle
from protofed.data.items import load_items
from protofed.features.build import content_of
from protofed.features.columns import texts
from protofed.features.encoders import text_encoder
from protofed.features.kept import encode_texts
from protofed.seeds import stream
from protofed.slices.stream import SliceStream

WORDS = "soft warm light cotton wool jersey striped plain long short wide narrow blue red green with without pocket"
LIMIT_SECONDS, LIMIT_RATIO = 120, 1.3


def made_up(n: int) -> list[str]:
    """Texts of 25 words, each with a number of its own."""
    words = WORDS.split()
    drawn = torch.randint(len(words), (n, 25), generator=stream(0, "texts")).tolist()
    return [f"item {k} {' '.join(words[word] for word in row)}" for k, row in enumerate(drawn)]


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock and processor seconds of a call."""
    wall, own = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - own


def encoding(model: str, wanted: list[str], repeats: int) -> None:
    encoder = text_encoder(model)
    given = [text for text in wanted if text]

    def bare() -> None:
        for start in range(0, len(given), encoder.batch):
            encoder.encode(given[start : start + encoder.batch])

    ratios = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            alone = seconds(bare)
            whole = seconds(lambda: encode_texts(encoder, wanted, Path(cache)))
            again = seconds(lambda: encode_texts(encoder, wanted, Path(cache)))
        ratios.append(whole[1] / alone[1])
        print(
            f"{len(wanted):,} texts, {model}: {whole[0]:.1f} s, {whole[1]:.1f} s of processor time "
            f"(limit {LIMIT_SECONDS} s); the bare encoder {alone[0]:.1f} s and {alone[1]:.1f} s; "
            f"found again in {again[0]:.1f} s"
        )
    print(f"extraction over the bare encoder, processor time, median of {repeats}: {statistics.median(ratios):.2f} "
          f"(limit {LIMIT_RATIO})")  # fmt: skip


def warm_ups(
    dataset: str, root: Path, features: str, epochs: int, repeats: int, cache: Path, settings: Sequence[str]
) -> None:
    config = settle({"dataset": dataset}, None, [f"content.features={features}", "content.kind=tower", *settings])
    config = replace(config, training=replace(config.training, base_epochs=epochs, patience=epochs))
    log = load(config, root)
    content = content_of(config.content, log, item_table(dataset, root), cache)
    base = SliceStream(log, config.stream).slice_(0)
    taken: dict[str, list[float]] = {"ID only": [], "tower": []}
    for _ in range(repeats):
        for name, known in (("ID only", None), ("tower", content)):
            taken[name].append(
                seconds(lambda known=known: warm_up(config, base, device=torch.device("cpu"), content=known))[1]
            )
    told = ", ".join(f"{name} {statistics.median(each):.1f} s" for name, each in taken.items())
    ratio = statistics.median(taken["tower"]) / statistics.median(taken["ID only"])
    print(f"{dataset}, {features}, {epochs} epochs, processor time, median of {repeats}: {told}; "
          f"{ratio:.2f} (limit {LIMIT_RATIO})")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", help="texts of the item table of this prepared log; made up without it")
    parser.add_argument("--texts", type=int, default=105_000, help="how many are made up")
    parser.add_argument("--text", default="wordllama", help="the encoder; empty: none")
    parser.add_argument("--dataset", default="synthetic", help="whose warm-up; empty: none")
    parser.add_argument("--features", default="place,category")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the warm-up")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--cache", type=Path, default=Path(".cache"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.text:
        table = load_items(asked.items, asked.root) if asked.items else None
        encoding(asked.text, made_up(asked.texts) if table is None else texts(table), asked.repeats)
    if asked.dataset:
        warm_ups(asked.dataset, asked.root, asked.features, asked.epochs, asked.repeats, asked.cache, asked.set)


if __name__ == "__main__":
    main()
