"""The first page: three sentences (several data sets: verdicts.py), one table and one figure, made from the numbers."""

import math
from collections.abc import Sequence

from protofed.report.layout import Cell, Column, Drawing, Estimate, Table, beside, number, table_of_estimates, to_csv
from protofed.report.plots import Dot, dot_plot
from protofed.report.prices import epsilon_text
from protofed.report.sections import Row
from protofed.report.svg import SERIES, Stroke
from protofed.report.tables import MAIN, Results, key_of
from protofed.report.variants import side_rows

KEY = key_of(MAIN)
MOST_DOTS = 14  # rows of the figure; the best ones, and all of ProtoFed-SP and all trivial ones among them
OURS, OTHERS, TRIVIAL = Stroke(SERIES[1], (), "D"), Stroke(SERIES[0], (), "o"), Stroke(SERIES[6], (), "s")
SHORT = ((MAIN, "NDCG@10"), (("sampled", "all", "hr@10"), "HR@10"))
LONG = (*SHORT, (("full", "novel", "ndcg@10"), "NDCG@10 full, novel"))


def sentences(found: Results) -> tuple[str, str, str]:
    """Of a single data set: the best private row, the best row of all, and what of it is beyond chance."""
    private, overall, sure = best_private(found), _best(found), _significant(found)
    return f"Best private row: {private}.", f"Best row of all: {overall}.", f"Beyond chance over users: {sure}."


def overview(results: Sequence[Results]) -> Table:
    """Rows of the overall comparison: NDCG@10 and HR@10 of every data set, as Table 1 of the paper."""
    measures = LONG if len(results) == 1 else SHORT
    columns = [
        Column(
            words,
            found.section.title if len(results) > 1 else "",
            f"mean of A[t, t], {measure[0]}, {measure[1]} events",
        )
        for found in results
        for measure, words in measures
    ]
    by_label = {row.label: row for found in results for row in rows_to_compare(found)}
    rows = [
        (label, row.is_trivial, [_estimate(found, label, key_of(m)) for found in results for m, _ in measures])
        for label, row in by_label.items()
    ]
    table = table_of_estimates("overview", "", columns, rows)
    return beside(table, *_epsilons(results, list(by_label)))


def forest(found: Results) -> Drawing:
    """NDCG@10 of the leading rows with their intervals over users."""
    name = f"{found.section.slug}-forest"
    rows = sorted(rows_to_compare(found), key=lambda row: (-known_mean(found, row), row.label))
    ours = [row for row in rows if row.is_ours or row.is_trivial]
    shown = [row for row in rows if row in ours or row in rows[: max(0, MOST_DOTS - len(ours))]][:MOST_DOTS]
    dots, tidy = [], []
    for row in shown:
        e = found.estimates[row.label][KEY]
        look = OURS if row.is_ours else TRIVIAL if row.is_trivial else OTHERS
        dots.append(Dot(row.label, look, e.mean, e.low, e.high, strong=row.is_ours))
        tidy.append((row.label, e.mean, e.low, e.high))
    left = len(rows) - len(shown)
    caption = f"{found.section.title}: NDCG@10, all events, sampled candidates, 95 % interval over users"
    caption += f"; {left} more in the table" if left else ""
    svg = dot_plot(dots, x="NDCG@10", name=name, about=caption)
    return Drawing(name, caption, svg, to_csv(["method", "mean", "low95", "high95"], tidy))


def rows_to_compare(found: Results) -> list[Row]:
    """The rows of the overall comparison: ablations and sweeps have tables of their own."""
    aside = side_rows(found.section)
    return [row for row in found.section.rows if row.label not in aside]


def count_left_out(results: Sequence[Results]) -> int:
    return sum(len(found.section.rows) - len(rows_to_compare(found)) for found in results)


def best_private(found: Results) -> str:
    """The best row that carries a claim, with it, and among how many."""
    prices = found.prices
    promised = [label for label, price in prices.items() if not math.isinf(price.released)]
    rows = [row for row in rows_to_compare(found) if row.label in promised and math.isfinite(known_mean(found, row))]
    if not rows:
        return "none released anything under a ledger, so no row carries a privacy claim"
    best = max(rows, key=lambda row: known_mean(found, row))
    among = f"of {len(rows)}" if len(rows) > 1 else "the only one"
    return f"{best.label} with NDCG@10 {number(known_mean(found, best))} ({prices[best.label].words}), {among}"


def _best(found: Results) -> str:
    rows = [row for row in rows_to_compare(found) if math.isfinite(known_mean(found, row))]
    if not rows:
        return "no row ranked sampled candidates"
    best = max(rows, key=lambda row: known_mean(found, row))
    trivial = max((row for row in rows if row.is_trivial), key=lambda row: known_mean(found, row), default=None)
    if best.is_trivial:
        return f"{best.label}, a trivial row, with NDCG@10 {number(known_mean(found, best))}"
    bar = f" (best trivial row: {trivial.label}, {number(known_mean(found, trivial))})" if trivial else ""
    return f"{best.label} with NDCG@10 {number(known_mean(found, best))}{bar}"


def _significant(found: Results) -> str:
    best, rivals = found.intervals[MAIN[0], MAIN[1]].best, rivals_of_the_best(found)
    if not rivals:
        return "nothing to compare with"
    close = [label for label, level in rivals.items() if level]
    if not close:
        return f"{best} is ahead of {f'all {len(rivals)} other rows' if len(rivals) > 1 else next(iter(rivals))}"
    ahead = f"{best} is ahead of {len(rivals) - len(close)} of {len(rivals)} other rows"
    return f"{ahead}, and not distinguishable from {', '.join(close)}"


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


def _estimate(found: Results, label: str, key: str) -> Estimate:
    return found.estimates[label][key] if label in found.estimates else Estimate(math.nan)


def _epsilons(results: Sequence[Results], labels: Sequence[str]) -> tuple[list[Column], dict[str, list[Cell]]]:
    """A column of ε where something was released; the dearest data set counts."""
    prices: dict[str, list[float]] = {}
    for found in results:
        for label, price in found.prices.items():
            prices.setdefault(label, []).append(price.released)
    if not prices:
        return [], {label: [] for label in labels}
    cells = {label: [_epsilon_cell(prices.get(label, ()))] for label in labels}
    return [
        Column("ε", "", "of the whole ledger, against who sees what is released; blank: no claim", ranked=False)
    ], cells


def _epsilon_cell(values: Sequence[float]) -> Cell:
    if not values:
        return Cell("")
    value = math.nan if any(math.isnan(value) for value in values) else max(values)
    return Cell("unpriced" if math.isnan(value) else epsilon_text(value), value=value)
