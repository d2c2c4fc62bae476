"""The `protofed` command. A user's mistake is one line on stderr and exit code 2."""

import os
import sys

import typer

from protofed.cli import data as data_commands
from protofed.cli.bench import bench
from protofed.cli.demo import demo
from protofed.cli.privacy import privacy
from protofed.cli.report import report
from protofed.cli.run import run
from protofed.cli.tune import tune
from protofed.errors import ProtoFedError

app = typer.Typer(
    help="Private, continual web personalization.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(data_commands.app, name="data", help="List, prepare and measure interaction logs.")
app.command()(run)
app.command()(bench)
app.command()(report)
app.command()(demo)
app.command()(privacy)
app.command()(tune)


def main() -> None:
    """Run the command line."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # reproducible matrix products on a GPU
    try:
        app()
    except ProtoFedError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; the same command continues from the last finished slice", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
