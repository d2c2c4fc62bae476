"""The first page: of each data set three sentences and five rows with what they share, then all rows in one table."""

import math
from collections.abc import Sequence
from dataclasses import replace

from protofed.experiments.matrices import Measure
from protofed.methods.names import FLAGSHIP, OURS
from protofed.report.layout import Cell, Column, Drawing, Table, beside, number, some
from protofed.report.prices import epsilon_text
from protofed.report.runs import MAIN
from protofed.report.sections import Row
from protofed.report.tables import MEASURES, NAMES, Results, key_of, measured
from protofed.report.variants import compared

MOST_ROWS = 5
WORDS = dict(zip(MEASURES, ("NDCG@10", "HR@10", "novel events", "novel events in the full ranking"), strict=True))
SHARED = "what leaves a device after the base block, and ε of the whole ledger against who sees it; without ε: no claim"
SPOKEN = {OURS: "ProtoFed-SP", FLAGSHIP: "ProtoFed"}
DIAL = Column("shares", "", SHARED, ranked=False, text=True)


def our_method(results: Sequence[Results]) -> str:
    """The method that the page is about: ProtoFed where it has rows, else ProtoFed-SP."""
    return FLAGSHIP if any(row.method == FLAGSHIP for found in results for row in found.section.rows) else OURS


def sentences(found: Results) -> tuple[str, str, str]:
    """Of one data set: who wins, who wins with privacy and without sharing, and where ours loses."""
    return f"Wins: {_best(found)}; {_significant(found)}.", f"With privacy: {_private(found)}.", _loss(found)


def across(results: Sequence[Results]) -> str:
    """Of several data sets, one sentence: on which of them ours wins, of all rows and of those with privacy."""
    ours, spoken = our_method(results), []
    for choose in (rank_rows, _private_rows):
        titles = [found.section.title for found in results if any(row.method == ours for row in choose(found)[:1])]
        share = f"all {len(results)}" if len(titles) == len(results) else f"{len(titles)} of {len(results)}"
        named = f" ({some(titles)})" if 0 < len(titles) < len(results) else ""
        spoken.append(f"{share} data sets{named}")
    return f"{SPOKEN[ours]} is first of all rows on {spoken[0]}, and first of the private rows on {spoken[1]}."


def digest(found: Results) -> Table:
    """Five rows: the best, ours without and with noise, the best private rival and the best trivial row."""
    rows, shown = rank_rows(found), _five(found)
    columns = [(_column(measure), found.of(key_of(measure))) for measure in MEASURES]
    table = measured(f"{found.section.slug}-digest", "", columns, shown)
    place = {row.label: 1 + sum(found.mean(other) > found.mean(row) for other in rows) for row in shown}
    standing = Column("place", "", f"by NDCG@10, sampled candidates, all events, of {len(rows)} rows", ranked=False)
    cells = {label: [Cell(f"{n} of {len(rows)}", value=float(n))] for label, n in place.items()}
    return _with_dial(beside(table, [standing], cells), [found])


def overview(results: Sequence[Results]) -> Table:
    """Rows of the overall comparison: NDCG@10 and HR@10 of every data set, as Table 1 of the paper."""
    several = len(results) > 1
    measures = MEASURES[:2] if several else MEASURES
    columns = [
        (_column(m, found.section.title if several else ""), found.of(key_of(m))) for found in results for m in measures
    ]
    rows = {row.label: row for found in results for row in compared(found.section)}
    return _with_dial(measured("overview", "", columns, [*rows.values()]), results)


def forest(found: Results) -> Drawing:
    """NDCG@10 of the rows of the overall comparison with their intervals over users, the best first."""
    estimates = [(row.label, found.estimates[row.label][key_of(MAIN)]) for row in rank_rows(found)]
    rows = tuple((label, e.mean, e.low, e.high) for label, e in estimates)
    caption = "NDCG@10, all events, sampled candidates, 95 % interval over users"
    header = ("method", "mean", "low95", "high95")
    return Drawing(f"{found.section.slug}-forest", caption, "dots", header, rows, "NDCG@10")


def rank_rows(found: Results) -> list[Row]:
    """The rows of the overall comparison with an NDCG@10, the best first."""
    return found.ranked([row for row in compared(found.section) if math.isfinite(found.mean(row))])


def _private(found: Results) -> str:
    """The best row that carries a claim, with it, and among how many; and the best one whose devices tell nothing."""
    rows, words = _private_rows(found), "none released anything under a ledger, so no row carries a privacy claim"
    if rows:
        claim = found.prices[rows[0].label].said()
        among = f"of {len(rows)}" if len(rows) > 1 else "the only one"
        words = f"{rows[0].label} with NDCG@10 {number(found.mean(rows[0]))} ({claim}), {among}"
    silent = next((row for row in rank_rows(found) if row.share == "nothing"), None)
    return f"{words}; sharing nothing (ε = 0): {silent.label} with {number(found.mean(silent))}" if silent else words


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
    promises = {label for label, price in found.prices.items() if not math.isinf(price.released)}
    return [row for row in rank_rows(found) if row.label in promises]


def _best(found: Results) -> str:
    rows = rank_rows(found)
    if not rows:
        return "no row ranked sampled candidates"
    best, trivial = rows[0], next((row for row in rows if row.is_trivial), None)
    if best.is_trivial:
        return f"{best.label}, a trivial row, with NDCG@10 {number(found.mean(best))}"
    bar = f" (best trivial row: {trivial.label}, {number(found.mean(trivial))})" if trivial else ""
    return f"{best.label} with NDCG@10 {number(found.mean(best))}{bar}"


def _significant(found: Results) -> str:
    """How many rows the best one is ahead of, and those whose distance to it may be chance over users."""
    intervals = found.intervals[MAIN[0], MAIN[1]]
    labels = [row.label for row in compared(found.section)]
    rivals = [label for label in labels if label in intervals.behind and label != intervals.best]
    if not rivals or intervals.best not in labels:
        return "nothing to compare it with"
    close = [label for label in rivals if intervals.behind[label].high >= 0]
    if not close:
        return f"ahead of {f'all {len(rivals)} other rows' if len(rivals) > 1 else rivals[0]} beyond chance"
    ahead = f"ahead of {len(rivals) - len(close)} of {len(rivals)} other rows beyond chance"
    return f"{ahead}, not distinguishable from {some(close)}"


def _loss(found: Results) -> str:
    """Every measure that another row leads: our best row's number, the leader's and its name."""
    method = our_method([found])
    ours, name = next((row for row in rank_rows(found) if row.method == method), None), SPOKEN[method]
    if ours is None:
        return f"There is no {name} row."
    lost = []
    for measure, words in WORDS.items():
        leader = found.best(compared(found.section), measure)
        own, top = found.mean(ours, measure), found.mean(leader, measure)
        if top > own:
            lost.append(f"{words} {number(own)} against {number(top)} ({leader.label})")
    if not lost:
        return f"Where {name} loses: nowhere; its best row, {ours.label}, leads every column."
    return f"Where {name} loses ({ours.label}): {', '.join(lost)}."


def _column(measure: Measure, group: str = "") -> Column:
    candidates, subset, metric = measure
    words = NAMES[metric] if measure in MEASURES[:2] else f"{subset}, {candidates}"
    return Column(words, group, f"{NAMES[metric]}, mean of A[t, t], {candidates} candidates, {subset} events")


def _with_dial(table: Table, results: Sequence[Results]) -> Table:
    """The table with what each row shares and its ε before the numbers; as it is where all rows share raw events."""
    shares = {row.label: row.share for found in results for row in found.section.rows}
    spent = {label: [0.0] for label, share in shares.items() if share == "nothing"}
    for label, price in (pair for found in results for pair in found.prices.items()):
        spent.setdefault(label, []).append(price.released)
    if not spent:
        return table
    words = {label: share + (_epsilon(spent[label]) if label in spent else "") for label, share in shares.items()}
    lines = tuple(replace(line, cells=(Cell(words[line.label]), *line.cells)) for line in table.lines)
    return replace(table, columns=(DIAL, *table.columns), lines=lines)


def _epsilon(values: Sequence[float]) -> str:
    """The ε of the dearest data set, with a comma before it."""
    if any(math.isnan(value) for value in values):
        return ", unpriced"
    return f", ε = {epsilon_text(max(values)) if max(values) else '0'}"
