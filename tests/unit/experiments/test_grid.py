"""Grids: every cell once, each in a folder of its own; shards; one line for every mistake in the file."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protofed.cli.run import settle
from protofed.config import override, parse_override, to_toml
from protofed.errors import ConfigError
from protofed.experiments.grid import (
    Grid,
    Variant,
    cells,
    grid_of,
    parse_shard,
    read_grid,
    setting,
    shard,
    tuned_in,
)

ROOT = Path(__file__).parents[3]
METHODS = ("popularity", "frozen", "ewc", "protofed-sp")


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(text, encoding="utf-8")
    return path


def folders(grid: Grid) -> list[str]:
    return [cell.folder for cell in cells(grid, settle)]


def some(*names: str) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(names), min_size=1, unique=True).map(tuple)


@st.composite
def drawn(draw: st.DrawFn) -> dict[str, Any]:
    """What `made` makes a grid of; run-time type checks draw at random, which a strategy must not."""
    strange = st.text(min_size=1, max_size=200).filter(lambda text: not text.startswith("."))
    name = st.text("abz019._-", min_size=1, max_size=8).filter(lambda text: text[0] not in "._-")
    values = st.lists(st.floats(0.1, 9.0), min_size=1, max_size=2, unique=True).map(tuple)
    return {
        "datasets": draw(st.lists(strange, min_size=1, max_size=2, unique_by=str.casefold).map(tuple)),
        "methods": draw(some(*METHODS)),
        "seeds": draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=2, unique=True).map(tuple)),
        "variants": [(text, draw(some(*METHODS))) for text in draw(st.lists(name, max_size=2, unique=True))],
        "sweep": (("privacy.noise_multiplier", draw(values)),) if draw(st.booleans()) else (),
    }


def made(parts: dict[str, Any]) -> Grid:
    variants = [
        Variant(name, methods, (("training.negatives", 7 + place),))
        for place, (name, methods) in enumerate(parts["variants"])
    ]
    return Grid(**parts | {"variants": tuple(variants)})


def expected_size(grid: Grid) -> int:
    rows = sum(1 + sum(method in v.methods for v in grid.variants) for method in grid.methods)
    swept = len(grid.sweep[0][1]) if grid.sweep else 1
    return len(grid.datasets) * rows * swept * len(grid.seeds)


@settings(max_examples=30)
@given(drawn())
def test_every_combination_is_one_cell_and_no_two_share_a_folder(parts):
    grid = made(parts)
    found = folders(grid)
    assert len(found) == expected_size(grid)
    assert len({name.casefold() for name in found}) == len(found)
    assert found == folders(grid)
    for name in found:
        parts = name.split("/")
        assert len(parts) == 4
        assert not {".", "..", ""} & set(parts)
        assert max(map(len, parts)) < 200


@settings(max_examples=30)
@given(drawn(), st.integers(1, 7))
def test_shards_are_disjoint_cover_the_grid_and_spread_every_method_evenly(drawn_parts, count):
    grid = made(drawn_parts)
    whole = cells(grid, settle)
    parts = [shard(whole, index, count) for index in range(1, count + 1)]
    together = [cell.folder for part in parts for cell in part]
    assert sorted(together) == sorted(cell.folder for cell in whole)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    for method in grid.methods:
        share = [Counter(cell.config.method for cell in part)[method] for part in parts]
        assert max(share) - min(share) <= 1
    order = {cell.folder: place for place, cell in enumerate(whole)}
    assert all([order[cell.folder] for cell in part] == sorted(order[cell.folder] for cell in part) for part in parts)


def test_the_folder_names_of_a_small_grid():
    sweep = (("privacy.noise_multiplier", (1, 0.4)),)
    variants = (Variant("nodp", ("protofed-sp",), (("protofed.mode", "nodp"),)),)
    grid = Grid(("synthetic",), ("popularity", "protofed-sp"), (3,), variants=variants, sweep=sweep)
    assert folders(grid) == [
        "synthetic/popularity/default,privacy.noise_multiplier=1.0/seed-3",
        "synthetic/popularity/default,privacy.noise_multiplier=0.4/seed-3",
        "synthetic/protofed-sp/default,privacy.noise_multiplier=1.0/seed-3",
        "synthetic/protofed-sp/default,privacy.noise_multiplier=0.4/seed-3",
        "synthetic/protofed-sp/nodp,privacy.noise_multiplier=1.0/seed-3",
        "synthetic/protofed-sp/nodp,privacy.noise_multiplier=0.4/seed-3",
    ]


def test_a_variants_own_sweep_touches_that_variant_alone():
    variant = Variant("noise", ("protofed-sp",), (), (("privacy.noise_multiplier", (0.4, 0.8)),))
    assert folders(Grid(("synthetic",), ("frozen", "protofed-sp"), variants=(variant,))) == [
        "synthetic/frozen/default/seed-0",
        "synthetic/protofed-sp/default/seed-0",
        "synthetic/protofed-sp/noise,privacy.noise_multiplier=0.4/seed-0",
        "synthetic/protofed-sp/noise,privacy.noise_multiplier=0.8/seed-0",
    ]


def test_a_hyper_parameter_can_be_swept():
    grid = Grid(("synthetic",), ("ewc",), sweep=(("hyper.strength", (0.5, 2.0)),))
    assert folders(grid) == [f"synthetic/ewc/default,hyper.strength={value}/seed-0" for value in ("0.5", "2.0")]


def test_settings_reach_the_config_and_the_sweep_goes_before_the_variant_before_the_common_ones():
    common = (("training.negatives", 5), ("training.stride", 5), ("training.patience", 5))
    variants = (Variant("other", (), (("training.stride", 6), ("training.patience", 6))),)
    grid = Grid(("synthetic",), ("frozen",), settings=common, variants=variants, sweep=(("training.patience", (7,)),))
    plain, other = (cell.config.training for cell in cells(grid, settle))
    assert (plain.negatives, plain.stride, plain.patience) == (5, 5, 7)
    assert (other.negatives, other.stride, other.patience) == (5, 6, 7)


def test_a_preset_among_the_settings_brings_its_width():
    grid = Grid(("synthetic",), ("frozen",), settings=(("preset", "paper"),), sweep=(("training.patience", (3,)),))
    (cell,) = cells(grid, settle)
    assert (cell.config.preset, cell.config.backbone.width) == ("paper", 256)
    assert "--set preset=paper" in cell.command()


def test_what_a_method_brings_along_is_kept():
    (cell,) = cells(Grid(("synthetic",), ("personal-memory",)), settle)
    assert cell.config.scoring.personal_memory == 2.0


def test_cells_share_a_warm_up_when_they_differ_only_in_what_comes_after_it():
    after = Variant("after", (), (("training.slice_epochs", 2), ("protofed.mode", "nodp")))
    before = Variant("before", (), (("training.base_epochs", 2),))
    grid = Grid(("synthetic",), ("frozen", "ewc"), (0, 1), variants=(after, before))
    keys = {cell.folder: cell.warm_up for cell in cells(grid, settle)}
    assert len(set(keys.values())) == 4  # two seeds × (default and after, before)
    assert keys["synthetic/frozen/default/seed-0"] == keys["synthetic/ewc/after/seed-0"]
    assert keys["synthetic/frozen/default/seed-0"] != keys["synthetic/frozen/default/seed-1"]
    assert keys["synthetic/frozen/default/seed-0"] != keys["synthetic/frozen/before/seed-0"]


def test_a_head_and_what_a_tower_reads_ask_for_warm_ups_of_their_own():
    towers = (("content.features", "category"), ("content.kind", "tower"))
    variants = [
        Variant("head", (), (("scoring.head", True),)),
        Variant("nearest", (), (("content.features", "category"),)),
        Variant("tower", (), towers),
        Variant("tower-with-gaps", (), (*towers, ("content.missing", 0.5))),
    ]
    keys = [cell.warm_up for cell in cells(Grid(("synthetic",), ("frozen",), variants=tuple(variants)), settle)]
    assert keys[0] == keys[2]  # nearest rows are put in afterwards
    assert len(set(keys)) == 4


def test_the_command_of_a_cell_makes_the_same_config():
    variants = (Variant("cut", (), (("protofed.ablate", "own-rows,short"), ("protofed.group_sparsity", True))),)
    grid = Grid(("synthetic",), ("protofed-sp",), settings=(("training.learning_rate", 1e-4),), variants=variants)
    cell = cells(grid, settle)[1]
    words = cell.command("--out", "x").split()
    plain = "protofed run --dataset synthetic --method protofed-sp --seed 0 --set"
    assert " ".join(words).startswith(plain)
    sets = [word for flag, word in itertools.pairwise(words) if flag == "--set"]
    assert settle({"dataset": "synthetic", "method": "protofed-sp", "seed": 0}, None, sets) == cell.config


def test_a_noise_for_all_cells_leaves_methods_without_a_mechanism_as_they_are():
    grid = Grid(("synthetic",), ("popularity", "protofed-sp"), settings=(("privacy.noise_multiplier", 1.0),))
    assert [(c.config.privacy.noise_multiplier, c.config.privacy.wrap) for c in cells(grid, settle)] == [
        (1.0, False)
    ] * 2


@example('"a"')
@example("1")
@example("true")
@example("1\nb = 2")
@example("\x7f'")
@given(st.one_of(st.text(), st.integers(), st.booleans(), st.floats(allow_nan=False)))
def test_a_written_setting_is_read_back_as_it_was(value):
    assert parse_override(setting("a.b", value)) == ("a.b", value)


def test_a_file_gives_the_grid_however_its_tables_are_written(tmp_path):
    path = write(
        tmp_path,
        """
        [grid]
        datasets = ["synthetic"]
        methods = ["frozen", "protofed-sp"]
        seeds = [0, 1]
        [settings]
        "training.negatives" = 32
        stream.n_slices = 2
        [settings.backbone]
        width = 16
        [[variant]]
        name = "nodp"
        methods = ["protofed-sp"]
        settings = { protofed.mode = "nodp", "training.stride" = 5 }
        [sweep]
        "privacy.noise_multiplier" = [0.4, 0.8]
        """,
    )
    assert read_grid(path) == Grid(
        ("synthetic",),
        ("frozen", "protofed-sp"),
        (0, 1),
        (("training.negatives", 32), ("stream.n_slices", 2), ("backbone.width", 16)),
        (Variant("nodp", ("protofed-sp",), (("protofed.mode", "nodp"), ("training.stride", 5))),),
        (("privacy.noise_multiplier", (0.4, 0.8)),),
    )


def test_an_empty_table_changes_nothing(tmp_path):
    path = write(tmp_path, '[grid]\ndatasets = ["synthetic"]\nmethods = ["frozen"]\n[settings]\n[sweep]\n')
    assert read_grid(path) == Grid(("synthetic",), ("frozen",))


GRID = '[grid]\ndatasets = ["synthetic"]\nmethods = ["frozen"]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[grid]\ndataset = ["a"]\n', "unknown config key 'grid.dataset'; did you mean 'grid.datasets'?"),
        ("[grids]\nseeds = [0]\n", "unknown config key 'grids.seeds'; did you mean 'grid'?"),
        ('[grid]\ndatasets = "a"\n', "grid.datasets must be a list, got 'a'"),
        ("[grid]\ndatasets = [1]\n", "grid.datasets must hold names, got 1"),
        ('[grid]\ndatasets = ["../x"]\n', "grid.datasets must hold names, got '../x'"),
        ('[grid]\nmethods = ["frosen"]\n', "unknown method 'frosen'; did you mean 'frozen'?"),
        ("[grid]\nseeds = [0, 0]\n", "grid.seeds names 0 twice"),
        ("[grid]\nseeds = [true]\n", "grid.seeds must hold whole numbers >= 0, got True"),
        ("[grid]\nseeds = []\n", "grid.seeds must name at least one seed"),
        (GRID + "[settings]\nseed = 3\n", "settings must not set 'seed'; list it in grid.seeds"),
        (GRID + "[settings]\ntraining.negative = 3\n", "did you mean 'training.negatives'?"),
        (GRID + "[settings]\ntraining.negatives = [3]\n", "lists belong in \\[sweep\\]"),
        (GRID + "[settings]\ntraining.negatives = 0\n", "training.negatives must lie between 1 and"),
        (GRID + "[sweep]\ntraining.negatives = 3\n", "training.negatives must be a list of values, got 3"),
        (GRID + "[sweep]\nseed = [3]\n", "sweep must not set 'seed'"),
        (GRID + "[sweep]\nprivacy.noise_multiplier = [1, 1.0]\n", "two cells would share the folder"),
        (GRID + '[[variant]]\nnames = "x"\n', "unknown config key 'names'; did you mean 'name'?"),
        (GRID + '[[variant]]\nname = "No DP"\n', "variant.name must consist of small letters"),
        (GRID + '[[variant]]\nname = "default"\n', "and not 'default'"),
        (GRID + '[[variant]]\nname = "x"\nsettings = 3\n', "variant 'x': settings must be a table, got 3"),
        (GRID + '[[variant]]\nname = "x"\nmethods = ["frosen"]\n', "did you mean 'frozen'?"),
        (GRID + '[[variant]]\nname = "x"\n', "default/seed-0 and synthetic/frozen/x/seed-0 would be the same run"),
        (GRID + "variant = 3\n", "unknown config key 'grid.variant'"),
        ('[grid]\ndatasets = ["failed"]\nmethods = ["frozen"]\n', "must not be named 'failed'"),
        ("[grid]\nmethods = []\n", "the grid has no datasets; give --datasets"),
        ('[grid]\ndatasets = ["a"]\n', "the grid has no methods; give --methods"),
        ("[grid\n", "is not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_is_one_clear_line(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message.replace("?", "\\?")) as raised:
        cells(read_grid(write(tmp_path, text)), settle)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no experiment file at .*absent\.toml"):
        read_grid(tmp_path / "absent.toml")


def test_a_shard_counts_from_one():
    assert parse_shard("2/5") == (2, 5)
    for text in ("0/2", "3/2", "1", "1/0", "a/b", "-1/2"):
        with pytest.raises(ConfigError, match="--shard takes i/n"):
            parse_shard(text)


def test_the_smoke_grid_has_a_reference_and_a_noise_free_row():
    found = cells(read_grid(ROOT / "experiments" / "smoke.toml"), settle)
    modes = {cell.config.protofed.mode for cell in found if cell.config.method == "protofed-sp"}
    assert modes == {"reference", "nodp"}
    assert {cell.config.seed for cell in found} == {0, 1}


def test_a_grid_of_dotted_keys_needs_nothing_else():
    assert grid_of({}) == Grid((), (), (0,))


def test_only_methods_named_in_plain_have_a_plain_cell():
    variant = Variant("private", ("frozen", "ewc"), (("privacy.wrap", True),))
    grid = Grid(("synthetic",), ("frozen", "ewc", "protofed-sp"), variants=(variant,), plain=("protofed-sp",))
    assert folders(grid) == [
        "synthetic/frozen/private/seed-0",
        "synthetic/ewc/private/seed-0",
        "synthetic/protofed-sp/default/seed-0",
    ]
    assert grid_of({"grid.plain": ["ewc"]}).plain == ("ewc",)


def test_a_grid_whose_plain_cells_are_all_left_out_and_has_no_others_is_refused():
    with pytest.raises(ConfigError, match="the grid has no cell"):
        cells(Grid(("synthetic",), ("frozen",), plain=()), settle)
    with pytest.raises(ConfigError, match="unknown method 'frosen'"):
        grid_of({"grid.plain": ["frosen"]})


def write_best(folder: Path, method: str, settings: dict[str, object], **flags: object) -> None:
    """METHOD/best.toml as `protofed tune` writes it: the whole config."""
    config = override(settle({"dataset": "elsewhere", "method": method, "seed": 5, **flags}), settings)
    (folder / method).mkdir(parents=True)
    (folder / method / "best.toml").write_text(to_toml(config), encoding="utf-8")


def test_what_the_search_was_over_is_taken_from_best_toml_and_nothing_else(tmp_path):
    found = {"hyper.strength": 0.3, "hyper.decay": 0.9, "training.slice_learning_rate": 3e-4}
    write_best(tmp_path, "ewc", {**found, "training.negatives": 7, "stream.n_slices": 3})
    (cell,) = cells(Grid(("synthetic",), ("ewc",), (2,)), settle, tuned_in(tmp_path))
    assert dict(cell.settings) == found
    assert cell.config == override(settle({"dataset": "synthetic", "method": "ewc", "seed": 2}), found)
    sets = [word for flag, word in itertools.pairwise(cell.command().split()) if flag == "--set"]
    assert settle({"dataset": "synthetic", "method": "ewc", "seed": 2}, None, sets) == cell.config


def test_hyper_parameters_spelled_as_a_text_are_found_too(tmp_path):
    (tmp_path / "er-random").mkdir()
    text = 'method = "er-random"\nhyper = "capacity.share=0.1,beta=3.0"\n'
    (tmp_path / "er-random" / "best.toml").write_text(text, encoding="utf-8")
    (cell,) = cells(Grid(("synthetic",), ("er-random",)), settle, tuned_in(tmp_path))
    assert dict(cell.settings) == {"hyper.capacity.share": 0.1, "hyper.beta": 3.0}


def test_what_the_file_sets_goes_before_what_was_tuned(tmp_path):
    write_best(tmp_path, "ewc", {"hyper.strength": 0.3, "hyper.decay": 0.9, "training.slice_learning_rate": 3e-4})
    swept = Variant("swept", (), (("hyper.decay", 0.5),), (("hyper.strength", (7.0,)),))
    grid = Grid(("synthetic",), ("ewc",), settings=(("training.slice_learning_rate", 1e-4),), variants=(swept,))
    plain, other = cells(grid, settle, tuned_in(tmp_path))
    assert (plain.config.hyper, plain.config.training.slice_learning_rate) == ("decay = 0.9, strength = 0.3", 1e-4)
    assert (other.config.hyper, other.config.training.slice_learning_rate) == ("decay = 0.5, strength = 7.0", 1e-4)


def test_a_swept_value_that_the_plain_cell_has_is_that_cell(tmp_path):
    write_best(tmp_path, "ewc", {"hyper.strength": 0.3})
    swept = Variant("swept", (), (), (("hyper.strength", (0.1, 0.3, 1.0)),))
    found = cells(Grid(("synthetic",), ("ewc",), (0, 1), variants=(swept,)), settle, tuned_in(tmp_path))
    assert [(cell.variant, cell.config.seed) for cell in found] == [
        *(("default", seed) for seed in (0, 1)),
        *((f"swept,hyper.strength={value}", seed) for value in (0.1, 1.0) for seed in (0, 1)),
    ]
    alone = cells(Grid(("synthetic",), ("ewc",), (0,), variants=(swept,), plain=()), settle, tuned_in(tmp_path))
    assert [cell.variant for cell in alone] == [f"swept,hyper.strength={value}" for value in (0.1, 0.3, 1.0)]


def test_a_data_set_that_was_tuned_by_itself_has_its_own_settings(tmp_path):
    write_best(tmp_path, "ewc", {"hyper.strength": 0.3})
    write_best(tmp_path / "other", "ewc", {"hyper.strength": 0.7})
    found = cells(Grid(("synthetic", "other"), ("ewc",)), settle, tuned_in(tmp_path))
    assert [cell.config.hyper for cell in found] == ["strength = 0.3", "strength = 0.7"]


def test_of_several_folders_the_first_that_knows_the_method_is_asked(tmp_path):
    write_best(tmp_path / "own", "ewc", {"hyper.strength": 0.3})
    write_best(tmp_path / "lent", "ewc", {"hyper.strength": 0.7})
    write_best(tmp_path / "lent" / "own", "ewc", {"hyper.strength": 0.9})  # one folder goes before the next, whole
    write_best(tmp_path / "lent", "mas", {"hyper.strength": 0.5})
    both = tuned_in(tmp_path, tmp_path / "lent")
    found = cells(Grid(("own", "other"), ("ewc", "mas")), settle, both)
    asked = {(cell.config.dataset, cell.config.method): cell.config.hyper for cell in found}
    assert asked["own", "ewc"] == "strength = 0.3"
    assert asked["other", "ewc"] == "strength = 0.7"
    assert asked["own", "mas"] == asked["other", "mas"] == "strength = 0.5"
    with pytest.raises(ConfigError, match=r"--tuned .*, .*lent has no si/best\.toml"):
        cells(Grid(("own",), ("si",)), settle, both)
    with pytest.raises(ConfigError, match=r"no folder at --tuned .*absent"):
        tuned_in(tmp_path, tmp_path / "absent")


def test_what_has_nothing_to_tune_needs_no_file_and_what_has_needs_one(tmp_path):
    (cell,) = cells(Grid(("synthetic",), ("popularity",)), settle, tuned_in(tmp_path))
    assert cell.settings == ()
    with pytest.raises(ConfigError, match=r"has no ewc/best\.toml; tune ewc too"):
        cells(Grid(("synthetic",), ("ewc",)), settle, tuned_in(tmp_path))
    with pytest.raises(ConfigError, match="no folder at --tuned"):
        tuned_in(tmp_path / "absent")


def test_the_peft_variant_takes_only_what_was_tuned_as_peft(tmp_path):
    write_best(tmp_path / "peft", "ewc", {"peft.learning_rate": 0.01, "hyper.strength": 0.3}, variant="peft")
    write_best(tmp_path / "standard", "ewc", {"hyper.strength": 0.3})
    grid = Grid(("synthetic",), ("ewc",), settings=(("variant", "peft"),))
    (cell,) = cells(grid, settle, tuned_in(tmp_path / "peft"))
    assert (cell.config.peft.learning_rate, cell.config.hyper) == (0.01, "strength = 0.3")
    with pytest.raises(ConfigError, match=r"was tuned for ewc \(standard\), a cell is ewc \(peft\)"):
        cells(grid, settle, tuned_in(tmp_path / "standard"))


def test_of_several_folders_the_first_that_was_tuned_as_the_cell_is_is_taken(tmp_path):
    write_best(tmp_path / "standard", "ewc", {"hyper.strength": 0.3})
    write_best(tmp_path / "peft", "ewc", {"hyper.strength": 0.7}, variant="peft")
    as_peft = Variant("peft", (), (("variant", "peft"),))
    folders = (tmp_path / "standard", tmp_path / "peft")
    for order in (folders, folders[::-1]):
        found = cells(Grid(("synthetic",), ("ewc",), variants=(as_peft,)), settle, tuned_in(*order))
        assert [cell.config.hyper for cell in found] == ["strength = 0.3", "strength = 0.7"]
    (tmp_path / "later" / "ewc").mkdir(parents=True)
    (tmp_path / "later" / "ewc" / "best.toml").write_text("not = = toml", encoding="utf-8")
    cells(Grid(("synthetic",), ("ewc",)), settle, tuned_in(folders[0], tmp_path / "later"))  # it is never asked
    (plain, other) = cells(
        Grid(("synthetic",), ("ewc",), variants=(as_peft,)), settle, tuned_in(folders[0], required=False)
    )
    assert (plain.tuned, other.tuned) == (True, False)


def test_a_private_cell_takes_only_what_was_tuned_under_noise_the_radius_included(tmp_path):
    wrapped = {"privacy.wrap": True}
    write_best(tmp_path / "noised", "fedavg", {"privacy.clip_radius": 0.03, "hyper.rate": 3e-4, **wrapped})
    write_best(tmp_path / "plain", "fedavg", {"hyper.rate": 3e-4, "privacy.clip_radius": 0.03})
    private = Grid(("synthetic",), ("fedavg",), settings=tuple(wrapped.items()))
    (cell,) = cells(private, settle, tuned_in(tmp_path / "noised"))
    assert (cell.config.privacy.clip_radius, cell.config.hyper) == (0.03, "rate = 0.0003")
    with pytest.raises(ConfigError, match=r"was tuned for fedavg \(standard\), a cell is fedavg \(standard, private\)"):
        cells(private, settle, tuned_in(tmp_path / "plain"))
    (cell,) = cells(Grid(("synthetic",), ("fedavg",)), settle, tuned_in(tmp_path / "plain"))
    assert cell.config.privacy.clip_radius == 1.0  # not searched without noise


def test_a_method_that_is_peft_by_itself_needs_no_word_about_it(tmp_path):
    write_best(tmp_path, "adapters", {"hyper.learning_rate": 0.03})
    (cell,) = cells(Grid(("synthetic",), ("adapters",)), settle, tuned_in(tmp_path))
    assert (cell.config.variant, cell.config.hyper) == ("peft", "learning_rate = 0.03")


def test_a_damaged_best_toml_is_named(tmp_path):
    (tmp_path / "ewc").mkdir()
    (tmp_path / "ewc" / "best.toml").write_text("methd = 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"ewc/best\.toml: unknown config key 'methd'"):
        cells(Grid(("synthetic",), ("ewc",)), settle, tuned_in(tmp_path))
