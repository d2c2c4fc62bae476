"""The synthetic world's item table: from what items are, not from who met them."""

from dataclasses import replace

import torch

from protofed.data.synthetic import drifting_world, preset
from protofed.data.synthetic_items import describe_items
from protofed.features.build import for_log
from protofed.features.columns import category, place
from protofed.features.content import Content
from protofed.seeds import stream
from protofed.slices.leaks import check_public

CONFIG = replace(preset("tiny"), n_items=300)


def a_world():
    return drifting_world(CONFIG, stream(0, "tests"))


def test_the_table_says_the_same_of_an_item_whatever_happened_to_it():
    """Users, popularity and births changed: the same items, the same words."""
    world = a_world()
    other = drifting_world(replace(CONFIG, events_per_user=60.0, zipf=0.1), stream(0, "tests"))
    told, again = (describe_items(w, stream(1, "items")).to_pylist() for w in (world, a_world()))
    assert told == again
    assert len(told) == world.log.n_items
    assert [row["item"] for row in told] == world.log.item_ids.to_pylist()
    same = dict(zip(other.log.item_ids.to_pylist(), other.items.category.tolist(), strict=True))
    mine = dict(zip(world.log.item_ids.to_pylist(), world.items.category.tolist(), strict=True))
    assert all(same[item] == mine[item] for item in same.keys() & mine.keys())


def test_category_text_and_place_tell_of_the_latent_vector_with_noise():
    world = a_world()
    table = describe_items(world, stream(1, "items"))
    names, true = table["category"].to_pylist(), world.items.category.tolist()
    usual = {c: max(set(names), key=[n for n, t in zip(names, true, strict=True) if t == c].count) for c in set(true)}
    right = sum(usual[t] == n for n, t in zip(names, true, strict=True)) / len(names)
    assert 0.85 < right < 0.99
    spots = place(table).vectors
    apart = torch.cdist(spots, spots)
    hidden = torch.cdist(world.items.vectors, world.items.vectors)
    pairs = torch.stack([apart.flatten(), hidden.flatten()])
    assert 0.2 < float(torch.corrcoef(pairs)[0, 1]) < 0.95
    shared = [
        [len(set(a.split()) & set(b.split())) for b in table["text"].to_pylist()] for a in table["text"].to_pylist()
    ]
    alike = torch.stack([torch.tensor(shared, dtype=torch.float64).flatten(), -hidden.flatten()])
    assert 0.2 < float(torch.corrcoef(alike)[0, 1]) < 0.95


def test_it_passes_the_leak_checker():
    world = a_world()
    table = describe_items(world, stream(1, "items"))
    check_public(world.log, Content(tuple(for_log(m(table), world.log, table) for m in (place, category))))
