"""Draws belong to a user, an event and a round, not to a batch."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from protofed.privacy.draws import (
    FINE,
    NUMBERS_AT_ONCE,
    Draws,
    SeededDraws,
    SystemDraws,
    event_keys,
    normal,
    philox,
    toss_coins,
    uniform,
)
from protofed.privacy.mechanism import discrete_gaussian
from protofed.seeds import user_keys


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            (0xFFFFFFFF, 0xFFFFFFFF),
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_block_function_gives_the_published_answers(counter, key, expected):
    assert [f"{int(word):08x}" for word in philox(words(counter), key)] == expected.split()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=40, unique=True), st.integers(0, 1000), st.data())
def test_a_users_draws_are_bit_equal_in_every_batch(users, round_, data):
    some = data.draw(st.lists(st.sampled_from(users), min_size=1, max_size=10))
    table = normal(3, "upload", torch.tensor(users), round_, (5, 3))
    place = {user: row for row, user in enumerate(users)}
    alone = normal(3, "upload", torch.tensor(some), round_, (5, 3))
    assert torch.equal(alone, table[[place[user] for user in some]])


def test_draws_of_many_parts_are_those_of_each_user_alone():
    users, n = torch.tensor([5, 0, 9, 2**33, 7]), NUMBERS_AT_ONCE["cpu"] // 2 - 1  # two users at a time
    assert torch.equal(
        uniform(0, "x", users, 1, (n,)), torch.cat([uniform(0, "x", u, 1, (n,)) for u in users.split(1)])
    )
    assert uniform(0, "x", users[:0], 1, (3, 2)).shape == (0, 3, 2)
    assert uniform(0, "x", users, 1, (0,)).shape == (5, 0)


def test_a_shorter_draw_is_the_beginning_of_a_longer_one():
    users = torch.arange(7)
    assert torch.equal(uniform(0, "x", users, 1, (5,)), uniform(0, "x", users, 1, (9,))[:, :5])


def test_seed_purpose_user_and_round_each_change_the_stream():
    users = torch.tensor([4, 5, 4 + 2**32])
    base = uniform(0, "coin", users, 1, (8,))
    others = [
        uniform(1, "coin", users, 1, (8,)),
        uniform(0, "noise", users, 1, (8,)),
        uniform(0, "coin", users, 2, (8,)),
    ]
    rows = torch.cat([base, *others])
    assert len({tuple(row.tolist()) for row in rows}) == 12
    assert len(rows.unique()) == rows.numel()


def test_uniform_draws_pass_a_kolmogorov_smirnov_test_across_users_rounds_and_positions():
    across_users = uniform(11, "ks", torch.arange(50_000), 0)
    across_positions = uniform(11, "ks", torch.tensor([3]), 0, (50_000,)).flatten()
    across_rounds = torch.cat([uniform(11, "ks", torch.tensor([3]), round_) for round_ in range(2_000)])
    for draws in (across_users, across_positions, across_rounds):
        assert 0 < draws.min() < draws.max() < 1
        assert stats.kstest(draws.numpy(), "uniform").pvalue > 1e-3


def test_normal_draws_have_the_moments_and_the_distribution_of_a_normal():
    draws = normal(5, "moments", torch.arange(2_000), 7, (100,))
    n = draws.numel()
    assert draws.dtype == torch.float64
    assert abs(draws.mean()) < 4 / n**0.5
    assert abs(draws.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs((draws**3).mean()) < 4 * (15 / n) ** 0.5
    assert abs((draws**4).mean() - 3) < 4 * (96 / n) ** 0.5
    assert stats.kstest(draws.flatten().numpy(), "norm").pvalue > 1e-3


def test_draws_of_neighbouring_users_rounds_and_positions_are_uncorrelated():
    draws = normal(5, "correlation", torch.arange(3_000), 7, (30,)).numpy()
    later = normal(5, "correlation", torch.arange(3_000), 8, (30,)).numpy()
    for a, b in ((draws[1:], draws[:-1]), (draws[:, 1:], draws[:, :-1]), (draws, later)):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / a.size**0.5


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_coins_come_up_at_their_rate_and_each_round_anew(rate):
    coins = torch.stack([toss_coins(SeededDraws(2), torch.arange(20_000), round_, rate) for round_ in range(10)])
    assert abs(coins.double().mean() - rate) < 4 * (rate * (1 - rate) / coins.numel()) ** 0.5
    both = (coins[1:] & coins[:-1]).double().mean()
    assert abs(both - rate**2) < 4 * rate / (9 * 20_000) ** 0.5


def test_at_rate_one_everybody_takes_part_and_at_rate_zero_nobody():
    assert toss_coins(SeededDraws(2), torch.arange(1_000), 0, 1.0).all()
    assert not toss_coins(SeededDraws(2), torch.arange(1_000), 0, 0.0).any()


def test_a_users_key_is_half_of_the_first_64_bits_of_a_hash_of_its_id():
    ids = ["ann", 7, "7", "名", "", "ann"]
    by_hand = [int(hashlib.sha256(str(each).encode()).hexdigest()[:16], 16) // 2 for each in ids]
    keys = user_keys(ids)
    assert keys.dtype == np.int64
    assert keys.tolist() == by_hand
    assert keys[:1].tolist() == [2650560824210726935]  # written down: other runtimes must find the same
    assert keys[3] == 2941672170307061533
    assert (keys >= 0).all()


def test_a_users_key_does_not_depend_on_who_else_is_in_the_log():
    names = [f"user {n}" for n in range(20_000)]
    keys = user_keys(names)
    assert len(set(keys.tolist())) == len(names)
    assert keys[::-7].tolist() == user_keys(names[::-7]).tolist()
    assert len(user_keys([])) == 0


def words_by_hand(user: int, event: int) -> int:
    """The first two words of a Philox block whose counter is the event and the user, as a signed 64-bit number."""
    mask = 2**32 - 1
    counter = tuple(torch.tensor([word]) for word in (event & mask, event >> 32, user & mask, user >> 32))
    high, low, *_ = (int(word) for word in philox(counter, (0x9E3779B9, 0xBB67AE85)))
    number = high * 2**32 + low
    return number - 2**64 if number >= 2**63 else number


def test_an_events_key_is_a_hash_of_its_user_and_its_number_among_the_users_own():
    users, events = torch.tensor([1, 1, 2**62 + 5, 0]), torch.tensor([0, 1, 0, 2**33])
    keys = event_keys(users, events)
    by_hand = [words_by_hand(u, e) for u, e in zip(users.tolist(), events.tolist(), strict=True)]
    assert keys.tolist() == by_hand
    assert keys[:3].tolist() == [-698662227596645324, -2478724403732679477, 8483634899788050955]  # written down


def test_keys_of_different_events_differ_and_are_the_same_alone():
    users = torch.from_numpy(user_keys(range(300))).repeat_interleave(100)
    events = torch.arange(100).repeat(300)
    keys = event_keys(users, events)
    assert len(keys.unique()) == 30_000
    order = torch.randperm(30_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(event_keys(users[order], events[order]), keys[order])
    assert torch.equal(torch.cat([event_keys(users[n : n + 1], events[n : n + 1]) for n in range(50)]), keys[:50])
    assert len(torch.cat([keys, event_keys(events, users)]).unique()) == 60_000  # user and event are not exchangeable


def test_draws_by_event_keys_are_uniform_and_uncorrelated_between_neighbours():
    users = torch.from_numpy(user_keys(range(200))).repeat_interleave(50)
    drawn = uniform(3, "events", event_keys(users, torch.arange(50).repeat(200)), 0, (5,)).numpy()
    assert stats.kstest(drawn.ravel(), "uniform").pvalue > 1e-3
    table = drawn.reshape(200, 50, 5)
    for a, b in ((table[:, 1:], table[:, :-1]), (table[1:], table[:-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / a.size**0.5


KEYS = torch.from_numpy(user_keys(range(9)))


def test_seeded_draws_are_the_plain_functions():
    draws = SeededDraws(11)
    assert isinstance(draws, Draws)
    assert torch.equal(draws.uniform("x", KEYS, 4, (3, 2)), uniform(11, "x", KEYS, 4, (3, 2)))
    assert torch.equal(draws.uniform("x", KEYS, 4), uniform(11, "x", KEYS, 4))
    assert torch.equal(draws.normal("x", KEYS, 4, (3, 2)), normal(11, "x", KEYS, 4, (3, 2)))
    by_hand = discrete_gaussian(uniform(11, "x", KEYS, 4, (3, 2)), 6.5)
    assert torch.equal(draws.discrete_gaussian("x", KEYS, 4, (3, 2), 6.5), by_hand)


def test_system_draws_have_the_shapes_and_distributions_of_seeded_ones_and_never_repeat():
    draws, users = SystemDraws(b"secret"), torch.arange(2_000)
    assert isinstance(draws, Draws)
    for name, law in (("uniform", "uniform"), ("normal", "norm")):
        drawn, again = (getattr(draws, name)("x", users, 0, (5, 2)) for _ in range(2))
        assert (drawn.shape, drawn.dtype) == ((2_000, 5, 2), torch.float64)
        assert not set(drawn.flatten().tolist()) & set(again.flatten().tolist())
        # 1e-6: nobody can seed these, and a suite must not fail once in a thousand runs.
        assert stats.kstest(drawn.flatten().numpy(), law).pvalue > 1e-6
    steps = draws.normal("x", users[:50], 0, (5, 2)) * FINE
    assert torch.equal(steps, steps.round())  # of the exact sampler's grid, whose tails have no gaps
    whole = draws.discrete_gaussian("x", users[:300], 0, (5,), 6.5)
    assert (whole.shape, whole.dtype) == ((300, 5), torch.int64)
    assert abs(float(whole.double().std()) / 6.5 - 1) < 5 / (2 * 1_500) ** 0.5
    assert draws.uniform("x", users[:0], 0, (5,)).shape == (0, 5)
    assert draws.uniform("x", users[:3], 0).shape == (3,)
