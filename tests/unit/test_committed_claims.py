"""Every ε that a committed run states holds for the corrected claim, and costs no more than its budget."""

import json
import tomllib
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from protofed.privacy.accountant import epsilon
from protofed.privacy.ledger import Ledger, Release

RESULTS = Path(__file__).parents[2] / "results"
EXCHANGED = ("protofed-sp", "full-retrain", "dual-lora")  # uploads that 0.1.0 priced as added or removed
WITHDRAWN = ("yelp", "taobao")  # logs of the two others


@cache
def claims() -> list[tuple[str, dict[str, object], Ledger]]:
    """Folder, settings and ledger of every committed run that has released anything."""
    columns = ["folder", "config", "ledger"]
    rows = [
        row
        for file in sorted(RESULTS.glob("*.runs.parquet"))
        for row in pq.read_table(file, columns=columns).to_pylist()
    ]
    read = ((row, json.loads(row["ledger"])["releases"]) for row in rows)
    return [
        (row["folder"], tomllib.loads(row["config"]), tuple(Release(**one) for one in releases))
        for row, releases in read
        if releases
    ]


def test_rows_that_0_1_0_made_for_methods_that_broke_the_claim_have_no_epsilon():
    """docs/privacy.md, *What was wrong before 0.2.0*, lists them; who runs one again under the rule takes it off."""
    found = [(folder, str(config["method"])) for folder, config, _ in claims() if config["method"] in EXCHANGED]
    assert {method for _, method in found} == set(EXCHANGED)
    assert [folder for folder, _ in found if folder.startswith(("ablations/", "sensitivity/", "paper_size/"))] == []
    variants = {folder.split("/")[3].partition(",")[0] for folder, method in found if method == "protofed-sp"}
    assert variants & {"default", "noise"} == variants  # no ablation
    assert [folder for folder, method in found if method in EXCHANGED[1:] and "/private/" not in folder] == []
    assert [folder for folder, method in found if method in EXCHANGED[1:] and folder.split("/")[1] in WITHDRAWN] == []


def test_a_noised_run_states_no_more_than_its_budget():
    stated = {
        (ledger, privacy["target_epsilon"], privacy["delta"], privacy["trust"])
        for _, config, ledger in claims()
        if isinstance(privacy := config["privacy"], dict) and privacy["target_epsilon"]
    }
    assert len(stated) > 5
    for ledger, target, delta, trust in stated:
        assert 0.97 * target < epsilon(ledger, delta, trust=trust) <= target


@pytest.mark.parametrize("method", ["full-retrain", "dual-lora"])
def test_a_private_row_without_an_epsilon_is_not_committed(method):
    rows = [
        row["folder"]
        for file in sorted(RESULTS.glob("*.runs.parquet"))
        for row in pq.read_table(file, columns=["folder", "config", "ledger"]).to_pylist()
        if f'method = "{method}"' in row["config"] and "wrap = true" in row["config"]
    ]
    claimed = [folder for folder, config, _ in claims() if config["method"] == method]
    assert sorted(rows) == sorted(claimed) != []
