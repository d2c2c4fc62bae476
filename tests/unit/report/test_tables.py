"""Every number of the tables against hand computation."""

import math
from pathlib import Path

import numpy as np
import pytest
from run_folders import write_run

from protofed.evaluation.forgetting import accuracy
from protofed.evaluation.significance import PerUser, bootstrap_difference, bootstrap_interval
from protofed.report.cautions import cautions
from protofed.report.layout import (
    Cell,
    Column,
    Estimate,
    Line,
    Table,
    beside,
    estimate_cells,
    number,
    to_csv,
)
from protofed.report.runs import find_runs
from protofed.report.sections import Row, group
from protofed.report.tables import (
    Results,
    compute,
    distances,
    headline,
    main_matrix,
    mean_over_slices,
    measured,
    strata,
)
from protofed.seeds import seed_of

# Rows: slice tested; columns: slice trained.
SEED_0 = np.array([[0.50, 0.46, 0.40], [0.30, 0.60, 0.55], [0.20, 0.35, 0.70]])
SEED_1 = SEED_0 + 0.02
USERS = {"ann": (1, 2, 1), "bob": (1, 1, 2), "cleo": (2, 0, 1)}
SKILL = {"ann": 1.0, "bob": 0.5, "cleo": 1.5}


def of(matrix: np.ndarray, scale: float = 1.0):  # type: ignore[no-untyped-def]
    """A run whose NDCG@10 is the matrix, novel events worth half, full ranking a tenth, HR@10 1.5 times as much."""

    def value(tested: int, trained: int, candidates: str, subset: str, metric: str) -> float:
        factor = {"all": 1.0, "novel": 0.5}.get(subset, 0.8) * {"sampled": 1.0, "full": 0.1}.get(candidates, 0.3)
        return float(scale * matrix[tested, trained] * factor * (1.5 if metric == "hr@10" else 1.0))

    return value


def results(root: Path) -> Results:
    (section,) = group(find_runs(root)[0])
    return compute(section)


def table_of(means: dict[str, float], *footer: Line) -> Table:
    """A table of one column."""
    rows = [Row(label, "ewc", ()) for label in means]
    return measured("t", "", [(Column("x"), lambda row: Estimate(means[row.label]))], rows, footer)


@pytest.fixture
def two_seeds(tmp_path: Path) -> Results:
    write_run(tmp_path / "s0", of(SEED_0), method="ewc", seed=0)
    write_run(tmp_path / "s1", of(SEED_1), method="ewc", seed=1)
    return results(tmp_path)


def test_the_headline_is_the_mean_of_the_diagonal_after_the_base_block_and_its_spread_over_seeds(
    two_seeds: Results,
) -> None:
    found = two_seeds.estimates["ewc"]["ndcg@10/sampled/all"]
    assert found.mean == pytest.approx((0.65 + 0.67) / 2)
    assert found.std == pytest.approx(0.02 / math.sqrt(2))  # divisor n - 1
    assert two_seeds.estimates["ewc"]["ndcg@10/sampled/novel"].mean == pytest.approx(0.33)
    assert two_seeds.estimates["ewc"]["hr@10/full/all"].mean == pytest.approx(0.099)


def test_forgetting_and_transfer_are_those_of_the_definitions(two_seeds: Results) -> None:
    found = two_seeds.estimates["ewc"]
    assert found["AF"].mean == pytest.approx(((0.50 - 0.40) + (0.60 - 0.55)) / 2)
    assert found["BWT"].mean == pytest.approx(((0.40 - 0.50) + (0.55 - 0.60)) / 2)
    uniform = sum(1 / math.log2(rank + 1) for rank in range(1, 11)) / 100
    assert found["FWT"].mean == pytest.approx((0.31 + 0.36) / 2 - uniform)
    assert found["final"].mean == pytest.approx((0.40 + 0.55 + 0.70) / 3 + 0.01)


def test_fewer_candidates_move_the_reference_of_forward_transfer(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "s0", of(SEED_0))
    with (folder / "config.toml").open("a") as config:
        config.write("n_negatives = 9\n")
    uniform = sum(1 / math.log2(rank + 1) for rank in range(1, 11)) / 10
    assert results(tmp_path).estimates["frozen"]["FWT"].mean == pytest.approx((0.30 + 0.35) / 2 - uniform)


def test_the_mean_over_slices_is_the_accuracy_of_the_evaluation(tmp_path: Path) -> None:
    write_run(tmp_path / "s0", of(SEED_0))
    ((run,), _) = find_runs(tmp_path)
    assert mean_over_slices(run, ("sampled", "all", "ndcg@10")) == pytest.approx(accuracy(main_matrix(run)))


def test_intervals_are_those_of_the_users_with_seeds_averaged_first(tmp_path: Path) -> None:
    write_run(tmp_path / "a0", of(SEED_0), method="ewc", seed=0, users=USERS, skill=SKILL)
    write_run(tmp_path / "a1", of(SEED_1), method="ewc", seed=1, users=USERS, skill=SKILL)
    write_run(tmp_path / "b0", of(SEED_0, 0.5), method="frozen", seed=0, users=USERS, skill={"ann": 0.1})
    found = results(tmp_path)
    counts = np.array([USERS[user][1:] for user in sorted(USERS)])
    skill = np.array([[SKILL[user]] for user in sorted(USERS)])
    ewc = PerUser(counts * skill * (np.diagonal(SEED_0)[1:] + 0.01), counts)
    frozen = PerUser(counts * np.array([[0.1], [1.0], [1.0]]) * 0.5 * np.diagonal(SEED_0)[1:], counts)

    def rng() -> np.random.Generator:
        return np.random.default_rng(seed_of(0, "report", "toy", "sampled", "all"))

    expected = bootstrap_interval(ewc, rng())
    estimate = found.estimates["ewc"]["ndcg@10/sampled/all"]
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((expected.mean, expected.low, expected.high))
    assert expected.low < expected.mean < expected.high
    gap = bootstrap_difference(frozen, ewc, rng())
    behind = found.intervals["sampled", "all"].behind["frozen"]
    assert (behind.mean, behind.low, behind.high) == pytest.approx((gap.mean, gap.low, gap.high))
    assert found.intervals["sampled", "all"].best == "ewc"


def test_the_draws_do_not_depend_on_the_names_of_the_folders(tmp_path: Path) -> None:
    for place, names in (("one", "ab"), ("two", "ba")):
        write_run(tmp_path / place / names[0], of(SEED_0), method="ewc", users=USERS, skill=SKILL)
        write_run(tmp_path / place / names[1], of(SEED_1), method="frozen", users=USERS, skill=SKILL)
    assert repr(results(tmp_path / "one").estimates) == repr(results(tmp_path / "two").estimates)  # NaN is not NaN


def test_a_run_that_did_not_keep_its_users_has_a_mean_but_no_interval(tmp_path: Path) -> None:
    write_run(tmp_path / "s0", of(SEED_0), per_user=False)
    found = results(tmp_path)
    estimate = found.estimates["frozen"]["ndcg@10/sampled/all"]
    assert estimate.mean == pytest.approx(0.65)
    assert math.isnan(estimate.low)
    assert distances(found) is None
    assert any("no confidence interval for frozen" in line for line in cautions([found], ()))


def test_seeds_that_answered_other_queries_give_no_interval(tmp_path: Path) -> None:
    write_run(tmp_path / "s0", of(SEED_0), seed=0, users=USERS)
    write_run(tmp_path / "s1", of(SEED_0), seed=1, users=USERS | {"dora": (1, 1, 1)})
    found = results(tmp_path)
    assert math.isnan(found.estimates["frozen"]["ndcg@10/sampled/all"].low)
    assert any("same number of queries" in line for line in cautions([found], ()))


def test_the_headline_table_starts_with_the_best_row_and_counts_queries_and_users(tmp_path: Path) -> None:
    write_run(tmp_path / "a", of(SEED_0, 0.5), method="frozen")
    write_run(tmp_path / "b", of(SEED_0), method="ewc")
    table = headline(results(tmp_path))
    assert [(line.label, line.trivial) for line in table.lines] == [("ewc", False), ("frozen", True)]
    assert table.lines[0].cells[0].text == "0.650"
    assert [line.cells[0].text for line in table.footer] == ["7", "3"]


def test_strata_show_every_kind_of_event_and_dashes_for_those_without_queries(tmp_path: Path) -> None:
    write_run(tmp_path / "a", of(SEED_0), subsets=("all", "repeat", "novel"), candidates=("sampled", "sampled_hard"))
    (section,) = group(find_runs(tmp_path)[0])
    table = strata(section, "sampled")
    shown = dict(zip([column.label for column in table.columns], [c.text for c in table.lines[0].cells], strict=True))
    assert shown["repeat"] == "0.520"
    assert shown["novel"] == "0.325"
    assert shown["new user"] == "–"
    assert shown["repeat, hard"] == "0.156"


def test_the_best_of_a_column_is_marked_and_ties_share_the_mark() -> None:
    column, lower = Column("x"), Column("AF", lower_is_better=True)
    estimates = [Estimate(0.5), Estimate(0.50001), Estimate(0.2), Estimate(math.nan)]
    assert [cell.best for cell in estimate_cells(column, estimates)] == [True, True, False, False]
    assert [cell.best for cell in estimate_cells(lower, estimates)] == [False, False, True, False]
    assert [cell.best for cell in estimate_cells(column, [Estimate(0.5)])] == [False]


def test_small_columns_get_a_fourth_decimal() -> None:
    assert [cell.text for cell in estimate_cells(Column("x"), [Estimate(0.0123), Estimate(0.0009)])] == [
        "0.0123",
        "0.0009",
    ]


def test_rows_without_a_number_come_last() -> None:
    means = {"none": math.nan, "low": 0.1, "high": 0.3}
    assert [line.label for line in table_of(means).lines] == ["high", "low", "none"]


@pytest.mark.parametrize("lower", [False, True])
def test_what_reads_as_zero_is_never_set_bold(lower: bool) -> None:
    column = Column("x", lower_is_better=lower)
    cells = estimate_cells(column, [Estimate(0.00001), Estimate(-0.00002), Estimate(0.02 if lower else -0.02)])
    assert [cell.text for cell in cells[:2]] == ["0.0000", "0.0000"]
    assert not any(cell.best for cell in cells)


def test_columns_set_beside_a_table_reach_its_lines_and_its_footer() -> None:
    narrow = table_of({"a": 0.5, "b": 0.25}, Line("users", (Cell("9"),)))
    wide = beside(narrow, [Column("up", "bytes")], {"a": [Cell("1 kB", value=1000.0)], "b": [Cell("–")]})
    assert [[cell.text for cell in line.cells] for line in wide.lines] == [["0.500", "1 kB"], ["0.250", "–"]]
    assert [cell.text for cell in wide.footer[0].cells] == ["9", ""]


def test_numbers_have_a_true_minus_and_no_negative_zero() -> None:
    assert number(-0.0321) == "\N{MINUS SIGN}0.032"
    assert number(-0.0001) == "0.000"
    assert number(math.nan) == "–"


def test_a_csv_quotes_what_needs_it_and_leaves_unknown_numbers_empty() -> None:
    assert to_csv(["a", "b"], [('x, "y"', math.nan), ("z", 0.25)]) == 'a,b\n"x, ""y""",\nz,0.25\n'


def test_hits_that_pile_up_low_are_warned_about(tmp_path: Path) -> None:
    def flat(tested: int, trained: int, candidates: str, subset: str, metric: str) -> float:
        return 0.5 if metric == "hr@10" else 0.5 * (0.40 if subset == "novel" else 0.46)

    write_run(tmp_path / "a", flat)
    write_run(tmp_path / "b", flat, method="ewc")
    low = [line for line in cautions([results(tmp_path)], ()) if "NDCG@10 / HR@10" in line]
    assert [line.split(":")[1].strip() for line in low] == ["sampled, novel events", "full, novel events"]
    assert "NDCG@10 / HR@10 is below 0.4544 for ewc (0.4000), frozen (0.4000): hits pile up" in low[0]


def test_a_method_that_does_not_beat_a_trivial_row_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "a", of(SEED_0), method="personal-memory")
    write_run(tmp_path / "b", of(SEED_0, 0.9), method="ewc")
    write_run(tmp_path / "c", of(SEED_0, 1.1), method="si")
    lines = [line for line in cautions([results(tmp_path)], ()) if "not above the trivial row" in line]
    assert len(lines) == 4
    assert all("ewc not above the trivial row personal-memory" in line for line in lines)


def test_where_most_rows_lose_to_a_trivial_one_those_that_do_not_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "memory", of(SEED_0), method="personal-memory")
    losers = ("ewc", "mas", "lwf", "ccd", "infer", "pcl", "ditto", "fedavg", "fedprox")
    for place, method in enumerate((*losers, "si")):
        write_run(tmp_path / str(place), of(SEED_0, 1.1 if method == "si" else 0.9), method=method)
    lines = [line for line in cautions([results(tmp_path)], ()) if "trivial row" in line]
    assert len(lines) == 4
    assert lines[0].endswith("rows above the trivial row personal-memory (sampled, all events, NDCG@10): si, of 10.")


def test_a_slice_without_queries_is_left_out_with_a_warning(tmp_path: Path) -> None:
    write_run(tmp_path / "a", of(SEED_0), users={"ann": (1, 0, 2), "bob": (1, 0, 1)})
    found = results(tmp_path)
    assert found.estimates["frozen"]["ndcg@10/sampled/all"].mean == pytest.approx(0.70)
    assert any("no test query in slice 1" in line for line in cautions([found], ()))
