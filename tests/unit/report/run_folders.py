"""Run folders with known numbers, written as a run writes them."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from protofed.evaluation.exposure import GROUPS
from protofed.privacy.ledger import Release, write_ledger
from protofed.report.layout import Cell, Drawing, Table, to_csv

Users = Mapping[str, Sequence[int]]  # how many queries a user has in each slice 0..T
Value = Callable[[int, int, str, str, str], float]  # (tested, trained, candidates, subset, metric)

Asked = Callable[[int, str], int]  # how many of a user's queries of a slice are in a subset
Cells = Sequence[tuple[int, int, str, str]]  # (trained, tested, candidates, subset)

CANDIDATES = ("sampled", "full")
SUBSETS = ("all", "novel")
METRICS = ("ndcg@10", "hr@10")
SHARES = tuple(f"{kind}_{group}{end}" for kind, end in (("exposure", "@10"), ("events", "")) for group in GROUPS)


def in_every_subset(n: int, subset: str) -> int:
    return n


def half_novel(n: int, subset: str) -> int:
    """The larger half of a user's queries is novel, the rest repeats."""
    return {"novel": n - n // 2, "repeat": n // 2}.get(subset, n)


def table(text: str) -> list[dict[str, str]]:
    """The rows of a CSV by its header."""
    return list(csv.DictReader(io.StringIO(text)))


def embedded(page: str) -> dict[str, Any]:
    """The JSON that a page holds: its tables, its figures and what they share."""
    _, _, rest = page.partition('<script type="application/json" id="data">')
    return dict(json.loads(rest[: rest.index("</script>")]))


def csv_of(drawing: Drawing) -> str:
    """A figure's numbers as text."""
    return to_csv(drawing.header, drawing.rows)


def shown_in(table: Table) -> dict[str, dict[str, Cell]]:
    """The cells of a table by row and heading."""
    headings = [f"{column.group} {column.label}".strip() for column in table.columns]
    return {line.label: dict(zip(headings, line.cells, strict=True)) for line in table.lines}


def write_run(
    folder: Path,
    value: Value,
    *,
    method: str = "frozen",
    dataset: str = "toy",
    seed: int = 0,
    users: Users | None = None,
    skill: Mapping[str, float] | None = None,
    candidates: Sequence[str] = CANDIDATES,
    subsets: Sequence[str] = SUBSETS,
    settings: str = "",
    ledger: Sequence[Mapping[str, Any]] = (),
    environment: Mapping[str, Any] | None = None,
    seconds: Mapping[str, float] | None = None,
    per_user: bool = True,
    log: Sequence[Mapping[str, Any]] = (),
    asked: Asked = in_every_subset,
    drift: Callable[[str, int], float | None] | None = None,
    shares: Callable[[int, str], float] | None = None,
) -> Path:
    """A finished run whose every user scores the slice's value, times the user's skill, on each of its queries."""
    users = users or {"ann": (1, 2, 1), "bob": (1, 1, 2), "cleo": (2, 0, 1)}
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config_text(dataset, method, seed, settings), encoding="utf-8")
    n_slices = len(next(iter(users.values())))
    cells = [(t, s, c, b) for t in range(n_slices) for s in range(n_slices) for c in candidates for b in subsets]
    skill = {user: 1.0 for user in users} | dict(skill or {})
    write_metrics(folder / "metrics.parquet", cells, value, users, skill, asked)
    if shares:
        add_shares(folder / "metrics.parquet", n_slices, shares)
    if per_user:
        write_per_user(folder / "per_user.parquet", cells, value, users, skill, asked)
    if drift:
        add_drift(folder / "per_user.parquet", drift)
    if log:
        (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log), encoding="utf-8")
    stages = seconds or {"warm-up": 3.0, "learn": 2.0, "evaluate": 1.0}
    pq.write_table(
        pa.table(
            {"slice": pa.array([1] * len(stages), pa.int32()), "stage": list(stages), "seconds": [*stages.values()]}
        ),
        folder / "timing.parquet",
    )
    facts = environment or {"versions": {"torch": "2.13.0"}, "device": "cpu", "command": f"protofed run --seed {seed}"}
    (folder / "environment.json").write_text(json.dumps(facts), encoding="utf-8")
    write_ledger(folder / "ledger.json", tuple(Release(**entry) for entry in ledger))
    return folder


def config_text(dataset: str, method: str, seed: int, settings: str = "") -> str:
    name = json.dumps(method)
    return (
        f'dataset = "{dataset}"\nmethod = {name}\npreset = "small"\nseed = {seed}\n{settings}\n[stream]\nn_slices = 2\n'
    )


def write_metrics(
    path: Path,
    cells: Cells,
    value: Value,
    users: Users,
    skill: Mapping[str, float],
    asked: Asked = in_every_subset,
) -> None:
    rows = []
    for trained, tested, candidates, subset in cells:
        numbers = {user: asked(counts[tested], subset) for user, counts in users.items()}
        n = sum(numbers.values())
        n_users = sum(number > 0 for number in numbers.values())
        for metric in METRICS:
            level = sum(number * skill[user] for user, number in numbers.items()) / n if n else float("nan")
            found = level * value(tested, trained, candidates, subset, metric)
            for split in ("val", "test"):
                shown = found if split == "test" else 0.99  # validation must never reach the page
                rows.append((trained, tested, split, candidates, subset, metric, shown, n, n_users))
    names = [
        "slice_trained",
        "slice_tested",
        "split",
        "candidates",
        "subset",
        "metric",
        "value",
        "n_queries",
        "n_users",
    ]
    kinds = [pa.int32(), pa.int32(), *[pa.string()] * 4, pa.float64(), pa.int64(), pa.int64()]
    _write(path, names, kinds, rows)


def write_per_user(
    path: Path,
    cells: Cells,
    value: Value,
    users: Users,
    skill: Mapping[str, float],
    asked: Asked = in_every_subset,
) -> None:
    last = max(cell[0] for cell in cells)
    rows = [
        (
            user,
            trained,
            tested,
            candidates,
            subset,
            asked(counts[tested], subset),
            asked(counts[tested], subset) * skill[user] * value(tested, trained, candidates, subset, "ndcg@10"),
            asked(counts[tested], subset) * skill[user] * value(tested, trained, candidates, subset, "hr@10"),
        )
        for trained, tested, candidates, subset in cells
        if trained in (tested, last)
        for user, counts in users.items()
        if asked(counts[tested], subset)
    ]
    names = ["user", "slice_trained", "slice_tested", "candidates", "subset", "n", "ndcg10_sum", "hr10_sum"]
    kinds = [pa.string(), pa.int32(), pa.int32(), pa.string(), pa.string(), pa.int64(), pa.float64(), pa.float64()]
    _write(path, names, kinds, rows)


def add_shares(path: Path, n_slices: int, shares: Callable[[int, str], float]) -> None:
    """The shares of items by popularity, for s = t alone."""
    told = pq.read_table(path)
    rows = [
        (t, t, "test", "full", "all", metric, shares(t, metric), 9, 3) for t in range(n_slices) for metric in SHARES
    ]
    more = pa.table(
        [pa.array(c, f.type) for c, f in zip(zip(*rows, strict=True), told.schema, strict=True)], told.schema
    )
    pq.write_table(pa.concat_tables([told, more]), path)


def add_drift(path: Path, drift: Callable[[str, int], float | None]) -> None:
    """A column with each user's drift in the slice tested, for s = t alone."""
    rows = pq.read_table(path)
    where = zip(*(rows[name].to_pylist() for name in ("user", "slice_tested", "slice_trained")), strict=True)
    column = pa.array([drift(user, s) if s == t else None for user, s, t in where], pa.float64())
    pq.write_table(rows.append_column("drift", column), path)


def _write(path: Path, names: list[str], kinds: list[pa.DataType], rows: Sequence[Sequence[object]]) -> None:
    columns = list(zip(*rows, strict=True))
    arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
    pq.write_table(pa.table(dict(zip(names, arrays, strict=True))), path)
