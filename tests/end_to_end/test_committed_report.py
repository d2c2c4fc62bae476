"""The report of docs/ and the exports of results/ are what `make report` makes of the committed runs, to the byte."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from protofed.cli.main import main

ROOT = Path(__file__).parents[2]


COMMITTED = ("docs/report.html", "results/overall.csv", "results/more.csv", "results/paper_size.csv")
MOST_BYTES = 2_000_000


def test_one_page_is_committed_and_it_is_small():
    pages = sorted((ROOT / "docs").glob("**/*.html"))
    assert [page.name for page in pages] == ["report.html"]
    assert pages[0].stat().st_size < MOST_BYTES


@pytest.mark.long
@pytest.mark.parametrize("made", COMMITTED)
def test_the_committed_runs_give_the_committed_report(made, tmp_path, monkeypatch, capsys):
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if re.search(rf"report results/\w+ -o {made}\b", line))
    again = tmp_path / Path(made).name
    words = shlex.split(line.partition("$(PROTOFED) ")[2].replace(made, str(again)))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["protofed", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, capsys.readouterr().err
    assert again.read_text(encoding="utf-8") == (ROOT / made).read_text(encoding="utf-8")
