"""What privacy cost: ε of every row that released something, priced from its ledger."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from protofed.errors import MissingExtra
from protofed.privacy.accountant import Adversary, adjacency, epsilon, rounded_up
from protofed.privacy.ledger import Ledger, Trust
from protofed.report.layout import MISSING, Column, Line, Table, cells_of
from protofed.report.runs import Run
from protofed.report.sections import Section, grouped

SEEN = "PLD accountant, rounded up"
Terms = tuple[Ledger, float, Trust]  # ledger, δ and trust
UNPRICED = "dp-accounting is not installed, so ε is unknown here; `protofed privacy --ledger FILE` computes it"


def epsilon_text(value: float, digits: int = 2) -> str:
    """ε with some decimals, ∞ where nothing is promised, a dash where it is unknown."""
    return "∞" if math.isinf(value) else MISSING if math.isnan(value) else f"{value:.{digits}f}"


@dataclass(frozen=True, slots=True)
class Price:
    """ε of a whole ledger against who sees what is released and against the server; NaN: dp-accounting is absent."""

    ledger: Ledger
    delta: float
    trust: Trust
    released: float
    server: float
    seeds: tuple[int, ...] = ()  # of the runs with this ledger

    @property
    def known(self) -> bool:
        return not math.isnan(self.released)

    def said(self, digits: int = 2) -> str:
        """ε with what it means nothing without, or its inputs where it is unknown."""
        if not self.known:
            return inputs(self.ledger)
        return f"ε = {epsilon_text(self.released, digits)}, δ = {self.delta:g}, {self.trust} trust"


def price_of(ledger: Ledger, delta: float, trust: Trust) -> Price:
    """What a ledger comes to."""
    released, server = (_priced(ledger, delta, trust, adversary) for adversary in ("release", "server"))
    return Price(ledger, delta, trust, released, server)


def ledgers_of(section: Section) -> dict[str, tuple[Price, ...]]:
    """What every row released and its price, by its label; seeds with different ledgers apart."""
    released = {row.label: grouped((run for run in row.runs if run.releases), terms_of) for row in section.rows}
    priced = {terms: price_of(*terms) for terms in dict.fromkeys(chain.from_iterable(released.values()))}
    return {
        label: tuple(replace(priced[terms], seeds=tuple(run.seed for run in runs)) for terms, runs in own.items())
        for label, own in released.items()
        if own
    }


def terms_of(run: Run) -> Terms:
    """All that ε is computed from."""
    return run.releases, float(run.settings.get("privacy.delta", 1e-5)), run.trust


def equal_groups(prices: Mapping[str, Price]) -> dict[str, list[str]]:
    """Rows by budget: the same ε to one decimal, δ and trust; without dp-accounting, the same releases.

    A ledger without noise promises nothing and is in no group.
    """
    bounded = [label for label, price in prices.items() if not math.isinf(price.released)]
    return dict(sorted(grouped(bounded, lambda label: prices[label].said(1)).items()))


def inputs(ledger: Ledger) -> str:
    """What ε is computed from: every stream's noise, sampling rate and rounds."""
    parts = [f"{r.stream}: noise {r.noise_multiplier:g}, rate {r.sampling_rate:g}, {r.count} rounds" for r in ledger]
    return "; ".join(parts)


def privacy_table(prices: Sequence[tuple[str, str, Price]]) -> Table | None:
    """Private rows as (data set, label, price), ε against both adversaries; None where nothing was released."""
    if not prices:
        return None
    several = len({title for title, _, _ in prices}) > 1
    columns = (
        Column("who sees the releases", "ε against", SEEN, lower_is_better=True, ranked=False, show=epsilon_text),
        Column("the server", "ε against", "central trust promises nothing against it", ranked=False, show=epsilon_text),
        Column("δ", ranked=False, show="{:g}".format),
        *(Column(label, ranked=False, text=True) for label in ("trust", "neighbouring logs", "releases")),
    )
    lines = []
    for title, label, found in prices:
        values = (found.released, found.server, found.delta, found.trust, adjacency(found.trust), inputs(found.ledger))
        lines.append(Line(f"{title}: {label}" if several else label, cells_of(columns, values)))
    return Table("prices", "", columns, tuple(lines), corner="private row")


def _priced(ledger: Ledger, delta: float, trust: Trust, adversary: Adversary) -> float:
    """ε rounded up, infinite where nothing is promised, NaN where it cannot be computed here."""
    try:
        found = epsilon(ledger, delta, adversary=adversary, trust=trust)
    except MissingExtra:
        return math.nan
    up = rounded_up(found)
    return math.inf if up is None else up
