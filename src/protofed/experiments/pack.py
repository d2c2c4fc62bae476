"""Finished runs added to a store, whose files are each whole at any time."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from protofed.config import as_today
from protofed.errors import RunFolderError
from protofed.evaluation.ranking import METRICS
from protofed.experiments import records
from protofed.experiments import store as stores
from protofed.experiments.evaluate import CANDIDATES, RANKS_SCHEMA
from protofed.experiments.rank_code import encoded, unlikeness
from protofed.files import WAIT, locked, make_folder, remove_unfinished, written_atomically
from protofed.progress import Progress, silent


@dataclass(frozen=True, slots=True)
class Packed:
    """What a call did to a store."""

    runs: int  # put in by this call
    without_ranks: int  # of those
    repeated: int  # left out because an earlier folder holds the same config, or the store does and with ranks
    unfinished: int  # left out because the run is not over
    held: int  # runs in the store now
    n_bytes: int  # of the store now


@dataclass(frozen=True, slots=True)
class Source:
    """A finished run folder that is to be packed."""

    path: Path
    name: str  # below the folder that is packed
    config: str

    @property
    def dataset(self) -> str:
        return str(records.parse_config(self.path / records.TEXTS["config"], self.config)["dataset"])

    @property
    def has_ranks(self) -> bool:
        return (self.path / records.RANKS).is_file()


def pack(root: Path, out: Path, progress: Progress = silent) -> Packed:
    """Every finished run at or below `root` added to the store at `out`."""
    done, unfinished = records.run_folders(root)
    if not done:
        raise RunFolderError(f"{root} holds no finished run (a folder with config.toml and metrics.parquet)")
    if out.exists() and not out.is_dir():
        raise RunFolderError(f"a pack is a folder, but {out} is a file")
    store, below = stores.place_of(out)
    if out.resolve() == root.resolve():
        raise RunFolderError(f"the pack cannot lie at {root}, where its runs are; choose another folder")
    by_dataset: dict[str, list[Source]] = {}
    for folder in done:
        config = records.read_text(folder / records.TEXTS["config"])
        source = Source(folder, below + records.name_below(folder, root), config)
        by_dataset.setdefault(source.dataset, []).append(source)
    added: list[Source] = []
    make_folder(store)
    busy = f"another process has been packing into {out} for {WAIT:g} s; wait for it or choose another folder"
    with locked(store / ".lock", busy, patience=WAIT):
        remove_unfinished(store)
        for number, (dataset, own) in enumerate(sorted(by_dataset.items())):
            added += add(store / f"{quote(dataset, safe='')}{stores.RUNS}", own, below)
            progress("pack", number + 1, len(by_dataset), dataset)
        files = [path for path in store.iterdir() if path.name.endswith((stores.RUNS, stores.QUERIES))]
        held = sum(pq.read_metadata(path).num_rows for path in files if path.name.endswith(stores.RUNS))
    without = sum(not source.has_ranks for source in added)
    n_bytes = sum(path.stat().st_size for path in files)
    return Packed(len(added), without, len(done) - len(added), len(unfinished), held, n_bytes)


def add(path: Path, own: Sequence[Source], below: str = "") -> list[Source]:
    """The runs of one data set put into its file, their queries beside it; those of them that are in it now."""
    held = stores.read_held(path) if path.is_file() else []
    streams = stores.by_stream(stores.read_file(stores.queries_at(path))) if stores.queries_at(path).is_file() else {}
    here = {as_today(run.texts["config"]): run for run in held if run.folder.startswith(below)}
    chosen = choose(own, {config for config, run in here.items() if run.ranks is not None})
    replaced = [here[config] for config in chosen if config in here]
    runs = [run for run in held if not any(run is old for old in replaced)]
    for source in chosen.values():
        run, queries = hold(source)
        runs.append(run)
        known = streams.get(run.queries or "")
        if queries is not None and run.queries and (known is None or records.DRIFT not in known.column_names):
            streams[run.queries] = queries
    write(path, runs, streams)
    return list(chosen.values())


def write(path: Path, runs: Sequence[stores.Held], streams: Mapping[str, pa.Table]) -> None:
    """The runs of a data set and the queries that they need; these lie there before the runs that need them."""
    runs = sorted(runs, key=lambda run: run.key)
    needed = {name: streams[name] for name in {run.queries for run in runs if run.queries}}
    if streams:
        write_file(stores.queries_at(path), joined(streams))
    table = pa.table(
        {
            "folder": [run.folder for run in runs],
            **{text: [run.texts.get(text) for run in runs] for text in records.TEXTS},
            "log": [nine_digits(run.texts["log"]) if "log" in run.texts else None for run in runs],
            "seconds": [list(run.seconds.items()) for run in runs],
            "metrics": [run.metrics.to_pylist() for run in runs],
            "queries": [run.queries for run in runs],
            **dict(zip(("like", "ranks"), zip(*coded(runs, needed), strict=True), strict=True)),
        },
        schema=stores.SCHEMA,
    )
    write_file(path, table)
    if needed and len(needed) < len(streams):
        write_file(stores.queries_at(path), joined(needed))


def nine_digits(log: str) -> str:
    """A log with its fractions cut to nine digits; a line that is no JSON stays as it is."""
    try:
        lines = [json.loads(line, parse_float=lambda text: float(f"{float(text):.9g}")) for line in log.splitlines()]
    except ValueError:
        return log
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def choose(own: Sequence[Source], ranked: set[str]) -> dict[str, Source]:
    """One folder per config: the first that has ranks, else the first; none without them for a run held with them."""
    chosen: dict[str, Source] = {}
    for source in sorted(own, key=lambda source: not source.has_ranks):
        config = as_today(source.config)
        if source.has_ranks or config not in ranked:
            chosen.setdefault(config, source)
    return chosen


def hold(source: Source) -> tuple[stores.Held, pa.Table | None]:
    """A run folder as a store holds it, and the queries that it answered where it kept its ranks."""
    found = records.read_folder(source.path, source.name)
    metrics = reported(found.metrics, with_ranks=source.has_ranks)
    if not source.has_ranks:
        return stores.Held(source.name, found.texts, found.seconds, metrics, None, None), None
    told = records.read_table(source.path / records.RANKS, RANKS_SCHEMA.names)
    ranks = np.stack([told[kind].to_numpy() for kind in CANDIDATES])
    held = stores.Held(source.name, found.texts, found.seconds, metrics, stream_name(numbered(told)), ranks)
    return held, queries_of(told, found)


def reported(metrics: pa.Table, *, with_ranks: bool) -> pa.Table:
    """The rows that a report reads; with the ranks at hand, less those that follow from them.

    Off the diagonal that is what forgetting is computed from; a metric of A[t, t] that no rank tells is always kept.
    """
    metric = metrics["metric"]
    dropped = [name for name in METRICS if with_ranks or name not in stores.SUMS]
    on = pc.invert(pc.is_in(metric, value_set=pa.array(dropped)))
    off = pc.and_(pc.equal(metrics["candidates"], "sampled"), pc.equal(metrics["subset"], "all"))
    diagonal = pc.equal(metrics["slice_tested"], metrics["slice_trained"])
    chosen = pc.if_else(diagonal, on, pc.and_(off, pc.equal(metric, "ndcg@10")))
    return metrics.filter(chosen).select(stores.KEPT.names).cast(stores.KEPT)


def queries_of(ranks: pa.Table, run: records.Record) -> pa.Table:
    """The queries that a run answered, with the drift of their users where the run says it."""
    users = None if run.users is None else run.users()
    queries = numbered(ranks)
    if users is None or records.DRIFT not in users.column_names:
        return queries
    whole = users.filter(pc.and_(pc.equal(users["candidates"], "sampled"), pc.equal(users["subset"], "all")))
    rows = whole.select(["user", "slice_tested", records.DRIFT]).to_pydict()
    known = dict(zip(zip(rows["user"], rows["slice_tested"], strict=True), rows[records.DRIFT], strict=True))
    asked = zip(ranks["user"].to_pylist(), ranks["slice"].to_pylist(), strict=True)
    return queries.append_column(records.DRIFT, pa.array([known.get(key) for key in asked], pa.float64()))


def numbered(ranks: pa.Table) -> pa.Table:
    """The queries behind a table of ranks: slice, user, subsets; users are numbers, in the order of their ids.

    So a draw of users by their sorted names, as a report makes it, draws the same ones from numbers.
    """
    users = ranks["user"].combine_chunks()
    numbers = pc.index_in(users, value_set=pc.unique(users).sort())
    return ranks.drop_columns(list(CANDIDATES)).set_column(1, "user", numbers).combine_chunks()


def stream_name(queries: pa.Table) -> str:
    """What the queries of a stream are called: a hash of them."""
    digest = hashlib.sha256()
    for name, column in zip(queries.column_names, queries.columns, strict=True):
        digest.update(name.encode() + b"\0" + np.ascontiguousarray(column.to_numpy()).tobytes())
    return digest.hexdigest()[:12]


def coded(runs: Sequence[stores.Held], streams: Mapping[str, pa.Table]) -> Iterator[tuple[list[int], bytes | None]]:
    """For each run the places of two earlier ones that it resembles most, and its ranks coded beside theirs."""
    for place, run in enumerate(runs):
        if run.ranks is None or run.queries is None:
            yield [], None
            continue
        before = enumerate(runs[:place])
        others = {other: r.ranks for other, r in before if r.queries == run.queries and r.ranks is not None}
        unlike = {other: unlikeness(run.ranks, ranks) for other, ranks in others.items()}
        like = sorted(others, key=lambda other: (unlike[other], other))[:2]
        repeat = streams[run.queries]["repeat"].to_numpy()
        yield like, encoded(run.ranks, repeat, [others[other] for other in like])


def joined(streams: Mapping[str, pa.Table]) -> pa.Table:
    """The queries of all streams in one table; a column that a stream does not have is null there."""
    parts = sorted(streams.items())
    tables = [table.add_column(0, "index", pa.array([name] * len(table), pa.string())) for name, table in parts]
    return pa.concat_tables(tables, promote_options="default")


def write_file(path: Path, table: pa.Table) -> None:
    """A file of a store, whole or not at all."""
    with written_atomically(path) as unfinished:
        pq.write_table(
            table.combine_chunks().replace_schema_metadata(stores.FORMAT),
            unfinished,
            compression="zstd",
            compression_level=19,
            write_statistics=False,  # they repeat whole configs
        )
