"""A group of commands that suggests the nearest name once, and whose arguments keep their help."""

from typing import Any

import click
from typer.core import TyperArgument, TyperGroup
from typer.utils import get_params_from_function


class Group(TyperGroup):
    """As typer's, with what typer 0.20 and click 8.5 do to each other set right."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for command in self.commands.values():
            restore_argument_help(command)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.suggest_commands = not hasattr(click.exceptions, "NoSuchCommand")  # else click says it, and typer again
        return super().resolve_command(ctx, args)


def restore_argument_help(command: click.Command) -> None:
    """Give a command's arguments the help they were declared with: typer sets it, then click's own field clears it."""
    lost = [p for p in command.params if isinstance(p, TyperArgument) and not p.help]
    if lost and command.callback is not None:
        declared = get_params_from_function(command.callback)
        for argument in lost:
            argument.help = getattr(declared[argument.name or ""].default, "help", None)
