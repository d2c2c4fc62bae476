"""ε comes from the ledger, with all it means nothing without; without dp-accounting its inputs stand in."""

import math
import sys
from pathlib import Path

import pytest
from run_folders import write_run

from protofed.privacy.accountant import epsilon, gaussian_epsilon
from protofed.privacy.ledger import Release
from protofed.report.prices import equal_groups, price_of, privacy_table, terms_of
from protofed.report.runs import Run, find_runs

SAMPLED = {"noise_multiplier": 1.128, "sampling_rate": 0.05, "count": 160}


def run_with(path: Path, *releases: dict[str, float]) -> Run:
    write_run(path / "run", lambda *_: 0.5, ledger=releases)
    ((found,), _) = find_runs(path)
    return found


def test_a_ledger_is_priced_whole_and_rounded_up(tmp_path: Path) -> None:
    found = price_of(*terms_of(run_with(tmp_path, SAMPLED, {"noise_multiplier": 3.0, "sampling_rate": 1.0})))
    exact = epsilon((Release(1.128, 0.05, 160), Release(3.0, 1.0)), 1e-5)
    assert exact <= found.released <= exact + 1e-4
    assert found.server == math.inf  # central trust promises nothing against the server
    assert found.said() == f"ε = {found.released:.2f}, δ = 1e-05, central trust"


def test_without_sampling_the_price_is_the_exact_gaussian_one(tmp_path: Path) -> None:
    found = price_of(*terms_of(run_with(tmp_path, {"noise_multiplier": 2.0, "sampling_rate": 1.0, "count": 8})))
    exact = gaussian_epsilon(math.sqrt(8) / 2.0, 1e-5)
    assert exact <= found.released <= exact + 1e-4


def test_rows_share_a_budget_when_their_epsilon_agrees_to_one_decimal(tmp_path: Path) -> None:
    close = [{"noise_multiplier": z, "sampling_rate": 1.0} for z in (2.0, 2.001, 1.0)]
    prices = {str(z): price_of(*terms_of(run_with(tmp_path / str(z), kind))) for z, kind in enumerate(close)}
    groups = equal_groups(prices)
    assert sorted(groups.values()) == [["0", "1"], ["2"]]


def test_without_dp_accounting_the_inputs_stand_in_for_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    found = price_of(*terms_of(run_with(tmp_path, SAMPLED)))
    assert not found.known
    assert found.said() == "prototypes: noise 1.128, rate 0.05, 160 rounds"
    assert equal_groups({"a": found, "b": found}) == {found.said(): ["a", "b"]}


def test_the_privacy_table_names_both_adversaries(tmp_path: Path) -> None:
    found = price_of(*terms_of(run_with(tmp_path, SAMPLED)))
    shown = privacy_table([("toy", "row", found)])
    assert shown is not None
    assert [cell.text for cell in shown.lines[0].cells[:4]] == [f"{found.released:.2f}", "∞", "1e-05", "central"]
    assert shown.lines[0].cells[0].value == pytest.approx(found.released)
    assert privacy_table([]) is None
