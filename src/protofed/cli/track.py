"""`protofed run --track`: what a run says about each slice, as TensorBoard scalars, while it goes on."""

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from protofed.errors import ConfigError, MissingExtra
from protofed.experiments.records import log_lines
from protofed.progress import RUN, Progress

SHOWN = [(c, s, m) for m in ("ndcg@10", "hr@10") for c in ("sampled", "full") for s in ("all", "novel")]
TRACE = "validation_ndcg10"


@dataclass(frozen=True, slots=True)
class Scalar:
    """One point of one curve."""

    tag: str
    value: float
    step: int  # the slice; in a validation trace, the epoch


@contextlib.contextmanager
def tracked(track: Path | None, folder: Path, n_slices: int, progress: Progress) -> Iterator[Progress]:
    """The same progress, with each slice that it reports as done written to `track`; as it was where that is None.

    A run that goes on, or is over already, is written from its first slice; see `writer_in`.
    """
    if track is None:
        yield progress
        return
    make_writer, writer, written = writer_in(track), None, 0  # nothing is written until a slice is finished

    def catch_up(done: int) -> None:
        nonlocal writer, written
        writer = writer or make_writer()
        for scalar in (scalar for index in range(written, done) for scalar in scalars(folder, index)):
            writer.add_scalar(scalar.tag, scalar.value, scalar.step)
        written = max(written, done)
        writer.flush()

    def report(task: str, done: int | float, total: int | float | None, note: str = "") -> None:
        if task == RUN and done:
            catch_up(int(done))
        progress(task, done, total, note)

    try:
        yield report
        catch_up(n_slices + 1)
    finally:
        if writer is not None:
            writer.close()


def writer_in(folder: Path) -> Callable[[], Any]:
    """Makes TensorBoard's writer, whose readers forget what earlier files of the folder say.

    A missing library or a wrong place is told now, before the run.
    """
    try:
        board = importlib.import_module("torch.utils.tensorboard")
    except ImportError as missing:
        raise MissingExtra("tensorboard", "track") from missing
    if folder.is_file():
        raise ConfigError(f"--track {folder} is a file; give a folder")
    return lambda: board.SummaryWriter(str(folder), purge_step=0)


def scalars(folder: Path, index: int) -> Iterator[Scalar]:
    """Everything the run folder says about a finished slice: A[t, t], seconds, the log's numbers and traces."""
    yield from accuracies(folder, index)
    timing = _table(folder, "timing", index)
    for stage, slice_, spent in zip(*(timing[name].to_pylist() for name in ("stage", "slice", "seconds")), strict=True):
        if slice_ == index:
            yield Scalar(f"seconds/{stage}", spent, index)
    for record in records(folder / "log.jsonl", index):
        yield from diagnostics(record, index)


def accuracies(folder: Path, index: int) -> Iterator[Scalar]:
    """NDCG@10 and HR@10 of the slice's test part right after it was learned; none without such queries."""
    table = _table(folder, "metrics", index)
    keep = pc.and_(pc.equal(table["slice_trained"], index), pc.equal(table["slice_tested"], index))
    rows = table.filter(pc.and_(keep, pc.equal(table["split"], "test"))).to_pylist()
    known = {(row["candidates"], row["subset"], row["metric"]): row["value"] for row in rows}
    for candidates, subset, metric in SHOWN:
        if (candidates, subset, metric) in known:
            yield Scalar(f"{metric}/{candidates} {subset}", known[candidates, subset, metric], index)


def records(log: Path, index: int) -> list[Mapping[str, Any]]:
    """The newest line of each stage about the slice; a resumed run says some of them again."""
    lines = log_lines(log.read_text(encoding="utf-8"))
    return list({line["stage"]: line for line in lines if line.get("slice") == index}.values())


def diagnostics(record: Mapping[str, Any], index: int) -> Iterator[Scalar]:
    """The numbers of a log line, and its validation trace as a curve of its own."""
    stage = record["stage"]
    about = "warm-up" if stage == "warm-up" else f"slice {index}"
    for epoch, value in enumerate(record.get(TRACE, ())):
        yield Scalar(f"validation ndcg@10/{about}", value, epoch)
    for name, value in record.items():
        if name != "slice" and isinstance(value, int | float) and math.isfinite(value):
            yield Scalar(f"{stage}/{name}", float(value), index)


def _table(folder: Path, name: str, index: int) -> Any:
    """The run's table, or the slice's part of it while the run goes on."""
    whole, part = folder / f"{name}.parquet", folder / "slices" / f"{name}-{index}.parquet"
    return pq.read_table(part if part.is_file() else whole)
