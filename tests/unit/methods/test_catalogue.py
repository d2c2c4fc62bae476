"""The table of methods: names that can be typed, summaries that fit a line and are true, settings that exist."""

import dataclasses
import re
from dataclasses import replace

import pytest
import torch
from worlds import learned, tiny_stream

from protofed.backbone.new_items import with_new_rows
from protofed.backbone.training import PlainDescent
from protofed.config import RunConfig, override
from protofed.errors import ConfigError
from protofed.methods.catalogue import METHODS, method_named


@pytest.mark.parametrize("name", METHODS)
def test_every_entry_has_a_typeable_name_a_short_summary_and_settings_that_exist(name):
    entry = method_named(name)
    assert entry is METHODS[name]
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
    assert 10 < len(entry.summary) <= 90
    assert "\n" not in entry.summary
    config = override(RunConfig(), entry.settings)
    assert (config == RunConfig()) == (not entry.settings)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_a_frozen_dataclass_of_hyper_parameters(name):
    method = METHODS[name].method
    assert dataclasses.is_dataclass(method)
    assert type(method).__dataclass_params__.frozen
    assert method == dataclasses.replace(method)


def weights(name: str, *, before: bool = False) -> dict[str, torch.Tensor]:
    run = learned(name)
    return (run.before if before else run.state).backbone.state_dict()


def test_frozen_learns_the_rows_of_new_items_and_nothing_else():
    old, new = weights("frozen", before=True), weights("frozen")
    n_old = len(old["items"])
    assert torch.equal(new["items"][:n_old], old["items"])
    assert new["has_row"][n_old:].any()
    assert all(torch.equal(new[key], old[key]) for key in old if key not in ("items", "has_row", "mean_row"))
    started, _ = with_new_rows(learned("frozen").before.backbone, tiny_stream().slice_(1))
    assert not torch.equal(new["items"][n_old:], started.items[n_old:])


def test_frozen_without_new_rows_stays_as_it_was_warmed_up():
    old, new = weights("frozen-no-new-rows", before=True), weights("frozen-no-new-rows")
    assert old.keys() == new.keys()
    assert all(torch.equal(new[key], old[key]) for key in old)


def test_finetune_last_moves_every_weight():
    old, new = weights("finetune-last", before=True), weights("finetune-last")
    assert all(not torch.equal(new[key][: len(old[key])], old[key]) for key in old if key != "has_row")


def test_full_retrain_forgets_the_state_it_comes_from():
    run = learned("full-retrain")
    elsewhere = replace(run.before, backbone=learned("finetune-last").state.backbone)
    again, _ = run.method.learn(run.world, elsewhere, tiny_stream().slice_(1), PlainDescent())
    assert all(torch.equal(tensor, weights("full-retrain")[key]) for key, tensor in again.backbone.state_dict().items())


def test_a_mistyped_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="unknown method 'finetune-lst'; did you mean 'finetune-last'"):
        method_named("finetune-lst")


def test_a_name_like_no_other_is_answered_with_all_of_them():
    with pytest.raises(ConfigError, match="known: popularity, frozen, "):
        method_named("%%%")
