"""Files are whole or not there, whatever happens while they are written."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from protofed.files import UNFINISHED, remove_unfinished, save_tensors, write_text, written_atomically


def test_a_file_appears_only_once_it_is_whole(tmp_path):
    path = tmp_path / "table"
    with written_atomically(path) as unfinished:
        unfinished.write_bytes(b"half")
        assert not path.exists()
        assert unfinished.parent == path.parent  # a rename across file systems would not be atomic
        unfinished.write_bytes(b"whole")
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]


def fail_half_way(path: Path) -> None:
    with written_atomically(path) as unfinished:
        unfinished.write_text("half")
        raise ValueError("the disk is on fire")


def test_an_error_keeps_the_old_file_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "table"
    write_text(path, "old")
    with pytest.raises(ValueError, match="on fire"):
        fail_half_way(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_text_is_written_as_utf_8_and_replaces_what_was_there(tmp_path):
    path = tmp_path / "config.toml"
    write_text(path, "a much longer old text")
    write_text(path, "ε = 3.4\n")
    assert path.read_bytes() == "ε = 3.4\n".encode()


def test_tensors_may_be_read_by_whoever_may_read_a_text_beside_them(tmp_path):
    write_text(tmp_path / "text", "x")
    save_tensors(tmp_path / "tensors", {"x": torch.zeros(2)}, {})
    assert (tmp_path / "tensors").stat().st_mode == (tmp_path / "text").stat().st_mode


@pytest.mark.slow
def test_what_a_killed_process_leaves_is_cleared_and_the_old_file_is_still_whole(tmp_path):
    path = tmp_path / "table"
    write_text(path, "old")
    code = f"""
import os, pathlib
from protofed.files import written_atomically
with written_atomically(pathlib.Path({str(path)!r})) as unfinished:
    unfinished.write_text("half")
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert path.read_text() == "old"
    assert len(list(tmp_path.glob(f"*{UNFINISHED}"))) == 1
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
