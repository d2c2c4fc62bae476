"""`protofed privacy`: never an ε without all that it means."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protofed.cli.main import app
from protofed.cli.privacy import privacy
from protofed.errors import ConfigError
from protofed.privacy.ledger import SHARE, Release, claim, write_ledger


def answer(*flags: str) -> dict:
    result = CliRunner().invoke(app, ["privacy", *flags, "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


def by_pair(found: dict) -> dict:
    return {(row["trust"], row["adversary"]): row for row in found["guarantees"]}


@pytest.mark.slow
def test_a_budget_gives_the_noise_by_both_accountants_and_epsilon_against_both_adversaries():
    found = answer("--target-epsilon", "3.4", "--delta", "1e-5", "--rate", "0.05", "--rounds", "160")
    assert round(found["noise_for_target"]["pld"], 3) == 1.128
    assert round(found["noise_for_target"]["rdp"], 3) == 1.203
    assert found["noise_multiplier"] == found["noise_for_target"]["pld"]
    assert found["noise_std"] == {"central": 1.162922, "secure-aggregation": 1.162922, "local": 2.2564}
    rows = by_pair(found)
    assert len(rows) == 6
    assert rows["central", "release"]["epsilon"]["pld"] == pytest.approx(3.4, abs=1e-3)
    assert rows["central", "server"]["epsilon"] == {"pld": None, "rdp": None}
    assert "no guarantee" in rows["central", "server"]["note"]
    assert [fewer["uploads"] for fewer in rows["secure-aggregation", "server"]["fewer_uploads"]] == [8, 22]
    for row in rows.values():
        assert (row["delta"], row["unit"], row["rate"], row["rounds"]) == (1e-5, "user", [0.05], [160])
        assert row["adjacency"] == ("replace one user" if row["trust"] == "local" else "add or remove one user")


def test_the_claim_is_printed_word_for_word():
    found = answer("--noise-multiplier", "2", "--rate", "1", "--rounds", "8")
    assert found["claim"] == claim([1e-5])
    for sentence in (
        "(ε, δ) joint user-level differential privacy for a user's events after the base block, add / remove all of "
        "them, δ = 1e-5.",
        "Events in the base block are not protected (some later users have some).",
        "The catalogue, slice edges, the number of clients, preprocessing and hyper-parameters are taken as public;",
        "published metrics are not covered.",
    ):
        assert sentence in found["claim"]


def test_a_delta_of_ones_own_is_the_one_in_the_claim_and_the_only_one():
    flags = ["privacy", "--noise-multiplier", "2", "--rate", "1", "--rounds", "8", "--delta", "1e-6"]
    shown = CliRunner().invoke(app, flags, catch_exceptions=False).stdout
    assert "δ = 1e-6." in shown
    assert shown.count("δ") == 2  # (ε, δ), and what δ is


def test_a_ledger_in_a_run_folder_brings_the_runs_share_of_users_with_base_events(tmp_path):
    write_ledger(tmp_path / "ledger.json", (Release(2.0, 1.0, 8),))
    assert "(some later users have some)" in answer("--ledger", str(tmp_path / "ledger.json"))["claim"]
    (tmp_path / "environment.json").write_text(json.dumps({SHARE: 0.9891}))
    found = answer("--ledger", str(tmp_path / "ledger.json"))
    assert found[SHARE] == 0.9891
    assert "(98.9 % of later users have some)" in found["claim"]


def test_a_noise_gives_its_epsilon():
    rows = by_pair(answer("--noise-multiplier", "1.2", "--rate", "0.05", "--rounds", "160", "--max-uploads", "8"))
    assert rows["secure-aggregation", "server"]["uploads"] == 8
    assert round(rows["secure-aggregation", "server"]["epsilon"]["pld"]) == 12


def test_an_empty_ledger_is_not_sold_as_epsilon_zero(tmp_path):
    write_ledger(tmp_path / "ledger.json", ())
    with pytest.raises(ConfigError, match="holds no release, so no ε applies"):
        privacy(ledger=[tmp_path / "ledger.json"])


def test_a_ledger_is_priced_as_a_whole(tmp_path):
    path = tmp_path / "ledger.json"
    streams = [Release(1.1282, 0.05, 160, name) for name in ("prototypes", "popularity", "new items")]
    write_ledger(path, tuple(streams), trust="secure-aggregation")
    found = answer("--ledger", str(path))
    assert found["trust"] == "secure-aggregation"
    assert by_pair(found)["secure-aggregation", "release"]["epsilon"]["pld"] == pytest.approx(5.88, abs=0.01)
    assert [release["stream"] for release in found["releases"]] == ["prototypes", "popularity", "new items"]


def test_ledgers_of_several_runs_are_priced_together_and_only_under_one_trust(tmp_path):
    paths = [str(tmp_path / name) for name in ("first.json", "again.json", "other.json")]
    for path, trust in zip(paths, ("central", "central", "local"), strict=True):
        write_ledger(Path(path), (Release(3.5237, 1.0, 8),), trust=trust)
    found = answer("--ledger", paths[0], "--ledger", paths[1])
    twice = answer("--noise-multiplier", "3.5237", "--rate", "1", "--rounds", "16")
    assert by_pair(found)["central", "release"]["epsilon"] == by_pair(twice)["central", "release"]["epsilon"]
    with pytest.raises(ConfigError, match="ledgers of one trust model add up, these have central and local"):
        privacy(ledger=[Path(paths[0]), Path(paths[2])])


def test_noise_is_solved_for_the_trust_that_is_asked_for():
    found = answer("--target-epsilon", "3.4", "--rate", "1", "--rounds", "1", "--trust", "local")
    assert found["noise_multiplier"] == pytest.approx(1.2459, abs=2e-3)
    assert found["adjacency"] == "replace one user"


def test_the_text_states_delta_unit_trust_rate_and_rounds():
    flags = ["privacy", "--target-epsilon", "3.4", "--rate", "1", "--rounds", "8"]
    shown = CliRunner().invoke(app, flags, catch_exceptions=False).stdout
    assert "noise multiplier for ε = 3.4, δ = 1e-05, central trust: PLD 3.5237" in shown
    assert "prototypes: noise multiplier 3.5237, rate 1, 8 rounds" in shown
    assert f"Per user, over all rounds together: {claim([1e-5])}" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "exactly one of --target-epsilon, --noise-multiplier and --ledger"),
        (("--target-epsilon", "3", "--noise-multiplier", "1"), "exactly one of"),
        (("--target-epsilon", "-3"), "target epsilon must be a finite number above 0, got -3.0"),
        (("--target-epsilon", "3", "--delta", "2"), "delta must lie strictly between 0 and 1, got 2.0"),
        (("--target-epsilon", "3", "--rate", "0"), "sampling rate must lie above 0 and at most at 1, got 0.0"),
        (("--target-epsilon", "3", "--rounds", "0"), "at least 1 round, got 0"),
        (("--noise-multiplier", "-1"), "noise multiplier must be a finite number >= 0, got -1.0"),
        (("--target-epsilon", "3", "--trust", "blind"), "--trust must be one of central, secure-aggregation, local"),
        (("--target-epsilon", "3", "--accountant", "sum"), "--accountant must be one of pld, rdp, got 'sum'"),
    ],
)
def test_bad_values_are_one_clear_line(flags, message):
    result = CliRunner().invoke(app, ["privacy", *flags])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
