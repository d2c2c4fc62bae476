"""The first page: of each data set three sentences and five rows, who wins and where ProtoFed-SP loses."""

from pathlib import Path

from run_folders import shown_in, write_run

from protofed.report.opening import across, digest, sentences
from protofed.report.runs import find_runs
from protofed.report.sections import group
from protofed.report.tables import Results, compute

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


def opened(root: Path) -> dict[str, Results]:
    return {section.title: compute(section) for section in group(find_runs(root)[0])}


def test_three_sentences_say_who_wins_who_wins_privately_and_where_ours_loses(tmp_path: Path) -> None:
    written(tmp_path)
    found = opened(tmp_path)
    wins, private, loses = sentences(found["one"])
    # 5 of 9 users at 1.2 times .5, 4 at .8: 0.511 against 0.489 of those for whom it is the other way round
    assert wins == (
        "Wins: ewc with NDCG@10 0.511 (best trivial row: frozen, 0.200); "
        "ahead of 3 of 4 other rows beyond chance, not distinguishable from si."
    )
    assert private.startswith("With privacy: protofed-sp (reference) with NDCG@10 0.100 (ε = ")
    assert loses.startswith("Where ProtoFed-SP loses (protofed-sp (nodp)): NDCG@10 0.300 against 0.511 (ewc), HR@10 ")
    assert loses.count("(ewc)") == 4
    assert sentences(found["two"])[2] == "There is no ProtoFed-SP row."


def test_five_rows_are_those_a_reader_asks_about_with_their_place(tmp_path: Path) -> None:
    written(tmp_path)
    write_run(tmp_path / "one/lwf", lambda *_: 0.45, method="lwf", dataset="one", users=USERS)
    shown = shown_in(digest(opened(tmp_path)["one"]))
    places = {label: cells["place"].text for label, cells in shown.items()}
    # lwf, third of all, gives way to ours with and without noise and to the best trivial row
    assert places == {
        "ewc": "1 of 6",
        "si": "2 of 6",
        "protofed-sp (nodp)": "4 of 6",
        "frozen": "5 of 6",
        "protofed-sp (reference)": "6 of 6",
    }
    assert shown["protofed-sp (reference)"]["shares"].text == "private, ε = 6.68"
    assert shown["ewc"]["shares"].text == "raw"


def test_every_row_shows_what_it_shares_and_sharing_nothing_is_epsilon_0(tmp_path: Path) -> None:
    written(tmp_path)
    for mode, level in (("nothing", 0.6), ("private", 0.55)):
        settings = f'\n[protofed]\nmode = "{mode}"\n[scoring]\nhead = true\n[content]\nfeatures = "text,place"\n'
        ledger = LEDGER if mode == "private" else []
        run = {"method": "protofed", "dataset": "one", "users": USERS, "settings": settings, "ledger": ledger}
        write_run(tmp_path / "one" / mode, lambda *_, level=level: level, **run)
    (found,) = (results for title, results in opened(tmp_path).items() if title == "one")
    nothing, private = (f"protofed (share {share}, content: text, place)" for share in ("nothing", "private"))
    shown = {label: cells["shares"].text for label, cells in shown_in(digest(found)).items()}
    assert shown[nothing] == "nothing, ε = 0"
    assert shown[private] == f"private, ε = {found.prices[private].released:.2f}"
    assert shown["frozen"] == "raw"
    wins, with_privacy, loses = sentences(found)
    assert wins.startswith(f"Wins: {nothing} with NDCG@10 0.600")
    assert with_privacy.startswith(f"With privacy: {private} with NDCG@10 0.550 (ε = ")
    assert with_privacy.endswith(f"; sharing nothing (ε = 0): {nothing} with 0.600.")
    assert loses == f"Where ProtoFed loses: nowhere; its best row, {nothing}, leads every column."


def test_one_sentence_says_on_how_many_data_sets_ours_is_first(tmp_path: Path) -> None:
    written(tmp_path)
    told = across(list(opened(tmp_path).values()))
    first = "ProtoFed-SP is first of all rows on 0 of 2 data sets"
    assert told == f"{first}, and first of the private rows on 1 of 2 data sets (one)."


def test_the_best_row_loses_nowhere(tmp_path: Path) -> None:
    write_run(tmp_path / "ours", lambda *_: 0.5, method="protofed-sp", users=USERS, settings=NODP)
    write_run(tmp_path / "frozen", lambda *_: 0.2, users=USERS)
    (found,) = opened(tmp_path).values()
    assert (
        sentences(found)[2] == "Where ProtoFed-SP loses: nowhere; its best row, protofed-sp (nodp), leads every column."
    )
