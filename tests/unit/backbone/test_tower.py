"""The tower: content rows learned in the warm-up, gated over what is known, added up with the own rows at the end."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor
from worlds import CPU, random_model, tiny_config, tiny_log, tiny_stream

from protofed.backbone.pretrain import cached_warm_up, content_key, untrained_backbone, warm_up
from protofed.backbone.tower import Tower, Towered, distinct, settled, uncounted
from protofed.backbone.validation import validation_ndcg
from protofed.config import RunConfig
from protofed.features.content import Content, modality
from protofed.seeds import stream

N, KNOWN = 12, 8


def content(n: int = N, no_place: tuple[int, ...] = (1, 9, 10), no_text: tuple[int, ...] = (2, 9, 11)) -> Content:
    rng = Generator().manual_seed(3)
    place = 40 + torch.rand(n, 2, generator=rng, dtype=torch.float64)
    text = torch.randn(n, 5, generator=rng)
    has = [torch.ones(n, dtype=torch.bool) for _ in range(2)]
    has[0][list(no_place)], has[1][list(no_text)] = False, False
    return Content((modality("place", place, has[0]), modality("text", text, has[1])))


def towered(id_dropout: float = 0.5, seed: int = 0) -> Towered:
    """One whose every weight was moved from where it starts."""
    plain, rng = random_model(KNOWN), Generator().manual_seed(seed)
    tower = Tower(content(), torch.ones(KNOWN, dtype=torch.bool), 8, rng)
    model = Towered(plain.config, KNOWN, rng, tower, id_dropout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=rng)
    model.refresh_mean_row()
    return model.eval()


def test_a_row_is_the_gated_mean_over_what_is_known_of_the_item():
    tower = towered().tower.requires_grad_(False)
    rows = tower(torch.arange(N + 1)).detach()
    for item in range(N):
        parts, gates = [], []
        for name in ("place", "text"):
            if not bool(getattr(tower, f"present_{name}")[item]):
                continue
            x = getattr(tower, f"inputs_{name}")[item]
            if name == "place":
                x = torch.cat([(x @ tower.waves).sin(), (x @ tower.waves).cos()])
            parts.append(tower.maps[name].weight @ x + tower.maps[name].bias)
            gates.append(math.exp(float(tower.gates[name].weight[0] @ parts[-1] + tower.gates[name].bias)))
        expected = sum((g / sum(gates) * p for g, p in zip(gates, parts, strict=True)), torch.zeros(8))
        torch.testing.assert_close(rows[item], expected.detach(), atol=1e-5, rtol=1e-4)
    assert not rows[9].any()  # nothing is known of it
    assert not rows[N].any()
    assert tower.described.tolist() == [i != 9 for i in range(N)]


def test_place_is_smooth_at_first_and_tells_streets_apart():
    degrees = torch.tensor([[40.0, -74.0], [40.00001, -74.0], [40.05, -74.0]], dtype=torch.float64)
    where = Content((modality("place", degrees, torch.ones(3, dtype=torch.bool)),))
    rows = Tower(where, torch.ones(3, dtype=torch.bool), 64, Generator().manual_seed(0))(torch.arange(3)).detach()
    assert float((rows[0] - rows[1]).norm()) < 0.02 * float(rows[0].norm())  # a metre away
    assert float((rows[0] - rows[2]).norm()) > 0.2 * float(rows[0].norm())  # five kilometres


def test_the_settled_backbone_is_plain_and_ranks_alike():
    model = towered()
    plain = settled(model)
    assert type(plain) is not Towered
    tokens = torch.tensor([[1, 10, 3], [9, 2, 8]])
    torch.testing.assert_close(plain.last_hidden(tokens), model.last_hidden(tokens))
    hidden = torch.randn(4, 8, generator=Generator().manual_seed(1))
    torch.testing.assert_close(plain.scores(hidden, N + 1), model.scores(hidden, N + 1))
    scores = plain.scores(hidden, N + 1)
    assert torch.equal(scores[:, 9], scores[:, N])  # those that nothing is known of tie
    assert plain.knows(torch.arange(N)).sum() == KNOWN
    plain.refresh_mean_row()
    torch.testing.assert_close(plain.mean_row, model.mean_row)
    torch.testing.assert_close(plain.input_norm(), model.input_norm())


def test_in_training_own_rows_are_left_out_as_often_as_asked_and_only_where_content_stands_in():
    model = towered(id_dropout=0.25)
    items = torch.arange(KNOWN).expand(4_000, -1)
    whole = model.embed(items)[0].detach()
    torch.testing.assert_close(whole, (model.items + model.tower(torch.arange(KNOWN))).detach())
    assert torch.equal(model.embed(items)[7], whole.expand(4_000, -1, -1)[7])
    model.train()
    torch.manual_seed(0)
    found = model.embed(items).detach()
    content_alone = model.tower(torch.arange(KNOWN)).detach()
    dropped = ((found - content_alone).abs().amax(-1) < 1e-6).float().mean(0)
    assert dropped.tolist() == pytest.approx([0.25] * KNOWN, abs=0.03)
    bare = Towered(model.config, KNOWN, Generator().manual_seed(0), Tower(
        Content((modality("text", torch.randn(N, 3), torch.arange(N) > 0),)),
        torch.ones(KNOWN, dtype=torch.bool), 8, Generator().manual_seed(0)), 0.9)  # fmt: skip
    first = bare.train().embed(torch.zeros(50, 9, dtype=torch.int64))
    assert torch.equal(first, bare.items[0].expand(50, 9, -1))  # item 0 has no content: its own row always


def one_by_one(model: Towered, items: Tensor) -> Tensor:
    """Rows as `embed` makes them, each look-up on its own; draws the same numbers."""
    left_out = torch.rand(items.shape) < model.id_dropout if model.training else torch.zeros(items.shape) > 0
    rows = []
    for item, without in zip(items.flatten().tolist(), left_out.flatten().tolist(), strict=True):
        known, told = 0 <= item < KNOWN, 0 <= item < N and bool(model.tower.described[item])
        row = model.tower(torch.tensor([item]))[0] if told else torch.zeros_like(model.mean_row)
        if known and not (told and without):
            row = row + model.items[item]
        rows.append(row if known or told else model.mean_row)
    return torch.stack(rows).view(*items.shape, 8)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("laid", [distinct, uncounted])
@pytest.mark.parametrize("shape", [(5, 9), (2, 3)])
def test_a_batch_has_the_rows_and_gradients_of_its_look_ups_one_by_one(training, laid, shape, monkeypatch):
    monkeypatch.setattr("protofed.backbone.tower.distinct", laid)
    items = torch.randint(-2, N + 2, shape, generator=Generator().manual_seed(4))
    towards = torch.randn(*shape, 8, generator=Generator().manual_seed(5), dtype=torch.float64)
    model, found = towered().double().train(training), []  # a place's phases are rounded visibly in 32 bits
    for rows_of in (model.embed, lambda asked: one_by_one(model, asked)):
        torch.manual_seed(0)
        rows = rows_of(items)
        weights = [model.items, *model.tower.parameters()]
        found.append([rows, *torch.autograd.grad((rows * towards).sum(), weights)])
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-10, rtol=1e-10)


def test_the_tower_is_asked_once_for_each_item_of_a_batch(monkeypatch):
    model, asked = towered().train(), []
    forward = model.tower.forward
    monkeypatch.setattr(model.tower, "forward", lambda items: asked.append(items) or forward(items))
    model.embed(torch.tensor([[5, 5, 0], [-1, 5, 11], [-2, N, N + 3]]))
    assert [items.tolist() for items in asked] == [[-1, 0, 5, 11, N]]


def test_distinct_items_are_in_order_and_found_again():
    items = torch.randint(-3, 40, (7, 11), generator=Generator().manual_seed(0))
    each, place = distinct(items, 30)
    assert each.tolist() == sorted(set(items.clamp(-1, 30).flatten().tolist()))
    assert torch.equal(each[place], items.clamp(-1, 30))
    each, place = distinct(torch.zeros(0, 4, dtype=torch.int64), 30)
    assert len(each) == 0
    assert place.shape == (0, 4)


@pytest.mark.parametrize(("n", "made"), [(30, 32), (300, 77)])
def test_uncounted_items_are_the_fewer_of_all_and_the_look_ups(n, made):
    items = torch.randint(-3, 40, (7, 11), generator=Generator().manual_seed(0))
    each, place = uncounted(items, n)
    assert len(each) == made
    assert torch.equal(each[place].clamp(-1, n), items.clamp(-1, n))


def test_laid_out_it_scores_the_same():
    model = towered()
    items = torch.arange(N + 2).expand(3, -1)
    tokens = torch.tensor([[-1, 10, 3], [9, 2, 8], [-2, -1, 12]])
    with torch.no_grad():
        hidden = model.last_hidden(tokens)
        expected = [hidden, model.scores(hidden, N + 2), model.scores_among(hidden, items)]
    plain = model.laid_out()
    assert type(plain) is not Towered
    assert not any(parameter.requires_grad for parameter in plain.parameters())
    found = [plain.last_hidden(tokens), plain.scores(hidden, N + 2), plain.scores_among(hidden, items)]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(plain.tells_apart(items), model.tells_apart(items))
    assert torch.equal(found[1][:, 9], found[1][:, N])  # those that nothing is known of tie
    with torch.no_grad():
        model.items += 1
    assert not torch.equal(model.laid_out().items, plain.items)  # as the model is now
    bare = random_model(KNOWN)
    assert bare.laid_out() is bare


def test_validation_asks_the_tower_for_each_item_once(monkeypatch):
    data = tiny_stream()
    model = untrained_backbone(tower_config(), data.slice_(0).n_train_items, content(tiny_log().n_items))
    asked, forward = [], model.tower.forward
    monkeypatch.setattr(model.tower, "forward", lambda items: asked.append(items) or forward(items))
    validation_ndcg(model, data.slice_(0))
    assert [len(items) for items in asked] == [tiny_log().n_items]


def tower_config() -> RunConfig:
    return tiny_config(content__features="place,text", content__kind="tower")


def test_a_warm_up_with_a_tower_has_a_key_of_its_own_and_comes_back_from_its_file(tmp_path):
    data, config, known = tiny_stream(), tower_config(), content(tiny_log().n_items)
    keys = {content_key(config, data, CPU), content_key(config, data, CPU, known)}
    keys.add(content_key(replace(config, content=replace(config.content, id_dropout=0.1)), data, CPU, known))
    keys.add(content_key(config, data, CPU, content(tiny_log().n_items, no_place=(4,))))
    assert len(keys) == 4
    short = replace(config, training=replace(config.training, base_epochs=2))
    made, fit = cached_warm_up(short, data, tmp_path, device=CPU, content=known)
    found, again = cached_warm_up(short, data, tmp_path, device=CPU, content=known)
    assert again.trace == fit.trace
    everything = tiny_log().n_items
    assert torch.equal(made.rows(everything), found.rows(everything))
    assert torch.equal(
        made.rows(everything), warm_up(short, data.slice_(0), device=CPU, content=known)[0].rows(everything)
    )
    assert not (made.rows(everything)[made.n_rows :] == made.mean_row).all(-1).any()


def test_the_tower_draws_nothing_from_the_streams_of_a_plain_backbone():
    plain = untrained_backbone(tiny_config(), 20, None)
    tower = untrained_backbone(tower_config(), 20, content(30))
    assert isinstance(tower, Towered)
    weights = tower.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.state_dict().items() if name != "mean_row")
    with_another = Tower(content(30), torch.ones(20, dtype=torch.bool), 16, stream(tower_config().seed, "tower"))
    assert all(torch.equal(weights[f"tower.{n}"], t) for n, t in with_another.state_dict().items())
