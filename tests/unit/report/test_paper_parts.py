"""The data of every table and figure equals what a slow, obvious computation from the run files gives."""

import math
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from every_section import LEDGER, N_SLICES, USERS, WEAK, shares, write_every_section
from run_folders import csv_of, shown_in, table, write_run

from protofed.evaluation.fairness import user_disparity
from protofed.evaluation.significance import PerUser, bootstrap_difference
from protofed.privacy.accountant import gaussian_epsilon
from protofed.report.costs import (
    cost_of,
    count,
    device_memory,
    duration,
    efficiency,
    equal_bytes,
    equal_epsilon,
    headline_with_costs,
    size,
)
from protofed.report.layout import Missing, Part, interval
from protofed.report.opening import forest, overview, sentences
from protofed.report.page import answers
from protofed.report.runs import find_runs
from protofed.report.sections import Section, group
from protofed.report.slices import adaptation, exposure, frontier_part, user_gap
from protofed.report.tables import MAIN, Results, compute
from protofed.report.variants import (
    ablation_part,
    ablations,
    common_runs,
    compared,
    pair_with_full,
    sensitivity,
    tradeoff,
)
from protofed.seeds import seed_of

FULL, ABLATED = "protofed-sp (reference)", "protofed-sp (reference, without long)"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_every_section(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def results(root: Path) -> Results:
    (section,) = group(find_runs(root)[0])
    return compute(section)


@pytest.fixture(scope="module")
def section(results: Results) -> Section:
    return results.section


def a_matrix(folder: Path) -> np.ndarray:
    """A[s, t] of NDCG@10, all events, sampled candidates, read row by row."""
    a = np.full((N_SLICES + 1, N_SLICES + 1), np.nan)
    for row in pq.read_table(folder / "metrics.parquet").to_pylist():
        wanted = (row["split"], row["candidates"], row["subset"], row["metric"]) == (
            "test",
            "sampled",
            "all",
            "ndcg@10",
        )
        if wanted:
            a[row["slice_tested"], row["slice_trained"]] = row["value"]
    return a


def accuracy(folder: Path) -> float:
    return float(np.mean([a_matrix(folder)[t, t] for t in range(1, N_SLICES + 1)]))


def forgetting(folder: Path) -> float:
    a = a_matrix(folder)
    return float(np.mean([a[s, s:N_SLICES].max() - a[s, N_SLICES] for s in range(N_SLICES)]))


def by_user(folder: Path, subset: str = "all", candidates: str = "sampled") -> tuple[np.ndarray, np.ndarray]:
    """NDCG@10 sums and queries of A[t, t], t = 0..T, users in the order of their names."""
    names = sorted(USERS)
    sums, counts = np.zeros((len(names), N_SLICES + 1)), np.zeros((len(names), N_SLICES + 1), dtype=np.int64)
    for row in pq.read_table(folder / "per_user.parquet").to_pylist():
        same = row["slice_trained"] == row["slice_tested"]
        if same and (row["candidates"], row["subset"]) == (candidates, subset):
            place = names.index(row["user"]), row["slice_tested"]
            sums[place], counts[place] = row["ndcg10_sum"], row["n"]
    return sums, counts


def part(found: Part | Missing) -> Part:
    assert isinstance(found, Part), found
    return found


def test_these_runs_fill_every_part(results: Results, section: Section) -> None:
    found = answers(results)
    assert [one.title for one in found if isinstance(one, Missing)] == []
    assert len({one.name for one in found if isinstance(one, Part)}) == len(found)


def test_runs_that_contain_nothing_leave_one_line_for_each_part(tmp_path: Path) -> None:
    write_run(tmp_path / "run", lambda *_: 0.5, per_user=False)
    (only,) = group(find_runs(tmp_path)[0])
    found = answers(compute(only))
    assert [one.title for one in found if isinstance(one, Part)] == ["Efficiency"]
    assert all(one.why and "\n" not in one.why for one in found if isinstance(one, Missing))


def test_an_ablation_is_the_paired_difference_on_the_common_seed(root: Path, section: Section) -> None:
    (shown,) = part(ablation_part(section)).tables
    (one,) = [one for one in ablations(section) if one.row.label == ABLATED]
    ours, full = (by_user(root / name) for name in ("no-long", "sp-0"))
    rng = np.random.default_rng(seed_of(0, "report", section.slug, "ablation", "sampled", "all", "ndcg@10"))
    slow = bootstrap_difference(*(PerUser(sums[:, 1:], counts[:, 1:]) for sums, counts in (ours, full)), rng)
    assert (one.full.label, [run.seed for run in common_runs(one.row, one.full)[1]]) == (FULL, [0])
    gap = pair_with_full(one, MAIN, section.slug)
    assert gap is not None
    assert [gap.mean, gap.low, gap.high, gap.p_value] == pytest.approx([slow.mean, slow.low, slow.high, slow.p_value])
    cell = shown_in(shown)[ABLATED]["NDCG@10 sampled, all minus full"]
    assert (cell.value, cell.interval) == (pytest.approx(slow.mean), interval(slow.low, slow.high))
    assert slow.mean == pytest.approx(accuracy(root / "no-long") - accuracy(root / "sp-0"))
    assert shown.lines[0].marked
    assert shown.lines[1].cells[-1].value == pytest.approx(forgetting(root / "no-long") - forgetting(root / "sp-0"))


def test_sensitivity_is_the_mean_and_spread_over_seeds_at_each_value(root: Path, section: Section) -> None:
    (drawing,) = part(sensitivity(section)).drawings
    rows = {float(row["value"]): row for row in table(csv_of(drawing))}
    seeds = [accuracy(root / f"sp-{seed}") for seed in (0, 1)]
    assert float(rows[1.0]["mean"]) == pytest.approx(np.mean(seeds), rel=1e-5)
    assert float(rows[1.0]["std"]) == pytest.approx(np.std(seeds, ddof=1), rel=1e-4)
    assert float(rows[4.0]["mean"]) == pytest.approx(accuracy(root / "lambda"), rel=1e-5)
    assert rows[4.0]["std"] == ""


def test_steps_are_the_first_point_that_reaches_95_percent_of_the_best(section: Section) -> None:
    found = part(adaptation(section))
    rows = table(csv_of(found.drawings[0]))
    assert [row["slice"] for row in rows] == ["1", "2", "3", "4"]
    # 0.2, 0.4, 0.5, 0.49 after 0, 10, 20, 30 steps of 64 windows: 0.475 is reached with the third
    assert {(row["method"], row["steps"], row["windows"]) for row in rows} == {("finetune-last", "20", "1280")}
    assert "No trace:" in found.note
    assert "frozen" in found.note


def test_the_plane_holds_forgetting_and_accuracy_of_every_row(root: Path, results: Results, section: Section) -> None:
    (drawing,) = part(frontier_part(results)).drawings
    rows = {row["method"]: row for row in table(csv_of(drawing))}
    assert set(rows) == {row.label for row in section.rows}
    assert float(rows["fedavg"]["AF"]) == pytest.approx(forgetting(root / "fedavg"), rel=1e-5)
    assert float(rows["fedavg"]["ndcg@10"]) == pytest.approx(accuracy(root / "fedavg"), rel=1e-5)


def test_privacy_against_utility_goes_by_epsilon_of_the_ledgers(root: Path, results: Results) -> None:
    found = part(tradeoff(results))
    first, second = (table(csv_of(drawing)) for drawing in found.drawings)
    expected = {}
    for name, ledger in (("weak", WEAK), ("sp", LEDGER)):
        exact = gaussian_epsilon(math.sqrt(ledger[0]["count"]) / ledger[0]["noise_multiplier"], 1e-5)
        runs = [root / f"{name}-{seed}" for seed in (0, 1)]
        expected[exact] = np.mean([accuracy(run) for run in runs]), np.mean([forgetting(run) for run in runs])
    for place, rows in enumerate((first, second)):
        noised = [row for row in rows if row["ε (PLD)"]]
        assert [float(row["ε (PLD)"]) for row in noised] == pytest.approx(sorted(expected), abs=1e-4)
        means = [expected[exact][place] for exact in sorted(expected)]
        assert [float(row["mean"]) for row in noised] == pytest.approx(means, rel=1e-5)
    (free,) = [row for row in first if not row["ε (PLD)"]]
    assert (free["method"], float(free["mean"])) == (
        "protofed-sp (nodp)",
        pytest.approx(accuracy(root / "nodp"), rel=1e-5),
    )


def test_without_dp_accounting_the_axis_is_the_noise_and_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("dp_accounting", "dp_accounting.pld"):
        monkeypatch.setitem(sys.modules, module, None)
    for z in (1.0, 2.0):
        ledger = [{"noise_multiplier": z, "sampling_rate": 0.5, "count": 4}]
        settings = f"[privacy]\nnoise_multiplier = {z}\n"
        write_run(tmp_path / str(z), lambda *_: 0.5, method="protofed-sp", settings=settings, ledger=ledger)
    (only,) = group(find_runs(tmp_path)[0])
    found = part(tradeoff(compute(only)))
    assert "dp-accounting is not installed" in found.note
    assert {line.cells[0].text for line in overview([compute(only)]).lines} == {"private, unpriced"}
    assert [row["noise multiplier"] for row in table(csv_of(found.drawings[0]))] == ["1", "2"]


def test_fairness_is_the_gap_between_thirds_by_queries_so_far(root: Path, section: Section) -> None:
    found = part(user_gap(section))
    read = {(r["method"], int(r["slice"])): float(r["|busy - quiet|"]) for r in table(csv_of(found.drawings[0]))}
    sums, counts = by_user(root / "ewc")
    for t in range(1, N_SLICES + 1):
        slow = user_disparity(sums[:, t], counts[:, t], counts[:, : t + 1].sum(1)).disparity
        assert read["ewc (private)", t] == pytest.approx(slow, rel=1e-4, abs=1e-9)


def test_exposure_is_each_groups_share_beside_its_share_of_events(root: Path, section: Section) -> None:
    found = part(exposure(section))
    told = {
        (row["slice_tested"], row["metric"]): row["value"]
        for row in pq.read_table(root / "ewc" / "metrics.parquet").to_pylist()
        if row["metric"].startswith(("exposure", "events"))
    }
    head, tail = (table(csv_of(drawing)) for drawing in found.drawings[:2])
    for rows, group_ in ((head, "head"), (tail, "tail")):
        read = {(r["method"], int(r["slice"])): float(r[f"share of {group_} items"]) for r in rows}
        for t in range(1, N_SLICES + 1):
            assert read["ewc (private)", t] == pytest.approx(told[t, f"exposure_{group_}@10"])
            assert read["test events", t] == pytest.approx(told[t, f"events_{group_}"])
    lines = shown_in(found.tables[0])
    mean = np.mean([told[t, "exposure_head@10"] for t in range(1, N_SLICES + 1)])
    assert lines["ewc (private)"]["share of Top-10 places head"].value == pytest.approx(mean)
    assert lines["ewc (private)"]["head above events"].value == pytest.approx(mean - 0.5)
    assert [cell.text for cell in found.tables[0].footer[0].cells[:3]] == ["0.500", "0.300", "0.200"]


def test_item_disparity_is_the_distance_of_head_and_tail_slice_by_slice(tmp_path: Path) -> None:
    shown = {"exposure_head@10": (0.7, 0.1), "exposure_tail@10": (0.1, 0.4), "events_head": (0.5, 0.5)}
    by_hand = {**shown, "events_tail": (0.2, 0.3)}

    def parted(tested: int, metric: str) -> float:
        return by_hand.get(metric, (0.2, 0.2))[tested % 2]

    write_run(tmp_path / "ewc", lambda *_: 0.5, method="ewc", shares=parted)
    (only,) = group(find_runs(tmp_path)[0])
    found = part(exposure(only))
    read = {(r["method"], int(r["slice"])): float(r["|head - tail|"]) for r in table(csv_of(found.drawings[2]))}
    for t in (1, 2):
        assert read["ewc", t] == pytest.approx((0.6, 0.3)[t % 2])
        assert read["test events", t] == pytest.approx((0.3, 0.2)[t % 2])
    disp_item = shown_in(found.tables[0])["ewc"]["Disp_item"].value
    assert disp_item == pytest.approx(np.mean([(0.6, 0.3)[t % 2] for t in (1, 2)]))
    events = np.mean([(0.3, 0.2)[t % 2] for t in (1, 2)])
    assert float(found.tables[0].footer[0].cells[-1].text) == pytest.approx(events, abs=1e-3)


def test_rows_that_do_not_tell_exposure_are_named_and_none_is_a_reason(tmp_path: Path) -> None:
    write_run(tmp_path / "old", lambda *_: 0.5, method="ewc")
    (only,) = group(find_runs(tmp_path)[0])
    assert isinstance(exposure(only), Missing)
    write_run(tmp_path / "new", lambda *_: 0.5, method="lwf", shares=shares(0.1))
    (both,) = group(find_runs(tmp_path)[0])
    found = part(exposure(both))
    assert found.note.endswith("Not told by ewc.")
    assert [line.label for line in found.tables[0].lines] == ["lwf"]


def test_memory_is_what_the_runs_told_and_its_sum(section: Section) -> None:
    found = part(device_memory(section)).tables[0]
    labels = [column.label for column in found.columns]
    assert labels == ["together", "backbone", "prototypes", "prompts", "own rows"]
    cells = {line.label: [cell.text for cell in line.cells] for line in found.lines}
    assert cells[FULL] == ["2.09 MB", "2.00 MB", "90.0 kB", "4.10 kB", "820 B"]
    assert "fedavg" not in cells
    assert shown_in(found)[FULL]["together"].value == pytest.approx(2e6 + 9e4 + 4096 + 820.5)


def test_costs_are_what_the_runs_told_and_blank_where_they_did_not(results: Results, section: Section) -> None:
    rows = {row.label: cost_of(row) for row in section.rows}
    assert [rows[FULL][name] for name in ("bytes_up", "traffic", "trainable_parameters_per_user")] == [65, 8257, 1024]
    assert rows[FULL]["learn"] == 2.0
    assert rows[FULL]["learn_slice"] == pytest.approx(2.0 / N_SLICES)
    assert math.isnan(rows["frozen"]["bytes_up"])
    shown = headline_with_costs(results)
    labels = [column.label for column in shown.columns][-5:]
    assert labels == ["up", "down", "shared", "per user", "learn, s"]
    cells = {line.label: [cell.text for cell in line.cells[-5:]] for line in shown.lines}
    assert cells[FULL] == ["65 B", "8.19 kB", "640", "1.02 k", "2.0"]
    assert cells["frozen"] == ["–", "–", "–", "–", "2.0"]
    assert all(len(line.cells) == len(shown.columns) for line in (*shown.lines, *shown.footer))
    assert shown_in(shown)["fedavg"]["trainable shared"].value == 640
    (table_of,) = part(efficiency(section)).tables
    fedavg = shown_in(table_of)["fedavg"]
    assert [fedavg[name].text for name in ("time a slice", "trainable shared")] == [
        "500 ms",
        "640",
    ]


def test_rows_go_by_their_bytes_with_ours_marked(results: Results) -> None:
    (shown,) = part(equal_bytes(results)).tables
    traffic = [line.cells[0].value for line in shown.lines]
    assert traffic == sorted(traffic)
    assert [(line.label, line.marked) for line in shown.lines] == [
        ("fedavg", False),  # 8,000 bytes against 8,257
        ("protofed-sp (nodp)", True),
        (FULL, True),
    ]


@pytest.mark.parametrize(
    ("value", "bytes_", "things"),
    [(0.0, "0 B", "0"), (999.0, "999 B", "999"), (1_048_576.0, "1.05 MB", "1.05 M"), (25e9, "25.0 GB", "25.0 G")],
)
def test_sizes_have_three_figures(value: float, bytes_: str, things: str) -> None:
    assert (size(value), count(value)) == (bytes_, things)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(1.2e-4, "< 1 ms"), (0.0, "0 s"), (0.034, "34 ms"), (3.42, "3.4 s"), (75.0, "1.2 min"), (7200.0, "2.0 h")],
)
def test_times_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_equal_epsilon_compares_the_private_rows_of_one_budget(results: Results) -> None:
    (shown,) = part(equal_epsilon(results)).tables
    assert [line.label for line in shown.lines] == [FULL, "ewc (private)"]
    assert shown.caption.startswith(f"ε = {results.prices[FULL].released:.1f}, δ = 1e-05")
    assert [line.cells[0].value for line in shown.lines] == [
        results.estimates[label]["ndcg@10/sampled/all"].mean for label in (FULL, "ewc (private)")
    ]


def test_three_sentences_name_the_best_rows_and_what_is_beyond_chance(root: Path, results: Results) -> None:
    wins, private, loses = sentences(results)
    ours = np.mean([accuracy(root / f"sp-{seed}") for seed in (0, 1)])
    assert private.startswith(f"With privacy: {FULL} with NDCG@10 {ours:.3f} (ε = ")
    assert private.endswith(", of 2.")
    best, trivial = accuracy(root / "nodp"), accuracy(root / "frozen")
    leads = f"Wins: protofed-sp (nodp) with NDCG@10 {best:.3f} (best trivial row: frozen, {trivial:.3f})"
    assert wins == f"{leads}; ahead of all 6 other rows beyond chance."
    assert loses == "Where ProtoFed-SP loses: nowhere; its best row, protofed-sp (nodp), leads every column."


def test_a_release_without_noise_is_no_private_row(tmp_path: Path) -> None:
    ledger = [{"noise_multiplier": 0.0, "sampling_rate": 0.5, "count": 4}]
    for method in ("protofed-sp", "ewc"):
        write_run(tmp_path / method, lambda *_: 0.5, method=method, ledger=ledger)
    (only,) = group(find_runs(tmp_path)[0])
    found = compute(only)
    assert "no row carries a privacy claim" in sentences(found)[1]
    assert isinstance(equal_epsilon(found), Missing)
    assert {line.cells[0].text for line in overview([found]).lines} == {"private, ε = ∞", "raw, ε = ∞"}


def test_a_private_row_without_a_rival_is_said_to_be_the_only_one(tmp_path: Path) -> None:
    ledger = [{"noise_multiplier": 1.0, "sampling_rate": 0.5, "count": 4}]
    write_run(tmp_path / "ours", lambda *_: 0.5, method="protofed-sp", ledger=ledger)
    write_run(tmp_path / "ewc", lambda *_: 0.5, method="ewc")
    (only,) = group(find_runs(tmp_path)[0])
    assert sentences(compute(only))[1].endswith("), the only one.")


def test_rows_within_their_intervals_are_not_said_to_be_behind(tmp_path: Path) -> None:
    users = {f"u{n}": (1, 1, 1) for n in range(9)}
    for name, high in (("ewc", 0), ("si", 1)):  # each better for half of the users
        skill = {f"u{n}": 1.2 if n % 2 == high else 0.8 for n in range(8)} | {"u8": 1.1 - 0.2 * high}
        write_run(tmp_path / name, lambda *_: 0.5, method=name, users=users, skill=skill)
    (only,) = group(find_runs(tmp_path)[0])
    found = compute(only)
    gap = found.intervals["sampled", "all"].behind["si"]
    assert gap.low < gap.mean < 0 < gap.high
    wins, private, loses = sentences(found)
    assert wins.endswith("; ahead of 0 of 1 other rows beyond chance, not distinguishable from si.")
    assert loses == "There is no ProtoFed-SP row."
    assert "no row carries a privacy claim" in private


def test_the_first_table_and_figure_hold_the_overall_rows(results: Results) -> None:
    shown, drawn = overview([results]), forest(results)
    labels = {row.label for row in compared(results.section)}
    assert {line.label for line in shown.lines} == labels == {row["method"] for row in table(csv_of(drawn))}
    assert ABLATED not in labels
    (row,) = [row for row in table(csv_of(drawn)) if row["method"] == FULL]
    e = results.estimates[FULL]["ndcg@10/sampled/all"]
    read = [float(row[name]) for name in ("mean", "low95", "high95")]
    assert read == pytest.approx([e.mean, e.low, e.high], rel=1e-5)
    shares = {line.label: line.cells[0].text for line in shown.lines}
    assert shares[FULL] == f"private, ε = {results.prices[FULL].released:.2f}"
    assert shares["frozen"] == "raw"
