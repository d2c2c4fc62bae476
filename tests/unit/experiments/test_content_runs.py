"""Runs with content: the same to the bit where nothing is known, an own rank for each new item where something is."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from worlds import CPU, tiny_config, tiny_items, tiny_log, tiny_stream, warmed_up

import protofed
from protofed.config import in_range
from protofed.errors import ConfigError, LeakError
from protofed.experiments.new_items import rank_new_items
from protofed.experiments.publish import Surroundings
from protofed.experiments.run import Experiment
from protofed.features.build import content_of
from protofed.features.content import Content, modality

FEATURES = "place,category"


@cache
def described() -> Content:
    """What the shop of the tiny world says of its items."""
    content = content_of(tiny_config(content__features=FEATURES).content, tiny_log(), tiny_items(), Path("unused"))
    assert content is not None
    return content


def nothing_known() -> Content:
    return Content(tuple(modality(m.name, m.vectors, torch.zeros_like(m.present)) for m in described().modalities))


def ranks(folder: Path) -> list[dict[str, object]]:
    return [row for file in sorted(folder.rglob("ranks*.parquet")) for row in pq.read_table(file).to_pylist()]


@pytest.mark.parametrize("method", ["frozen-no-new-rows", "frozen", "protofed-sp"])
def test_where_nothing_is_known_of_items_every_rank_is_that_of_a_run_without_features(tmp_path, method):
    for name, content in (("off", None), ("on", nothing_known())):
        config = tiny_config(method=method, content__features=FEATURES if content else "")
        Experiment(config, tiny_log(), tmp_path / "cache", CPU, content=content).run(tmp_path / name)
    assert len(list((tmp_path / "cache").glob("warm-up-*.safetensors"))) == 1  # one warm-up for both
    off, on = ranks(tmp_path / "off"), ranks(tmp_path / "on")
    assert len(off) > 100
    assert on == off


def test_a_new_item_is_ranked_at_once_and_the_saved_model_ranks_it_alike(tmp_path):
    config = tiny_config(method="frozen-no-new-rows", content__features=FEATURES)
    experiment = Experiment(config, tiny_log(), tmp_path / "cache", CPU, content=described(), keep=Surroundings())
    experiment.run(tmp_path / "run")
    model = protofed.load(tmp_path / "run").model.backbone
    first_new = tiny_stream().n_train_items(0)
    new = torch.arange(first_new, tiny_log().n_items)
    assert len(new) > 5
    assert not model.knows(new).any()
    rows = model.embed(new)
    assert len(rows.unique(dim=0)) > 1
    assert not (rows == model.mean_row).all(-1).any()
    user = tiny_log().user_ids[0].as_py()
    found = protofed.load(tmp_path / "run").device(user).recommend(tiny_log().n_items)
    scores = {row.item: row.score for row in found}
    told = [scores[tiny_log().item_ids[i].as_py()] for i in new.tolist()]
    assert len(set(told)) > len(told) // 2  # without content they would all tie


def test_settings_and_content_have_to_agree(tmp_path):
    for config, content in ((tiny_config(content__features="place"), None), (tiny_config(), described())):
        with pytest.raises(ConfigError, match="but the run was given"):
            Experiment(config, tiny_log(), tmp_path / "cache", CPU, content=content).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_content_that_counts_events_stops_a_run_before_it_begins(tmp_path):
    counts = torch.bincount(tiny_log().items.long()).float()[:, None]
    leak = Content((modality("vectors", counts, torch.ones(len(counts), dtype=torch.bool)),))
    config = tiny_config(content__features="vectors")
    with pytest.raises(LeakError, match="column 0 of vectors ranks them as their number of events"):
        Experiment(config, tiny_log(), tmp_path / "cache", CPU, content=leak).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_unknown_feature_suggests_the_nearest():
    with pytest.raises(ConfigError, match="unknown feature 'plce'; did you mean 'place'"):
        in_range(replace(tiny_config(), content=replace(tiny_config().content, features="plce")))


def test_ranks_of_new_items_tie_without_content_and_are_their_own_with_it(tmp_path):
    """On items that came after the base block, against a count by hand; the tiny world's places and categories help."""
    config = tiny_config()
    found = rank_new_items(config, tiny_log(), described(), tmp_path, CPU)
    data, (model, _) = tiny_stream(), warmed_up()
    asked = data.query_set(1, "test")
    new = [k for k, item in enumerate(asked.positives.tolist()) if item >= model.n_rows]
    assert found.items[: len(new)].tolist() == asked.positives[new].tolist()
    queries = data.queries(asked, np.array(new), config.backbone.history_length)
    scores = model.scores(model.last_hidden(queries.tokens), queries.n_items)
    for place, item in enumerate(found.items[: len(new)].tolist()):
        own = scores[place, item]
        ties = int((scores[place] == own).sum())
        assert ties == queries.n_items - model.n_rows  # all that have no row
        assert float(found.without[place]) == int((scores[place] > own).sum()) + (ties + 1) / 2
    assert found.available[: len(new)].tolist() == [queries.n_items] * len(new)
    assert len(found) == 18
    assert float(found.with_content.mean()) < 0.9 * float(found.without.mean())  # 13 of 18 rank better
