"""What a worker of `protofed bench` or `protofed tune` does: one run, or one trial of a search, told as JSON."""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protofed.cli.run import item_table, load
from protofed.config import from_toml
from protofed.errors import ProtoFedError, in_one_line

WORKER = ("env", "OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1", sys.executable, "-m", "protofed.cli.worker")


def work(text: str) -> None:
    """Do it; a user's mistake is one line on stderr and exit code 2, as everywhere."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # half-written files are cleared
    threading.Thread(target=end_with_the_bench, daemon=True).start()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    told = json.loads(text)
    try:
        (run_trial if "trial" in told else run_cell)(told)
    except (ProtoFedError, OSError) as problem:
        traceback.print_exc()
        print(f"error: {in_one_line(problem)}", file=sys.stderr)
        sys.exit(2)


def run_cell(told: Mapping[str, Any]) -> None:
    """One cell of a grid, as `protofed run` would do it."""
    from protofed.experiments.bench import PATIENCE, Job
    from protofed.experiments.run import Experiment, pick_device
    from protofed.features.build import content_of

    job = Job(**told)
    config = from_toml(job.config)
    log, items, cache = load(config, Path(job.root)), item_table(config.dataset, Path(job.root)), Path(job.cache)
    known = content_of(config.content, log, items, cache)
    experiment = Experiment(config, log, cache, pick_device(job.device), job.command, content=known)
    experiment.run(Path(job.folder), patience=PATIENCE)  # a worker of a bench that was killed may be in it still


def run_trial(told: Mapping[str, Any]) -> None:
    """One trial of a search; it leaves what came of it in its folder."""
    from protofed.cli.tune import Asked, known_of, planned
    from protofed.experiments import tuning
    from protofed.experiments.run import pick_device

    asked = Asked(**told)
    (search,) = planned(asked.flags, asked.settings, [asked.method], Path(asked.root), asked.slices, asked.trials)
    trial, device = search.trials[asked.trial], pick_device(asked.device)
    known = known_of(search, Path(asked.root), Path(asked.cache))
    tuning.run_trial(search, trial, Path(asked.out), Path(asked.cache), device, command=asked.command, content=known)


def end_with_the_bench() -> None:
    """Wait until standard input closes, which it does when the bench is gone, and end this process."""
    while os.read(0, 1024):  # not sys.stdin: its lock would be held at the interpreter's end
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)
    os._exit(1)


if __name__ == "__main__":
    work(sys.argv[1])
