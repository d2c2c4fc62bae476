"""Read a generated log: our loader against plain polars, in time and in memory.

    python benchmarks/streaming_read.py --rows 20000000                  # the loader of the Taobao format
    python benchmarks/streaming_read.py --rows 20000000 --case import    # `protofed data import`, three columns

All read the same file in turn, each in a process of its own, so that none inherits another's memory. The last
line printed is one JSON object; the exit code is 1 where a limit is broken. `command` is all of `protofed data import`,
the written parquet file and the counts included; no limit is set for it.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PEAK_LIMITS_GB = {"taobao": {20_000_000: 1.7, 100_000_000: 6.0}, "import": {20_000_000: 2.0}}  # up to so many rows
TIME_LIMIT = 3.0  # times the plain read
USERS, ITEMS, CATEGORIES = 987_994, 4_162_024, 9_439
BEHAVIOURS, SHARES = ("pv", "cart", "fav", "buy"), (0.895, 0.95, 0.98)  # cumulative; the rest is buy
STRAY = 5e-4  # of the timestamps lie outside the official window
CHUNK = 2_000_000


def generate(path: Path, rows: int, header: bool) -> None:
    """Write `rows` events, grouped by user and chronological inside each, as the official file is."""
    import numpy as np
    import polars as pl

    from protofed.data.datasets.taobao import WINDOW

    rng = np.random.default_rng(0)
    users = np.sort(rng.integers(1, USERS + 1, rows)).astype(np.int32)
    with path.open("wb") as file:
        for start in range(0, rows, CHUNK):
            user = users[start : start + CHUNK]
            item = (ITEMS * rng.random(len(user)) ** 2).astype(np.int64) + 1
            when = rng.integers(WINDOW[0], WINDOW[1] + 1, len(user))
            when = when[np.lexsort((when, user))]
            when[rng.random(len(user)) < STRAY] -= 30 * 86_400
            event = np.array(BEHAVIOURS)[np.searchsorted(SHARES, rng.random(len(user)))]
            columns = {"user": user, "item": item, "category": item % CATEGORIES, "event": event, "time": when}
            pl.DataFrame(columns).write_csv(file, include_header=header and start == 0)


def read_taobao(path: Path) -> int:
    """How many rows our loader keeps."""
    from protofed.data.datasets.taobao import load

    return len(load(path))


def read_own(path: Path) -> int:
    """How many rows the import reads into a log."""
    from protofed.data.own_log import Asked, read_log

    return len(read_log("toy", path, Asked(event="")).log)


def run_import(path: Path) -> int:
    """How many rows the whole import keeps."""
    from protofed.data.own_import import import_log
    from protofed.data.own_log import Asked

    with tempfile.TemporaryDirectory() as root:
        return import_log(path, "toy", Path(root), Asked(event="")).rows


def read_polars(path: Path) -> int:
    """How many rows polars reads into one frame."""
    import polars as pl

    return len(pl.read_csv(path, has_header=False))


def read_three_columns(path: Path) -> int:
    """The same, of the three columns that a log needs."""
    import polars as pl

    return len(pl.read_csv(path, columns=["user", "item", "time"]))


CASES = {
    "taobao": {"ours": read_taobao, "polars": read_polars},
    "import": {"ours": read_own, "polars": read_three_columns, "command": run_import},
}


def child(case: str, reader: str, path: Path) -> None:
    """Measure one read in this process; the libraries are imported before the clock starts."""
    import polars  # noqa: F401

    if reader != "polars":
        import protofed.data.datasets.taobao
        import protofed.data.own_import  # noqa: F401
    start = time.perf_counter()
    rows = CASES[case][reader](path)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(json.dumps({"reader": reader, "rows": rows, "seconds": seconds, "peak_gb": peak}))


def measured(case: str, path: Path, repeats: int) -> Iterator[dict[str, float | str]]:
    """One measurement per repeat and reader, interleaved."""
    for _ in range(repeats):
        for reader in CASES[case]:
            command = [sys.executable, __file__, "--case", case, "--child", reader, "--file", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print(done.stdout.strip(), file=sys.stderr)
            yield json.loads(done.stdout)


def summary(case: str, rows: int, runs: list[dict[str, float | str]]) -> dict[str, float | int | str | bool]:
    """The figures of all repeats: median seconds, highest peak."""
    readers = CASES[case]
    seconds = {name: statistics.median(float(r["seconds"]) for r in runs if r["reader"] == name) for name in readers}
    peak = {name: max(float(r["peak_gb"]) for r in runs if r["reader"] == name) for name in readers}
    ratio = seconds["ours"] / seconds["polars"]
    peak_limit = next((limit for most, limit in PEAK_LIMITS_GB[case].items() if rows <= most), float("inf"))
    return {
        "case": case,
        "rows": rows,
        **{f"{name}_seconds": round(seconds[name], 2) for name in readers},
        "ratio": round(ratio, 2),
        **{f"{name}_rows_per_second": round(rows / seconds[name]) for name in readers},
        **{f"{name}_peak_gb": round(peak[name], 2) for name in readers},
        "within_limits": ratio <= TIME_LIMIT and peak["ours"] <= peak_limit,
    }


def main() -> None:
    """Generate, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", choices=CASES, default="taobao")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.case, asked.child, asked.file)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "UserBehavior.csv"
        generate(path, asked.rows, header=asked.case == "import")
        result = summary(asked.case, asked.rows, list(measured(asked.case, path, asked.repeats)))
    print(json.dumps(result))
    sys.exit(0 if result["within_limits"] else 1)


if __name__ == "__main__":
    main()
