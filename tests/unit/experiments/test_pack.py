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
from protofed.experiments.pack import OFF_DIAGONAL, pack, query_drift
from protofed.experiments.packed import decoded, encoded, index_name, numbered, read_packed, write_packed
from protofed.experiments.run import Experiment
from protofed.experiments.unpack import is_pack, readable, unpack

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


def diagonal(folder: Path, name: str) -> dict[tuple, dict]:
    """The test rows of A[t, t] that a report reads, by what they are about."""
    keys = ("user", "slice_tested", "candidates", "subset", "metric")
    rows = [row for row in pq.read_table(folder / name).to_pylist() if row["slice_trained"] == row["slice_tested"]]
    rows = [row for row in rows if row.get("split", "test") == "test"]
    rows = [row for row in rows if row.get("metric", "hr@10") in ("ndcg@10", "hr@10")]
    return {tuple(row[key] for key in keys if key in row): row for row in rows}


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
    unpack(tmp_path / "pack", tmp_path / "back")
    for method, seed in SETTINGS:
        name = f"{method}/seed-{seed}"
        before, after = (diagonal(folder / name, "per_user.parquet") for folder in (runs, tmp_path / "back"))
        ids, names = (sorted({key[0] for key in rows}) for rows in (before, after))
        called = dict(zip(ids, names, strict=True))
        assert set(after) == {(called[user], *rest) for user, *rest in before}
        for (user, *rest), row in before.items():
            found = after[called[user], *rest]
            assert {key: found[key] for key in found if key != "user"} == {
                key: row[key] for key in row if key != "user"
            }


def test_metrics_are_rebuilt_on_the_diagonal_and_kept_off_it(runs, tmp_path):
    pack(runs, tmp_path / "pack")
    unpack(tmp_path / "pack", tmp_path / "back", users=False)
    assert not list((tmp_path / "back").rglob("per_user.parquet"))
    before, after = (diagonal(folder / "frozen/seed-0", "metrics.parquet") for folder in (runs, tmp_path / "back"))
    assert set(after) == set(before)
    for key, row in before.items():
        assert after[key]["value"] == pytest.approx(row["value"], abs=1e-14)
        assert (after[key]["n_queries"], after[key]["n_users"]) == (row["n_queries"], row["n_users"])
    off = [
        row
        for row in pq.read_table(runs / "frozen/seed-0/metrics.parquet").to_pylist()
        if row["slice_trained"] != row["slice_tested"]
        and row["metric"] == "ndcg@10"
        and f"{row['candidates']}/{row['subset']}" in OFF_DIAGONAL
    ]
    found = pq.read_table(tmp_path / "back/frozen/seed-0/metrics.parquet").to_pylist()
    assert [row for row in found if row["slice_trained"] != row["slice_tested"]] == off


def test_the_other_files_come_back_as_they_were(runs, tmp_path):
    pack(runs, tmp_path / "pack")
    unpack(tmp_path / "pack", tmp_path / "back")
    for name in ("config.toml", "environment.json", "ledger.json", "log.jsonl"):
        assert (tmp_path / "back/frozen/seed-0" / name).read_bytes() == (runs / "frozen/seed-0" / name).read_bytes()
    timing = [pq.read_table(folder / "frozen/seed-0/timing.parquet") for folder in (runs, tmp_path / "back")]
    assert timing[0].to_pylist() == timing[1].to_pylist()


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
    (index,) = set(read_packed(tmp_path / "pack" / "synthetic.queries.parquet")["index"].to_pylist())
    config = worlds.tiny_config(method="popularity", stream__n_slices=3)
    Experiment(config, worlds.tiny_log(), tmp_path / "cache", worlds.CPU, "test").run(tmp_path / "other" / "three")
    pack(tmp_path / "other", tmp_path / "pack")
    held = read_packed(tmp_path / "pack" / "synthetic.runs.parquet")
    assert held["queries"].to_pylist().count(index) == 3
    assert set(held["queries"].to_pylist()) == set(
        read_packed(tmp_path / "pack" / "synthetic.queries.parquet")["index"].to_pylist()
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
    held = read_packed(tmp_path / "pack" / "synthetic.runs.parquet").to_pylist()
    assert sum(row["environment"] == '{"device": "another"}' for row in held) == 1


def test_of_two_folders_with_one_config_the_one_with_ranks_is_packed(copied, tmp_path):
    shutil.copytree(copied / "frozen/seed-0", copied / "a-copy")
    (copied / "a-copy/ranks.parquet").unlink()
    done = pack(copied, tmp_path / "pack")
    assert (done.runs, done.repeated, done.without_ranks) == (3, 1, 0)
    held = read_packed(tmp_path / "pack" / "synthetic.runs.parquet")
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
    assert index_name(numbered(renamed)) == index_name(queries)
    assert index_name(queries.slice(1)) != index_name(queries)


@given(st.lists(st.tuples(*[st.integers(0, 21)] * 4, st.booleans()), max_size=60))
def test_ranks_survive_their_code(rows):
    ranks = np.array([row[:4] for row in rows], dtype=np.uint8).reshape(-1, 4).T
    repeat = np.array([row[4] for row in rows], dtype=bool)
    assert (decoded(encoded(ranks, repeat), repeat) == ranks).all()


def test_the_query_drift_users_goes_with_the_queries_whichever_run_tells_it(copied, tmp_path):
    for path in copied.rglob("per_user.parquet"):
        pq.write_table(pq.read_table(path).drop_columns("drift"), path)  # as earlier versions wrote it
    told = copied / "popularity/seed-0"
    users = pq.read_table(told / "per_user.parquet")
    asked = zip(users["user"].to_pylist(), users["slice_tested"].to_pylist(), strict=True)
    drift = [None if tested == 0 else len(user) + tested / 4 for user, tested in asked]
    users = users.append_column("drift", pa.array(drift, pa.float64()))
    pq.write_table(users, told / "per_user.parquet")
    pack(copied, tmp_path / "pack")
    unpack(tmp_path / "pack", tmp_path / "back")
    before, after = diagonal(told, "per_user.parquet"), diagonal(tmp_path / "back/frozen/seed-0", "per_user.parquet")
    called = dict(zip(*(sorted({key[0] for key in rows}) for rows in (before, after)), strict=True))
    assert all(after[called[user], *rest]["drift"] == row["drift"] for (user, *rest), row in before.items())
    ranks = pq.read_table(told / "ranks.parquet")
    assert query_drift(ranks, users).null_count == sum(index == 0 for index in ranks["slice"].to_pylist())


def test_runs_from_two_places_under_one_name_stay_apart(runs, tmp_path):
    pack(runs / "popularity" / "seed-0", tmp_path / "pack")
    shutil.copytree(runs / "frozen" / "seed-0", tmp_path / "elsewhere" / "seed-0")
    pack(tmp_path / "elsewhere", tmp_path / "pack")
    unpack(tmp_path / "pack", tmp_path / "back")
    configs = {path.read_text() for path in (tmp_path / "back").glob("seed-0-*/config.toml")}
    assert configs == {to_toml(worlds.tiny_config(method=method)) for method in ("popularity", "frozen")}


def test_what_is_no_pack_is_read_where_it_is(runs, tmp_path):
    assert not is_pack(runs)
    with readable(runs) as folder:
        assert folder == runs
    pack(runs, tmp_path / "pack")
    with readable(tmp_path / "pack") as folder:
        assert (folder / "frozen/seed-0/metrics.parquet").is_file()
    assert not folder.exists()


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
    whole = read_packed(path)
    outside = whole.set_column(0, "folder", pa.array(["../../outside", "a", "b"]))
    write_packed(path, outside)
    with pytest.raises(RunFolderError, match=r"names a folder outside of the pack, '\.\./\.\./outside'"):
        unpack(tmp_path / "pack", tmp_path / "back")
    write_packed(path, whole.set_column(whole.num_columns - 1, "ranks", pa.array([b"no ranks"] * 3, pa.binary())))
    with pytest.raises(RunFolderError, match=r"the ranks of .* are damaged"):
        unpack(tmp_path / "pack", tmp_path / "back")
    pq.write_table(whole.replace_schema_metadata({"protofed": "pack-2"}), path)
    with pytest.raises(RunFolderError, match="must be of the format pack-1, found pack-2"):
        unpack(tmp_path / "pack", tmp_path / "back")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunFolderError, match=r"cannot be read .* fetch the pack again"):
        unpack(tmp_path / "pack", tmp_path / "back")


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
