"""Settings are read strictly, written back exactly, and each of them is explained."""

import dataclasses
import inspect
import math
import re
import tomllib
import typing
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protofed import config as module
from protofed.config import (
    PRESETS,
    BackboneConfig,
    ContentConfig,
    PeftConfig,
    PrivacyConfig,
    ProtoFedConfig,
    RunConfig,
    ScoringConfig,
    StreamConfig,
    TrainingConfig,
    from_toml,
    in_range,
    override,
    parse_override,
    parsed,
    preset,
    ranges,
    read_toml,
    to_toml,
)
from protofed.errors import ConfigError

TABLES = [
    StreamConfig,
    BackboneConfig,
    TrainingConfig,
    ScoringConfig,
    ContentConfig,
    PrivacyConfig,
    PeftConfig,
    ProtoFedConfig,
]
SELF_EXPLANATORY = {
    *("width", "layers", "heads", "dropout", "negatives", "learning_rate", "weight_decay", "max_grad_norm"),
    *("dataset", "method", "preset", "seed", "stream", "backbone", "training", "scoring"),
    *("privacy", "peft", "protofed", "delta", "mode", "aggregator", "alignment", "clip_radius", "rounds_per_slice"),
}


def values_of(hint) -> st.SearchStrategy:
    if dataclasses.is_dataclass(hint):
        return configs(hint)
    if typing.get_origin(hint) is Literal:
        return st.sampled_from(typing.get_args(hint))
    return {int: st.integers(), float: st.floats(allow_nan=False), bool: st.booleans(), str: st.text()}[hint]


def configs(kind) -> st.SearchStrategy:
    return st.builds(kind, **{name: values_of(hint) for name, hint in typing.get_type_hints(kind).items()})


@settings(deadline=None, max_examples=40)
@given(configs(RunConfig))
@example(RunConfig(dataset='\x7f " \\ \n 😀 ε'))
def test_any_config_is_written_and_read_back_exactly(config):
    assert override(RunConfig(), parsed(to_toml(config))) == config


@pytest.mark.parametrize("key", ranges())
def test_a_number_outside_its_range_is_one_line_that_names_it(key):
    least, most = ranges()[key]
    for value in (least - 1, most * 2 + 1):
        with pytest.raises(ConfigError, match=f"^{key} must lie between .*, got {value}"):
            in_range(override(RunConfig(), {key: type(value)(value)}))


def test_every_number_has_a_range():
    numbers = {
        f"{table}.{name}" if table else name
        for table, kind in (("", RunConfig), *((t.__name__[:-6].lower(), t) for t in TABLES))
        for name, hint in typing.get_type_hints(kind).items()
        if hint in (int, float)
    }
    assert numbers - set(ranges()) == {"stream.base_fraction"}  # partition says what it may be


@pytest.mark.parametrize("kind", [RunConfig, *TABLES])
def test_a_default_is_of_its_type_and_in_its_range(kind):
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if hints[field.name] in (int, float):
            assert type(field.default) is hints[field.name]
            least, most = field.metadata.get("range", (-math.inf, math.inf))
            assert least <= field.default <= most


def test_a_width_that_the_heads_do_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"multiple of backbone\.heads, got 64 and 5"):
        in_range(override(RunConfig(), {"backbone.heads": 5}))


def test_a_preset_named_in_a_file_brings_its_settings_along():
    assert from_toml('preset = "paper"').backbone.width == 256
    assert from_toml('preset = "paper"\n[backbone]\nwidth = 32').backbone.width == 32


def test_small_numbers_keep_their_digits():
    config = override(RunConfig(), {"training.weight_decay": 1e-05, "training.learning_rate": 1 / 3})
    text = to_toml(config)
    assert "weight_decay = 1e-05" in text
    assert from_toml(text).training.weight_decay == 1e-05
    assert from_toml(text).training.learning_rate == 1 / 3


def test_every_field_is_written_out():
    document = tomllib.loads(to_toml(RunConfig()))
    for table in TABLES:
        name = table.__name__.removesuffix("Config").lower()
        assert list(document[name]) == [field.name for field in dataclasses.fields(table)]
    assert set(document) == {field.name for field in dataclasses.fields(RunConfig)}


def test_an_empty_config_is_the_defaults_and_a_partial_one_changes_only_what_it_names():
    assert from_toml("") == RunConfig()
    changed = from_toml('method = "popularity"\n[training]\nnegatives = 3\n[stream]\n')
    assert changed == override(RunConfig(method="popularity"), {"training.negatives": 3})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sed = 1", "unknown config key 'sed'; did you mean 'seed'?"),
        ("[training]\nnegativs = 3", "unknown config key 'training.negativs'; did you mean 'training.negatives'?"),
        ("[trainin]\nnegatives = 3", "unknown config key 'trainin.negatives'; did you mean 'training'?"),
        ("[nonsense]\n", "unknown config key 'nonsense'; known: dataset, method, "),
        ("[backbone.deep]\nwidth = 3", "unknown config key 'backbone.deep.width'"),
        ("seed = 1.5", "seed must be of type int, got 1.5"),
        ("seed = true", "seed must be of type int, got True"),
        ('seed = "1"', "seed must be of type int, got '1'"),
        ("method = 3", "method must be of type str, got 3"),
        ("[training]\nlearning_rate = true", "training.learning_rate must be of type float, got True"),
        ("[training]\nlearning_rate = [1.0]", "training.learning_rate must be of type float, got"),
        ("[stream]\nrow_order_history = 1", "stream.row_order_history must be of type bool, got 1"),
        ('[training]\nloss = "hinge"', "training.loss must be one of softmax, bce, bpr, got 'hinge'"),
        ("preset = 1", "preset must be one of small, paper, got 1"),
        ("training = 3", "config key 'training' is a table, got 3; set its keys, e.g. training.loss"),
        ("[seed]\nvalue = 3", "config key 'seed.value': 'seed' is a single value, it has no part 'value'"),
        ("[seed]\n", "seed must be of type int, got {}"),
        ("seed = ", "the config is not valid TOML"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(text, message):
    with pytest.raises(ConfigError) as found:
        from_toml(text)
    assert str(found.value).startswith(message)
    assert "\n" not in str(found.value)


def test_a_whole_number_is_fine_where_a_fraction_is_asked_for():
    assert override(RunConfig(), {"training.learning_rate": 1}).training.learning_rate == 1.0
    assert type(override(RunConfig(), {"training.learning_rate": 1}).training.learning_rate) is float


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("training.negatives=32", "training.negatives", 32),
        ("training.learning_rate = 1e-05", "training.learning_rate", 1e-05),
        ("stream.row_order_history=true", "stream.row_order_history", True),
        ("training.loss=bce", "training.loss", "bce"),
        ('training.loss="bce"', "training.loss", "bce"),
        ("dataset=a=b", "dataset", "a=b"),
        ("dataset=logs/my log", "dataset", "logs/my log"),
        ("dataset=", "dataset", ""),
    ],
)
def test_a_setting_given_on_the_command_line_is_read_as_toml_or_as_a_bare_string(text, key, value):
    found = parse_override(text)
    assert found == (key, value)
    assert type(found[1]) is type(value)
    override(RunConfig(), dict([found]))


@pytest.mark.parametrize("text", ["training.negatives", "=3", ""])
def test_a_setting_without_key_or_value_is_refused(text):
    with pytest.raises(ConfigError, match=re.escape(f"--set takes key=value, got {text!r}")):
        parse_override(text)


def test_a_file_that_is_not_there_is_refused_by_its_path(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "none.toml"))):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "run.toml").write_text(to_toml(RunConfig(seed=5)), encoding="utf-8")
    assert read_toml(tmp_path / "run.toml") == RunConfig(seed=5)


@pytest.mark.parametrize(("name", "width"), [("small", 64), ("paper", 256)])
def test_a_preset_sets_the_width_and_its_own_name(name, width):
    assert set(PRESETS) == {"small", "paper"}
    assert preset(name) == override(RunConfig(preset=name), {"backbone.width": width})


def test_an_unknown_preset_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="preset must be one of small, paper, got 'large'"):
        preset("large")


def test_overriding_leaves_the_given_config_alone():
    config = RunConfig()
    override(config, {"training.negatives": 1})
    assert config == RunConfig()


@pytest.mark.parametrize("table", [*TABLES, RunConfig])
def test_every_setting_has_a_doc_line_or_explains_itself(table):
    lines = inspect.getsource(table).splitlines()
    for field in dataclasses.fields(table):
        (line,) = [line for line in lines if re.match(rf"    {field.name}: ", line)]
        assert field.name in SELF_EXPLANATORY or re.search(r"  # \S.{3,}", line), f"{table.__name__}.{field.name}"


def test_every_table_of_the_module_is_covered_here():
    tables = {kind for kind in vars(module).values() if dataclasses.is_dataclass(kind)}
    assert tables == {*TABLES, RunConfig}
