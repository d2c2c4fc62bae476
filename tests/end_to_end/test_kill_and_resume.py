"""A run that is killed at any point goes on from there, and ends with the same bytes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import worlds

from protofed.config import to_toml
from protofed.files import load_tensors
from protofed.privacy.ledger import read_ledger

CHILD = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
import worlds
from protofed import files
from protofed.experiments.run import Experiment

out, cache, die_in_checkpoint = Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
written = 0

def save_half(tensors, path, metadata=None):
    global written
    whole(tensors, path, metadata=metadata)
    written += 1
    if written == die_in_checkpoint:
        data = Path(path).read_bytes()
        Path(path).write_bytes(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

whole, files.save_file = files.save_file, save_half
print("ready", flush=True)
Experiment(worlds.tiny_config(method=sys.argv[5]), worlds.tiny_log(), cache, worlds.CPU, "test").run(out)
print("finished", flush=True)
"""

WARMING_UP = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
import worlds
from protofed.backbone.pretrain import cached_warm_up

def tell(task, done, total, note=""):
    print(done, flush=True)
    time.sleep(0.2 * (done == int(sys.argv[3])))  # who wants to kill it after this epoch has time to

cached_warm_up(worlds.tiny_config(), worlds.tiny_stream(), Path(sys.argv[2]), device=worlds.CPU, progress=tell)
print("finished", flush=True)
"""


def start(
    tmp_path: Path, out: Path, die_in_checkpoint: int = 0, method: str = "finetune-last"
) -> subprocess.Popen[str]:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    arguments = [str(Path(worlds.__file__).parent), str(out), str(tmp_path / "cache"), str(die_in_checkpoint), method]
    return subprocess.Popen([sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True)


def run_to_the_end(tmp_path: Path, out: Path, method: str = "finetune-last") -> float:
    child = start(tmp_path, out, method=method)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    began = time.monotonic()
    assert child.communicate(timeout=300)[0] == "finished\n"
    assert child.returncode == 0
    return time.monotonic() - began


def kill_after(child: subprocess.Popen[str], seconds: float) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(seconds)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate(timeout=60)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[Path, float]:
    """A run that nobody kills, and how long it took."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder / "whole", run_to_the_end(folder, folder / "whole")


@pytest.mark.slow
def test_five_kills_at_random_points_and_one_inside_a_checkpoint_leave_the_same_bytes(tmp_path, undisturbed):
    (whole, seconds), here = undisturbed, undisturbed[0].parent  # whose warm-up is kept
    expected = {name: (whole / name).read_bytes() for name in ("metrics.parquet", "per_user.parquet", "ranks.parquet")}
    draws = random.Random(7)
    out = tmp_path / "killed"
    for _ in range(5):
        kill_after(start(here, out), draws.uniform(0.05, 0.6) * seconds)
    died_writing = start(here, out, die_in_checkpoint=1)
    died_writing.communicate(timeout=300)
    assert died_writing.returncode == -signal.SIGKILL or (out / "metrics.parquet").exists()
    run_to_the_end(here, out)
    assert {name: (out / name).read_bytes() for name in expected} == expected
    assert (out / "config.toml").read_text() == to_toml(worlds.tiny_config(method="finetune-last"))
    assert not list(out.rglob("*.unfinished"))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [1, 2, 3])
def test_a_kill_inside_any_checkpoint_write_loses_only_that_slice(tmp_path, undisturbed, checkpoint):
    (whole, _), out = undisturbed, tmp_path / "killed"
    child = start(whole.parent, out, die_in_checkpoint=checkpoint)
    child.communicate(timeout=300)
    assert child.returncode == -signal.SIGKILL
    assert (out / "checkpoint.safetensors").exists() == (checkpoint > 1)
    run_to_the_end(whole.parent, out)
    assert (out / "metrics.parquet").read_bytes() == (whole / "metrics.parquet").read_bytes()


@pytest.mark.slow
def test_a_private_run_that_is_killed_ends_with_the_same_results_and_the_same_ledger(tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "killed"
    run_to_the_end(tmp_path, whole, "protofed-sp")
    child = start(tmp_path, out, die_in_checkpoint=2, method="protofed-sp")
    child.communicate(timeout=300)
    assert child.returncode == -signal.SIGKILL
    ahead, _ = read_ledger(out / "ledger.json")
    assert [release.count for release in ahead] == [4]  # slice 1 was released, though its checkpoint was not written
    run_to_the_end(tmp_path, out, "protofed-sp")
    for name in ("metrics.parquet", "per_user.parquet", "ranks.parquet", "ledger.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert [release.count for release in read_ledger(out / "ledger.json")[0]] == [8]


def epochs_until(cache: Path, last: int | None = None) -> list[int]:
    """The epochs that a process which warms up tells of; it is killed as it is about to begin the one after `last`."""
    arguments = [str(Path(worlds.__file__).parent), str(cache), str(last or 0)]
    child = subprocess.Popen([sys.executable, "-c", WARMING_UP, *arguments], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    told = []
    for line in child.stdout:
        if line == "finished\n":
            break
        told.append(int(line))
        if last is not None and told[-1] >= last:
            os.kill(child.pid, signal.SIGKILL)
            break
    child.communicate(timeout=60)
    assert child.returncode == (0 if last is None else -signal.SIGKILL)
    return told


@pytest.mark.slow
def test_a_warm_up_that_is_killed_goes_on_after_its_last_epoch_and_ends_with_the_same_bytes(tmp_path):
    whole = epochs_until(tmp_path / "whole")
    assert len(whole) >= 4
    pieces = [epochs_until(tmp_path / "killed", last) for last in (2, 3)]
    pieces.append(epochs_until(tmp_path / "killed"))
    assert [epoch for piece in pieces for epoch in piece] == whole  # none twice: they are kept before they are told
    kept = [sorted((tmp_path / name).glob("warm-up-*")) for name in ("whole", "killed")]
    assert [path.name for path in kept[0]] == [path.name for path in kept[1]]
    assert [path.read_bytes() for path in kept[0]] == [path.read_bytes() for path in kept[1]]


@pytest.mark.slow
def test_a_kill_while_an_epoch_is_being_written_loses_that_epoch_alone(tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "killed"
    child = start(tmp_path, out, die_in_checkpoint=3)  # in an empty cache the first files are those of epochs
    child.communicate(timeout=300)
    assert child.returncode == -signal.SIGKILL
    assert not (out / "checkpoint.safetensors").exists()
    (kept,) = (tmp_path / "cache").glob("*.training.safetensors")
    _, notes = load_tensors(kept)
    assert len(json.loads(notes["so far"])[0]) == 3  # before the first epoch and after two
    run_to_the_end(tmp_path, out)
    assert len(list((tmp_path / "cache").glob("warm-up-*"))) == 1
    (tmp_path / "cache").rename(tmp_path / "continued")
    run_to_the_end(tmp_path, whole)
    for name in ("metrics.parquet", "per_user.parquet", "ranks.parquet"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
