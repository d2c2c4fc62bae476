"""What `mkdocs build` does to the pages: the tables of commands and settings are made from the code.

A page asks for a table with `<!-- commands -->` or `<!-- settings -->`.
"""

import ast
import dataclasses
import inspect
import re
import tokenize
import typing
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import click
import typer

from protofed import config as settings_module
from protofed.cli.main import app
from protofed.config import RunConfig

LIST_AFTER_TEXT = re.compile(r"^(?![ \t]*(?:[-*+]|\d+\.|#|>|\|)[ \t])(\S.*)\n(?=(?:-|1\.) )", re.MULTILINE)
OUTSIDE = r"(?:\.\./)+(?:(?:benchmarks|examples|experiments|results|scripts|src|tests)/[^)]*|[A-Z][^)]*)"
LARGE = r"(?:\.\./)*(?:more_logs|paper_size|sensitivity)\.html"  # reports of `make report` that the site leaves out
LINK_OUT = re.compile(rf"\[([^\]]*)\]\((?:{OUTSIDE}|{LARGE})\)")
Option = tuple[str, str, str]  # how it is written, its default, what it does
Setting = tuple[str, str, str, str]  # name, default, what it may be, what it is


def on_page_markdown(markdown: str, **_: object) -> str:
    """The page as the site shows it."""
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", command_reference())
    if "<!-- settings -->" in markdown:
        markdown = markdown.replace("<!-- settings -->", settings_reference())
    return for_the_site(markdown)


def for_the_site(markdown: str) -> str:
    """Markdown as GitHub reads it, for a reader that wants an empty line before a list and no links out of docs/."""
    parts = re.split(r"(^[ ]*```.*?^[ ]*```[ ]*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.lstrip().startswith("```") else _mend(part) for part in parts)


def _mend(text: str) -> str:
    """A piece between two blocks of code."""
    apart = re.sub(r"\A\n(?=(?:-|1\.) )", "\n\n", LINK_OUT.sub(r"\1", text))
    return LIST_AFTER_TEXT.sub(r"\1\n\n", apart)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command by its full name, in the order of `protofed --help`."""

    def below(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        inside = getattr(command, "commands", None)
        if inside is None:
            yield name, command
            return
        for part, child in inside.items():
            yield from below(f"{name} {part}", child)

    return below("protofed", typer.main.get_command(app))


def options(command: click.Command) -> list[Option]:
    """A command's arguments and options, `--help` left out."""
    return [
        (_written(parameter), _default(parameter), _sentence(getattr(parameter, "help", None) or ""))
        for parameter in command.params
        if parameter.name != "help"
    ]


def _written(parameter: click.Parameter) -> str:
    if parameter.param_type_name == "argument":
        return f"`{(parameter.name or '').upper()}`"
    value = "" if getattr(parameter, "is_flag", False) else f" {(parameter.type.name or 'text').upper()}"
    return ", ".join(f"`{name}{value}`" for name in parameter.opts)


def _default(parameter: click.Parameter) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if value is None or value is False or callable(value) or getattr(value, "name", "") == "UNSET":
        return ""
    return f"`{str(value).replace(str(Path.home()), '~')}`"


def _sentence(text: str) -> str:
    return text.replace("\n", " ").replace("|", r"\|")


def command_reference() -> str:
    """A section for each command: what it does, and a table of its options."""
    sections = []
    for name, command in commands():
        rows = [f"| {written} | {default} | {what} |" for written, default, what in options(command)]
        table = ["| option | default | what it does |", "|---|---|---|", *rows]
        sections += [f"## {name}", inspect.cleandoc(command.help or ""), "\n".join(table)]
    return "\n\n".join(sections)


def settings_tables() -> Iterator[tuple[str, str, list[Setting]]]:
    """Every table of settings: its name ("" for the outermost), what it is about, and its settings."""
    hints = typing.get_type_hints(RunConfig)
    yield "", "The run itself.", settings(RunConfig)
    for name, kind in hints.items():
        if dataclasses.is_dataclass(kind):
            yield name, inspect.getdoc(kind) or "", settings(typing.cast(type, kind), f"{name}.")


def settings(kind: type, within: str = "") -> list[Setting]:
    """The settings of one dataclass; its comment beside each is what says what it is."""
    comments, hints = field_comments(kind.__name__), typing.get_type_hints(kind)
    return [
        (f"{within}{f.name}", repr(f.default), _allowed(f, hints[f.name]), comments.get(f.name, ""))
        for f in dataclasses.fields(kind)
        if f.default is not dataclasses.MISSING
    ]


def _allowed(field: "dataclasses.Field[object]", hint: object) -> str:
    if "range" in field.metadata:
        least, most = field.metadata["range"]
        return f"{least:g} to {most:g}" if isinstance(least, float) or most < 10**6 else f"{least:,} or more"
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    return {bool: "true or false", str: "text", float: "number"}.get(typing.cast(type, hint), "")


def field_comments(name: str) -> dict[str, str]:
    """The comment behind each field of a dataclass in config.py."""
    source = inspect.getsource(settings_module)
    tokens = tokenize.generate_tokens(StringIO(source).readline)
    by_line = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    (node,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name]
    return {
        str(part.target.id): by_line.get(part.end_lineno or part.lineno, "")
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }


def settings_reference() -> str:
    """A section for each table of settings."""
    sections = []
    for name, about, found in settings_tables():
        rows = [f"| `{key}` | `{default}` | {allowed} | {_sentence(what)} |" for key, default, allowed, what in found]
        table = ["| setting | default | allowed | what it is |", "|---|---|---|---|", *rows]
        sections += [f"## {name}" if name else "## The run", about if name else "", "\n".join(table)]
    return "\n\n".join(section for section in sections if section)
