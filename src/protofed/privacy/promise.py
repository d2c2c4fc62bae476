"""What a run's ledger promises, in words: ε with everything it means nothing without."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from protofed.errors import MissingExtra
from protofed.privacy.accountant import adjacency, epsilon, rounded_up
from protofed.privacy.ledger import SHARE, claim, claim_of_nothing, read_ledger, share_beside


def promised(ledger: Path, delta: float, *, nothing: bool = False) -> dict[str, object] | None:
    """What the run's ledger promises against both adversaries, or why no ε is stated; None where there is no claim.

    `nothing`: whatever leaves a device after the base block is in the ledger, if anything does.
    """
    releases, trust = read_ledger(ledger)
    if not releases and nothing:
        share = share_beside(ledger)
        zero = {"epsilon_release": 0.0, "epsilon_server": 0.0, "delta": 0.0, "unit": "user", "releases": []}
        return {**zero, SHARE: share, "claim": claim_of_nothing(share)}
    if not releases:
        return None
    said: dict[str, object] = {"trust": trust, "adjacency": adjacency(trust), "unit": "user", "delta": delta}
    share = share_beside(ledger)
    said |= {"releases": [asdict(release) for release in releases], SHARE: share}
    said["claim"] = claim([delta], [] if share is None else [share])
    try:
        said["epsilon_release"] = rounded_up(epsilon(releases, delta, trust=trust))
        said["epsilon_server"] = rounded_up(epsilon(releases, delta, trust=trust, adversary="server"))
    except MissingExtra as missing:
        said["unpriced"] = f"{missing}; then price it with `protofed privacy --ledger {ledger}`"
    return said


def promise_lines(said: object) -> Iterator[str]:
    """What was promised, for people; δ is in the claim."""
    if not isinstance(said, dict):
        yield "privacy: no claim; nothing this run shared was noised"
        return
    if not said["releases"]:
        yield f"privacy: {said['claim']}"
        return
    rounds = "; ".join(
        f"{r['stream']}: noise multiplier {r['noise_multiplier']:g}, rate {r['sampling_rate']:g}, {r['count']} rounds"
        for r in said["releases"]
    )
    about = f"{said['adjacency']}, per {said['unit']}, {said['trust']} trust; {rounds}"
    if "unpriced" in said:
        yield f"privacy: ε not computed ({said['unpriced']}); δ = {said['delta']:g}, {about}"
        return
    seen, server = (said[f"epsilon_{name}"] for name in ("release", "server"))
    against = "nothing is promised" if server is None else f"ε = {server:g}"
    yield f"privacy: ε = {seen:g} against who sees what is released, {against} against the server; {about}"
    yield f"  {said['claim']}"
