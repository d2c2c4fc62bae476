"""Whatever `protofed privacy` is asked: an ε above zero, or a refusal in one line, soon."""

import json
import random
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protofed.cli.main import app
from protofed.errors import ConfigError, DataError, ProtoFedError
from protofed.privacy.accountant import BeyondPricing, epsilon, noise_for, rounds_within
from protofed.privacy.ledger import Release, write_ledger

SECONDS = 60  # alone it is 10 at most; other tests run beside this one
VALUES = {
    "--target-epsilon": (
        "3.4",
        "0",
        "-0.0",
        "1e-4",
        "0.01",
        "8",
        "30",
        "31",
        "1e6",
        "-1",
        "nan",
        "inf",
        "1e-300",
        "1e400",
    ),
    "--noise-multiplier": (
        *("1.2", "0", "-0.0", "0.02", "0.05", "0.3", "2.1", "100", "1e-3", "1e-5", "1e-200", "1e6", "1e9", "1e300"),
        *("nan", "inf", "-1", "5e-324"),
    ),
    "--delta": (
        "1e-5",
        "1e-12",
        "1e-15",
        "1e-16",
        "1e-300",
        "5e-324",
        "0.5",
        "0.999",
        "0",
        "1",
        "2",
        "-1e-5",
        "nan",
        "inf",
    ),
    "--rate": ("0.05", "1", "0.5", "0.999999", "1e-3", "1e-9", "1e-300", "0", "-0.1", "1.1", "nan", "5e-324"),
    "--rounds": ("160", "1", "8", "1000", "100000", "100001", "0", "-5", "1000000000000", "1" + "0" * 400, "1.5", "x"),
    "--max-uploads": ("1", "8", "1000000000000000000000", "0", "-1", "x"),
    "--trust": ("central", "secure-aggregation", "local", "blind", ""),
    "--accountant": ("pld", "rdp", "sum", ""),
}


def flags(number: int) -> list[str]:
    """The arguments of that number: half of them plausible, the others anything."""
    rng = random.Random(number)
    asked = [rng.choice(("--target-epsilon", "--noise-multiplier"))]
    asked += [name for name in VALUES if name not in asked and rng.random() < (0.05 if "-epsilon" in name else 0.4)]
    values = ((name, VALUES[name][0] if rng.random() < 0.3 else rng.choice(VALUES[name])) for name in asked)
    return [part for pair in values for part in pair] + rng.choice(([], ["--json"]))


def problem_of(arguments: list[str]) -> str:
    """Empty where the command answers with ε above zero or refuses in one line and in time; else what it did."""
    start = time.monotonic()
    done = CliRunner().invoke(app, ["privacy", *arguments])
    if (seconds := time.monotonic() - start) > SECONDS:
        return f"{arguments}: {seconds:.0f} seconds"
    if done.exception is None:
        rows = json.loads(done.stdout)["guarantees"] if "--json" in arguments else []
        zero = any(price == 0 for row in rows for price in row["epsilon"].values())
        return f"{arguments}: ε = 0" if zero else ""
    refused = isinstance(done.exception, ProtoFedError) and "\n" not in str(done.exception)
    usage = isinstance(done.exception, SystemExit) and done.exit_code == 2
    return "" if refused or usage else f"{arguments}: {done.exception!r}"


@pytest.mark.parametrize("part", range(5))
def test_a_hundred_random_calls_answer_or_refuse_in_one_line(part):
    assert [found for number in range(20 * part, 20 * part + 20) if (found := problem_of(flags(number)))] == []


@pytest.mark.long
@pytest.mark.parametrize("part", range(5, 55))
def test_a_thousand_random_calls_answer_or_refuse_in_one_line(part):
    assert [found for number in range(20 * part, 20 * part + 20) if (found := problem_of(flags(number)))] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--noise-multiplier 0.001", "with sampling, ε is computed for noise multipliers of 0.02 and more, got 0.001"),
        ("--noise-multiplier 1e-200 --rate 1", "ε is computed for noise multipliers from 0.0001 to 1e+07, got 1e-200"),
        ("--noise-multiplier 1e300", "ε is computed for noise multipliers from 0.0001 to 1e+07, got 1e+300"),
        ("--noise-multiplier 1 --rounds 1000000000", "--rounds must be at most 100,000, got 1,000,000,000"),
        ("--noise-multiplier 0.1 --rate 0.5 --rounds 100000", "this noise promises nothing: by RDP ε is about"),
        ("--noise-multiplier 1 --delta 5e-324", "--delta must be at least 1e-15, got 5e-324"),
        ("--target-epsilon 1e-4 --rate 5e-324", "ε is computed for sampling rates of 1e-12 and more, got 4.94066e-324"),
        ("--target-epsilon 0", "the target epsilon must be a finite number above 0, got 0.0"),
        ("--target-epsilon 100000", "--target-epsilon must be at most 30, got 100000"),
        ("--noise-multiplier 1e6 --rate 1", "at δ = 1e-05 this comes out as ε = 0"),
        ("--noise-multiplier 1 --delta 0.5", "at δ = 0.5 this comes out as ε = 0"),
    ],
)
def test_what_cannot_be_priced_is_refused_at_once(arguments, message):
    start = time.monotonic()
    refusal = CliRunner().invoke(app, ["privacy", *arguments.split()]).exception
    assert isinstance(refusal, ConfigError)
    assert message in str(refusal)
    assert time.monotonic() - start < 10


def test_a_small_epsilon_is_never_shown_as_zero():
    shown = CliRunner().invoke(app, ["privacy", "--noise-multiplier", "5e4"], catch_exceptions=False).stdout
    assert " 0.0001 " in shown
    assert " 0.000 " not in shown


def ledger_of(folder: Path, **release: object) -> Path:
    entry = {"noise_multiplier": 1.0, "sampling_rate": 0.05, "count": 1} | release
    file = folder / "ledger.json"
    content = {"format": "protofed-ledger-1", "trust": "central", "releases": [entry]}
    file.write_text(json.dumps(content).replace('"HUGE"', "1" + "0" * 400))
    return file


@pytest.mark.parametrize("release", [{"noise_multiplier": "HUGE"}, {"count": "HUGE"}, {"count": 10**9}])
def test_a_ledger_of_odd_numbers_is_refused_in_one_line(tmp_path, release):
    refusal = CliRunner().invoke(app, ["privacy", "--ledger", str(ledger_of(tmp_path, **release))]).exception
    assert isinstance(refusal, ProtoFedError)
    assert "\n" not in str(refusal)


def test_a_ledger_that_is_nested_without_end_or_cannot_be_there_is_refused(tmp_path):
    file = tmp_path / "ledger.json"
    file.write_text("[" * 100_000)
    for path in (file, tmp_path / ("x" * 5000), tmp_path):
        assert isinstance(CliRunner().invoke(app, ["privacy", "--ledger", str(path)]).exception, DataError)


def test_a_ledger_of_very_many_noises_is_refused(tmp_path):
    write_ledger(tmp_path / "ledger.json", tuple(Release(1 + n / 1000, 0.05) for n in range(300)))
    refusal = CliRunner().invoke(app, ["privacy", "--ledger", str(tmp_path / "ledger.json")]).exception
    assert isinstance(refusal, BeyondPricing)
    assert "at most 200 different noises and rates, got 300" in str(refusal)


def test_a_budget_beyond_what_can_be_priced_gets_the_least_noise_that_can_be(monkeypatch):
    monkeypatch.setattr("protofed.privacy.accountant.SAMPLED_MULTIPLIER", 0.3)
    multiplier = noise_for(200.0, 1e-5, 0.05, 10)
    assert multiplier == 0.3
    assert epsilon((Release(multiplier, 0.05, 10),), 1e-5) < 200


def test_rounds_beyond_what_can_be_priced_are_not_within_a_budget():
    assert rounds_within(3.4, 1e-5, Release(0.01, 0.05, 10**7)) == 0
