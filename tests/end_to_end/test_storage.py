"""Places that cannot be written and disks that are full: one line, exit code 2, and nothing computed is lost."""

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_command_line import FAST, protofed, refused

from protofed import files
from protofed.backbone import pretrain
from protofed.config import RunConfig, to_toml

POPULARITY = ["--dataset", "synthetic", "--method", "popularity", *FAST]
LEARNING = ["run", "--dataset", "synthetic", "--method", "finetune-last", "--cache", "cache", *FAST]


@contextlib.contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes; writing on is EFBIG, as a full disk is ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def places(tmp_path):
    """A file, and a link to nothing."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to("nowhere/there")
    return tmp_path


@pytest.mark.parametrize("where", ["/proc/x", "file/x", "dangling", "x" * 300])
@pytest.mark.parametrize("command", ["run", "bench", "tune", "pack"])
def test_an_out_that_cannot_be_is_one_line(places, command, where):
    if command == "pack":
        (places / "runs").mkdir()
        (places / "runs" / "config.toml").write_text(to_toml(RunConfig()))
        (places / "runs" / "metrics.parquet").write_bytes(b"")
        line = refused("pack", "runs", where, cwd=places)
    else:
        flags = ["--methods", "popularity", "--datasets", "synthetic", *FAST] if command == "bench" else POPULARITY
        line = refused(command, "--out", where, "--cache", "cache", *flags, cwd=places)
    assert f"error: {where}" in line
    assert {found.name for found in places.iterdir()} <= {"file", "dangling", "runs"}


@pytest.mark.parametrize("where", ["/proc/x", "file/x", "dangling"])
@pytest.mark.parametrize("how", [("--prepare",), ("--engine", "local")])
def test_a_federation_that_cannot_be_written_is_told_before_the_work(places, monkeypatch, how, where):
    pytest.importorskip("flwr")
    monkeypatch.setattr(pretrain, "warm_up", lambda *_, **__: pytest.fail("trained first"))
    flags = ["--dataset", "synthetic", "--cache", "cache"]
    assert f"error: {where}" in refused("federate", *how, "--out", where, *flags, cwd=places)


@pytest.mark.parametrize("where", ["/proc/x", "file/x", "dangling"])
@pytest.mark.parametrize("command", ["run", "bench", "tune"])
def test_a_cache_that_cannot_be_is_one_line_before_the_warm_up(places, monkeypatch, command, where):
    monkeypatch.setattr(pretrain, "warm_up", lambda *_, **__: pytest.fail("trained first"))
    flags = ["--methods", "popularity", "--datasets", "synthetic", *FAST] if command == "bench" else POPULARITY
    assert f"error: {where}" in refused(command, "--out", "out", "--cache", where, *flags, cwd=places)


@pytest.mark.parametrize("name", ["r.html", "r.md"])
def test_a_report_that_cannot_be_written_is_told_before_the_runs_are_read(tmp_path, name):
    line = refused("report", "missing", "--out", f"/proc/{name}", cwd=tmp_path)
    assert line.startswith("error: /proc: ")


@pytest.mark.parametrize("text", [b"\xff\xfe", b"method,trial\n", b'method,"trial\n', b"a" * 200_000])
def test_known_trials_that_are_none_are_one_line(tmp_path, text):
    (tmp_path / "known.csv").write_bytes(text)
    arguments = ["tune", "--out", "tune", *POPULARITY, "--known", "known.csv"]
    assert "known.csv" in refused(*arguments, cwd=tmp_path)


def test_a_warm_up_that_does_not_fit_into_the_cache_does_not_cost_the_run(tmp_path, monkeypatch, caplog):
    save, saved = pretrain.save_backbone, []

    def save_into_a_full_disk(*args):
        saved.append(args)
        with largest_file(10_000):
            save(*args)

    monkeypatch.setattr(pretrain, "save_backbone", save_into_a_full_disk)
    done = protofed("run", *POPULARITY, "--out", "run", "--cache", "cache", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(saved) == 1
    assert "the warm-up is not kept for other runs" in caplog.text
    assert os.strerror(errno.EFBIG) in caplog.text
    (kept,) = (tmp_path / "cache").glob("warm-up-*")
    assert kept.name.endswith(".training.safetensors")  # so that the next run need not train
    monkeypatch.setattr("protofed.backbone.training.run_epoch", lambda *_: pytest.fail("trained again"))
    assert protofed("run", *POPULARITY, "--out", "again", "--cache", "cache", cwd=tmp_path).returncode == 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run whose disk has room."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = protofed(*LEARNING, "--out", "whole", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "whole"


@pytest.mark.parametrize("place", ["checkpoint", "table", "end"])
def test_a_disk_that_fills_up_in_a_run_is_one_line_and_the_same_command_goes_on(
    tmp_path, monkeypatch, undisturbed, place
):
    replace_, full = os.replace, {"checkpoint": 2, "table": 5, "end": 1}[place]
    ending = {"checkpoint": "checkpoint.safetensors", "table": "-1.parquet", "end": "metrics.parquet"}[place]
    seen = 0

    def fill_up(source, target):
        nonlocal seen
        seen += str(target).endswith(ending)
        if seen == full or (place == "table" and seen):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source))
        replace_(source, target)

    monkeypatch.setattr(files.os, "replace", fill_up)
    done = protofed(*LEARNING, "--out", "run", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: run/")
    assert "No space left on device; make room and give the same command again, what is finished is kept" in line
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.unfinished"))
    monkeypatch.undo()
    rest = protofed(*LEARNING, "--out", "run", cwd=tmp_path)
    assert rest.returncode == 0, rest.stderr
    assert "base block done" not in rest.stderr  # it was kept
    for name in ("metrics.parquet", "per_user.parquet"):
        assert (tmp_path / "run" / name).read_bytes() == (undisturbed / name).read_bytes()


@pytest.mark.parametrize("n_bytes", [0, 200, 3_000])
def test_a_limit_on_the_size_of_files_is_one_line(tmp_path, n_bytes):
    assert protofed("run", *POPULARITY, "--out", "first", "--cache", "cache", cwd=tmp_path).returncode == 0
    with largest_file(n_bytes):
        done = protofed("run", *POPULARITY, "--out", "run", "--cache", "cache", "--seed", "0", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: run")
    assert os.strerror(errno.EFBIG) in done.stderr
    assert "Traceback" not in done.stderr
    assert protofed("run", *POPULARITY, "--out", "run", "--cache", "cache", cwd=tmp_path).returncode == 0


def test_every_file_is_written_whole_or_the_error_names_it(tmp_path):
    path = Path(tmp_path / "file" / "table")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(files.StorageError, match=f"^{path}: Not a directory; give a place"):
        files.write_text(path, "text")
