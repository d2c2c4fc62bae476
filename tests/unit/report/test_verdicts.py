"""The first table of several data sets: who is best, who is level with it, and where ProtoFed-SP stands."""

from pathlib import Path

from run_folders import table, write_run

from protofed.report.runs import find_runs
from protofed.report.sections import group
from protofed.report.tables import compute
from protofed.report.verdicts import verdicts

USERS = {f"u{n}": (1, 1, 1) for n in range(9)}
LEDGER = [{"noise_multiplier": 1.0, "sampling_rate": 0.5, "count": 4}]
NODP = '\n[protofed]\nmode = "nodp"\n'


def written(root: Path) -> None:
    """On `one` ewc and si are better for other users, ours behind them; `two` has no row of ours and one method."""
    even, odd = ({f"u{n}": 1.2 if n % 2 == half else 0.8 for n in range(9)} for half in (0, 1))
    write_run(root / "one/ewc", lambda *_: 0.5, method="ewc", dataset="one", users=USERS, skill=even)
    write_run(root / "one/si", lambda *_: 0.5, method="si", dataset="one", users=USERS, skill=odd)
    write_run(root / "one/frozen", lambda *_: 0.2, dataset="one", users=USERS)
    write_run(root / "one/nodp", lambda *_: 0.3, method="protofed-sp", dataset="one", users=USERS, settings=NODP)
    write_run(root / "one/ours", lambda *_: 0.1, method="protofed-sp", dataset="one", users=USERS, ledger=LEDGER)
    write_run(root / "two/frozen", lambda *_: 0.4, dataset="two", users=USERS)


def test_a_line_says_the_best_who_is_level_the_trivial_ours_and_the_private_one(tmp_path: Path) -> None:
    written(tmp_path)
    shown = verdicts([compute(section) for section in group(find_runs(tmp_path)[0])])
    lines = {line.label: [cell.text for cell in line.cells] for line in shown.lines}
    best, level, trivial, ours, private = lines["one"]
    assert (best, level, trivial) == ("ewc, 0.511", "si", "frozen, 0.200")  # 5 of 9 users at 1.2 times .5, 4 at .8
    assert ours == "protofed-sp (nodp), 0.300, place 3 of 5, 0.211 behind"
    assert private.startswith("protofed-sp (reference) with NDCG@10 0.100 (ε = ")
    assert private.endswith(", the only one")
    assert lines["two"][:4] == ["frozen, 0.400", "none", "frozen, 0.400", "none"]
    assert "no row carries a privacy claim" in lines["two"][4]
    assert table(shown.csv)[0]["ProtoFed-SP"] == ours


def test_the_best_row_is_behind_nobody(tmp_path: Path) -> None:
    write_run(tmp_path / "ours", lambda *_: 0.5, method="protofed-sp", users=USERS, settings=NODP)
    write_run(tmp_path / "frozen", lambda *_: 0.2, users=USERS)
    (line,) = verdicts([compute(section) for section in group(find_runs(tmp_path)[0])]).lines
    assert line.cells[3].text == "protofed-sp (nodp), 0.500, place 1 of 2"
