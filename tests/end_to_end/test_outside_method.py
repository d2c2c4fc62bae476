"""A method from outside the package: named by its module, run like any other, and refused in one line."""

import json
import sys
from pathlib import Path

import pytest
from test_command_line import FAST, protofed, refused

TEXT = '''
"""Ranks items by how new they are."""

from dataclasses import dataclass

import torch

from protofed.privacy.ledger import Release
from protofed.slices.leaks import Evidence


@dataclass(frozen=True)
class State:
    slice_index: int


@dataclass(frozen=True)
class Newest:
    sign: float = 1.0

    def start(self, world):
        return State(world.base.index)

    def learn(self, world, state, slice_, descend):
        return State(slice_.index), {}

    def score(self, world, state, queries):
        return self.sign * torch.arange(float(queries.n_items)).expand(len(queries), -1)

    def evidence(self, state):
        return Evidence(state.slice_index)


@dataclass(frozen=True)
class Noised(Newest):
    def releases(self, world, state, slices_ahead=0):
        return (Release(10.0, 0.05, state.slice_index + slices_ahead, stream="mine"),)


class Plain:
    start, learn, score, evidence = Newest.start, Newest.learn, Newest.score, Newest.evidence
    sign = 1.0


class Picky(Newest):
    def __init__(self, path):
        pass


class Half:
    def start(self, world): ...

    def score(self, world, state, queries): ...


oldest = Newest(sign=-1.0)
'''
RUN = ["run", "--dataset", "synthetic", "--out", "run", "--cache", "cache", "--json", *FAST]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder that holds `own.newest` and a module that does not import; neither stays loaded."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "newest.py").write_text(TEXT)
    (tmp_path / "own" / "broken.py").write_text("import nothing_of_the_kind\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "own"]:
        del sys.modules[name]


def headline(place: Path, cache: Path, out: str, *words: object) -> float:
    done = protofed(*RUN, "--cache", cache, "--out", out, *words, cwd=place)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["privacy"] is None
    (row,) = [row for row in told["headline"] if (row["candidates"], row["subset"]) == ("sampled", "all")]
    return float(row["ndcg@10"])


def test_a_class_or_an_instance_runs_and_takes_hyper_parameters(place, cache):
    newest = headline(place, cache, "newest", "--method", "own.newest:Newest")
    oldest = headline(place, cache, "oldest", "--method", "own.newest:oldest")
    assert newest != oldest
    turned = headline(place, cache, "turned", "--method", "own.newest:Newest", "--set", "hyper.sign=-1.0")
    assert turned == oldest
    assert headline(place, cache, "plain", "--method", "own.newest:Plain") == newest
    assert protofed("report", ".", "-o", "report.md", cwd=place).returncode == 0
    assert "own.newest:Newest" in (place / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["own.missing:Newest"], "cannot be loaded: ModuleNotFoundError: No module named 'own.missing'; its module"),
        (["own.broken:Newest"], "ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
        (["own.newest:Nwest"], "AttributeError: module 'own.newest' has no attribute 'Nwest'"),
        (["own.newest:Picky"], "TypeError: Picky.__init__() missing 1 required positional argument"),
        (["own.newest:Half"], "'own.newest:Half' is no method: it lacks learn, evidence; see"),
        (["own.newest:TEXT"], "has no attribute 'TEXT'"),
        (["own.newest:"], "is named package.module:Name, got 'own.newest:'"),
        ([":Newest"], "is named package.module:Name, got ':Newest'"),
        (["protofed.methods.frozen:Frozen"], "lies inside the package; name it as `protofed run --list-methods`"),
        (["own.newest:Newest", "--set", "hyper.sing=1"], "unknown config key 'hyper.sing'; did you mean 'hyper.sign'?"),
        (["own.newest:Plain", "--set", "hyper.sign=1"], "own.newest:Plain has no hyper-parameters, got hyper.sign"),
        (["own.newest:Newest", "--variant", "peft"], "own.newest:Newest has no variant 'peft'; it has standard"),
        (["own.newest:Newest", "--target-epsilon", "3.4"], "Newest cannot be made private: nobody has shown that"),
        (["own.newest:Newest", "--noise-multiplier", "1"], "run it without a privacy budget"),
    ],
)
def test_what_is_no_method_is_one_line(place, words, message):
    assert message in refused(*RUN, "--method", *words, cwd=place)
    assert not (place / "run").exists()


def test_a_bench_runs_it_beside_the_others(place, cache):
    methods = "own.newest:Newest,popularity"
    words = ["--methods", methods, "--datasets", "synthetic", "--cache", cache, "--out", "bench", "--json", *FAST]
    done = protofed("bench", *words, cwd=place)
    assert done.returncode == 0, done.stderr
    assert {row["method"] for row in json.loads(done.stdout)["rows"]} == set(methods.split(","))
    assert (place / "bench" / "synthetic" / "own.newest%3ANewest" / "default" / "seed-0" / "config.toml").is_file()


def test_one_that_says_what_it_releases_runs_under_a_budget_and_its_ledger_is_priced(place, cache):
    words = ["--method", "own.newest:Noised", "--target-epsilon", "3.4", "--cache", cache]
    told = json.loads(protofed(*RUN, *words, cwd=place).stdout)["privacy"]
    assert [(release["stream"], release["count"]) for release in told["releases"]] == [("mine", 2)]
    assert 0 < told["epsilon_release"] < 3.4
