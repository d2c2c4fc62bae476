"""Damage in a run folder or a cache is one line that says how to go on, before anything is computed."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import worlds
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from protofed.backbone import pretrain
from protofed.backbone.pretrain import cached_warm_up, load_backbone
from protofed.errors import ProtoFedError, RunFolderError
from protofed.experiments import run as runs
from protofed.experiments.folder import RunFolder, check_slices, load_checkpoint, opened, save_slice
from protofed.experiments.run import Experiment
from protofed.snapshot import restore, take_snapshot

CONFIG = worlds.tiny_config(method="popularity", training__base_epochs=1)


def experiment(tmp_path):
    return Experiment(CONFIG, worlds.tiny_log(), tmp_path / "cache", worlds.CPU, "test")


@pytest.fixture
def stopped(tmp_path):
    """A run that was stopped after slice 1 of 2."""

    def stop(*said):
        if said[-1] == "slice 1 done":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiment(tmp_path).run(tmp_path / "run", stop)
    return tmp_path / "run"


def refused_before_the_work(tmp_path, monkeypatch, match):
    def work(*_, **__):
        raise AssertionError("worked before the damage was told")

    for name in ("check_all_candidates", "cached_warm_up"):
        monkeypatch.setattr(runs, name, work)
    with pytest.raises(ProtoFedError, match=match) as told:
        experiment(tmp_path).run(tmp_path / "run")
    assert len(str(told.value).splitlines()) == 1


def flips(path, count, seed=0):
    """The file with one bit flipped, `count` times; whole again at the end."""
    whole, draws = path.read_bytes(), random.Random(seed)
    for _ in range(count):
        place = draws.randrange(8 * len(whole))
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        yield place
    path.write_bytes(whole)


def test_a_flipped_bit_of_a_checkpoint_is_refused(tmp_path):
    state = {"a": torch.randn(20, 3), "n": torch.tensor(7), "h": torch.randn(4).bfloat16()}
    save_slice(RunFolder(tmp_path), 0, {}, take_snapshot(state))
    for place in flips(tmp_path / "checkpoint.safetensors", 400):
        with pytest.raises(RunFolderError, match=r"checkpoint.safetensors cannot be read .*; delete it to start"):
            pytest.fail(f"bit {place} gave {load_checkpoint(RunFolder(tmp_path))}")
    index, packed = load_checkpoint(RunFolder(tmp_path))
    assert index == 0
    assert all(torch.equal(tensor, state[name]) for name, tensor in restore(packed).items())


def test_a_flipped_bit_of_a_kept_warm_up_is_refused(tmp_path):
    cached_warm_up(CONFIG, worlds.tiny_stream(), tmp_path, device=worlds.CPU)
    (path,) = tmp_path.glob("warm-up-*")
    for place in flips(path, 150):
        with pytest.raises(RunFolderError, match="cannot be read"):
            pytest.fail(f"bit {place} gave {load_backbone(path, CONFIG, worlds.CPU)}")


def test_a_damaged_warm_up_is_trained_again_and_that_is_told(tmp_path, caplog):
    model, _ = cached_warm_up(CONFIG, worlds.tiny_stream(), tmp_path, device=worlds.CPU)
    (path,) = tmp_path.glob("warm-up-*")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    again, _ = cached_warm_up(CONFIG, worlds.tiny_stream(), tmp_path, device=worlds.CPU)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert path.read_bytes() == whole
    assert f"{path} cannot be read (its checksum does not match); it is damaged and is trained again" in caplog.text


def test_a_kept_warm_up_with_nan_in_it_is_trained_again(tmp_path):
    cached_warm_up(CONFIG, worlds.tiny_stream(), tmp_path, device=worlds.CPU)
    (path,) = tmp_path.glob("warm-up-*")
    weights = load_file(path)
    weights["items"][3] = float("nan")
    with safe_open(path, "pt") as file:
        notes = file.metadata()
    save_file(weights, path, metadata=notes)
    model, _ = cached_warm_up(CONFIG, worlds.tiny_stream(), tmp_path, device=worlds.CPU)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


@pytest.mark.parametrize("name", ["metrics-0", "ranks-1"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "nan", "folder"])
def test_a_damaged_table_of_a_finished_slice_is_told_before_the_work(tmp_path, stopped, monkeypatch, name, damage):
    part = stopped / "slices" / f"{name}.parquet"
    whole = bytearray(part.read_bytes())
    if damage == "flipped":
        whole[len(whole) // 3] ^= 4
        part.write_bytes(whole)
    elif damage == "cut":
        part.write_bytes(whole[:-9])
    elif damage == "nan":
        table = pq.read_table(part)
        numbers = [field.name for field in table.schema if field.type == pa.float64()]
        for column in numbers:
            nan = pa.array([float("nan")] * len(table))
            table = table.set_column(table.column_names.index(column), column, nan)
        table = table if numbers else table.slice(1)
        pq.write_table(table, part)
    else:
        part.unlink()
        if damage == "folder":
            part.mkdir()
    found = "is missing" if damage in ("missing", "folder") else "its checksum does not match"
    refused_before_the_work(tmp_path, monkeypatch, rf"{name}.parquet .*{found}; delete .*checkpoint.safetensors to")


@pytest.mark.parametrize("text", [None, "{", "[]", '{"metrics-0.parquet": 3}', "\xff"])
def test_checksums_that_are_damaged_themselves_are_told_before_the_work(tmp_path, stopped, monkeypatch, text):
    path = stopped / "slices" / "checksums.json"
    path.unlink()
    if text is not None:
        path.write_text(text, encoding="latin-1")
    refused_before_the_work(tmp_path, monkeypatch, r"checksums.json cannot be read .*; delete .*checkpoint.safetensors")


def test_deleting_the_checkpoint_as_advised_starts_a_damaged_run_again(tmp_path, stopped):
    (stopped / "slices" / "metrics-0.parquet").write_bytes(b"")
    (stopped / "checkpoint.safetensors").unlink()
    assert experiment(tmp_path).run(tmp_path / "run").finished


def test_no_flipped_bit_of_a_finished_slices_tables_is_taken_for_a_result(stopped):
    for name in ("metrics-0", "per_user-1", "ranks-0"):
        for place in flips(stopped / "slices" / f"{name}.parquet", 100):
            with pytest.raises(RunFolderError, match=name):
                pytest.fail(f"bit {place} of {name}: {check_slices(RunFolder(stopped), until=1)}")


def test_a_stopped_run_whose_files_are_whole_goes_on(tmp_path, stopped):
    assert experiment(tmp_path).run(tmp_path / "run").finished


@pytest.mark.parametrize("key", ["slice", "state.n"])
def test_a_checkpoint_that_lacks_something_is_refused(tmp_path, stopped, monkeypatch, key):
    path = stopped / "checkpoint.safetensors"
    save_file({} if key != "slice" else load_file(path), path, metadata={"slice": "1"} if key != "slice" else {})
    refused_before_the_work(tmp_path, monkeypatch, "cannot be read .*; delete it to start the run again")


def test_a_config_that_is_not_text_is_told_before_the_work(tmp_path, stopped, monkeypatch):
    (stopped / "config.toml").write_bytes(b'method = "\xff\xfe"\n')
    refused_before_the_work(tmp_path, monkeypatch, r"config.toml is not UTF-8 text .*; delete its folder and run again")


def test_a_ledger_that_cannot_be_read_is_told_before_the_work(tmp_path, stopped, monkeypatch):
    (stopped / "ledger.json").write_text('{"format": "protofed-ledger-1", "releases": []}')
    refused_before_the_work(
        tmp_path, monkeypatch, r"ledger.json is not a ledger .*; start the run again in a new folder"
    )


@pytest.mark.parametrize(
    "name", ["metrics.parquet", "ranks.parquet", "log.jsonl", "checkpoint.safetensors", "environment.json", ".lock"]
)
def test_a_folder_where_a_file_belongs_is_told_before_the_work(tmp_path, monkeypatch, name):
    with opened(tmp_path / "run", CONFIG):
        pass
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).mkdir()
    refused_before_the_work(tmp_path, monkeypatch, name)


def test_a_file_where_the_tables_of_slices_belong_is_told_before_the_work(tmp_path, monkeypatch):
    with opened(tmp_path / "run", CONFIG):
        pass
    (tmp_path / "run" / "slices").rmdir()
    (tmp_path / "run" / "slices").write_text("mine")
    refused_before_the_work(tmp_path, monkeypatch, "slices is a file where a folder belongs")


def test_a_folder_where_a_warm_up_belongs_is_told_before_the_training(tmp_path, monkeypatch):
    key = pretrain.content_key(CONFIG, worlds.tiny_stream(), worlds.CPU)
    (tmp_path / f"warm-up-{key}.safetensors").mkdir()
    monkeypatch.setattr(pretrain, "warm_up", lambda *_, **__: pytest.fail("trained first"))
    with pytest.raises(RunFolderError, match="is a folder where a warm-up belongs"):
        cached_warm_up(CONFIG, worlds.tiny_stream(), tmp_path, device=worlds.CPU)


def test_another_run_that_began_while_the_lock_was_waited_for_is_refused(tmp_path, monkeypatch):
    """Between the first look at the folder and the lock, another process makes the folder its own."""
    path, mkdir, theirs = tmp_path / "run", type(tmp_path).mkdir, worlds.tiny_config(seed=1, method="popularity")

    def beaten_to_it(self, *args, **options):
        mkdir(self, *args, **options)
        if self == path:
            (path / "config.toml").write_text(runs.folders.to_toml(theirs), encoding="utf-8")

    monkeypatch.setattr(type(tmp_path), "mkdir", beaten_to_it)
    with (
        pytest.raises(RunFolderError, match=r"holds another run \(seed = 1, asked for seed = 0\)"),
        opened(path, CONFIG),
    ):
        pass
    assert (path / "config.toml").read_text(encoding="utf-8") == runs.folders.to_toml(theirs)
