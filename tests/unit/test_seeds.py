"""Named streams: the same name the same draws, another name others, and the global generator left alone."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protofed.seeds import numpy_stream, seed_of, seeded, stream

names = st.lists(st.text(max_size=5) | st.integers(-5, 5), max_size=4).map(tuple)


@given(st.integers(0, 2**40), names, st.integers(0, 2**40), names)
def test_two_purposes_share_a_seed_only_if_they_are_the_same(seed, purpose, other_seed, other_purpose):
    one, other = seed_of(seed, *purpose), seed_of(other_seed, *other_purpose)
    assert (one == other) == ((seed, purpose) == (other_seed, other_purpose))
    assert 0 <= one < 2**63


def test_names_are_neither_joined_nor_converted():
    assert seed_of(1, "a", "b") != seed_of(1, "ab")
    assert seed_of(1, "2") != seed_of(1, 2)
    assert seed_of(1, 2, 3) != seed_of(1, 23)
    assert seed_of(12, "x") != seed_of(1, 2, "x")


@pytest.mark.slow
def test_a_purpose_has_the_same_seed_in_every_process():
    code = "from protofed.seeds import seed_of; assert seed_of(7, 'warm-up', 3) == 1321495706939101941"
    # The first eight bytes of SHA-256 over "(7, ('warm-up', 3))", halved.
    assert seed_of(7, "warm-up", 3) == 1321495706939101941
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONHASHSEED": "77"})


def test_streams_of_one_name_draw_the_same_and_independently_of_each_other():
    one, again = stream(3, "negatives", 0), stream(3, "negatives", 0)
    first = torch.rand(4, generator=one)
    torch.rand(9, generator=one)
    assert torch.equal(torch.rand(4, generator=again), first)
    assert not torch.equal(torch.rand(4, generator=stream(3, "negatives", 1)), first)
    assert (numpy_stream(3, "x").random(4) == numpy_stream(3, "x").random(4)).all()
    assert not np.array_equal(numpy_stream(3, "x").random(4), numpy_stream(4, "x").random(4))


def test_a_seeded_block_draws_from_its_name_and_puts_the_global_generator_back():
    before = torch.get_rng_state()
    draws = []
    for _ in range(2):
        with seeded(5, "dropout", 1):
            draws.append(torch.rand(3))
        torch.rand(1)
    torch.set_rng_state(before)
    with seeded(5, "dropout", 2):
        assert not torch.equal(torch.rand(3), draws[0])
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError), seeded(5, "dropout", 3):
        torch.rand(3) @ torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
