"""A user's gain is tested by flipping blocks of queries; groups are the users and events they say they are."""

from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from every_section import USERS, write_every_section
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import csv_of, table, write_run

from protofed.evaluation.significance import PerUser, bootstrap_difference
from protofed.evaluation.strata import benjamini_hochberg, sign_flip_p
from protofed.report.beneficiaries import (
    DRIFT,
    benefits,
    block_p,
    groups_of,
    mean_drift,
    rivals,
    user_gains,
)
from protofed.report.intervals import Pair, pair
from protofed.report.layout import Part
from protofed.report.runs import find_runs
from protofed.report.sections import group
from protofed.report.tables import Results, compute
from protofed.report.variants import common_runs, flagship
from protofed.seeds import seed_of


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    (section,) = group(find_runs(write_every_section(tmp_path_factory.mktemp("runs")))[0])
    return compute(section)


def of(gains: np.ndarray, counts: np.ndarray) -> Pair:
    users = pa.array([f"u{n}" for n in range(len(counts))])
    return Pair(PerUser(gains, counts), PerUser(np.zeros_like(gains), counts), users)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=9), min_size=1, max_size=5))
def test_the_p_value_is_that_of_all_sign_patterns(rows: list[list[int]]) -> None:
    arrays = [np.array(row, dtype=np.float64) for row in rows]
    slow = [
        np.mean([abs(np.dot(signs, row)) >= abs(sum(row)) for signs in product((-1, 1), repeat=len(row))])
        for row in rows
    ]
    assert block_p(arrays, seed=0) == pytest.approx(slow)
    assert block_p(arrays, seed=0) == pytest.approx([sign_flip_p(a, np.random.default_rng(0)) for a in arrays])


def test_many_blocks_are_drawn_from_a_stream_of_each_users_own() -> None:
    rows = [np.random.default_rng(n).normal(size=20) for n in range(2)]
    slow = [sign_flip_p(row, np.random.default_rng(seed_of(0, "sign-flip", u))) for u, row in enumerate(rows)]
    assert block_p(rows, seed=0).tolist() == slow


def test_blocks_are_slices_with_novel_events_apart_and_six_are_needed() -> None:
    counts = np.array([[2, 2, 2], [1, 1, 1], [3, 0, 3]])
    sums = np.array([[0.6, 0.8, 1.0], [0.5, 0.5, 0.5], [0.9, 0.0, 0.3]])
    novel_counts = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 1]])
    novel_sums = np.array([[0.1, 0.2, 0.3], [0.5, 0.5, 0.0], [0.4, 0.0, 0.1]])
    found = user_gains(of(sums, counts), of(novel_sums, novel_counts), seed=0)
    assert found.blocks.tolist() == [6]  # the others have 3 and 4
    assert found.gain == pytest.approx([2.4 / 6])
    assert found.p == pytest.approx([2 / 2**6])  # every block gains: only all signs alike are as extreme
    assert found.adjusted == pytest.approx(benjamini_hochberg(found.p))


def test_a_user_without_novel_events_keeps_its_place(results: Results) -> None:
    whole = of(np.ones((2, 6)), np.ones((2, 6), dtype=np.int64))
    novel = of(np.array([[0.0] * 6, [1.0] * 6]), np.array([[0] * 6, [1] * 6]))
    found = user_gains(whole, novel, seed=0)
    assert found.gain.tolist() == [1.0, 1.0]
    assert found.blocks.tolist() == [6, 6]


def test_tables_of_novel_events_are_about_the_users_of_all_events(tmp_path: Path) -> None:
    def none_alone(n: int, subset: str) -> int:
        return n if subset == "all" or n > 1 else 0

    users = {"ann": (1, 1, 1), "bob": (2, 2, 2), "cleo": (1, 1, 3)}
    for name in ("ewc", "si"):
        write_run(tmp_path / name, lambda *_: 0.5, method=name, users=users, asked=none_alone)
    ewc, si = find_runs(tmp_path)[0]
    whole = pair([ewc], [si])
    assert whole is not None
    novel = pair([ewc], [si], ("sampled", "novel", "ndcg@10"), whole.users)
    assert novel is not None
    assert novel.users.to_pylist() == ["ann", "bob", "cleo"]
    assert novel.counts.tolist() == [[0, 0], [2, 2], [0, 3]]


def test_the_rivals_are_the_best_row_of_another_method_and_the_frozen_one(results: Results) -> None:
    others = {r.label: results.estimates[r.label]["ndcg@10/sampled/all"].mean for r in results.section.rows}
    best = max((label for label in others if not label.startswith("protofed-sp")), key=others.__getitem__)
    assert [row.label for row in rivals(results)] == [best, "frozen"]


def test_the_gain_of_a_group_is_its_paired_difference(results: Results) -> None:
    ours, other = flagship(results.section), rivals(results)[0]
    assert ours is not None
    runs = common_runs(ours, other)
    whole = pair(*runs)
    assert whole is not None
    groups = dict(groups_of(runs, whole))
    assert list(groups) == [
        "everybody",
        "activity: high third",
        "activity: middle third",
        "activity: low third",
        "drift: high third",
        "drift: middle third",
        "drift: low third",
        "repeat",
        "novel",
    ]
    thirds = [groups[f"activity: {name} third"] for name in ("low", "middle", "high")]
    assert sorted(user for third in thirds for user in third.users.to_pylist()) == sorted(whole.users.to_pylist())
    assert thirds[0].counts.sum(1).max() <= thirds[2].counts.sum(1).min()
    drifting = {name: groups[f"drift: {name} third"].users.to_pylist() for name in ("low", "middle", "high")}
    by_drift = sorted(USERS)  # later users drift more
    assert drifting == {"low": by_drift[:4], "middle": by_drift[4:8], "high": by_drift[8:]}
    first = benefits(results)[0]
    assert isinstance(first, Part)
    drawing = first.drawings[-1]
    for row in table(csv_of(drawing)):
        found = groups[row["group"]]
        rng = np.random.default_rng(seed_of(0, "report", drawing.name, row["group"]))
        slow = bootstrap_difference(found.ours, found.other, rng)
        assert [float(row[k]) for k in ("gain", "low95", "high95")] == pytest.approx(
            [slow.mean, slow.low, slow.high], rel=1e-4, abs=1e-6
        )
        assert int(row["users"]) == int(found.counts.any(1).sum())


def test_the_volcano_holds_every_tested_user_and_no_names(results: Results) -> None:
    first = benefits(results)[0]
    assert isinstance(first, Part)
    rows = table(csv_of(first.drawings[0]))
    assert list(rows[0]) == ["gain", "p_value", "p_adjusted", "blocks"]
    assert len(rows) == 12
    assert f"{len(rows)} of 12 users" in first.note
    found = sum(float(row["p_adjusted"]) <= 0.05 and float(row["gain"]) > 0 for row in rows)
    assert f" {found} gain (green)" in first.note
    assert "user 0" not in csv_of(first.drawings[0])


def test_a_users_drift_is_the_mean_over_the_slices_that_know_it(tmp_path: Path) -> None:
    def drift(user: str, tested: int) -> float | None:
        return {("ann", 0): 9.0, ("ann", 1): 0.2, ("ann", 2): 0.6, ("bob", 2): 0.5}.get((user, tested))

    write_run(tmp_path / "old", lambda *_: 0.5, method="ewc")
    write_run(tmp_path / "new", lambda *_: 0.5, method="lwf", drift=drift)
    old, new = (row.runs for row in group(find_runs(tmp_path)[0])[0].rows)
    users = pa.array(["ann", "bob", "cleo", "dora"])
    told = mean_drift((old, new), users)
    np.testing.assert_allclose(told, [0.4, 0.5, np.nan, np.nan])
    assert np.isnan(mean_drift((old, old), users)).all()


def test_runs_without_drift_say_so_and_keep_their_other_groups(tmp_path: Path) -> None:
    for method in ("protofed-sp", "frozen"):
        write_run(tmp_path / method, lambda *_: 0.5, method=method)
    (section,) = group(find_runs(tmp_path)[0])
    first, gap = benefits(compute(section))
    assert isinstance(first, Part)
    assert gap == DRIFT
    assert "drift: low third" not in [row["group"] for row in table(csv_of(first.drawings[-1]))]
