"""`protofed data import`: what it writes, says and refuses."""

import json
import random
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from protofed.cli.data import app
from protofed.data import filters
from protofed.data.interactions import InteractionLog, from_columns
from protofed.data.items import load_items
from protofed.data.prepared import load_log, source_of
from protofed.data.stats import counts, stats
from protofed.errors import ProtoFedError

START = 1_700_000_000
ROWS = [(n % 8, n % 6, START + n) for n in range(96)] + [(100, 50, START), (101, 51, START), (101, 51, START)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = "".join(f"{user},{item},{time}\n" for user, item, time in ROWS)
    Path("log.csv").write_text("userId,productId,ts\n" + lines + "7,,5\n")
    about = "".join(f"{item},name {item},{item}\n" for item in range(5))
    Path("items.csv").write_text("product_id,name,price\n" + about + "5,name 5,0\n5,again,0\n,lost,0\n99,more,0\n")


def run(*arguments: str):
    return CliRunner().invoke(app, ["import", *arguments])


def refusal(*arguments: str) -> ProtoFedError:
    """The one-line refusal of an import that leaves nothing behind."""
    before = sorted(Path().rglob("*"))
    done = run(*arguments)
    assert isinstance(done.exception, ProtoFedError), repr(done.exception)
    assert len(str(done.exception).splitlines()) == 1
    assert (done.stdout, sorted(Path().rglob("*"))) == ("", before)
    return done.exception


def test_an_import_says_what_it_took_kept_and_dropped():
    done = run("log.csv", "--as", "shop", "--items", "items.csv")
    assert done.exit_code == 0
    assert done.stderr.splitlines() == [
        "user = userId, item = productId, time = ts (unix seconds)",
        "items.csv: item = product_id, title = name",
    ]
    assert done.stdout.splitlines() == [
        "data/shop/interactions.parquet: 99 rows, 10 users, 8 items, 2023-11-14T22:13:20Z to 2023-11-14T22:14:55Z",
        "100 rows read, 1 malformed and dropped (the first is row 100: nothing in productId)",
        "duplicates, which are kept: 1 row with the user, item and time of an earlier one",
        "users with fewer than five events: 2 of 10; they are not trained on, and are served from their own history at "
        "once",
        "5-core, which is trained on: 96 rows, 8 users, 6 items",
        "items outside it, which are never recommended: 2 of 8",
        "data/shop/items.parquet: 7 items with title",
        "2 of 8 items have no row in items.csv",
        "rows without a usable identifier, dropped: 1",
        "rows that repeat an item, dropped (the first is kept): 1",
        "columns left out: price",
    ]
    assert source_of("shop", "data") == {
        "columns": {"user": "userId", "item": "productId", "time": "ts"},
        "dataset": "own",
        "family": "own",
        "file": "log.csv",
        "items": "items.csv",
        "rows": 99,
        "time": "unix seconds",
    }
    assert load_items("shop", "data")["item"].to_pylist() == [0, 1, 2, 3, 4, 5, 99]


def test_json_tells_the_same_in_numbers():
    told = json.loads(run("log.csv", "--as", "shop", "--items", "items.csv", "--json").stdout)
    log = load_log("shop", "data", canonical=False)
    assert sorted(zip(log.user_ids.take(log.users.numpy()).to_pylist(), log.times.tolist(), strict=True)) == sorted(
        (user, time) for user, _, time in ROWS
    )
    core = counts(load_log("shop", "data"))
    table = told.pop("item_table")
    assert told == {
        **{"name": "shop", "file": "data/shop/interactions.parquet", "rows": 99, "users": 10, "items": 8},
        **{"first": "2023-11-14T22:13:20Z", "last": "2023-11-14T22:14:55Z"},
        **{"columns": {"user": "userId", "item": "productId", "time": "ts"}, "time": "unix seconds", "remarks": []},
        **{"read": 100, "malformed": 1, "first_malformed": {"row": 100, "what": "nothing in productId"}},
        **{"duplicates": 1, "users_below_five": 2},
        "five_core": {"rows": core.rows, "users": core.users, "items": core.items},
    }
    assert (table["rows"], table["log_items_without_row"], table["dropped_columns"]) == (7, 2, ["price"])


def test_the_columns_can_be_named_and_the_names_of_files_do_not_choose_a_rule():
    text = "who;what;when;stars\n" + "".join(f"{u};{i};{t};{1 + t % 5}\n" for u, i, t in ROWS)
    Path("other.txt").write_text(text)
    flags = ["--user", "who", "--item", "what", "--time", "when", "--rating", "stars"]
    assert run("other.txt", "--as", "movielens-mine", *flags).exit_code == 0
    assert stats("movielens-mine", "data").canonical_rule == "5-core"  # no rule of ratings


def test_a_log_without_a_five_core_is_kept_and_said():
    Path("small.csv").write_text("user,item,date\nu,i,2024-01-01\n")
    done = run("small.csv", "--as", "small")
    assert "5-core leaves nothing (no users and items with five rows each): a run needs a larger log" in done.stdout
    assert "data/small/interactions.parquet: 1 row, 1 user, 1 item, 2024" in done.stdout
    told = json.loads(run("small.csv", "--as", "small", "--json").stdout)
    assert told["five_core"] == {"rows": 0, "users": 0, "items": 0}


def test_times_that_may_be_none_are_remarked():
    Path("steps.csv").write_text("user,item,time\nu,i,1\nu,i,2\n")
    done = run("steps.csv", "--as", "steps")
    assert "all times lie before 1973: is time the right column?" in done.stderr


def test_the_same_import_again_changes_nothing_and_another_one_is_refused_unless_told():
    assert run("log.csv", "--as", "shop").exit_code == 0
    assert not Path("data/shop/items.parquet").exists()
    assert run("log.csv", "--as", "shop", "--items", "items.csv").exit_code == 0
    Path("fewer.csv").write_text("product_id,name\n1,one\n")
    assert "holds other items than those to be written; pass --overwrite" in str(
        refusal("log.csv", "--as", "shop", "--items", "fewer.csv")
    )
    Path("log.csv").write_text("user,item,time,rating\n1,1,1,\n2,2,2,5\n")
    assert "holds another log than the one to be written; pass --overwrite" in str(refusal("log.csv", "--as", "shop"))
    done = run("log.csv", "--as", "shop", "--overwrite")
    assert "data/shop/items.parquet stays as it was; --items FILE replaces it" in done.stderr
    assert (len(load_log("shop", "data", canonical=False)), load_items("shop", "data").num_rows) == (2, 7)
    assert run("log.csv", "--as", "shop").exit_code == 0  # a row without a rating equals itself
    assert run("log.csv", "--as", "shop", "--overwrite", "--items", "fewer.csv").exit_code == 0
    assert load_items("shop", "data").num_rows == 1


REFUSED = {
    "none.csv: no such file; name a csv": ["none.csv"],
    "no.csv: no such file": ["log.csv", "--items", "no.csv"],
    "named by its folder alone, found 'a/b'": ["log.csv", "--as", "a/b"],
    "--encoding must be one of": ["log.csv", "--encoding", "utf-7"],
    "--user 'nobody' is none of its columns": ["log.csv", "--user", "nobody"],
    "bad.csv: no column is named like an item; call it productId, as the log does": ["log.csv", "--items", "bad.csv"],
    "cannot be written": ["log.csv", "--root", "/proc/nowhere"],
}


@pytest.mark.parametrize(("words", "arguments"), REFUSED.items(), ids=REFUSED)
def test_a_refused_import_leaves_nothing_behind(words, arguments):
    Path("bad.csv").write_text("a,b\n1,2\n")
    assert words in str(refusal("--as", "shop", *arguments))


def test_a_prepared_folder_is_not_imported_but_its_file_can_be():
    run("log.csv", "--as", "shop")
    assert "is a prepared log already" in str(refusal("data/shop", "--as", "again"))
    assert run("data/shop/interactions.parquet", "--as", "again").exit_code == 0
    assert pq.read_table("data/again/interactions.parquet").equals(pq.read_table("data/shop/interactions.parquet"))


def test_duplicates_are_counted_as_a_set_of_rows_counts_them(monkeypatch):
    rng = random.Random(0)
    rows = [(rng.randrange(4), rng.randrange(3), START + rng.randrange(9)) for _ in range(80)]
    log = from_columns("toy", *zip(*rows, strict=True))
    again = len(rows) - len(set(rows))
    assert again > 10
    assert filters.count_duplicates(log) == int(filters.duplicates(log).sum()) == again
    monkeypatch.setattr(InteractionLog, "n_users", 2**40)
    monkeypatch.setattr(InteractionLog, "n_items", 2**30)
    assert filters.count_duplicates(log) == again  # no integer holds user, item and moment


def test_every_import_of_the_documents_runs():
    page = (Path(__file__).parents[3] / "docs" / "own_data.md").read_text(encoding="utf-8")
    commands = [shlex.split(line)[3:] for line in page.splitlines() if line.startswith("protofed data import ")]
    rows = [(f"u{n % 9}", f"Ren\xe9 {n % 7}", START + n, f"0{n % 9 + 1}.02.2024 10:{n % 60:02}") for n in range(90)]
    files = {
        "visits.tsv": "who\tpage\tseen_on\n" + "".join(f"{u}\t{i}\t{t}\n" for u, i, t, _ in rows),
        "bare.csv": "".join(f"{u},{i},{t}\n" for u, i, t, _ in rows),
        "german.csv": "user,item,time\n" + "".join(f"{u},{i},{day}\n" for u, i, _, day in rows),
    }
    for name, text in files.items():
        Path(name).write_text(text)
    old = "user,item,time\n" + "".join(f"{u},{i},{t if t % 9 else 'x'}\n" for u, i, t, _ in rows)
    Path("old.csv").write_text(old, encoding="latin-1")
    users, items, times, _ = zip(*rows, strict=True)
    kinds = {"kind": ["view"] * len(rows), "stars": ["good"] * len(rows)}
    pq.write_table(pa.table({"user": users, "item": items, "time": times} | kinds), "log.parquet")
    assert len(commands) == 7
    for arguments in commands:
        done = run(*arguments)
        assert done.exit_code == 0, (arguments, done.exception)
    assert load_log("views", "data", canonical=False).events.unique().to_pylist() == ["view"]
    assert load_log("german", "data", canonical=False).n_instants == 90
    assert len(load_log("shop", "data", canonical=False)) == 80
