"""Own rows against dictionaries: where they are found, what they start at, and that nobody else's row is ever read."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor
from worlds import random_model

from protofed.backbone.sasrec import SASRec
from protofed.client.own_rows import (
    NEIGHBOURS,
    OwnRows,
    find,
    merge_rows,
    met_boost,
    no_rows,
    own_embed,
    pairs_of,
    rows_to,
    subset,
    with_met_items,
    with_own_scores,
    write_back,
)
from protofed.slices.histories import BOS, PAD, Histories, histories

WIDTH = 4
N_CLIENTS, N_ITEMS = 7, 12
PAIRS = st.sets(st.tuples(st.integers(0, N_CLIENTS - 1), st.integers(0, N_ITEMS - 1)), max_size=40)
ASKED = st.lists(st.integers(0, N_CLIENTS + 1), max_size=9)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed))


def rows_for(pairs: set[tuple[int, int]], seed: int = 0) -> OwnRows:
    ordered = sorted(pairs)
    columns = torch.tensor(ordered, dtype=torch.int64).reshape(-1, 2)
    rows = (64 * drawn(len(ordered), WIDTH, seed=seed)).round() / 64  # so that Python's sums are exact too
    return OwnRows(columns[:, 0].contiguous(), columns[:, 1].contiguous(), rows)


def as_dictionary(own: OwnRows) -> dict[tuple[int, int], list[float]]:
    keys = zip(own.clients.tolist(), own.items.tolist(), strict=True)
    return dict(zip(keys, own.rows.tolist(), strict=True))


def whole_numbers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@given(PAIRS, st.lists(st.tuples(st.integers(0, N_CLIENTS), st.integers(PAD, N_ITEMS)), max_size=20))
def test_a_pair_is_found_exactly_where_the_table_holds_it(pairs, asked):
    own, places = rows_for(pairs), {pair: n for n, pair in enumerate(sorted(pairs))}
    hit, place = find(own, whole_numbers([c for c, _ in asked]), whole_numbers([i for _, i in asked]))
    assert hit.tolist() == [pair in places for pair in asked]
    assert [p for p, h in zip(place.tolist(), hit.tolist(), strict=True) if h] == [
        places[pair] for pair in asked if pair in places
    ]
    assert all(0 <= p < max(len(own), 1) for p in place.tolist())


def test_items_and_clients_near_the_ends_of_their_ranges_do_not_meet():
    own = rows_for({(0, 2**31 - 1), (1, 0), (10**6, 5)})
    clients, items = whole_numbers([0, 1, 1, 1, 10**6, 10**6 - 1]), whole_numbers([2**31 - 1, 0, BOS, PAD, 5, 5])
    assert find(own, clients, items)[0].tolist() == [True, True, False, False, True, False]


@given(PAIRS, ASKED)
def test_the_pairs_of_clients_are_those_of_a_loop_whatever_their_order_and_repeats(pairs, asked):
    which, place = pairs_of(rows_for(pairs), whole_numbers(asked))
    ordered = sorted(pairs)
    by_hand = [(n, ordered.index(pair)) for n, client in enumerate(asked) for pair in ordered if pair[0] == client]
    assert list(zip(which.tolist(), place.tolist(), strict=True)) == by_hand


@given(PAIRS, ASKED)
def test_a_subset_holds_the_rows_of_its_clients_numbered_from_zero(pairs, asked):
    own, clients = rows_for(pairs), sorted(set(asked))
    part, place = subset(own, whole_numbers(clients))
    expected = {(clients.index(c), i): row for (c, i), row in as_dictionary(own).items() if c in clients}
    assert as_dictionary(part) == expected
    assert list(as_dictionary(part)) == sorted(expected)
    assert torch.equal(own.items[place], part.items)


@given(PAIRS, ASKED)
def test_written_back_rows_change_their_own_places_and_no_other(pairs, asked):
    own, clients = rows_for(pairs), sorted(set(asked))
    before = as_dictionary(own)
    part, place = subset(own, whole_numbers(clients))
    assert as_dictionary(write_back(own, place, part)) == before
    learned = OwnRows(part.clients, part.items, part.rows + 1)
    after = as_dictionary(write_back(own, place, learned))
    assert after == {k: [x + 1 for x in row] if k[0] in clients else row for k, row in before.items()}
    assert as_dictionary(own) == before


@given(
    PAIRS, st.sets(st.integers(0, N_CLIENTS + 1)), st.sets(st.tuples(st.integers(0, 8), st.integers(0, N_ITEMS - 1)))
)
def test_merged_rows_are_those_of_a_dictionary_in_which_these_clients_were_replaced(pairs, asked, news):
    own, clients = rows_for(pairs), sorted(asked)
    part = rows_for({(c, i) for c, i in news if c < len(clients)}, seed=1)
    merged = merge_rows(own, whole_numbers(clients), part)
    expected = {(c, i): row for (c, i), row in as_dictionary(own).items() if c not in clients}
    expected |= {(clients[c], i): row for (c, i), row in as_dictionary(part).items()}
    assert as_dictionary(merged) == expected
    assert list(as_dictionary(merged)) == sorted(expected)


@given(PAIRS, ASKED)
def test_a_subset_that_is_merged_again_changes_nothing(pairs, asked):
    own, clients = rows_for(pairs), whole_numbers(sorted(set(asked)))
    assert as_dictionary(merge_rows(own, clients, subset(own, clients)[0])) == as_dictionary(own)


def test_rows_on_another_device_are_the_same_rows():
    own = rows_for({(0, 1), (2, 3)})
    moved = rows_to(own, torch.device("cpu"))
    assert as_dictionary(moved) == as_dictionary(own)
    assert rows_to(own, torch.device("meta")).rows.device.type == "meta"


def public(items: Tensor) -> Tensor:
    """Rows that tell which item they belong to."""
    return items[..., None].float() * 100 + torch.arange(WIDTH)


def half_of_all_pairs(seed: int) -> set[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    return {(c, i) for c in range(N_CLIENTS) for i in range(N_ITEMS) if rng.random() < 0.5}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_client_reads_its_own_row_where_it_may_and_has_one_and_the_public_row_elsewhere(seed, masked):
    own, rng = rows_for(half_of_all_pairs(seed)), np.random.default_rng(seed)
    who = [*rng.permutation(N_CLIENTS).tolist(), 0]
    items = torch.from_numpy(rng.integers(PAD, N_ITEMS + 2, (len(who), 9)))
    may = torch.arange(N_CLIENTS) % 2 == 0
    read = own_embed(own, whole_numbers(who), public, may if masked else None)(items)
    table, from_own = as_dictionary(own), 0
    for b, client in enumerate(who):
        for n, item in enumerate(items[b].tolist()):
            uses = (client, item) in table and (not masked or bool(may[client]))
            assert read[b, n].tolist() == (table[client, item] if uses else public(items[b, n]).tolist())
            from_own += uses
    assert 5 < from_own < items.numel() - 5


def test_gradients_reach_the_rows_that_were_read_and_none_else():
    own = rows_for({(0, 1), (0, 2), (1, 1), (2, 3)})
    rows = own.rows.requires_grad_(True)
    own_embed(own, whole_numbers([0, 2]), public)(torch.tensor([[1, 1, 5], [1, 2, 9]])).sum().backward()
    assert rows.grad[:, 0].tolist() == [2, 0, 0, 0]  # (0, 1) twice; client 2 read items 1, 2 and 9 from the public


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n_items", [1, N_ITEMS - 3, N_ITEMS, N_ITEMS + 2])
@pytest.mark.parametrize("seed", range(3))
def test_own_items_are_scored_with_own_rows_as_a_loop_would(seed, n_items, masked):
    own, asked = rows_for(half_of_all_pairs(seed)), [3, 0, 6, 3, N_CLIENTS + 1, 1]
    scores, hidden = drawn(len(asked), n_items, seed=seed), drawn(len(asked), WIDTH, seed=seed + 1)
    may = torch.arange(N_CLIENTS + 2) % 2 == 0
    kept = scores.clone()
    result = with_own_scores(scores, hidden, own, whole_numbers(asked), may if masked else None)
    by_hand = scores.clone()
    for b, client in enumerate(asked):
        for (whose, item), row in as_dictionary(own).items():
            if whose == client and item < n_items and (not masked or bool(may[client])):
                by_hand[b, item] = sum(h * r for h, r in zip(hidden[b].tolist(), row, strict=True))
    torch.testing.assert_close(result, by_hand)
    assert torch.equal(scores, kept)


def test_clients_that_met_nothing_read_and_score_with_public_rows():
    nobody, scores = no_rows(WIDTH), drawn(2, 5)
    items = torch.tensor([[0, 3], [2, BOS]])
    assert torch.equal(own_embed(nobody, whole_numbers([0, 1]), public)(items), public(items))
    assert torch.equal(with_own_scores(scores, drawn(2, WIDTH), nobody, whole_numbers([0, 1])), scores)
    assert len(subset(nobody, whole_numbers([0, 1]))[0]) == 0


def a_log(seed: int, n: int = 150, *, n_users: int = 6, n_items: int = 20) -> Histories:
    """Users and items that arrive late, with repeats and ties in time."""
    rng = np.random.default_rng(seed)
    late = 0.4 + 0.6 * np.arange(n) / n
    users, items = ((rng.random(n) * most * late).astype(np.int64) for most in (n_users, n_items))
    return histories(users, items, np.sort(rng.integers(0, n // 2, n)), n_users)


def a_model(n_rows: int = 11, *, without: tuple[int, ...] = (2, 5)) -> SASRec:
    """Rows for items 0 .. n_rows - 1 less some; later items have none."""
    model = random_model(n_rows, seed=3, width=WIDTH)
    model.has_row[list(without)] = False
    model.refresh_mean_row()
    return model


def events_of_users(past: Histories, until: int) -> dict[int, list[tuple[int, int]]]:
    """Per user its (log position, item) in order of time, up to the position."""
    events: dict[int, list[tuple[int, int]]] = {}
    for position in range(until):
        events.setdefault(int(past.users[position]), []).append((position, int(past.items[past.place[position]])))
    return events


def slow_first_row(model: SASRec, items: list[int], item: int) -> Tensor:
    """The row a client starts with for an item, given all items it met, oldest first."""

    def known(i: int) -> bool:
        return i < model.n_rows and bool(model.has_row[i])

    if known(item):
        return model.items.detach()[item]
    near = []
    for place, met in enumerate(items):
        if met == item:
            near += items[max(place - NEIGHBOURS, 0) : place] + items[place + 1 : place + 1 + NEIGHBOURS]
    rows = [model.items.detach()[i] for i in near if known(i)]
    return torch.stack(rows).mean(0) if rows else model.mean_row


def slow_met_items(
    model: SASRec,
    past: Histories,
    until: int,
    clients: list[int],
    learned: dict[tuple[int, int], Tensor] | None = None,
    boost: dict[int, Tensor] | None = None,
) -> dict[tuple[int, int], Tensor]:
    """The table pair by pair: what was there, and what these clients met."""
    table = dict(learned or {})
    for user, events in events_of_users(past, until).items():
        items = [item for _, item in events]
        for item in set(items) if user in clients else ():
            if (user, item) not in table:
                table[user, item] = slow_first_row(model, items, item) + (boost[user] if boost else 0)
    return dict(sorted(table.items()))


EVERYBODY = list(range(6))


def met(own: OwnRows, model: SASRec, past: Histories, until: int, clients: list[int], boost: Tensor | None = None):
    return with_met_items(own, model, past, until, whole_numbers(clients), boost)


def check_same(own: OwnRows, expected: dict[tuple[int, int], Tensor]) -> None:
    assert list(zip(own.clients.tolist(), own.items.tolist(), strict=True)) == list(expected)
    torch.testing.assert_close(own.rows, torch.stack(list(expected.values())), atol=1e-6, rtol=1e-6)


NO_ROW = [(2, 5), (0, 1, 2, 3, 4, 5, 6, 7)]


@pytest.mark.parametrize("without", NO_ROW)
@pytest.mark.parametrize("seed", range(6))
def test_rows_start_public_or_among_the_clients_own_neighbours_or_at_the_mean_row(seed, without):
    past, model = a_log(seed), a_model(without=without)
    for until in (1, 8, 40, 97, len(past)):
        own = met(no_rows(WIDTH), model, past, until, EVERYBODY)
        check_same(own, slow_met_items(model, past, until, EVERYBODY))


def test_every_kind_of_first_row_occurs_in_those_logs():
    kinds = {"public": 0, "neighbours": 0, "mean": 0}
    for seed in range(6):
        model = a_model(without=NO_ROW[1])
        for (_, item), row in slow_met_items(model, a_log(seed), 40, EVERYBODY).items():
            at_mean = torch.equal(row, model.mean_row)
            known = item < model.n_rows and bool(model.has_row[item])
            kinds["public" if known else "mean" if at_mean else "neighbours"] += 1
    assert min(kinds.values()) > 10


@pytest.mark.parametrize("boosted", [False, True])
@pytest.mark.parametrize("clients", [EVERYBODY, [0, 2, 5], [3], []])
@pytest.mark.parametrize("seed", range(3))
def test_these_clients_get_new_rows_with_their_boost_and_all_learned_rows_stay(seed, clients, boosted):
    past, model = a_log(seed), a_model()
    early = met(no_rows(WIDTH), model, past, 60, [0, 1, 2, 3])
    early = OwnRows(early.clients, early.items, early.rows + drawn(*early.rows.shape, seed=seed))
    learned = {pair: torch.tensor(row) for pair, row in as_dictionary(early).items()}
    boost = drawn(len(clients), WIDTH, seed=9)
    later = met(early, model, past, 130, clients, boost if boosted else None)
    by_user = dict(zip(clients, boost, strict=True)) if boosted else None
    check_same(later, slow_met_items(model, past, 130, clients, learned, by_user))
    hit, place = find(later, early.clients, early.items)
    assert hit.all()
    assert torch.equal(later.rows[place], early.rows)
    assert (len(later) > len(early)) == bool(clients)


def test_a_hand_computed_new_row():
    # Ann meets 0, 9, 1, 9; Bob meets 9 and 8; only 0 and 1 have rows.
    past = histories(np.array([0, 0, 1, 0, 1, 0]), np.array([0, 9, 9, 1, 8, 9]), np.arange(6), 2)
    model = a_model(2, without=())
    own = met(no_rows(WIDTH), model, past, 6, [0, 1])
    rows = {pair: torch.tensor(row) for pair, row in as_dictionary(own).items()}
    a, b = model.items.detach()
    torch.testing.assert_close(rows[0, 9], (2 * a + 2 * b) / 4)
    assert torch.equal(rows[0, 0], a)
    assert torch.equal(rows[1, 9], model.mean_row)
    assert torch.equal(rows[1, 8], model.mean_row)


@pytest.mark.parametrize("seed", range(3))
def test_neither_later_events_nor_other_clients_change_a_first_row(seed):
    past, model, until = a_log(seed), a_model(), 80
    users, items = past.users.copy(), past.items[past.place].copy()
    rng = np.random.default_rng(seed)
    items[until:] = rng.permutation(items[until:])
    others = np.flatnonzero((users != 1) & (np.arange(len(users)) < until))
    items[others] = rng.permutation(items[others])
    changed = histories(users, items, past.times[past.place], past.n_users)
    one, other = (met(no_rows(WIDTH), model, log, until, EVERYBODY) for log in (past, changed))
    mine, mine_too = (subset(own, whole_numbers([1]))[0] for own in (one, other))
    assert len(mine) > 3
    assert as_dictionary(mine) == as_dictionary(mine_too)
    assert as_dictionary(one) != as_dictionary(other)


def test_before_the_first_event_nobody_has_a_row():
    assert len(met(no_rows(WIDTH), a_model(), a_log(0), 0, EVERYBODY)) == 0


@given(PAIRS, st.integers(0, 99))
@settings(max_examples=40)
def test_the_boost_is_the_mean_step_of_moved_rows_along_their_clients_taste(pairs, seed):
    before, taste = rows_for(pairs), drawn(N_CLIENTS, WIDTH, seed=seed)
    still = torch.from_numpy(np.random.default_rng(seed).random(len(before)) < 0.4)
    step = drawn(len(before), WIDTH, seed=seed + 1).masked_fill(still[:, None], 0)
    after = OwnRows(before.clients, before.items, before.rows + step)
    along = [
        sum(float(x) * float(t) for x, t in zip(after.rows[p] - before.rows[p], taste[after.clients[p]], strict=True))
        for p in range(len(before))
        if not still[p]
    ]
    assert met_boost(before, after, taste) == pytest.approx(sum(along) / max(len(along), 1), abs=1e-5)
