"""How much noise, and for how many rounds: the budget of a whole stream, settled before the first upload."""

from dataclasses import dataclass

from protofed.config import PrivacyConfig
from protofed.errors import ConfigError
from protofed.privacy.ledger import Ledger, Release


@dataclass(frozen=True, slots=True)
class Plan:
    """The noise of every round and the number of rounds that may happen in all."""

    noise_multiplier: float
    rounds: int
    newcomer_noise: float = 0.0  # of the release of new items' rows, once a slice by everybody; 0: there is none


NEWCOMERS = "new items"


def plan(privacy: PrivacyConfig, n_slices: int, *, private: bool, newcomers: bool = False) -> Plan:
    """Noise solved for the target ε, or given; with both, as many rounds as the target pays for.

    The number of rounds is fixed ahead: stopping early on what was seen would itself have to be paid for. New items'
    rows, where they are released, are paid for first, in all slices; everything is priced together.
    """
    wanted = n_slices * privacy.rounds_per_slice
    if not private or not wanted:
        return Plan(0.0, wanted)
    target, noise = privacy.target_epsilon, privacy.noise_multiplier
    if not target and not noise:
        raise ConfigError(
            "a private run needs --target-epsilon or --noise-multiplier, got 0 for both; --mode nodp runs without noise"
        )
    rows = newcomer_noise(privacy, n_slices) if newcomers else 0.0
    spent = newcomer_releases(rows, n_slices)
    if not noise:
        from protofed.privacy.accountant import noise_for

        solved = noise_for(target, privacy.delta, privacy.sampling_rate, wanted, trust=privacy.trust, spent=spent)
        return Plan(solved, wanted, rows)
    if not target:
        return Plan(noise, wanted, rows)
    from protofed.privacy.accountant import rounds_within

    release = Release(noise, privacy.sampling_rate, wanted)
    paid = rounds_within(target, privacy.delta, release, trust=privacy.trust, spent=spent)
    if not paid:
        raise ConfigError(
            f"noise multiplier {noise:g} spends more than ε = {target:g} in its first round; raise it or the target"
        )
    return Plan(noise, paid, rows)


def newcomer_noise(privacy: PrivacyConfig, n_slices: int) -> float:
    """The noise of the release of new items' rows: given, or what its share of the budget asks for."""
    if privacy.newcomer_noise:
        return privacy.newcomer_noise
    if not privacy.target_epsilon:
        return 2 * privacy.noise_multiplier
    from protofed.privacy.accountant import noise_for

    share = privacy.newcomer_share * privacy.target_epsilon
    return noise_for(share, privacy.delta, 1.0, n_slices, trust=privacy.trust)


def newcomer_releases(noise: float, slices: int) -> Ledger:
    """The ledger of so many slices' releases of new items' rows."""
    return (Release(noise, 1.0, slices, NEWCOMERS),) if noise and slices else ()


def releases(privacy: PrivacyConfig, settled: Plan, rounds: int) -> Ledger:
    """The ledger after so many rounds."""
    done = min(rounds, settled.rounds)
    return (Release(settled.noise_multiplier, privacy.sampling_rate, done),) if done else ()
