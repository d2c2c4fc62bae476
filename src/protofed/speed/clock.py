"""A system's side of the comparison: it plays as many rounds as it is told to, and says what they took.

The parent writes a number of rounds on a line of standard input; one JSON line comes back. Standard output is kept for
these lines: whatever else a system prints goes to standard error.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import psutil
import torch
from torch import Tensor


@dataclass(slots=True)
class Clock:
    """Times groups of rounds; what the last round ended with is told along."""

    out: TextIO
    process: psutil.Process = field(default_factory=psutil.Process)
    ended: tuple[Tensor, Tensor] | None = None  # prototypes, and the uploads of the round

    def rounds(self) -> Iterator[int]:
        """The numbers of the rounds to play, until nobody asks for more; the time between two belongs to the first."""
        number = 0
        self.say(ready=True)
        for line in sys.stdin:
            asked, used, began = int(line), self.cpu_seconds(), time.perf_counter()
            for _ in range(asked):
                yield number
                number += 1
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            took, used = time.perf_counter() - began, self.cpu_seconds() - used
            assert self.ended is not None
            v, z = (part.tolist() for part in self.ended)
            self.say(rounds=asked, seconds=took, cpu_seconds=used, memory=self.memory(), v=v, z=z)

    def say(self, **told: Any) -> None:
        """One JSON line."""
        print(json.dumps(told), file=self.out, flush=True)

    def family(self) -> list[psutil.Process]:
        """This process and all that it started."""
        return [self.process, *self.process.children(recursive=True)]

    def cpu_seconds(self) -> float:
        """Of the whole family so far."""
        used = 0.0
        for each in self.family():
            try:
                times = each.cpu_times()
            except psutil.NoSuchProcess:
                continue
            used += times.user + times.system
        return used

    def memory(self) -> int:
        """Bytes: this process's peak, or what the whole family shares out now where that is more."""
        peak, now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0
        for each in self.family():
            try:
                now += each.memory_full_info().pss
            except psutil.Error:
                continue
        return max(peak, now)


def own_output() -> TextIO:
    """Standard output for ourselves alone; from here on prints go to standard error."""
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept
