"""A pack holds what a report reads of many runs: the same numbers, no ids, and more runs whenever they come."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
import worlds
from hypothesis import given
from hypothesis import strategies as st

from protofed.cli import pack as command
from protofed.cli.report import report
from protofed.config import to_toml
from protofed.errors import RunFolderError
from protofed.experiments.evaluate import CANDIDATES
from protofed.experiments.pack import numbered, pack, stream_name, write_file
from protofed.experiments.rank_code import decoded, encoded
from protofed.experiments.records import Record, read_folder
from protofed.experiments.run import Experiment
from protofed.experiments.store import find_records, read_file

SETTINGS = [("popularity", 0), ("popularity", 1), ("frozen", 0)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three finished runs of the tiny world; nobody may change them."""
    folder = tmp_path_factory.mktemp("packed")
    for method, seed in SETTINGS:
        config = worlds.tiny_config(method=method, seed=seed)
        log, cache = worlds.tiny_log(), folder / "cache"
        Experiment(config, log, cache, worlds.CPU, "test").run(folder / "runs" / method / f"seed-{seed}")
    return folder / "runs"


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Path:
    """The same runs, to be changed."""
    return Path(shutil.copytree(runs, tmp_path / "copied"))


def reported(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    report(folder, tmp_path / "report.html", as_json=True)
    return json.loads(capsys.readouterr().out)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def records(folder: Path) -> dict[str, Record]:
    return {record.name: record for record in find_records(folder)[0]}


def by_user(record: Record) -> dict[tuple, dict]:
    """The rows of A[t, t] by user, by what they are about."""
    rows = record.users().to_pylist()
    return {tuple(row[key] for key in ("user", "slice_tested", "candidates", "subset")): row for row in rows}


def on_diagonal(record: Record) -> dict[tuple, dict]:
    """The metrics of A[t, t] that a report reads, by what they are about."""
    rows = [row for row in record.metrics.to_pylist() if row["slice_trained"] == row["slice_tested"]]
    rows = [row for row in rows if row["metric"] in ("ndcg@10", "hr@10")]
    return {tuple(row[key] for key in ("slice_tested", "candidates", "subset", "metric")): row for row in rows}


@pytest.mark.slow
def test_a_report_of_a_pack_has_the_numbers_and_intervals_of_its_runs(runs, tmp_path, capsys):
    pack(runs, tmp_path / "pack")
    of_folders, of_pack = (reported(folder, tmp_path, capsys) for folder in (runs, tmp_path / "pack"))
    assert of_pack == of_folders
    (section,) = of_pack["sections"]
    assert {row["label"]: row["seeds"] for row in section["rows"]} == {"frozen": [0], "popularity": [0, 1]}
    low, high = section["rows"][0]["ndcg@10/full/novel"]["ci95"]
    assert low < high


@pytest.mark.slow
def test_the_whole_page_of_a_pack_is_that_of_its_runs(runs, tmp_path):
    pack(runs, tmp_path / "pack")
    for number, folder in enumerate((runs, tmp_path / "pack")):
        report(folder, tmp_path / f"{number}.html")
        report(folder, tmp_path / f"{number}.csv")
    for kind in ("html", "csv"):
        assert (tmp_path / f"0.{kind}").read_text() == (tmp_path / f"1.{kind}").read_text()


def test_users_are_rebuilt_exactly_under_names_that_sort_as_their_ids_did(runs, tmp_path):
    pack(runs, tmp_path / "pack")
    of_folders, of_pack = (records(folder) for folder in (runs, tmp_path / "pack"))
    assert list(of_folders) == list(of_pack) == [f"{method}/seed-{seed}" for method, seed in sorted(SETTINGS)]
    for name in of_folders:
        before, after = by_user(of_folders[name]), by_user(of_pack[name])
        ids, names = (sorted({key[0] for key in rows}) for rows in (before, after))
        called = dict(zip(ids, names, strict=True))
        assert set(after) == {(called[user], *rest) for user, *rest in before}
        for (user, *rest), row in before.items():
            assert after[called[user], *rest] | {"user": user} == row


def test_metrics_are_rebuilt_on_the_diagonal_and_kept_off_it(runs, tmp_path):
    pack(runs, tmp_path / "pack")
    of_folder, of_pack = (records(folder)["frozen/seed-0"] for folder in (runs, tmp_path / "pack"))
    before, after = on_diagonal(of_folder), on_diagonal(of_pack)
    assert set(after) == set(before)
    for key, row in before.items():
        assert after[key]["value"] == pytest.approx(row["value"], abs=1e-14)
        assert (after[key]["n_queries"], after[key]["n_users"]) == (row["n_queries"], row["n_users"])
    off = [
        row
        for row in of_folder.metrics.to_pylist()
        if row["slice_trained"] != row["slice_tested"]
        and (row["candidates"], row["subset"], row["metric"]) == ("sampled", "all", "ndcg@10")
    ]
    assert [row for row in of_pack.metrics.to_pylist() if row["slice_trained"] != row["slice_tested"]] == off


def nine_digits(value):
    """A value of a log as a pack keeps it."""
    if isinstance(value, list):
        return [nine_digits(each) for each in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def test_the_texts_and_the_seconds_come_back_as_they_were(runs, tmp_path):
    pack(runs, tmp_path / "pack")
    of_folder, of_pack = (records(folder)["frozen/seed-0"] for folder in (runs, tmp_path / "pack"))
    assert set(of_pack.texts) == {"config", "environment", "ledger", "log"}
    logs = [[json.loads(line) for line in record.texts["log"].splitlines()] for record in (of_pack, of_folder)]
    assert logs[0] == [{name: nine_digits(value) for name, value in line.items()} for line in logs[1]]
    assert {**of_pack.texts, "log": ""} == {**of_folder.texts, "log": ""}
    assert of_pack.seconds == of_folder.seconds
    assert set(of_pack.seconds) == {"warm-up", "learn", "evaluate"}


def test_packs_grow_to_the_same_bytes_in_any_order_and_after_the_runs_are_gone(runs, copied, tmp_path):
    pack(runs, tmp_path / "at-once")
    shutil.move(copied / "popularity", tmp_path / "popularity")
    (tmp_path / "later").mkdir()
    shutil.move(tmp_path / "popularity", tmp_path / "later" / "popularity")
    assert pack(tmp_path / "later", tmp_path / "grown").held == 2
    shutil.rmtree(tmp_path / "later")
    assert pack(copied, tmp_path / "grown").held == 3
    assert contents(tmp_path / "grown") == contents(tmp_path / "at-once")
    pack(runs, tmp_path / "grown")
    assert contents(tmp_path / "grown") == contents(tmp_path / "at-once")


def test_runs_of_one_stream_share_their_queries_and_another_stream_has_its_own(runs, tmp_path):
    pack(runs, tmp_path / "pack")
    (index,) = set(read_file(tmp_path / "pack" / "synthetic.queries.parquet")["index"].to_pylist())
    config = worlds.tiny_config(method="popularity", stream__n_slices=3)
    Experiment(config, worlds.tiny_log(), tmp_path / "cache", worlds.CPU, "test").run(tmp_path / "other" / "three")
    pack(tmp_path / "other", tmp_path / "pack")
    held = read_file(tmp_path / "pack" / "synthetic.runs.parquet")
    assert held["queries"].to_pylist().count(index) == 3
    assert set(held["queries"].to_pylist()) == set(
        read_file(tmp_path / "pack" / "synthetic.queries.parquet")["index"].to_pylist()
    )


def test_the_same_config_replaces_and_ranks_are_never_lost_to_a_folder_without(runs, copied, tmp_path):
    pack(runs, tmp_path / "pack")
    before = contents(tmp_path / "pack")
    (copied / "frozen/seed-0/ranks.parquet").unlink()
    done = pack(copied / "frozen", tmp_path / "pack")
    assert (done.runs, done.repeated, done.held) == (0, 1, 3)
    assert contents(tmp_path / "pack") == before
    (copied / "popularity/seed-0/environment.json").write_text('{"device": "another"}')
    assert pack(copied / "popularity", tmp_path / "pack").held == 3
    held = read_file(tmp_path / "pack" / "synthetic.runs.parquet").to_pylist()
    assert sum(row["environment"] == '{"device": "another"}' for row in held) == 1


def test_of_two_folders_with_one_config_the_one_with_ranks_is_packed(copied, tmp_path):
    shutil.copytree(copied / "frozen/seed-0", copied / "a-copy")
    (copied / "a-copy/ranks.parquet").unlink()
    done = pack(copied, tmp_path / "pack")
    assert (done.runs, done.repeated, done.without_ranks) == (3, 1, 0)
    held = read_file(tmp_path / "pack" / "synthetic.runs.parquet")
    assert held["folder"].to_pylist() == ["frozen/seed-0", "popularity/seed-0", "popularity/seed-1"]


@pytest.mark.slow
def test_runs_without_ranks_are_packed_with_their_metrics_and_counted(runs, copied, tmp_path, capsys):
    for ranks in copied.rglob("ranks.parquet"):
        ranks.unlink()
    command.pack(copied, tmp_path / "pack")
    printed = capsys.readouterr().out
    assert "3 packed, 3 held" in printed
    assert "3 kept no ranks.parquet" in printed
    assert {path.name for path in (tmp_path / "pack").iterdir()} == {".lock", "synthetic.runs.parquet"}
    of_folders, of_pack = (reported(folder, tmp_path, capsys)["sections"] for folder in (runs, tmp_path / "pack"))
    for row, other in zip(of_pack[0]["rows"], of_folders[0]["rows"], strict=True):
        assert row["ndcg@10/full/novel"]["mean"] == other["ndcg@10/full/novel"]["mean"]
        assert row["AF"] == other["AF"]
        assert row["ndcg@10/full/novel"]["ci95"] == [None, None]


def test_users_are_numbered_in_the_order_of_their_ids_and_the_index_does_not_depend_on_ids():
    ids = [f"person-{n}" for n in (9, 10, 9, 2)]
    ranks = {kind: pa.array([1, 2, 3, 21], pa.uint8()) for kind in CANDIDATES}
    table = pa.table({"slice": [0, 0, 1, 1], "user": ids, **ranks, "repeat": [True, False, True, False]})
    queries = numbered(table)
    assert queries.to_pydict() == {
        "slice": [0, 0, 1, 1],
        "user": [2, 0, 2, 1],  # "person-10" < "person-2" < "person-9"
        "repeat": [True, False, True, False],
    }
    renamed = table.set_column(1, "user", pa.array(["c", "a", "c", "b"]))
    assert stream_name(numbered(renamed)) == stream_name(queries)
    assert stream_name(queries.slice(1)) != stream_name(queries)


RANK = st.integers(0, 21)


@given(st.lists(st.tuples(*[RANK] * 8, st.booleans()), max_size=60), st.booleans())
def test_ranks_survive_their_code(rows, alone):
    ranks = np.array([row[:4] for row in rows], dtype=np.uint8).reshape(-1, 4).T
    other = [] if alone else [np.array([row[4:8] for row in rows], dtype=np.uint8).reshape(-1, 4).T, ranks // 2]
    repeat = np.array([row[8] for row in rows], dtype=bool)
    assert (decoded(encoded(ranks, repeat, other), repeat, other) == ranks).all()


def test_ranks_beside_alike_ones_take_a_fraction_of_the_room():
    rng = np.random.default_rng(0)
    ranks = rng.integers(0, 22, (4, 5000), dtype=np.uint8)
    alike = np.where(rng.random(ranks.shape) < 0.9, ranks, rng.integers(0, 22, ranks.shape, dtype=np.uint8))
    repeat = rng.random(5000) < 0.5
    assert len(encoded(ranks, repeat, [alike])) < 0.4 * len(encoded(ranks, repeat))


def test_the_drift_of_users_goes_with_the_queries_whichever_run_tells_it(copied, tmp_path):
    for path in copied.rglob("per_user.parquet"):
        pq.write_table(pq.read_table(path).drop_columns("drift"), path)  # as earlier versions wrote it
    told = copied / "popularity/seed-0"
    users = pq.read_table(told / "per_user.parquet")
    asked = zip(users["user"].to_pylist(), users["slice_tested"].to_pylist(), strict=True)
    drift = [None if tested == 0 else len(user) + tested / 4 for user, tested in asked]
    pq.write_table(users.append_column("drift", pa.array(drift, pa.float64())), told / "per_user.parquet")
    pack(copied, tmp_path / "pack")
    before, after = by_user(read_folder(told, "told")), by_user(records(tmp_path / "pack")["frozen/seed-0"])
    called = dict(zip(*(sorted({key[0] for key in rows}) for rows in (before, after)), strict=True))
    assert all(after[called[user], *rest]["drift"] == row["drift"] for (user, *rest), row in before.items())
    assert any(row["drift"] is not None for row in after.values())


def test_runs_from_two_places_under_one_name_stay_apart(runs, tmp_path):
    pack(runs / "popularity" / "seed-0", tmp_path / "pack")
    shutil.copytree(runs / "frozen" / "seed-0", tmp_path / "elsewhere" / "seed-0")
    pack(tmp_path / "elsewhere", tmp_path / "pack")
    found = records(tmp_path / "pack")
    assert all(name.startswith("seed-0-") for name in found)
    configs = {record.texts["config"] for record in found.values()}
    assert configs == {to_toml(worlds.tiny_config(method=method)) for method in ("popularity", "frozen")}


def test_mistakes_are_told_in_one_line(runs, tmp_path):
    with pytest.raises(RunFolderError, match="holds no finished run"):
        pack(tmp_path, tmp_path / "pack")
    with pytest.raises(RunFolderError, match=r"cannot lie at .*, where its runs are"):
        pack(runs, runs)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file"):
        pack(runs, tmp_path / "file")
    with pytest.raises(RunFolderError, match="no folder at"):
        pack(tmp_path / "nothing", tmp_path / "pack")
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


def test_a_damaged_or_foreign_pack_is_refused(runs, tmp_path):
    pack(runs, tmp_path / "pack")
    path = tmp_path / "pack" / "synthetic.runs.parquet"
    whole = read_file(path)
    write_file(path, whole.set_column(whole.num_columns - 1, "ranks", pa.array([b"no ranks"] * 3, pa.binary())))
    with pytest.raises(RunFolderError, match=r"the ranks of .* are damaged"):
        find_records(tmp_path / "pack")
    pq.write_table(whole.replace_schema_metadata({"protofed": "pack-1"}), path)
    with pytest.raises(RunFolderError, match="must be of the format pack-2, found pack-1"):
        find_records(tmp_path / "pack")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunFolderError, match=r"cannot be read .* fetch the pack again"):
        find_records(tmp_path / "pack")


def test_a_grid_is_checked_against_a_pack(runs, tmp_path, capsys):
    grid = {"datasets": ["synthetic"], "methods": ["popularity"], "seeds": [0, 1, 2]}
    lines = ["[grid]", *(f"{key} = {json.dumps(value)}" for key, value in grid.items())]
    lines += ["[settings]", *(f"{key} = {json.dumps(value)}" for key, value in worlds.TINY.items())]
    (tmp_path / "grid.toml").write_text("\n".join(lines))
    pack(runs, tmp_path / "pack")
    with pytest.raises(typer.Exit) as stopped:
        report(tmp_path / "pack", check=[tmp_path / "grid.toml"], as_json=True)
    assert stopped.value.exit_code == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["done"], found["wanted"]) == (2, 3)
    assert [cell["cell"] for cell in found["lacking"]] == ["synthetic/popularity/default/seed-2"]
