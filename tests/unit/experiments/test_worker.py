"""A cell of a bench runs as `protofed run` would run it, with what is known of items where its settings ask for it."""

import json
from dataclasses import asdict

import pyarrow.parquet as pq
import pytest
from worlds import TINY, tiny_config, tiny_items, tiny_log

from protofed.cli.tune import Asked
from protofed.cli.worker import run_cell, run_trial
from protofed.config import to_toml
from protofed.data.prepared import save_log
from protofed.errors import DataError
from protofed.experiments.bench import Job


def test_a_cell_with_features_ranks_new_items_by_them(tmp_path):
    save_log(tiny_log(), tmp_path / "described", "tiny", source={}, items=tiny_items())
    save_log(tiny_log(), tmp_path / "bare", "tiny", source={})

    def job(name: str, features: str, root: str = "described") -> Job:
        settings = {"method": "frozen-no-new-rows", "dataset": "tiny", "training__base_epochs": 1}
        config = to_toml(tiny_config(**settings, content__features=features))
        places = (str(tmp_path / place) for place in (name, root, "cache"))
        folder, where, cache = places
        return Job(folder, config, where, cache, "cpu", "test")

    ranks = {}
    for features in ("", "place,category"):
        run_cell(asdict(job(f"run-{features}", features)))
        ranks[features] = pq.read_table(tmp_path / f"run-{features}" / "ranks.parquet")["full"].to_pylist()
    assert sum(one != other for one, other in zip(*ranks.values(), strict=True)) > 10
    with pytest.raises(DataError, match=r"tiny has no item table, which content\.features = 'place' needs"):
        run_cell(asdict(job("refused", "place", root="bare")))


def test_a_trial_of_a_search_is_given_them_too(tmp_path):
    save_log(tiny_log(), tmp_path / "described", "tiny", source={}, items=tiny_items())
    flags = {"dataset": "tiny", "seed": 0, **TINY, "training.base_epochs": 1, "content.features": "place"}
    places = {"root": "described", "out": "tune", "cache": "cache"}
    places = {name: str(tmp_path / place) for name, place in places.items()}
    run_trial(asdict(Asked("frozen-no-new-rows", 0, flags, [], 2, 1, **places, device="cpu", command="test")))
    note = json.loads((tmp_path / "tune" / "frozen-no-new-rows" / "trial-00.json").read_text())
    assert note["failed"] == ""
    assert note["objective"] > 0
