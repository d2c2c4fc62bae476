"""What the documents say exists: commands with their options, links, files."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from protofed.cli.main import app
from protofed.methods.catalogue import METHODS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
COMMAND = re.compile(r"(?:^|`)\s*(protofed [^`\n#|]+)", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        found += [(page.name, match.strip()) for match in COMMAND.findall(text)]
    return [(name, text) for name, text in found if len(text.split()) > 1]


@pytest.mark.parametrize(("page", "text"), commands())
def test_every_command_in_the_documents_exists_with_its_options(page, text):
    words = shlex.split(text.replace("…", ""))[1:]
    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    alone = all(word.startswith("-") for word in words)  # options of `protofed` itself
    assert not hasattr(command, "commands") or alone or words == ["list", "|", "prepare", "|", "stats"], (
        f"no such command: {text}"
    )
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    assert [word for word in words if word.startswith("-") and word.split("=")[0] not in known] == []


def test_the_documents_name_some_commands():
    assert len(commands()) > 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_documents_leads_somewhere(page):
    targets = [
        t for t in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in t and not t.startswith("mailto:")
    ]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_method_has_its_section():
    headings = re.findall(r"^## (\S+)", (ROOT / "docs" / "methods.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(headings) == set(METHODS)
