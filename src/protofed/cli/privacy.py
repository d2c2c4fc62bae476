"""`protofed privacy`: the noise a budget asks for, or ε of a noise or of a ledger, against both adversaries."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from protofed.errors import ConfigError, DataError

if TYPE_CHECKING:
    from protofed.privacy.accountant import Guarantee
    from protofed.privacy.ledger import Ledger, Release, Trust

LARGEST_TARGET = 30  # a larger ε promises nothing, and the search for its noise can take minutes
MOST_ROUNDS = 100_000


def privacy(
    target_epsilon: Annotated[float | None, typer.Option(help="A budget: print the noise it needs.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="A noise: print the ε it gives.")] = None,
    ledger: Annotated[
        list[Path] | None, typer.Option(help="A run's ledger.json: print its ε; repeated, of all of them together.")
    ] = None,
    delta: Annotated[float, typer.Option(help="δ of the claim.")] = 1e-5,
    rate: Annotated[float, typer.Option(help="Each user's chance to take part in a round; 1: everybody.")] = 0.05,
    rounds: Annotated[int, typer.Option(help="Rounds over all slices together.")] = 160,
    max_uploads: Annotated[int | None, typer.Option(help="A cap on one user's uploads over all rounds.")] = None,
    trust: Annotated[str | None, typer.Option(help="Who adds the noise: central, secure-aggregation or local.")] = None,
    accountant: Annotated[str, typer.Option(help="Solve with pld or rdp; both are shown.")] = "pld",
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Compute the noise a privacy budget needs, or the ε of a noise or of a ledger.

    No ε is printed without its δ, unit, adjacency, trust model and adversary.
    """
    from protofed.privacy.accountant import Accountant, adjacency, guarantees, noise_for
    from protofed.privacy.ledger import SHARE, Release, Trust, claim, share_beside

    check_size(delta, rounds)
    if sum(given is not None for given in (target_epsilon, noise_multiplier, ledger or None)) != 1:
        raise ConfigError("give exactly one of --target-epsilon, --noise-multiplier and --ledger")
    solver: Accountant = _one_of("--accountant", accountant, get_args(Accountant))
    trusted: Trust = _one_of("--trust", trust or "central", get_args(Trust))
    answer: dict[str, Any] = {"claim": claim([delta]), "delta": delta, "unit": "user"}
    if ledger:
        releases, written = read_all(ledger)
        trusted = trusted if trust else written
        shares = [share for each in ledger if (share := share_beside(each)) is not None]
        if len(shares) == len(ledger):
            answer |= {SHARE: max(shares), "claim": claim([delta], shares)}
    else:
        if target_epsilon is not None:
            check_budget(target_epsilon)
            given: Any = {"trust": trusted, "max_uploads": max_uploads}
            solvers = get_args(Accountant)
            needed = {name: noise_for(target_epsilon, delta, rate, rounds, name, **given) for name in solvers}
            noise_multiplier = needed[solver]
            answer |= {"target_epsilon": target_epsilon, "accountant": solver, "noise_for_target": needed}
        assert noise_multiplier is not None
        releases = (Release(noise_multiplier, rate, rounds, max_uploads=max_uploads),)
        answer |= {"noise_multiplier": noise_multiplier, "rate": rate, "rounds": rounds}
        answer |= {"noise_std": _stds(noise_multiplier)}
    told = ("stream", "noise_multiplier", "sampling_rate", "count")
    answer |= {"trust": trusted, "adjacency": adjacency(trusted)}
    answer |= {"releases": [{name: getattr(release, name) for name in told} for release in releases]}
    promised = guarantees(releases, delta)
    check_promises(promised)
    answer["guarantees"] = [_row(guarantee, releases) for guarantee in promised]
    print(json.dumps(answer, indent=2, ensure_ascii=False)) if as_json else show(answer)


def check_size(delta: float, rounds: int) -> None:
    """Refuse a δ below what the accountants resolve, and more rounds than are priced in seconds."""
    from protofed.privacy.accountant import SMALLEST_DELTA, check_delta

    check_delta(delta)
    if delta < SMALLEST_DELTA:
        raise ConfigError(f"--delta must be at least {SMALLEST_DELTA:g}, got {delta}; the project uses 1e-5")
    if rounds > MOST_ROUNDS:
        raise ConfigError(f"--rounds must be at most {MOST_ROUNDS:,}, got {rounds:,}; the default is 160")


def check_budget(target: float) -> None:
    """Refuse a budget that is none, or that promises nothing."""
    from protofed.privacy.accountant import check_target

    check_target(target)
    if target > LARGEST_TARGET:
        raise ConfigError(f"--target-epsilon must be at most {LARGEST_TARGET}, got {target:g}; the project uses 3.4")


def check_promises(promised: "list[Guarantee]") -> None:
    """Refuse ε = 0: then δ alone pays for what is learned of a user."""
    from protofed.privacy.accountant import rounded_up

    if any(rounded_up(price) == 0 for guarantee in promised for price in (guarantee.pld, guarantee.rdp)):
        raise ConfigError(
            f"at δ = {promised[0].delta:g} this comes out as ε = 0, which nothing that learns from a user has: "
            "δ pays for all of it; give a smaller --delta, less noise or a higher --rate"
        )


def read_all(ledgers: list[Path]) -> "tuple[Ledger, Trust]":
    """The releases of all files, one after the other, and the trust model of all of them."""
    from protofed.privacy.ledger import read_ledger

    found = []
    for path in ledgers:
        try:
            found.append(read_ledger(path))
        except (OSError, OverflowError, RecursionError) as broken:
            raise DataError(f"{path}: cannot be read as a ledger: {broken}; a run writes ledger.json") from broken
    for path, (releases, _) in zip(ledgers, found, strict=True):
        if not releases:  # not ε = 0: what was trained without the mechanism is not in the ledger either
            raise ConfigError(
                f"{path} holds no release, so no ε applies: with --share nothing nothing left the devices, and methods "
                "that train without the mechanism carry no claim"
            )
    trusts = sorted({trust for _, trust in found})
    if len(trusts) > 1:
        raise ConfigError(f"ledgers of one trust model add up, these have {' and '.join(trusts)}; price each alone")
    return tuple(release for releases, _ in found for release in releases), found[0][1]


def show(answer: dict[str, Any]) -> None:
    """The answer as text: the noise, the table, the claim."""
    if "target_epsilon" in answer:
        needed = answer["noise_for_target"]
        print(
            f"noise multiplier for ε = {answer['target_epsilon']:g}, δ = {answer['delta']:g}, "
            f"{answer['trust']} trust: PLD {needed['pld']:.4f}, RDP {needed['rdp']:.4f}"
        )
    for release in answer["releases"]:
        print(
            f"{release['stream']}: noise multiplier {release['noise_multiplier']:g}, "
            f"rate {release['sampling_rate']:g}, {release['count']} rounds"
        )
    print(f"\n{'trust':<20}{'adversary':<11}{'adjacency':<24}{'uploads':>7}{'ε (PLD)':>11}{'ε (RDP)':>11}  note")
    for row in answer["guarantees"]:
        print(_line(row, row["uploads"], row["epsilon"], row["note"]))
        for fewer in row.get("fewer_uploads", []):
            print(_line(row | {"adjacency": ""}, fewer["uploads"], fewer["epsilon"], fewer["note"]))
    print(f"\nPer {answer['unit']}, over all rounds together: {answer['claim']}")


def _line(row: dict[str, Any], uploads: int, prices: dict[str, float | None], note: str) -> str:
    pld, rdp = (_shown(price) for price in (prices["pld"], prices["rdp"]))
    return f"{row['trust']:<20}{row['adversary']:<11}{row['adjacency']:<24}{uploads:>7}{pld:>11}{rdp:>11}  {note}"


def _shown(price: float | None) -> str:
    """An ε in three decimals, or four where three would show zero."""
    return "none" if price is None else f"{price:.3f}" if price >= 1e-3 else f"{price:.4f}"


def _row(guarantee: "Guarantee", ledger: "Ledger") -> dict[str, Any]:
    """A guarantee as JSON: an ε without meaning is null, never a number."""
    from protofed.privacy.accountant import rounded_up

    row: dict[str, Any] = {
        "trust": guarantee.trust,
        "adversary": guarantee.adversary,
        "epsilon": {"pld": rounded_up(guarantee.pld), "rdp": rounded_up(guarantee.rdp)},
        "delta": guarantee.delta,
        "adjacency": guarantee.adjacency,
        "unit": guarantee.unit,
        "rate": [release.sampling_rate for release in ledger],
        "rounds": [release.count for release in ledger],
        "uploads": guarantee.uploads,
        "note": guarantee.note,
    }
    sees_uploads = guarantee.adversary == "server" and guarantee.trust != "central"
    if sees_uploads and len(ledger) == 1 and ledger[0].sampling_rate < 1:
        row["fewer_uploads"] = _fewer(guarantee, ledger[0])
    return row


def _fewer(guarantee: "Guarantee", release: "Release") -> list[dict[str, Any]]:
    """ε of a user whose coins came up as often as usual, or as rarely happens: a description, not a guarantee."""
    from protofed.privacy.accountant import Accountant, epsilon, rounded_up, usual_uploads
    from protofed.privacy.ledger import Release

    notes = ("as many as a user makes on average", f"exceeded by a share {guarantee.delta:g} of users only")
    rows = []
    for uploads, note in zip(usual_uploads(release, guarantee.delta), notes, strict=True):
        fewer = (Release(release.noise_multiplier, 1.0, max(1, uploads)),)
        against: Any = {"adversary": "server", "trust": guarantee.trust}
        prices = {n: rounded_up(epsilon(fewer, guarantee.delta, accountant=n, **against)) for n in get_args(Accountant)}
        rows.append({"uploads": max(1, uploads), "epsilon": prices, "note": note})
    return rows


def _stds(noise_multiplier: float) -> dict[str, float]:
    from protofed.privacy.ledger import Trust
    from protofed.privacy.upload import UploadRule

    rule = UploadRule(n_prototypes=1)
    lengths = {trust: rule.replace_sensitivity if trust == "local" else rule.sensitivity for trust in get_args(Trust)}
    return {trust: round(noise_multiplier * length, 6) for trust, length in lengths.items()}


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ConfigError(f"{flag} must be one of {', '.join(allowed)}, got {value!r}")
    return value
