"""`protofed report` writes the page, says where, and prints numbers for machines on request."""

import json
from pathlib import Path

import pytest
from run_folders import write_run

from protofed.cli.report import report
from protofed.errors import ProtoFedError


def value(tested: int, trained: int, candidates: str, subset: str, metric: str) -> float:
    return 0.6 if metric == "hr@10" else 0.4


def test_the_page_is_written_and_one_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "a", value)
    report(tmp_path / "runs", tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}: 1 run, 1 warning\n"


def test_json_is_all_that_is_printed_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "a", value)
    report(tmp_path / "runs", tmp_path / "report.html", as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["sections"][0]["rows"][0]["ndcg@10/full/novel"]["mean"] == 0.4
    assert printed["report"] == str(tmp_path / "report.html")


def test_a_place_that_cannot_take_a_page_is_refused_before_any_run_is_read(tmp_path: Path) -> None:
    with pytest.raises(ProtoFedError, match=r"must end in one of \.html"):
        report(tmp_path / "no such runs", tmp_path / "report.txt")


def test_nothing_is_written_when_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ProtoFedError, match="holds no finished run"):
        report(tmp_path, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []
