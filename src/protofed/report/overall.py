"""The overall comparison again, among rows that spent the same privacy budget."""

from collections.abc import Mapping, Sequence

from protofed.report.costs import cost_block
from protofed.report.layout import Cell, Column, Missing, Part, Table, beside, table_of_estimates
from protofed.report.prices import UNPRICED, equal_groups
from protofed.report.sections import slug
from protofed.report.tables import CONTINUAL, MAIN, NAMES, Results, headline, key_of
from protofed.report.variants import side_rows

TITLE = "At equal ε"
MEASURES = (MAIN, ("sampled", "all", "hr@10"), ("sampled", "novel", "ndcg@10"), ("full", "novel", "ndcg@10"))


def headline_with_costs(results: Results) -> Table:
    """The headline table, costs at its right."""
    columns, cells = cost_block(results.section)
    return beside(headline(results), columns, cells)


def equal_epsilon(results: Results) -> Part | Missing:
    """The private rows of each budget that at least two rows share."""
    prices = results.prices
    if not prices:
        return Missing(TITLE, "no row released anything under a ledger")
    aside = side_rows(results.section, noise=False)
    prices = {label: price for label, price in prices.items() if label not in aside}
    shared = {words: labels for words, labels in equal_groups(prices).items() if len(labels) > 1}
    if not shared:
        alone = "; ".join(f"{label}: {found.words}" for label, found in prices.items())
        return Missing(TITLE, f"no two private rows share a budget ({alone})")
    costs = cost_block(results.section)
    tables = tuple(_table(results, words, labels, costs) for words, labels in shared.items())
    note = "Rows whose ledgers come to the same ε (to one decimal), δ and trust, against who sees what is released."
    if not all(found.known for found in prices.values()):
        note = f"{UNPRICED}: rows are grouped by what ε is computed from."
    return Part(f"{results.section.slug}-equal-epsilon", TITLE, note, tables)


def _table(
    results: Results, words: str, labels: Sequence[str], costs: tuple[list[Column], Mapping[str, Sequence[Cell]]]
) -> Table:
    keys = [*(key_of(measure) for measure in MEASURES), "AF", "BWT"]
    columns = [Column(f"{candidates}, {subset}", NAMES[metric]) for candidates, subset, metric in MEASURES]
    columns += [CONTINUAL["AF"], CONTINUAL["BWT"]]
    rows = [(label, False, [results.estimates[label][key] for key in keys]) for label in labels]
    name = f"{results.section.slug}-equal-{slug(words)}"
    table = table_of_estimates(name, words, columns, rows)
    return beside(table, costs[0], {label: costs[1][label] for label in labels})
