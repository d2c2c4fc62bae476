"""The Dockerfile, as far as it can be checked without an engine that builds it: what it copies, installs and starts."""

import fnmatch
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from protofed.cli.main import app

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
STEPS = [line.partition(" ") for line in TEXT.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
COPIED = [source for verb, _, rest in STEPS if verb == "COPY" for source in shlex.split(rest)[:-1]]
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def sent(path: str) -> bool:
    """Whether .dockerignore lets a path through; its last matching line decides."""
    answer = True
    for line in filter(None, IGNORED):
        kept, pattern = line.startswith("!"), line.removeprefix("!").removeprefix("**/")
        parts = Path(path).parts
        if any(fnmatch.fnmatch("/".join(parts[:n]), pattern) for n in range(1, len(parts) + 1)) or (
            line.startswith("**/") and any(fnmatch.fnmatch(part, pattern) for part in parts)
        ):
            answer = kept
    return answer


@pytest.mark.parametrize("source", COPIED)
def test_every_path_that_is_copied_exists_and_is_sent_to_the_engine(source):
    assert (ROOT / source).exists()
    assert sent(source)


def test_nothing_else_is_sent():
    assert not any(map(sent, ("runs/x", "data/shop", ".venv/bin/python", "results/pack", "src/protofed/__pycache__")))


def test_only_known_steps_are_taken_and_the_package_starts():
    assert [verb for verb, _, _ in STEPS if verb not in ("FROM", "WORKDIR", "COPY", "RUN", "ENTRYPOINT", "CMD")] == []
    assert '["protofed"]' in TEXT
    assert "protofed" in PROJECT["scripts"]


def test_it_has_the_python_and_the_extras_that_the_project_asks_for():
    version = re.search(r"^FROM python:(\d+)\.(\d+)-slim$", TEXT, re.MULTILINE)
    least = re.search(r">=(\d+)\.(\d+)", PROJECT["requires-python"])
    assert tuple(map(int, version.groups())) >= tuple(map(int, least.groups()))
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", TEXT)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert PROJECT["readme"] in COPIED  # the build reads it


def test_the_commands_it_shows_exist():
    shown = re.findall(r"protofed ((?:data )?\w+) \S+ --as", TEXT)
    commands = typer.main.get_command(app).commands
    for text in shown:
        group, _, name = text.partition(" ")
        assert name in commands[group].commands
    assert shown == ["data import"]
