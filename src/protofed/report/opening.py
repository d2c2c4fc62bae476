"""The first page: of each data set three sentences and five rows with what they share, then all rows in one table."""

import math
from collections.abc import Sequence
from dataclasses import replace

from protofed.methods.names import FLAGSHIP, OURS
from protofed.report.layout import (
    Cell,
    Column,
    Drawing,
    Estimate,
    Table,
    beside,
    number,
    some,
    table_of_estimates,
)
from protofed.report.prices import epsilon_text
from protofed.report.sections import Row
from protofed.report.tables import MAIN, NAMES, Results, key_of
from protofed.report.variants import side_rows

KEY = key_of(MAIN)
MOST_ROWS = 5
MEASURES = (MAIN, ("sampled", "all", "hr@10"), ("sampled", "novel", "ndcg@10"), ("full", "novel", "ndcg@10"))
WORDS = dict(zip(MEASURES, ("NDCG@10", "HR@10", "novel events", "novel events in the full ranking"), strict=True))
SHARED = "what leaves a device after the base block, and ε of the whole ledger against who sees it; without ε: no claim"
SPOKEN = {OURS: "ProtoFed-SP", FLAGSHIP: "ProtoFed"}
DIAL = Column("shares", "", SHARED, ranked=False, text=True)


def our_method(results: Sequence[Results]) -> str:
    """The method that the page is about: ProtoFed where it has rows, else ProtoFed-SP."""
    return FLAGSHIP if any(row.method == FLAGSHIP for found in results for row in found.section.rows) else OURS


def sentences(found: Results) -> tuple[str, str, str]:
    """Of one data set: who wins, who wins with privacy and without sharing, and where ours loses."""
    private = f"With privacy: {best_private(found)}{_sharing_nothing(found)}."
    return f"Wins: {_best(found)}; {_significant(found)}.", private, _loss(found)


def across(results: Sequence[Results]) -> str:
    """Of several data sets, one sentence: on which of them ours wins, of all rows and of those with privacy."""
    ours = our_method(results)
    leads = [found.section.title for found in results if any(row.method == ours for row in rank_rows(found)[:1])]
    private = [found.section.title for found in results if any(row.method == ours for row in _private_rows(found)[:1])]
    first, among = _of(leads, results), _of(private, results)
    return f"{SPOKEN[ours]} is first of all rows on {first}, and first of the private rows on {among}."


def digest(found: Results) -> Table:
    """Five rows: the best, ours without and with noise, the best private rival and the best trivial row."""
    rows = rank_rows(found)
    place = {row.label: 1 + sum(known_mean(found, other) > known_mean(found, row) for other in rows) for row in rows}
    columns = [_column(measure) for measure in MEASURES]
    shown = [
        (row.label, row.is_trivial, [_estimate(found, row.label, key_of(m)) for m in MEASURES]) for row in _five(found)
    ]
    table = table_of_estimates(f"{found.section.slug}-digest", "", columns, shown)
    standing = Column("place", "", f"by NDCG@10, sampled candidates, all events, of {len(rows)} rows", ranked=False)
    places = {label: [Cell(f"{place[label]} of {len(rows)}", value=float(place[label]))] for label, _, _ in shown}
    return _with_dial(beside(table, [standing], places), [found])


def overview(results: Sequence[Results]) -> Table:
    """Rows of the overall comparison: NDCG@10 and HR@10 of every data set, as Table 1 of the paper."""
    measures = MEASURES if len(results) == 1 else MEASURES[:2]
    several = len(results) > 1
    columns = [_column(m, found.section.title if several else "") for found in results for m in measures]
    by_label = {row.label: row for found in results for row in rows_to_compare(found)}
    rows = [
        (label, row.is_trivial, [_estimate(found, label, key_of(m)) for found in results for m in measures])
        for label, row in by_label.items()
    ]
    return _with_dial(table_of_estimates("overview", "", columns, rows), results)


def forest(found: Results) -> Drawing:
    """NDCG@10 of the rows of the overall comparison with their intervals over users, the best first."""
    estimates = [(row.label, found.estimates[row.label][KEY]) for row in rank_rows(found)]
    rows = tuple((label, e.mean, e.low, e.high) for label, e in estimates)
    caption = "NDCG@10, all events, sampled candidates, 95 % interval over users"
    return Drawing(
        f"{found.section.slug}-forest", caption, "dots", ("method", "mean", "low95", "high95"), rows, "NDCG@10"
    )


def rows_to_compare(found: Results) -> list[Row]:
    """The rows of the overall comparison: ablations and sweeps have tables of their own."""
    aside = side_rows(found.section)
    return [row for row in found.section.rows if row.label not in aside]


def rank_rows(found: Results) -> list[Row]:
    """Those of them with an NDCG@10, the best first."""
    rows = [row for row in rows_to_compare(found) if math.isfinite(known_mean(found, row))]
    return sorted(rows, key=lambda row: (-known_mean(found, row), row.label))


def count_left_out(results: Sequence[Results]) -> int:
    return sum(len(found.section.rows) - len(rows_to_compare(found)) for found in results)


def best_private(found: Results) -> str:
    """The best row that carries a claim, with it, and among how many."""
    rows = _private_rows(found)
    if not rows:
        return "none released anything under a ledger, so no row carries a privacy claim"
    best = rows[0]
    among = f"of {len(rows)}" if len(rows) > 1 else "the only one"
    return f"{best.label} with NDCG@10 {number(known_mean(found, best))} ({found.prices[best.label].words}), {among}"


def _sharing_nothing(found: Results) -> str:
    """The best row whose devices tell nothing after the base block."""
    silent = next((row for row in rank_rows(found) if row.share == "nothing"), None)
    return f"; sharing nothing (ε = 0): {silent.label} with {number(known_mean(found, silent))}" if silent else ""


def rivals_of_the_best(found: Results) -> dict[str, bool]:
    """Every other row of the overall comparison, and whether its distance to the best may be chance over users."""
    intervals = found.intervals[MAIN[0], MAIN[1]]
    labels = [row.label for row in rows_to_compare(found)]
    if intervals.best not in labels:
        return {}
    rivals = [label for label in labels if label in intervals.behind and label != intervals.best]
    return {label: intervals.behind[label].high >= 0 for label in rivals}


def known_mean(found: Results, row: Row) -> float:
    """The row's mean NDCG@10, the lowest there is where it has none."""
    mean = found.estimates[row.label][KEY].mean
    return mean if math.isfinite(mean) else -math.inf


def _five(found: Results) -> list[Row]:
    """The rows that a reader asks about first, filled up with the next best ones."""
    rows, private = rank_rows(found), _private_rows(found)
    free = [row for row in rows if row.is_ours and row not in private]
    asked = [
        rows[:1],
        sorted(free, key=lambda row: row.share != "nothing")[:1],
        [row for row in private if row.is_ours][:1],
        [row for row in private if not row.is_ours][:1],
        [row for row in rows if row.is_trivial][:1],
        rows,
    ]
    return list({row.label: row for some_rows in asked for row in some_rows}.values())[:MOST_ROWS]


def _private_rows(found: Results) -> list[Row]:
    """The rows whose ledger promises something, the best first."""
    return [row for row in rank_rows(found) if not math.isinf(_released(found, row.label))]


def _released(found: Results, label: str) -> float:
    return found.prices[label].released if label in found.prices else math.inf


def _best(found: Results) -> str:
    rows = rank_rows(found)
    if not rows:
        return "no row ranked sampled candidates"
    best, trivial = rows[0], next((row for row in rows if row.is_trivial), None)
    if best.is_trivial:
        return f"{best.label}, a trivial row, with NDCG@10 {number(known_mean(found, best))}"
    bar = f" (best trivial row: {trivial.label}, {number(known_mean(found, trivial))})" if trivial else ""
    return f"{best.label} with NDCG@10 {number(known_mean(found, best))}{bar}"


def _significant(found: Results) -> str:
    rivals = rivals_of_the_best(found)
    if not rivals:
        return "nothing to compare it with"
    close = [label for label, level in rivals.items() if level]
    if not close:
        return f"ahead of {f'all {len(rivals)} other rows' if len(rivals) > 1 else next(iter(rivals))} beyond chance"
    ahead = f"ahead of {len(rivals) - len(close)} of {len(rivals)} other rows beyond chance"
    return f"{ahead}, not distinguishable from {some(close)}"


def _loss(found: Results) -> str:
    """Every measure that another row leads: our best row's number, the leader's and its name."""
    method = our_method([found])
    ours, name = [row for row in rank_rows(found) if row.method == method], SPOKEN[method]
    if not ours:
        return f"There is no {name} row."
    own = found.estimates[ours[0].label]
    lost = []
    for measure in MEASURES:
        key = key_of(measure)
        label, top = max(
            ((row.label, _last(found.estimates[row.label][key].mean)) for row in rows_to_compare(found)),
            key=lambda pair: pair[1],
        )
        if top > _last(own[key].mean):
            lost.append(f"{WORDS[measure]} {number(own[key].mean)} against {number(top)} ({label})")
    if not lost:
        return f"Where {name} loses: nowhere; its best row, {ours[0].label}, leads every column."
    return f"Where {name} loses ({ours[0].label}): {', '.join(lost)}."


def _of(titles: Sequence[str], results: Sequence[Results]) -> str:
    if len(titles) == len(results):
        return f"all {len(results)} data sets"
    return f"{len(titles)} of {len(results)} data sets" + (f" ({some(titles)})" if titles else "")


def _last(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def _column(measure: tuple[str, str, str], group: str = "") -> Column:
    candidates, subset, metric = measure
    words = NAMES[metric] if measure in MEASURES[:2] else f"{subset}, {candidates}"
    return Column(words, group, f"{NAMES[metric]}, mean of A[t, t], {candidates} candidates, {subset} events")


def _estimate(found: Results, label: str, key: str) -> Estimate:
    return found.estimates[label][key] if label in found.estimates else Estimate(math.nan)


def _with_dial(table: Table, results: Sequence[Results]) -> Table:
    """The table with what each row shares and its ε before the numbers; as it is where all rows share raw events."""
    shares = {row.label: row.share for found in results for row in found.section.rows}
    spent: dict[str, list[float]] = {label: [0.0] for label, share in shares.items() if share == "nothing"}
    for found in results:
        for label, price in found.prices.items():
            spent.setdefault(label, []).append(price.released)
    if not spent:
        return table
    cells = {label: Cell(share + _epsilon(spent.get(label, ()))) for label, share in shares.items()}
    lines = tuple(replace(line, cells=(cells[line.label], *line.cells)) for line in table.lines)
    return replace(table, columns=(DIAL, *table.columns), lines=lines)


def _epsilon(values: Sequence[float]) -> str:
    """The ε of the dearest data set, with a comma before it; nothing where there is no claim."""
    if not values:
        return ""
    if any(math.isnan(value) for value in values):
        return ", unpriced"
    return f", ε = {epsilon_text(max(values)) if max(values) else '0'}"
