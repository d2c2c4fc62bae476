"""Routing against a sort per query, at its edges, and behind FAISS."""

import importlib.util
import math
import sys

import pytest
import torch
from torch import Generator

from protofed.client.codec import unit
from protofed.client.router import exact_search, faiss_search, route
from protofed.errors import ConfigError, MissingExtra

HAS_FAISS = importlib.util.find_spec("faiss") is not None


def vectors(n: int, seed: int, d: int = 8) -> torch.Tensor:
    return unit(torch.randn(n, d, generator=Generator().manual_seed(seed)))


def test_routing_is_a_sort_and_a_softmax_over_the_chosen():
    queries, keys = vectors(6, 0), vectors(9, 1)
    chosen, weights = route(queries, keys, top_m=4, temperature=0.07)
    for u in range(6):
        scores = [float(queries[u] @ key) / 0.07 for key in keys]
        best = sorted(range(9), key=lambda k: -scores[k])[:4]
        total = sum(math.exp(scores[k]) for k in best)
        assert chosen[u].tolist() == best
        assert weights[u].tolist() == pytest.approx([math.exp(scores[k]) / total for k in best], abs=1e-5)


def test_a_hand_computed_route():
    chosen, weights = route(
        torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), top_m=2, temperature=1.0
    )
    assert chosen.tolist() == [[1, 0]]
    assert weights[0].tolist() == pytest.approx([math.e / (math.e + 1), 1 / (math.e + 1)])


def test_fewer_prototypes_than_asked_for_are_all_chosen():
    chosen, weights = route(vectors(3, 0), vectors(2, 1), top_m=4, temperature=0.07)
    assert chosen.shape == (3, 2)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3))


def test_a_single_prototype_weighs_one():
    _, weights = route(vectors(3, 0), vectors(1, 1), top_m=4, temperature=0.07)
    assert weights.tolist() == [[1.0], [1.0], [1.0]]


@pytest.mark.parametrize("temperature", [0.0, -0.07, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused_in_one_line(temperature):
    with pytest.raises(ConfigError, match=f"temperature must be greater than 0, got {temperature}") as problem:
        route(vectors(1, 0), vectors(3, 1), top_m=2, temperature=temperature)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(("top_m", "n"), [(0, 3), (2, 0)])
def test_routing_to_nothing_is_refused(top_m, n):
    with pytest.raises(ConfigError, match="top_m >= 1 and a prototype"):
        route(vectors(1, 0), vectors(n, 1), top_m=top_m, temperature=0.07)


def test_a_stack_routes_as_each_client_alone():
    queries, keys = vectors(12, 0), vectors(9, 1)
    chosen, weights = route(queries, keys, top_m=4, temperature=0.07)
    for u in range(12):
        alone = route(queries[u : u + 1], keys, top_m=4, temperature=0.07)
        assert torch.equal(alone[0][0], chosen[u])
        torch.testing.assert_close(alone[1][0], weights[u], atol=1e-6, rtol=1e-5)


def test_one_client_with_a_broken_query_leaves_the_others_alone():
    queries, keys = vectors(3, 0), vectors(9, 1)
    broken = queries.clone()
    broken[1] = float("nan")
    whole, partly = (route(q, keys, top_m=4, temperature=0.07) for q in (queries, broken))
    assert torch.equal(whole[0][[0, 2]], partly[0][[0, 2]])
    assert torch.equal(whole[1][[0, 2]], partly[1][[0, 2]])


def test_without_faiss_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtra, match="pip install faiss-cpu"):
        route(vectors(1, 0), vectors(3, 1), top_m=2, temperature=0.07, search=faiss_search)


@pytest.mark.skipif(not HAS_FAISS, reason="faiss is not installed")
def test_faiss_finds_what_exact_search_finds():
    queries, keys = vectors(20, 0), vectors(50, 1)
    expected, found = exact_search(queries, keys, 4), faiss_search(queries, keys, 4)
    assert torch.equal(expected[1], found[1])
    torch.testing.assert_close(expected[0], found[0])
