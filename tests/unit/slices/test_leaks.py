"""Leaks planted through the real pipeline, each caught under its own name."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import worlds

from protofed.backbone.training import PlainDescent
from protofed.errors import LeakError
from protofed.experiments import run as runner
from protofed.experiments.run import Experiment
from protofed.methods.baselines.finetune_last import FineTuneLast
from protofed.methods.catalogue import Entry
from protofed.methods.frozen import BackboneState, Frozen
from protofed.methods.popularity import Popularity, PopularityState
from protofed.slices import stream as streams
from protofed.slices.leaks import Evidence, check_candidates, check_evidence
from protofed.slices.stream import SliceStream


def run_planted(tmp_path, monkeypatch, method=None):
    """The whole runner on the tiny log, with `method` in place of the one the config names."""
    if method is not None:
        monkeypatch.setattr(runner, "method_named", lambda name: Entry(method, "planted"))
    experiment = Experiment(worlds.tiny_config(), worlds.tiny_log(), tmp_path / "cache", worlds.CPU)
    return experiment.run(tmp_path / "run")


def test_the_intact_pipeline_passes(tmp_path, monkeypatch):
    assert run_planted(tmp_path, monkeypatch, Popularity()).finished


def test_a_negative_from_the_future_is_caught(tmp_path, monkeypatch):
    honest = streams.sample_negatives

    def draw(keys, n_available, users, forbidden, n):
        drawn = honest(keys, n_available, users, forbidden, n)
        drawn[0, 0] = worlds.tiny_log().n_items - 1  # the item that appears last
        return drawn

    monkeypatch.setattr(streams, "sample_negatives", draw)
    with pytest.raises(LeakError, match="a negative from the future"):
        run_planted(tmp_path, monkeypatch, Popularity())


def test_a_positive_among_the_negatives_is_caught():
    data = SliceStream(worlds.tiny_log(), worlds.tiny_config().stream)
    asked = data.query_set(1, "test")
    spoiled = asked.negatives.clone()
    spoiled[3, 0] = asked.positives[3]
    with pytest.raises(LeakError, match="a positive among the negatives"):
        check_candidates(data, replace(asked, negatives=spoiled))


class TrainsOnValidation(FineTuneLast):
    def learn(self, world, state, slice_, descend):
        bounds = slice_.bounds[-1]
        wider = replace(bounds, train_end=bounds.val_end)
        return super().learn(world, state, replace(slice_, bounds=(*slice_.bounds[:-1], wider)), descend)


def test_validation_events_in_training_are_caught(tmp_path, monkeypatch):
    with pytest.raises(LeakError, match="validation events in training"):
        run_planted(tmp_path, monkeypatch, TrainsOnValidation())


class MakesRowsEarly(Frozen):
    def learn(self, world, state, slice_, descend):
        return super().learn(world, state, replace(slice_, n_train_items=slice_.n_train_items + 1), descend)


def test_an_item_row_that_exists_too_early_is_caught(tmp_path, monkeypatch):
    with pytest.raises(LeakError, match="an item row that exists too early"):
        run_planted(tmp_path, monkeypatch, MakesRowsEarly())


class CountsValidation(Popularity):
    def learn(self, world, state, slice_, descend):
        start, end = slice_.bounds[-1].start, slice_.bounds[-1].val_end
        items = slice_.past.items[slice_.past.place[np.arange(start, end)]]
        return PopularityState(torch.from_numpy(np.bincount(items)), slice_.index), {}


def test_popularity_counted_outside_the_train_part_is_caught(tmp_path, monkeypatch):
    with pytest.raises(LeakError, match="popularity counted outside the train part"):
        run_planted(tmp_path, monkeypatch, CountsValidation())


def test_popularity_counted_on_the_test_part_is_caught():
    data = SliceStream(worlds.tiny_log(), worlds.tiny_config().stream)
    bounds = data.bounds[1]
    counted = torch.bincount(data.log.items[bounds.start : bounds.end].long())
    with pytest.raises(LeakError, match="popularity counted outside the train part"):
        check_evidence(data, 1, Evidence(1, popularity=counted))


class AnswersWithTomorrow(Frozen):
    def learn(self, world, state, slice_, descend):
        learned, diagnostics = super().learn(world, state, slice_, descend)
        return BackboneState(learned.backbone, learned.slice_index + 1, learned.newest_target), diagnostics


def test_a_state_of_a_later_slice_is_caught(tmp_path, monkeypatch):
    with pytest.raises(LeakError, match="a state of a later slice"):
        run_planted(tmp_path, monkeypatch, AnswersWithTomorrow())


def test_a_leak_leaves_no_finished_run(tmp_path, monkeypatch):
    with pytest.raises(LeakError):
        run_planted(tmp_path, monkeypatch, MakesRowsEarly())
    assert not (tmp_path / "run" / "metrics.parquet").exists()


def test_evidence_of_honest_methods_passes_at_every_slice():
    data = SliceStream(worlds.tiny_log(), worlds.tiny_config().stream)
    world = worlds.learned("frozen", 0).world
    method, state = Frozen(), None
    for index in range(data.n_slices + 1):
        state = method.start(world) if index == 0 else method.learn(world, state, data.slice_(index), PlainDescent())[0]
        check_evidence(data, index, method.evidence(state))
