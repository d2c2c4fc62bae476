"""The ledger: every noisy statistic that left the devices, written down before it did."""

import dataclasses
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from protofed.errors import ConfigError, DataError
from protofed.files import write_text

Trust = Literal["central", "secure-aggregation", "local"]
NoiseSource = Literal["seed", "operating-system"]
FORMAT = "protofed-ledger-1"

SHARE = "later_users_with_base_events"  # in a run's environment.json and in what commands print as JSON
CLAIM = (
    "(ε, δ) joint user-level differential privacy for a user's events after the base block, add / remove all of them, "
    "δ = {delta}. Events in the base block are not protected ({share} later users have some). The catalogue, slice "
    "edges, the number of clients, preprocessing and hyper-parameters are taken as public; published metrics are not "
    "covered."
)


NOTHING = (
    "ε = 0 for a user's events after the base block: nothing made from them leaves the device. The catalogue, slice "
    "edges, preprocessing and hyper-parameters are taken as public; published metrics are not covered. Events in the "
    "base block were collected centrally and are not protected ({share} later users have some)."
)


def claim_of_nothing(share: float | None) -> str:
    """The claim of a run that shares nothing after the base block."""
    return NOTHING.format(share="some" if share is None else f"{100 * share:.3g} % of")


def claim(deltas: Collection[float], shares: Collection[float] = ()) -> str:
    """The claim at the δ of a run (or of several), and with the share of later users who have base events too."""
    figures = [f"{100 * share:.3g}" for share in (min(shares), max(shares))] if shares else []
    share = f"{' to '.join(dict.fromkeys(figures))} % of" if figures else "some"
    delta = " or ".join(f"{delta:g}".replace("e-0", "e-") for delta in sorted(deltas))
    return CLAIM.format(delta=delta, share=share)


def share_with_base_events(users: np.ndarray, base_end: int) -> float:
    """Which part of the users with an event after the base block has one in it; the log's events are in order."""
    later = np.unique(users[base_end:])
    return float(np.isin(later, users[:base_end]).mean()) if len(later) else 0.0


def share_beside(ledger: Path) -> float | None:
    """The share that the run wrote beside its ledger, if it did."""
    try:
        found = json.loads((ledger.parent / "environment.json").read_text(encoding="utf-8")).get(SHARE)
    except (OSError, ValueError, AttributeError):
        return None
    return float(found) if isinstance(found, int | float) else None


@dataclass(frozen=True, slots=True)
class Release:
    """`count` Gaussian releases of one stream: all that accounting needs, nothing else.

    The noise multiplier is the noise's standard deviation divided by the statistic's L2 sensitivity (add / remove one
    user; under local trust: exchange one upload). 0 means without noise.
    """

    noise_multiplier: float
    sampling_rate: float  # Poisson: each client's coin of a round, independent of everything before
    count: int = 1  # rounds
    stream: str = "prototypes"
    max_uploads: int | None = None  # a cap on one user's uploads over these rounds; None: every round

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise ConfigError(f"a noise multiplier must be a finite number >= 0, got {self.noise_multiplier}")
        if not 0 < self.sampling_rate <= 1:
            raise ConfigError(f"a sampling rate must lie above 0 and at most at 1, got {self.sampling_rate}")
        if self.count < 1:
            raise ConfigError(f"a release counts at least 1 round, got {self.count}")
        if self.max_uploads is not None and self.max_uploads < 1:
            raise ConfigError(f"a cap on a user's uploads must be at least 1, got {self.max_uploads}")

    @property
    def uploads(self) -> int:
        """The most uploads one user can make over these rounds, whatever the coins."""
        return self.count if self.max_uploads is None else min(self.count, self.max_uploads)


Ledger = tuple[Release, ...]


def add_release(ledger: Ledger, release: Release) -> Ledger:
    """The ledger with one more release; a run of equal ones without a cap is kept as one entry."""
    last = ledger[-1] if ledger else None
    if last is not None and last.max_uploads is None and replace(last, count=release.count) == release:
        return (*ledger[:-1], replace(last, count=last.count + release.count))
    return (*ledger, release)


def record_ahead(
    path: Path, ledger: Ledger, release: Release, *, trust: Trust = "central", noise: NoiseSource = "seed"
) -> Ledger:
    """The ledger with the release in it, on disk before the release is made.

    A crash between the two then overstates what was spent, never understates it.
    """
    ledger = add_release(ledger, release)
    write_ledger(path, ledger, trust=trust, noise=noise)
    return ledger


def write_ledger(path: Path, ledger: Ledger, *, trust: Trust = "central", noise: NoiseSource = "seed") -> None:
    """The ledger as JSON, whole or not at all, synchronised to disk."""
    write_text(path, to_json(ledger, trust=trust, noise=noise))


def to_json(ledger: Ledger, *, trust: Trust = "central", noise: NoiseSource = "seed") -> str:
    """The text of ledger.json. `noise` says whether the noise can be drawn again: `seed` is for simulation only."""
    releases = [dataclasses.asdict(release) for release in ledger]
    return json.dumps({"format": FORMAT, "trust": trust, "noise": noise, "releases": releases}, indent=2) + "\n"


def read_ledger(path: Path) -> tuple[Ledger, Trust]:
    """The releases in a file and the trust model they were made under."""
    if not path.is_file():
        raise DataError(f"no ledger at {path}; a run writes ledger.json in its folder")
    return parse_ledger(path.read_bytes(), path)


def parse_ledger(text: str | bytes, path: Path) -> tuple[Ledger, Trust]:
    """The releases in a text that was read from `path`."""
    try:
        return from_json(text if isinstance(text, str) else text.decode())
    except (ValueError, TypeError, KeyError, ConfigError) as problem:
        raise DataError(f"{path} is not a ledger of format {FORMAT}: {problem}") from problem


def from_json(text: str) -> tuple[Ledger, Trust]:
    """The inverse of `to_json`."""
    content: Any = json.loads(text)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"its format should be {FORMAT}")
    if content["trust"] not in get_args(Trust):
        raise ValueError(f"trust must be one of {', '.join(get_args(Trust))}, found {content['trust']!r}")
    return tuple(_release(entry) for entry in content["releases"]), content["trust"]


def _release(entry: dict[str, Any]) -> Release:
    """One entry; a whole number is a number too, for those who write ledgers by hand."""
    numbers = {name: float(entry[name]) for name in ("noise_multiplier", "sampling_rate")}
    return Release(**{**entry, **numbers})


def streams(ledger: Ledger) -> dict[str, int]:
    """How many rounds each stream has been released."""
    names = dict.fromkeys(release.stream for release in ledger)
    return {name: sum(release.count for release in ledger if release.stream == name) for name in names}
