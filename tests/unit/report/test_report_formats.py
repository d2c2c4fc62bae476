"""`protofed report --format`: the right text in the right file, refusals before anything is written."""

import json
from pathlib import Path

import pytest
from run_folders import write_run

from protofed.cli.report import report
from protofed.errors import ConfigError, ProtoFedError


def value(tested: int, trained: int, candidates: str, subset: str, metric: str) -> float:
    return 0.6 if metric == "hr@10" else 0.4


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "a", value)
    return tmp_path / "runs"


STARTS = {"html": "<!doctype html>", "md": "## toy\n", "latex": "% needs", "csv": "dataset,method,seeds,"}


@pytest.mark.parametrize(("name", "kind"), [("r.html", "html"), ("r.md", "md"), ("r.tex", "latex"), ("R.CSV", "csv")])
def test_the_files_name_chooses_the_format(runs, tmp_path, name, kind, capsys):
    report(runs, tmp_path / name)
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(STARTS[kind])
    assert capsys.readouterr().out == f"{tmp_path / name}: 1 run, 1 warning\n"


@pytest.mark.parametrize("kind", ["md", "latex", "csv"])
def test_a_format_that_is_asked_for_goes_before_the_name(runs, tmp_path, kind):
    report(runs, tmp_path / "table.txt", kind=kind)
    assert (tmp_path / "table.txt").read_text(encoding="utf-8").startswith(STARTS[kind])


@pytest.mark.parametrize(("kind", "name"), [(None, "report.html"), ("latex", "report.tex"), ("md", "report.md")])
def test_without_a_name_the_format_gives_one(runs, tmp_path, kind, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report(runs, kind=kind)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [name]


def test_json_is_the_same_for_every_format(runs, tmp_path, capsys):
    told = []
    for name in ("r.html", "r.md"):
        report(runs, tmp_path / name, as_json=True)
        told.append(json.loads(capsys.readouterr().out))
        assert told[-1].pop("report") == str(tmp_path / name)
    assert told[0] == told[1]


def test_a_report_is_the_same_bytes_when_it_is_made_again(runs, tmp_path):
    texts = []
    for name in ("a.tex", "b.tex"):
        report(runs, tmp_path / name)
        texts.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1]


def test_an_unknown_format_or_place_is_refused_in_one_line(runs, tmp_path):
    with pytest.raises(ConfigError, match="--format must be one of html, md, latex, csv, got 'pdf'"):
        report(runs, tmp_path / "r.pdf", kind="pdf")
    with pytest.raises(ProtoFedError, match="is a folder; give a file"):
        report(runs, tmp_path, kind="md")
    with pytest.raises(ProtoFedError, match="there is no folder"):
        report(runs, tmp_path / "absent" / "r.md")
    with pytest.raises(ProtoFedError, match=r"must end in \.html"):
        report(runs, tmp_path / "r.md", kind="html")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
