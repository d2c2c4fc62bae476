"""The overall comparison: all rows with what they cost, then those alone that spent the same privacy or bytes."""

import math

from protofed.methods.names import OURS
from protofed.report.costs import COLUMNS, WIRE, cheap, cost_block, cost_of, size
from protofed.report.layout import Column, Line, Missing, Part, Table, beside, cells_of, table_of_estimates
from protofed.report.prices import UNPRICED, equal_groups
from protofed.report.runs import MAIN
from protofed.report.sections import slug
from protofed.report.tables import CONTINUAL, MEASURES, NAMES, Results, headline, key_of
from protofed.report.variants import side_rows


def headline_with_costs(results: Results) -> Table:
    """The headline table, costs at its right."""
    return beside(headline(results), *cost_block(results.section))


def equal_epsilon(results: Results) -> Part | Missing:
    """The private rows of each budget that at least two rows share."""
    title, section = "At equal ε", results.section
    if not results.prices:
        return Missing(title, "no row released anything under a ledger")
    aside = side_rows(section, noise=False)
    prices = {label: price for label, price in results.prices.items() if label not in aside}
    shared = {words: labels for words, labels in equal_groups(prices).items() if len(labels) > 1}
    if not shared:
        alone = "; ".join(f"{label}: {found.words}" for label, found in prices.items())
        return Missing(title, f"no two private rows share a budget ({alone})")
    keys = [*map(key_of, MEASURES), "AF", "BWT"]
    columns = [Column(f"{candidates}, {subset}", NAMES[metric]) for candidates, subset, metric in MEASURES]
    columns += [CONTINUAL["AF"], CONTINUAL["BWT"]]
    costs = cost_block(section)
    tables = []
    for words, labels in shared.items():
        rows = [(label, False, [results.estimates[label][key] for key in keys]) for label in labels]
        table = table_of_estimates(f"{section.slug}-equal-{slug(words)}", words, columns, rows)
        tables.append(beside(table, *costs))
    note = "Rows whose ledgers come to the same ε (to one decimal), δ and trust, against who sees what is released."
    if not all(found.known for found in prices.values()):
        note = f"{UNPRICED}: rows are grouped by what ε is computed from."
    return Part(f"{section.slug}-equal-epsilon", title, note, tuple(tables))


def equal_bytes(results: Results) -> Part | Missing:
    """Rows by what a client sends and receives in a round, ProtoFed-SP's between two lines."""
    title, section = "At equal bytes", results.section
    aside = side_rows(section)
    costs = [(row, cost_of(row)) for row in section.rows if row.label not in aside]
    told = [(row, cost) for row, cost in costs if math.isfinite(cost.traffic)]
    if len(told) < 2 or not any(row.is_ours for row, _ in told):
        ours = any(row.is_ours for row, _ in costs)
        silent = f"{OURS} does not tell its bytes" if ours else f"there is no {OURS} row"
        return Missing(title, silent if told else "no row tells bytes_up and bytes_down")
    columns = (
        cheap("both ways", WIRE, "up and down together", show=size),
        COLUMNS["bytes_up"],
        COLUMNS["bytes_down"],
        Column("sampled, all", "NDCG@10"),
        Column("full, novel", "NDCG@10"),
    )
    lines = []
    for row, cost in sorted(told, key=lambda pair: (pair[1].traffic, pair[0].label)):
        accuracy = [results.estimates[row.label][key_of(measure)].mean for measure in (MAIN, MEASURES[-1])]
        values = [cost.traffic, cost.bytes_up, cost.bytes_down, *accuracy]
        lines.append(Line(row.label, cells_of(columns, values), marked=row.is_ours))
    name = f"{section.slug}-equal-bytes"
    note = (
        "Fewest bytes first; the rows above ProtoFed-SP's lines send less, those below more. Rows that send nothing or "
        "do not tell are left out."
    )
    return Part(name, title, note, (Table(f"{name}-table", "", columns, tuple(lines)),))
