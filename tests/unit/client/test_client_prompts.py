"""Composition against one loop per client, the first prompt of a client, and how the short prompt fades."""

import torch
from torch import Generator

from protofed.client.codec import random_linear_codec, unit
from protofed.client.prompts import PromptState, carry_over, compose, first_contact, mixture
from protofed.client.router import route


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed))


def stack(n: int = 5) -> PromptState:
    return PromptState(drawn(n, 3, 4, seed=1), drawn(n, 3, 4, seed=2))


def test_the_composed_prompt_is_the_sum_written_out():
    state, c = stack(), drawn(6, 3, 4, seed=3)
    gate, chosen, weights = (
        drawn(5).abs(),
        torch.tensor([[0, 1], [5, 2], [3, 1], [4, 0], [1, 5]]),
        drawn(5, 2, seed=4).abs(),
    )
    prompt = compose(state, gate, mixture(c, chosen, weights))
    for u in range(5):
        by_hand = state.long[u] + gate[u] * state.short[u]
        for m in range(2):
            by_hand = by_hand + weights[u, m] * c[chosen[u, m]]
        torch.testing.assert_close(prompt[u], by_hand)


def test_a_hand_computed_composition():
    one = torch.ones(1, 1, 2)
    state = PromptState(long=one, short=2 * one)
    c = torch.tensor([[[10.0, 0.0]], [[0.0, 10.0]]])
    routed = mixture(c, torch.tensor([[0, 1]]), torch.tensor([[0.25, 0.75]]))
    assert compose(state, torch.tensor([0.5]), routed).tolist() == [[[1 + 1 + 2.5, 1 + 1 + 7.5]]]


def test_rescaled_tokens_have_the_given_length_and_keep_their_direction():
    state, routed = stack(), drawn(5, 3, 4, seed=4)
    plain = compose(state, torch.ones(5), routed)
    rescaled = compose(state, torch.ones(5), routed, norm=torch.tensor(11.0))
    torch.testing.assert_close(rescaled.norm(dim=-1), torch.full((5, 3), 11.0))
    torch.testing.assert_close(unit(rescaled), unit(plain))


def test_counting_the_prototype_twice_does_not_change_a_rescaled_prompt():
    c = drawn(1, 3, 4)
    state, nothing = PromptState(c, torch.zeros_like(c)), torch.zeros(1)
    once = compose(state, nothing, torch.zeros_like(c), norm=torch.tensor(1.0))
    torch.testing.assert_close(compose(state, nothing, c, norm=torch.tensor(1.0)), once)


def test_a_first_prompt_is_the_decoded_mix_plus_noise_and_encodes_near_it():
    codec, v = random_linear_codec(2, 16, Generator().manual_seed(0), d_z=8), unit(drawn(6, 8, seed=5))
    queries, noise = unit(drawn(3, 8, seed=6)), drawn(3, 2, 16, seed=7)
    chosen, weights = route(queries, v, top_m=2, temperature=0.07)
    state = first_contact(codec, v, chosen, weights, noise)
    for u in range(3):
        mix = weights[u, 0] * v[chosen[u, 0]] + weights[u, 1] * v[chosen[u, 1]]
        on_sphere = mix / mix.norm()
        torch.testing.assert_close(state.long[u], codec.decode(on_sphere[None])[0] + 0.02 * noise[u])
        assert float(codec.encode(state.long)[u] @ on_sphere) > 0.97
    assert not state.short.any()


def test_clients_with_different_noise_do_not_start_equal_on_the_same_prototype():
    codec, v = random_linear_codec(2, 16, Generator().manual_seed(0), d_z=8), unit(drawn(1, 8, seed=5))
    state = first_contact(codec, v, torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1), drawn(2, 2, 16))
    assert (state.long[0] - state.long[1]).norm() > 0.05


def test_the_short_prompt_halves_with_each_session_and_the_long_one_stays():
    state = stack(3)
    after = carry_over(state, torch.tensor([0, 1, 3]), carry=0.5)
    assert torch.equal(after.short, state.short * torch.tensor([1, 0.5, 0.125])[:, None, None])
    assert torch.equal(after.long, state.long)


def test_a_carry_of_zero_forgets_only_where_a_session_begins():
    after = carry_over(stack(2), torch.tensor([0, 1]), carry=0.0)
    assert torch.equal(after.short[0], stack(2).short[0])
    assert not after.short[1].any()
