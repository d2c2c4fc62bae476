"""The tables of a bench folder: every metric once, the same bytes for the same finished runs."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
import worlds

from protofed.config import to_toml
from protofed.errors import RunFolderError
from protofed.experiments.run import Experiment
from protofed.experiments.tidy import RESULTS_SCHEMA, RUNS_SCHEMA, finished_runs, write_tables

TABLES = ("results.parquet", "runs.parquet")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs of popularity with two seeds, and of protofed-sp."""
    root = tmp_path_factory.mktemp("runs")
    chosen = (("popularity", 0), ("popularity", 10), ("popularity", 9), ("protofed-sp", 0))
    for method, seed in chosen:
        config = worlds.tiny_config(seed, method=method)
        Experiment(config, worlds.tiny_log(), root / "cache", worlds.CPU, "test").run(root / f"{method}-{seed}")
    return root


def place(runs, out, *names):
    for name in names:
        method, seed = name.rsplit("-", 1)
        shutil.copytree(runs / name, out / "synthetic" / method / "default" / f"seed-{seed}")
    out.mkdir(exist_ok=True)
    return out


def test_every_metric_of_every_run_is_in_the_table_once(tmp_path, runs):
    out = place(runs, tmp_path / "bench", "popularity-0", "protofed-sp-0")
    write_tables(out)
    table = pq.read_table(out / "results.parquet")
    assert table.schema.equals(RESULTS_SCHEMA)
    rows = table.to_pylist()
    for name, label in (("popularity-0", "popularity"), ("protofed-sp-0", "protofed-sp (reference)")):
        source = pq.read_table(runs / name / "metrics.parquet").to_pylist()
        mine = [row for row in rows if row["label"] == label]
        assert len(mine) == len(source)
        for row, original in zip(mine, source, strict=True):
            assert row["value"] == pytest.approx(original["value"], rel=1e-6)
            assert {key: row[key] for key in original if key != "value"} == {
                key: value for key, value in original.items() if key != "value"
            }
            assert (row["dataset"], row["preset"], row["variant"], row["seed"]) == ("synthetic", "small", "default", 0)


def test_seeds_are_ordered_as_numbers(tmp_path, runs):
    out = place(runs, tmp_path / "bench", "popularity-10", "popularity-9")
    assert [run.config.seed for run in finished_runs(out)] == [9, 10]


def test_the_tables_depend_on_the_finished_runs_and_not_on_their_order(tmp_path, runs):
    names = ["popularity-0", "popularity-10", "popularity-9", "protofed-sp-0"]
    one, other = tmp_path / "one", tmp_path / "other"
    for name in names:
        write_tables(place(runs, one, name))
    for name in reversed(names):
        write_tables(place(runs, other, name))
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in TABLES)


def test_a_run_that_is_not_finished_has_no_rows(tmp_path, runs):
    out = place(runs, tmp_path / "bench", "popularity-0", "popularity-9")
    (out / "synthetic" / "popularity" / "default" / "seed-9" / "metrics.parquet").unlink()
    write_tables(out)
    assert set(pq.read_table(out / "results.parquet")["seed"].to_pylist()) == {0}


def test_an_empty_bench_has_empty_tables(tmp_path):
    write_tables(tmp_path)
    assert pq.read_table(tmp_path / "results.parquet").equals(RESULTS_SCHEMA.empty_table())
    assert pq.read_table(tmp_path / "runs.parquet").equals(RUNS_SCHEMA.empty_table())


def test_the_runs_table_says_what_was_released_how_long_it_took_and_by_which_command(tmp_path, runs):
    out = place(runs, tmp_path / "bench", "popularity-0", "protofed-sp-0")
    write_tables(out)
    plain, private = pq.read_table(out / "runs.parquet").to_pylist()
    assert plain["folder"] == "synthetic/popularity/default/seed-0"
    assert [plain[key] for key in ("trust", "releases", "delta")] == [None] * 3
    assert (private["trust"], private["delta"]) == ("central", 1e-5)
    (release,) = json.loads(private["releases"])
    assert [release[key] for key in ("noise_multiplier", "sampling_rate", "count")] == [1.0, 0.05, 8]
    timing = pq.read_table(runs / "protofed-sp-0" / "timing.parquet").to_pylist()
    learn = sum(row["seconds"] for row in timing if row["stage"] == "learn")
    assert private["learn_seconds"] == pytest.approx(learn)
    assert (plain["command"], plain["threads"]) == ("test", json.loads(environment(runs))["threads"])
    assert plain["warm_up_epochs"] == private["warm_up_epochs"] <= 8
    assert plain["config_sha256"] != private["config_sha256"]


def environment(runs):
    return (runs / "popularity-0" / "environment.json").read_text()


def test_a_damaged_file_is_one_line_that_names_it(tmp_path, runs):
    out = place(runs, tmp_path / "bench", "popularity-0")
    write_tables(out)
    before = (out / "results.parquet").read_bytes()
    folder = out / "synthetic" / "popularity" / "default" / "seed-0"
    (folder / "metrics.parquet").write_bytes(b"half")
    with pytest.raises(
        RunFolderError, match=r"seed-0/metrics\.parquet is not a readable parquet file .*; delete its folder"
    ) as raised:
        write_tables(out)
    assert "\n" not in str(raised.value)
    assert (out / "results.parquet").read_bytes() == before
    assert not list(out.glob("*.unfinished"))
    (folder / "config.toml").write_text(to_toml(worlds.tiny_config()) + "[colours]\n")
    with pytest.raises(RunFolderError, match=r"seed-0/config\.toml: unknown config key 'colours'"):
        write_tables(out)
