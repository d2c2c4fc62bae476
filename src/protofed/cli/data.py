"""`protofed data list | import | prepare | stats`: parse, call, print."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from protofed.cli.group import Group
from protofed.cli.own_data import import_
from protofed.cli.progress import shown

if TYPE_CHECKING:
    from protofed.data.stats import LogStats

app = typer.Typer(cls=Group, help="Official data sets and prepared logs.", no_args_is_help=True)

ROOT = typer.Option(Path("data"), "--root", help="The folder of prepared logs: ROOT/NAME/interactions.parquet.")
AS_JSON = typer.Option(False, "--json", help="Print one JSON object instead of tables.")


@app.command("list")
def list_(root: Path = ROOT, as_json: bool = AS_JSON) -> None:
    """List the official data sets, and the prepared logs under --root."""
    from protofed.data import catalog, prepared

    known, found = catalog.DATASETS.values(), prepared.prepared_names(root)
    if as_json:
        official = [{"name": d.name, "paper_name": d.paper_name, "files": list(d.files), "page": d.page} for d in known]
        _print_json({"official": official, "root": str(root), "prepared": list(found)})
        return
    rows = [(d.name, d.paper_name, " or ".join(d.files), d.page) for d in known]
    _print_table(("name", "in the paper", "official file", "page"), rows)
    typer.echo(f"prepared under {root}: {', '.join(found) or 'none'}")


app.command("import")(import_)


@app.command()
def prepare(
    name: str = typer.Argument(help="An official data set, as `protofed data list` names it."),
    source: Path = typer.Option(..., "--source", help="The official file, or the folder that holds it."),
    root: Path = ROOT,
    encoding: str = typer.Option("utf-8", "--encoding", help="The encoding: utf-8, latin-1 or cp1252."),
    target: str | None = typer.Option(None, "--as", help="The name of the prepared log (default: NAME)."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace a different log of that name."),
    as_json: bool = AS_JSON,
) -> None:
    """Read official files once and write them as a prepared log, with the item table that lies beside them."""
    from protofed.data import catalog, prepared
    from protofed.data.stats import counts

    dataset = catalog.dataset(name)
    catalog.check_encoding(encoding)
    with shown(Console(stderr=True)) as progress:
        log = catalog.loader(dataset)(source, progress, encoding=encoding)
        from protofed.data.datasets.items import official_items

        about = official_items(dataset.name, source, progress, encoding=encoding)
    target = target or (log.name if dataset is catalog.RECBOLE else name)
    note: dict[str, object] = {"dataset": dataset.name, "family": dataset.family, "file": source.name, "rows": len(log)}
    note |= {"encoding": encoding} if encoding != catalog.UTF8 else {}
    items = None if about is None else about[0].table
    note |= {"items": about[1].name} if about is not None else {}
    file = prepared.save_log(log, root, target, source=note, items=items, overwrite=overwrite)
    size = counts(log)
    if as_json:
        _print_json({"name": target, "file": str(file), "rows": size.rows, "users": size.users, "items": size.items})
        return
    typer.echo(f"{file}: {size.rows:,} rows, {size.users:,} users, {size.items:,} items")
    if about is not None:
        told = ", ".join(role for role in about[0].columns if role != "item")
        typer.echo(f"{file.with_name(prepared.ITEMS_FILE)}: {about[0].table.num_rows:,} items with {told or 'nothing'}")


@app.command("stats")
def stats_(
    name: str = typer.Argument(help="A prepared log under --root."), root: Path = ROOT, as_json: bool = AS_JSON
) -> None:
    """Count a prepared log: raw, 5-core and canonical."""
    from protofed.data.stats import stats

    found = stats(name, root)
    if as_json:
        _print_json(found.as_dict())
        return
    _print_table(
        ("", "rows", "users", "items"),
        [
            (label, *(f"{n:,}" for n in (size.rows, size.users, size.items)))
            for label, size in (("raw", found.raw), ("5-core", found.five_core), ("canonical", found.canonical))
        ],
    )
    for line in _sentences(found):
        typer.echo(line)


def _sentences(found: "LogStats") -> Iterator[str]:
    yield f"canonical: {found.canonical_rule}"
    yield f"{found.first} to {found.last}: {found.days:,} days, {found.instants:,} distinct instants"
    yield f"repeats: {found.repeat_share:.1%} of the rows; duplicates: {found.duplicate_rows:,} rows"
    yield f"median rows: {found.median_rows_per_user:g} per user, {found.median_rows_per_item:g} per item"
    if found.events:
        yield "events: " + ", ".join(f"{event} {n:,}" for event, n in found.events.items())
    if found.mean_rating is not None:
        yield f"mean rating: {found.mean_rating}"


def _print_json(value: dict[str, object]) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False))


def _print_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Aligned columns, never cut: a page's address must survive a pipe."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
