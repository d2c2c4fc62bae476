"""A warm-up that is stopped goes on after its last epoch, and ends with the same bits as one that never was."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import worlds
from worlds import CPU, tiny_config, tiny_stream

from protofed.backbone import pretrain, training
from protofed.backbone.kept_epochs import KeptEpochs
from protofed.backbone.pretrain import cached_warm_up, warm_up
from protofed.errors import StorageError

CONFIG = tiny_config(training__base_epochs=5, training__patience=2)


def warm(cache, progress=lambda *_: None):
    return cached_warm_up(CONFIG, tiny_stream(), cache, device=CPU, progress=progress)


def stopping_after(epoch: int):
    """A progress that is interrupted as Ctrl-C would, once so many epochs are over."""

    def progress(task, done, total, note="") -> None:
        if task == "epochs" and done == epoch:
            raise KeyboardInterrupt

    return progress


def same_bits(one, other) -> bool:
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


@pytest.fixture
def epochs_run(monkeypatch) -> list[int]:
    """The epochs that are trained, as they are."""
    seen: list[int] = []
    run_epoch = training.run_epoch

    def counted(*args):
        seen.append(args[-1])
        return run_epoch(*args)

    monkeypatch.setattr(training, "run_epoch", counted)
    return seen


def left_in(cache: Path) -> list[str]:
    return sorted(path.name.partition(".")[2] for path in cache.iterdir() if not path.name.startswith("."))


def test_a_stop_after_every_single_epoch_changes_no_bit(tmp_path, epochs_run):
    expected, fit = warm(tmp_path / "whole")
    n = len(fit.trace) - 1
    assert n >= 3
    epochs_run.clear()
    for epoch in range(1, n + 1):
        with pytest.raises(KeyboardInterrupt):
            warm(tmp_path / "stopped", stopping_after(epoch))
    model, fit_again = warm(tmp_path / "stopped")
    assert epochs_run == list(range(n))  # none twice
    assert same_bits(model, expected)
    assert fit_again == fit
    assert left_in(tmp_path / "stopped") == left_in(tmp_path / "whole") == ["safetensors"]
    files = [next((tmp_path / name).glob("*.safetensors")).read_bytes() for name in ("whole", "stopped")]
    assert files[0] == files[1]


def test_a_stop_after_the_best_epoch_still_goes_back_to_it(tmp_path, monkeypatch):
    """The validation part says that epoch 1 was best; the stop comes in epoch 2, whose weights are others."""
    values = {1: 0.9, 2: 0.5, 3: 0.4}
    expected: dict[int, dict[str, torch.Tensor]] = {}

    def graded(model, exam) -> float:
        expected[len(expected)] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return values.get(len(expected) - 1, 0.1)

    monkeypatch.setattr(training, "mean_grade", graded)
    with pytest.raises(KeyboardInterrupt):
        warm(tmp_path, stopping_after(2))
    model, fit = warm(tmp_path)
    assert fit.trace == (0.1, 0.9, 0.5, 0.4)
    assert all(torch.equal(tensor, expected[1][name]) for name, tensor in model.state_dict().items())
    assert not torch.equal(expected[1]["items"], expected[2]["items"])


@pytest.mark.parametrize("kept", [0, 60, 0.5, 0.99])
def test_a_damaged_leftover_is_told_and_the_warm_up_starts_anew(tmp_path, kept, caplog, epochs_run):
    expected, fit = warm(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        warm(tmp_path / "stopped", stopping_after(2))
    (path,) = (tmp_path / "stopped").glob("*.training.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    epochs_run.clear()
    model, fit_again = warm(tmp_path / "stopped")
    (told,) = caplog.messages
    assert told.startswith(f"{path} cannot be read")
    assert told.endswith("the training starts anew")
    assert epochs_run == list(range(len(fit.trace) - 1))
    assert same_bits(model, expected)
    assert fit_again == fit


def test_a_leftover_of_another_model_leaves_the_new_one_as_it_is(tmp_path, caplog):
    wide = tiny_config(training__base_epochs=1, backbone__width=32)
    path = tmp_path / "kept.safetensors"
    warm_up(wide, tiny_stream().slice_(0), device=CPU, kept=KeptEpochs(path))
    model, fit = warm_up(CONFIG, tiny_stream().slice_(0), device=CPU, kept=KeptEpochs(path))
    assert "it holds the weights of another model" in caplog.text
    expected, fit_alone = warm_up(CONFIG, tiny_stream().slice_(0), device=CPU)
    assert same_bits(model, expected)
    assert fit == fit_alone


def test_a_disk_that_takes_no_epoch_is_told_once_and_does_not_stop_the_warm_up(tmp_path, monkeypatch, caplog):
    expected, fit = warm(tmp_path / "whole")

    def full(path, *_) -> None:
        raise StorageError(f"{path}: No space left on device")

    monkeypatch.setattr("protofed.backbone.kept_epochs.save_tensors", full)
    model, fit_again = warm(tmp_path / "full")
    (told,) = caplog.messages
    assert told.startswith("the training's epochs are not kept")
    assert same_bits(model, expected)
    assert fit_again == fit


def test_what_a_killed_writer_left_half_written_is_cleared(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        warm(tmp_path, stopping_after(1))
    (path,) = tmp_path.glob("*.training.safetensors")
    (tmp_path / f"{path.name}.123.unfinished").write_bytes(b"half")
    (tmp_path / "warm-up-other.safetensors.123.unfinished").write_bytes(b"somebody else's")
    warm(tmp_path)
    assert [found.name for found in tmp_path.glob("*.unfinished")] == ["warm-up-other.safetensors.123.unfinished"]


SECOND = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
import worlds
from protofed.backbone import pretrain, training

def tell(task, done, total, note=""):
    if task == "waiting":
        print(note, flush=True)

training.run_epoch = None  # whoever waits does not train
config = worlds.tiny_config(training__base_epochs=5, training__patience=2)
pretrain.cached_warm_up(config, worlds.tiny_stream(), Path(sys.argv[2]), device=worlds.CPU, progress=tell)
print("read", flush=True)
"""


@pytest.mark.slow
def test_a_second_process_says_that_it_waits_and_then_reads_what_the_first_made(tmp_path):
    command = [sys.executable, "-c", SECOND, str(Path(worlds.__file__).parent), str(tmp_path)]
    second: list[subprocess.Popen[str]] = []

    def beside(task, done, total, note="") -> None:
        if task == "epochs" and done == 1:  # the first holds the lock
            second.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert second[0].stdout is not None
            assert second[0].stdout.readline().startswith("another process is making the same warm-up")
            assert second[0].poll() is None

    warm(tmp_path, beside)
    out, _ = second[0].communicate(timeout=60)
    assert (out, second[0].returncode) == ("read\n", 0)


def test_a_warm_up_that_another_process_finished_meanwhile_is_read(tmp_path, monkeypatch):
    """It appears between the first look and the lock."""
    expected, _ = warm(tmp_path / "theirs")
    (theirs,) = (tmp_path / "theirs").glob("*.safetensors")
    ours, make_folder = tmp_path / "ours", pretrain.make_folder

    def beaten_to_it(cache: Path) -> None:
        make_folder(cache)
        (cache / theirs.name).write_bytes(theirs.read_bytes())

    monkeypatch.setattr(pretrain, "make_folder", beaten_to_it)
    monkeypatch.setattr(pretrain, "warm_up", lambda *_, **__: pytest.fail("trained although it was there"))
    assert same_bits(warm(ours)[0], expected)
