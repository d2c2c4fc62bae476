"""A group of commands that suggests the nearest name once."""

from typing import Any

import click
from typer.core import TyperGroup


class Group(TyperGroup):
    """As typer's; where click itself says what may have been meant, typer does not say it again."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.suggest_commands = not hasattr(click.exceptions, "NoSuchCommand")
        return super().resolve_command(ctx, args)
