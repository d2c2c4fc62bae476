"""The `protofed` command. A user's mistake is one line on stderr and exit code 2; Ctrl-C is one, and 130."""

import os
import sys
from typing import Annotated, Any

import click
import typer

from protofed.cli import data as data_commands
from protofed.cli.bench import bench
from protofed.cli.demo import demo
from protofed.cli.features import features
from protofed.cli.federate import federate
from protofed.cli.group import Group
from protofed.cli.pack import pack
from protofed.cli.privacy import privacy
from protofed.cli.recommend import recommend
from protofed.cli.report import report
from protofed.cli.run import run
from protofed.cli.speed import speed
from protofed.cli.tune import tune
from protofed.errors import ProtoFedError, in_one_line

RESUMABLE = ("run", "demo", "tune")  # bench says it in its own words


class Commands(Group):
    """The commands, with a last line for who stops one; typer itself would end without a word."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as problem:
            said = problem.format_message().strip()
            if not said:  # no arguments at all, and the help is printed already
                raise
            command = problem.ctx.command_path if problem.ctx else ctx.command_path
            print(f"error: {said} See `{command} --help`", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            where = "; the same command goes on from the last finished slice, or epoch of the warm-up"
            print(f"stopped{where if ctx.invoked_subcommand in RESUMABLE else ''}", file=sys.stderr)
            raise typer.Exit(130) from None


def print_version(asked: bool) -> bool:
    if asked:
        import protofed

        print(f"protofed {protofed.__version__}")
        raise typer.Exit
    return asked


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


@app.callback(help="Private, continual personalization for web sites.")
def about(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the version.")
    ] = False,
) -> None: ...


app.add_typer(data_commands.app, name="data", help="Import, prepare, list and count logs.")
for command in (run, features, recommend, bench, report, pack, demo, federate, speed, privacy, tune):
    app.command()(command)


def main() -> None:
    """Run the command line."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # reproducible matrix products on a GPU
    try:
        app()
    except (ProtoFedError, OSError) as problem:
        print(f"error: {in_one_line(problem)}", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, RuntimeError) as problem:
        if not is_out_of_memory(problem):
            raise
        way_out = "use smaller settings or a smaller --clients. What is finished is kept"
        print(f"error: out of memory; {way_out}", file=sys.stderr)
        sys.exit(2)


def is_out_of_memory(problem: Exception) -> bool:
    """Whether the machine had no memory left; PyTorch says so in words alone on a CPU."""
    said = str(problem).lower()
    return isinstance(problem, MemoryError) or "can't allocate memory" in said or "out of memory" in said


if __name__ == "__main__":
    main()
