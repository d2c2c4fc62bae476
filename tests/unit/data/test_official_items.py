"""Item tables that lie beside official logs, and Gowalla's places inside the log."""

import json

from typer.testing import CliRunner

from protofed.cli.data import app
from protofed.data.datasets.items import official_items
from protofed.data.items import load_items
from protofed.data.prepared import load_log

HM_LOG = "t_dat,customer_id,article_id,price,sales_channel_id\n" + "".join(
    f"2020-09-{1 + n % 20:02},c{n % 4},0{108775015 + n % 3},0.1,2\n" for n in range(40)
)
ARTICLES = (
    "article_id,product_code,prod_name,product_type_no,product_type_name,detail_desc\n"
    "108775015,108775,Strap top,253,Vest top,Jersey top.\n"  # a spreadsheet has taken the zero away
    "0108775016,108775,Strap top,253,Vest top,\n"
)


def prepared(folder, dataset, **files):
    (folder / "raw").mkdir()
    for name, content in files.items():
        (folder / "raw" / name.replace("__", ".")).write_text(content)
    arguments = ["prepare", dataset, "--source", str(folder / "raw"), "--root", str(folder / "logs")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    table = load_items(dataset, folder / "logs")
    return done.stdout, None if table is None else table.to_pylist()


def test_articles_travel_with_purchases(tmp_path):
    said, items = prepared(tmp_path, "hm", transactions_train__csv=HM_LOG, articles__csv=ARTICLES)
    assert items == [
        {"item": "0108775015", "title": "Strap top", "text": "Jersey top.", "category": "Vest top"},
        {"item": "0108775016", "title": "Strap top", "text": None, "category": "Vest top"},
    ]
    assert "items.parquet: 2 items with title, text, category" in said
    log = load_log("hm", tmp_path / "logs", canonical=False)
    assert set(log.item_ids.to_pylist()) > {row["item"] for row in items}
    assert json.loads((tmp_path / "logs" / "hm" / "source.json").read_text())["items"] == "articles.csv"


def test_movies_businesses_and_places(tmp_path):
    ratings = "userId,movieId,rating,timestamp\n" + "".join(f"{n % 3},{n % 2 + 1},4.0,{10**9 + n}\n" for n in range(9))
    movies = 'movieId,title,genres\n1,"Sun, Rise (1995)",Drama|War\n2,B (1996),(no genres listed)\n'
    (tmp_path / "m").mkdir()
    _, items = prepared(tmp_path / "m", "movielens-20m", ratings__csv=ratings, movies__csv=movies)
    assert items == [
        {"item": 1, "title": "Sun, Rise (1995)", "category": "Drama|War"},
        {"item": 2, "title": "B (1996)", "category": "(no genres listed)"},
    ]
    checkins = "".join(
        f"{n % 3}\t2010-10-{1 + n:02}T10:00:00Z\t{40 + n % 2}.5\t{-73 - n % 2}.25\t{7 + n % 2}\n" for n in range(9)
    )
    checkins += "1\t2010-10-20T10:00:00Z\t400.0\t0.0\t9\n"  # no such latitude
    (tmp_path / "g").mkdir()
    _, items = prepared(tmp_path / "g", "gowalla", **{"loc-gowalla_totalCheckins__txt": checkins})
    assert items == [
        {"item": 7, "lat": 40.5, "lon": -73.25},
        {"item": 8, "lat": 41.5, "lon": -74.25},
        {"item": 9, "lat": None, "lon": None},
    ]
    review = {"user_id": "u", "business_id": "b", "stars": 4.0, "date": "2019-01-01 00:00:00"}
    business = {"business_id": "b", "name": "Café", "latitude": 1.0, "longitude": 2.0, "stars": 5, "review_count": 9,
                "categories": "Food, Tea"}  # fmt: skip
    (tmp_path / "y").mkdir()
    files = {"yelp_academic_dataset_review__json": json.dumps(review),
             "yelp_academic_dataset_business__json": json.dumps(business)}  # fmt: skip
    _, items = prepared(tmp_path / "y", "yelp", **files)
    assert items == [{"item": "b", "title": "Café", "category": "Food, Tea", "lat": 1.0, "lon": 2.0}]  # no stars


def test_a_log_without_a_table_beside_it_is_prepared_without_one(tmp_path):
    said, items = prepared(tmp_path, "hm", transactions_train__csv=HM_LOG)
    assert items is None
    assert said.count("\n") == 1
    assert official_items("taobao", tmp_path) is None
