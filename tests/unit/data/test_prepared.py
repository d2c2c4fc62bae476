import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from protofed.data.interactions import from_codes
from protofed.data.prepared import load_log, prepared_names, save_log, source_of
from protofed.data.stats import stats, stats_of
from protofed.errors import DataError, DatasetNotFound

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
PUBLISHED = {
    "amazon_beauty": ((198_502, 22_363, 12_101), (198_502, 22_363, 12_101)),
    "amazon_sports": ((296_337, 35_598, 18_357), (296_337, 35_598, 18_357)),
    "movielens": ((100_836, 610, 9_724), (90_274, 610, 3_650)),
    "yelp": ((316_354, 30_431, 20_033), (316_354, 30_431, 20_033)),
    "gowalla_1k": ((157_251, 1_000, 24_209), (123_018, 997, 8_253)),
    "gowalla": ((138_957, 7_115, 21_509), (101_687, 3_456, 6_568)),
    "lastfm_30music": ((343_183, 14_262, 9_999), (336_285, 12_285, 9_968)),
    "retailrocket": ((97_381, 2_174, 29_905), (52_303, 1_154, 5_736)),
    "taobao": ((357_412, 31_882, 30_985), (321_868, 28_762, 22_791)),
    "hm": ((240_311, 68_984, 17_986), (100_305, 12_491, 4_331)),
}


@pytest.mark.shared
@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_of_the_real_logs_are_those_published_with_them(name):
    if not (SHARED / name).is_dir():
        pytest.skip(f"the real log {name} is not at {SHARED}")
    found = stats(name, SHARED)
    sizes = [(size.rows, size.users, size.items) for size in (found.raw, found.five_core)]
    assert tuple(sizes) == PUBLISHED[name]


def write(root: Path, name: str = "toy", **columns: object) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "interactions.parquet")
    return folder


def toy_log(name="toy", ids=("a", "b")):
    return from_codes(
        name,
        np.array([1, 0, 1]),
        np.array([0, 1, 0]),
        np.array([30, 10, 20]),
        pa.array(list(ids)),
        pa.array(["x", "y"]),
        ratings=np.array([5.0, 1.0, 4.0]),
        events=pa.array(["buy", "pv", "pv"]).dictionary_encode(),
        sessions=np.array([7, 8, 9]),
    )


def test_a_saved_log_comes_back_equal_with_its_optional_columns(tmp_path):
    log = toy_log()
    save_log(log, tmp_path, "toy", source={"family": "yelp"})
    again = load_log("toy", tmp_path, canonical=False)
    for column in ("users", "items", "times", "ratings", "sessions"):
        assert torch.equal(getattr(log, column), getattr(again, column))
    assert again.events.to_pylist() == log.events.to_pylist() == ["pv", "pv", "buy"]
    assert again.user_ids.to_pylist() == log.user_ids.to_pylist() == ["a", "b"]
    assert again.item_ids.to_pylist() == ["y", "x"]
    assert source_of("toy", tmp_path) == {"family": "yelp"}
    assert sorted(file.name for file in (tmp_path / "toy").iterdir()) == ["interactions.parquet", "source.json"]


def test_saving_the_same_log_twice_is_fine_and_another_one_is_refused_unless_told(tmp_path):
    save_log(toy_log(), tmp_path, "toy", source={})
    save_log(toy_log(), tmp_path, "toy", source={})
    before = (tmp_path / "toy" / "interactions.parquet").read_bytes()
    with pytest.raises(DataError, match="holds another log"):
        save_log(toy_log(ids=("a", "c")), tmp_path, "toy", source={})
    assert (tmp_path / "toy" / "interactions.parquet").read_bytes() == before
    save_log(toy_log(ids=("a", "c")), tmp_path, "toy", source={}, overwrite=True)
    assert load_log("toy", tmp_path, canonical=False).user_ids.to_pylist() == ["a", "c"]


def test_other_columns_are_ignored_and_rows_are_sorted_by_time(tmp_path):
    write(tmp_path, user=[5, 5, 9], item=["p", "q", "p"], timestamp=[30, 10, 30], price=[1.0, 2.0, 3.0])
    log = load_log("toy", tmp_path, canonical=False)
    assert log.times.tolist() == [10, 30, 30]
    assert [log.user_ids[u].as_py() for u in log.users.tolist()] == [5, 5, 9]
    assert [log.item_ids[i].as_py() for i in log.items.tolist()] == ["q", "p", "p"]


def test_the_family_in_source_json_decides_the_canonical_rule(tmp_path):
    rows = [(u, i) for u in range(6) for i in range(6)]
    columns = {"user": [u for u, _ in rows], "item": [i for _, i in rows], "timestamp": list(range(36))}
    rating = [1.0 if i == 5 else 5.0 for _, i in rows]
    folder = write(tmp_path, "films", **columns, rating=rating)
    assert len(load_log("films", tmp_path)) == 36
    (folder / "source.json").write_text(json.dumps({"family": "movielens"}))
    assert len(load_log("films", tmp_path)) == 30


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"user": [1], "item": [1]}, "found no timestamp"),
        ({"user": [1, None], "item": [1, 1], "timestamp": [1, 2]}, "user must never be null, found 1"),
        ({"user": [1], "item": [1], "timestamp": [-3]}, "found the negative -3"),
        ({"user": [1], "item": [1], "timestamp": [1_433_221_332_117]}, "divide them by 1000"),
        ({"user": [1.5], "item": [1], "timestamp": [3]}, "user must hold integers or strings, found double"),
        ({"user": [1], "item": [1], "timestamp": [3.5]}, "whole unix seconds"),
        ({"user": [1], "item": [1], "timestamp": ["2020"]}, "whole unix seconds"),
    ],
)
def test_a_prepared_log_that_breaks_a_rule_is_refused_in_one_line(tmp_path, columns, words):
    write(tmp_path, **columns)
    with pytest.raises(DataError, match=words) as caught:
        load_log("toy", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_damaged_parquet_file_is_refused_in_one_line(tmp_path):
    (write(tmp_path, user=[1], item=[1], timestamp=[3]) / "interactions.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(DataError, match="must be a whole parquet file") as caught:
        load_log("toy", tmp_path)
    assert "\n" not in str(caught.value)


def test_no_flipped_bit_of_a_prepared_log_makes_another_log(tmp_path):
    rng = np.random.default_rng(0)
    codes = (rng.integers(0, n, 400) for n in (20, 30))
    names = ([f"{kind}{n}" for n in range(size)] for kind, size in (("u", 20), ("i", 30)))
    log = from_codes("toy", *codes, np.sort(rng.integers(0, 10**9, 400)), *(pa.array(ids) for ids in names))
    save_log(log, tmp_path, "toy", source={})
    file = tmp_path / "toy" / "interactions.parquet"
    kept, whole, refused = load_log("toy", tmp_path), file.read_bytes(), 0
    for seed in range(200):
        draws = np.random.default_rng(seed)
        damaged = bytearray(whole)
        damaged[draws.integers(len(whole))] ^= 1 << int(draws.integers(8))
        file.write_bytes(damaged)
        try:
            read = load_log("toy", tmp_path)
        except DataError:
            refused += 1
            continue
        for name in ("users", "items", "times"):
            assert torch.equal(getattr(read, name), getattr(kept, name)), seed
        assert (read.user_ids, read.item_ids) == (kept.user_ids, kept.item_ids), seed
    assert refused > 100


def test_an_unknown_log_suggests_the_nearest_name(tmp_path):
    write(tmp_path, "gowalla_1k", user=[1], item=[1], timestamp=[3])
    with pytest.raises(DatasetNotFound, match="did you mean 'gowalla_1k'"):
        load_log("gowala-1k", tmp_path)
    assert prepared_names(tmp_path) == ("gowalla_1k",)


def test_a_log_that_is_empty_after_five_core_is_refused_and_counts_zero(tmp_path):
    write(tmp_path, user=[1, 2], item=[1, 1], timestamp=[3, 4])
    with pytest.raises(DataError, match="no event is left after the 5-core"):
        load_log("toy", tmp_path)
    found = stats("toy", tmp_path)
    assert (found.five_core.rows, found.canonical.rows, found.raw.rows) == (0, 0, 2)


def test_stats_of_a_small_log_are_those_counted_by_hand():
    found = stats_of(toy_log())
    assert (found.raw.rows, found.raw.users, found.raw.items) == (3, 2, 2)
    assert found.first == "1970-01-01T00:00:10Z"
    assert found.instants == 3
    assert found.repeat_share == pytest.approx(1 / 3, abs=1e-4)
    assert found.duplicate_rows == 0
    assert found.events == {"buy": 1, "pv": 2}
    assert found.mean_rating == pytest.approx(10 / 3, abs=1e-4)
