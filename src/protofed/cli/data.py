"""`protofed data list | import | prepare | stats`: parse, call, print."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from protofed.cli.group import Group
from protofed.cli.progress import shown

if TYPE_CHECKING:
    from protofed.data.own_import import ItemSummary, Summary
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


@app.command("import")
def import_(
    file: Path = typer.Argument(help="The log: csv (or with tabs, ; or |), jsonl or parquet; a text may be .gz."),
    name: str = typer.Option(..., "--as", help="The name of the prepared log."),
    user: str | None = typer.Option(None, "--user", help="The column of users (default: found by its name)."),
    item: str | None = typer.Option(None, "--item", help="The column of items."),
    time: str | None = typer.Option(None, "--time", help="The column of times."),
    rating: str | None = typer.Option(None, "--rating", help="The column of ratings; '' reads none."),
    event: str | None = typer.Option(None, "--event", help="The column of event names; '' reads none."),
    time_format: str | None = typer.Option(
        None, "--time-format", help="How times are written, such as '%d.%m.%Y %H:%M' (default: ISO 8601 or unix time)."
    ),
    items: Path | None = typer.Option(None, "--items", help="A table of the items, with titles, texts or places."),
    no_header: bool = typer.Option(
        False, "--no-header", help="The file has no header; columns are called 1, 2, 3, ..."
    ),
    malformed: float = typer.Option(0.01, "--malformed", help="The share of rows that may be malformed and dropped."),
    encoding: str = typer.Option("utf-8", "--encoding", help="The encoding: utf-8, latin-1 or cp1252."),
    root: Path = typer.Option(Path("data"), "--root", help="The folder of prepared logs."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace a different log of that name."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of sentences."),
) -> None:
    """Read your own log and write it as a prepared log."""
    from protofed.data.catalog import check_encoding
    from protofed.data.own_import import import_log
    from protofed.data.own_log import Asked

    check_encoding(encoding)
    with shown(Console(stderr=True)) as progress:
        done = import_log(
            file,
            name,
            root,
            Asked(user, item, time, rating, event, time_format),
            progress,
            items=items,
            encoding=encoding,
            header=not no_header,
            malformed_share=malformed,
            overwrite=overwrite,
        )
    for line in _choices(done):
        typer.echo(line, err=True)
    if as_json:
        _print_json(done.as_dict())
        return
    for line in _import_sentences(done):
        typer.echo(line)


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


def _choices(done: "Summary") -> Iterator[str]:
    """Which column was taken for what."""
    taken = (
        f"{role} = {column}" + (f" ({done.time})" if role == "time" else "") for role, column in done.columns.items()
    )
    yield ", ".join(taken)
    if done.item_table is not None:
        yield f"{done.item_table.source}: " + ", ".join(
            f"{role} = {name}" for role, name in done.item_table.columns.items()
        )
    yield from done.remarks


def _import_sentences(done: "Summary") -> Iterator[str]:
    size = f"{_of(done.rows, 'row')}, {_of(done.users, 'user')}, {_of(done.items, 'item')}"
    yield f"{done.file}: {size}, {done.first} to {done.last}"
    lost = ""
    if done.first_malformed is not None:
        first = done.first_malformed
        lost = f", {done.malformed:,} malformed and dropped (the first is row {first['row']:,}: {first['what']})"
    yield f"{_of(done.read, 'row')} read{lost}"
    if done.duplicates:
        again = _of(done.duplicates, "row")
        yield f"duplicates, which are kept: {again} with the user, item and time of an earlier one"
    if done.users_below_five:
        yield (
            f"users with fewer than five events: {done.users_below_five:,} of {done.users:,}; they are not trained on, "
            "and are served from their own history at once"
        )
    core = done.five_core
    if core.rows:
        size = f"{_of(core.rows, 'row')}, {_of(core.users, 'user')}, {_of(core.items, 'item')}"
        yield f"5-core, which is trained on: {size}"
        if core.items < done.items:
            yield f"items outside it, which are never recommended: {done.items - core.items:,} of {done.items:,}"
    else:
        yield "5-core leaves nothing (no users and items with five rows each): a run needs a larger log"
    if done.item_table is not None:
        yield from _item_sentences(done.item_table, done.items)


def _item_sentences(table: "ItemSummary", n_items: int) -> Iterator[str]:
    about = ", ".join(role for role in table.columns if role != "item")
    yield f"{table.file}: {_of(table.rows, 'item')} with {about or 'nothing else'}"
    yield f"{table.log_items_without_row:,} of {n_items:,} items have no row in {table.source}"
    lost = {
        "rows without a usable identifier, dropped": table.malformed,
        "rows that repeat an item, dropped (the first is kept)": table.duplicates,
        "items at an impossible latitude or longitude, which is left out": table.misplaced,
    }
    yield from (f"{what}: {count:,}" for what, count in lost.items() if count)
    if table.dropped_columns:
        yield f"columns left out: {', '.join(table.dropped_columns)}"


def _of(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def _print_json(value: dict[str, object]) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False))


def _print_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Aligned columns, never cut: a page's address must survive a pipe."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
