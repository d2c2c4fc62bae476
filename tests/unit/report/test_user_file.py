"""What a run knows of its users is read once, whatever is asked of it, and says the same as a filter on the file."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from run_folders import write_run

from protofed.errors import RunFolderError
from protofed.experiments.records import read_users
from protofed.report.runs import Rows, Run


def value(tested: int, trained: int, candidates: str, subset: str, metric: str) -> float:
    return (
        0.1 * tested + 0.01 * trained + (0.001 if candidates == "full" else 0.0) + (0.0001 if subset == "all" else 0.0)
    )


def run_with(read: Callable[[], pa.Table]) -> Run:
    return Run("run", "", {"seed": 0}, {}, {}, {}, read_users=read)


def asked(run: Run) -> Rows:
    assert run.asked is not None
    return run.asked


def listed(rows: Rows) -> list[dict[str, object]]:
    """The rows with their words."""
    words = {name: rows.words[name].take(pa.array(rows.columns[name])) for name in rows.words}
    return pa.table({name: words.get(name, column) for name, column in rows.columns.items()}).to_pylist()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", value) / "per_user.parquet"


@pytest.mark.parametrize("row_group", [2, 1000])
def test_a_part_holds_the_rows_that_a_filter_finds(path: Path, row_group: int) -> None:
    whole = pq.read_table(path)
    pq.write_table(whole, path, row_group_size=row_group)
    file = asked(run_with(partial(read_users, path)))
    for candidates in ("sampled", "full"):
        for subset in ("all", "novel"):
            chosen = pc.and_(pc.equal(whole["candidates"], candidates), pc.equal(whole["subset"], subset))
            slow = whole.filter(pc.and_(chosen, pc.equal(whole["slice_trained"], whole["slice_tested"])))
            assert listed(file.of(candidates, subset)) == slow.drop_columns("slice_trained").to_pylist()


def test_the_file_is_read_once_for_all_questions(path: Path) -> None:
    reads = []
    file = run_with(lambda: reads.append(path) or read_users(path))
    assert reads == []
    for subset in ("all", "novel", "no such subset"):
        asked(file).of("sampled", subset)
    assert asked(file).drift() is None
    assert len(reads) == 1


def test_what_no_query_was_asked_for_is_empty_with_the_same_columns(path: Path) -> None:
    file = asked(run_with(partial(read_users, path)))
    found = file.of("sampled", "no such subset")
    assert listed(found) == []
    assert found.columns.keys() == file.of("sampled", "all").columns.keys()


def test_an_empty_file_has_empty_parts(path: Path) -> None:
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    assert listed(asked(run_with(partial(read_users, path))).of("sampled", "all")) == []


def test_drift_is_told_where_it_is_known(tmp_path: Path) -> None:
    def drift(user: str, tested: int) -> float | None:
        return {"ann": 0.5, "bob": None}.get(user, 0.25 * tested) if tested else None

    path = write_run(tmp_path / "run", value, drift=drift) / "per_user.parquet"
    told = asked(run_with(partial(read_users, path))).drift()
    assert told is not None
    rows = {(row["user"], row["slice_tested"]): row["drift"] for row in listed(told)}
    assert rows == {("ann", 1): 0.5, ("ann", 2): 0.5, ("cleo", 2): 0.5}


def test_a_damaged_file_is_one_line(path: Path) -> None:
    path.write_bytes(b"no parquet")
    with pytest.raises(RunFolderError, match=r"per_user.parquet is not a readable parquet file .*; delete its folder"):
        asked(run_with(partial(read_users, path)))
