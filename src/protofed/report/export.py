"""The report's tables as text: Markdown, LaTeX with booktabs, or one tidy CSV; numbers as on the HTML page."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from protofed.privacy.accountant import adjacency
from protofed.privacy.ledger import Release
from protofed.report.costs import BLOCK, cost_block, cost_of, hardware_of
from protofed.report.coverage import claim_of
from protofed.report.layout import MISSING, Cell, Column, Estimate, Line, Table, to_csv
from protofed.report.prices import Price
from protofed.report.sections import Row
from protofed.report.tables import CONTINUAL, HEADLINE, Results, distances, headline, key_of

RELEASE = ("noise multiplier", "rate", "rounds", "uploads", "δ", "ε", "trust", "adjacency")
TIDY = (
    *("dataset", "method", "seeds", "table", "quantity", "candidates", "subset", "stream", "minus"),
    *("mean", "std", "low95", "high95", "text"),
)
MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>#|"})
IN_CELLS = str.maketrans({character: f"\\{character}" for character in "[]|"})  # in bold or not
LATEX = str.maketrans(
    {
        "\\": "\\textbackslash{}",
        "~": "\\textasciitilde{}",
        "^": "\\textasciicircum{}",
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "±": "$\\pm$",
        "\N{MINUS SIGN}": "$-$",
        "–": "--",
        "ε": "$\\varepsilon$",
        "δ": "$\\delta$",
        "∞": "$\\infty$",
        "×": "$\\times$",
        "<": "$<$",
        ">": "$>$",
        "|": "$|$",
    }
)
Write = Callable[[Sequence[Results], Sequence[str]], str]


def accuracy(results: Results) -> Table:
    """The page's first table with standard deviations alone: intervals beside them are too wide for paper."""
    table = headline(results)
    lines = [replace(line, cells=tuple(replace(c, interval="") for c in line.cells)) for line in table.lines]
    n = results.section.runs[0].n_candidates - 1
    told = f"± standard deviation over seeds; sampled: 1 positive and {n} negatives; full: every item"
    return replace(table, caption=f"{table.caption}, {told}; lower AF is better", lines=tuple(lines), footer=())


def differences(results: Results) -> Table | None:
    """The page's distances to the best row, which each heading names."""
    table = distances(results)
    named = [replace(c, group=f"{c.group}, {c.label}", label=c.hint) for c in table.columns] if table else []
    return table and replace(table, caption=f"{results.section.title}: {table.caption}", columns=tuple(named))


def costs(results: Results, order: Sequence[Line]) -> Table | None:
    """Bytes, trainable numbers and seconds of every row; None where no run tells any."""
    columns, cells = cost_block(results.section)
    caption = (
        f"{results.section.title}: what a client sends and receives in a round, numbers that learn, and seconds of "
        "learning, which compare only on the same hardware; blank where a method does not tell"
    )
    lines = tuple(Line(line.label, cells[line.label]) for line in order)
    return Table(f"{results.section.slug}-costs", caption, tuple(columns), lines) if columns else None


def privacy(results: Results) -> Table | None:
    """What ε is computed from, and ε, a line for each stream of each private row; None where nothing was released."""
    lines = []
    for row, price, release in _releases(results):
        seeds = "" if price.seeds == row.seeds else f", seed {', '.join(map(str, price.seeds))}"  # others differ
        cells = tuple(map(Cell, _told(price, release).values()))
        lines.append(Line(f"{row.label}{seeds}: {release.stream}", cells))
    if not lines:
        return None
    caption = (
        f"{results.section.title}: what was released, and ε per user of all streams of a row together, "
        f"against who sees what is released. {claim_of(results.section.runs)}"
    )
    return Table(f"{results.section.slug}-privacy", caption, tuple(map(Column, RELEASE)), tuple(lines))


def _releases(results: Results) -> Iterator[tuple[Row, Price, Release]]:
    """Every stream of every private row; seeds with different ledgers apart."""
    for row in results.section.rows:
        for price in results.ledgers.get(row.label, ()):
            yield from ((row, price, release) for release in price.ledger)


def _told(price: Price, release: Release) -> dict[str, str]:
    epsilon = MISSING if not price.known else "∞" if math.isinf(price.released) else f"{price.released:g}"
    noise, rate, delta = (f"{value:g}" for value in (release.noise_multiplier, release.sampling_rate, price.delta))
    words = (noise, rate, str(release.count), str(release.uploads), delta, epsilon, price.trust, adjacency(price.trust))
    return dict(zip(RELEASE, words, strict=True))


def tables(results: Results) -> tuple[Table, ...]:
    """Every table of a section that has something to show."""
    first = accuracy(results)
    found = (first, differences(results), costs(results, first.lines), privacy(results))
    return tuple(table for table in found if table)


def to_markdown(results: Sequence[Results], warned: Sequence[str]) -> str:
    """Tables in Markdown, one heading for each section; the best of a column in bold."""
    lines: list[str] = []
    for found in results:
        lines += [f"## {_md(found.section.title)}", ""]
        for table in tables(found):
            lines += [_md(table.caption), "", *_md_table(table), ""]
    if warned:
        lines += ["## Read with care", "", *(f"- {_md(line)}" for line in warned), ""]
    return "\n".join(lines)


def to_latex(results: Sequence[Results], warned: Sequence[str]) -> str:
    """Tables to \\input into a document that loads booktabs; the best of a column in bold."""
    lines = ["% needs \\usepackage{booktabs}"]
    for found in results:
        for table in tables(found):
            lines += ["", *_tex_table(table)]
    lines += ["", *(f"% {_one_line(line)}" for line in warned)] if warned else []
    return "\n".join(lines) + "\n"


def to_tidy_csv(results: Sequence[Results], warned: Sequence[str] = ()) -> str:
    """One long table of every number; what does not apply is empty."""
    records = [record for found in results for record in _records(found)]
    return to_csv(TIDY, [[record.get(column, "") for column in TIDY] for record in records])


FORMATS: dict[str, Write] = {"md": to_markdown, "latex": to_latex, "csv": to_tidy_csv}
SUFFIXES = {".html": "html", ".htm": "html", ".md": "md", ".tex": "latex", ".csv": "csv"}


def _records(results: Results) -> Iterator[dict[str, object]]:
    dataset = results.section.title
    for row in results.section.rows:
        about = {"dataset": dataset, "method": row.label, "seeds": " ".join(map(str, row.seeds))}
        estimates = results.estimates[row.label]
        for candidates, subset, metric in HEADLINE:
            where = {"table": "accuracy", "quantity": metric, "candidates": candidates, "subset": subset}
            yield about | where | _spread(estimates[key_of((candidates, subset, metric))])
        for name in CONTINUAL:
            where = {"table": "continual", "quantity": name, "candidates": "sampled", "subset": "all"}
            yield about | where | _spread(estimates[name])
        for (candidates, subset), intervals in results.intervals.items():
            gap = intervals.behind.get(row.label)
            if gap:
                where = {"table": "difference", "quantity": "ndcg@10", "candidates": candidates, "subset": subset}
                yield about | where | {"minus": intervals.best} | _spread(gap)
        cost = cost_of(row)
        for name in BLOCK:
            if math.isfinite(cost[name]):
                text = hardware_of(row) if name == "learn" else ""
                yield about | {"table": "cost", "quantity": name, "mean": cost[name], "text": text}
    for row, price, release in _releases(results):
        seeds = " ".join(map(str, price.seeds))
        about = {"dataset": dataset, "method": row.label, "seeds": seeds, "stream": release.stream}
        for name, text in _told(price, release).items():
            yield {**about, "table": "privacy", "quantity": name, "text": text}


def _spread(found: Estimate) -> dict[str, object]:
    return {"mean": found.mean, "std": found.std, "low95": found.low, "high95": found.high}


def _md_table(table: Table) -> list[str]:
    heads = [_md(" ".join(part for part in (column.group, column.label) if part)) for column in table.columns]
    lines = [f"| method | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for line in table.lines:
        words = [" ".join(filter(None, (c.text, c.spread.replace("±", "± "), c.interval))) for c in line.cells]
        shown = [f"**{told}**" if cell.best else told for cell, told in zip(line.cells, words, strict=True)]
        lines.append(f"| {_md(line.label)} | {' | '.join(told.translate(IN_CELLS) for told in shown)} |")
    return lines


def _md(text: str) -> str:
    """Text that Markdown shows as it is."""
    return _one_line(text).translate(MARKDOWN)


def _tex_table(table: Table) -> list[str]:
    body = [f"{_tex_label(line.label)} & {' & '.join(map(_tex_bold, line.cells))} \\\\" for line in table.lines]
    return [
        "\\begin{table*}[t]",
        "\\centering\\scriptsize\\setlength{\\tabcolsep}{3pt}",
        f"\\caption{{{_tex(table.caption)}}}",
        f"\\label{{tab:{table.name}}}",
        f"\\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        "\\toprule",
        *_tex_groups(table.columns),
        f"method & {' & '.join(_tex(column.label) for column in table.columns)} \\\\",
        "\\midrule",
        *body,
        "\\bottomrule",
        "\\end{tabular}",
        "\\end{table*}",
    ]


def _tex_label(label: str) -> str:
    """A row's first cell; after the line break before it, a bare bracket or star would be read as its option."""
    text = _tex(label)
    return f"{{{text}}}" if text.lstrip()[:1] in ("[", "*") else text


def _tex_groups(columns: Sequence[Column]) -> list[str]:
    """The upper headings with a rule below each; none where columns have none."""
    if not any(column.group for column in columns):
        return []
    heads, rules, first = [], [], 2
    for group, own in groupby(columns, key=lambda column: column.group):
        n = len(list(own))
        heads.append(f"\\multicolumn{{{n}}}{{c}}{{{_tex(group)}}}")
        rules += [f"\\cmidrule(lr){{{first}-{first + n - 1}}}"] if group else []
        first += n
    return [f" & {' & '.join(heads)} \\\\", "".join(rules)]


def _tex_bold(cell: Cell) -> str:
    text = f"\\textbf{{{_tex(cell.text)}}}" if cell.best else _tex(cell.text)
    return " ".join(filter(None, (text, _tex(cell.spread), _tex(cell.interval))))


def _tex(text: str) -> str:
    """Text that LaTeX sets as it is; letters beyond ASCII stay, for engines and encodings that know them."""
    return _one_line(text).translate(LATEX)


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
