"""The error memory against slow loops: who is written where, who reads what, and never anything from the future."""

import itertools
from dataclasses import replace

import pytest
import torch
from worlds import (
    LENGTH,
    every_value,
    questions,
    random_model,
    shuffled_after,
    tiny_config,
    tiny_log,
    tiny_stream,
    warmed_up,
)

from protofed.backbone import training
from protofed.backbone.training import PlainDescent
from protofed.errors import ConfigError
from protofed.methods.baselines.buffer import event_windows
from protofed.methods.baselines.finetune_last import FineTuneLast
from protofed.methods.baselines.reloop2 import (
    ErrorMemory,
    ReLoop2,
    add_sketch,
    bucket_means,
    codes,
    estimate_errors,
    probabilities,
    readable,
)
from protofed.methods.frozen import backbone_scores
from protofed.methods.protocol import World
from protofed.seeds import stream
from protofed.slices.stream import SliceStream
from protofed.snapshot import restore, take_snapshot


def world_of(data=None, **settings):
    return World(tiny_config(**settings), (data or tiny_stream()).slice_(0), warmed_up()[0])


def learn(method, data=None, **settings):
    world = world_of(data, **settings)
    return method.learn(world, method.start(world), (data or tiny_stream()).slice_(1), PlainDescent())


def same(one, other):
    one, other = every_value(one), every_value(other)
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def draw(*shape, name="t"):
    return torch.randn(*shape, generator=stream(0, name))


def memory_by_hand():
    """One table of two buckets; three sketches, written up to instants 10, 20 and 30."""
    sums = torch.tensor([[[1.0, 0.0]], [[-2.0, 0.0]], [[0.5, 3.0]]])
    counts = torch.tensor([[[2.0, 0.0]], [[4.0, 0.0]], [[1.0, 3.0]]])
    return ErrorMemory(draw(1, 1, 8), sums, counts, torch.tensor([10, 20, 30]))


def test_a_bucket_is_the_side_of_every_plane_its_key_lies_on_whatever_its_length():
    hidden, rows, planes = draw(3, 8, name="h"), draw(5, 8, name="r"), draw(4, 8, name="p")
    found = codes(hidden, rows, planes)
    for b, n in itertools.product(range(3), range(5)):
        key = hidden[b] * rows[n]
        assert found[b, n] == sum(2**bit for bit in range(4) if float(key @ planes[bit]) > 0)
    assert torch.equal(codes(7 * hidden, rows, planes), found)
    assert torch.equal(codes(hidden, rows.expand(3, 5, 8), planes), found)


def test_a_bucket_remembers_the_mean_error_with_older_slices_weighing_less():
    means = bucket_means(memory_by_hand(), decay=0.5)
    expected = [
        [0, 0],
        [1 / 2, 0],
        [(0.5 * 1 - 2) / (0.5 * 2 + 4), 0],
        [(0.25 * 1 - 0.5 * 2 + 0.5) / (0.25 * 2 + 0.5 * 4 + 1), 1],
    ]
    assert torch.allclose(means[:, 0], torch.tensor(expected))
    assert bucket_means(memory_by_hand(), decay=0.0)[3, 0].tolist() == [0.5, 1.0]


def test_a_query_reads_only_sketches_of_strictly_earlier_instants():
    assert readable(memory_by_hand(), torch.tensor([5, 10, 11, 20, 21, 99])).tolist() == [0, 0, 1, 1, 2, 3]


def test_writing_adds_a_sketch_and_leaves_the_old_ones_alone():
    old = memory_by_hand()
    new = add_sketch(old, torch.tensor([[0], [1], [1]]), torch.tensor([0.5, -0.25, -0.5]), 40)
    assert new.sums[3].tolist() == [[0.5, -0.75]]
    assert new.counts[3].tolist() == [[1, 2]]
    assert new.newest.tolist() == [10, 20, 30, 40]
    assert torch.equal(new.sums[:3], old.sums)
    assert len(old.sums) == 3


def test_a_softmax_score_becomes_the_odds_of_the_positive_beside_m_uniform_items():
    scores = draw(2, 6)
    share = scores.softmax(-1)
    assert torch.allclose(probabilities(scores, scores, "softmax", 4), share / (share + 4 / 6))
    assert torch.allclose(probabilities(scores, scores, "bpr", 1), share / (share + 1 / 6))
    assert torch.equal(probabilities(scores, scores, "bce", 4), scores.sigmoid())
    assert torch.equal(probabilities(scores, scores, "softmax", 4).argsort(1), scores.argsort(1))


def test_estimates_are_the_mean_over_tables_of_the_buckets_mean_and_mean_row_items_share_theirs():
    model = random_model(5)
    model.has_row[2] = False
    model.requires_grad_(False).refresh_mean_row()
    memory = ErrorMemory(draw(3, 2, 8), draw(2, 3, 4), draw(2, 3, 4, name="n").abs(), torch.tensor([10, 20]))
    hidden, times = draw(3, 8, name="h"), torch.tensor([99, 15, 3])
    found = estimate_errors(model, memory, hidden, times, 7, 0.5)
    means = bucket_means(memory, 0.5)
    for b, item in itertools.product(range(3), range(7)):
        row = model.embed(torch.tensor(item))
        buckets = [int(codes(hidden[b : b + 1], row[None], planes)) for planes in memory.planes]
        expected = sum(float(means[[2, 1, 0][b], table, bucket]) for table, bucket in enumerate(buckets)) / 3
        assert found[b, item].item() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(found[:, 2], found[:, 5])
    assert found[2].tolist() == [0.0] * 7


@pytest.mark.slow
def test_the_errors_are_those_of_the_weights_that_served_the_events():
    method, world, slice_ = ReLoop2(tables=2, bits=3), world_of(), tiny_stream().slice_(1)
    state, diagnostics = learn(method)
    before, after = warmed_up()[0], state.model.backbone
    positions = slice_.train_positions
    windows = event_windows(slice_.past, positions, LENGTH)
    rng, total, entries = stream(0, "reloop2", "negatives", 1), torch.zeros(2, 8), 0
    for start in range(0, len(positions), 512):
        chunk = slice(start, start + 512)
        drawn = torch.randint(slice_.n_train_items, (len(windows.tokens[chunk]), 4), generator=rng)
        for tokens, target, negatives in zip(windows.tokens[chunk], windows.targets[chunk], drawn, strict=True):
            scores = before.scores(before.last_hidden(tokens[None]), slice_.n_train_items)[0]
            odds = scores.softmax(0) * slice_.n_train_items / 4
            key = after.last_hidden(tokens[None])
            for y, item in [(1, target), *((0, n) for n in negatives if n != target)]:
                entries += 1
                for table, planes in enumerate(state.memory.planes):
                    bucket = codes(key, after.embed(item.view(1)), planes).item()
                    total[table, bucket] += y - (odds / (1 + odds))[item].item()
    assert torch.allclose(state.memory.sums[0], total, atol=1e-2)
    assert diagnostics["memory_entries"] == entries == int(state.memory.counts[0, 0].sum())
    assert world.backbone is before


def test_the_slow_learner_is_finetune_last_and_without_the_memory_so_are_the_scores():
    _, queries = questions()
    plain, _ = learn(FineTuneLast())
    state, _ = learn(ReLoop2(weight=0.0))
    assert same(state.model, plain)
    assert torch.equal(ReLoop2(weight=0.0).score(world_of(), state, queries), backbone_scores(plain, queries))


def test_the_memory_changes_rankings_and_the_log_says_that_it_is_filled():
    _, queries = questions()
    state, diagnostics = learn(ReLoop2())
    ranked = [method.score(world_of(), state, queries).argsort(1) for method in (ReLoop2(), ReLoop2(weight=0.0))]
    assert not torch.equal(*ranked)
    assert diagnostics["memory_mean_absolute_error"] > 0.01
    assert diagnostics["memory_occupied"] > 0.01


def test_questions_older_than_the_memory_are_answered_without_it():
    world, (_, queries) = world_of(), questions(0)
    state, _ = learn(ReLoop2())
    plain = backbone_scores(state.model, queries)
    assert torch.equal(ReLoop2().score(world, state, queries), probabilities(plain, plain, "softmax", 4))
    later = replace(queries, times=torch.full_like(queries.times, 2**40))
    assert not torch.equal(ReLoop2().score(world, state, later), ReLoop2().score(world, state, queries))


def test_before_the_first_slice_the_memory_is_empty_and_scores_are_the_backbones():
    _, queries = questions(0)
    state = ReLoop2().start(world_of())
    assert torch.equal(ReLoop2().score(world_of(), state, queries), backbone_scores(state.model, queries))


def test_the_state_survives_packing_with_its_planes_and_the_same_seed_gives_it_again():
    state, _ = learn(ReLoop2())
    assert same(restore(take_snapshot(state)), state)
    assert same(learn(ReLoop2())[0], state)


def test_nothing_after_the_train_cut_enters_the_memory_or_gives_a_gradient(monkeypatch):
    monkeypatch.setattr(training, "mean_grade", lambda *_: float("nan"))  # keeps the last epoch
    cut = tiny_stream().bounds[1].train_end
    changed = SliceStream(shuffled_after(tiny_log(), cut), tiny_config().stream)
    state, _ = learn(ReLoop2())
    assert same(learn(ReLoop2(), changed)[0], state)
    assert state.memory.newest.tolist() == [int(tiny_log().times[cut - 1])]
    assert ReLoop2().evidence(state).newest_target < cut


def test_values_out_of_range_are_refused():
    for wrong, message in [
        ({"bits": 21}, "bits must lie between 1 and 20"),
        ({"decay": 1.5}, "decay must"),
        ({"weight": -0.1}, "weight"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ReLoop2(**wrong)
