"""Run folders: one run each, whole files, clear refusals."""

import json
import multiprocessing
from dataclasses import replace

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import worlds
from safetensors.torch import save_file

from protofed.config import RunConfig, read_toml, to_toml
from protofed.data.interactions import select
from protofed.errors import RunFolderError
from protofed.experiments.folder import RunFolder, finish, load_checkpoint, opened
from protofed.experiments.run import Experiment
from protofed.methods.protofed_sp import ProtoFedSP
from protofed.privacy.ledger import SHARE, read_ledger


def experiment(tmp_path, **settings):
    config = worlds.tiny_config(**{"method": "popularity", **settings})
    return Experiment(config, worlds.tiny_log(), tmp_path / "cache", worlds.CPU, "test")


def test_a_finished_folder_holds_every_file_of_the_contract(tmp_path):
    folder = experiment(tmp_path).run(tmp_path / "run")
    names = {path.name for path in folder.path.iterdir()} - {".lock"}
    assert names == {
        *("config.toml", "metrics.parquet", "per_user.parquet", "ranks.parquet", "timing.parquet", "ledger.json"),
        *("checkpoint.safetensors", "log.jsonl", "environment.json"),
    }
    assert read_toml(folder.path / "config.toml") == experiment(tmp_path).config
    assert json.loads((folder.path / "environment.json").read_text())["versions"]["torch"] == torch.__version__


def test_the_environment_says_how_many_later_users_have_events_in_the_base_block(tmp_path):
    folder = experiment(tmp_path).run(tmp_path / "run")
    log, end = worlds.tiny_log(), worlds.tiny_stream().bounds[0].end
    later, before = set(log.users[end:].tolist()), set(log.users[:end].tolist())
    told = json.loads((folder.path / "environment.json").read_text())[SHARE]
    assert told == len(later & before) / len(later)
    assert 0 < told < 1


def test_a_folder_of_other_events_is_refused_finished_or_not(tmp_path):
    began = experiment(tmp_path)
    folder = began.run(tmp_path / "run")
    log = worlds.tiny_log()
    fewer = replace(began, log=select(log, torch.arange(len(log)) > 0))
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    with pytest.raises(RunFolderError, match="holds a run on other events: the log has changed since; choose a new"):
        fewer.run(tmp_path / "run")
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before
    (folder.path / "metrics.parquet").unlink()  # as if it had been stopped
    with pytest.raises(RunFolderError, match="holds a run on other events"):
        fewer.run(tmp_path / "run")


def test_the_ledger_of_a_run_is_one_that_can_be_priced(tmp_path):
    folder = experiment(tmp_path).run(tmp_path / "run")
    assert read_ledger(folder.path / "ledger.json") == ((), "central")


def test_tables_have_the_columns_of_the_contract_and_are_sorted(tmp_path):
    folder = experiment(tmp_path).run(tmp_path / "run")
    metrics, users = folder.table("metrics"), folder.table("per_user")
    keys = ["slice_trained", "slice_tested", "split", "candidates", "subset", "metric"]
    assert metrics.column_names == [*keys, "value", "n_queries", "n_users"]
    rows = [tuple(row[key] for key in keys) for row in metrics.to_pylist()]
    assert rows == sorted(rows)
    assert len(rows) == len(set(rows))
    identity = ["user", "slice_trained", "slice_tested", "candidates", "subset"]
    assert users.column_names == [*identity, "n", "ndcg10_sum", "hr10_sum", "drift"]
    assert len(users) == len({tuple(row[key] for key in identity) for row in users.to_pylist()})


def test_per_user_sums_add_up_to_the_metrics(tmp_path):
    folder = experiment(tmp_path).run(tmp_path / "run")
    totals = {}
    for row in folder.table("per_user").to_pylist():
        key = (row["slice_trained"], row["slice_tested"], row["candidates"], row["subset"])
        n, total, users = totals.get(key, (0, 0.0, 0))
        totals[key] = (n + row["n"], total + row["ndcg10_sum"], users + 1)
    metrics = {
        (row["slice_trained"], row["slice_tested"], row["candidates"], row["subset"]): row
        for row in folder.table("metrics").to_pylist()
        if row["metric"] == "ndcg@10" and row["split"] == "test"
    }
    assert totals
    for key, (n, total, users) in totals.items():
        assert (metrics[key]["n_queries"], metrics[key]["n_users"]) == (n, users)
        assert metrics[key]["value"] == pytest.approx(total / n, abs=1e-12)


def test_ranks_are_in_the_order_of_the_queries_and_mean_what_the_metrics_say(tmp_path):
    folder = experiment(tmp_path).run(tmp_path / "run")
    ranks, data = folder.table("ranks"), worlds.tiny_stream()
    sets = [data.query_set(index, "test") for index in range(data.n_slices + 1)]
    assert ranks["slice"].to_pylist() == [asked.slice_index for asked in sets for _ in range(len(asked))]
    names = data.log.user_ids.to_pylist()
    assert ranks["user"].to_pylist() == [str(names[user]) for asked in sets for user in asked.users.tolist()]
    assert max(ranks["full"].to_pylist()) == 21
    metrics = [row for row in folder.table("metrics").to_pylist() if row["slice_trained"] == row["slice_tested"]]
    rows = ranks.to_pylist()
    for found in [row for row in metrics if row["split"] == "test" and row["metric"] in ("mrr@20", "hr@10")]:
        kind = found["candidates"]
        asked = [row for row in rows if row["slice"] == found["slice_tested"] and row[found["subset"]]]
        assert all(row[kind] >= 1 for row in asked)
        worth = [(1 / row[kind] if row[kind] <= 20 else 0, row[kind] <= 10) for row in asked]
        by_hand = [value[found["metric"] == "hr@10"] for value in worth]
        assert found["value"] == pytest.approx(sum(by_hand) / len(asked), abs=1e-12)
    assert all((row["sampled_hard"] == 0) == row["novel"] for row in rows)


def test_a_run_begun_before_ranks_and_drift_were_kept_ends_without_its_ranks(tmp_path):
    folder = experiment(tmp_path).run(tmp_path / "run")
    whole = {name: folder.table(name) for name in ("metrics", "per_user", "timing", "ranks")}
    (folder.path / "slices").mkdir()
    for name, table in whole.items():
        key = "slice" if "slice" in table.column_names else "slice_trained"
        for index in range(3):
            part = table.filter(pc.equal(table[key], index))
            if name == "per_user" and index == 0:
                part = part.drop_columns("drift")
            if name != "ranks" or index > 0:
                pq.write_table(part, folder.path / "slices" / f"{name}-{index}.parquet")
    for name in whole:
        (folder.path / f"{name}.parquet").unlink()
    finish(folder, 2)
    assert not (folder.path / "ranks.parquet").exists()
    assert folder.table("metrics") == whole["metrics"]
    assert folder.table("per_user").drop_columns("drift") == whole["per_user"].drop_columns("drift")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_and_another_cache_changes_nothing(tmp_path):
    first = experiment(tmp_path / "a").run(tmp_path / "a" / "run")
    second = experiment(tmp_path / "b").run(tmp_path / "b" / "run")
    for name in ("metrics.parquet", "per_user.parquet", "ranks.parquet"):
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes()


def test_a_finished_run_is_kept_as_it_is(tmp_path):
    folder = experiment(tmp_path).run(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in folder.path.glob("*.parquet")}
    experiment(tmp_path).run(tmp_path / "run")
    assert {path: path.stat().st_mtime_ns for path in folder.path.glob("*.parquet")} == before


def test_a_folder_with_another_run_is_refused_and_left_alone(tmp_path):
    folder = experiment(tmp_path).run(tmp_path / "run")
    before = (folder.path / "config.toml").read_bytes()
    with pytest.raises(RunFolderError, match=r"holds another run \(seed = 0, asked for seed = 1\); choose"):
        experiment(tmp_path, seed=1).run(tmp_path / "run")
    assert (folder.path / "config.toml").read_bytes() == before


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="is not empty and holds no run"):
        experiment(tmp_path).run(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(RunFolderError, match="is a file"):
        experiment(tmp_path).run(tmp_path / "run")


def hold(path, config, ready, done):
    with opened(path, config):
        ready.set()
        done.wait(30)


@pytest.mark.slow
def test_a_second_process_in_the_same_folder_is_refused(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    config = experiment(tmp_path).config
    holder = context.Process(target=hold, args=(tmp_path / "run", config, ready, done))
    holder.start()
    try:
        assert ready.wait(60)
        with pytest.raises(RunFolderError, match="another process is running"), opened(tmp_path / "run", config):
            pass
    finally:
        done.set()
        holder.join()


def test_a_damaged_checkpoint_is_one_clear_line(tmp_path):
    save_file({"a": torch.zeros(3)}, tmp_path / "checkpoint.safetensors", metadata={"slice": "0"})
    whole = (tmp_path / "checkpoint.safetensors").read_bytes()
    (tmp_path / "checkpoint.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunFolderError, match=r"cannot be read .*; delete it to start the run again"):
        load_checkpoint(RunFolder(tmp_path))


def test_half_written_files_of_a_killed_process_are_cleared(tmp_path):
    run = experiment(tmp_path)
    with opened(tmp_path / "run", run.config) as folder:
        leftover = folder.path / "metrics.parquet.12345.unfinished"
        leftover.write_bytes(b"half")
    assert run.run(tmp_path / "run").finished
    assert not leftover.exists()
    assert pq.read_metadata(tmp_path / "run" / "metrics.parquet").num_rows > 0


def test_a_folder_from_before_a_setting_existed_is_still_the_same_run(tmp_path):
    config = RunConfig()
    with opened(tmp_path / "run", config):
        pass
    written = tmp_path / "run" / "config.toml"
    older = to_toml(config).replace("\n[hyper]\n", "").replace('variant = "standard"\n', "")
    written.write_text(older, encoding="utf-8")
    with opened(tmp_path / "run", config):
        assert written.read_text(encoding="utf-8") == to_toml(config)
    written.write_text(older, encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"holds another run \(seed = 0, asked for seed = 1\)"):
        opened(tmp_path / "run", RunConfig(seed=1)).__enter__()


def test_a_resumed_run_does_not_start_its_method_again(tmp_path, monkeypatch):
    def stop(task, done, total, note=""):
        if note == "slice 1 done":
            raise KeyboardInterrupt

    settings = {"method": "protofed-sp", "protofed__local_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        experiment(tmp_path, **settings).run(tmp_path / "run", stop)

    def started_again(self, world):
        raise AssertionError("the base block was prepared again")

    monkeypatch.setattr(ProtoFedSP, "start", started_again)
    assert experiment(tmp_path, **settings).run(tmp_path / "run").finished
