"""Read a generated file in the Taobao format: our loader against plain polars, in time and in memory.

    python benchmarks/streaming_read.py --rows 20000000

Both read the same file in turn, each in a process of its own, so that neither inherits the other's memory. The last
line printed is one JSON object; the exit code is 1 where a limit is broken.
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

PEAK_LIMITS_GB = {20_000_000: 1.7, 100_000_000: 6.0}  # up to so many rows
TIME_LIMIT = 3.0  # times the plain read
USERS, ITEMS, CATEGORIES = 987_994, 4_162_024, 9_439
BEHAVIOURS, SHARES = ("pv", "cart", "fav", "buy"), (0.895, 0.95, 0.98)  # cumulative; the rest is buy
STRAY = 5e-4  # of the timestamps lie outside the official window
CHUNK = 2_000_000


def generate(path: Path, rows: int) -> None:
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
            pl.DataFrame(columns).write_csv(file, include_header=False)


def read_ours(path: Path) -> int:
    """How many rows our loader keeps."""
    from protofed.data.datasets.taobao import load

    return len(load(path))


def read_polars(path: Path) -> int:
    """How many rows polars reads into one frame."""
    import polars as pl

    return len(pl.read_csv(path, has_header=False))


READERS = {"ours": read_ours, "polars": read_polars}


def child(reader: str, path: Path) -> None:
    """Measure one read in this process; the libraries are imported before the clock starts."""
    import polars  # noqa: F401

    if reader == "ours":
        import protofed.data.datasets.taobao  # noqa: F401
    start = time.perf_counter()
    rows = READERS[reader](path)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(json.dumps({"reader": reader, "rows": rows, "seconds": seconds, "peak_gb": peak}))


def measured(path: Path, repeats: int) -> Iterator[dict[str, float | str]]:
    """One measurement per repeat and reader, interleaved."""
    for _ in range(repeats):
        for reader in READERS:
            command = [sys.executable, __file__, "--child", reader, "--file", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print(done.stdout.strip(), file=sys.stderr)
            yield json.loads(done.stdout)


def summary(rows: int, runs: list[dict[str, float | str]]) -> dict[str, float | int | bool]:
    """The figures of all repeats: median seconds, highest peak."""
    seconds = {name: statistics.median(float(r["seconds"]) for r in runs if r["reader"] == name) for name in READERS}
    peak = {name: max(float(r["peak_gb"]) for r in runs if r["reader"] == name) for name in READERS}
    ratio = seconds["ours"] / seconds["polars"]
    peak_limit = next((limit for most, limit in PEAK_LIMITS_GB.items() if rows <= most), float("inf"))
    return {
        "rows": rows,
        "ours_seconds": round(seconds["ours"], 2),
        "polars_seconds": round(seconds["polars"], 2),
        "ratio": round(ratio, 2),
        "ours_rows_per_second": round(rows / seconds["ours"]),
        "polars_rows_per_second": round(rows / seconds["polars"]),
        "ours_peak_gb": round(peak["ours"], 2),
        "polars_peak_gb": round(peak["polars"], 2),
        "within_limits": ratio <= TIME_LIMIT and peak["ours"] <= peak_limit,
    }


def main() -> None:
    """Generate, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child, asked.file)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "UserBehavior.csv"
        generate(path, asked.rows)
        result = summary(asked.rows, list(measured(path, asked.repeats)))
    print(json.dumps(result))
    sys.exit(0 if result["within_limits"] else 1)


if __name__ == "__main__":
    main()
