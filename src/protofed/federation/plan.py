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


def plan(privacy: PrivacyConfig, n_slices: int, *, private: bool) -> Plan:
    """Noise solved for the target ε, or given; with both, as many rounds as the target pays for.

    The number of rounds is fixed ahead: stopping early on what was seen would itself have to be paid for.
    """
    wanted = n_slices * privacy.rounds_per_slice
    if not private or not wanted:
        return Plan(0.0, wanted)
    target, noise = privacy.target_epsilon, privacy.noise_multiplier
    if not target and not noise:
        raise ConfigError(
            "a private run needs --target-epsilon or --noise-multiplier, got 0 for both; --mode nodp runs without noise"
        )
    if not noise:
        from protofed.privacy.accountant import noise_for

        solved = noise_for(target, privacy.delta, privacy.sampling_rate, wanted, trust=privacy.trust)
        return Plan(solved, wanted)
    if not target:
        return Plan(noise, wanted)
    from protofed.privacy.accountant import rounds_within

    paid = rounds_within(target, privacy.delta, Release(noise, privacy.sampling_rate, wanted), trust=privacy.trust)
    if not paid:
        raise ConfigError(
            f"noise multiplier {noise:g} spends more than ε = {target:g} in its first round; raise it or the target"
        )
    return Plan(noise, paid)


def releases(privacy: PrivacyConfig, settled: Plan, rounds: int) -> Ledger:
    """The ledger after so many rounds."""
    done = min(rounds, settled.rounds)
    return (Release(settled.noise_multiplier, privacy.sampling_rate, done),) if done else ()
