"""What every federated method's rounds have in common: the server's noise, their timetable, reports and costs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from protofed.privacy.mechanism import Noise, seeded_noise
from protofed.seeds import stream
from protofed.server.aggregate import RoundReport


@dataclass(frozen=True, slots=True)
class Costs:
    """What one client sends and receives in a round, and how many numbers learn: for all together, and of each."""

    bytes_up: int
    bytes_down: int
    trainable_parameters: int
    trainable_parameters_per_user: int | float

    def diagnostics(self) -> dict[str, int | float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def server_noise(seed: int, round_: int) -> Noise:
    """The noise the server of a simulation adds in a round."""
    return seeded_noise(stream(seed, "server noise", round_))


def timetable(steps: int, rounds: int) -> Iterator[tuple[str, int]]:
    """Steps and rounds in the order they happen, each spread evenly over the slice, a step before a round."""
    events = [((i + 1) / steps, 0, i) for i in range(steps)] + [((i + 1) / rounds, 1, i) for i in range(rounds)]
    for _, kind, number in sorted(events):
        yield ("round" if kind else "step"), number


def summarise_rounds(reports: Sequence[RoundReport]) -> dict[str, int | float]:
    """What the run's log keeps of a slice's rounds: means over them; what nobody measured is left out."""
    if not reports:
        return {"rounds": 0}
    means: dict[str, list[float]] = {
        "uploads_per_round": [report.uploads for report in reports],
        "client_loss": [report.loss for report in reports[-1:]],
        "upload_norm": [report.moved for report in reports],
        "clipped_share": [report.clipped for report in reports],
        "signal_to_noise": [report.signal_to_noise for report in reports],
        "smallest_distance": [report.smallest_distance for report in reports[-1:]],
    }
    told = {name: sum(values) / len(values) for name, values in means.items()}
    refused = sum(report.refused for report in reports)
    kept = {name: value for name, value in told.items() if math.isfinite(value)}
    return {"rounds": len(reports), **kept, **({"refused": refused} if refused else {})}
