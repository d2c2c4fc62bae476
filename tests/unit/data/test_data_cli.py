import json
import sys

import pytest
from typer.testing import CliRunner

from protofed.cli.data import app
from protofed.errors import DataError, DatasetNotFound, MissingExtra, ProtoFedError


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def taobao_file(folder, rows=60):
    file = folder / "UserBehavior.csv"
    file.write_text("".join(f"{n % 6},{n // 6 % 5},1,pv,{1511600000 + n}\n" for n in range(rows)))
    return file


def test_prepare_then_stats_gives_the_counts_of_the_file(tmp_path):
    done = invoke("prepare", "taobao", "--source", taobao_file(tmp_path), "--root", tmp_path / "logs", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {
        "name": "taobao",
        "file": str(tmp_path / "logs" / "taobao" / "interactions.parquet"),
        "rows": 60,
        "users": 6,
        "items": 5,
    }
    found = json.loads(invoke("stats", "taobao", "--root", tmp_path / "logs", "--json").stdout)
    assert found["raw"] == found["canonical"] == {"rows": 60, "users": 6, "items": 5}
    assert found["canonical_rule"] == "event pv where there is one, then 5-core"
    assert found["events"] == {"pv": 60}
    source = json.loads((tmp_path / "logs" / "taobao" / "source.json").read_text())
    assert source == {"dataset": "taobao", "family": "taobao", "file": "UserBehavior.csv", "rows": 60}


def test_stats_without_json_prints_the_counts_as_a_table(tmp_path):
    invoke("prepare", "taobao", "--source", taobao_file(tmp_path), "--root", tmp_path)
    lines = invoke("stats", "taobao", "--root", tmp_path).stdout.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["rows", "users", "items"],
        ["raw", "60", "6", "5"],
        ["5-core", "60", "6", "5"],
        ["canonical", "60", "6", "5"],
    ]


def test_list_shows_the_nine_official_sets_and_the_prepared_logs(tmp_path):
    invoke("prepare", "taobao", "--source", taobao_file(tmp_path), "--root", tmp_path, "--as", "mine")
    found = json.loads(invoke("list", "--root", tmp_path, "--json").stdout)
    papers = [entry["paper_name"] for entry in found["official"][:9]]
    assert papers == [
        "Amazon-Books",
        "Amazon-Electronics",
        "MovieLens-20M",
        "Yelp",
        "Gowalla",
        "LastFM-1K",
        "RetailRocket",
        "Taobao",
        "H&M",
    ]
    assert found["prepared"] == ["mine"]
    plain = invoke("list", "--root", tmp_path).stdout
    assert "UserBehavior.csv" in plain
    assert plain.splitlines()[-1] == f"prepared under {tmp_path}: mine"


@pytest.mark.parametrize("command", ["list", "prepare", "stats"])
def test_every_command_has_help_with_its_root(command):
    shown = invoke(command, "--help")
    assert shown.exit_code == 0
    assert "--root" in shown.stdout
    assert "--json" in shown.stdout


def refused(tmp_path, kind: type[ProtoFedError], words: str, *arguments: object) -> None:
    root = tmp_path / "logs"
    problem = invoke(*arguments, "--root", root).exception
    assert isinstance(problem, kind)
    assert words in str(problem)
    assert "\n" not in str(problem)
    assert not root.exists()


def test_bad_input_is_one_clear_line_and_nothing_is_written(tmp_path):
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("1;2;3;pv;1511600000\n")
    refused(tmp_path, DataError, "found semicolons", "prepare", "taobao", "--source", wrong)
    refused(tmp_path, DatasetNotFound, "no such file", "prepare", "taobao", "--source", tmp_path / "none")
    refused(tmp_path, DatasetNotFound, "did you mean 'taobao'?", "prepare", "taobo", "--source", wrong)
    refused(tmp_path, DatasetNotFound, "no prepared log 'x'", "stats", "x")
    (tmp_path / "cut.gz").write_bytes(b"\x1f\x8b\x08\x00\x00")
    refused(tmp_path, DataError, "must be whole", "prepare", "taobao", "--source", tmp_path / "cut.gz")


def test_preparing_another_file_under_a_taken_name_changes_nothing(tmp_path):
    invoke("prepare", "taobao", "--source", taobao_file(tmp_path), "--root", tmp_path)
    before = (tmp_path / "taobao" / "interactions.parquet").read_bytes()
    problem = invoke("prepare", "taobao", "--source", taobao_file(tmp_path, rows=61), "--root", tmp_path).exception
    assert isinstance(problem, DataError)
    assert "--overwrite" in str(problem)
    assert (tmp_path / "taobao" / "interactions.parquet").read_bytes() == before


def test_without_polars_raw_files_name_the_missing_library(tmp_path, monkeypatch):
    for module in [name for name in sys.modules if name.startswith("protofed.data.datasets.") or name == "polars"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "polars", None)
    refused(tmp_path, MissingExtra, "polars is not installed", "prepare", "taobao", "--source", taobao_file(tmp_path))
