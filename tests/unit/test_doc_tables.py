"""The reference pages that the docs site makes from the code (docs/hooks.py), and the page of the Python names."""

import importlib.util
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

import protofed
from protofed.cli.main import app
from protofed.config import RunConfig

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
hooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hooks)


def test_every_command_has_its_section_and_every_option_its_words():
    found = dict(hooks.commands())
    top = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert set(found) == {
        f"protofed {name}" for name in (*top, *(f"data {n}" for n in ("list", "import", "prepare", "stats")))
    }
    page = hooks.command_reference()
    for name, command in found.items():
        assert f"## {name}\n" in page
        assert command.help
        assert [written for written, _, what in hooks.options(command) if not what] == []


def test_help_says_what_an_argument_is():
    found = CliRunner().invoke(app, ["recommend", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert "A run's folder, or one that protofed.save wrote" in found.stdout


def test_an_option_is_shown_with_its_value_its_default_and_without_anybodys_home():
    page = hooks.command_reference()
    assert "| `--seeds TEXT` |  |" in page
    assert "| `--cache PATH` | `~/.cache/protofed` |" in page
    assert "| `--dry-run` |  |" in page
    assert "| `FILE` | required |" in page
    assert str(Path.home()) not in page.replace("~", "")


def test_every_setting_is_listed_with_its_default_and_a_line_about_it():
    listed = {key: rest for _, _, found in hooks.settings_tables() for key, *rest in found}
    config = RunConfig()
    names = set()
    for field in fields(config):
        value = getattr(config, field.name)
        inside = {f"{field.name}.{f.name}" for f in fields(value)} if is_dataclass(value) else {field.name}
        names |= inside
    assert set(listed) == names
    assert [key for key, (_, _, what) in listed.items() if not what] == []
    assert listed["training.negatives"] == ["64", "1 or more", "uniform negatives per window"]
    assert listed["privacy.sampling_rate"][:2] == ["0.05", "1e-09 to 1"]
    assert listed["privacy.trust"][1] == "`central`, `secure-aggregation`, `local`"


def test_the_page_of_python_names_has_every_public_one_once():
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: protofed\.(\w+)$", page, re.MULTILINE)) == sorted(protofed.__all__)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("It says:\n- one\n- two\n", "It says:\n\n- one\n- two\n"),
        ("- one\n  goes on\n- two\n", "- one\n  goes on\n- two\n"),
        ("```\na:\n- b\n```\n", "```\na:\n- b\n```\n"),
        ("```\na\n```\n- b\n", "```\na\n```\n\n- b\n"),
        ("[parity](../benchmarks/x/README.md) and [data](../own_data.md)", "parity and [data](../own_data.md)"),
        ("[rules](../../CONTRIBUTING.md#add), [rows](../results.md)", "rules, [rows](../results.md)"),
        ("see [its report](more_logs.html)", "see its report"),
    ],
)
def test_a_page_for_github_becomes_one_for_the_site(written, shown):
    assert hooks.for_the_site(written) == shown
