"""Prompts go in front, everybody sees them, and they have the length of the backbone's own tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

from protofed.backbone.injection import inject, rescale_like, visible
from protofed.slices.histories import BOS, PAD


def test_a_prompt_is_put_in_front_of_the_unchanged_tokens():
    tokens, prompt = torch.randn(2, 5, 4), torch.randn(2, 3, 4)
    both = inject(prompt, tokens)
    assert torch.equal(both[:, :3], prompt)
    assert torch.equal(both[:, 3:], tokens)
    assert inject(None, tokens) is tokens


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from([PAD, BOS, 0, 7]), min_size=1, max_size=6), st.integers(0, 3))
def test_a_place_sees_prompts_itself_and_the_real_tokens_before_it(tokens, n_prompt):
    found = visible(torch.tensor([tokens]), n_prompt)[0]
    total = n_prompt + len(tokens)
    for asking in range(total):
        for other in range(total):
            real = other >= n_prompt and tokens[other - n_prompt] != PAD
            expected = other < n_prompt or other == asking or (real and other < asking)
            assert bool(found[asking, other]) == expected, (asking, other)


def test_a_rescaled_prompt_keeps_its_direction_and_takes_the_given_length():
    prompt = torch.randn(3, 2, 6, generator=Generator().manual_seed(0))
    scaled = rescale_like(prompt, torch.tensor(2.5))
    assert scaled.norm(dim=-1).flatten().tolist() == pytest.approx([2.5] * 6)
    assert torch.nn.functional.cosine_similarity(scaled, prompt, dim=-1).flatten().tolist() == pytest.approx([1.0] * 6)


def test_a_prompt_of_zeros_stays_zero():
    assert torch.equal(rescale_like(torch.zeros(1, 2, 4), torch.tensor(3.0)), torch.zeros(1, 2, 4))
