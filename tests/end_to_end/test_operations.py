"""What docs/operations.md tells an operator to rely on."""

import csv
import random
from pathlib import Path

import pytest
from test_command_line import FAST, protofed, refused

import protofed as package
from protofed.privacy.accountant import epsilon, noise_for
from protofed.privacy.ledger import Release

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
FIRST = (Release(1.1282, 0.05, 160),)


@pytest.mark.slow
def test_a_second_stream_costs_what_the_page_says():
    page = PAGE.read_text()
    assert epsilon(FIRST * 2, 1e-5) == pytest.approx(4.77, abs=5e-3)
    assert epsilon(FIRST * 3, 1e-5) == pytest.approx(5.88, abs=5e-3)
    assert "cost 4.77 together, three 5.88" in page
    rest = noise_for(4.0, 1e-5, rate=0.05, rounds=160, spent=FIRST)
    assert f"# {rest:g}, to be given as" in page
    assert 3.99 < epsilon((*FIRST, Release(rest, 0.05, 160)), 1e-5) <= 4.0


def write_orders(path: Path, *, without: str = "") -> None:
    rng = random.Random(0)
    rows = [(f"c{n % 20:02d}", f"item-{rng.randrange(25)}", 1_700_000_000 + 3_600 * n) for n in range(800)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("user", "item", "time"), *(row for row in rows if row[0] != without)])


@pytest.mark.slow
def test_a_deleted_user_is_in_no_file_of_the_model_that_is_trained_without_it(tmp_path):
    more = ["--method", "protofed", "--share", "nothing", *FAST, "--set", "protofed.base_steps=2", "--cache", "cache"]
    write_orders(tmp_path / "orders.csv")
    write_orders(tmp_path / "fewer.csv", without="c07")
    assert protofed("data", "import", "orders.csv", "--as", "shop", cwd=tmp_path).returncode == 0
    assert protofed("run", "--dataset", "shop", *more, "--out", "runs/shop", cwd=tmp_path).returncode == 0
    assert protofed("recommend", "runs/shop", "--user", "c07", cwd=tmp_path).returncode == 0
    warm_ups = set((tmp_path / "cache").glob("*.safetensors"))

    package.save(package.load(tmp_path / "runs/shop"), tmp_path / "shipped", devices=False)
    assert "no device of a user 'c07' among the 0" in refused("recommend", "shipped", "--user", "c07", cwd=tmp_path)
    assert not any(b"c07" in path.read_bytes() for path in (tmp_path / "shipped").iterdir())

    again = ["data", "import", "fewer.csv", "--as", "shop", "--overwrite"]
    assert protofed(*again, cwd=tmp_path).returncode == 0
    line = refused("run", "--dataset", "shop", *more, "--out", "runs/shop", cwd=tmp_path)
    assert "holds a run on other events: the log has changed since; choose a new folder" in line
    assert protofed("run", "--dataset", "shop", *more, "--out", "runs/fewer", cwd=tmp_path).returncode == 0
    assert "no device of a user 'c07'" in refused("recommend", "runs/fewer", "--user", "c07", cwd=tmp_path)
    assert len(set((tmp_path / "cache").glob("*.safetensors")) - warm_ups) == 1  # trained anew
