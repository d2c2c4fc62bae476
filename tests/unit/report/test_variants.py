"""Rows are an ablation or a sweep exactly when one setting tells them apart."""

from itertools import combinations
from pathlib import Path

import pytest
from every_section import protofed, write_every_section
from run_folders import write_run

from protofed.methods.catalogue import METHODS
from protofed.report.runs import find_runs
from protofed.report.sections import Section, group
from protofed.report.variants import (
    ablations,
    common_runs,
    flagship,
    noise_sweeps,
    row_settings,
    side_rows,
    sweeps,
    without_sweeps,
)


def section_of(root: Path) -> Section:
    (section,) = group(find_runs(root)[0])
    return section


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> Section:
    return section_of(write_every_section(tmp_path_factory.mktemp("runs")))


def differing(section: Section) -> set[tuple[str, str, str]]:
    """Every pair of rows that one setting alone tells apart, the slow way."""
    found = set()
    for a, b in combinations(section.rows, 2):
        one, two = row_settings(a), row_settings(b)
        keys = [key for key in one.keys() | two.keys() if one.get(key) != two.get(key)]
        if len(keys) == 1:
            found.add((keys[0], *sorted((a.label, b.label))))
    return found


def test_sweeps_and_ablations_are_the_pairs_that_one_setting_tells_apart(section: Section) -> None:
    pairs = {(one.setting, *sorted((one.full.label, one.row.label))) for one in ablations(section)}
    pairs |= {
        (s.setting, *sorted((a.label, b.label)))
        for s in sweeps(section)
        for (_, a), (_, b) in combinations(s.points, 2)
    }
    noise = {tuple(sorted((a.label, b.label))) for rows in noise_sweeps(section) for a, b in combinations(rows, 2)}
    expected = {
        pair for pair in differing(section) if pair[0] not in ("protofed.mode", "privacy.noise_multiplier", "method")
    }
    assert pairs == expected
    assert len(pairs) == 2
    assert noise == {("protofed-sp (reference)", "protofed-sp (reference), privacy.noise_multiplier=4.0")}


def test_a_row_that_leaves_a_hyper_parameter_alone_is_the_point_of_its_methods_own_value(tmp_path: Path) -> None:
    write_run(tmp_path / "plain", lambda *_: 0.5, method="dual-lora")
    write_run(tmp_path / "wide", lambda *_: 0.5, method="dual-lora", settings="[hyper]\nrank = 64\n")
    write_run(tmp_path / "other", lambda *_: 0.5, method="not-of-this-version", settings="[hyper]\nrank = 64\n")
    (sweep,) = sweeps(section := section_of(tmp_path))
    assert sweep.setting == "hyper.rank"
    assert [(value, row.label) for value, row in sweep.points] == [
        (METHODS["dual-lora"].method.rank, "dual-lora"),
        (64, "dual-lora, hyper.rank=64"),
    ]
    assert side_rows(section) == {"dual-lora, hyper.rank=64"}


def test_the_points_of_a_sweep_go_by_their_number(section: Section) -> None:
    (sweep,) = sweeps(section)
    assert sweep.setting == "protofed.lambda_max"
    assert [value for value, _ in sweep.points] == [1.0, 4.0]


def test_the_overall_comparison_keeps_the_full_row_and_leaves_its_variants_aside(section: Section) -> None:
    ours = flagship(section)
    assert ours is not None
    assert ours.label == "protofed-sp (reference)"
    assert side_rows(section) == {
        "protofed-sp (reference), privacy.noise_multiplier=4.0",
        "protofed-sp (reference), protofed.lambda_max=4.0",
        "protofed-sp (reference, without long)",
    }
    assert "protofed-sp (reference), privacy.noise_multiplier=4.0" not in side_rows(section, noise=False)


def test_over_the_slices_all_rows_are_drawn_but_points_of_sweeps(section: Section) -> None:
    left_out = {row.label for row in section.rows} - {row.label for row in without_sweeps(section).rows}
    assert left_out == side_rows(section) - {"protofed-sp (reference, without long)"}


def test_an_ablation_is_compared_on_the_seeds_that_both_rows_have(section: Section) -> None:
    (one,) = ablations(section)
    runs, full = common_runs(one.row, one.full)
    assert (one.row.label, one.full.seeds) == ("protofed-sp (reference, without long)", (0, 1))
    assert [run.seed for run in runs] == [run.seed for run in full] == [0]


def test_zero_prototypes_let_the_program_choose_and_are_no_point_of_a_sweep(tmp_path: Path) -> None:
    for k in (0, 16, 64):
        settings = protofed().replace("[privacy]", f"prototypes = {k}\n[privacy]")
        write_run(tmp_path / str(k), lambda *_: 0.5, method="protofed-sp", settings=settings)
    found = section_of(tmp_path)
    (sweep,) = sweeps(found)
    assert [value for value, _ in sweep.points] == [16.0, 64.0]
    assert [row.label for row in without_sweeps(found).rows] == ["protofed-sp (reference)"]  # where they go out from


def test_two_differences_are_neither(tmp_path: Path) -> None:
    write_run(tmp_path / "a", lambda *_: 0.5, method="protofed-sp", settings=protofed())
    write_run(tmp_path / "b", lambda *_: 0.5, method="protofed-sp", settings=protofed(ablate="long", lambda_max=2.0))
    found = section_of(tmp_path)
    assert ablations(found) == ()
    assert sweeps(found) == ()
    assert side_rows(found) == frozenset()
