"""`protofed recommend`: from a run's folder to one user's items, and one clear line for every mistake."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_command_line import FAST, protofed, refused
from worlds import tiny_log

import protofed as package

OURS = ["--method", "protofed-sp", "--noise-multiplier", "1", "--set", "protofed.local_steps=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a log, an item table, and a finished run on them."""
    place, log = tmp_path_factory.mktemp("recommend"), tiny_log()
    users = [log.user_ids[u].as_py() for u in log.users.tolist()] + ["rare"] * 2
    items = [log.item_ids[i].as_py() for i in log.items.tolist()] + log.item_ids[:2].to_pylist()
    times = [*log.times.tolist(), *log.times[-2:].tolist()]
    (place / "data" / "shop").mkdir(parents=True)
    pq.write_table(
        pa.table({"user": users, "item": items, "timestamp": times}), place / "data/shop/interactions.parquet"
    )
    table = pa.table({"item": log.item_ids, "title": [f"Article {item}" for item in log.item_ids.to_pylist()]})
    pq.write_table(table, place / "data" / "shop" / "items.parquet")
    more = ["--set", "protofed.base_steps=2", "--cache", "cache"]
    done = protofed("run", "--dataset", "shop", "--root", "data", *OURS, *FAST, *more, "--out", "runs/shop", cwd=place)
    assert done.returncode == 0, done.stderr
    return place


def ask(folder: Path, *arguments: object) -> dict:
    done = protofed("recommend", "runs/shop", *arguments, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def user() -> str:
    return str(tiny_log().user_ids[0].as_py())


def test_a_known_user_gets_what_python_answers(folder):
    found = ask(folder, "--user", user(), "-n", 4, "--why")
    rows = package.load(folder / "runs" / "shop").device(user()).recommend(4, why=True)
    assert [row["item"] for row in found["items"]] == [row.item for row in rows]
    assert [row["score"] for row in found["items"]] == pytest.approx([row.score for row in rows], abs=1e-6)
    assert found["items"][0]["title"] == f"Article {rows[0].item}"
    assert found["items"][0]["why"]["public_rank"] == rows[0].why.public_rank
    catalogue = package.load(folder / "runs" / "shop").catalogue  # items with fewer than five events are not in it
    mine = [tiny_log().item_ids[item].as_py() for item in tiny_log().items[tiny_log().users == 0].tolist()]
    assert found["history"] == sum(catalogue.number(item) is not None for item in mine)


def test_the_table_shows_places_titles_and_reasons(folder):
    done = protofed("recommend", "runs/shop", "--user", user(), "-n", 3, "--why", cwd=folder)
    lines = done.stdout.splitlines()
    first = ask(folder, "--user", user(), "-n", 1)["items"][0]["item"]
    assert lines[0].split()[:2] == ["item", "title"]
    assert any(str(first) in line for line in lines)
    assert "for the backbone alone" in " ".join(done.stdout.split())


def test_a_history_serves_somebody_unknown_and_says_what_it_does_not_know(folder):
    known = [str(item) for item in tiny_log().item_ids[:3].to_pylist()]
    done = protofed("recommend", "runs/shop", "--history", f"{known[0]}, nonsense,{known[1]}", "--json", cwd=folder)
    found = json.loads(done.stdout)
    assert (found["user"], found["history"], found["unknown"]) == (None, 2, ["nonsense"])
    assert "1 of 3 items of the history are unknown to this model: nonsense" in done.stderr
    empty = protofed("recommend", "runs/shop", "--history", "", "--json", cwd=folder)
    assert "no known history: everybody without one gets this answer" in empty.stderr
    assert len(json.loads(empty.stdout)["items"]) == 10


def test_a_user_with_few_events_is_served_and_told_so(folder):
    done = protofed("recommend", "runs/shop", "--user", "rare", "--json", cwd=folder)
    assert "user rare has 2 known events, too few to learn from: served from them directly" in done.stderr
    assert json.loads(done.stdout)["history"] == 2


def test_candidates_come_from_a_file_and_unknown_ones_are_counted(folder):
    some = [str(item) for item in tiny_log().item_ids[4:9].to_pylist()]
    (folder / "few.txt").write_text("\n".join([*some, "nonsense", some[0]]) + "\n")
    done = protofed("recommend", "runs/shop", "--user", user(), "--candidates", "few.txt", "--json", cwd=folder)
    assert "1 of 7 candidates are unknown to this model" in done.stderr
    ranked = [row["item"] for row in json.loads(done.stdout)["items"]]
    everything = [row["item"] for row in ask(folder, "--user", user(), "-n", 500)["items"]]
    assert [str(item) for item in ranked] == [str(item) for item in everything if str(item) in some]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["runs/shop"], "name one user: --user ID for somebody of the log, or --history a,b,c"),
        (["runs/shop", "--user", "a", "--history", "b"], "name one user"),
        (["runs/shop", "--user", "nobody"], "no device of a user 'nobody' among the"),
        (["runs/none", "--user", "a"], "no model at runs/none: there is no such folder"),
        (["data", "--user", "a"], "no model at data: it is no run's folder"),
        (["runs/shop", "--history", "", "-n", "0"], "n must be at least 1, got 0"),
        (["runs/shop", "--history", "", "--candidates", "none.txt"], "none.txt: candidates are a text file"),
        (["runs/shop", "--history", "", "--candidates", "bad.txt"], "none of its 2 lines is an item of this model"),
    ],
)
def test_mistakes_are_one_line(folder, arguments, told):
    (folder / "bad.txt").write_text("x\ny\n")
    assert told in refused("recommend", *arguments, cwd=folder)
