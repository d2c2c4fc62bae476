"""What prototypes mean and what a few users are offered, in the titles of items: of runs that kept a model."""

from collections.abc import Sequence
from pathlib import Path

import torch

from protofed.client.model import VARIANTS
from protofed.client.state import select
from protofed.errors import RunFolderError
from protofed.inference.folder import MODEL, load
from protofed.inference.recommender import Catalogue, Device, Recommender, items_lifted
from protofed.privacy.draws import SystemDraws
from protofed.report.layout import Cell, Column, Line, Missing, Part, Table
from protofed.report.sections import Section, slug

SHOWN, USERS = 5, 4  # titles in a cell, users in a table
NOTE = (
    "A prototype's items are those whose score its prompt raises most for somebody without a history. "
    "Users are simulated devices of the first seed, from few events to many; an offer may be an item they know."
)
PROTOTYPES = (Column("items it lifts most", text=True),)
OFFERS = (
    *(Column("events", ranked=False), Column("newest items", text=True)),
    *(Column("prototypes and their weights", text=True), Column("offered", text=True)),
)


def cards(section: Section, root: Path) -> tuple[Part | Missing, ...]:
    """A part for each row of the section whose first run kept a model with prompts below `root`."""
    found: list[Part | Missing] = []
    for row in section.rows:
        folders = (root / row.runs[0].folder, root)
        folder = next((folder for folder in folders if (folder / MODEL).is_file()), None)
        if folder is not None:
            found += _cards(f"{section.slug}-cards-{slug(row.label)}", row.label, folder)
    return tuple(found)


def _cards(name: str, label: str, folder: Path) -> list[Part | Missing]:
    """The row's cards; none where its devices use no prompt."""
    title = f"What prototypes mean: {label}"
    try:
        model = load(folder)
    except RunFolderError as problem:
        return [Missing(title, str(problem))]
    return [Part(name, title, NOTE, _tables(name, label, model))] if prompts_are_used(model) else []


def prompts_are_used(model: Recommender) -> bool:
    """Whether any device may rank with a prompt that prototypes are in."""
    choices = zip(VARIANTS, model.model.rule.allowed, strict=True)
    return model.model.rule.use_prototypes and any(prompt and allowed for (prompt, _), allowed in choices)


def _tables(name: str, label: str, model: Recommender) -> tuple[Table, ...]:
    lifted = items_lifted(model.model, SHOWN).tolist()
    lines = [Line(f"prototype {k}", (Cell(titles(model.catalogue, items)),)) for k, items in enumerate(lifted)]
    users = [_user(model, number, place) for number, place in enumerate(typical(model), start=1)]
    return (
        Table(f"{name}-prototypes", f"Prototypes of {label}", PROTOTYPES, tuple(lines), corner="prototype"),
        Table(f"{name}-users", f"Users of {label}", OFFERS, tuple(users), corner="user"),
    )


def typical(model: Recommender) -> list[int]:
    """Places of devices that have learned, from those with few events to those with many."""
    counts = model.devices.memory.counts
    order = counts.argsort(stable=True)
    order = order[model.devices.met.cpu()[order] & (counts[order] > 0)]
    at = torch.linspace(0, len(order) - 1, min(USERS, len(order))).round().long()
    return [int(place) for place in order[at]]


def _user(model: Recommender, number: int, place: int) -> Line:
    state = select(model.devices, torch.tensor([place]))
    device = Device(model, state, SystemDraws(bytes(32)), learned=len(state.memory.items))
    offered = device.recommend(SHOWN, why=True)
    why = offered[0].why.prototypes if offered and offered[0].why else ()
    words = (
        str(len(state.memory.items)),
        titles(model.catalogue, state.memory.items[-SHOWN:].flip(0).tolist()),
        ", ".join(f"{p.number} ({p.weight:.0%})" for p in why) or "none used",
        ", ".join(found.title or str(found.item) for found in offered),
    )
    return Line(f"user {number}", tuple(map(Cell, words)))


def titles(catalogue: Catalogue, items: Sequence[int]) -> str:
    """What items are called, by their identifiers where nobody says."""
    return ", ".join(catalogue.title(item) or str(catalogue.item(item)) for item in items)
