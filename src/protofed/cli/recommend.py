"""`protofed recommend`: what one user should see next, from a model's folder alone."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from protofed.errors import ConfigError, DataError

if TYPE_CHECKING:
    from protofed.inference.recommender import Catalogue, Device, Recommendation, Recommender

FEW = 5  # events below which a user was not trained on


def recommend(
    model: Annotated[Path, typer.Argument(help="A run's folder, or one that protofed.save wrote.")],
    user: Annotated[str | None, typer.Option(help="A user of the log, by the original id.")] = None,
    n: Annotated[int, typer.Option("-n", help="How many items.")] = 10,
    history: Annotated[
        str | None, typer.Option(help="Instead of --user: items the user met, oldest first, separated by commas.")
    ] = None,
    candidates: Annotated[Path | None, typer.Option(help="Rank only the items in this file, one id a line.")] = None,
    exclude_seen: Annotated[bool, typer.Option("--exclude-seen", help="Leave out items the user has met.")] = False,
    why: Annotated[bool, typer.Option("--why", help="Say why each item is ranked where it is.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Recommend items to one user; no log is needed and nothing is trained."""
    if (user is None) == (history is None):
        raise ConfigError("name one user: --user ID for somebody of the log, or --history a,b,c for anybody else")
    from protofed.inference.folder import load

    found = load(model)
    console = Console(stderr=True)
    device = found.device(user) if user is not None else found.device(history=split_ids(history or ""))
    among, missing = (None, "") if candidates is None else known_candidates(candidates, found.catalogue)
    answer = device.recommend(n, candidates=among, exclude_seen=exclude_seen, why=why)
    for line in [*remarks(device, user), *([missing] if missing else [])]:
        console.print(line, highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(as_dict(found, device, user, answer), ensure_ascii=False))
    else:
        print_answer(found, answer, why=why)


def split_ids(text: str) -> list[str]:
    """Ids separated by commas; none in an empty text."""
    return [part.strip() for part in text.split(",") if part.strip()]


def remarks(device: "Device", user: str | None) -> Iterable[str]:
    """What a person should know before reading the answer."""
    unknown, events = device.unknown, len(device.state.memory.items)
    if unknown:
        shown = ", ".join(map(str, unknown[:3])) + (", …" if len(unknown) > 3 else "")
        yield f"{len(unknown)} of {len(unknown) + events} items of the history are unknown to this model: {shown}"
    if not events:
        yield "no known history: everybody without one gets this answer"
    elif user is not None and events < FEW and not bool(device.state.contributes):
        yield f"user {user} has {events} known events, too few to learn from: served from them directly"


def known_candidates(path: Path, catalogue: "Catalogue") -> tuple[list[str], str]:
    """The ids in a file that the model knows, and a remark where it does not know all."""
    try:
        ids = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "text that is not UTF-8"
        raise DataError(f"{path}: candidates are a text file with one item id a line, found {reason}") from problem
    known = [item for item in ids if catalogue.number(item) is not None]
    if not known:
        raise DataError(f"{path}: none of its {len(ids):,} lines is an item of this model; give one item id a line")
    missing = len(ids) - len(known)
    remark = f"{missing:,} of {len(ids):,} candidates are unknown to this model" if missing else ""
    return list(dict.fromkeys(known)), remark


def as_dict(
    model: "Recommender", device: "Device", user: str | None, answer: "list[Recommendation]"
) -> dict[str, object]:
    """The answer for machines."""
    rows = [{key: value for key, value in asdict(row).items() if value is not None} for row in answer]
    known = len(device.state.memory.items)
    return {"model": model.name, "user": user, "history": known, "unknown": list(device.unknown), "items": rows}


def print_answer(model: "Recommender", answer: "list[Recommendation]", *, why: bool) -> None:
    """The answer as a table."""
    table = Table(box=None, pad_edge=False)
    wanted = {"": True, "item": True, "title": any(row.title for row in answer), "score": True, "why": why}
    for name in (name for name, shown in wanted.items() if shown):
        table.add_column(name, justify="right" if name in ("", "score") else "left", no_wrap=name == "item")
    for place, row in enumerate(answer, start=1):
        cells = (str(place), str(row.item), row.title or "", f"{row.score:.3f}", reason_text(row))
        table.add_row(*(cell for cell, shown in zip(cells, wanted.values(), strict=True) if shown))
    console = Console()
    console.print(table)
    if why and answer and answer[0].why is not None:
        for line in prototype_lines(model, answer[0].why.prototypes):
            console.print(line, highlight=False)


def reason_text(row: "Recommendation") -> str:
    """One item's reason in words."""
    why = row.why
    if why is None:
        return ""
    parts = []
    if why.times_met and why.last_met is not None:
        day = datetime.fromtimestamp(why.last_met, UTC).date().isoformat()
        parts.append(f"met {why.times_met} time{'s' if why.times_met > 1 else ''}, last on {day}")
        parts += ["scored with a row of one's own"] if why.own_row else []
    else:
        parts.append("not met before")
    parts += [f"known by its content alone, near {', '.join(map(str, why.like))}"] if why.like else []
    parts.append(f"place {why.public_rank} for the backbone alone")
    return "; ".join(parts)


def prototype_lines(model: "Recommender", prototypes: Any) -> Iterable[str]:
    """The prototypes behind an answer, each by the items it lifts most."""
    if not prototypes:
        yield "this device answers without its prompt: no prototype took part"
        return
    titles = model.catalogue
    for prototype in prototypes:
        names = (titles.title(number) or str(titles.item(number)) for number in titles.numbers(prototype.items))
        yield f"prototype {prototype.number} (weight {prototype.weight:.2f}): lifts {', '.join(names)}"
