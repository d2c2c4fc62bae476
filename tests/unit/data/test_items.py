"""Item tables: by guessed names, each item once, of the type of the log's items."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from protofed.data.interactions import from_columns
from protofed.data.items import load_items, read_items, without_row
from protofed.errors import DataError, DatasetNotFound

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
ABOUT = [
    {"item": "01", "title": "Six, wide", "text": "two\nlines", "category": "a|b", "lat": 40.5, "lon": -73.0},
    {"item": "1", "title": 'a "b"', "text": None, "category": None, "lat": None, "lon": None},
]


def written(folder: Path, content: bytes | str, name: str = "items.csv") -> Path:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


CSV = (
    "sku,extra,Product Name,description,genres,latitude,lng\n"
    '01,x,"Six, wide","two\nlines",a|b,40.5,-73\n1,y,"a ""b""",,,,\n'
)
JSON = [
    {
        "sku": "01",
        "name": "Six, wide",
        "description": "two\nlines",
        "tags": 1,
        "genres": ["a", "b"],
        "lat": 40.5,
        "lon": -73,
    },
    {"sku": "1", "name": 'a "b"', "description": "", "extra": {"a": 1}},
]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("items.csv", CSV),
        ("items.csv.gz", gzip.compress(CSV.encode())),
        ("items.csv", CSV.replace("\n", "\r\n").replace("two\r\n", "two\n")),
        ("items.jsonl", "".join(json.dumps(item) + "\n" for item in JSON)),
    ],
    ids=["csv", "packed", "windows", "jsonl"],
)
def test_items_are_read_by_the_names_of_their_columns(tmp_path, name, content):
    items = read_items(written(tmp_path, content, name), texts=True)
    assert items.table.to_pylist() == ABOUT
    assert items.columns["item"] == "sku"
    assert "extra" in items.dropped
    assert items.table.schema.types == [pa.large_string()] * 4 + [pa.float64()] * 2


def test_items_get_the_type_of_the_logs_items(tmp_path):
    file = written(tmp_path, "id,title\n1,a\n02,b\nx,c\n,d\n")
    whole, texts = read_items(file, texts=False), read_items(file, texts=True)
    assert (whole.table["item"].to_pylist(), whole.malformed) == ([1, 2], 2)
    assert (texts.table["item"].to_pylist(), texts.malformed) == (["1", "02", "x"], 1)
    with pytest.raises(DataError, match=r"id must identify the items of the log \(integers\), found 'x'"):
        read_items(written(tmp_path, "id,title\nx,a\n"), texts=False)
    floats = read_items(written(tmp_path, "id,title\n1.0,a\n2.0,b\n"), texts=False)
    assert floats.table["item"].to_pylist() == [1, 2]


def test_the_first_of_equal_items_is_kept_and_places_that_do_not_exist_are_left_out(tmp_path):
    rows = "1,a,90,180\n1,again,0,0\n2,b,90.1,0\n3,c,0,-181\n4,d,nan,0\n5,e,,7\n6,f,x,0\n"
    items = read_items(written(tmp_path, "item,title,lat,lon\n" + rows), texts=False)
    table = items.table.to_pydict()
    assert (table["item"], table["title"]) == ([1, 2, 3, 4, 5, 6], list("abcdef"))
    assert table["lat"] == [90.0, None, None, None, None, None]
    assert table["lon"] == [180.0, None, None, None, 7.0, 0.0]
    assert (items.duplicates, items.misplaced, items.malformed) == (1, 3, 0)


def test_the_column_the_log_calls_its_item_goes_before_others_that_could_be_it(tmp_path):
    file = written(tmp_path, "product_id,article_id,name\n1,7,a\n")
    assert read_items(file, log_column="articleId", texts=False).table["item"].to_pylist() == [7]
    with pytest.raises(DataError, match="product_id or article_id could be the item; call it sku, as the log does"):
        read_items(file, log_column="sku")
    with pytest.raises(DataError, match="no column is named like an item"):
        read_items(written(tmp_path, "a,b\n1,2\n"))


def test_a_stray_quote_costs_its_own_row_alone(tmp_path):
    file = written(tmp_path, 'item,title\n1,"a"\n2,"b\n3,c\n4,"d, e"\n')
    assert read_items(file, texts=False).table.to_pydict() == {"item": [1, 3, 4], "title": ["a", "c", "d, e"]}


def test_items_of_the_log_without_a_row_are_counted_whatever_the_types(tmp_path):
    items = read_items(written(tmp_path, "item,title\n1,a\n2,b\n9,c\n"), texts=False).table
    assert without_row(from_columns("toy", [1, 1, 1], [1, 2, 3], [1, 2, 3]), items) == 1
    assert without_row(from_columns("toy", ["u", "u"], ["9", "x"], [1, 2]), items) == 1


def test_a_log_has_the_items_beside_it_or_none(tmp_path):
    (tmp_path / "toy").mkdir()
    assert load_items("toy", tmp_path) is None
    table = pa.table({"item": ["1", "02"], "prod_name": ["a", None], "price": [1.0, 2.0]})
    pq.write_table(table, tmp_path / "toy" / "items.parquet")
    found = load_items("toy", tmp_path)
    assert found.to_pydict() == {"item": ["1", "02"], "title": ["a", None]}  # texts stay texts
    (tmp_path / "toy" / "items.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="must be a whole parquet file"):
        load_items("toy", tmp_path)
    with pytest.raises(DatasetNotFound):
        load_items("../toy", tmp_path)


REAL = {
    "gowalla": (21_509, pa.int64(), ["item", "title", "lat", "lon"]),
    "gowalla_1k": (24_209, pa.int64(), ["item", "lat", "lon"]),
    "hm": (105_542, pa.large_string(), ["item", "title", "text", "category"]),
    "movielens": (27_279, pa.int64(), ["item", "title", "category"]),
}


@pytest.mark.shared
@pytest.mark.parametrize("name", REAL)
def test_item_tables_of_the_real_logs_are_read_by_guessing(name):
    if not (SHARED / name).is_dir():
        pytest.skip(f"the real log {name} is not at {SHARED}")
    found = load_items(name, SHARED)
    raw = pq.read_table(SHARED / name / "items.parquet")
    rows, kind, columns = REAL[name]
    assert (found.num_rows, found.schema.field("item").type, found.column_names) == (rows, kind, columns)
    assert found["item"].to_pylist() == raw["item"].to_pylist()
    source = {"gowalla": "name", "hm": "prod_name", "movielens": "title"}.get(name)
    if source:
        assert found["title"].to_pylist() == [(text and text.strip()) or None for text in raw[source].to_pylist()]
