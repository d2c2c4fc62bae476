"""Prepared logs of foreign or damaged files: read as they are, or refused in one line."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from protofed.cli.data import app
from protofed.data.prepared import load_log
from protofed.data.stats import stats
from protofed.errors import DataError


def prepared(folder: Path, columns: dict[str, object] | pa.Table) -> Path:
    (folder / "toy").mkdir()
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, folder / "toy" / "interactions.parquet")
    return folder


GOOD = {"user": [1, 2], "item": [1, 2], "timestamp": [3, 4]}
ODD = {
    "ratings of text": (GOOD | {"rating": ["a", "b"]}, "rating must hold numbers, found the type dictionary"),
    "infinite ratings": (GOOD | {"rating": [1.0, float("inf")]}, "rating must hold finite numbers, found inf"),
    "a nested rating": (GOOD | {"rating": [[1], [2]]}, "rating must hold numbers, found the type list"),
    "an empty user": (GOOD | {"user": ["", "b"]}, "user must be one line of text that is not empty, found ''"),
    "a line break": (GOOD | {"item": ["a\nb", "b"]}, r"item must be one line .* found 'a\\nb'"),
    "no UTF-8": (GOOD | {"user": pa.array([b"\xff", b"b"], pa.binary()).view(pa.string())}, "must be a whole parquet"),
    "a column twice": (
        pa.Table.from_arrays([pa.array([1, 2])] * 4, names=["user", "item", "timestamp", "item"]),
        "each column must be there once, found item twice",
    ),
}


@pytest.mark.parametrize(("columns", "words"), ODD.values(), ids=ODD)
def test_a_prepared_log_with_odd_columns_is_refused_in_one_line(tmp_path, columns, words):
    with pytest.raises(DataError, match=words) as caught:
        stats("toy", prepared(tmp_path, columns))
    assert len(str(caught.value).splitlines()) == 1


def test_a_prepared_log_may_hold_datetimes_or_dates(tmp_path):
    moments = [1_700_000_000, 1_700_000_001, 1_700_086_400]
    for place, kind in enumerate((pa.timestamp("s"), pa.timestamp("ms", "UTC"), pa.timestamp("ns", "Asia/Tokyo"))):
        folder = tmp_path / str(place)
        folder.mkdir()
        times = pa.array(moments, pa.timestamp("s")).cast(kind)
        log = load_log("toy", prepared(folder, {"user": [1, 2, 3], "item": [1, 2, 3], "timestamp": times}), False)
        assert log.times.tolist() == moments
    parts = pa.array([1_700_000_000_999], pa.timestamp("ms"))
    days = pa.array([19_675], pa.int32()).cast(pa.date32())
    for name, times, second in (("parts", parts, 1_700_000_000), ("days", days, 19_675 * 86_400)):
        (tmp_path / name).mkdir()
        log = load_log("toy", prepared(tmp_path / name, {"user": [1], "item": [1], "timestamp": times}), False)
        assert log.times.tolist() == [second]


@pytest.mark.parametrize(
    "columns",
    [
        {"customer": [1], "item": [1], "timestamp": [1]},
        GOOD | {"timestamp": ["2024-01-01", "2024-01-02"]},
        GOOD | {"timestamp": [1_700_000_000_000, 1_700_000_000_001]},
        GOOD | {"timestamp": [0.5, 1.5]},
        GOOD | {"timestamp": [-1, 5]},
    ],
    ids=["other columns", "texts", "milliseconds", "halves", "negative"],
)
def test_a_prepared_log_that_is_none_names_the_import(tmp_path, columns):
    with pytest.raises(DataError, match="import the file by `protofed data import FILE --as NAME`"):
        stats("toy", prepared(tmp_path, columns))


def test_users_of_a_narrow_integer_type_stay_apart(tmp_path):
    users = pa.array([-100, 45, 100], pa.int8())  # 100 - -100 wraps around to -56 in eight bits
    log = load_log(
        "toy", prepared(tmp_path, {"user": users, "item": [1, 2, 3], "timestamp": [1, 2, 3]}), canonical=False
    )
    assert log.user_ids.to_pylist() == [-100, 45, 100]


def test_the_largest_integers_are_identifiers_too(tmp_path):
    for kind, high in ((pa.int64(), 2**63 - 1), (pa.uint64(), 2**64 - 1)):
        folder = tmp_path / str(kind)
        folder.mkdir()
        users = pa.array([high, high - 1, high], kind)
        log = load_log(
            "toy", prepared(folder, {"user": users, "item": [1, 2, 3], "timestamp": [1, 2, 3]}), canonical=False
        )
        assert log.user_ids.to_pylist() == [high, high - 1]


def test_a_log_without_a_single_rating_has_no_mean(tmp_path):
    assert stats("toy", prepared(tmp_path, GOOD | {"rating": pa.nulls(2, pa.float32())})).mean_rating is None


def test_a_source_note_of_any_json_is_no_traceback(tmp_path):
    folder = prepared(tmp_path, GOOD)
    for note in ('{"family": []}', '{"family": {}}', "[]"):
        (folder / "toy" / "source.json").write_text(note)
        assert stats("toy", folder).raw.rows == 2
    (folder / "toy" / "source.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="must be JSON"):
        stats("toy", folder)


def test_a_damaged_log_is_replaced_only_when_told_and_an_unwritable_root_is_one_line(tmp_path):
    file = tmp_path / "UserBehavior.csv"
    file.write_text("".join(f"{n % 6},{n % 5},1,pv,{1_511_600_000 + n}\n" for n in range(30)))
    (tmp_path / "logs" / "taobao").mkdir(parents=True)
    broken = tmp_path / "logs" / "taobao" / "interactions.parquet"
    broken.write_bytes(b"PAR1 cut off")
    flags = ["prepare", "taobao", "--source", str(file), "--root"]
    refusal = CliRunner().invoke(app, [*flags, str(tmp_path / "logs")]).exception
    assert isinstance(refusal, DataError)
    assert "pass --overwrite" in str(refusal)
    assert broken.read_bytes() == b"PAR1 cut off"
    for root in (file / "below", Path("/proc/nowhere")):
        refusal = CliRunner().invoke(app, [*flags, str(root)]).exception
        assert isinstance(refusal, DataError)
        assert "cannot be written" in str(refusal)
