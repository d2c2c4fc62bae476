"""A search sees the base block alone, repeats under its seed, never repeats work, and no failure wins it."""

import csv
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import worlds
from hypothesis import given
from hypothesis import strategies as st

from protofed.cli.run import settle
from protofed.config import RunConfig, override, read_toml
from protofed.data.interactions import fingerprint, select
from protofed.errors import ConfigError, DataError, LeakError, MachineError, RunFolderError
from protofed.evaluation.forgetting import accuracy
from protofed.experiments import folder as folders
from protofed.experiments import tuning as module
from protofed.experiments.folder import RunFolder
from protofed.experiments.matrices import main_values
from protofed.experiments.run import Experiment
from protofed.experiments.tuning import (
    Outcome,
    Trial,
    Tuning,
    base_block,
    best_of,
    claim_folder,
    drawn_trials,
    known_outcome,
    note_of,
    pseudo_config,
    run_trial,
    take_over,
    trial_folder,
    tried,
    tuning,
    value_at,
    write_best,
    write_table,
)
from protofed.files import save_tensors
from protofed.methods.catalogue import METHODS
from protofed.methods.search_spaces import SPACES, space_of
from protofed.slices.stream import SliceStream

HARDLY_LEARNS = 1e-9  # so that some other rate wins


def searched(method: str = "finetune-last", log=None, n_trials: int = 3, **settings) -> Tuning:
    settings = {"training__slice_learning_rate": HARDLY_LEARNS} | settings
    config = worlds.tiny_config(method=method, **settings)
    return tuning(config, log or worlds.tiny_log(), n_slices=2, n_trials=n_trials)


def run_all(search: Tuning, out: Path) -> list[Outcome]:
    found = [run_trial(search, trial, out, out.parent / "cache") for trial in search.trials]
    write_table(out)
    write_best(search, out)
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Tuning, Path, list[Outcome]]:
    out = tmp_path_factory.mktemp("tune") / "out"
    search = searched()
    return search, out, run_all(search, out)


@pytest.mark.parametrize("name", METHODS)
def test_trial_0_is_the_defaults_and_the_others_are_different_points_of_the_grid(name):
    config = settle({"method": name})
    space = space_of(name, config.variant)
    first, *others = drawn_trials(config, space, 20)
    size = math.prod(len(values) for values in space.values())
    inside = all(value_at(config, key) in values for key, values in space.items())
    assert (first.number, first.settings) == (0, {})
    assert len(others) == min(19, size - inside)
    assert [trial.number for trial in others] == list(range(1, len(others) + 1))
    assert len({json.dumps(trial.settings) for trial in others}) == len(others)
    defaults = {key: value_at(config, key) for key in space}
    for trial in others:
        assert trial.settings != defaults
        assert all(trial.settings[key] in values for key, values in space.items())
        assert set(trial.settings) == set(space)


@given(st.integers(0, 2**32), st.integers(1, 70))
def test_the_same_seed_draws_the_same_trials_and_more_trials_only_add_some(seed, n_trials):
    config, space = RunConfig(method="ewc", seed=seed), SPACES["ewc"]
    drawn = drawn_trials(config, space, n_trials)
    assert drawn == drawn_trials(config, space, n_trials)
    assert drawn == drawn_trials(config, space, 100)[:n_trials]
    assert len(drawn_trials(config, space, 100)) == 6 * 2 * 3  # the defaults are one of them


def test_another_seed_or_method_draws_other_trials():
    space = {"training.slice_epochs": tuple(range(50))}
    drawn = drawn_trials(RunConfig(method="ewc"), space, 6)
    assert drawn != drawn_trials(RunConfig(method="ewc", seed=1), space, 6)
    assert drawn != drawn_trials(RunConfig(method="mas"), space, 6)


def test_a_setting_that_is_held_is_not_searched():
    config = worlds.tiny_config(method="ewc")
    search = tuning(config, worlds.tiny_log(), n_slices=2, n_trials=50, held=["hyper.strength"])
    assert len(search.trials) == 1 + 2 * 3  # the tiny rate is not on the grid
    assert all("hyper.strength" not in trial.settings for trial in search.trials)


def test_the_pseudo_log_ends_before_the_base_blocks_test_part():
    log, stream = worlds.tiny_log(), worlds.tiny_stream()
    block = base_block(log, worlds.tiny_config(), 2)
    end = stream.bounds[0].val_end
    assert len(block) == end < stream.bounds[0].end
    assert torch.equal(block.times, log.times[:end])
    assert block.n_items == int(log.items[:end].max()) + 1 < log.n_items
    assert block.n_users == int(log.users[:end].max()) + 1


def test_trials_are_byte_identical_whatever_happens_after_the_base_block(tmp_path, finished):
    _, out, _ = finished
    end = worlds.tiny_stream().bounds[0].val_end
    other = worlds.shuffled_after(worlds.tiny_log(), end, newcomers=7)
    assert fingerprint(other) != fingerprint(worlds.tiny_log())
    run_all(searched(log=other), tmp_path / "out")
    compared = [
        path.relative_to(out)
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name not in ("environment.json", "timing.parquet", "log.jsonl", ".lock")
    ]
    assert {path.name for path in compared} >= {"metrics.parquet", "trials.csv", "best.toml", "trial-00.json"}
    for path in compared:
        assert (tmp_path / "out" / path).read_bytes() == (out / path).read_bytes(), path


def test_the_objective_is_the_mean_over_pseudo_slices_of_each_tested_after_it_was_learned(finished):
    search, out, outcomes = finished
    for trial, outcome in zip(search.trials, outcomes, strict=True):
        table = pq.read_table(trial_folder(search, trial, out) / "metrics.parquet").to_pylist()
        chosen = [
            row["value"]
            for row in table
            if (row["split"], row["candidates"], row["subset"], row["metric"]) == ("test", "sampled", "all", "ndcg@10")
            and row["slice_trained"] == row["slice_tested"] > 0
        ]
        assert len(chosen) == 2
        assert outcome.objective == pytest.approx(sum(chosen) / 2, rel=1e-12)
    assert len({outcome.objective for outcome in outcomes}) == 3


def test_trials_share_one_warm_up(finished):
    _, out, _ = finished
    assert len(list((out.parent / "cache").glob("warm-up-*"))) == 1


def test_a_finished_trial_is_read_and_not_run_again(finished, monkeypatch):
    search, out, outcomes = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.parent != out}

    def never(self, out, progress=None):
        raise AssertionError("ran again")

    monkeypatch.setattr(Experiment, "run", never)
    assert [run_trial(search, trial, out, out.parent / "cache") for trial in search.trials] == outcomes
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_trial_that_was_stopped_goes_on_from_its_last_slice(tmp_path, finished, monkeypatch):
    search, _, outcomes = finished
    trial, saved = search.trials[1], []
    save = folders.save_slice

    def stop_in_slice_2(folder, index, tables, state):
        saved.append(index)
        if saved == [0, 1, 2]:
            raise KeyboardInterrupt
        save(folder, index, tables, state)

    monkeypatch.setattr(folders, "save_slice", stop_in_slice_2)
    with pytest.raises(KeyboardInterrupt):
        run_trial(search, trial, tmp_path / "out", tmp_path / "cache")
    assert not note_of(trial_folder(search, trial, tmp_path / "out")).exists()
    assert run_trial(search, trial, tmp_path / "out", tmp_path / "cache") == outcomes[1]
    assert saved == [0, 1, 2, 2]


def test_the_best_config_reproduces_the_best_trials_number_exactly(tmp_path, finished):
    search, out, outcomes = finished
    best = best_of(outcomes)
    assert best is not None
    assert best.trial > 0
    config = read_toml(out / "finetune-last" / "best.toml")
    assert config == override(search.config, best.settings)
    assert config.stream.n_slices == worlds.tiny_config().stream.n_slices  # of the real run
    again = tuning(config, worlds.tiny_log(), n_slices=2, n_trials=1)
    assert again.trials == (Trial(0, {}),)
    assert run_trial(again, again.trials[0], tmp_path / "out", tmp_path / "cache").objective == best.objective


def test_a_trial_tests_each_slice_when_it_was_learned_as_a_whole_run_does_and_nothing_else(tmp_path, finished):
    search, out, outcomes = finished
    config = pseudo_config(search, override(search.config, search.trials[1].settings))
    whole = Experiment(config, search.pseudo_log, out.parent / "cache").run(tmp_path / "whole")
    trial = RunFolder(trial_folder(search, search.trials[1], out)).table("metrics")
    seen, full = (main_values(metrics) for metrics in (trial, whole.table("metrics")))
    assert np.array_equal(np.diagonal(seen), np.diagonal(full))
    assert np.isnan(seen[~np.eye(len(seen), dtype=bool)]).all()
    assert not np.isnan(full).any()
    assert trial["split"].unique().to_pylist() == ["test"]
    assert accuracy(full) == outcomes[1].objective


def test_the_tables_list_every_trial_with_settings_that_can_be_pasted(finished):
    search, out, outcomes = finished
    rows = list(csv.DictReader((out / "trials.csv").read_text(encoding="utf-8").splitlines()))
    assert [(row["method"], int(row["trial"]), float(row["ndcg@10"])) for row in rows] == [
        (o.method, o.trial, o.objective) for o in outcomes
    ]
    assert rows[0]["settings"] == ""
    rate = search.trials[1].settings["training.slice_learning_rate"]
    assert rows[1]["settings"] == f"training.slice_learning_rate={rate}"
    assert not list(out.rglob("*.unfinished"))


def test_trials_of_an_earlier_search_are_taken_over_where_they_were_made_with_the_same(finished, tmp_path, monkeypatch):
    search, out, outcomes = finished
    assert take_over(search, tried(out / "trials.csv"), tmp_path) == len(outcomes)
    assert take_over(search, tried(out / "trials.csv"), tmp_path) == 0  # they are over already
    monkeypatch.setattr(Experiment, "run", None)  # nothing is run again
    assert [run_trial(search, trial, tmp_path, tmp_path / "cache") for trial in search.trials] == outcomes
    write_table(tmp_path)
    assert (tmp_path / "trials.csv").read_bytes() == (out / "trials.csv").read_bytes()
    other = searched(training__patience=2)
    assert take_over(other, tried(out / "trials.csv"), tmp_path / "other") == 0
    (tmp_path / "bad.csv").write_text("method,trial\newc,0\n")
    with pytest.raises(RunFolderError, match="has no column failed"):
        tried(tmp_path / "bad.csv")


def outcome(trial: int, objective: float | None, failed: str = "") -> Outcome:
    return Outcome("ewc", trial, {}, objective, failed)


def test_what_is_not_finite_never_wins():
    bad = [outcome(0, math.nan), outcome(1, math.inf), outcome(2, None), outcome(3, 0.9, "diverged")]
    assert best_of(bad) is None
    assert best_of([*bad, outcome(4, 0.0)]) == outcome(4, 0.0)
    assert best_of([outcome(4, 0.1), *bad]) == outcome(4, 0.1)


@given(st.lists(st.one_of(st.none(), st.just(math.nan), st.floats(0, 1)), max_size=8))
def test_the_best_is_the_earliest_of_the_highest(values):
    finite = [value for value in values if value is not None and not math.isnan(value)]
    found = best_of([outcome(n, value) for n, value in enumerate(values)][::-1])
    assert (found and (found.objective, found.trial)) == ((max(finite), values.index(max(finite))) if finite else None)


def test_a_state_that_is_not_finite_is_recorded_as_a_failure(tmp_path):
    search = searched(n_trials=1)
    (trial,), out = search.trials, tmp_path / "out"
    run_trial(search, trial, out, tmp_path / "cache")
    folder = trial_folder(search, trial, out)
    found = folders.load_checkpoint(folders.RunFolder(folder))
    assert found is not None
    tensors, outline = found[1].tensors, found[1].outline
    spoiled = {name: tensor * math.nan if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_tensors(folder / "checkpoint.safetensors", spoiled, {"slice": "2", "outline": outline})
    note_of(folder).unlink()
    judged = run_trial(search, trial, out, tmp_path / "cache")
    assert judged.failed.startswith("diverged: ")
    assert judged.objective is None
    assert write_best(search, out) is None
    assert not (out / "finetune-last" / "best.toml").exists()


def test_an_objective_that_is_not_a_number_is_recorded_as_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "accuracy", lambda values: math.nan)
    search = searched(n_trials=1)
    judged = run_trial(search, search.trials[0], tmp_path / "out", tmp_path / "cache")
    assert (judged.objective, judged.failed) == (None, "diverged: the objective is not finite")


def test_a_trial_that_breaks_is_recorded_with_its_reason_and_not_tried_again(tmp_path, monkeypatch):
    search, calls = searched(n_trials=2), []

    def broken(self, out, progress=None):
        calls.append(out.name)
        raise RuntimeError("probability tensor contains nan\nmore")

    monkeypatch.setattr(Experiment, "run", broken)
    found = [run_trial(search, search.trials[1], tmp_path / "out", tmp_path / "cache") for _ in range(2)]
    assert [o.failed for o in found] == ["RuntimeError: probability tensor contains nan"] * 2
    assert calls == ["trial-01"]
    note = json.loads(note_of(trial_folder(search, search.trials[1], tmp_path / "out")).read_text())
    assert "Traceback" in note["traceback"]
    (row,) = csv.DictReader([*trials_text(tmp_path / "out")])
    assert (row["ndcg@10"], row["failed"]) == ("", "RuntimeError: probability tensor contains nan")


@pytest.mark.parametrize("damage", ["another number", "a key missing", "no JSON", "a list"])
def test_a_trials_note_that_is_damaged_is_refused_by_name(tmp_path, damage):
    search = searched(n_trials=1)
    made_with = module.digest(search, search.config)
    folder = trial_folder(search, search.trials[0], tmp_path)
    module.write_note(folder, Outcome("finetune-last", 0, {}, 0.25, made_with=made_with))
    assert known_outcome(search, search.trials[0], tmp_path).objective == 0.25
    note = json.loads(note_of(folder).read_text())
    text = {
        "another number": json.dumps(note | {"objective": 0.5}),
        "a key missing": json.dumps({key: value for key, value in note.items() if key != "made_with"}),
        "no JSON": json.dumps(note)[:-1],
        "a list": "[1]",
    }[damage]
    note_of(folder).write_text(text)
    with pytest.raises(RunFolderError, match=r"trial-00.json .*; delete it, and the trial is judged again"):
        known_outcome(search, search.trials[0], tmp_path)


def trials_text(out: Path) -> list[str]:
    write_table(out)
    return (out / "trials.csv").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("problem", [LeakError("look-ahead"), RunFolderError("locked"), OSError("disk full")])
def test_what_would_stop_every_trial_or_must_not_be_hidden_is_raised(tmp_path, monkeypatch, problem):
    def broken(self, out, progress=None):
        raise problem

    monkeypatch.setattr(Experiment, "run", broken)
    search = searched(n_trials=2)
    with pytest.raises(type(problem)):
        run_trial(search, search.trials[1], tmp_path / "out", tmp_path / "cache")
    assert not list((tmp_path / "out").rglob("*.json"))


@pytest.mark.parametrize("problem", [MemoryError("no more"), torch.OutOfMemoryError("CUDA out of memory.\nTried")])
def test_a_full_machine_is_one_line_and_never_counts_against_the_settings(tmp_path, monkeypatch, problem):
    def broken(self, out, progress=None):
        raise problem

    monkeypatch.setattr(Experiment, "run", broken)
    search = searched(n_trials=2)
    with pytest.raises(MachineError, match=r"^trial 1 of finetune-last ran out of memory \(.*\); .*--clients$"):
        run_trial(search, search.trials[1], tmp_path / "out", tmp_path / "cache")
    assert not list((tmp_path / "out").rglob("*.json"))


def test_a_refused_combination_is_a_failure_but_refused_defaults_are_an_error(tmp_path, monkeypatch):
    def refused(self, out, progress=None):
        raise ConfigError("too much")

    monkeypatch.setattr(Experiment, "run", refused)
    search = searched(n_trials=2)
    with pytest.raises(ConfigError, match="too much"):
        run_trial(search, search.trials[0], tmp_path / "out", tmp_path / "cache")
    assert run_trial(search, search.trials[1], tmp_path / "out", tmp_path / "cache").failed == "refused: too much"


@pytest.mark.parametrize("change", [{"training__negatives": 5}, {"log": True}])
def test_a_trial_made_with_other_settings_or_events_is_not_taken_for_this_one(finished, change):
    _, out, _ = finished
    if "log" in change:
        log = worlds.tiny_log()
        change = {"log": select(log, torch.arange(len(log)) != 3)}
    search = searched(**change)
    with pytest.raises(RunFolderError, match="made with other events, settings or defaults; choose a new folder"):
        run_trial(search, search.trials[0], out, out.parent / "cache")


def test_the_folder_of_another_tune_is_refused_and_the_same_one_taken_again(tmp_path):
    asked = {"trials": 20, "slices": 3, "set": {"training.negatives": 8}}
    claim_folder(tmp_path / "out", asked)
    claim_folder(tmp_path / "out", asked)
    with pytest.raises(RunFolderError, match=r"holds another tune \(trials 20, asked for 5\); choose a new folder"):
        claim_folder(tmp_path / "out", asked | {"trials": 5})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="is not empty and holds no tune"):
        claim_folder(tmp_path / "full", asked)
    with pytest.raises(RunFolderError, match="is not empty and holds no tune"):
        claim_folder(tmp_path / "full" / "thesis.txt", asked)


def test_what_cannot_be_searched_is_one_line():
    config, log = worlds.tiny_config(method="ewc"), worlds.tiny_log()
    with pytest.raises(ConfigError, match="--trials must be at least 1, got 0"):
        tuning(config, log, n_trials=0)
    with pytest.raises(ConfigError, match="--slices must be at least 1, got 0"):
        tuning(config, log, n_slices=0)
    instants = log.times.unique_consecutive()
    short = select(log, torch.isin(log.times, instants[:40]))
    with pytest.raises(DataError, match=r"the base block of .* too few for .* 9 pseudo-slices \(30 needed\)"):
        tuning(config, short, n_slices=9)


def test_trials_carry_the_noise_of_the_real_stream_and_the_best_config_its_budget():
    pytest.importorskip("dp_accounting")
    config = override(RunConfig(method="protofed-sp"), {"privacy.target_epsilon": 3.4})
    search = tuning(config, worlds.tiny_log(), n_slices=2, n_trials=2)
    assert search.privacy.noise_multiplier == pytest.approx(1.128, abs=1e-3)  # 8 slices of 20 rounds at q = 0.05
    assert search.privacy.target_epsilon == 0.0
    assert search.config.privacy.target_epsilon == 3.4
    wrapped = override(RunConfig(method="finetune-last"), {"privacy.wrap": True})
    assert tuning(wrapped, worlds.tiny_log(), n_slices=2).privacy == replace(search.privacy, wrap=True)
    nodp = override(config, {"protofed.mode": "nodp"})
    assert tuning(nodp, worlds.tiny_log(), n_slices=2).privacy == nodp.privacy


def test_a_searched_clipping_radius_is_the_trials_own_beside_the_noise_of_all():
    search = searched("fedavg", n_trials=8, privacy__wrap=True, privacy__target_epsilon=3.4)
    tried = [override(search.config, trial.settings) for trial in search.trials]
    ran = [pseudo_config(search, config).privacy for config in tried]
    assert len({privacy.clip_radius for privacy in ran}) > 2
    assert [p.clip_radius for p in ran] == [config.privacy.clip_radius for config in tried]
    assert {(p.noise_multiplier, p.target_epsilon) for p in ran} == {(search.privacy.noise_multiplier, 0.0)}


def test_the_peft_variant_searches_the_rate_of_its_prompt():
    assert set(space_of("finetune-last")) == {"training.slice_learning_rate"}
    assert set(space_of("finetune-last", "peft")) == {"training.slice_learning_rate", "peft.learning_rate"}
    assert space_of("prompt-tuning", "peft") == space_of("finetune-last", "peft")  # one method by two names


def test_pseudo_slices_are_cut_as_a_log_of_their_own(finished):
    search, out, _ = finished
    ran = read_toml(trial_folder(search, search.trials[0], out) / "config.toml")
    assert (ran.stream.n_slices, ran.stream.base) == (2, "block")
    bounds = SliceStream(search.pseudo_log, ran.stream).bounds
    assert len(bounds) == 3
    assert bounds[-1].end == worlds.tiny_stream().bounds[0].val_end
    users = pq.read_table(trial_folder(search, search.trials[0], out) / "per_user.parquet").column("user")
    assert set(users.to_pylist()) <= set(search.pseudo_log.user_ids.cast(pa.string()).to_pylist())


def test_a_trial_can_run_where_the_command_line_is_not_installed():
    blocked = (
        "import sys; sys.modules.update(dict.fromkeys(('typer', 'rich', 'polars', 'dp_accounting', 'matplotlib')))"
    )
    code = f"{blocked}; from protofed.experiments.tuning import run_trial, tuning"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
