"""How much noise, and for how many rounds: the budget of a whole stream, settled before the first upload."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from protofed.config import PrivacyConfig
from protofed.errors import ConfigError
from protofed.privacy.ledger import Ledger, Release


@dataclass(frozen=True, slots=True)
class Stream:
    """Noised statistics of one kind, as a method asks for them or, in a plan, as they may be released."""

    name: str
    sampling_rate: float
    rounds: int  # releases in all slices together
    noise_multiplier: float = 0.0  # 0: to be solved
    share: float | None = None  # of ε, spent by this stream alone; None: what the others leave (one stream of a plan)


Plan = tuple[Stream, ...]


def check_paid(privacy: PrivacyConfig, streams: Sequence[Stream]) -> None:
    """Refuse a private run with neither a budget nor a noise for what it releases."""
    if not privacy.target_epsilon and not all(one.noise_multiplier or not one.rounds for one in streams):
        raise ConfigError(
            "a private run needs --target-epsilon or --noise-multiplier, got 0 for both; --mode nodp runs without noise"
        )


def plan_releases(privacy: PrivacyConfig, streams: Sequence[Stream], *, private: bool = True) -> Plan:
    """Every stream with its noise, solved for the target ε or given; with both, as many rounds as the target pays for.

    The number of rounds is fixed ahead: stopping early on what was seen would itself have to be paid for. Streams with
    a share are paid for first, in all slices; everything is priced together. Without privacy, all rounds, no noise.
    """
    if private:
        check_paid(privacy, streams)
    plan: dict[str, Stream] = {}
    for asked in sorted(streams, key=lambda one: one.share is None):
        spent = ledger(tuple(plan.values())) if asked.share is None else ()
        plan[asked.name] = _paid(privacy, asked, spent) if private and asked.rounds else _silent(asked)
    return tuple(plan[asked.name] for asked in streams)


def ledger(plan: Plan, made: Mapping[str, int] | None = None) -> Ledger:
    """What has been released once so many rounds of each stream were made; by default, all that the plan allows."""
    counts = ((one, one.rounds if made is None else min(made[one.name], one.rounds)) for one in plan)
    return tuple(Release(one.noise_multiplier, one.sampling_rate, count, one.name) for one, count in counts if count)


def _silent(asked: Stream) -> Stream:
    return replace(asked, noise_multiplier=0.0)


def _paid(privacy: PrivacyConfig, asked: Stream, spent: Ledger) -> Stream:
    """The stream with the noise that its part of the budget asks for, or with the rounds that it pays for."""
    from protofed.privacy.accountant import noise_for, rounds_within

    target, delta, trust, noise = privacy.target_epsilon, privacy.delta, privacy.trust, asked.noise_multiplier
    if not noise:
        own = target if asked.share is None else asked.share * target
        solved = noise_for(own, delta, asked.sampling_rate, asked.rounds, trust=trust, spent=spent)
        return replace(asked, noise_multiplier=solved)
    if not target or asked.share is not None:
        return asked
    rounds = rounds_within(target, delta, ledger((asked,))[0], trust=trust, spent=spent)
    if not rounds:
        raise ConfigError(
            f"noise multiplier {noise:g} spends more than ε = {target:g} in its first round; raise it or the target"
        )
    return replace(asked, rounds=rounds)
