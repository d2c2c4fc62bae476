"""Runs are compared only where they answered the same queries, and named by what tells them apart."""

from pathlib import Path

from run_folders import write_run

from protofed.report.runs import find_runs
from protofed.report.sections import Section, distinct_labels, group, slug


def flat(*_: object) -> float:
    return 0.5


def sections(root: Path) -> tuple[Section, ...]:
    return group(find_runs(root)[0])


def test_seeds_of_the_same_settings_share_a_row(tmp_path: Path) -> None:
    for seed in (2, 0, 1):
        write_run(tmp_path / f"s{seed}", flat, seed=seed)
    ((row,),) = [section.rows for section in sections(tmp_path)]
    assert row.seeds == (0, 1, 2)


def test_rows_of_one_method_are_told_apart_by_the_settings_that_differ(tmp_path: Path) -> None:
    write_run(tmp_path / "a", flat, method="ewc", settings="[hyper]\nstrength = 1.0")
    write_run(tmp_path / "b", flat, method="ewc", settings="[hyper]\nstrength = 2.0")
    write_run(tmp_path / "c", flat, method="ewc", settings='variant = "peft"\n[hyper]\nstrength = 1.0')
    write_run(tmp_path / "d", flat, method="frozen")
    (section,) = sections(tmp_path)
    assert [row.label for row in section.rows] == [
        "ewc (peft)",
        "ewc, hyper.strength=1.0",
        "ewc, hyper.strength=2.0",
        "frozen",
    ]


def test_a_setting_that_a_run_is_too_old_to_know_counts_as_its_default(tmp_path: Path) -> None:
    write_run(tmp_path / "old", flat, seed=0)
    write_run(tmp_path / "new", flat, seed=1, settings="[protofed]\nseedings = 1")
    write_run(tmp_path / "other", flat, seed=1, settings="[protofed]\nseedings = 2")
    (section,) = sections(tmp_path)
    assert [(row.label, row.seeds) for row in section.rows] == [
        ("frozen", (0, 1)),
        ("frozen, protofed.seedings=2", (1,)),
    ]


def test_protofed_sp_is_named_by_its_mode_and_by_what_was_left_out(tmp_path: Path) -> None:
    for name, table in (
        ("a", 'mode = "reference"\nablate = ""'),
        ("b", 'mode = "reference"\nablate = "long,short"'),
        ("c", 'mode = "nodp"\nablate = ""'),
    ):
        write_run(tmp_path / name, flat, method="protofed-sp", settings=f"[protofed]\n{table}")
    (section,) = sections(tmp_path)
    assert [row.label for row in section.rows] == [
        "protofed-sp (nodp)",
        "protofed-sp (reference)",
        "protofed-sp (reference, without long, short)",
    ]


def test_another_stream_or_another_cohort_is_another_section(tmp_path: Path) -> None:
    write_run(tmp_path / "all", flat)
    write_run(tmp_path / "few", flat, settings="clients = 100")
    write_run(tmp_path / "elsewhere", flat, dataset="other")
    titles = [section.title for section in sections(tmp_path)]
    assert titles == ["other", "toy", "toy, clients=100"]


def test_the_fullest_section_comes_first(tmp_path: Path) -> None:
    for name, dataset, method in (("a", "alpha", "frozen"), ("b", "zeta", "frozen"), ("c", "zeta", "ewc")):
        write_run(tmp_path / name, flat, dataset=dataset, method=method)
    assert [section.title for section in sections(tmp_path)] == ["zeta", "alpha"]


def test_a_copy_of_a_run_is_left_out_and_named(tmp_path: Path) -> None:
    write_run(tmp_path / "a", flat)
    write_run(tmp_path / "b", flat)
    (section,) = sections(tmp_path)
    assert [run.folder for run in section.rows[0].runs] == ["a"]
    assert section.duplicates == ("b",)


def test_a_run_that_ends_before_the_others_of_its_stream_is_left_out_and_named(tmp_path: Path) -> None:
    write_run(tmp_path / "a", flat, users={"ann": (1, 1, 1)})
    write_run(tmp_path / "b", flat, method="ewc", users={"ann": (1, 1)})
    (section,) = sections(tmp_path)
    assert [row.label for row in section.rows] == ["frozen"]
    assert section.cut_short == ("b",)


def test_settings_that_all_rivals_share_are_not_in_a_label() -> None:
    settings = [{"x": 1, "y": 1}, {"x": 1, "y": 2}, {"x": 9, "y": 9}]
    assert distinct_labels(["m", "m", "n"], settings) == ["m, y=1", "m, y=2", "n"]


def test_what_most_rivals_have_goes_unsaid_and_labels_stay_distinct() -> None:
    settings = [{"x": 1, "y": 1}, {"x": 2, "y": 1}, {"x": 1, "y": 5}, {"x": 4, "y": 5}]
    labels = distinct_labels(["m"] * 4, settings)
    assert labels == ["m, y=1", "m, x=2, y=1", "m, y=5", "m, x=4, y=5"]
    assert distinct_labels(["m"] * 3, settings[:3]) == ["m", "m, x=2", "m, y=5"]


def test_without_a_majority_the_default_goes_unsaid():
    key = "protofed.aggregator"
    settings = [{key: value} for value in ("fedkmeans", "barycenter", "geometric-median")]
    assert distinct_labels(["m"] * 3, settings) == ["m", f"m, {key}=barycenter", f"m, {key}=geometric-median"]
    assert distinct_labels(["m"] * 2, settings[1:]) == [f"m, {key}=barycenter", f"m, {key}=geometric-median"]


def test_noise_is_asked_for_by_our_private_mode_and_by_what_is_wrapped(tmp_path: Path) -> None:
    write_run(tmp_path / "plain", flat, method="ewc")
    write_run(tmp_path / "wrapped", flat, method="ewc", settings="[privacy]\nwrap = true\n")
    for mode in ("reference", "nodp"):
        write_run(tmp_path / mode, flat, method="protofed-sp", settings=f'[protofed]\nmode = "{mode}"\n')
    (section,) = sections(tmp_path)
    assert [row.label for row in section.rows if row.is_noised] == [
        "ewc (private)",
        "protofed-sp (reference)",
    ]


def test_a_slug_is_safe_in_ids_and_file_names() -> None:
    assert slug('Toy "data" / 1<k>') == "toy-data-1-k"
    assert slug("…") == "unnamed"


def test_a_sweep_of_noise_leaves_the_row_at_a_target_its_plain_name(tmp_path: Path) -> None:
    write_run(tmp_path / "plain", flat, method="protofed-sp", settings='[protofed]\nmode = "reference"')
    for noise in (0.2, 0.8, 3.2):
        own = f"[privacy]\ntarget_epsilon = 0.0\nnoise_multiplier = {noise}"
        write_run(tmp_path / str(noise), flat, method="protofed-sp", settings=f'[protofed]\nmode = "reference"\n{own}')
    (section,) = sections(tmp_path)
    name = "protofed-sp (reference)"
    told = [f"{name}, privacy.noise_multiplier={noise}" for noise in (0.2, 0.8, 3.2)]
    assert [row.label for row in section.rows] == [name, *told]


def test_rows_that_only_the_target_tells_apart_still_say_it(tmp_path: Path) -> None:
    for target in (0.0, 3.4):
        own = f"[privacy]\ntarget_epsilon = {target}\nnoise_multiplier = 0.2"
        write_run(tmp_path / str(target), flat, method="protofed-sp", settings=f'[protofed]\nmode = "reference"\n{own}')
    (section,) = sections(tmp_path)
    assert len({row.label for row in section.rows}) == len(section.rows) == 2
