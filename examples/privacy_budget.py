"""What a plan costs in ε, before anything runs.

    python examples/privacy_budget.py

Every ε here is user-level, add or remove one user, δ = 1e-5, under central trust, against who sees what is released.
"""

from protofed.privacy.accountant import epsilon, noise_for, rounds_within
from protofed.privacy.ledger import Release

DELTA = 1e-5


def plans(target: float = 3.4) -> dict[str, float]:
    """A few questions one asks before training, and their answers."""
    every_round = noise_for(target, DELTA, rate=0.05, rounds=160)
    statistic = Release(every_round, sampling_rate=0.05, count=160)
    return {
        "noise for 160 rounds of 5 % of the users": every_round,
        "noise for 480 such rounds": noise_for(target, DELTA, rate=0.05, rounds=480),
        "noise for everybody once a slice, eight slices": noise_for(target, DELTA, rate=1.0, rounds=8),
        "ε of the first plan": epsilon((statistic,), DELTA),
        "ε of three statistics released so, together": epsilon((statistic,) * 3, DELTA),
        "ε of twice as many rounds at the same noise": epsilon((Release(every_round, 0.05, 320),), DELTA),
        "rounds of multiplier 1 that the budget pays for": rounds_within(target, DELTA, Release(1.0, 0.05, 1_000)),
    }


if __name__ == "__main__":
    for question, answer in plans().items():
        print(f"{question:<50} {answer:>8g}" if isinstance(answer, int) else f"{question:<50} {answer:>8.4f}")
