"""Rows of items that nobody has learned, from their nearest known items."""

import math
from dataclasses import replace

import pyarrow as pa
import pytest
import torch
import worlds
from torch import Generator

from protofed.backbone.content import kilometres, like_content_of, nearest, on_sphere, whitened, with_nearest
from protofed.backbone.new_items import with_new_rows
from protofed.backbone.one_query import embed_history, last_state, lay_out, score_items
from protofed.backbone.pretrain import content_key, load_backbone, save_backbone
from protofed.backbone.sasrec import SASRec, grown
from protofed.backbone.training import Fit
from protofed.features.content import Content, modality
from protofed.methods.baselines.extended import Extended, plain
from protofed.slices.histories import BOS
from protofed.snapshot import restore, take_snapshot

N, KNOWN = 12, 8
EARTH_KM = 6371.0088


def places(n: int = N, missing: tuple[int, ...] = (), seed: int = 0) -> Content:
    degrees = torch.rand(n, 2, generator=Generator().manual_seed(seed), dtype=torch.float64) * 0.2 + 40
    present = torch.ones(n, dtype=torch.bool)
    present[list(missing)] = False
    return Content((modality("place", degrees, present),))


def vectors(n: int = N, name: str = "text", seed: int = 1) -> Content:
    drawn = torch.randn(n, 5, generator=Generator().manual_seed(seed))
    return Content((modality(name, drawn, torch.ones(n, dtype=torch.bool)),))


def haversine(a: list[float], b: list[float]) -> float:
    """Kilometres between two places, by another formula than the code's."""
    (lat1, lon1), (lat2, lon2) = ([math.radians(x) for x in place] for place in (a, b))
    h = math.sin((lat2 - lat1) / 2) ** 2 + math.cos(lat1) * math.cos(lat2) * math.sin((lon2 - lon1) / 2) ** 2
    return 2 * EARTH_KM * math.asin(math.sqrt(h))


def by_hand(model: SASRec, degrees: torch.Tensor, item: int, k: int) -> torch.Tensor:
    """The mean of the rows of the k nearest known places, each weighing 1 / (km + 0.2)."""
    apart = sorted((haversine(degrees[item].tolist(), degrees[j].tolist()), j) for j in range(KNOWN))[:k]
    weights = [1 / (km + 0.2) for km, _ in apart]
    rows = [w * model.items.detach()[j] for w, (_, j) in zip(weights, apart, strict=True)]
    return torch.stack(rows).sum(0) / sum(weights)


def test_kilometres_are_those_of_the_haversine_formula_down_to_metres():
    degrees = [[40.0, -74.0], [40.00001, -74.0], [-33.9, 151.2], [90.0, 0.0], [0.0, 180.0], [0.0, -180.0]]
    found = kilometres(*[EARTH_KM * on_sphere(torch.tensor(degrees, dtype=torch.float64))] * 2)
    for i, a in enumerate(degrees):
        for j, b in enumerate(degrees):
            assert float(found[i, j]) == pytest.approx(haversine(a, b), abs=1e-6)
    assert float(found[0, 1]) == pytest.approx(0.00111, abs=1e-5)  # a metre
    assert float(found[4, 5]) == pytest.approx(0, abs=1e-9)  # the date line is no edge


def test_an_item_without_a_row_gets_the_mean_of_its_nearest_known_places():
    model, content = worlds.random_model(KNOWN), places()
    told = with_nearest(model, content, 3)
    degrees = content.modalities[0].vectors
    for item in range(KNOWN, N):
        torch.testing.assert_close(told.embed(torch.tensor(item)), by_hand(model, degrees, item, 3))
    assert torch.equal(told.embed(torch.arange(KNOWN)), model.items)  # those with a row keep it
    assert told.tells_apart(torch.arange(N)).all()
    assert not told.knows(torch.arange(KNOWN, N)).any()  # a row from content is no trained one
    assert model.content is None  # the model itself is as it was


def test_items_that_nothing_is_known_of_go_on_sharing_the_mean_row():
    model = worlds.random_model(KNOWN)
    told = with_nearest(model, places(missing=(9,)), 3)
    asked = torch.tensor([9, N, N + 5, -1])
    assert torch.equal(told.embed(asked), model.mean_row.expand(4, -1))
    hidden = torch.randn(3, 8, generator=Generator().manual_seed(2))
    scores = told.scores(hidden, N + 2)
    assert torch.equal(scores[:, 9], scores[:, N])  # they tie to the bit
    assert not torch.equal(scores[:, 10], scores[:, N])
    torch.testing.assert_close(scores, hidden @ told.rows(N + 2).T)
    among = torch.tensor([[8, 9, N], [1, 9, 10], [N + 1, 11, 3]])
    torch.testing.assert_close(told.scores_among(hidden, among), scores.gather(1, among))


def test_vectors_are_near_by_the_cosine_and_negative_cosines_weigh_nothing():
    sources = torch.tensor([[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]])
    near, weight = nearest(torch.tensor([[1.0, 0.0]]), sources, 3, by_distance=False)
    assert near.tolist() == [[0, 1, 2]]
    assert weight[0].tolist() == pytest.approx([1 / 1.6, 0.6 / 1.6, 0], abs=1e-5)


def test_two_modalities_give_the_mean_of_their_rows_and_one_alone_its_own():
    model = worlds.random_model(KNOWN)
    where, what = places(missing=(8,)), vectors()
    both = with_nearest(model, Content(where.modalities + what.modalities), 3).rows(N)
    by_place, by_text = with_nearest(model, where, 3).rows(N), with_nearest(model, what, 3).rows(N)
    torch.testing.assert_close(both[9:], (by_place[9:] + by_text[9:]) / 2)
    torch.testing.assert_close(both[8], by_text[8])


def test_whitening_makes_the_fitted_items_spread_alike_and_reads_no_other():
    drawn = torch.randn(60, 4, generator=Generator().manual_seed(0)) @ torch.diag(torch.tensor([5.0, 2.0, 1.0, 0.5]))
    fitted = torch.arange(60) < 40
    white = whitened(drawn, fitted)
    chosen = white[fitted].double()
    torch.testing.assert_close(chosen.mean(0), torch.zeros(4, dtype=torch.float64), atol=1e-5, rtol=0)
    torch.testing.assert_close(chosen.T @ chosen / 40, torch.eye(4, dtype=torch.float64), atol=1e-4, rtol=0)
    moved = drawn.clone()
    moved[~fitted] += 100
    torch.testing.assert_close(whitened(moved, fitted)[fitted], white[fitted])


def test_content_rows_follow_the_rows_that_train_and_give_way_to_them():
    model, content = worlds.random_model(KNOWN), places()
    told = grown(with_nearest(model, content, 3), N)
    with torch.no_grad():
        told.items[:KNOWN] += 1
    told.refresh_mean_row()
    moved = grown(model, N)
    with torch.no_grad():
        moved.items[:KNOWN] += 1
    torch.testing.assert_close(told.embed(torch.tensor(10)), by_hand(moved, content.modalities[0].vectors, 10, 3))
    told.has_row[10] = True
    told.refresh_mean_row()
    assert torch.equal(told.embed(torch.tensor(10)), told.items[10])
    assert not bool(told.content.describes(torch.tensor(10)))  # whose row is now trained
    again = with_nearest(model, content, 3)  # a copy of a copy shares nothing that changes
    assert torch.equal(again.rows(N)[KNOWN:], with_nearest(model, content, 3).rows(N)[KNOWN:])


def test_rows_that_are_learned_start_at_content_where_nothing_is_met_beside_them():
    model, data = worlds.warmed_up()[0], worlds.tiny_stream()
    content = vectors(worlds.tiny_log().n_items)
    told, plainly = with_nearest(model, content, 3), model
    slice_ = data.slice_(1)
    (with_rows, new), (without, same) = with_new_rows(told, slice_), with_new_rows(plainly, slice_)
    assert torch.equal(new, same)
    alone = [i for i in new.nonzero()[:, 0].tolist() if torch.equal(without.items[i], plainly.mean_row)]
    others = [i for i in new.nonzero()[:, 0].tolist() if i not in alone]
    assert others
    assert torch.equal(with_rows.items[others], without.items[others])  # else at the items it was met with
    for i in alone:
        assert torch.equal(with_rows.items[i], told.embed(torch.tensor(i)))


def test_a_flat_backbone_a_copy_and_one_taken_apart_rank_alike():
    model = with_nearest(worlds.random_model(KNOWN), places(missing=(9,)), 3)
    flat = lay_out(model, N + 1, 2)
    tokens = torch.tensor([[1, 10, 3]])
    hidden = model.last_hidden(torch.cat([torch.full((1, 1), BOS), tokens], dim=1))
    asked = last_state(flat, embed_history(flat, tokens[0], torch.zeros(0, dtype=torch.int64), torch.zeros(0, 8)))
    torch.testing.assert_close(hidden[0], asked)
    torch.testing.assert_close(score_items(flat, asked), model.scores(hidden, N + 1)[0])
    apart = plain(Extended(model))
    assert torch.equal(apart.rows(N), model.rows(N))
    back = restore(take_snapshot(model))
    assert torch.equal(back.rows(N), model.rows(N))
    back.refresh_mean_row()
    assert torch.equal(back.rows(N), model.rows(N))


def test_a_fresh_model_takes_the_places_not_the_rows():
    model = with_nearest(worlds.random_model(KNOWN), places(), 3)
    fresh = like_content_of(worlds.random_model(KNOWN, seed=7), model)
    torch.testing.assert_close(fresh.embed(torch.tensor(10)), by_hand(fresh, places().modalities[0].vectors, 10, 3))


def test_a_warm_up_is_shared_with_runs_without_features(tmp_path):
    """The key, the weights and a backbone's file are those of a version without content."""
    data, config = worlds.tiny_stream(), worlds.tiny_config()
    asked = replace(config, content=replace(config.content, features="text"))
    assert content_key(config, data, worlds.CPU) == content_key(asked, data, worlds.CPU)
    model = worlds.random_model(KNOWN)
    assert not [name for name in model.state_dict() if "content" in name]
    assert pa.array(sorted(model.state_dict())).equals(pa.array(sorted(worlds.random_model(KNOWN).state_dict())))
    save_backbone(tmp_path / "model.safetensors", worlds.warmed_up()[0], Fit((0.1,), 1, 1))
    loaded, _ = load_backbone(tmp_path / "model.safetensors", config, worlds.CPU)
    assert loaded.content is None
