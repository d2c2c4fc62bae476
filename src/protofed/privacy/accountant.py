"""ε of a ledger, and the noise a budget asks for; pure functions of the releases and of δ.

Two adversaries. Who sees only what is *released* (the prototypes) does not know who took part, so that Poisson sampling
amplifies. The *server* sees more: under central trust everything, so nothing is promised against it; under secure
aggregation the noised sums and, as it draws the coins, who took part; under local trust every noised upload.
Without sampling the composition of Gaussians is one Gaussian, priced exactly (Balle and Wang 2018; Dong, Roth and Su
2019); with it dp-accounting prices by privacy loss distributions (PLD, tight) or by Rényi divergences (RDP, looser).
"""

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from scipy import special
from scipy.optimize import brentq
from scipy.stats import binom

from protofed.errors import ConfigError, MissingExtra
from protofed.privacy.ledger import Ledger, Release, Trust

Adversary = Literal["release", "server"]
Accountant = Literal["pld", "rdp"]
UNIT = "user"
STEP = 1e-4  # noise multipliers are rounded up to it
LARGEST_MULTIPLIER = 1e5

# What can be priced in seconds and without overflow; far beyond it no promise is left, or none is made.
MULTIPLIERS = (1e-4, 1e7)
SMALLEST_RATE = 1e-12
SAMPLED_MULTIPLIER = 0.02  # the least with sampling: one loss is spread over 1 / multiplier² of the grid
MOST_ROUNDS, MOST_SAMPLED_ROUNDS = 10**9, 10**6
MOST_KINDS = 200  # different noises and rates in one ledger
MOST_POINTS = 1e7  # of the composed privacy loss distribution
MOST_SEPARATION = 1e6  # of the two Gaussians that an unsampled ledger comes down to: ε = 5e11
SMALLEST_DELTA = 1e-15  # the privacy loss distributions leave tails of this mass out


class BeyondPricing(ConfigError):
    """A ledger whose ε would take too long, too much memory or more than a float."""


def epsilon(
    ledger: Ledger,
    delta: float,
    *,
    adversary: Adversary = "release",
    trust: Trust = "central",
    accountant: Accountant = "pld",
) -> float:
    """ε of everything in the ledger together, at δ; infinite where nothing is promised.

    Neighbouring logs differ by one user, added or removed; under local trust by one user's data exchanged.
    """
    check_delta(delta)
    if not ledger:
        return 0.0
    if any(release.noise_multiplier == 0 for release in ledger) or (trust == "central" and adversary == "server"):
        return math.inf
    check_priceable(ledger)
    if hides_coins(trust, adversary) and any(release.sampling_rate < 1 for release in ledger):
        check_priceable_sampled(ledger)
        price = _pld_epsilon if accountant == "pld" else _rdp_epsilon
        return price(ledger, delta)
    seen = tuple((release.noise_multiplier, release.uploads) for release in ledger)
    if accountant == "rdp":
        return _rdp_epsilon(tuple(Release(multiplier, 1.0, uploads) for multiplier, uploads in seen), delta)
    return gaussian_epsilon(math.sqrt(sum(uploads / multiplier**2 for multiplier, uploads in seen)), delta)


def hides_coins(trust: Trust, adversary: Adversary) -> bool:
    """Whether this adversary does not learn the coins.

    Under local trust no amplification is claimed: an absent client's noise is absent too.
    """
    return adversary == "release" and trust != "local"


def adjacency(trust: Trust) -> str:
    """The neighbouring relation, in words."""
    return "replace one user" if trust == "local" else "add or remove one user"


def noise_for(
    target_epsilon: float,
    delta: float,
    rate: float,
    rounds: int,
    accountant: Accountant = "pld",
    *,
    adversary: Adversary = "release",
    trust: Trust = "central",
    max_uploads: int | None = None,
    spent: Ledger = (),
) -> float:
    """The smallest noise multiplier, rounded up to 1e-4, that keeps these rounds and what is spent in the target."""
    check_target(target_epsilon)
    check_delta(delta)
    if trust == "central" and adversary == "server":
        raise ConfigError(
            "no noise protects against a server under central trust: it sees the uploads before the noise"
        )

    def enough(steps: int) -> bool:
        release = Release(steps * STEP, rate, rounds, max_uploads=max_uploads)
        try:
            price = epsilon((*spent, release), delta, adversary=adversary, trust=trust, accountant=accountant)
        except BeyondPricing:  # its ε is far too large: more noise is never wrong
            return False
        return price <= target_epsilon

    low, high = _bracket(enough)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return round(high * STEP, 4)


def _bracket(enough: Any) -> tuple[int, int]:
    """A number of steps that is not enough and a larger one that is."""
    high = round(1 / STEP)
    while not enough(high):
        high *= 2
        if high * STEP > LARGEST_MULTIPLIER:
            raise ConfigError(
                f"no noise multiplier up to {LARGEST_MULTIPLIER:g} keeps this budget: it is spent, or too small"
            )
    low = high // 2
    while low and enough(low):
        low, high = low // 2, low
    return low, high


def rounds_within(
    target_epsilon: float,
    delta: float,
    release: Release,
    *,
    spent: Ledger = (),
    trust: Trust = "central",
    accountant: Accountant = "pld",
) -> int:
    """How many of the release's rounds the budget still pays for: uploads stop after them."""

    def fits(count: int) -> bool:
        ledger = (*spent, Release(release.noise_multiplier, release.sampling_rate, count)) if count else spent
        try:
            return epsilon(ledger, delta, trust=trust, accountant=accountant) <= target_epsilon
        except BeyondPricing:  # its ε is far too large
            return False

    low, high = 0, release.count + 1
    if not fits(0):
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def gaussian_delta(epsilon_: float, mu: float) -> float:
    """δ(ε) of N(0, 1) against N(μ, 1), exactly."""
    if mu == 0:
        return 0.0
    above = special.ndtr(mu / 2 - epsilon_ / mu)
    return float(above - math.exp(epsilon_ + special.log_ndtr(-mu / 2 - epsilon_ / mu)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε at which N(0, 1) and N(μ, 1) are (ε, δ)-indistinguishable, exactly."""
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    highest = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))  # the classical bound
    return float(brentq(lambda e: gaussian_delta(e, mu) - delta, 0.0, highest, xtol=1e-9))


def delta_of(ledger: Ledger, epsilon_: float) -> float:
    """δ at a given ε, for who sees only what is released: the PLD curve."""
    return float(_composed(ledger).get_delta_for_epsilon(epsilon_))


def usual_uploads(release: Release, delta: float) -> tuple[int, int]:
    """How many uploads a user makes on average over these rounds, and how many only a share δ of users exceed."""
    mean = math.ceil(release.sampling_rate * release.count - 1e-9)
    rare = int(binom.isf(delta, release.count, release.sampling_rate))
    return min(mean, release.uploads), min(rare, release.uploads)


@dataclass(frozen=True, slots=True)
class Guarantee:
    """One ε and everything it means nothing without."""

    trust: Trust
    adversary: Adversary
    adjacency: str
    unit: str
    delta: float
    uploads: int  # a user's uploads over all rounds that this ε holds for
    pld: float
    rdp: float
    note: str


def guarantees(ledger: Ledger, delta: float) -> list[Guarantee]:
    """Every trust model against both adversaries, at the most uploads the ledger allows a user."""
    unsampled = _both(ledger, delta, "server", "secure-aggregation")
    sampled = _both(ledger, delta, "release", "central")
    uploads = sum(release.uploads for release in ledger)
    rows = []
    for (trust, adversary), note in NOTES.items():
        pld, rdp = sampled if hides_coins(trust, adversary) else unsampled
        if (trust, adversary) == ("central", "server"):
            pld = rdp = math.inf
        rows.append(Guarantee(trust, adversary, adjacency(trust), UNIT, delta, uploads, pld, rdp, note))
    return rows


def _both(ledger: Ledger, delta: float, adversary: Adversary, trust: Trust) -> tuple[float, float]:
    tight = epsilon(ledger, delta, adversary=adversary, trust=trust)
    return tight, epsilon(ledger, delta, adversary=adversary, trust=trust, accountant="rdp")


NOTES: dict[tuple[Trust, Adversary], str] = {
    ("central", "release"): "the coins are secret; the server is trusted to clip, to add the noise and to forget",
    ("central", "server"): "no guarantee: the server sees every upload before the noise",
    (
        "secure-aggregation",
        "release",
    ): "the coins are secret; noise from the devices, scaled to a lower bound on honest ones",
    ("secure-aggregation", "server"): "the server draws the coins: no amplification; noise must cover all rows",
    ("local", "release"): "what is released follows from what the server saw; no amplification is claimed",
    ("local", "server"): "every upload is noised on its device, all rows of it; one upload a round",
}


def rounded_up(price: float) -> float | None:
    """An ε to four decimals, upwards, because it is an upper bound; None where nothing is promised."""
    return math.ceil(price * 1e4 - 1e-6) / 1e4 if math.isfinite(price) else None


def check_delta(delta: float) -> None:
    """Refuse a δ that no accounting has a meaning for."""
    if not 0 < delta < 1:
        raise ConfigError(f"delta must lie strictly between 0 and 1, got {delta}; the project uses 1e-5")


def check_priceable(ledger: Ledger) -> None:
    """Refuse noises and numbers of rounds whose ε no float holds."""
    low, high = MULTIPLIERS
    for release in ledger:
        if not low <= release.noise_multiplier <= high:
            raise BeyondPricing(
                f"ε is computed for noise multipliers from {low:g} to {high:g}, got {release.noise_multiplier:g}; "
                "give one in between"
            )
        if not isinstance(release.count, int) or not isinstance(release.uploads, int):
            raise ConfigError(f"rounds and uploads are whole numbers, got {release.count} and {release.uploads}")
    if (rounds := sum(release.count for release in ledger)) > MOST_ROUNDS:
        raise BeyondPricing(f"ε is computed for at most {MOST_ROUNDS:,} rounds, got {rounds:,}; lower the rounds")
    if (mu := _separation(ledger)) > MOST_SEPARATION:
        raise BeyondPricing(f"this noise promises nothing: without sampling ε is about {mu * mu / 2:.0e}; raise it")


def check_ahead(ledger: Ledger, *, trust: Trust = "central") -> None:
    """Refuse a ledger whose ε will not be computed, as far as that can be told without dp-accounting."""
    check_priceable(ledger)
    if hides_coins(trust, "release") and any(release.sampling_rate < 1 for release in ledger):
        check_sampled(ledger)


def check_priceable_sampled(ledger: Ledger) -> None:
    """Refuse a ledger whose privacy loss distribution would be too large."""
    check_sampled(ledger)
    largest = MOST_POINTS * _grid(ledger)
    if _separation(ledger) ** 2 > largest and (price := _rdp_epsilon(ledger, SMALLEST_DELTA)) > largest:
        raise BeyondPricing(
            f"this noise promises nothing: by RDP ε is about {price:.0e}, and it is computed up to {largest:.0e}; "
            "raise the noise, or lower the rate or the rounds"
        )


def check_sampled(ledger: Ledger) -> None:
    """Refuse sampled releases with too little noise, at too low a rate, too many or of too many kinds."""
    if (rate := min(release.sampling_rate for release in ledger)) < SMALLEST_RATE:
        raise ConfigError(
            f"ε is computed for sampling rates of {SMALLEST_RATE:g} and more, got {rate:g}; raise the rate"
        )
    least, rounds = min(release.noise_multiplier for release in ledger), sum(release.count for release in ledger)
    if least < SAMPLED_MULTIPLIER:
        raise BeyondPricing(
            f"with sampling, ε is computed for noise multipliers of {SAMPLED_MULTIPLIER:g} and more, got {least:g}; "
            "raise the noise, or give --rate 1"
        )
    if rounds > MOST_SAMPLED_ROUNDS:
        raise BeyondPricing(
            f"with sampling, ε is computed for at most {MOST_SAMPLED_ROUNDS:,} rounds, got {rounds:,}; lower the rounds"
        )
    if (kinds := len(_counted(ledger))) > MOST_KINDS:
        raise BeyondPricing(f"ε is computed for at most {MOST_KINDS} different noises and rates, got {kinds}")


def _separation(ledger: Ledger) -> float:
    """The distance of the two Gaussians that the ledger is without sampling."""
    return math.sqrt(sum(release.count / release.noise_multiplier**2 for release in ledger))


def check_target(target_epsilon: float) -> None:
    """Refuse a budget that is not a positive number."""
    if not 0 < target_epsilon < math.inf:
        raise ConfigError(f"the target epsilon must be a finite number above 0, got {target_epsilon}")


def _pld_epsilon(ledger: Ledger, delta: float) -> float:
    return float(_composed(ledger).get_epsilon_for_delta(delta))


def _composed(ledger: Ledger) -> Any:
    """The privacy loss distribution of all releases together, rounded pessimistically."""
    try:
        from dp_accounting.pld import privacy_loss_distribution as pld
    except ImportError as missing:
        raise MissingExtra("dp-accounting") from missing
    grid = _grid(ledger)
    whole = None
    for (multiplier, rate), count in _counted(ledger).items():
        part = pld.from_gaussian_mechanism(multiplier, sampling_prob=rate, value_discretization_interval=grid)
        part = part.self_compose(count)
        whole = part if whole is None else whole.compose(part)
    return whole


def _grid(ledger: Ledger) -> float:
    """How finely privacy losses are rounded."""
    least = min(release.noise_multiplier for release in ledger)
    return 5e-3 if least <= 0.5 else 1e-3 if least <= 2 else 1e-4


def _rdp_epsilon(ledger: Ledger, delta: float) -> float:
    try:
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant
    except ImportError as missing:
        raise MissingExtra("dp-accounting") from missing
    accountant = RdpAccountant()
    with _quiet():
        for (multiplier, rate), count in _counted(ledger).items():
            event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(multiplier))
            accountant.compose(event, count)
        return float(accountant.get_epsilon(delta))


def _counted(ledger: Ledger) -> dict[tuple[float, float], int]:
    """Rounds by noise and rate: releases of different streams compose like rounds of one."""
    counts: dict[tuple[float, float], int] = {}
    for release in ledger:
        key = (release.noise_multiplier, release.sampling_rate)
        counts[key] = counts.get(key, 0) + release.count
    return counts


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without a line for each Rényi order that does not converge: leaving one out only loosens the bound."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
