"""docs/report.html is what `make report` makes of the committed runs, to the byte."""

import shlex
import sys
from pathlib import Path

import pytest

from protofed.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_committed_runs_give_the_committed_report(tmp_path, monkeypatch, capsys):
    (line,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if " report results/pack " in line)
    words = shlex.split(
        line.partition("protofed.cli.main ")[2].replace("docs/report.html", str(tmp_path / "page.html"))
    )
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["protofed", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, capsys.readouterr().err
    assert (tmp_path / "page.html").read_text() == (ROOT / "docs" / "report.html").read_text()
