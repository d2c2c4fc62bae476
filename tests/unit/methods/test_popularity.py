"""Popularity counts the current train part and nothing else."""

from collections import Counter

import torch
from worlds import learned, questions, tiny_stream

from protofed.methods.popularity import counts_for


def train_counts(slice_index: int) -> Counter:
    bounds = tiny_stream().bounds[slice_index]
    return Counter(tiny_stream().log.items[bounds.start : bounds.train_end].tolist())


def test_everybody_is_scored_with_the_train_counts_of_the_newest_slice():
    run, (_, queries) = learned("popularity"), questions()
    counted = train_counts(1)
    expected = [float(counted[item]) for item in range(queries.n_items)]
    assert run.scores(queries).tolist() == [expected] * len(queries)


def test_before_any_slice_the_base_block_counts():
    run, (_, queries) = learned("popularity"), questions(0)
    counted = train_counts(0)
    expected = [float(counted[item]) for item in range(queries.n_items)]
    assert run.scores(queries, run.before)[0].tolist() == expected


def test_counts_are_cut_or_padded_to_the_items_available():
    counts = torch.tensor([3, 0, 2])
    assert counts_for(counts, 5).tolist() == [3, 0, 2, 0, 0]
    assert counts_for(counts, 2).tolist() == [3, 0]
