"""What a run says beyond ranks: shares of the Top-10 and drift, as loops over the log have them."""

from collections import Counter

import numpy as np
import pytest
import torch
import worlds

from protofed.evaluation.exposure import GROUPS
from protofed.experiments.evaluate import drift_of, item_groups
from protofed.experiments.folder import RunFolder
from protofed.experiments.run import Experiment
from protofed.slices.histories import trimmed


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> RunFolder:
    root = tmp_path_factory.mktemp("popularity")
    config = worlds.tiny_config(method="popularity")
    return Experiment(config, worlds.tiny_log(), root / "cache", worlds.CPU, "test").run(root / "run")


def told(folder, group, kind, t):
    name = f"exposure_{group}@10" if kind == "exposure" else f"events_{group}"
    (row,) = [row for row in folder.table("metrics").to_pylist() if (row["metric"], row["slice_tested"]) == (name, t)]
    assert (row["slice_trained"], row["split"], row["candidates"], row["subset"]) == (t, "test", "full", "all")
    return row


def slow_groups(data, t):
    """Which items are head and tail, counting train events up to slice t one by one."""
    n_items = data.query_set(t, "test").n_items
    counts = Counter()
    for s in range(t + 1):
        for event in range(*data.bounds[s].part("train")):
            counts[int(data.log.items[event])] += 1
    order = sorted(range(n_items), key=lambda item: (-counts[item], item))
    fifth = round(0.2 * n_items)
    return {**{item: "head" for item in order[:fifth]}, **{item: "tail" for item in order[-fifth:]}}, counts


@pytest.mark.parametrize("t", [0, 1, 2])
def test_groups_are_fifths_of_the_items_by_train_events_up_to_the_slice(t):
    data = worlds.tiny_stream()
    slow, _ = slow_groups(data, t)
    asked = data.query_set(t, "test")
    found = [GROUPS[place] for place in item_groups(data, asked).tolist()]
    assert found == [slow.get(item, "middle") for item in range(asked.n_items)]


@pytest.mark.parametrize("t", [0, 1, 2])
def test_shares_of_events_are_those_of_the_true_items(folder, t):
    data = worlds.tiny_stream()
    slow, _ = slow_groups(data, t)
    positives = data.query_set(t, "test").positives.tolist()
    met = Counter(slow.get(item, "middle") for item in positives)
    for group in GROUPS:
        row = told(folder, group, "events", t)
        assert row["value"] == pytest.approx(met[group] / len(positives))
        assert row["n_queries"] == len(positives)


@pytest.mark.parametrize("t", [1, 2])
def test_popularity_shows_the_ten_most_frequent_items_of_the_slice_to_everybody(folder, t):
    data = worlds.tiny_stream()
    slow, _ = slow_groups(data, t)
    counts = data.slice_(t).train_counts()
    scores = torch.zeros(data.query_set(t, "test").n_items)
    scores[: len(counts)] = counts.float()
    tenth = scores.topk(10).values[-1]
    sure = [item for item in range(len(scores)) if scores[item] > tenth]
    level = [item for item in range(len(scores)) if scores[item] == tenth]
    for group in GROUPS:
        places = sum(slow.get(item, "middle") == group for item in sure)
        shared = sum(slow.get(item, "middle") == group for item in level) * (10 - len(sure)) / len(level)
        assert told(folder, group, "exposure", t)["value"] == pytest.approx((places + shared) / 10, abs=1e-6)


@pytest.mark.slow
def test_exposure_of_a_model_is_that_of_its_ranked_lists(tmp_path):
    config = worlds.tiny_config(method="frozen")
    folder = Experiment(config, worlds.tiny_log(), tmp_path / "cache", worlds.CPU, "test").run(tmp_path / "run")
    learned = worlds.learn_once("frozen")
    data, asked = learned.data, learned.data.query_set(1, "test")
    slow, _ = slow_groups(data, 1)
    places = Counter()
    for query in range(len(asked)):
        queries = trimmed(data.queries(asked, np.array([query]), config.backbone.history_length))
        for item in learned.scores(queries)[0].topk(10).indices.tolist():
            places[slow.get(item, "middle")] += 1
    for group in GROUPS:
        assert told(folder, group, "exposure", 1)["value"] == pytest.approx(places[group] / 10 / len(asked), abs=2e-3)


def test_drift_is_kept_for_the_diagonal_alone_and_is_the_logs(folder):
    data = worlds.tiny_stream()
    ids = data.log.user_ids.cast("string").to_pylist()
    by_slice = {t: drift_of(data, data.query_set(t, "test")) for t in range(3)}
    known = 0
    for row in folder.table("per_user").to_pylist():
        expected = by_slice[row["slice_tested"]][ids.index(row["user"])]
        if row["slice_trained"] != row["slice_tested"] or np.isnan(expected):
            assert row["drift"] is None
        else:
            assert row["drift"] == expected
            known += 1
    assert known > 100


def test_nobody_drifts_in_the_base_block_and_later_events_of_the_log_change_nothing():
    data = worlds.tiny_stream()
    assert np.isnan(drift_of(data, data.query_set(0, "test"))).all()
    other = worlds.another_future(2)  # shuffled after slice 2's validation part
    asked = data.query_set(1, "test")
    np.testing.assert_array_equal(drift_of(data, asked), drift_of(other, other.query_set(1, "test")))


def test_a_run_that_older_code_began_is_finished_without_the_drift_of_its_first_slices(tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    from protofed.experiments import folder as folders

    saved = folders.save_slice

    def older(run, index, tables, state):
        if index == 0:
            tables = {**tables, "per_user": tables["per_user"].drop_columns(["drift"])}
        saved(run, index, tables, state)

    monkeypatch.setattr(folders, "save_slice", older)
    config = worlds.tiny_config(method="popularity")
    run = Experiment(config, worlds.tiny_log(), tmp_path / "cache", worlds.CPU, "test").run(tmp_path / "run")
    rows = pq.read_table(run.path / "per_user.parquet").to_pylist()
    assert all(row["drift"] is None for row in rows if row["slice_tested"] == 0)
    assert any(row["drift"] is not None for row in rows)
