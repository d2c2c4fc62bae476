"""What every method must do, whoever wrote it: one suite, run for each name of the catalogue on the tiny world."""

from typing import Any

import numpy as np
import pytest
import torch
from worlds import LENGTH, another_future, every_value, learn_once, learned, questions, tiny_stream

from protofed.backbone.training import PlainDescent
from protofed.evaluation.ranking import ndcg, rank_of_positive, uniform_reference
from protofed.experiments.folder import RunFolder, load_checkpoint, save_slice
from protofed.methods.catalogue import METHODS
from protofed.slices.candidates import NO_CANDIDATE
from protofed.slices.histories import queries_at
from protofed.slices.leaks import check_evidence
from protofed.snapshot import restore, take_snapshot

SAME_FOR_EVERY_SEED = {"popularity"}
LEARNS_NOTHING = {"popularity", "frozen-no-new-rows", "recicl"}  # in a slice
ALL_WEIGHTS = {
    *("finetune-last", "full-retrain", "ewc", "si", "mas", "lwf", "er-random", "er-freq", "reloop", "reloop2", "infer"),
    "ccd",
}
pytestmark = pytest.mark.parametrize("name", METHODS)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def learn_slice_2(name: str, state: Any) -> Any:
    run = learned(name)
    return run.method.learn(run.world, state, tiny_stream().slice_(2), PlainDescent())[0]


def test_the_same_seed_gives_the_same_scores_whatever_the_global_generator_says(name):
    _, queries = questions()
    with torch.random.fork_rng([]):
        torch.manual_seed(12_345)
        again = learn_once(name)
    assert same(every_value(learned(name).state), every_value(again.state))
    assert torch.equal(learned(name).scores(queries), again.scores(queries))


def test_another_seed_gives_other_scores(name):
    _, queries = questions()
    equal = torch.equal(learned(name).scores(queries), learned(name, seed=1).scores(queries))
    assert equal == (name in SAME_FOR_EVERY_SEED)


def test_what_is_learned_does_not_depend_on_the_test_part_or_later(name):
    changed = another_future(1)
    val_end = tiny_stream().bounds[1].val_end
    assert changed.bounds == tiny_stream().bounds
    assert torch.equal(changed.log.items[:val_end], tiny_stream().log.items[:val_end])
    assert not torch.equal(changed.log.items[val_end:], tiny_stream().log.items[val_end:])
    run = learn_once(name, data=changed)
    assert same(every_value(run.state), every_value(learned(name).state))
    for part in ("val", "test"):
        _, queries = questions(1, part)
        assert torch.equal(run.scores(queries), learned(name).scores(queries))


def test_scoring_draws_nothing_and_changes_nothing(name):
    run, (_, queries) = learned(name), questions()
    before = every_value(run.state)
    generator = torch.get_rng_state()
    first = run.scores(queries).clone()
    assert torch.equal(first, run.scores(queries))
    assert same(every_value(run.state), before)
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_query_is_scored_alone_as_it_is_in_company(name):
    run, (asked, queries) = learned(name), questions()
    together = run.scores(queries)
    for row in (0, len(asked) - 1):
        alone = run.scores(tiny_stream().queries(asked, np.array([row]), LENGTH))
        assert torch.allclose(alone[0], together[row], atol=1e-4)


def test_learning_leaves_the_state_and_the_backbone_it_started_from_alone(name):
    run = learned(name)
    before, shared = every_value(run.state), every_value(run.world.backbone)
    state = learn_slice_2(name, run.state)
    assert same(every_value(run.state), before)
    assert same(every_value(run.world.backbone), shared)
    check_evidence(tiny_stream(), 2, run.method.evidence(state))


def test_the_state_survives_a_checkpoint_on_disk(name, tmp_path):
    run, (_, queries) = learned(name), questions()
    save_slice(RunFolder(tmp_path), 1, {}, take_snapshot(run.state))
    done, snapshot = load_checkpoint(RunFolder(tmp_path))
    back = restore(snapshot)
    assert done == 1
    assert torch.equal(run.scores(queries, back), run.scores(queries))
    assert same(every_value(learn_slice_2(name, run.state)), every_value(learn_slice_2(name, back)))


@pytest.mark.parametrize("slice_index", [0, 1, 2])
def test_every_available_item_of_every_query_has_a_finite_score(name, slice_index):
    _, queries = questions(slice_index)
    scores = learned(name).scores(queries)
    assert scores.shape == (len(queries), queries.n_items)
    assert scores.isfinite().all()


def test_a_user_without_a_history_has_finite_scores(name):
    data = tiny_stream()
    position = np.flatnonzero(data.past.before == 0)[:1]
    asked = data.query_set(0, "test")
    queries = queries_at(
        data.past, position, length=LENGTH, slice_index=0, n_items=asked.n_items, times=data.log.times.numpy()
    )
    assert len(queries.past_items) == 0
    assert learned(name).scores(queries).isfinite().all()


def test_the_evidence_passes_the_leak_checker(name):
    run = learned(name)
    check_evidence(tiny_stream(), 0, run.method.evidence(run.before))
    evidence = run.method.evidence(run.state)
    assert evidence.slice_index == 1
    check_evidence(tiny_stream(), 1, evidence)


def test_the_ranking_beats_chance(name):
    asked, queries = questions()
    candidates = torch.cat([asked.positives[:, None], asked.negatives], dim=1)
    exists = candidates != NO_CANDIDATE
    scores = learned(name).scores(queries).gather(1, candidates.clamp(min=0))
    ranks = rank_of_positive(scores, torch.zeros(len(asked), dtype=torch.int64), exists)
    chance = np.mean([uniform_reference(int(n))["ndcg@10"] for n in exists.sum(1)])
    assert float(ndcg(ranks, 10).mean()) > 2 * chance


def test_the_log_tells_how_many_numbers_learn(name):
    run = learned(name)
    _, told = run.method.learn(run.world, run.before, tiny_stream().slice_(1), PlainDescent())
    counts = [told.get("trainable_parameters", 0), told.get("trainable_parameters_per_user", 0)]
    assert (sum(counts) == 0) == (name in LEARNS_NOTHING)
    weights = sum(parameter.numel() for parameter in run.world.backbone.parameters())
    table, width = run.world.backbone.items.numel(), run.world.config.backbone.width
    if name in ALL_WEIGHTS:
        assert counts == [weights - table + width * tiny_stream().slice_(1).n_train_items, 0]
    if name in ("frozen", "personal-memory"):
        assert counts == [width * told["new_rows"], 0]
