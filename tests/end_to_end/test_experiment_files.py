"""The files of experiments/: valid grids, one run for each cell, every method where a table needs it."""

import csv
import re
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from protofed.cli.run import settle
from protofed.config import PrivacyConfig, to_toml
from protofed.errors import ConfigError, DataError
from protofed.experiments.grid import Cell, cells, read_grid
from protofed.federation.plan import Plan, plan_releases
from protofed.methods.catalogue import METHODS, configured
from protofed.methods.private import as_asked
from protofed.methods.protofed_rules import as_run, check_claim, round_rule, streams_asked
from protofed.report.sections import TRIVIAL
from protofed.server.library import check_cohort
from protofed.slices.partition import partition

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "experiments").glob("*.toml"))
PAPER = [path for path in FILES if path.stem != "smoke"]
LOGS = ROOT.parent / "shared" / "data"
PAPERS_ABLATIONS = ("alignment", "short", "long", "static-prototypes")
SWEPT = ("protofed.lambda_max", "protofed.sparsity", "protofed.prototypes", "protofed.top_m", "backbone.prompt_length")


@cache
def cells_of(path: Path) -> tuple[Cell, ...]:
    return cells(read_grid(path), settle)


def named(name: str) -> tuple[Cell, ...]:
    return cells_of(ROOT / "experiments" / f"{name}.toml")


def can_be_private(name: str) -> bool:
    config = settle({"method": name}, None, ["privacy.wrap=true"])
    try:
        as_asked(configured(config), config)
    except ConfigError:
        return False
    return True


def test_there_is_a_file_for_everything_the_paper_shows():
    wanted = {"overall", "small-logs", "private", "paper-size", "warm-up", "peft", "module-size"}
    ours = {"flagship", "flagship-content", "growth", "content", "content-alone"}
    assert {path.stem for path in PAPER} == wanted | ours | {"ablations", "sensitivity", "privacy-utility"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_a_grid_of_distinct_cells_whose_methods_can_run_as_asked(path):
    found = cells_of(path)
    assert len({cell.folder for cell in found}) == len({to_toml(cell.config) for cell in found}) == len(found) > 0
    for cell in found:
        as_asked(configured(cell.config), cell.config)


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_two_lines_say_what_a_file_reproduces_and_how_many_runs_that_takes(path):
    first, second, third = path.read_text(encoding="utf-8").splitlines()[:3]
    assert first.startswith("# ")
    assert third == "[grid]"
    assert re.match(r"# ([\d,]+) runs; ", second)[1].replace(",", "") == str(len(cells_of(path)))
    assert {cell.config.seed for cell in cells_of(path)} == {0, 1, 2}


def test_all_files_but_contents_can_share_a_folder_and_mean_the_same_run_and_no_run_has_two_folders():
    configs, folders = {}, {}
    alike = [path for path in PAPER if not path.stem.startswith("content")]  # those name rows by their content
    for cell in (cell for path in alike for cell in cells_of(path)):
        text = to_toml(cell.config)
        assert configs.setdefault(cell.folder, text) == text, cell.folder
        assert folders.setdefault(text, cell.folder) == cell.folder


def test_the_overall_table_has_every_method_on_every_log_and_protofed_sp_without_noise():
    found = named("overall")
    logs = {cell.config.dataset for cell in found}
    assert {(c.config.dataset, c.config.method) for c in found} == set(product(logs, METHODS.keys() - {"protofed"}))
    assert {(c.config.dataset, c.config.stream.n_slices) for c in found} == {(x, 1 if x == "hm" else 8) for x in logs}
    assert {cell.config.protofed.mode for cell in found if cell.config.method == "protofed-sp"} == {"reference", "nodp"}
    assert {cell.config.preset for cell in found} == {"small"}


def test_small_logs_wait_for_steps_and_are_otherwise_those_of_the_overall_table():
    found = named("small-logs")
    logs = {cell.config.dataset for cell in found}
    assert logs == {"retailrocket", "movielens"}
    patient = {replace(c.config, training=replace(c.config.training, patience_steps=0)) for c in found}
    assert patient == {cell.config for cell in named("overall") if cell.config.dataset in logs}
    assert {cell.config.training.patience_steps for cell in found} == {300}


def places(dataset: str) -> dict[str, int]:
    """Where the sampled NDCG@10 of each method that is neither private, trivial nor ours puts it among them."""
    with (ROOT / "results" / "overall.csv").open(encoding="utf-8", newline="") as file:
        asked = [line for line in csv.DictReader(file) if line["table"] == "accuracy" and line["dataset"] == dataset]
    found = {
        line["method"]: float(line["mean"])
        for line in asked
        if (line["quantity"], line["candidates"], line["subset"]) == ("ndcg@10", "sampled", "all")
    }
    # a method's standard row where it has one
    rows = {name.removesuffix(" (peft)"): mean for name, mean in found.items()} | found
    rivals = [name for name in rows if name in METHODS and name not in TRIVIAL]
    return {name: place for place, name in enumerate(sorted(rivals, key=lambda name: -rows[name]))}


def test_the_papers_width_is_for_the_ten_best_of_the_searched_logs_the_trivial_rows_and_ours():
    found = named("paper-size")
    logs = {cell.config.dataset for cell in named("private")}
    by_log = [places(dataset) for dataset in logs]
    best = sorted(by_log[0], key=lambda name: sum(each[name] for each in by_log))[:10]
    assert {cell.config.method for cell in found} == {*best, *TRIVIAL, "protofed-sp"}
    assert {cell.config.dataset for cell in found} == logs
    assert {cell.config.preset for cell in found} == {"paper"}


def test_the_private_table_has_every_method_that_can_be_private_at_one_budget():
    found = named("private")
    wanted = {name for name in METHODS if name == "protofed-sp" or can_be_private(name)}
    assert {cell.config.method for cell in found} == wanted
    assert all(cell.config.privacy.wrap == (cell.config.method != "protofed-sp") for cell in found)
    assert {(cell.config.privacy.target_epsilon, cell.config.privacy.delta) for cell in found} == {(3.4, 1e-5)}


def test_the_flagship_stands_beside_rivals_under_its_own_head_with_content_and_without():
    for name, heads, content in (("flagship", "head", False), ("flagship-content", "head-content", True)):
        found = named(name)
        rivals = {cell.config.method for cell in found} - {"protofed", "popularity"}
        modes = {"nothing", "private"}
        for dataset in {cell.config.dataset for cell in found}:
            here = [cell for cell in found if cell.config.dataset == dataset]
            assert {c.config.protofed.mode for c in here if c.config.method == "protofed"} == modes
            assert {c.config.method for c in here if c.variant == heads} == rivals
            assert {bool(c.config.content.features) for c in here} == {content}
            assert all(c.config.scoring.head for c in here if c.config.method != "popularity")
    left_out = {c.config.protofed.ablate for c in named("flagship-content")} - {""}
    assert left_out == {"query-time", "own-past", "item-counts", "prompts", "prototypes", "own-rows"}


def test_the_peft_table_has_every_method_of_that_variant():
    found = named("peft")
    assert {cell.config.method for cell in found} == {name for name, e in METHODS.items() if "peft" in e.variants}
    assert {cell.config.variant for cell in found} == {"peft"}


def test_the_ablations_are_the_papers_six_and_each_changes_one_thing():
    found = {
        (c.config.protofed.mode, c.config.protofed.ablate, c.config.protofed.aggregator) for c in named("ablations")
    }
    assert found >= {("reference", name, "fedkmeans") for name in ("", *PAPERS_ABLATIONS)}
    assert found >= {("nodp", "", name) for name in ("fedkmeans", "geometric-median", "barycenter")}
    for mode, ablate, aggregator in found:
        assert (bool(ablate) + (aggregator != "fedkmeans")) <= 1
        assert "," not in ablate
        assert (mode, "", "fedkmeans") in found  # the full row it is compared with


def test_no_cell_of_protofed_sp_is_refused_when_it_starts():
    ours = [cell.config for path in FILES for cell in cells_of(path) if cell.config.method == "protofed-sp"]
    for config in {replace(config, seed=0, dataset="") for config in ours}:
        check_claim(as_run(config))
        private = config.protofed.mode == "reference"
        for newcomers in {False, private}:  # with and without the release of new items' rows
            streams = streams_asked(config)[: 1 + newcomers]
            round_rule(config, 1, solved(config.privacy, streams, private), 1)


@cache
def solved(privacy: PrivacyConfig, streams: Plan, private: bool) -> float:
    return plan_releases(privacy, streams, private=private)[0].noise_multiplier


def test_the_sensitivity_sweeps_five_settings_one_at_a_time():
    asked = [cell.settings for cell in named("sensitivity")]
    assert {len(settings) for settings in asked} == {0, 1}
    assert {settings[0][0] for settings in asked if settings} == set(SWEPT)


def test_the_noise_sweep_has_the_papers_three_values_a_budget_and_no_noise():
    found = {(c.config.protofed.mode, c.config.privacy.noise_multiplier) for c in named("privacy-utility")}
    assert found >= {("reference", noise) for noise in (0.0, 0.2, 0.4, 0.8)} | {("nodp", 0.0)}
    for cell in named("privacy-utility"):
        assert (cell.config.privacy.target_epsilon == 0) == (cell.config.privacy.noise_multiplier > 0)


@pytest.mark.shared
@pytest.mark.skipif(not LOGS.is_dir(), reason="the real logs are not at ../shared/data")
def test_every_named_log_exists_and_can_be_cut_and_can_feed_the_prototypes():
    from protofed.data.prepared import load_log

    asked = {(c.config.dataset, c.config.stream, c.config.protofed.prototypes) for p in PAPER for c in cells_of(p)}
    logs = {name: load_log(name, LOGS) for name in sorted({name for name, _, _ in asked})}
    for name, stream, prototypes in asked:
        log = logs[name]
        n_slices, fraction = stream.n_slices, stream.base_fraction
        base = partition(log, n_slices=n_slices, base_fraction=fraction, edges=stream.edges, base=stream.base)[0]
        if prototypes:
            check_cohort(prototypes, 0.05, len(log.users[: base.train_end].unique()))
    with pytest.raises(DataError, match="7 distinct timestamps"):
        partition(logs["hm"], n_slices=8, base_fraction=0.5)
