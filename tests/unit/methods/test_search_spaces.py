"""Hyper-parameters are read strictly, and every value a search tries is one its method takes."""

from dataclasses import fields, is_dataclass

import pytest
import worlds

from protofed.backbone.pretrain import content_key
from protofed.cli.run import settle
from protofed.config import RunConfig, from_toml, hyper_values, in_range, override, parsed, to_toml
from protofed.errors import ConfigError
from protofed.methods.catalogue import METHODS, configured
from protofed.methods.search_spaces import PEFT_SPACES, SPACES, check_hyper, space_of

NOTHING_TO_TUNE = {"popularity", "frozen", "frozen-no-new-rows", "personal-memory", "full-retrain"}
CASES = [(name, variant) for name in METHODS for variant in METHODS[name].variants]


def numbers(method, prefix=""):
    """Every number among a method's hyper-parameters, by its dotted name."""
    for field in fields(method):
        value = getattr(method, field.name)
        if is_dataclass(value):
            yield from numbers(value, f"{prefix}{field.name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{field.name}", value


def test_every_method_has_a_space_and_only_those_without_a_choice_have_an_empty_one():
    assert set(METHODS) <= set(SPACES)
    assert {name for name, space in SPACES.items() if not space} == NOTHING_TO_TUNE
    assert set(PEFT_SPACES) <= set(SPACES)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_every_value_tried_is_a_setting_that_the_method_takes(name, variant):
    base = RunConfig(method=name, variant=variant)
    for key, values in space_of(name, variant).items():
        assert len(set(values)) == len(values) > 1, key
        for value in values:
            config = in_range(override(base, {key: value}))
            method, place = configured(config), key.removeprefix("hyper.").split(".")
            found = method if key.startswith("hyper.") else config
            for part in place:
                found = getattr(found, part)
            assert found == value
            assert type(found) is type(value), key
            assert from_toml(to_toml(config)) == config


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_no_trial_needs_a_warm_up_or_a_budget_of_its_own(name, variant):
    config, data = worlds.tiny_config(method=name), worlds.tiny_stream()
    shared = content_key(config, data, worlds.CPU)
    for key, values in space_of(name, variant).items():
        assert not key.startswith(("privacy.", "stream.", "backbone."))
        assert content_key(override(config, {key: values[0]}), data, worlds.CPU) == shared


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_under_noise_federated_methods_are_searched_over_the_radius_too_and_nothing_else_changes(name, variant):
    plain, noised = space_of(name, variant), space_of(name, variant, private=True)
    added = {"privacy.clip_radius"} if name in ("fedavg", "fedprox", "ditto", "fedrap") else set()
    assert noised.keys() - plain.keys() == added
    assert {key: noised[key] for key in plain} == plain
    for radius in noised.get("privacy.clip_radius", ()):
        in_range(override(RunConfig(method=name), {"privacy.clip_radius": radius}))


@pytest.mark.parametrize("name", METHODS)
def test_every_default_lies_in_its_range(name):
    for key, value in numbers(METHODS[name].method):
        check_hyper(key, value)


def test_without_hyper_parameters_the_method_is_the_one_in_the_table():
    for name, entry in METHODS.items():
        assert configured(settle({"method": name})) is entry.method


def test_hyper_parameters_change_the_method_and_nothing_of_the_table():
    config = settle({"method": "er-random"}, None, ["hyper.capacity.share=0.1", "hyper.beta=3"])
    method = configured(config)
    assert (method.beta, method.capacity.share) == (3.0, 0.1)
    assert type(method.beta) is float
    assert METHODS["er-random"].method.beta == 1.0


def test_rules_between_hyper_parameters_are_checked_at_the_end_only():
    config = override(RunConfig(method="reloop"), {"hyper.negatives": 150, "hyper.pool": 200})
    assert (configured(config).negatives, configured(config).pool) == (150, 200)


def test_hyper_parameters_are_written_as_a_table_and_read_back_whatever_their_order():
    config = override(RunConfig(), {"hyper.strength": 0.1, "hyper.capacity.share": 0.2, "hyper.labels": "true"})
    assert config.hyper == 'capacity.share = 0.2, labels = "true", strength = 0.1'
    assert to_toml(config).endswith('\n[hyper]\ncapacity.share = 0.2\nlabels = "true"\nstrength = 0.1\n')
    assert from_toml(to_toml(config)) == config
    assert from_toml('[hyper]\nlabels = "true"\nstrength = 0.1\n[hyper.capacity]\nshare = 0.2') == config
    assert hyper_values(config.hyper) == {"strength": 0.1, "capacity.share": 0.2, "labels": "true"}


def test_a_config_without_the_table_has_no_hyper_parameters():
    without = to_toml(RunConfig()).replace("\n[hyper]\n", "")
    assert "hyper" not in without
    assert from_toml(without) == RunConfig() == from_toml(to_toml(RunConfig()))


@pytest.mark.parametrize("text", ["a = [1]", "a = {}", "a = 1, a = 2", "} x = {", "a=1", "ε", '"a b" = 1'])
def test_a_text_that_is_no_table_of_values_survives_as_a_text(text):
    config = RunConfig(hyper=text)
    assert override(RunConfig(), parsed(to_toml(config))) == config


@pytest.mark.parametrize(
    ("method", "setting", "message"),
    [
        ("ewc", "hyper.strenght=1", "unknown config key 'hyper.strenght'; did you mean 'hyper.strength'?"),
        ("ewc", "hyper.xyz=1", "unknown config key 'hyper.xyz'; known: strength, decay, "),
        ("popularity", "hyper.strength=1", "popularity has no hyper-parameters, got hyper.strength"),
        ("ewc", "hyper.strength=strong", "hyper.strength must be of type float, got 'strong'"),
        ("ewc", "hyper.strength=true", "hyper.strength must be of type float, got True"),
        ("ewc", "hyper.examples=1.5", "hyper.examples must be of type int, got 1.5"),
        ("ewc", "hyper.labels=maybe", "hyper.labels must be one of sample, true, got 'maybe'"),
        ("ewc", "hyper.strength=-1", "hyper.strength must lie between 0 and 1e+09, got -1"),
        ("ewc", "hyper.strength=nan", "hyper.strength must lie between 0 and 1e+09, got nan"),
        ("ewc", "hyper.strength=inf", "hyper.strength must lie between 0 and 1e+09, got inf"),
        ("lwf", "hyper.temperature=0", "hyper.temperature must lie between 1e-06 and 1e+06, got 0"),
        ("er-random", "hyper.capacity.share=2", "capacity.share must lie between 0 and 1, got 2"),
        ("er-random", "hyper.capacity=2", "config key 'hyper.capacity' is a table, got 2"),
        ("er-random", "hyper.capacity.shar=2", "unknown config key 'hyper.capacity.shar'; did you mean"),
        ("ewc", "hyper.strength.x=2", "config key 'hyper.strength.x': 'strength' is a single value"),
        ("ewc", "hyper.strength=[1]", "hyper.strength must be a single value, got [1]"),
        ("ewc", "hyper.a b=1", "unknown config key 'hyper.a b'"),
        ("ewc", "hyper=3", "hyper must be of type str, got 3"),
        ("ewc", "hyper=strength", 'hyper must look like "strength = 0.1, examples = 500", got'),
    ],
)
def test_a_wrong_hyper_parameter_is_one_line_that_names_it(method, setting, message):
    with pytest.raises(ConfigError) as found:
        settle({"method": method}, None, [setting])
    assert str(found.value).startswith(message)
    assert "\n" not in str(found.value)
