"""scripts/repeats.py sorts questions by when their item was first met; docs/more_logs.md holds what it prints."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
sys.path.insert(0, str(ROOT / "scripts"))

from repeats import KINDS, first_meetings, kinds  # noqa: E402

from protofed.cli.run import synthetic_world  # noqa: E402
from protofed.slices.stream import slice_log  # noqa: E402


def test_the_first_meeting_of_a_user_and_an_item_is_where_a_loop_finds_it():
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 5, 200), rng.integers(0, 9, 200)
    by_hand = [next(k for k in range(n + 1) if (users[k], items[k]) == (users[n], items[n])) for n in range(len(users))]
    assert first_meetings(users, items).tolist() == by_hand


def test_a_question_is_of_the_kind_that_a_loop_over_the_log_says():
    data = slice_log(synthetic_world().log, n_slices=3)
    pairs, first, seen = list(zip(data.log.users.tolist(), data.log.items.tolist(), strict=True)), {}, set()
    for position, pair in enumerate(pairs):
        first.setdefault(pair, position)
    for t in (1, 2, 3):
        bounds, asked = data.bounds[t], data.query_set(t, "test")
        for position, repeat, kind in zip(asked.positions, asked.subsets["repeat"], kinds(data, t), strict=True):
            met = first[pairs[position]]
            late = "met after its train part" if met >= bounds.train_end else "met in its train part"
            right = "met before the slice" if met < bounds.start else late
            assert KINDS[kind] == (right if repeat else "novel")
            seen.add(KINDS[kind])
    assert seen == set(KINDS)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the real logs are not at ../shared/data")
@pytest.mark.parametrize(("dataset", "slices"), [("retailrocket", 8), ("hm", 1)])
def test_the_page_holds_what_the_script_prints(dataset, slices):
    page = (ROOT / "docs" / "more_logs.md").read_text(encoding="utf-8")
    rows = ["protofed-sp (nodp)", "personal-memory", "full-retrain", "finetune-last", "frozen"]
    flags = ["--root", str(DATA), "--slices", str(slices)]
    words = [sys.executable, "scripts/repeats.py", "results/more", dataset, *rows, *flags]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said in page
